// Selection of few rows on Hopper in one launch: a cluster of programs scores and ranks the blocks of each row.
//
// A program takes a share of neighbouring blocks. Its warps bring index keys to shared memory 16 at a time, each to a
// ring of its own with many tiles on their way, and multiply them with the row's queries: no warp waits for another
// while keys come. Products, and the sum over heads, are those of `smxx`'s scorer of one row, in the same order.
//
// Scores never leave shared memory, where they stand as numbers that compare without sign, the keys of ranking.cuh.
// The programs find the row's cut together: each counts its own in a histogram, and reads of the others' only the part
// where the cut lies. The first histogram covers what lies near the best score, where the cut nearly always is. Each
// program then puts out what of its share goes in, at the place that the others' counts give it: shares follow in order
// of ids.
//
// Every program decides from the same numbers, so all take the same steps and meet at every barrier.
//
// Compiled with -D: HEADS 2 or 4; DIM 64 or 128; BF16 0 or 1; CLUSTER, programs of a row; THREADS of a
// program and RESIDENT programs of a multiprocessor; STAGES of a warp's ring; TABLE_BYTES, room for `Shared`.

#include "cluster.cuh"
#include "ranking.cuh"
#include "sampling.cuh"

static constexpr int TILE = 16;  // keys that a warp multiplies at a time
static constexpr int ROW_BYTES = DIM * 2;
static constexpr int CHUNKS = DIM / 8;         // of 16 bytes, of a key
static constexpr int COPIED = LANES / CHUNKS;  // keys that a warp copies at a time
static constexpr int TILE_BYTES = TILE * ROW_BYTES;
static constexpr int RING_BYTES = WARPS * STAGES * TILE_BYTES;
static constexpr int MOST_PROGRAMS = 16;
static constexpr int PART = BINS / WARPS;  // bins that a warp sums up
static constexpr int LANE_VECTORS = PART / LANES / 4;
static constexpr u32 WINDOW = 1 << 24;       // keys of the first histogram: scores from a quarter of the best on
static constexpr u32 ZERO = 0x80000000u;     // the key of 0.0

struct __align__(16) Shared {
    uint4 extents[MOST_PROGRAMS];              // of each program's keys: the lowest, less 1; the highest; how many
    u32 parts[2][MOST_PROGRAMS][WARPS];        // keys in parts of each program's histogram, of two passes in turn
    uint2 counts[MOST_PROGRAMS];               // keys of each program above those at the cut, and at it
    u32 low[WARPS], high[WARPS], live[WARPS], above[WARPS], at_cut[WARPS];
    u32 bin, bin_above, bin_inside, filled, cut_key, cut_equal;
    int entries[WARPS][STAGES][TILE];          // of the page table, for keys that take a stage next
    u32 present[WARPS][STAGES];                // a bit for each key of a stage that is not on a hole
};

struct Ranks {  // where keys came in
    u32 histogram[2][BINS];
    u32 listed[RANKED];  // keys at the cut: this program's
    u32 ranked[RANKED];  // and all programs', in the order of ids but within a program
};

static_assert(sizeof(Shared) <= TABLE_BYTES && TABLE_BYTES % 128 == 0, "a ring begins at a multiple of 128 bytes");
static_assert(sizeof(Ranks) <= RING_BYTES, "histograms lie in the ring");
static_assert(CLUSTER <= MOST_PROGRAMS && LANE_VECTORS * LANES * 4 * WARPS == BINS, "every bin has a lane");

struct Arguments {
    const char* q;          // [rows, HEADS, DIM]
    const char* keys;       // [pages, page_blocks, DIM]
    const int* page_table;  // [requests, table_pages]
    const int* request;     // [rows]
    const int* position;    // [rows]
    int* blocks;            // [rows, top], ascending and then -1
    int* count;             // [rows]
    i64 q_row, q_head, key_page, key_place;  // strides in bytes
    i64 table_stride, blocks_stride;
    i64 pages_per_block;    // 2^PAGE_SHIFT / page_blocks, rounded up
    int requests, max_position, table_pages, pages, page_blocks, block_tokens, top;
    float scale;

    // The page-table column of a block: a division, exact for blocks and page sizes up to 2^(PAGE_SHIFT / 2).
    __device__ __forceinline__ int column(int block) const { return int(i64(block) * pages_per_block >> PAGE_SHIFT); }
};

