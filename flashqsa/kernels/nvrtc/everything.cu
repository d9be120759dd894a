// The selection of rows that see no more blocks than they may select: every visible block that is not on a hole,
// ascending. Compiles for sm_70 and newer without other headers.

#include "paging.cuh"

static constexpr int LOADS = 8;  // page-table entries that a lane has in flight

// blocks [rows, top_blocks] ascending and then -1, count [rows]; every entry is written. One warp per row.
extern "C" __global__ void __launch_bounds__(128) flashqsa_select_everything(
    const int* request, const int* position, const int* page_table, int* blocks, int* count, long long table_stride,
    long long blocks_stride, int rows, int requests, int table_pages, int pages, int page_blocks, int block_tokens,
    int top_blocks) {
    const int lane = threadIdx.x % WARP;
    const int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const int owner = request[row], at = position[row];
    const PageTable table = {page_table, table_stride, table_pages, pages};
    // (at + 1) / block_tokens, where at + 1 is within range.
    int seen = is_live(owner, at, requests) ? at / block_tokens + (at % block_tokens == block_tokens - 1) : 0;
    seen = min(seen, top_blocks);
    int* const to = blocks + row * blocks_stride;
    int found = 0;
    for (int first = 0; first < seen; first += WARP * LOADS) {
        int page[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int block = first + i * WARP + lane;
            page[i] = block < seen ? table.page(owner, block / page_blocks) : -1;
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const unsigned held = __ballot_sync(ALL, page[i] >= 0);
            if (page[i] >= 0) to[found + __popc(held & ((1u << lane) - 1))] = first + i * WARP + lane;
            found += __popc(held);
        }
    }
    for (int i = found + lane; i < top_blocks; i += WARP) to[i] = -1;
    if (lane == 0) count[row] = found;
}
