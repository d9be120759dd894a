// Index scores on Hopper (sm_90a) that never lie in memory as a matrix: of a sample of each row's blocks, or of all of
// them, of which only those that reach the row's floor are put out.
//
// A program takes a window of rows and every `slices`-th tile of 128 keys: neighbouring tiles go to different programs, so
// that what clusters is spread over a row's lists. A warp group of producers gathers keys into a ring of stages; each of
// four warp groups of consumers multiplies half of a tile's keys with half of the window's 256 query lines (rows times
// heads), which stay in shared memory. Lines are ordered so that a thread holds all heads of a row and a key, and the sum
// over heads stays in its registers. One consumer's products run under the others' sums and comparisons.
//
// Compiled with -D: SAMPLE 1 for the sample, 0 for all; HEADS 2 or 4; DIM 64 or 128; STAGES; BF16 0 or 1;
// PRODUCER_REGISTERS and CONSUMER_REGISTERS, of a thread.

typedef unsigned int word;
typedef unsigned long long wide;

#define FP8 0
#define LINES 256
#define ROWS (LINES / HEADS)           // of a window
#define PAIRS (HEADS / 2)              // of heads
#define KEYS 128                       // of a tile
#define CHUNKS (DIM / 8)               // 16 bytes each, of a key or a line
#define COPIED (32 / CHUNKS)           // keys that a warp copies at a time
#define SLABS (DIM / 64)
#define SLAB (KEYS * 128)              // bytes of 128 keys x 64 elements
#define LINE_SLAB (LINES * 128)        // of 256 lines x 64 elements
#define TILE (SLABS * SLAB)
#define PRODUCERS 128                  // threads
#define CONSUMERS 512                  // threads
#define THREAD_ROWS (ROWS / 8)         // of a consumer's thread, each with two keys of a tile
#define THREAD_SCORES (2 * THREAD_ROWS)
#define KEPT (THREAD_SCORES + 4)       // floats that a thread has for its scores: 4 more keep threads in other banks
#define FULL 0xffffffffu

#if SAMPLE
#define KERNEL flashqsa_sample_sm90
#else
#define KERNEL flashqsa_score_sm90
#endif

#if BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

#include "hopper.cuh"
#include "sampling.cuh"

struct Arguments {
    const char* q;                 // [rows, HEADS, DIM]
    const char* keys;              // [pages, page_blocks, DIM]
    const int* page_table;         // [requests, table_pages]
    const int* request;            // [rows]
    const int* position;           // [rows]
    float* samples;                // SAMPLE: [rows, samples_stride]; a hole's is -inf
    const Floor* floors;           // else: [rows]
    uint2* survivors;              // [rows, slices, capacity] of (score's bits, block), in no order
    int* counts;                   // [rows, slices], of those that would be there; more than capacity are cut off
    long long q_row, q_head, key_page, key_place;  // strides in bytes
    long long table_stride, samples_stride;
    int rows, requests, max_position, table_pages, pages, page_blocks, block_tokens, top, rank, stride, slices, capacity;
    float scale;
};

struct Shared {
    float kept[SAMPLE ? 1 : CONSUMERS * KEPT];
    word present[STAGES][KEYS / 32];   // a bit for each key of a stage that is not on a hole
    wide full[STAGES], free[STAGES];
    int owner[ROWS], reach[ROWS];      // how many keys (or samples) of its request a row takes; 0 for none
    int run[ROWS];                     // which of the window's requests a row is of
    int run_request[ROWS], run_reach[ROWS], run_least_reach[ROWS], runs;
    Floor floor[ROWS];
    int count[ROWS];
};

__device__ __forceinline__ int line_row(int line) { return (line >> 3) / PAIRS * 4 + (line >> 1 & 3); }
__device__ __forceinline__ int line_head(int line) { return (line >> 3) % PAIRS * 2 + (line & 1); }