// The keys of a program's blocks on their way to a warp.
struct Stream {
    const Arguments& a;
    Shared& s;
    const int* table;  // of the row's request
    char* ring;        // the warp's
    int first, reach;  // blocks of the program, to the last that the page table lists
    int warp, lane;

    // The block of this lane's key in the warp's i-th tile; lanes 16 apart have the same.
    __device__ __forceinline__ int block(int i) const { return first + (i * WARPS + warp) * TILE + lane % TILE; }
    __device__ __forceinline__ const int* entry_of(int block) const { return table + a.column(block); }

    __device__ __forceinline__ int entry(int i) const { return block(i) < reach ? __ldg(entry_of(block(i))) : -1; }
    __device__ __forceinline__ int brought_entry(int i, int stage) const {
        return block(i) < reach ? s.entries[warp][stage][lane % TILE] : -1;
    }
    __device__ __forceinline__ void bring_entries(int i, int stage) {
        if (lane < TILE && block(i) < reach) copy_4(&s.entries[warp][stage][lane], entry_of(block(i)));
    }

    __device__ __forceinline__ void bring_keys(int i, int stage, int entry) {
        const bool there = u32(entry) < u32(a.pages);
        const int place = block(i) - a.column(block(i)) * a.page_blocks;
        const i64 at = there ? entry * a.key_page + place * a.key_place : -1;
        const u32 present = __ballot_sync(EVERY_LANE, there);
        if (lane == 0) s.present[warp][stage] = present;
        const int chunk = lane % CHUNKS;
#pragma unroll
        for (int j = 0; j < TILE / COPIED; ++j) {
            const int key = j * COPIED + lane / CHUNKS;
            const i64 from = __shfl_sync(EVERY_LANE, at, key);
            // Chunks of 8 neighbouring keys stand in different banks, for whoever reads the same of each.
            char* const to = ring + stage * TILE_BYTES + key * ROW_BYTES + (chunk ^ key % 8) * 16;
            copy_16(to, a.keys + (from < 0 ? 0 : from) + chunk * 16, from >= 0);
        }
    }
};

// Of the keys of a thread: the lowest, less 1 (of none the largest number); the highest; how many.
struct Extent {
    u32 low, high, live;

    __device__ __forceinline__ void take(u32 key) {
        low = min(low, key - 1);  // 0 becomes the largest number
        high = max(high, key);
        live += key != 0;
    }
};

// Which head a column of the product is: the sum over heads takes columns in pairs, then the pairs.
__device__ __forceinline__ int head_of(int column) { return HEADS == 4 ? column % 2 * 2 + column / 2 : column; }

// Scores a warp's tiles of the program's blocks, and puts them into `keys`.
__device__ __forceinline__ void score_tiles(
    const Arguments& a, Stream stream, i64 row, int tiles, u32* keys, Extent& extent
) {
    const int warp = stream.warp, lane = stream.lane;
    // The first entries are all on their way before one is waited for.
#pragma unroll
    for (int i = 0; i < STAGES; ++i) stream.bring_entries(i, i);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    int entries[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; ++i) entries[i] = stream.brought_entry(i, i);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        stream.bring_keys(i, i, entries[i]);
        stream.bring_entries(i + STAGES, i);
        commit_copies();
    }
    u32 queries[DIM / 8];
    const int column = lane / 4;
    const u32* const line = reinterpret_cast<const u32*>(a.q + row * a.q_row + head_of(column) * a.q_head) + lane % 4;
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) queries[i] = column < HEADS ? __ldg(line + 4 * i) : 0;

    int stage = 0;
    for (int i = 0; i * WARPS + warp < tiles; ++i) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        const char* const own = stream.ring + stage * TILE_BYTES + lane % 16 * ROW_BYTES;
        float d[4] = {};
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
            u32 operand[4];
            load_operand(operand, own + ((2 * step + lane / 16) ^ lane % 8) * 16);
            multiply(d, operand, queries[2 * step], queries[2 * step + 1]);
        }
        float sums[2] = {relu(d[0]) + relu(d[1]), relu(d[2]) + relu(d[3])};
        const u32 present = stream.s.present[warp][stage];
        const int entry = stream.brought_entry(i + STAGES, stage);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (HEADS == 4) sums[half] += __shfl_xor_sync(EVERY_LANE, sums[half], 1);
            const int key = lane / 4 + 8 * half;
            const u32 ranked = present >> key & 1 ? key_of(sums[half] * a.scale) : 0;
            if (lane % 4 == 0) {
                keys[(i * WARPS + warp) * TILE + key] = ranked;
                extent.take(ranked);
            }
        }
        __syncwarp();  // every lane has read what is written to now
        stream.bring_keys(i + STAGES, stage, entry);
        stream.bring_entries(i + 2 * STAGES, stage);
        commit_copies();
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    wait_copies<0>();
}

