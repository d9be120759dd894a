// What stands around cuBLAS where it scores a long request: the keys of neighbouring blocks gathered from their pages,
// and scores and segment maxima from the products of the request's rows and heads with them.
//
// Macros: E4M3, whether keys are FP8, which become FP16, or BF16 where BF16 is 1; other keys are copied bit by bit.
// ALIGNED, whether 8 of their numbers can be loaded at a time.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

static constexpr int THREADS = 256;
static constexpr unsigned ALL = 0xffffffffu;
static constexpr int SEGMENT = 16;

#ifndef BF16
#define BF16 0
#endif

#if E4M3
typedef u8 Key;
#else
typedef u16 Key;
#endif

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The pages of the request.
struct Pages {
    const int* table;
    int table_pages, pages, page_blocks;

    // The page of a block, of the pool's; -1 on a hole.
    __device__ __forceinline__ int of(int block) const {
        const int column = block / page_blocks;
        if (column >= table_pages) return -1;
        const int page = __ldg(table + column);
        return unsigned(page) < unsigned(pages) ? page : -1;
    }
};

struct Gather {
    const Key* keys;  // [pages, page_blocks, dim]
    u16* to;          // [blocks, dim] FP16 or BF16; E4M3 numbers in FP16 are divided by 256, which is exact
    i64 page_stride, place_stride;
    Pages pages;
    int first, blocks, dim;
};

#if E4M3 && BF16
// BF16 of an E4M3 number, exactly: the upper half of FP32's, whose exponent's bias is 120 more.
__device__ __forceinline__ u16 taken(u8 stored) {
    const u32 magnitude = (stored & 0x7fu) << 20, sign = (stored & 0x80u) << 8;
    const u32 number = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), 0x1p120f)) >> 16;
    return u16(sign | ((stored & 0x7fu) == 0x7fu ? 0x7fc0u : number));
}
#elif E4M3
// FP16 of an E4M3 number, divided by 256: the exponent's bias is 8 less.
__device__ __forceinline__ u16 taken(u8 stored) {
    const u32 magnitude = (stored & 0x7fu) << 7, sign = (stored & 0x80u) << 8;
    return u16(sign | magnitude | ((magnitude + 0x80u) & 0x4000u));  // NaN, 0x7f, gets FP16's largest exponent
}
#else
__device__ __forceinline__ u16 taken(u16 stored) { return stored; }
#endif

// Thread i moves 8 numbers of block first + i / (dim / 8). Keys of blocks on a hole are zeros.
extern "C" __global__ void __launch_bounds__(THREADS) flashqsa_gather_keys(const Gather given) {
    const int units = given.dim / 8;
    const i64 thread = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i64 index = thread / units;
    if (index >= given.blocks) return;
    const int unit = int(thread % units), block = given.first + int(index), page = given.pages.of(block);
    const i64 place = block % given.pages.page_blocks;
    const Key* from = given.keys + page * given.page_stride + place * given.place_stride + unit * 8;
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (page >= 0) {
#if E4M3 || !ALIGNED
        Key stored[8];
#endif
#if ALIGNED && E4M3
        const unsigned long long bytes = __ldg(reinterpret_cast<const unsigned long long*>(from));
#pragma unroll
        for (int i = 0; i < 8; ++i) stored[i] = Key(bytes >> 8 * i);
#elif ALIGNED
        packed = __ldg(reinterpret_cast<const uint4*>(from));
#endif
#if !ALIGNED
#pragma unroll
        for (int i = 0; i < 8; ++i) stored[i] = __ldg(from + i);
#endif
#if E4M3 || !ALIGNED
        packed.x = taken(stored[0]) | u32(taken(stored[1])) << 16;
        packed.y = taken(stored[2]) | u32(taken(stored[3])) << 16;
        packed.z = taken(stored[4]) | u32(taken(stored[5])) << 16;
        packed.w = taken(stored[6]) | u32(taken(stored[7])) << 16;
#endif
    }
    reinterpret_cast<uint4*>(given.to)[thread] = packed;
}

struct Finish {
    const float* products;  // [rows * heads, columns], of blocks first to first + columns
    const int* request;
    const int* position;
    float* values;
    float* maxima;  // [rows, segments], or null
    int* visible;
    i64 product_stride, values_stride, maxima_stride;
    Pages pages;
    float scale;
    int owner, first, columns, parts, heads, block_tokens, top_blocks, width;
};

// Rows count from the first that the request `owner` has here. Program row * parts + part does 4 * THREADS columns of a
// row, 4 of them a thread: their sum over heads of what is positive. `first` and the strides of products and scores are
// multiples of 16.
extern "C" __global__ void __launch_bounds__(THREADS) flashqsa_finish_scores(const Finish given) {
    const i64 row = blockIdx.x / given.parts;
    const int part = blockIdx.x % given.parts;
    const int at = given.position[row];
    // A row of another request would have to be multiplied with other keys: it counts as padding.
    const bool live = given.request[row] == given.owner && at >= 0;
    // No row may stand past its bound; where one does, nothing outside its scores is written, and no product is missing.
    const int seen = live ? min(int((unsigned(at) + 1) / unsigned(given.block_tokens)), given.width) : 0;
    if (part == 0 && given.first == 0 && threadIdx.x == 0) given.visible[row] = seen;
    const int begin = part * 4 * THREADS, column = begin + 4 * threadIdx.x, block = given.first + column;
    if (given.first + begin >= seen) return;
    const bool inside = column < given.columns;
    float total[4] = {};
    if (inside && seen > given.top_blocks) {
        const float* from = given.products + row * given.heads * given.product_stride + column;
#pragma unroll 4
        for (int head = 0; head < given.heads; ++head) {
            const float4 four = *reinterpret_cast<const float4*>(from + head * given.product_stride);
            // What is not below zero goes in, NaN too.
            total[0] += four.x <= 0.0f ? 0.0f : four.x;
            total[1] += four.y <= 0.0f ? 0.0f : four.y;
            total[2] += four.z <= 0.0f ? 0.0f : four.z;
            total[3] += four.w <= 0.0f ? 0.0f : four.w;
        }
    }
    const int shown = inside ? min(seen - block, 4) : 0;
    float most = minus_infinity();
    int place = block % given.pages.page_blocks, page = shown > 0 ? given.pages.of(block) : -1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (place == given.pages.page_blocks) place = 0, page = i < shown ? given.pages.of(block + i) : -1;
        ++place;
        total[i] = page < 0 ? minus_infinity() : total[i] * given.scale;
        if (i < shown) most = fmaxf(most, total[i]);
    }
    float* to = given.values + row * given.values_stride + block;
    if (shown == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(total[0], total[1], total[2], total[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (i < shown) to[i] = total[i];
    }
    if (given.maxima) {
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
        if (shown > 0 && column % SEGMENT == 0) given.maxima[row * given.maxima_stride + block / SEGMENT] = most;
    }
}
