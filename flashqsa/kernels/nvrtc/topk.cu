// Exact top-k of score rows: score descending, block id ascending among equals, handed on in ascending order.
//
// A row is cut into segments of 16 neighbouring blocks. The `top` segments of largest maximum, the lower segment first
// among equals, hold the `top` best blocks: a block outside them is beaten in each of them by the block of its maximum,
// which scores more, or as much and has a lower id. So `segment_maxima` streams over the scores once, and `select_rows`
// picks segments by their maxima and then blocks among those of the picked segments, at most 16 * top. No picked block
// scores less than the smallest maximum picked, so few others are left; these are packed into shared memory where they
// fit, and where they do not (ties, clusters) all are ranked where they are. Nothing is dropped, whatever the scores.
// A scorer that knows the maxima writes them itself.
//
// A pick finds its cut, the smallest key that goes in, by histograms over the range of the keys that are left, which
// narrows 2,048-fold each time.
//
// Macros: THREADS of a program; SEGMENTS a thread looks into; MAXIMA_VECTORS, of 4 maxima, that a thread ranks. THREADS *
// SEGMENTS holds `top`, 4 * THREADS * MAXIMA_VECTORS the segments of the longest row. RESIDENT threads should fit on a
// multiprocessor, which bounds a thread's registers.

typedef unsigned int u32;
typedef long long i64;

static constexpr int WARP = 32;
static constexpr int WARPS = THREADS / WARP;
static constexpr int SEGMENT = 16;
static constexpr int BINS = 2048;
static constexpr int BIN_BITS = 11;
static constexpr int BIN_VECTORS = BINS / 4 / THREADS;
static constexpr int RANKED = 256;
static constexpr int PACKED = 8;  // packed blocks that a thread ranks at most
static constexpr u32 ALL = 0xffffffffu;
static constexpr u32 MINUS_INFINITY = 0xff800000u;
static constexpr u32 LOWEST = 0x00800000u;  // the key of the lowest finite score

static_assert(BINS % (4 * THREADS) == 0, "every thread scans as many vectors of 4 bins");
static_assert(THREADS >= RANKED, "a thread ranks at most one key");
static_assert(SEGMENTS <= PACKED && THREADS * SEGMENTS <= BINS, "what is selected fits where it is packed and put out");

struct __align__(16) Shared {
    union {
        u32 histogram[BINS];
        int output[BINS];  // once the last cut is found
    };
    union {
        int segment[THREADS * SEGMENTS];
        u32 packed_key[THREADS * PACKED];  // once the picked segments have been read
    };
    int packed_block[THREADS * PACKED];
    u32 ranked[RANKED];
    u32 sums[WARPS], low[WARPS], high[WARPS];
    u32 bin, above, inside, filled, cut_key, cut_equal;
};

// Goes in: every key above `key`, and the first `equal` keys that equal it, in the order of ids. 0 never does.
struct Cut {
    u32 key;
    u32 equal;
};

// Scores as keys that compare as unsigned numbers. 0 for NaN and -inf, which are never selected; -0.0 is 0.0.
__device__ __forceinline__ u32 key_of(float score) {
    const u32 bits = __float_as_uint(score + 0.0f);
    const u32 key = bits ^ (u32(int(bits) >> 31) | 0x80000000u);
    return score > __uint_as_float(MINUS_INFINITY) ? key : 0;
}

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Columns `first` to `first + 3` of a row; -inf from `seen` on, which is not read.
__device__ __forceinline__ float4 load_four(const float* row, int first, int seen, bool aligned) {
    const float none = __uint_as_float(MINUS_INFINITY);
    if (aligned && first + 4 <= seen) return *reinterpret_cast<const float4*>(row + first);
    float4 four;
    four.x = first + 0 < seen ? row[first + 0] : none;
    four.y = first + 1 < seen ? row[first + 1] : none;
    four.z = first + 2 < seen ? row[first + 2] : none;
    four.w = first + 3 < seen ? row[first + 3] : none;
    return four;
}

__device__ __forceinline__ float largest_of(float4 four) {
    // fmaxf leaves NaN out.
    const float most = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
    return fmaxf(most, __uint_as_float(MINUS_INFINITY));
}

__device__ __forceinline__ u32 warp_min(u32 value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(ALL, value);
#else
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) value = min(value, __shfl_xor_sync(ALL, value, step));
    return value;
#endif
}

__device__ __forceinline__ u32 warp_max(u32 value) { return ~warp_min(~value); }

// The sum of `value` over the threads before this one; the sum over all in `total`.
__device__ __forceinline__ u32 scan(u32 value, u32& total, Shared& shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 sum = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == WARP - 1) shared.sums[warp] = sum;
    __syncthreads();
    u32 whole = lane < WARPS ? shared.sums[lane] : 0;
#pragma unroll
    for (int step = 1; step < WARPS; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, whole, step);
        if (lane >= step) whole += other;
    }
    total = __shfl_sync(ALL, whole, WARPS - 1);
    const u32 before = __shfl_sync(ALL, whole, warp == 0 ? 0 : warp - 1);
    return (warp == 0 ? 0 : before) + sum - value;
}

// The smallest key besides 0, and the largest: 0 where there is no other.
template <int COUNT>
__device__ __forceinline__ void extent(const u32 (&keys)[COUNT], u32& low, u32& high, Shared& shared) {
    low = ALL, high = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        low = min(low, keys[i] - 1);  // 0 becomes the largest number
        high = max(high, keys[i]);
    }
    low = warp_min(low), high = warp_max(high);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane == 0) shared.low[warp] = low, shared.high[warp] = high;
    __syncthreads();
    low = warp_min(lane < WARPS ? shared.low[lane] : ALL) + 1;
    high = warp_max(lane < WARPS ? shared.high[lane] : 0);
}