// Of a row that sees no more than it may select, every block is as good as any.
__device__ __forceinline__ void take_tiles(Stream stream, int pages, int tiles, u32* keys, Extent& extent) {
    for (int i = 0; i * WARPS + stream.warp < tiles; ++i) {
        const u32 key = u32(stream.entry(i)) < u32(pages) ? ZERO : 0;
        if (stream.lane < TILE) {
            keys[(i * WARPS + stream.warp) * TILE + stream.lane] = key;
            extent.take(key);
        }
    }
}

// A program's keys, in the order of its blocks: `held` of them.
struct Held {
    const u32* keys;
    int held, warp, lane;

    // Calls use(index, key) equally often in each lane; a warp's indices ascend from call to call and lane to lane, and
    // warps follow each other. The key is 0 past the last.
    template <typename Use>
    __device__ __forceinline__ void each(Use use) const {
        const int share = (held + THREADS - 1) / THREADS * LANES;
#pragma unroll 4
        for (int i = lane; i < share; i += LANES) {
            const int index = warp * share + i;
            use(index, index < held ? keys[index] : 0);
        }
    }
};

__device__ __forceinline__ u32 warp_sum(u32 value) { return __reduce_add_sync(EVERY_LANE, value); }

// The sum of the lanes above this one.
__device__ __forceinline__ u32 sum_above(u32 value, int lane) {
    u32 sum = value;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const u32 other = __shfl_down_sync(EVERY_LANE, sum, step);
        if (lane + step < LANES) sum += other;
    }
    return sum - value;
}

// Where the cut lies: every key above `low + range` goes in, and `wanted` of those from `low` on. These are `inside`
// keys, few enough to be ranked; where `range` is 0 they are equal, and the first `wanted` go in.
struct Band {
    u32 low, range, wanted, inside;
};

// The band of the row's cut at `wanted`, of more keys. Every thread of every program gets it.
__device__ __forceinline__ Band find_band(
    const Held& own, u32 low, u32 high, u32 wanted, int rank, Shared& s, Ranks& ranks
) {
    const int thread = threadIdx.x, warp = own.warp, lane = own.lane;
    u32 begin = high - low < WINDOW ? low : high - (WINDOW - 1);
    for (int pass = 0;; ++pass) {
        // What the pass before the last left here has been read by every program: the last pass's barrier came later.
        u32(&histogram)[BINS] = ranks.histogram[pass % 2];
        u32(&parts)[MOST_PROGRAMS][WARPS] = s.parts[pass % 2];
        const u32 range = high - begin;
        const int shift = max(LANES - __clz(range) - BIN_BITS, 0);
#pragma unroll
        for (int i = thread; i < BINS / 4; i += THREADS)
            reinterpret_cast<uint4*>(histogram)[i] = make_uint4(0, 0, 0, 0);
        __syncthreads();
        own.each([&](int, u32 key) {
            // A key below `begin`, 0 among them, wraps round to an offset beyond the range.
            const u32 offset = key - begin;
            if (offset <= range) atomicAdd(&histogram[offset >> shift], 1u);
        });
        __syncthreads();
        const int first = (warp * LANES + lane) * LANE_VECTORS;
        u32 mine = 0;
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i) {
            const uint4 four = reinterpret_cast<const uint4*>(histogram)[first + i];
            mine += four.x + four.y + four.z + four.w;
        }
        mine = warp_sum(mine);
        if (lane < CLUSTER) store_at(&parts[rank][warp], lane, mine);
        cluster_arrive();
        cluster_wait();

        u32 part = 0;  // keys of all programs, in the part of a lane's number
        if (lane < WARPS) {
#pragma unroll
            for (int program = 0; program < CLUSTER; ++program) part += parts[program][lane];
        }
        const u32 above = sum_above(part, lane), all = __shfl_sync(EVERY_LANE, above + part, 0);
        if (all < wanted) {  // of the first pass only, where it left out what lies lower
            wanted -= all;
            high = begin - 1;
            begin = low;
            continue;
        }
        const int chosen = __ffs(__ballot_sync(EVERY_LANE, above < wanted && wanted <= above + part)) - 1;
        const u32 above_part = __shfl_sync(EVERY_LANE, above, chosen);
        if (warp == 0) {
            u32 bins[4 * LANE_VECTORS] = {};
            const int vector = (chosen * LANES + lane) * LANE_VECTORS;
#pragma unroll
            for (int program = 0; program < CLUSTER; ++program) {
#pragma unroll
                for (int i = 0; i < LANE_VECTORS; ++i) {
                    const uint4 four = load_at(reinterpret_cast<const uint4*>(histogram) + vector + i, program);
                    bins[4 * i] += four.x, bins[4 * i + 1] += four.y;
                    bins[4 * i + 2] += four.z, bins[4 * i + 3] += four.w;
                }
            }
            u32 sum = 0;
#pragma unroll
            for (int i = 0; i < 4 * LANE_VECTORS; ++i) sum += bins[i];
            u32 before = above_part + sum_above(sum, lane);
#pragma unroll
            for (int i = 4 * LANE_VECTORS - 1; i >= 0; --i) {
                if (before < wanted && wanted <= before + bins[i])
                    s.bin = 4 * vector + i, s.bin_above = before, s.bin_inside = bins[i];
                before += bins[i];
            }
        }
        __syncthreads();
        wanted -= s.bin_above;
        begin += s.bin << shift;
        high = begin + ((1u << shift) - 1);
        const u32 inside = s.bin_inside;
        if (inside == wanted) return {begin - 1, 0, 0, 0};
        if (shift == 0 || inside <= RANKED) return {begin, high - begin, wanted, inside};
    }
}