__device__ __forceinline__ void read_rows(const Arguments& a, Shared& s, long long first_row) {
    const int r = threadIdx.x;
    if (r < ROWS) {
        const long long row = first_row + r;
        int owner = -1, reach = 0;
        Floor floor = {__int_as_float(0x7fc00000), -1};
        if (row < a.rows) {
            owner = a.request[row];
            const int seen = blocks_seen(owner, a.position[row], a.requests, a.max_position, a.block_tokens);
#if SAMPLE
            reach = blocks_sampled(seen, a.top, a.rank, a.stride);
#else
            floor = a.floors[row];
            reach = floor.least == floor.least ? seen : 0;
#endif
        }
        s.owner[r] = reach > 0 ? owner : -1;
        s.reach[r] = reach;
        s.floor[r] = floor;
        s.count[r] = 0;
    }
    __syncthreads();
    if (r == 0) {
        int runs = 0, last = -1;
        for (int i = 0; i < ROWS; ++i) {
            const int owner = s.owner[i];
            if (owner >= 0 && owner != last) {
                last = s.run_request[runs] = owner;
                s.run_reach[runs] = s.run_least_reach[runs] = s.reach[i];
                ++runs;
            }
            s.run[i] = owner >= 0 ? runs - 1 : -1;
            if (owner >= 0) {
                s.run_reach[runs - 1] = max(s.run_reach[runs - 1], s.reach[i]);
                s.run_least_reach[runs - 1] = min(s.run_least_reach[runs - 1], s.reach[i]);
            }
        }
        s.runs = runs;
    }
}

__device__ __forceinline__ void load_lines(const Arguments& a, word queries, long long first_row) {
    for (int i = threadIdx.x; i < LINES * CHUNKS; i += PRODUCERS + CONSUMERS) {
        const int line = i / CHUNKS, chunk = i % CHUNKS;
        const long long row = first_row + line_row(line);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < a.rows) v = __ldg((const uint4*)(a.q + row * a.q_row + line_head(line) * a.q_head) + chunk);
        store_shared(queries + swizzled(line, chunk, LINE_SLAB), v);
    }
    publish();
}

// Where a lane's key of a tile lies, in bytes from the first; -1 on a hole and past the end.
__device__ __forceinline__ long long key_at(const Arguments& a, int owner, int index, int reach) {
    if (index >= reach) return -1;
#if SAMPLE
    const int block = sampled_block(index, a.stride);
#else
    const int block = index;
#endif
    const int column = block / a.page_blocks;
    if (column >= a.table_pages) return -1;
    const int page = __ldg(a.page_table + owner * a.table_stride + column);
    return word(page) < word(a.pages) ? page * a.key_page + (block - column * a.page_blocks) * a.key_place : -1;
}

__device__ __forceinline__ void produce(const Arguments& a, Shared& s, word keys, int slice) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, number = warp * 32 + lane;
    const word full = __cvta_generic_to_shared(s.full), free = __cvta_generic_to_shared(s.free);
    const int chunk = lane % CHUNKS, runs = s.runs;
    word spots[8 / COPIED];            // of this lane's copies among a warp's keys: they repeat every 8 keys
