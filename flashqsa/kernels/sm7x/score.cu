// Index scores of paged keys on tensor cores before sm_80: values[row, block] = scale * sum over heads of relu(<q, key>).
//
// A program takes a window of ROWS rows and a slice of their blocks. Rows and heads together are the lines of one product
// with the keys; line head * ROWS + row, so that the lines of a row stand ROWS apart and are added up in registers, over
// the tiles of 16 lines and then within the tile. Queries lie in shared memory. Each warp goes through strips of the slice
// by itself: a key is read once, from the cache to the registers of the warp that needs it, and no warp waits for another.
//
// Windows are cut from up to RANGES ranges of rows; what lies between them is scored elsewhere.
//
// The rows of a window may belong to several requests ("runs"): program `run` scores the run of its number, the last one
// all that are left.
//
// Macros: ROWS 1, 2, 4, 8 or 16; HEADS; DIM, a multiple of 16; STRIPS, tiles of 16 blocks that a warp scores at a time;
// WARPS of a program; RESIDENT programs that a multiprocessor should hold; E4M3, whether keys are FP8 (else FP16); ALIGNED,
// whether 8 numbers of queries and keys can be loaded at a time; QUAD_PAIRS, see score_mma.cuh.

#include "score_mma.cuh"

static constexpr int WARP = 32;
static constexpr int THREADS = WARPS * WARP;
static constexpr unsigned ALL = 0xffffffffu;
static constexpr int STRIP = STRIPS * TILE;
static constexpr int LINES = HEADS * ROWS;
static constexpr int LINE_TILES = (LINES + TILE - 1) / TILE;
static constexpr int GROUP = LINE_TILES < 4 ? LINE_TILES : 4;  // line tiles whose products are in registers at a time
static constexpr int STEPS = (DIM + STEP_DIMS - 1) / STEP_DIMS;
// Steps that are unrolled: as many more would keep keys of as many steps in registers, which then run out.
static constexpr int UNROLLED = DIM > 128 || LINE_TILES > GROUP ? 64 / STEP_DIMS : STEPS;
static constexpr int UNITS = line_units(STEPS * STEP_DIMS);

#if E4M3
typedef u8 Key;
#else
typedef u16 Key;
#endif

static_assert(TILE % ROWS == 0, "the lines of a row stand at the same places of every tile");
static_assert(DIM % 16 == 0 && STRIPS <= 2, "");

static constexpr int RANGES = 4;

// Neighbouring rows, first_row to end_row, that windows are cut from; the first of them has the number first_window.
struct Range {
    int first_row, end_row, first_window;
};

struct Arguments {
    const u16* index_q;  // [rows, HEADS, DIM]
    const Key* keys;     // [pages, page_blocks, DIM]
    const int* page_table;
    const int* request;
    const int* position;
    float* values;
    float* maxima;  // [rows, segments], or null
    int* visible;
    i64 q_row_stride, q_head_stride, page_stride, place_stride, table_stride, values_stride, maxima_stride;
    float scale;  // of E4M3 keys 256 times what it would be
    int window, windows, slice_blocks, runs, requests, table_pages, pages, page_blocks, block_tokens, top_blocks, width;
    Range ranges[RANGES];  // ascending; those past the last have a first window that is never reached
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ Eight none() {
    Eight eight;
#pragma unroll
    for (int i = 0; i < 4; ++i) eight.pair[i] = 0;
    return eight;
}

__device__ __forceinline__ Eight load_eight(const u16* from) {
    Eight eight;
#if ALIGNED
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
    eight.pair[0] = four.x, eight.pair[1] = four.y, eight.pair[2] = four.z, eight.pair[3] = four.w;
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) eight.pair[i] = __ldg(from + 2 * i) | u32(__ldg(from + 2 * i + 1)) << 16;
#endif
    return eight;
}

__device__ __forceinline__ Eight load_eight(const u8* from) {
    u32 stored[2];
#if ALIGNED
    const unsigned long long eight_bytes = __ldg(reinterpret_cast<const unsigned long long*>(from));
    stored[0] = u32(eight_bytes), stored[1] = u32(eight_bytes >> 32);
#else
    stored[0] = stored[1] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) stored[i / 4] |= u32(__ldg(from + i)) << i % 4 * 8;
#endif
    Eight eight;
    decode_e4m3(stored[0], eight.pair[0], eight.pair[1]);
    decode_e4m3(stored[1], eight.pair[2], eight.pair[3]);
    return eight;
}

// The page of a block, of the pool's; -1 on a hole and from `end` on.
__device__ __forceinline__ int page_of(const Arguments& given, const int* table, int block, int end) {
    const int column = block / given.page_blocks;
    if (block >= end || column >= given.table_pages) return -1;
    const int page = __ldg(table + column);
    return unsigned(page) < unsigned(given.pages) ? page : -1;
}

