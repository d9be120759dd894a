// What a layer does between its projections and its attention, in one launch: norm and rotary of queries, index queries
// and keys; keys and values to their pages; raw index keys to the ring; pooled keys of the blocks that rows close to
// theirs. Compiles for sm_70 and newer without other headers.
//
// A warp takes a few heads of one row, or the row's index key. Steps round one by one, as Transformers' layer rounds
// them; only the order in which a norm's squares are summed is its own (`shrink_of` in `shares.cuh`; `pool_block` has
// that of `write.cu`), the same for every head, so that a number depends on nothing but its head.
//
// Which raw keys lie in the ring, and who writes there. Rows of a request are consecutive tokens next to each other,
// with padding between them at worst. So at most one block per request is closed here that began in an earlier call:
// the one that the request's first row is in. The row that closes it reads the ring. Slots that it reads and that later
// rows go to are written by its own warp, after it has read them; every other slot by the warp of the row that goes
// there. So no warp waits for another, and reading and writing fit in one launch.
//
// prepare.py defines, as codes of `Kind`: NEW_KIND of all new numbers, of the ring and of the results, KV_KIND and
// INDEX_KIND of the caches, WEIGHT_KIND of norms, ANGLE_KIND of cos and sin; and HEAD_DIM, INDEX_DIM, ROTARY_DIM,
// BLOCK_TOKENS, and WIDE (see `shares.cuh`).

#include "numbers.cuh"
#include "paging.cuh"
#include "shares.cuh"

static constexpr int WARPS = 8;  // of a program
static constexpr int SCAN_LOADS = 8;
static constexpr int SCAN = WARP * SCAN_LOADS;  // rows that a warp looks at in one go
static constexpr int DIMS = 4;                  // of a pooled key that a lane works on at a time
static constexpr int HALF = ROTARY_DIM / 2;

// Floats of a warp: cos and sin, then what rotates of a head, or a pooled key and the rows of its tokens.
static constexpr int SCRATCH = ROTARY_DIM + INDEX_DIM + BLOCK_TOKENS;

extern __shared__ i64 dynamic[];  // [WARPS, SCRATCH] float

// New numbers [rows, heads, dim]. Strides in bytes.
struct New {
    const char* at;
    i64 row, head;
};

// A pool [pages, places, heads, dim]. Strides in bytes. `scales` [heads], null where all have `scale`.
struct Pool {
    char* at;
    i64 page, place, head;
    const float* scales;
    float scale;
    int places;
};

struct Batch {
    const int* request;   // [rows], -1 for padding
    const int* position;  // [rows], negative for padding
    int rows, requests, max_position, unused;

    // A row past the bound that the call was sized for counts as padding.
    __device__ __forceinline__ bool live(int owner, int at) const {
        return is_live(owner, at, requests) && at <= max_position;
    }
};

// cos and sin [rows, HALF], and those of the first token of each block of the ring [requests, ring blocks, 2, HALF]; or
// cos and sin [positions, HALF], and `kept` is null. Strides in bytes.
struct Angles {
    const char* cos;
    const char* sin;
    i64 cos_row, sin_row;
    char* kept;
    i64 kept_request, kept_block, kept_sin;
};

// [requests, tokens, INDEX_DIM]. Strides in bytes. `wraps` where a position may pass the last slot.
struct Ring {
    char* at;
    i64 request, token;
    int tokens, wraps;
};

struct Row {
    int row, owner, at, lane;
    float* scratch;
};

// As all new numbers are rounded.
__device__ __forceinline__ float nearest(float number) { return float_of<NEW_KIND>(bits_of<NEW_KIND>(number)); }

// Fetches cos to scratch[0, HALF) and sin to scratch[HALF, ROTARY_DIM), rounded as what they rotate.
__device__ __forceinline__ void load_angles(const char* cos, const char* sin, int lane, float* scratch) {
    typedef Element<ANGLE_KIND>::Bits Bits;
    for (int j = lane; j < HALF; j += WARP) {
        scratch[j] = nearest(float_of<ANGLE_KIND>(reinterpret_cast<const Bits*>(cos)[j]));
        scratch[HALF + j] = nearest(float_of<ANGLE_KIND>(reinterpret_cast<const Bits*>(sin)[j]));
    }
    __syncwarp();
}

