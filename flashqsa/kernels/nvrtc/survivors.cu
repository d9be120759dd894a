// Selection without a score matrix: the floor that a row's sample sets, and the exact top-k of the blocks that reach it.
//
// The sample is ranked as the row would be: score descending, block id ascending. The block at `rank` of it is the floor,
// so about rank * stride blocks of the row reach it, ties counted by their ids like everything else: a plateau of equal
// scores is cut by ids and lets no more through. `flashqsa_select_survivors` selects from what a scorer let through. It
// lists rows for which that is too little (fewer than `top`, though more was seen) or too much (a list ran over): they
// are to be done again from all their scores.
//
// Macros: THREADS of a program; KEYS, samples or survivors that a thread ranks at most, a multiple of 4 up to 32;
// USUAL_KEYS, survivors that a thread ranks in most rows; SLICES, the most lists of a row; RESIDENT, threads that should
// fit on a multiprocessor, which bounds a thread's registers.

#include "paging.cuh"
#include "ranking.cuh"
#include "sampling.cuh"

// One program per row: floors and visible [rows] from samples [rows, blocks sampled]. Rows that see no more than `top`
// blocks let none go on: they need no scores. `failed[0]` becomes 0.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT / THREADS) flashqsa_find_floors(
    const float* __restrict__ samples, i64 sample_stride, const int* __restrict__ request,
    const int* __restrict__ position, Floor* __restrict__ floors, int* __restrict__ visible, int* __restrict__ failed,
    int requests, int max_position, int block_tokens, int top, int rank, int stride) {
    __shared__ Ranking shared;
    __shared__ int last;
    const int thread = threadIdx.x;
    const i64 row = blockIdx.x;
    const int seen = blocks_seen(request[row], position[row], requests, max_position, block_tokens);
    const int drawn = blocks_sampled(seen, top, rank, stride);
    Floor floor = {LEAST_SCORE, EVERY_BLOCK};
    if (seen <= top) floor = {__uint_as_float(0x7fc00000u), -1};
    if (drawn > 0) {
        const int per_thread = (drawn + 4 * THREADS - 1) / (4 * THREADS) * 4, first = thread * per_thread;
        u32 keys[KEYS];
#pragma unroll
        for (int i = 0; i < KEYS; i += 4) {
            const float4 four = load_four(samples + row * sample_stride, first + i, i < per_thread ? drawn : 0, true);
            keys[i] = key_of(four.x), keys[i + 1] = key_of(four.y);
            keys[i + 2] = key_of(four.z), keys[i + 3] = key_of(four.w);
        }
        if (thread == 0) last = EVERY_BLOCK;
        const Cut cut = find_cut(keys, rank, shared);
        if (cut.equal > 0) {
            u32 ties = 0;
#pragma unroll
            for (int i = 0; i < KEYS; ++i) ties |= u32(keys[i] == cut.key) << i;
            if (thread == 0) last = -1;
            __syncthreads();
            put_chosen(keys, cut, shared, [&](int i, int) {
                if (ties >> i & 1) atomicMax(&last, sampled_block(first + i, stride));
            });
        }
        __syncthreads();
        floor = {score_of(floor_of(cut)), last};
    }
    if (thread == 0) {
        floors[row] = floor;
        visible[row] = seen;
        if (row == 0) failed[0] = 0;
    }
}