__device__ __forceinline__ int warp_max(int value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(ALL, value, step));
    return value;
}

// Queries of the window's rows to shared memory, zeros where there is no row, head or dimension.
__device__ __forceinline__ void stage_queries(const Arguments& given, int first_row, int end_row, Eight* queries) {
    constexpr int USED = STEPS * STEP_DIMS / 8;
    for (int i = threadIdx.x; i < LINE_TILES * TILE * USED; i += THREADS) {
        const int line = i / USED, unit = i % USED, row = first_row + line % ROWS;
        const bool there = row < end_row && line < LINES && unit * 8 < DIM;
        const u16* from = given.index_q + row * given.q_row_stride + line / ROWS * given.q_head_stride + unit * 8;
        queries[slot_of(line) * UNITS + unit] = there ? load_eight(from) : none();
    }
}

// Adds up, over the heads, what is positive of the products of the window's lines and a strip of keys.
__device__ __forceinline__ void sum_heads(
    const Eight* queries, const Key* const (&key)[STRIPS][HELD], const bool (&there)[STRIPS][HELD],
    float (&total)[STRIPS][PARTS]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) total[strip][i] = 0.0f;
    }
#pragma unroll 1
    for (int tile = 0; tile < LINE_TILES; tile += GROUP) {
        float products[GROUP][STRIPS][PARTS] = {};
#pragma unroll UNROLLED
        for (int step = 0; step < STEPS; ++step) {
            const int dim = step * STEP_DIMS + operand_dim(lane);
            Eight b[STRIPS][HELD];
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    const bool inside = DIM % STEP_DIMS == 0 || dim < DIM;
                    b[strip][i] = there[strip][i] && inside ? load_eight(key[strip][i] + dim) : none();
                }
            }
#pragma unroll
            for (int line_tile = 0; line_tile < GROUP; ++line_tile) {
                if (tile + line_tile < LINE_TILES) {
                    Eight a[HELD];
#pragma unroll
                    for (int i = 0; i < HELD; ++i) {
                        const int line = (tile + line_tile) * TILE + operand_line(lane, i);
                        a[i] = queries[slot_of(line) * UNITS + dim / 8];
                    }
#pragma unroll
                    for (int strip = 0; strip < STRIPS; ++strip) multiply(products[line_tile][strip], a, b[strip]);
                }
            }
        }
#pragma unroll
        for (int line_tile = 0; line_tile < GROUP; ++line_tile) {
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const int line = (tile + line_tile) * TILE + first_line(lane) + (i & 2 ? LINE_STEP : 0);
                // A line of zeros times an infinite key is NaN. A head's NaN stays.
                if (LINES % TILE == 0 && LINE_TILES % GROUP == 0 || line < LINES) {
#pragma unroll
                    for (int strip = 0; strip < STRIPS; ++strip) {
                        const float product = products[line_tile][strip][i];
                        total[strip][i] += product <= 0.0f ? 0.0f : product;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
        if (ROWS <= 8) fold_lines<3>(total[strip]);
        if (ROWS <= 4) fold_lines<2>(total[strip]);
        if (ROWS <= 2) fold_lines<1>(total[strip]);
        if (ROWS <= 1) fold_lines<0>(total[strip]);
    }
}

// Rows of a window that belong to one request: bit i of `rows` for row i, which sees `seen` blocks (in lane i).
struct Run {
    const int* table;
    u32 rows;
    int seen;
};

// Stores the scores that the run's rows see of 16 blocks from `start` on, and the largest of each row.
// `absent` has the bits of blocks on a hole, by the lanes that hold their operands.
__device__ __forceinline__ void store_tile(
    const Arguments& given, const Run& run, int first_row, int start, const u32 (&absent)[HELD],
    const float (&total)[PARTS]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int part = 0; part < 4; part += 2) {
        const int row = first_line(lane) + (part ? LINE_STEP : 0);
        const int seen = __shfl_sync(ALL, run.seen, row % ROWS);
        const bool mine = row < ROWS && (run.rows >> row & 1);
        const i64 place = first_row + row;
        float most = minus_infinity();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = first_column(lane) + half * COLUMN_STEP, block = start + column;
            float two[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool hole = absent[operand_of_column(column + i)] >> lane_of_column(column + i) & 1;
                // A row that takes all it sees needs no scores: 0 is as good as any.
                const float found = seen > given.top_blocks ? total[4 * half + part + i] * given.scale : 0.0f;
                two[i] = hole ? minus_infinity() : found;
                if (block + i < seen) most = fmaxf(most, two[i]);
            }
            float* to = given.values + place * given.values_stride + block;
            if (mine && block + 1 < seen) {
                *reinterpret_cast<float2*>(to) = make_float2(two[0], two[1]);
            } else if (mine && block < seen) {
                *to = two[0];
            }
        }
        if (given.maxima) {
            most = fmaxf(most, __shfl_xor_sync(ALL, most, COLUMN_LANES[0]));
            most = fmaxf(most, __shfl_xor_sync(ALL, most, COLUMN_LANES[1]));
            const bool leads = !(lane & (COLUMN_LANES[0] | COLUMN_LANES[1]));
            if (mine && leads && start < seen) given.maxima[place * given.maxima_stride + start / TILE] = most;
        }
    }
}