// Dimension d < ROTARY_DIM of a rotated head, whose dimensions that rotate are in `turned`. Both products and their sum
// round.
__device__ __forceinline__ float rotated(float number, int d, const float* scratch, const float* turned) {
    const bool low = d < HALF;
    const int j = low ? d : d - HALF;
    const float crossed = low ? -turned[d + HALF] : turned[j];
    return nearest(__fadd_rn(nearest(__fmul_rn(number, scratch[j])), nearest(__fmul_rn(crossed, scratch[HALF + j]))));
}

// Where head 0 of a row's token is in a pool; null on a hole.
__device__ __forceinline__ char* place_of(const Row& me, const Pool& pool, const PageTable& table) {
    const int page = table.page(me.owner, me.at / pool.places);
    return page < 0 ? nullptr : pool.at + page * pool.page + me.at % pool.places * pool.place;
}

// Norm and rotary of heads `first` to `end` of a row, stored at the token's place in a pool, or, where that is not
// `paged`, at the row's place in a result [rows, heads, DIM].
template <int DIM>
__device__ __forceinline__ void prepare_heads(
    const Row& me, const Batch& batch, New from, const void* norm_weight, const Angles& angles, float eps, Pool pool,
    bool paged, const PageTable& table, int first, int end) {
    typedef typename Element<NEW_KIND>::Bits Bits;
    typedef typename Element<WEIGHT_KIND>::Bits WeightBits;
    typedef Share<DIM> Of;
    // Asked for before it is known whether the row counts: the answers arrive together.
    const char* head = from.at + me.row * from.row + first * from.head;
    Bits held[Of::COUNT];
    WeightBits weight_bits[Of::COUNT];
    load_share<Bits, DIM>(head, me.lane, held);
    load_share<WeightBits, DIM>(norm_weight, me.lane, weight_bits);
    if (!batch.live(me.owner, me.at)) return;
    char* const to = paged ? place_of(me, pool, table) : pool.at + me.row * pool.place;
    if (!to) return;
    const int angle = angles.kept ? me.row : me.at;
    load_angles(angles.cos + angle * angles.cos_row, angles.sin + angle * angles.sin_row, me.lane, me.scratch);
    float weight[Of::COUNT];
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) weight[i] = __fadd_rn(1.0f, float_of<WEIGHT_KIND>(weight_bits[i]));
    float* const turned = me.scratch + ROTARY_DIM;
#pragma unroll 1
    for (int h = first; h < end; ++h) {
        float numbers[Of::COUNT];
#pragma unroll
        for (int i = 0; i < Of::COUNT; ++i) numbers[i] = float_of<NEW_KIND>(held[i]);
        head += from.head;
        if (h + 1 < end) load_share<Bits, DIM>(head, me.lane, held);
        const float shrink = shrink_of<DIM>(numbers, eps);
#pragma unroll
        for (int i = 0; i < Of::COUNT; ++i) {
            numbers[i] = nearest(__fmul_rn(__fmul_rn(numbers[i], shrink), weight[i]));
            const int d = Of::dim(me.lane, i);
            if (d < ROTARY_DIM) turned[d] = numbers[i];
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < Of::COUNT; ++i) {
            const int d = Of::dim(me.lane, i);
            if (d < ROTARY_DIM) numbers[i] = rotated(numbers[i], d, me.scratch, turned);
        }
        __syncwarp();
        char* const place = to + h * pool.head;
        if (KV_KIND != NEW_KIND && paged) {
            store_numbers<KV_KIND, DIM>(place, me.lane, numbers, pool.scales ? pool.scales[h] : pool.scale);
        } else {
            store_numbers<NEW_KIND, DIM>(place, me.lane, numbers, 1.0f);
        }
    }
}

