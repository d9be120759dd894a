// Writing caches: keys and values, pooled index keys, and the ring of raw index keys. Compiles for sm_70 and newer
// without other headers.
//
// Raw keys of a block that began in an earlier call lie in the ring, where rows of this call may go:
// `flashqsa_pool_blocks` reads the ring, `flashqsa_write_ring` writes it, in this order on one stream.
//
// Rows of a request stand next to each other in ascending position, with padding between them at worst. So whether the
// call has a certain token of a row's request is known where a row of another request is met, or the end of the rows.

#include "numbers.cuh"
#include "paging.cuh"

static constexpr int SCAN_LOADS = 8;
static constexpr int SCAN = WARP * SCAN_LOADS;  // rows that a warp looks at in one go
static constexpr int DIMS = 4;                  // of a key that a lane works on at a time

template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Vector {
    T element[COUNT];
};

// Moves numbers as they are.
template <typename T, int COUNT>
struct Copy {
    typedef Vector<T, COUNT> From;
    typedef Vector<T, COUNT> To;

    static __device__ __forceinline__ To stored(From from, float) { return from; }
};

// Makes FP8 of numbers.
template <int KIND, int COUNT>
struct Encode {
    typedef Vector<typename Stored<KIND>::Bits, COUNT> From;
    typedef Vector<u8, COUNT> To;

    static __device__ __forceinline__ To stored(From from, float scale) {
        To to;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to.element[i] = e4m3_of(number_of<KIND>(from.element[i]), scale);
        return to;
    }
};

// New keys, or values, and the pool they go to. Strides in bytes.
struct Side {
    const char* from;     // [rows, heads, dim]
    char* to;             // [pages, page_tokens, heads, dim]
    const float* scales;  // [heads], null for one scale
    i64 from_row, from_head, to_page, to_token, to_head;
    float scale;
};

struct Batch {
    const int* request;   // [rows], -1 for padding
    const int* position;  // [rows], negative for padding
    int rows, requests;
};

template <typename Move>
__device__ __forceinline__ void write_rows(
    Side side, Batch batch, PageTable table, int first, int units, int page_tokens, int per_row, int vectors) {
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        typedef typename Move::From From;
        typedef typename Move::To To;
        const int row = first + unit / per_row, head = unit % per_row / vectors, vector = unit % vectors;
        // Asked for before it is known where it goes: the answers arrive together.
        const char* const from = side.from + row * side.from_row + head * side.from_head;
        const From held = reinterpret_cast<const From*>(from)[vector];
        const int owner = batch.request[row], at = batch.position[row];
        if (!is_live(owner, at, batch.requests)) continue;
        const int page = table.page(owner, at / page_tokens);
        if (page < 0) continue;
        char* const to = side.to + page * side.to_page + at % page_tokens * side.to_token + head * side.to_head;
        const float scale = side.scales ? __ldg(side.scales + head) : side.scale;
        reinterpret_cast<To*>(to)[vector] = Move::stored(held, scale);
    }
}