#pragma unroll
    for (int i = 0; i < 8 / COPIED; ++i) spots[i] = swizzled(warp * 32 + i * COPIED + lane / CHUNKS, chunk);
    int filled = 0;
    for (int run = 0; run < runs; ++run) {
        const int owner = s.run_request[run], reach = s.run_reach[run];
        long long at = key_at(a, owner, slice * KEYS + number, reach);
        for (int tile = slice; tile * KEYS < reach; tile += a.slices, ++filled) {
            const long long next = key_at(a, owner, (tile + a.slices) * KEYS + number, reach);
            const int stage = filled % STAGES;
            barrier_wait(free + 8 * stage, (filled / STAGES & 1) ^ 1);
            const word present = __ballot_sync(FULL, at >= 0);
            const word to = keys + stage * TILE;
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                const int key = i * COPIED + lane / CHUNKS;
                const long long from = __shfl_sync(FULL, at, key);
                const word spot = to + spots[i % (8 / COPIED)] + i * COPIED / 8 * 1024;
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(spot),
                             "l"(a.keys + (from < 0 ? 0 : from) + chunk * 16), "r"(from < 0 ? 0 : 16)
                             : "memory");
            }
            if (lane == 0) s.present[stage][warp] = present;
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + 8 * stage) : "memory");
            warp_arrive(full + 8 * stage, lane);  // the bits of what is present
            at = next;
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// The score of a thread's row p and key h, of the products: heads in pairs, then the pairs.
__device__ __forceinline__ float score_at(const float (&products)[64], int p, int h, float scale) {
    float sum = relu(products[4 * PAIRS * p + 2 * h]) + relu(products[4 * PAIRS * p + 2 * h + 1]);
#if PAIRS == 2
    sum += relu(products[8 * p + 4 + 2 * h]) + relu(products[8 * p + 4 + 2 * h + 1]);
#endif
    return sum * scale;
}

__device__ __forceinline__ float next_above(float x) {  // of a finite number
    const int bits = __float_as_int(x + 0.0f);
    return __int_as_float(bits >= 0 ? bits + 1 : bits - 1);
}