// The cut that lets the `wanted` largest keys in; all keys, where there are no more. Every thread gets it. A barrier
// must lie between it and earlier reads of the histogram, as between calls one does.
template <int COUNT>
__device__ __forceinline__ Cut find_cut(const u32 (&keys)[COUNT], u32 wanted, Shared& shared) {
    const int thread = threadIdx.x;
    u32 low, high;
    extent(keys, low, high, shared);
    if (high == 0) return {0, 0};
    u32 range = high - low;
    while (true) {
        const int shift = max(WARP - __clz(range) - BIN_BITS, 0);
        uint4* vectors = reinterpret_cast<uint4*>(shared.histogram);
#pragma unroll
        for (int i = 0; i < BIN_VECTORS; ++i) vectors[i * THREADS + thread] = make_uint4(0, 0, 0, 0);
        if (thread == 0) shared.filled = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            // A key below `low`, 0 among them, wraps round to an offset beyond the range.
            const u32 offset = keys[i] - low;
            if (offset <= range) atomicAdd(&shared.histogram[offset >> shift], 1u);
        }
        __syncthreads();
        // Thread 0 has the highest bins.
        const int first = (THREADS - 1 - thread) * BIN_VECTORS;
        u32 own = 0, total;
#pragma unroll
        for (int i = 0; i < BIN_VECTORS; ++i) {
            const uint4 four = vectors[first + i];
            own += four.x + four.y + four.z + four.w;
        }
        u32 above = scan(own, total, shared);
        if (total <= wanted) {  // of the first histogram only, which has every key
            __syncthreads();    // the next scan writes where this one is read
            return {0, 0};
        }
        if (above < wanted && wanted <= above + own) {
            int bin = 4 * (first + BIN_VECTORS) - 1;
            while (above + shared.histogram[bin] < wanted) above += shared.histogram[bin--];
            shared.bin = bin, shared.above = above, shared.inside = shared.histogram[bin];
        }
        __syncthreads();
        wanted -= shared.above;
        low += shared.bin << shift;
        range = (1u << shift) - 1;
        const u32 inside = shared.inside;
        if (shift == 0) return {low, wanted};
        if (inside == wanted) return {low - 1, 0};
        if (inside <= RANKED) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (keys[i] - low <= range) shared.ranked[atomicAdd(&shared.filled, 1u)] = keys[i];
            __syncthreads();
            if (thread < inside) {
                const u32 mine = shared.ranked[thread];
                u32 larger = 0, equal = 0;
                for (u32 i = 0; i < inside; ++i) {
                    larger += shared.ranked[i] > mine;
                    equal += shared.ranked[i] == mine;
                }
                // Every thread that holds the key at the cut writes the same.
                if (larger < wanted && wanted <= larger + equal) {
                    shared.cut_key = mine;
                    shared.cut_equal = wanted - larger;
                }
            }
            __syncthreads();
            return {shared.cut_key, shared.cut_equal};
        }
    }
}

// A key that every block of the cut reaches: those below are out of the running.
__device__ __forceinline__ u32 floor_of(Cut cut) { return max(cut.equal ? cut.key : cut.key + 1, LOWEST); }

// Calls put(i, position) for each of this thread's keys that goes in; positions count keys in the order of ids, in which
// threads hold them. Returns how many go in. Ends without a barrier.
template <int COUNT, typename Put>
__device__ __forceinline__ int put_chosen(const u32 (&keys)[COUNT], Cut cut, Shared& shared, Put put) {
    constexpr int WORDS = (COUNT + 31) / 32;
    u32 chosen[WORDS] = {}, ties[WORDS] = {};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (keys[i] > cut.key) chosen[i / 32] |= 1u << i % 32;
        if (keys[i] == cut.key) ties[i / 32] |= 1u << i % 32;
    }
    u32 counts = 0, all;  // of keys above the cut and, in the upper half, of those that equal it: 32,768 at most
#pragma unroll
    for (int word = 0; word < WORDS; ++word) counts += __popc(chosen[word]) + (__popc(ties[word]) << 16);
    const u32 before = scan(counts, all, shared);
    const u32 equal = min(before >> 16, cut.equal);
    int position = (before & 0xffff) + equal, left = cut.equal - equal;
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
        u32 bits = chosen[word];
        for (u32 rest = ties[word]; rest && left > 0; rest &= rest - 1, --left) bits |= rest & -rest;
        for (; bits; bits &= bits - 1) put(32 * word + __ffs(bits) - 1, position++);
    }
    return (all & 0xffff) + min(all >> 16, cut.equal);
}

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
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
        if (column % SEGMENT == 0 && column < seen) maxima[row * maxima_stride + column / SEGMENT] = most;
    }
}

// One program per row: blocks [rows, top] ascending and then -1, count [rows].
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT / THREADS) select_rows(
    const float* __restrict__ values, i64 value_stride, const float* __restrict__ maxima, i64 maxima_stride,
    const int* __restrict__ visible, int* __restrict__ blocks, i64 blocks_stride, int* __restrict__ count, int top,
    int aligned) {
    __shared__ Shared shared;
    const int thread = threadIdx.x;
    const i64 row = blockIdx.x;
    Part part;
    part.row = values + row * value_stride, part.aligned = aligned;
    part.seen = max(visible[row], 0);
    u32 floor = LOWEST;
    int held = (part.seen + SEGMENT - 1) / SEGMENT;
    part.picked = held > top;
    if (part.picked) held = pick_segments(maxima + row * maxima_stride, held, top, floor, shared);
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
    for (int i = thread; i < top; i += THREADS) blocks[row * blocks_stride + i] = i < selected ? shared.output[i] : -1;
    if (thread == 0) count[row] = selected;
}
