// Exact top-k of a row of scores: score descending, block id ascending among equals, handed on in ascending order.
//
// A row is cut into segments of 16 neighbouring blocks. The `top` segments of largest maximum, the lower segment first
// among equals, hold the `top` best blocks: a block outside them is beaten in each of them by the block of its maximum,
// which scores more, or as much and has a lower id. So `select_row` picks segments by their maxima and then blocks among
// those of the picked segments, at most 16 * top. No picked block scores less than the smallest maximum picked, so few
// others are left; these are packed into shared memory where they fit, and where they do not (ties, clusters) all are
// ranked where they are. Nothing is dropped, whatever the scores.
//
// Macros: THREADS of a program; SEGMENTS a thread looks into; MAXIMA_VECTORS, of 4 maxima, that a thread ranks. THREADS *
// SEGMENTS holds `top`, 4 * THREADS * MAXIMA_VECTORS the segments of the longest row.

#include "ranking.cuh"

static constexpr int SEGMENT = 16;
static constexpr int PACKED = 8;  // packed blocks that a thread ranks at most

static_assert(SEGMENTS <= PACKED && THREADS * SEGMENTS <= BINS, "what is selected fits where it is packed and put out");

struct __align__(16) Shared : Ranking {
    union {
        int segment[THREADS * SEGMENTS];
        u32 packed_key[THREADS * PACKED];  // once the picked segments have been read
    };
    int packed_block[THREADS * PACKED];
};

// Picks the segments to look into, ascending, to `shared.segment`. Returns how many.
__device__ __forceinline__ int pick_segments(const float* maxima, int segments, int top, u32& floor, Shared& shared) {
    const int vectors = (segments + 4 * THREADS - 1) / (4 * THREADS);
    const int first = threadIdx.x * vectors * 4;
    u32 keys[4 * MAXIMA_VECTORS];
#pragma unroll
    for (int i = 0; i < MAXIMA_VECTORS; ++i) {
        const float4 four = load_four(maxima, first + 4 * i, i < vectors ? segments : 0, true);
        keys[4 * i] = key_of(four.x), keys[4 * i + 1] = key_of(four.y);
        keys[4 * i + 2] = key_of(four.z), keys[4 * i + 3] = key_of(four.w);
    }
    const Cut cut = find_cut(keys, top, shared);
    floor = floor_of(cut);
    const int held = put_chosen(keys, cut, shared, [&](int i, int position) { shared.segment[position] = first + i; });
    __syncthreads();
    return held;
}

// The segments a thread looks into: `count` of them, from `first` on in `shared.segment`, or numbered from there on.
struct Part {
    const float* row;
    int seen, first, count;
    bool picked, aligned;

    // First column of the i-th segment.
    __device__ __forceinline__ int column(int i, const Shared& shared) const {
        return (picked ? shared.segment[first + i] : first + i) * SEGMENT;
    }

    // Calls use(i, four) for each vector i of 4 columns, in order.
    template <typename Use>
    __device__ __forceinline__ void each_four(const Shared& shared, Use use) const {
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s) {
            const int start = s < count ? column(s, shared) : 0;
            float4 four[SEGMENT / 4];
#pragma unroll
            for (int i = 0; i < SEGMENT / 4; ++i) four[i] = load_four(row, start + 4 * i, s < count ? seen : 0, aligned);
#pragma unroll
            for (int i = 0; i < SEGMENT / 4; ++i) use(s * SEGMENT / 4 + i, four[i]);
        }
    }
};

// The best of a row's `seen` blocks to `blocks` [top], ascending and then -1; their number to `count`. `maxima` are those
// of its segments: of none where it has no more than `top`. Ends without a barrier.
__device__ __forceinline__ void select_row(
    const float* values, const float* maxima, int seen, int* blocks, int* count, int top, int aligned, Shared& shared) {
    const int thread = threadIdx.x;
    Part part;
    part.row = values, part.aligned = aligned;
    part.seen = seen;
    u32 floor = LOWEST;
    int held = (part.seen + SEGMENT - 1) / SEGMENT;
    part.picked = held > top;
    if (part.picked) held = pick_segments(maxima, held, top, floor, shared);
    const int per_thread = (held + THREADS - 1) / THREADS;
    part.first = thread * per_thread;
    part.count = max(min(held - part.first, per_thread), 0);
    if (!part.picked && part.seen > THREADS * PACKED) {
        // Too many blocks to pack: the largest of each 4 of them tell what the best reach.
        u32 keys[SEGMENTS * SEGMENT / 4];
        part.each_four(shared, [&](int i, float4 four) { keys[i] = key_of(largest_of(four)); });
        floor = floor_of(find_cut(keys, top, shared));
    }

    const float least = score_of(floor);
    u32 live[(SEGMENTS * SEGMENT + 31) / 32] = {};
    part.each_four(shared, [&](int i, float4 four) {
        const u32 bits = (four.x >= least) | (four.y >= least) << 1 | (four.z >= least) << 2 | (four.w >= least) << 3;
        live[i / 8] |= bits << i % 8 * 4;
    });
    u32 own = 0, total;
#pragma unroll
    for (int word = 0; word < (SEGMENTS * SEGMENT + 31) / 32; ++word) own += __popc(live[word]);
    int starts[SEGMENTS];
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) starts[s] = s < part.count ? part.column(s, shared) : 0;
    u32 position = scan(own, total, shared);

    int selected;
    if (total <= THREADS * PACKED) {
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s) {
            u32 bits = live[s / 2] >> s % 2 * 16 & 0xffff;
            for (; bits; bits &= bits - 1, ++position) {
                const int block = starts[s] + __ffs(bits) - 1;
                shared.packed_key[position] = key_of(part.row[block]);
                shared.packed_block[position] = block;
            }
        }
        __syncthreads();
        const int each = (total + THREADS - 1) / THREADS, first = thread * each;
        u32 keys[PACKED];
#pragma unroll
        for (int i = 0; i < PACKED; ++i) keys[i] = i < each && first + i < total ? shared.packed_key[first + i] : 0;
        const Cut cut = total <= top ? Cut{0, 0} : find_cut(keys, top, shared);
        selected = put_chosen(keys, cut, shared, [&](int i, int position) {
            shared.output[position] = shared.packed_block[first + i];
        });
    } else {
        u32 keys[SEGMENTS * SEGMENT];
        part.each_four(shared, [&](int i, float4 four) {
            keys[4 * i] = four.x >= least ? key_of(four.x) : 0, keys[4 * i + 1] = four.y >= least ? key_of(four.y) : 0;
            keys[4 * i + 2] = four.z >= least ? key_of(four.z) : 0, keys[4 * i + 3] = four.w >= least ? key_of(four.w) : 0;
        });
        const Cut cut = find_cut(keys, top, shared);
        selected = put_chosen(keys, cut, shared, [&](int i, int position) {
            shared.output[position] = part.column(i / SEGMENT, shared) + i % SEGMENT;
        });
    }
    __syncthreads();
    for (int i = thread; i < top; i += THREADS) blocks[i] = i < selected ? shared.output[i] : -1;
    if (thread == 0) *count = selected;
}