// Stores keys and values [rows, heads, dim] at their rows' positions; even programs do the keys, odd ones the values,
// of `program_rows` rows. `encoded` is the kind of the numbers that FP8 is made of, or -1 where numbers of
// `element_bytes` are moved as they are. `chunk` numbers are moved at a time, `vectors` times a head; all addresses are
// multiples of what is moved, or of 16 bytes.
extern "C" __global__ void __launch_bounds__(256) flashqsa_write_kv(
    const char* keys, const char* values, char* key_pool, char* value_pool, const float* key_scales,
    const float* value_scales, const int* request, const int* position, const int* page_table, i64 key_row,
    i64 key_head, i64 value_row, i64 value_head, i64 key_pool_page, i64 key_pool_token, i64 key_pool_head,
    i64 value_pool_page, i64 value_pool_token, i64 value_pool_head, i64 table_stride, float key_scale,
    float value_scale, int rows, int requests, int table_pages, int pages, int page_tokens, int heads, int vectors,
    int program_rows, int encoded, int element_bytes, int chunk) {
    const bool v = blockIdx.x % 2;
    Side side;
    side.from = v ? values : keys, side.to = v ? value_pool : key_pool, side.scales = v ? value_scales : key_scales;
    side.from_row = v ? value_row : key_row, side.from_head = v ? value_head : key_head;
    side.to_page = v ? value_pool_page : key_pool_page, side.to_token = v ? value_pool_token : key_pool_token;
    side.to_head = v ? value_pool_head : key_pool_head, side.scale = v ? value_scale : key_scale;
    const Batch batch = {request, position, rows, requests};
    const PageTable table = {page_table, table_stride, table_pages, pages};
    const int per_row = heads * vectors, first = blockIdx.x / 2 * program_rows;
    const int units = min(program_rows, rows - first) * per_row;
#define WRITE(...) write_rows<__VA_ARGS__>(side, batch, table, first, units, page_tokens, per_row, vectors)
    if (encoded < 0) {
        const int bytes = chunk * element_bytes;
        if (bytes == 16) WRITE(Copy<u32, 4>);
        if (bytes == 8) WRITE(Copy<u32, 2>);
        if (bytes == 4) WRITE(Copy<u32, 1>);
        if (bytes == 2) WRITE(Copy<u16, 1>);
    } else if (chunk == 8) {
        if (encoded == FP32) WRITE(Encode<FP32, 8>);
        if (encoded == FP16) WRITE(Encode<FP16, 8>);
        if (encoded == BF16) WRITE(Encode<BF16, 8>);
    } else {
        if (encoded == FP32) WRITE(Encode<FP32, 1>);
        if (encoded == FP16) WRITE(Encode<FP16, 1>);
        if (encoded == BF16) WRITE(Encode<BF16, 1>);
    }
#undef WRITE
}

struct Pooling {
    const char* raw_keys;  // [rows, index_dim]
    const char* ring;      // [requests, ring_tokens, index_dim]
    const void* norm_weight;
    i64 raw_row, ring_request, ring_token;  // strides in bytes
    float eps, scale;
    int ring_tokens, block_tokens, index_dim, rotary_dim;
    int key_kind, weight_kind, angle_kind;

    __device__ __forceinline__ const char* raw(int row) const { return raw_keys + row * raw_row; }

    __device__ __forceinline__ const char* kept(int owner, int token) const {
        return ring + owner * ring_request + token % ring_tokens * ring_token;
    }
};

// Where the raw keys of the block are that a row of `owner`, the token `first + block_tokens - 1`, closes.
__device__ __forceinline__ void find_raw_keys(
    const Pooling& pooling, Batch batch, int row, int owner, int first, int lane, const char** sources) {
    const int block_tokens = pooling.block_tokens, last = first + block_tokens - 1;
    bool missing = false;
    for (int t = lane; t < block_tokens; t += WARP) {
        const int from = row - (block_tokens - 1 - t);
        const int other = from >= 0 ? batch.request[from] : -1, at = from >= 0 ? batch.position[from] : -1;
        const bool here = other == owner && at == first + t;
        sources[t] = here ? pooling.raw(from) : pooling.kept(owner, first + t);
        missing |= !here;
    }
    __syncwarp();
    if (!__any_sync(ALL, missing)) return;
    // Padding may stand between the rows.
    for (int end = row; end > 0; end -= SCAN) {
        int other[SCAN_LOADS], at[SCAN_LOADS];
#pragma unroll
        for (int i = 0; i < SCAN_LOADS; ++i) {
            const int from = end - 1 - i * WARP - lane;
            other[i] = from >= 0 ? batch.request[from] : -1;
            at[i] = from >= 0 ? batch.position[from] : -1;
        }
        bool past = false;
#pragma unroll
        for (int i = 0; i < SCAN_LOADS; ++i) {
            if (!is_live(other[i], at[i], batch.requests)) continue;
            if (other[i] != owner || at[i] < first) {
                past = true;
            } else if (at[i] < last) {
                sources[at[i] - first] = pooling.raw(end - 1 - i * WARP - lane);
            }
        }
        if (__any_sync(ALL, past)) break;
    }
    __syncwarp();
}