// Values go as they are, or become FP8.
__device__ __forceinline__ void write_values(
    const Row& me, const Batch& batch, New from, Pool pool, const PageTable& table, int first, int end) {
    typedef Element<NEW_KIND>::Bits Bits;
    constexpr int COUNT = Share<HEAD_DIM>::COUNT;
    const char* head = from.at + me.row * from.row + first * from.head;
    Bits held[COUNT];
    load_share<Bits, HEAD_DIM>(head, me.lane, held);
    if (!batch.live(me.owner, me.at)) return;
    char* const to = place_of(me, pool, table);
    if (!to) return;
#pragma unroll 1
    for (int h = first; h < end; ++h) {
        Bits moved[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) moved[i] = held[i];
        head += from.head;
        if (h + 1 < end) load_share<Bits, HEAD_DIM>(head, me.lane, held);
        char* const place = to + h * pool.head;
        if constexpr (NEW_KIND == KV_KIND) {
            store_share<Bits, HEAD_DIM>(place, me.lane, moved);
        } else {
            float numbers[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) numbers[i] = float_of<NEW_KIND>(moved[i]);
            store_numbers<KV_KIND, HEAD_DIM>(place, me.lane, numbers, pool.scales ? pool.scales[h] : pool.scale);
        }
    }
}

// See `farthest`. Few warps come here, so it is not inlined.
__device__ __attribute__((noinline)) int farthest_row(
    const int* request, const int* position, int rows, int requests, int max_position, int row, int owner, int step,
    int lane) {
    const Batch batch = {request, position, rows, requests, max_position, 0};
    const int most = step > 0 ? batch.rows - 1 - row : row;
    int reached = 0;
    const auto look = [&](int distance) {
        if (distance > most) return false;
        const int from = row + step * distance, other = batch.request[from];
        if (!batch.live(other, batch.position[from])) return false;
        if (other == owner) reached = max(reached, distance);
        return other != owner;
    };
    if (most > SCAN) {
        // Rows of a request stand next to each other: one that is met far away speaks for all between.
        const int stride = (most + SCAN - 1) / SCAN;
#pragma unroll
        for (int i = 0; i < SCAN_LOADS; ++i) look((1 + i * WARP + lane) * stride);
    }
    const auto agree = [&] {
#pragma unroll
        for (int other = WARP / 2; other > 0; other /= 2) reached = max(reached, __shfl_sync(ALL, reached, lane ^ other));
    };
    agree();
    for (int start = reached + 1; start <= most; start += SCAN) {
        bool past = false;
#pragma unroll
        for (int i = 0; i < SCAN_LOADS; ++i) past |= look(start + i * WARP + lane);
        if (__any_sync(ALL, past)) break;
    }
    agree();
    return row + step * reached;
}

// The last row of a live row's request (`step` 1), or its first (-1).
__device__ __forceinline__ int farthest(const Batch& batch, const Row& me, int step) {
    return farthest_row(
        batch.request, batch.position, batch.rows, batch.requests, batch.max_position, me.row, me.owner, step, me.lane);
}

// The rows of a closed block's tokens, -1 for those of earlier calls, found backwards from the row that closes it.
// Returns whether there are any of these.
__device__ __forceinline__ bool find_rows(const Row& me, const Batch& batch, int first, int* rows_of) {
    bool missing = false;
    for (int t = me.lane; t < BLOCK_TOKENS; t += WARP) {
        const int from = me.row - (BLOCK_TOKENS - 1 - t);
        const bool here = from >= 0 && batch.request[from] == me.owner && batch.position[from] == first + t;
        rows_of[t] = here ? from : -1;
        missing |= !here;
    }
    __syncwarp();
    if (!__any_sync(ALL, missing)) return false;
    // Padding may stand between the rows.
    for (int end = me.row; end > 0; end -= SCAN) {
        bool past = false;
#pragma unroll
        for (int i = 0; i < SCAN_LOADS; ++i) {
            const int from = end - 1 - i * WARP - me.lane;
            const int other = from >= 0 ? batch.request[from] : -1, at = from >= 0 ? batch.position[from] : -1;
            if (!batch.live(other, at)) continue;
            if (other != me.owner || at < first) {
                past = true;
            } else if (at < me.at) {
                rows_of[at - first] = from;
            }
        }
        if (__any_sync(ALL, past)) break;
    }
    __syncwarp();
    missing = false;
    for (int t = me.lane; t < BLOCK_TOKENS; t += WARP) missing |= rows_of[t] < 0;
    return __any_sync(ALL, missing);
}

