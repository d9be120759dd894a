// Selection of the rows that survivors.cu lists, from all their scores: for rows of which a sample let too few or too many
// blocks through. Programs take one listed row after the other; where none is listed, they end at once.
//
// Compiled with -D: HEADS 2 or 4; DIM 64 or 128; STAGES; BF16 0 or 1; THREADS 256; SEGMENTS and MAXIMA_VECTORS
// of topk.cuh.

typedef unsigned int word;
typedef unsigned long long wide;

#define FP8 0
#define LINES 16                       // of a product: HEADS of one row, the others zero
#define PAIRS (HEADS / 2)
#define KEYS 64                        // of a tile, which a warp group takes alone
#define CHUNKS (DIM / 8)
#define SLABS (DIM / 64)
#define SLAB (KEYS * 128)
#define LINE_SLAB (LINES * 128)
#define TILE (SLABS * SLAB)
#define FULL 0xffffffffu

#if BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

#include "hopper.cuh"
#include "topk.cuh"

struct Arguments {
    const char* q;                 // [rows, HEADS, DIM]
    const char* keys;              // [pages, page_blocks, DIM]
    const int* page_table;         // [requests, table_pages]
    const int* request;            // [rows]
    const int* visible;            // [rows]
    const int* failed;             // how many rows are listed, then the rows
    float* scratch;                // [programs, scratch_stride]: scores of a row, then the maxima of its segments
    int* blocks;                   // [rows, top]
    int* count;                    // [rows]
    long long q_row, q_head, key_page, key_place;  // strides in bytes
    long long table_stride, scratch_stride, blocks_stride;
    int width, table_pages, pages, page_blocks, top;
    float scale;
};

// Copies a tile of a row's keys; `present` has a bit for each of the warp's 16 that is not on a hole.
__device__ __forceinline__ word bring(const Arguments& a, int owner, int first, int seen, word to, int warp, int lane) {
    const int block = first + warp * 16 + (lane & 15);
    long long at = -1;
    const int column = block / a.page_blocks;
    if (block < seen && column < a.table_pages) {
        const int page = __ldg(a.page_table + owner * a.table_stride + column);
        if (word(page) < word(a.pages)) at = page * a.key_page + (block - column * a.page_blocks) * a.key_place;
    }
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i) {
        const int key = i * (32 / CHUNKS) + lane / CHUNKS;
        const long long from = __shfl_sync(FULL, at, key);
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         to + swizzled(warp * 16 + key, lane % CHUNKS)),
                     "l"(a.keys + (from < 0 ? 0 : from) + lane % CHUNKS * 16), "r"(from < 0 ? 0 : 16)
                     : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    return __ballot_sync(FULL, at >= 0);
}

// Scores of all blocks that a row sees: the products and sums of score.cu, in the same order.
__device__ __forceinline__ void score_row(
    const Arguments& a, long long row, int owner, int seen, word queries, word keys, float* scores
) {
    const int group = threadIdx.x >> 7, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    for (int i = threadIdx.x; i < LINES * CHUNKS; i += THREADS) {
        const int line = i / CHUNKS, chunk = i % CHUNKS, pair = line >> 3, head = pair * 2 + (line & 1);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (pair < PAIRS && (line >> 1 & 3) == 0) v = __ldg((const uint4*)(a.q + row * a.q_row + head * a.q_head) + chunk);
        store_shared(queries + swizzled(line, chunk, LINE_SLAB), v);
    }
    publish();
    __syncthreads();
    const word lines = matrix_at(queries, 16), own = keys + group * STAGES * TILE;
    const int tiles = (seen + 2 * KEYS - 1) / (2 * KEYS);  // of each warp group
    word present[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        present[i] = bring(a, owner, (2 * i + group) * KEYS, seen, own + i * TILE, warp, lane);
    for (int begin = 0; begin < tiles; begin += STAGES) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            const int tile = begin + stage;
            if (tile >= tiles) break;
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            publish();
            group_barrier(1 + group);  // every thread's copies, and its products with the stage that is filled next
            constexpr int ahead = STAGES - 1;
            present[(stage + ahead) % STAGES] = bring(
                a, owner, (2 * (tile + ahead) + group) * KEYS, seen, own + (stage + ahead) % STAGES * TILE, warp, lane);
            float products[8];
            fence_registers(products);
            products_begin();
            const word tile_keys = matrix_at(own + stage * TILE, 16);
#pragma unroll
            for (int i = 0; i < DIM / 16; ++i) {
                multiply_few_lines(products, matrix(tile_keys, (i >> 2) * SLAB + (i & 3) * 32),
                                   matrix(lines, (i >> 2) * LINE_SLAB + (i & 3) * 32), i > 0);
            }
            products_end();
            products_wait<0>();
            fence_registers(products);
            if ((lane & 3) == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int key = (lane >> 2) + 8 * h, block = (2 * tile + group) * KEYS + warp * 16 + key;
                    float sum = relu(products[2 * h]) + relu(products[2 * h + 1]);
                    if (PAIRS == 2) sum += relu(products[4 + 2 * h]) + relu(products[4 + 2 * h + 1]);
                    const float found = present[stage] >> key & 1 ? sum * a.scale : __int_as_float(0xff800000);
                    if (block < seen) scores[block] = found;
                }
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flashqsa_rescore_sm90(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char dynamic[];
    __shared__ Shared shared;
    const word queries = ((word)__cvta_generic_to_shared(dynamic) + 1023) & ~1023u;
    const word keys = queries + (SLABS * LINE_SLAB + 1023) / 1024 * 1024;
    float* const scores = a.scratch + blockIdx.x * a.scratch_stride;
    float* const maxima = scores + (a.width + SEGMENT - 1) / SEGMENT * SEGMENT;
    const int listed = a.failed[0];
    for (int i = blockIdx.x; i < listed; i += gridDim.x) {
        const long long row = a.failed[1 + i];
        const int seen = a.visible[row], segments = (seen + SEGMENT - 1) / SEGMENT;
        score_row(a, row, a.request[row], seen, queries, keys, scores);
        __syncthreads();
        for (int s = threadIdx.x; s < segments; s += THREADS) {
            float most = __uint_as_float(MINUS_INFINITY);
            for (int j = 0; j < SEGMENT; j += 4) most = fmaxf(most, largest_of(load_four(scores, s * SEGMENT + j, seen, true)));
            maxima[s] = most;
        }
        __syncthreads();
        select_row(scores, maxima, seen, a.blocks + row * a.blocks_stride, a.count + row, a.top, true, shared);
        __syncthreads();
    }
}