// rope(rms(round(mean in FP32))), each rounded to the raw keys' kind, the rotary's products and their sum one by one.
// The squares are summed by lane, dimensions 32 apart in ascending order, then over lanes 16, 8, 4, 2 and 1 apart.
template <int RAW>
__device__ __forceinline__ void pool_block(
    const Pooling& pooling, const char* const* sources, const void* cos, const void* sin, int lane, float* key,
    void* to) {
    const int dim = pooling.index_dim, half = pooling.rotary_dim / 2;
    float squares = 0.0f;
    for (int first = lane; first < dim; first += WARP * DIMS) {
        float mean[DIMS] = {};
#pragma unroll 4
        for (int t = 0; t < pooling.block_tokens; ++t) {
            float raw[DIMS];
            load_every<RAW>(sources[t], first, WARP, dim, raw);
#pragma unroll
            for (int i = 0; i < DIMS; ++i) mean[i] = __fadd_rn(mean[i], raw[i]);
        }
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            if (first + i * WARP >= dim) break;
            mean[i] = rounded<RAW>(__fdiv_rn(mean[i], float(pooling.block_tokens)));
            key[first + i * WARP] = mean[i];
            squares = __fadd_rn(squares, __fmul_rn(mean[i], mean[i]));
        }
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) squares = __fadd_rn(squares, __shfl_xor_sync(ALL, squares, step));
    const float shrink = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, float(dim)), pooling.eps)));
    for (int first = lane; first < dim; first += WARP * DIMS) {
        float weight[DIMS];
        load_every(pooling.weight_kind, pooling.norm_weight, first, WARP, dim, weight);
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            const int d = first + i * WARP;
            if (d < dim) key[d] = rounded<RAW>(__fmul_rn(__fmul_rn(key[d], shrink), __fadd_rn(1.0f, weight[i])));
        }
    }
    __syncwarp();
    for (int first = lane; first < dim; first += WARP * DIMS) {
        float c[DIMS], s[DIMS];
        load_every(pooling.angle_kind, cos, first, WARP, 2 * half, c);
        load_every(pooling.angle_kind, sin, first, WARP, 2 * half, s);
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            const int d = first + i * WARP;
            if (d >= dim) break;
            float number = key[d];
            if (d < 2 * half) {
                const float crossed = d < half ? -key[d + half] : key[d - half];
                const float straight = rounded<RAW>(__fmul_rn(number, rounded<RAW>(c[i])));
                number = rounded<RAW>(__fadd_rn(straight, rounded<RAW>(__fmul_rn(crossed, rounded<RAW>(s[i])))));
            }
            store(pooling.key_kind, to, d, number, pooling.scale);
        }
    }
}

extern __shared__ i64 dynamic[];