// Keys above `cut` go in, and the first `left` of a program that equal it; `position` blocks of other programs stand
// before them.
struct Place {
    u32 cut, position, left;
};

// Ends with every read of other programs' shared memory behind the thread.
__device__ __forceinline__ Place find_place(const Held& own, const Band& band, int rank, Shared& s, Ranks& ranks) {
    const int thread = threadIdx.x, warp = own.warp, lane = own.lane;
    const bool ranked = band.range > 0;
    u32 above = 0, inside = 0;
    own.each([&](int, u32 key) {
        const bool in = key - band.low <= band.range;
        above += __popc(__ballot_sync(EVERY_LANE, key > band.low + band.range));
        inside += __popc(__ballot_sync(EVERY_LANE, in));
        if (in && ranked) ranks.listed[atomicAdd(&s.filled, 1u)] = key;
    });
    if (lane == 0) s.above[warp] = above, s.at_cut[warp] = inside;
    __syncthreads();
    if (warp == 0) {
        above = warp_sum(lane < WARPS ? s.above[lane] : 0);
        inside = warp_sum(lane < WARPS ? s.at_cut[lane] : 0);
        if (lane < CLUSTER) store_at(&s.counts[rank], lane, make_uint2(above, inside));
    }
    cluster_arrive();
    cluster_wait();

    u32 above_before = 0, before = 0;  // of programs before this one
#pragma unroll
    for (int program = 0; program < CLUSTER; ++program) {
        if (program < rank) above_before += s.counts[program].x, before += s.counts[program].y;
    }
    u32 cut = band.low, equal = band.wanted;
    if (ranked) {
        u32 start = 0;
#pragma unroll 1
        for (int program = 0; program < CLUSTER; ++program) {
            const u32 count = s.counts[program].y;
            if (program % WARPS == warp) {
#pragma unroll 1
                for (u32 i = lane; i < count; i += LANES) ranks.ranked[start + i] = load_at(ranks.listed + i, program);
            }
            start += count;
        }
        __syncthreads();
        const u32 mine = thread < band.inside ? ranks.ranked[thread] : 0;
        if (thread < band.inside) {
            u32 larger = 0, same = 0;
            for (u32 i = 0; i < band.inside; ++i) {
                larger += ranks.ranked[i] > mine;
                same += ranks.ranked[i] == mine;
            }
            // Every thread that holds the key at the cut writes the same.
            if (larger < band.wanted && band.wanted <= larger + same)
                s.cut_key = mine, s.cut_equal = band.wanted - larger;
        }
        __syncthreads();
        cut = s.cut_key, equal = s.cut_equal;
        above_before += __syncthreads_count(thread < before && mine > cut);
        before = __syncthreads_count(thread < before && mine == cut);
    }
    const u32 taken = min(before, equal);
    return {cut, above_before + taken, equal - taken};
}