__device__ __forceinline__ char* slot_of(const Ring& ring, int owner, int token) {
    return ring.at + owner * ring.request + token % ring.tokens * ring.token;
}

__device__ __forceinline__ char* kept_angles(const Angles& angles, const Ring& ring, int owner, int token) {
    return angles.kept + owner * angles.kept_request + token % ring.tokens / BLOCK_TOKENS * angles.kept_block;
}

// The key of a block whose last token is a row: rope(rms(round(mean in FP32))), each rounded. Sums as in `write.cu`:
// tokens in ascending order; squares by lane, dimensions 32 apart in ascending order, then over lanes 16, 8, 4, 2 and 1
// apart.
__device__ __forceinline__ void pool_block(
    const Row& me, New raw_keys, const Ring& ring, const void* norm_weight, const Angles& angles, float eps, int first,
    const int* rows_of, float* key, char* to, float scale) {
    typedef Element<NEW_KIND>::Bits Bits;
    typedef Element<WEIGHT_KIND>::Bits WeightBits;
    float squares = 0.0f;
    for (int start = me.lane; start < INDEX_DIM; start += WARP * DIMS) {
        float mean[DIMS] = {};
#pragma unroll 2
        for (int t = 0; t < BLOCK_TOKENS; ++t) {
            const char* const from =
                rows_of[t] < 0 ? slot_of(ring, me.owner, first + t) : raw_keys.at + rows_of[t] * raw_keys.row;
            Bits raw[DIMS];
#pragma unroll
            for (int i = 0; i < DIMS; ++i) {
                const int d = start + i * WARP;
                raw[i] = d < INDEX_DIM ? reinterpret_cast<const Bits*>(from)[d] : Bits(0);
            }
#pragma unroll
            for (int i = 0; i < DIMS; ++i) mean[i] = __fadd_rn(mean[i], float_of<NEW_KIND>(raw[i]));
        }
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            if (start + i * WARP >= INDEX_DIM) break;
            mean[i] = nearest(__fdiv_rn(mean[i], float(BLOCK_TOKENS)));
            key[start + i * WARP] = mean[i];
            squares = __fadd_rn(squares, __fmul_rn(mean[i], mean[i]));
        }
    }
    const float shrink = inverse_root<INDEX_DIM>(sum_of_warp(squares), eps);
    const char* cos = angles.cos + first * angles.cos_row;
    const char* sin = angles.sin + first * angles.sin_row;
    if (angles.kept) {
        const bool here = rows_of[0] >= 0;
        const char* const kept = kept_angles(angles, ring, me.owner, first);
        cos = here ? angles.cos + rows_of[0] * angles.cos_row : kept;
        sin = here ? angles.sin + rows_of[0] * angles.sin_row : kept + angles.kept_sin;
    }
    load_angles(cos, sin, me.lane, me.scratch);
#pragma unroll 2
    for (int d = me.lane; d < INDEX_DIM; d += WARP) {
        const float weight = float_of<WEIGHT_KIND>(static_cast<const WeightBits*>(norm_weight)[d]);
        key[d] = nearest(__fmul_rn(__fmul_rn(key[d], shrink), __fadd_rn(1.0f, weight)));
    }
    __syncwarp();
#pragma unroll 1
    for (int d = me.lane; d < INDEX_DIM; d += WARP) {
        const float number = d < ROTARY_DIM ? rotated(key[d], d, me.scratch, key) : key[d];
        reinterpret_cast<Element<INDEX_KIND>::Bits*>(to)[d] = bits_of<INDEX_KIND>(number, scale);
    }
}

