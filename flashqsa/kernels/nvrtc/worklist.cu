// Worklist of a window of consecutive rows: the union of the rows' blocks and open blocks, ascending, with a bit per
// row and token. One thread block per window. Compiles for sm_70 and newer without headers.
//
// A bitmap over the blocks that a run (rows of one request within the window) can see is filled with shared-memory ORs;
// a popcount prefix over it gives every block its rank, which is its place in the ascending list. ORs commute and ranks
// are unique, so the result does not depend on the order in which threads run.

typedef unsigned int word;
typedef unsigned short half_word;

#define MAX_ROWS 32          // bits of a mask word
#define SUPER 32             // bitmap words per prefix group: one warp scans one group
// Rows whose blocks a thread fetches at a time. For sm_70, NVRTC 12.6 does not fit 8 into the 40 registers that three
// programs per multiprocessor leave a thread: it spills in the loops. Windows of 9 to 12 rows take two turns anyway.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 700
#define BATCH 6
#else
#define BATCH 8
#endif
#define FULL 0xffffffffu

__device__ __forceinline__ int warp_inclusive_sum(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(FULL, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(512, 3) flashqsa_worklist(
    const int* __restrict__ blocks,           // [rows, blocks_stride] ascending block ids; null: every visible block
    const int* __restrict__ count,            // [rows]; unused without blocks
    const int* __restrict__ request,          // [rows], -1 for padding
    const int* __restrict__ position,         // [rows], negative for padding
    const int* __restrict__ page_table,       // [requests, table_stride], -1 for a hole
    int* all_places,                          // [windows, capacity] where a block's keys lie, in units
    int* all_value_places,                    // the same for its values; null where they lie alike
    word* all_token_masks,                    // [windows, capacity, block_tokens]
    int* entries,                             // [windows]
    int* done,                                // [windows, done_per_window], zeroed for the attention kernel
    long long blocks_stride,
    long long table_stride,
    int all_rows,
    int requests,
    int table_pages,
    int pages,                                // of the cache
    int top_blocks,
    int group_rows,
    int block_tokens,
    int page_blocks,
    int k_page_units,                         // units from page to page, and from block to block of a page
    int k_block_units,
    int v_page_units,
    int v_block_units,
    int capacity,                             // entries per window, a multiple of pad
    int pad,                                  // lists end on a multiple of it, with entries that no row reads
    int max_blocks,                           // blocks that the bitmap holds
    int cached,                               // entries ranked at a time in shared memory
    int done_per_window
) {
    extern __shared__ word dynamic[];
    __shared__ int row_request[MAX_ROWS], row_position[MAX_ROWS], row_count[MAX_ROWS];
    const int words_max = (max_blocks + 31) >> 5;
    const int supers_max = (words_max + SUPER - 1) / SUPER;
    word* const bitmap = dynamic;                                 // [words_max]
    int* const super_first = (int*)(bitmap + words_max);          // [supers_max + 1] set bits before a group of words
    word* const masks = (word*)(super_first + supers_max + 1);    // [cached]
    int* const ids = (int*)(masks + cached);                      // [cached]
    half_word* const word_first = (half_word*)(ids + cached);     // [words_max] set bits before a word, in its group

    const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31, warp = tid >> 5, warps = threads >> 5;
    const int window = blockIdx.x;
    const int first_row = window * group_rows;
    const int rows = min(group_rows, all_rows - first_row);
    const long long base = (long long)window * capacity;  // added at each use: three pointers would take six registers

    for (int i = tid; i < done_per_window; i += threads) done[(long long)window * done_per_window + i] = 0;
    if (tid < rows) {
        const int row = first_row + tid;
        const int given = position[row], owner = request[row];
        // What stands beside a -1 may be any number. Rows of no request, or past the bound on positions, see nothing.
        const bool live = owner >= 0 && owner < requests && given >= 0 && given / block_tokens < max_blocks;
        const int at = live ? given : -1;
        row_request[tid] = live ? owner : -1;
        row_position[tid] = at;
        const int visible = (at + 1) / block_tokens;
        row_count[tid] = !live ? 0 : blocks ? min(max(count[row], 0), top_blocks) : visible;
    }
    __syncthreads();

    // Block i of a row's selection; -1 past its end, and for rows from `stop` on.
    const auto selected = [&](int r, int i, int stop) {
        if (r >= stop || i >= row_count[r]) return -1;
        return blocks ? __ldg(blocks + (first_row + r) * blocks_stride + i) : i;
    };
    // The block that a row stands in when it does not see all of it; else -1.
    const auto open_block = [&](int r) {
        const int seen = row_position[r] + 1;
        return row_request[r] >= 0 && seen % block_tokens ? seen / block_tokens : -1;
    };
    // Entry of a block that the rows of `mask` selected; rows start to stop are one request's.
    const auto write = [&](int entry, int block, word mask, int start, int stop) {
        const int column = block / page_blocks, in_page = block - column * page_blocks;
        const bool held = (word)column < (word)table_pages;
        const int found = held ? __ldg(page_table + row_request[start] * table_stride + column) : -1;
        const int page = found < pages ? found : -1;
        if (page < 0) mask = 0;  // a hole: nobody reads it
        const long long at = base + entry;
        all_places[at] = page < 0 ? 0 : page * k_page_units + in_page * k_block_units;
        if (all_value_places) all_value_places[at] = page < 0 ? 0 : page * v_page_units + in_page * v_block_units;
        word* const to = all_token_masks + at * block_tokens;
        if (block_tokens == 4 && (block + 1) * 4 <= row_position[start] + 1) {  // every row sees the whole block
            *(uint4*)to = make_uint4(mask, mask, mask, mask);
            return;
        }
        for (int t = 0; t < block_tokens; ++t) {
            int reached = start;  // rows from here on are at or past the token
            while (reached < stop && row_position[reached] < block * block_tokens + t) ++reached;
            to[t] = reached < MAX_ROWS ? mask >> reached << reached : 0;
        }
    };

    int written = 0;
    for (int start = 0, stop; start < rows; start = stop) {
        const int owner = row_request[start];
        stop = start + 1;
        if (owner < 0) continue;
        // Padding may stand between rows of a request: it has no blocks, and belongs to the run unless it ends it.
        while (stop < rows && (row_request[stop] == owner || row_request[stop] < 0)) ++stop;
        while (row_request[stop - 1] < 0) --stop;
        if (stop == start + 1) {  // one row's blocks ascend already
            const int count = row_count[start], seen = row_position[start] + 1, open = seen / block_tokens;
            const int total = min(count + (seen % block_tokens != 0), capacity - written);
            for (int i = tid; i < total; i += threads) {
                const int block = i == count ? open : selected(start, i, stop);
                write(written + i, block, (word)block <= (word)open ? 1u << start : 0, start, stop);
            }
            written += total;
            continue;
        }
        // Positions ascend within a request, so the run's last row sees the most.
        const int limit = min(row_position[stop - 1] / block_tokens + 1, max_blocks);
        const int words = (limit + 31) >> 5, supers = (words + SUPER - 1) / SUPER;
        int longest = 0;
        for (int r = start; r < stop; ++r) longest = max(longest, row_count[r]);

        for (int i = tid; i < words; i += threads) bitmap[i] = 0;
        __syncthreads();
        for (int i = tid; i < longest; i += threads) {
            for (int r = start; r < stop; r += BATCH) {
                int block[BATCH];
#pragma unroll
                for (int j = 0; j < BATCH; ++j) block[j] = selected(r + j, i, stop);
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    if ((word)block[j] < (word)limit) atomicOr(bitmap + (block[j] >> 5), 1u << (block[j] & 31));
                }
            }
        }
        if (tid >= start && tid < stop) {
            const int block = open_block(tid);
            if ((word)block < (word)limit) atomicOr(bitmap + (block >> 5), 1u << (block & 31));
        }
        __syncthreads();
        for (int s = warp; s < supers; s += warps) {
            const int w = s * SUPER + lane;
            const int bits = w < words ? __popc(bitmap[w]) : 0;
            const int sum = warp_inclusive_sum(bits, lane);
            if (w < words) word_first[w] = (half_word)(sum - bits);
            if (lane == 31) super_first[s + 1] = sum;
        }
        __syncthreads();
        if (warp == 0) {
            int before = 0;
            if (lane == 0) super_first[0] = 0;
            for (int s = 0; s < supers; s += 32) {
                const int own = s + lane < supers ? super_first[s + lane + 1] : 0;
                const int sum = warp_inclusive_sum(own, lane) + before;
                if (s + lane < supers) super_first[s + lane + 1] = sum;
                before = __shfl_sync(FULL, sum, 31);
            }
        }
        __syncthreads();
        const int total = min(super_first[supers], capacity - written);

        for (int from = 0; from < total; from += cached) {
            const int part = min(total - from, cached);
            for (int i = tid; i < part; i += threads) masks[i] = 0;
            __syncthreads();
            const auto mark = [&](int r, int block) {
                if ((word)block >= (word)limit) return;
                const int w = block >> 5;
                const word below = bitmap[w] & ((1u << (block & 31)) - 1);
                const int rank = super_first[w / SUPER] + word_first[w] + __popc(below) - from;
                if ((word)rank >= (word)part) return;
                ids[rank] = block;
                atomicOr(masks + rank, 1u << r);
            };
            for (int i = tid; i < longest; i += threads) {
                for (int r = start; r < stop; r += BATCH) {
                    int block[BATCH];
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) block[j] = selected(r + j, i, stop);
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) mark(r + j, block[j]);
                }
            }
            if (tid >= start && tid < stop) mark(tid, open_block(tid));
            __syncthreads();
            for (int i = tid; i < part; i += threads) write(written + from + i, ids[i], masks[i], start, stop);
            __syncthreads();
        }
        written += total;
    }
    const int end = min((written + pad - 1) / pad * pad, capacity);
    for (int i = written + tid; i < end; i += threads) {
        all_places[base + i] = 0;
        if (all_value_places) all_value_places[base + i] = 0;
        for (int t = 0; t < block_tokens; ++t) all_token_masks[(base + i) * block_tokens + t] = 0;
    }
    if (tid == 0) entries[window] = written;
}