// Puts out those of a program's blocks that go in, at their places in `blocks`.
__device__ __forceinline__ void put_blocks(const Held& own, Place place, int first, int* blocks, Shared& s) {
    const int warp = own.warp, lane = own.lane;
    const u32 lower = (1u << lane) - 1;
    u32 above = 0, equal = 0;
    own.each([&](int, u32 key) {
        above += __popc(__ballot_sync(EVERY_LANE, key > place.cut));
        equal += __popc(__ballot_sync(EVERY_LANE, key == place.cut));
    });
    if (lane == 0) s.above[warp] = above, s.at_cut[warp] = equal;
    __syncthreads();
    const u32 above_before = warp_sum(lane < warp ? s.above[lane] : 0);
    const u32 taken = min(warp_sum(lane < warp ? s.at_cut[lane] : 0), place.left);
    u32 position = place.position + above_before + taken, left = place.left - taken;
    own.each([&](int index, u32 key) {
        const u32 ties = __ballot_sync(EVERY_LANE, key == place.cut);
        const bool goes_in = key > place.cut || (key == place.cut && __popc(ties & lower) < left);
        const u32 chosen = __ballot_sync(EVERY_LANE, goes_in);
        if (goes_in) blocks[position + __popc(chosen & lower)] = first + index;
        position += __popc(chosen);
        left -= min(u32(__popc(ties)), left);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
flashqsa_decode_sm90(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char dynamic[];
    cluster_arrive();  // waited for before another program's memory is written: it must have begun
    Shared& s = *reinterpret_cast<Shared*>(dynamic);
    char* const ring = dynamic + TABLE_BYTES;
    Ranks& ranks = *reinterpret_cast<Ranks*>(ring);
    u32* const keys = reinterpret_cast<u32*>(ring + RING_BYTES);
    const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
    const int rank = rank_in_cluster();
    const i64 row = blockIdx.x / CLUSTER;
    const int owner = a.request[row];
    const int seen = blocks_seen(owner, a.position[row], a.requests, a.max_position, a.block_tokens);
    int* const blocks = a.blocks + row * a.blocks_stride;

    u32 selected = 0;
    if (seen > 0) {
        const int share = ((seen + CLUSTER - 1) / CLUSTER + TILE - 1) / TILE * TILE;
        const int first = rank * share, end = min(first + share, seen);
        const int tiles = max(end - first + TILE - 1, 0) / TILE;
        const int reach = min(i64(end), i64(a.table_pages) * a.page_blocks);
        const Stream stream = {
            a, s, a.page_table + owner * a.table_stride, ring + warp * STAGES * TILE_BYTES, first, reach, warp, lane};
        Extent extent = {EVERY_LANE, 0, 0};
        if (seen > a.top) score_tiles(a, stream, row, tiles, keys, extent);
        else take_tiles(stream, a.pages, tiles, keys, extent);
        extent.low = warp_min(extent.low), extent.high = warp_max(extent.high), extent.live = warp_sum(extent.live);
        if (lane == 0) s.low[warp] = extent.low, s.high[warp] = extent.high, s.live[warp] = extent.live;
        if (thread == 0) s.filled = 0;
        __syncthreads();
        cluster_wait();
        if (warp == 0) {
            extent.low = warp_min(lane < WARPS ? s.low[lane] : EVERY_LANE);
            extent.high = warp_max(lane < WARPS ? s.high[lane] : 0);
            extent.live = warp_sum(lane < WARPS ? s.live[lane] : 0);
            if (lane < CLUSTER)
                store_at(&s.extents[rank], lane, make_uint4(extent.low, extent.high, extent.live, 0));
        }
        cluster_arrive();
        cluster_wait();

        u32 low = EVERY_LANE, high = 0, live = 0, before = 0;
#pragma unroll
        for (int program = 0; program < CLUSTER; ++program) {
            const uint4 other = s.extents[program];
            low = min(low, other.x), high = max(high, other.y), live += other.z;
            if (program < rank) before += other.z;
        }
        const Held own = {keys, tiles * TILE, warp, lane};
        Place place = {0, before, 0};  // where everything goes in
        if (live > a.top) place = find_place(own, find_band(own, low + 1, high, a.top, rank, s, ranks), rank, s, ranks);
        cluster_arrive();  // waited for before this program's memory goes: others may still read it
        put_blocks(own, place, first, blocks, s);
        selected = min(live, u32(a.top));
    }
    for (int i = selected + rank * THREADS + thread; i < a.top; i += CLUSTER * THREADS) blocks[i] = -1;
    if (rank == 0 && thread == 0) a.count[row] = selected;
    cluster_wait();
}