// Puts a row's raw key into the ring, and the angles of a block's first token beside it.
__device__ __forceinline__ void keep(
    const Ring& ring, const Angles& angles, New raw_keys, int row, int owner, int token, int lane) {
    typedef Element<NEW_KIND>::Bits Bits;
    typedef Element<ANGLE_KIND>::Bits AngleBits;
    const Bits* const from = reinterpret_cast<const Bits*>(raw_keys.at + row * raw_keys.row);
    Bits* const to = reinterpret_cast<Bits*>(slot_of(ring, owner, token));
#pragma unroll 4
    for (int d = lane; d < INDEX_DIM; d += WARP) to[d] = from[d];
    if (!angles.kept || token % BLOCK_TOKENS) return;
    char* const kept = kept_angles(angles, ring, owner, token);
    for (int j = lane; j < HALF; j += WARP) {
        reinterpret_cast<AngleBits*>(kept)[j] =
            reinterpret_cast<const AngleBits*>(angles.cos + row * angles.cos_row)[j];
        reinterpret_cast<AngleBits*>(kept + angles.kept_sin)[j] =
            reinterpret_cast<const AngleBits*>(angles.sin + row * angles.sin_row)[j];
    }
}

// The row of a later token of the row's request; -1 where there is none. The request's last row is `last`, its token
// `end`.
__device__ __forceinline__ int row_of_token(const Row& me, const Batch& batch, int token, int last, int end) {
    const int near = last - (end - token);  // where no padding stands between
    if (near >= 0 && batch.request[near] == me.owner && batch.position[near] == token) return near;
#pragma unroll 1
    for (int start = last; start > me.row; start -= WARP) {
        const int row = start - me.lane;
        const bool it = row > me.row && batch.request[row] == me.owner && batch.position[row] == token;
        const unsigned which = __ballot_sync(ALL, it);
        if (which) return start - __popc((which & -which) - 1);
    }
    return -1;
}

// Whether a block that is closed in this call is read from the slot that a row goes to. Where the block stays open the
// answer is no: fewer rows than a ring come after its tokens.
__device__ __forceinline__ bool is_read(const Row& me, const Batch& batch, const Ring& ring) {
    // A slot that is read lies a ring before its row, in the block that the request's first row is in.
    const int back = me.row - (ring.tokens - BLOCK_TOKENS + 1);
    if (back < 0) return false;
    const int other = batch.request[back];
    if (other != me.owner && batch.live(other, batch.position[back])) return false;
    const int start = batch.position[farthest(batch, me, -1)], open = start % BLOCK_TOKENS, first = start - open;
    return (me.at - first) % ring.tokens < open;
}

// Pools and stores the block that a row closes, and keeps the row's raw key.
__device__ __forceinline__ void prepare_index_key(
    const Row& me, const Batch& batch, New raw_keys, const void* norm_weight, const Angles& angles, float eps,
    const Pool& pool, const PageTable& table, const Ring& ring) {
    if (!batch.live(me.owner, me.at)) return;
    const int first = me.at - (BLOCK_TOKENS - 1);
    float* const key = me.scratch + ROTARY_DIM;
    int* const rows_of = reinterpret_cast<int*>(key + INDEX_DIM);
    bool ring_read = false;
    if (me.at % BLOCK_TOKENS == BLOCK_TOKENS - 1) {
        ring_read = find_rows(me, batch, first, rows_of) && ring.wraps;
        const int block = me.at / BLOCK_TOKENS, page = table.page(me.owner, block / pool.places);
        if (page >= 0) {
            char* const to = pool.at + page * pool.page + block % pool.places * pool.place;
            pool_block(me, raw_keys, ring, norm_weight, angles, eps, first, rows_of, key, to, pool.scale);
        }
        __syncwarp();
    }
    bool own = true;
    int last = me.row, end = me.at;
    if (ring.wraps) {
        // The row that goes to the same slot where no padding stands between.
        const int next = min(me.row + ring.tokens, batch.rows - 1), later = batch.position[next];
        own = batch.request[next] != me.owner || !batch.live(me.owner, later) || later - ring.tokens < me.at;
        if (own || ring_read) {
            last = farthest(batch, me, 1), end = batch.position[last];
            own = own && end - ring.tokens < me.at && !is_read(me, batch, ring);
        }
    }
    // The row's own slot, then those that its block was read from, for the newest rows that go there.
#pragma unroll 1
    for (int t = own ? -1 : 0; t < (ring_read ? BLOCK_TOKENS : 0); ++t) {
        int row = me.row, token = me.at;
        if (t >= 0) {
            token = end - (end - (first + t)) % ring.tokens;
            if (rows_of[t] >= 0 || token <= me.at) continue;
            row = row_of_token(me, batch, token, last, end);
            if (row < 0) continue;
        }
        keep(ring, angles, raw_keys, row, me.owner, token, me.lane);
    }
}

