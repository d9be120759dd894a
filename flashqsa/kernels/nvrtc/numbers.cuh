// Numbers as caches store them, by integer operations, so that every GPU from sm_70 on has the same bits. No headers.
//
// FP32 steps whose rounding is part of a result are written as intrinsics: the compiler joins a plain product and sum
// to one rounding.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// Codes of `write.py`: FP32, FP16, BF16, FP8-E4M3.
enum Kind { FP32 = 0, FP16 = 1, BF16 = 2, E4M3 = 3 };

static constexpr u32 INFINITE = 0x7f800000u;
static constexpr float E4M3_MAX = 448.0f;

__device__ __forceinline__ float number_of_fp16(u16 stored) {
    const u32 magnitude = (stored & 0x7fffu) << 13;
    // The exponent's bias is 112 less than FP32's. The product is exact, subnormal numbers included.
    u32 bits = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), 0x1p112f));
    if (magnitude >= 0x0f800000u) bits = magnitude | INFINITE;
    return __uint_as_float(bits | (stored & 0x8000u) << 16);
}

__device__ __forceinline__ float number_of_bf16(u16 stored) { return __uint_as_float(u32(stored) << 16); }

// Nearest, ties to even; infinite from 65,520 on.
__device__ __forceinline__ u16 fp16_of(float number) {
    const u32 bits = __float_as_uint(number), magnitude = bits & 0x7fffffffu;
    u32 stored;
    if (magnitude > INFINITE) {
        stored = 0x7e00;
    } else if (magnitude >= 0x477ff000u) {
        stored = 0x7c00;
    } else if (magnitude < 0x38800000u) {
        // Below 2^-14 the step is 2^-24, which is that of FP32 numbers from 0.5 on.
        stored = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - __float_as_uint(0.5f);
    } else {
        stored = (magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13;
        stored -= 112 << 10;
    }
    return u16(stored | (bits >> 16 & 0x8000u));
}

// Nearest, ties to even.
__device__ __forceinline__ u16 bf16_of(float number) {
    const u32 bits = __float_as_uint(number);
    const bool nan = (bits & 0x7fffffffu) > INFINITE;
    return u16(nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// `number / scale` within +-448, nearest, ties to even. NaN is 0x7F with its sign.
__device__ __forceinline__ u8 e4m3_of(float number, float scale) {
    const float quotient = __fdiv_rn(number, scale);
    u32 bits = __float_as_uint(quotient);
    // A GPU's division loses the sign of NaN.
    if ((bits & 0x7fffffffu) > INFINITE) return u8((__float_as_uint(number) >> 24 & 0x80u) | 0x7fu);
    const u32 sign = bits >> 24 & 0x80u;
    bits = min(bits & 0x7fffffffu, __float_as_uint(E4M3_MAX));
    if (bits < 0x3c800000u) {
        // Below 2^-6 the step is 2^-9, which is that of FP32 numbers from 2^14 on.
        bits = __float_as_uint(__fadd_rn(__uint_as_float(bits), 0x1p14f)) - __float_as_uint(0x1p14f);
    } else {
        // The exponent's bias is 120 less than FP32's.
        bits = ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120 << 3);
    }
    return u8(bits | sign);
}

template <int KIND> struct Stored { typedef u16 Bits; };
template <> struct Stored<FP32> { typedef float Bits; };

template <int KIND>
__device__ __forceinline__ float number_of(typename Stored<KIND>::Bits stored) {
    if constexpr (KIND == FP32) return stored;
    if constexpr (KIND == FP16) return number_of_fp16(stored);
    if constexpr (KIND == BF16) return number_of_bf16(stored);
}

// The nearest number of the kind, as FP32.
template <int KIND>
__device__ __forceinline__ float rounded(float number) {
    if constexpr (KIND == FP16) return number_of_fp16(fp16_of(number));
    if constexpr (KIND == BF16) return number_of_bf16(bf16_of(number));
    return number;
}

template <int KIND, int COUNT>
__device__ __forceinline__ void load_every(const void* from, int first, int step, int end, float (&numbers)[COUNT]) {
    typedef typename Stored<KIND>::Bits Bits;
    Bits stored[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int at = first + i * step;
        stored[i] = at < end ? static_cast<const Bits*>(from)[at] : Bits(0);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) numbers[i] = number_of<KIND>(stored[i]);
}

// Elements `first`, `first + step` and so on, 0 from `end` on, all loads in flight together.
template <int COUNT>
__device__ __forceinline__ void load_every(
    int kind, const void* from, int first, int step, int end, float (&numbers)[COUNT]) {
    if (kind == FP32) load_every<FP32>(from, first, step, end, numbers);
    if (kind == FP16) load_every<FP16>(from, first, step, end, numbers);
    if (kind == BF16) load_every<BF16>(from, first, step, end, numbers);
}

__device__ __forceinline__ void store(int kind, void* to, int at, float number, float scale) {
    if (kind == FP32) static_cast<float*>(to)[at] = number;
    if (kind == FP16) static_cast<u16*>(to)[at] = fp16_of(number);
    if (kind == BF16) static_cast<u16*>(to)[at] = bf16_of(number);
    if (kind == E4M3) static_cast<u8*>(to)[at] = e4m3_of(number, scale);
}