__device__ __forceinline__ void consume(
    const Arguments& a, Shared& s, word queries, word keys, long long first_row, int slice, int consumer
) {
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const int half = consumer >> 1, own_row = half * (ROWS / 2) + (lane & 3);
    const word full = __cvta_generic_to_shared(s.full), free = __cvta_generic_to_shared(s.free);
    const word lines = matrix_at(queries + half * (LINES / 2) * 128, 16);
    const int runs = s.runs, own_key = (consumer & 1) * 64 + warp * 16 + (lane >> 2);
    const int word_of_key = own_key >> 5, bit_of_key = own_key & 31;
#if !SAMPLE
    uint2* const own_survivors = a.survivors + ((first_row + own_row) * a.slices + slice) * a.capacity;
    const int row_survivors = 4 * a.slices * a.capacity;
#endif
    float products[64];
    int used = 0;
    for (int run = 0; run < runs; ++run) {
        const int reach = s.run_reach[run];
#if SAMPLE
        int limit[THREAD_ROWS];
#pragma unroll
        for (int p = 0; p < THREAD_ROWS; ++p) limit[p] = s.run[own_row + 4 * p] == run ? s.reach[own_row + 4 * p] : 0;
#else
        float least[THREAD_ROWS];  // what a score must reach; NaN for rows of other requests
        bool lifts = true;         // whether it rises on the way: past a floor's last equal, more is asked
        const int least_reach = s.run_least_reach[run];
#endif
        for (int tile = slice; tile * KEYS < reach; tile += a.slices, ++used) {
            const int stage = used % STAGES;
#if !SAMPLE
            if (lifts) {
                lifts = false;
#pragma unroll
                for (int p = 0; p < THREAD_ROWS; ++p) {
                    const Floor floor = s.floor[own_row + 4 * p];
                    const bool past = tile * KEYS > floor.last;
                    least[p] = past ? next_above(floor.least) : floor.least;
                    if (s.run[own_row + 4 * p] != run) least[p] = __int_as_float(0x7fc00000);
                    else if (!past && floor.last != EVERY_BLOCK) lifts = true;
                }
            }
#endif
            barrier_wait(full + 8 * stage, used / STAGES & 1);
            publish();
            fence_registers(products);
            products_begin();
            const word own = matrix_at(keys + stage * TILE + (consumer & 1) * 64 * 128, 16);
#pragma unroll
            for (int i = 0; i < DIM / 16; ++i) {
                multiply_lines(products, matrix(own, (i >> 2) * SLAB + (i & 3) * 32),
                               matrix(lines, (i >> 2) * LINE_SLAB + (i & 3) * 32), i > 0);
            }
            products_end();
            const word present = s.present[stage][word_of_key] >> bit_of_key;  // of key h: bit 8 * h
            products_wait<0>();
            fence_registers(products);
            warp_arrive(free + 8 * stage, lane);
            const int first_key = tile * KEYS + own_key;
#if SAMPLE
#pragma unroll
            for (int p = 0; p < THREAD_ROWS; ++p) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float found = present >> 8 * h & 1 ? score_at(products, p, h, a.scale) : -__int_as_float(0x7f800000);
                    const int index = first_key + 8 * h;
                    if (index < limit[p]) a.samples[(first_row + own_row + 4 * p) * a.samples_stride + index] = found;
                }
            }
#else
            word reached = 0;
            float4* const kept = (float4*)(s.kept + (threadIdx.x - PRODUCERS) * KEPT);
#pragma unroll
            for (int p = 0; p < THREAD_ROWS; p += 2) {
                float4 four;
                four.x = score_at(products, p, 0, a.scale), four.y = score_at(products, p, 1, a.scale);
                four.z = score_at(products, p + 1, 0, a.scale), four.w = score_at(products, p + 1, 1, a.scale);
                word bits = four.x >= least[p] ? 1 : 0;
                if (four.y >= least[p]) bits |= 2;
                if (four.z >= least[p + 1]) bits |= 4;
                if (four.w >= least[p + 1]) bits |= 8;
                reached |= bits << 2 * p;
                if (bits) kept[p / 2] = four;
            }
            const word both_present = 1 | 1 << 8;
            if (lifts || (tile + 1) * KEYS > least_reach || (present & both_present) != both_present) {
                // Some may be on a hole, past what their row sees, or equal to the floor but of too high an id.
                for (word rest = reached; rest; rest &= rest - 1) {
                    const int i = __ffs(rest) - 1, row = own_row + (i >> 1) * 4, h = i & 1, block = first_key + 8 * h;
                    const Floor floor = s.floor[row];
                    const bool equal = ((const float*)kept)[i] == floor.least;
                    if (!(present >> 8 * h & 1) || block >= s.reach[row] || (equal && block > floor.last))
                        reached ^= rest & -rest;
                }
            }
            while (reached) {
                const int i = __ffs(reached) - 1, p = i >> 1;
                reached &= reached - 1;
                const int at = atomicAdd(&s.count[own_row + 4 * p], 1);
                if (at < a.capacity)
                    own_survivors[p * row_survivors + at] = make_uint2(((const word*)kept)[i], first_key + 8 * (i & 1));
            }
#endif
        }
    }
#if !SAMPLE
    asm volatile("bar.sync 1, 512;" ::: "memory");
    const int r = threadIdx.x - PRODUCERS;
    if (r < ROWS && first_row + r < a.rows) a.counts[(first_row + r) * a.slices + slice] = s.count[r];
#endif
}

extern "C" __global__ void __launch_bounds__(PRODUCERS + CONSUMERS, 1)
KERNEL(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char dynamic[];
    __shared__ __align__(16) Shared s;
    const word queries = ((word)__cvta_generic_to_shared(dynamic) + 1023) & ~1023u;
    const word keys = queries + SLABS * LINE_SLAB;
    const int slice = blockIdx.x % a.slices;
    const long long first_row = (long long)(blockIdx.x / a.slices) * ROWS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(__cvta_generic_to_shared(s.full + i), PRODUCERS + 4);
            barrier_init(__cvta_generic_to_shared(s.free + i), CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    read_rows(a, s, first_row);
    load_lines(a, queries, first_row);
    __syncthreads();
    const int role = __shfl_sync(FULL, threadIdx.x >> 7, 0);  // known to be a warp's, so are addresses of its products
    if (role == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce(a, s, keys, slice);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(a, s, queries, keys, first_row, slice, role - 1);
    }
}
