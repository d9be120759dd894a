// Ranking of keys that the threads of a program hold: the cut that lets the best of them in, and their places in order.
//
// A cut, the smallest key that goes in, is found by histograms over the range of the keys that are left, which narrows
// 2,048-fold each time.
//
// Macro: THREADS of a program.

typedef unsigned int u32;
typedef long long i64;

static constexpr int LANES = 32;
static constexpr int WARPS = THREADS / LANES;
static constexpr int BINS = 2048;
static constexpr int BIN_BITS = 11;
static constexpr int BIN_VECTORS = BINS / 4 / THREADS;
static constexpr int RANKED = 256;
static constexpr u32 EVERY_LANE = 0xffffffffu;
static constexpr u32 MINUS_INFINITY = 0xff800000u;
static constexpr u32 LOWEST = 0x00800000u;  // the key of the lowest finite score

static_assert(BINS % (4 * THREADS) == 0, "every thread scans as many vectors of 4 bins");
static_assert(THREADS >= RANKED, "a thread ranks at most one key");

struct __align__(16) Ranking {  // in shared memory
    union {
        u32 histogram[BINS];
        int output[BINS];  // once the last cut is found
    };
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
    return __reduce_min_sync(EVERY_LANE, value);
#else
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value = min(value, __shfl_xor_sync(EVERY_LANE, value, step));
    return value;
#endif
}

__device__ __forceinline__ u32 warp_max(u32 value) { return ~warp_min(~value); }

// The sum of `value` over the threads before this one; the sum over all in `total`.
__device__ __forceinline__ u32 scan(u32 value, u32& total, Ranking& shared) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    u32 sum = value;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const u32 other = __shfl_up_sync(EVERY_LANE, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == LANES - 1) shared.sums[warp] = sum;
    __syncthreads();
    u32 whole = lane < WARPS ? shared.sums[lane] : 0;
#pragma unroll
    for (int step = 1; step < WARPS; step *= 2) {
        const u32 other = __shfl_up_sync(EVERY_LANE, whole, step);
        if (lane >= step) whole += other;
    }
    total = __shfl_sync(EVERY_LANE, whole, WARPS - 1);
    const u32 before = __shfl_sync(EVERY_LANE, whole, warp == 0 ? 0 : warp - 1);
    return (warp == 0 ? 0 : before) + sum - value;
}

// The smallest key besides 0, and the largest: 0 where there is no other.
template <int COUNT>
__device__ __forceinline__ void extent(const u32 (&keys)[COUNT], u32& low, u32& high, Ranking& shared) {
    low = EVERY_LANE, high = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        low = min(low, keys[i] - 1);  // 0 becomes the largest number
        high = max(high, keys[i]);
    }
    low = warp_min(low), high = warp_max(high);
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (lane == 0) shared.low[warp] = low, shared.high[warp] = high;
    __syncthreads();
    low = warp_min(lane < WARPS ? shared.low[lane] : EVERY_LANE) + 1;
    high = warp_max(lane < WARPS ? shared.high[lane] : 0);
}

// The cut that lets the `wanted` largest keys in; all keys, where there are no more. Every thread gets it. A barrier
// must lie between it and earlier reads of the histogram, as between calls one does.
template <int COUNT>
__device__ __forceinline__ Cut find_cut(const u32 (&keys)[COUNT], u32 wanted, Ranking& shared) {
    const int thread = threadIdx.x;
    u32 low, high;
    extent(keys, low, high, shared);
    if (high == 0) return {0, 0};
    u32 range = high - low;
    while (true) {
        const int shift = max(LANES - __clz(range) - BIN_BITS, 0);
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
__device__ __forceinline__ int put_chosen(const u32 (&keys)[COUNT], Cut cut, Ranking& shared, Put put) {
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