// Zeros for what the run's rows see of the blocks first to last, and -inf on holes: they take it all.
__device__ __forceinline__ void store_everything(const Arguments& given, const Run& run, int first_row, int first, int last) {
    for (int start = first; start < last; start += THREADS) {
        const int block = start + threadIdx.x;
        const float found = page_of(given, run.table, block, last) < 0 ? minus_infinity() : 0.0f;
        for (int row = 0; row < ROWS; ++row) {
            const int seen = __shfl_sync(ALL, run.seen, row);
            if ((run.rows >> row & 1) && block < min(seen, last)) {
                given.values[i64(first_row + row) * given.values_stride + block] = found;
            }
        }
    }
}

__device__ __forceinline__ void score_run(
    const Arguments& given, const Run& run, int first_row, int first, int end, const Eight* queries) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int most = warp_max(lane < ROWS && (run.rows >> lane & 1) ? run.seen : 0), last = min(end, most);
    if (most <= given.top_blocks) {
        store_everything(given, run, first_row, first, last);
        return;
    }
    // Pages are looked up a strip ahead, so that loads of keys need not wait for them.
    int page[STRIPS][HELD];
    const auto look_up = [&](int start) {
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int block = start + strip * TILE + operand_column(lane, i);
                page[strip][i] = page_of(given, run.table, block, last);
            }
        }
    };
    const int begin = first + warp * STRIP;
    look_up(begin);
    for (int start = begin; start < last; start += WARPS * STRIP) {
        const Key* key[STRIPS][HELD];
        bool there[STRIPS][HELD];
        u32 absent[STRIPS][HELD];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int block = start + strip * TILE + operand_column(lane, i);
                const i64 place = block % given.page_blocks;
                there[strip][i] = page[strip][i] >= 0;
                absent[strip][i] = __ballot_sync(ALL, !there[strip][i]);
                key[strip][i] = given.keys + i64(page[strip][i]) * given.page_stride + place * given.place_stride;
            }
        }
        look_up(start + WARPS * STRIP);
        float total[STRIPS][PARTS];
        sum_heads(queries, key, there, total);
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            store_tile(given, run, first_row, start + strip * TILE, absent[strip], total[strip]);
        }
    }
}

extern __shared__ __align__(16) i64 dynamic[];  // queries [lines, UNITS]

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) flashqsa_score_sm7x(const Arguments given) {
    const int lane = threadIdx.x % WARP;
    const int window = blockIdx.x % given.windows;
    Range range = given.ranges[0];
#pragma unroll
    for (int i = 1; i < RANGES; ++i)
        if (window >= given.ranges[i].first_window) range = given.ranges[i];
    const int first_row = range.first_row + (window - range.first_window) * given.window;
    const int end_row = min(first_row + given.window, range.end_row);
    const int run_number = blockIdx.x / given.windows % given.runs;
    const int first = blockIdx.x / given.windows / given.runs * given.slice_blocks;

    // Lane i of every warp has row i, and again as often as there are lanes.
    const int row = first_row + lane % ROWS;
    int owner = -1, seen = 0;
    if (row < end_row) {
        owner = given.request[row];
        const int at = given.position[row];
        const bool live = unsigned(owner) < unsigned(given.requests) && at >= 0;
        // No call may have positions past its bound; where one has, nothing outside its scores is written.
        seen = live ? min(int((unsigned(at) + 1) / unsigned(given.block_tokens)), given.width) : 0;
        if (first == 0 && run_number == 0 && threadIdx.x < ROWS) given.visible[row] = seen;
    }
    u32 waiting = __ballot_sync(ALL, lane < ROWS && seen > first);
    const auto next_run = [&]() {
        const int lead = __shfl_sync(ALL, owner, __ffs(waiting) - 1);
        return __ballot_sync(ALL, owner == lead) & waiting;
    };
    for (int i = 0; i < run_number && waiting; ++i) waiting &= ~next_run();
    if (!waiting) return;

    Eight* queries = reinterpret_cast<Eight*>(dynamic);
    stage_queries(given, first_row, end_row, queries);
    __syncthreads();
    while (waiting) {
        Run run;
        run.rows = next_run();
        run.table = given.page_table + i64(__shfl_sync(ALL, owner, __ffs(waiting) - 1)) * given.table_stride;
        run.seen = seen;
        score_run(given, run, first_row, first, first + given.slice_blocks, queries);
        waiting = run_number == given.runs - 1 ? waiting & ~run.rows : 0;
    }
}