// Stores the pooled key of every block that a row closes, unless the block is on a hole. One warp per row. cos and sin
// [rows, rotary_dim] are of the first token of the block a row is in. Strides in bytes.
extern "C" __global__ void __launch_bounds__(128) flashqsa_pool_blocks(
    const char* raw_keys, const char* ring, char* keys, const void* norm_weight, const char* cos, const char* sin,
    const int* request, const int* position, const int* page_table, i64 raw_row, i64 ring_request, i64 ring_token,
    i64 key_page, i64 key_block, i64 cos_row, i64 sin_row, i64 table_stride, float eps, float scale, int rows,
    int requests, int table_pages, int pages, int page_blocks, int ring_tokens, int block_tokens, int index_dim,
    int rotary_dim, int raw_kind, int key_kind, int weight_kind, int angle_kind) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int row = blockIdx.x * warps + warp;
    if (row >= rows) return;
    const int owner = request[row], last = position[row];
    if (!is_live(owner, last, requests) || last % block_tokens != block_tokens - 1) return;
    const int block = last / block_tokens;
    const PageTable table = {page_table, table_stride, table_pages, pages};
    const int page = table.page(owner, block / page_blocks);
    if (page < 0) return;
    const Pooling pooling = {raw_keys, ring, norm_weight, raw_row, ring_request, ring_token, eps, scale, ring_tokens,
                             block_tokens, index_dim, rotary_dim, key_kind, weight_kind, angle_kind};
    const char** const all_sources = reinterpret_cast<const char**>(dynamic);
    const char** const sources = all_sources + warp * block_tokens;                                    // [block_tokens]
    float* const key = reinterpret_cast<float*>(all_sources + warps * block_tokens) + warp * index_dim;  // [index_dim]
    find_raw_keys(pooling, {request, position, rows, requests}, row, owner, last - block_tokens + 1, lane, sources);
    const char* const c = cos + row * cos_row;
    const char* const s = sin + row * sin_row;
    char* const to = keys + page * key_page + block % page_blocks * key_block;
    if (raw_kind == FP32) pool_block<FP32>(pooling, sources, c, s, lane, key, to);
    if (raw_kind == FP16) pool_block<FP16>(pooling, sources, c, s, lane, key, to);
    if (raw_kind == BF16) pool_block<BF16>(pooling, sources, c, s, lane, key, to);
}

// Whether a later row of the call goes to the slot of the ring where this row would go.
__device__ __forceinline__ bool is_overtaken(Batch batch, int row, int owner, int at, int ring_tokens, int lane) {
    // The row that goes there where no padding stands between.
    const int next = min(row + ring_tokens, batch.rows - 1);
    const int next_owner = batch.request[next], later = batch.position[next];
    if (next_owner == owner && later >= 0 && later - ring_tokens >= at) return true;
    for (int start = row + 1; start < batch.rows; start += SCAN) {
        int other[SCAN_LOADS], when[SCAN_LOADS];
#pragma unroll
        for (int i = 0; i < SCAN_LOADS; ++i) {
            const int from = start + i * WARP + lane;
            other[i] = from < batch.rows ? batch.request[from] : -1;
            when[i] = from < batch.rows ? batch.position[from] : -1;
        }
        bool overtaken = false, past = false;
#pragma unroll
        for (int i = 0; i < SCAN_LOADS; ++i) {
            if (!is_live(other[i], when[i], batch.requests)) continue;
            if (other[i] == owner) overtaken |= when[i] - ring_tokens >= at;
            past |= other[i] != owner;
        }
        if (__any_sync(ALL, overtaken)) return true;
        if (__any_sync(ALL, past)) return false;
    }
    return false;
}

// Stores the newest `ring_tokens` raw keys of each request, token t at `t % ring_tokens`. One warp per row. Strides in
// bytes, `element_bytes` 2 or 4.
extern "C" __global__ void __launch_bounds__(128) flashqsa_write_ring(
    const char* raw_keys, char* ring, const int* request, const int* position, i64 raw_row, i64 ring_request,
    i64 ring_token, int rows, int requests, int ring_tokens, int index_dim, int element_bytes) {
    const int lane = threadIdx.x % WARP;
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const int owner = request[row], at = position[row];
    if (!is_live(owner, at, requests)) return;
    if (is_overtaken({request, position, rows, requests}, row, owner, at, ring_tokens, lane)) return;
    const char* const from = raw_keys + row * raw_row;
    char* const to = ring + owner * ring_request + at % ring_tokens * ring_token;
    for (int d = lane; d < index_dim; d += WARP) {
        if (element_bytes == 4) reinterpret_cast<u32*>(to)[d] = reinterpret_cast<const u32*>(from)[d];
        if (element_bytes == 2) reinterpret_cast<u16*>(to)[d] = reinterpret_cast<const u16*>(from)[d];
    }
}
