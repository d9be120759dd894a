// Exact top-k of score rows (see topk.cuh), one program per row, and the maxima of their segments where the scorer did
// not write them.
//
// Macros: those of topk.cuh, and RESIDENT, threads that should fit on a multiprocessor, which bounds a thread's registers.

#include "topk.cuh"

// Largest score of each segment of each row: maxima [rows, segments], NaN left out, -inf where there is no number.
// Columns from visible[row] on are not read, segments from there on not written. A program does MAXIMA_COLUMNS columns of
// a row, `slices` of them the row.
static constexpr int MAXIMA_LOADS = 4;
static constexpr int MAXIMA_COLUMNS = THREADS * 4 * MAXIMA_LOADS;

extern "C" __global__ void __launch_bounds__(THREADS) segment_maxima(
    const float* __restrict__ values, i64 value_stride, const int* __restrict__ visible, float* __restrict__ maxima,
    i64 maxima_stride, int slices, int aligned) {
    const int row = blockIdx.x / slices, slice = blockIdx.x % slices;
    const int seen = visible[row], start = slice * MAXIMA_COLUMNS;
    if (start >= seen) return;
    float4 four[MAXIMA_LOADS];
#pragma unroll
    for (int i = 0; i < MAXIMA_LOADS; ++i)
        four[i] = load_four(values + row * value_stride, start + (i * THREADS + threadIdx.x) * 4, seen, aligned);
#pragma unroll
    for (int i = 0; i < MAXIMA_LOADS; ++i) {
        const int column = start + (i * THREADS + threadIdx.x) * 4;
        float most = largest_of(four[i]);
        most = fmaxf(most, __shfl_xor_sync(EVERY_LANE, most, 1));
        most = fmaxf(most, __shfl_xor_sync(EVERY_LANE, most, 2));
        if (column % SEGMENT == 0 && column < seen) maxima[row * maxima_stride + column / SEGMENT] = most;
    }
}

// One program per row: blocks [rows, top] ascending and then -1, count [rows].
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT / THREADS) select_rows(
    const float* __restrict__ values, i64 value_stride, const float* __restrict__ maxima, i64 maxima_stride,
    const int* __restrict__ visible, int* __restrict__ blocks, i64 blocks_stride, int* __restrict__ count, int top,
    int aligned) {
    __shared__ Shared shared;
    const i64 row = blockIdx.x;
    select_row(values + row * value_stride, maxima + row * maxima_stride, max(visible[row], 0),
               blocks + row * blocks_stride, count + row, top, aligned, shared);
}