// Sets the bits of a row's best `top` survivors, of `total`, in `bits`: a thread ranks COUNT of them.
template <int COUNT>
__device__ __forceinline__ void mark_best(
    const uint2* own, const int (&ends)[SLICES], int total, int capacity, int top, u32* bits, Ranking& shared) {
    const int thread = threadIdx.x;
    u32 keys[COUNT], ids[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int at = i * THREADS + thread;
        keys[i] = 0, ids[i] = 0;
        if (at < total) {
            int from = at;
#pragma unroll
            for (int s = 0; s < SLICES - 1; ++s)
                if (at >= ends[s]) from = (s + 1) * capacity + at - ends[s];
            const uint2 entry = own[from];
            keys[i] = key_of(__uint_as_float(entry.x)), ids[i] = entry.y;
        }
    }
    const Cut cut = total <= top ? Cut{0, 0} : find_cut(keys, top, shared);
    Cut among_equals = {0, 0};
    if (cut.equal > 0) {
        // Lower ids first: as keys, they are turned round.
        u32 turned[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) turned[i] = keys[i] == cut.key ? ~ids[i] : 0;
        among_equals = find_cut(turned, cut.equal, shared);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const u32 turned = ~ids[i];
        const bool equal = cut.equal > 0 && keys[i] == cut.key &&
                           (turned > among_equals.key || (turned == among_equals.key && among_equals.equal > 0));
        if (keys[i] > cut.key || equal) atomicOr(&bits[ids[i] / 32], 1u << ids[i] % 32);
    }
}

// One program per row: blocks [rows, top] ascending and then -1, count [rows], from survivors [rows, slices, capacity] of
// (score's bits, block id), `counts` [rows, slices] of them. Rows that see no more than `top` blocks take all that are
// not on a hole. Rows to be done again are listed from failed[1] on; failed[0] counts them. `words` of 32 blocks are in
// dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT / THREADS) flashqsa_select_survivors(
    const uint2* __restrict__ survivors, const int* __restrict__ counts, const Floor* __restrict__ floors,
    const int* __restrict__ visible, const int* __restrict__ request, const int* __restrict__ page_table,
    int* __restrict__ blocks, int* __restrict__ count, int* __restrict__ failed, i64 table_stride, i64 blocks_stride,
    int slices, int capacity, int table_pages, int pages, int page_blocks, int top, int words) {
    __shared__ Ranking shared;
    extern __shared__ u32 dynamic[];
    const int thread = threadIdx.x;
    const i64 row = blockIdx.x;
    const int seen = visible[row];
    words = min(words, (seen + 31) / 32);
    for (int i = thread; i < words; i += THREADS) dynamic[i] = 0;
    if (seen <= top) {
        __syncthreads();
        const PageTable table = {page_table, table_stride, table_pages, pages};
        const int owner = request[row];
        for (int block = thread; block < seen; block += THREADS)
            if (table.page(owner, block / page_blocks) >= 0) atomicOr(&dynamic[block / 32], 1u << block % 32);
    } else {
        const uint2* const own = survivors + row * slices * capacity;
        int ends[SLICES];  // of the lists, were they one
        int total = 0, longest = 0;
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            const int length = s < slices ? counts[row * slices + s] : 0;
            total += length, longest = max(longest, length);
            ends[s] = total;
        }
        const Floor floor = floors[row];
        const bool all = floor.least == LEAST_SCORE && floor.last == EVERY_BLOCK;
        if (longest > capacity || total > THREADS * KEYS || (total < top && !all)) {
            if (thread == 0) failed[1 + atomicAdd(failed, 1)] = int(row);
            return;
        }
        if (total <= THREADS * USUAL_KEYS) {
            mark_best<USUAL_KEYS>(own, ends, total, capacity, top, dynamic, shared);
        } else {
            mark_best<KEYS>(own, ends, total, capacity, top, dynamic, shared);
        }
    }
    __syncthreads();
    const int each = (words + THREADS - 1) / THREADS, first = thread * each;
    u32 own = 0, selected;
    for (int i = first; i < min(first + each, words); ++i) own += __popc(dynamic[i]);
    u32 position = scan(own, selected, shared);
    for (int i = first; i < min(first + each, words); ++i)
        for (u32 bits = dynamic[i]; bits; bits &= bits - 1) shared.output[position++] = 32 * i + __ffs(bits) - 1;
    __syncthreads();
    for (int i = thread; i < top; i += THREADS) blocks[row * blocks_stride + i] = i < selected ? shared.output[i] : -1;
    if (thread == 0) count[row] = selected;
}