// For each row, one warp for its index key, and one for every `warp_heads` of its keys, its values, its index heads and
// its query heads. `q_to` [rows, q_heads, HEAD_DIM] and `index_q_to` [rows, index_heads, INDEX_DIM] lie without gaps.
// Norm weights [dim]. Padding, and rows past `batch.max_position`, write nothing.
extern "C" __global__ void __launch_bounds__(256, 4) flashqsa_prepare(
    New q, New keys, New values, New index_q, New raw_keys, char* q_to, char* index_q_to, const void* q_norm,
    const void* k_norm, const void* index_q_norm, const void* index_k_norm, Pool key_pool, Pool value_pool,
    Pool index_pool, PageTable kv_table, PageTable index_table, Ring ring, Angles angles, Batch batch, float eps,
    int q_heads, int kv_heads, int index_heads, int warp_heads) {
    const int q_parts = (q_heads + warp_heads - 1) / warp_heads, kv_parts = (kv_heads + warp_heads - 1) / warp_heads;
    const int index_parts = (index_heads + warp_heads - 1) / warp_heads;
    const int parts = 1 + 2 * kv_parts + index_parts + q_parts;
    const int warp = threadIdx.x / WARP, unit = blockIdx.x * WARPS + warp;
    Row me;
    me.row = unit / parts;
    if (me.row >= batch.rows) return;
    me.lane = threadIdx.x % WARP;
    me.owner = batch.request[me.row], me.at = batch.position[me.row];
    me.scratch = reinterpret_cast<float*>(dynamic) + warp * SCRATCH;
    // What takes longest comes first.
    int part = unit % parts - 1;
    if (part < 0) {
        prepare_index_key(me, batch, raw_keys, index_k_norm, angles, eps, index_pool, index_table, ring);
        return;
    }
    if (part >= kv_parts && part < 2 * kv_parts) {
        const int first = (part - kv_parts) * warp_heads;
        write_values(me, batch, values, value_pool, kv_table, first, min(first + warp_heads, kv_heads));
        return;
    }
    const bool key = part < kv_parts;
    if (!key) part -= 2 * kv_parts;
    if (!key && part < index_parts) {
        constexpr i64 head = INDEX_DIM * sizeof(Element<NEW_KIND>::Bits);
        const Pool to = {index_q_to, 0, index_heads * head, head, nullptr, 1.0f, 0};
        const int first = part * warp_heads, end = min(first + warp_heads, index_heads);
        prepare_heads<INDEX_DIM>(me, batch, index_q, index_q_norm, angles, eps, to, false, kv_table, first, end);
        return;
    }
    if (!key) part -= index_parts;
    constexpr i64 head = HEAD_DIM * sizeof(Element<NEW_KIND>::Bits);
    const Pool to = {q_to, 0, q_heads * head, head, nullptr, 1.0f, 0};
    const int first = part * warp_heads, end = min(first + warp_heads, key ? kv_heads : q_heads);
    prepare_heads<HEAD_DIM>(
        me, batch, key ? keys : q, key ? k_norm : q_norm, angles, eps, key ? key_pool : to, key, kv_table, first, end);
}
