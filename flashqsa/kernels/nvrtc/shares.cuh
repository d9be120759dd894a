// Heads of numbers that a warp holds, each lane its share of them. Include `numbers.cuh` and `paging.cuh` before it, and
// define WIDE: whether a lane's share lies at addresses that vectors of it may have.

template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Vector {
    T element[COUNT];
};

template <int OF>
struct Element {
    typedef typename Stored<OF>::Bits Bits;
};
template <>
struct Element<E4M3> {
    typedef u8 Bits;
};

// What a lane has of a head: SPAN neighbouring numbers of every WARP * SPAN.
template <int DIM>
struct Share {
    static constexpr int SPAN = DIM > 128 ? 8 : DIM > 64 ? 4 : DIM > 32 ? 2 : 1;
    static constexpr int COUNT = (DIM + WARP * SPAN - 1) / (WARP * SPAN) * SPAN;

    static __device__ __forceinline__ int dim(int lane, int i) { return (i / SPAN * WARP + lane) * SPAN + i % SPAN; }
};

template <typename T, int DIM>
__device__ __forceinline__ void load_share(const void* head, int lane, T (&bits)[Share<DIM>::COUNT]) {
    typedef Share<DIM> Of;
    typedef Vector<T, Of::SPAN> Wide;
#pragma unroll
    for (int i = 0; i < Of::COUNT; i += Of::SPAN) {
        const int first = Of::dim(lane, i);
        if (WIDE) {
            Wide held = {};
            if (first < DIM) held = *reinterpret_cast<const Wide*>(static_cast<const T*>(head) + first);
#pragma unroll
            for (int j = 0; j < Of::SPAN; ++j) bits[i + j] = held.element[j];
        } else {
#pragma unroll
            for (int j = 0; j < Of::SPAN; ++j) {
                bits[i + j] = first + j < DIM ? static_cast<const T*>(head)[first + j] : T(0);
            }
        }
    }
}

template <typename T, int DIM>
__device__ __forceinline__ void store_share(void* head, int lane, const T (&bits)[Share<DIM>::COUNT]) {
    typedef Share<DIM> Of;
    typedef Vector<T, Of::SPAN> Wide;
#pragma unroll
    for (int i = 0; i < Of::COUNT; i += Of::SPAN) {
        const int first = Of::dim(lane, i);
        if (WIDE) {
            Wide held;
#pragma unroll
            for (int j = 0; j < Of::SPAN; ++j) held.element[j] = bits[i + j];
            if (first < DIM) *reinterpret_cast<Wide*>(static_cast<T*>(head) + first) = held;
        } else {
#pragma unroll
            for (int j = 0; j < Of::SPAN; ++j) {
                if (first + j < DIM) static_cast<T*>(head)[first + j] = bits[i + j];
            }
        }
    }
}

// The nearest number that OF stores. The instructions have the bits of `numbers.cuh`, but for those of NaN.
template <int OF>
__device__ __forceinline__ typename Element<OF>::Bits bits_of(float number, float scale = 1.0f) {
    if constexpr (OF == FP32) return number;
    if constexpr (OF == E4M3) return e4m3_of(number, scale);
#ifdef __CUDA_ARCH__
    u16 bits;
    if constexpr (OF == FP16) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
        return bits;
    }
#if __CUDA_ARCH__ >= 800
    if constexpr (OF == BF16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(number));
        return bits;
    }
#endif
#endif
    if constexpr (OF == FP16) return fp16_of(number);
    if constexpr (OF == BF16) return bf16_of(number);
}

template <int OF>
__device__ __forceinline__ float float_of(typename Element<OF>::Bits bits) {
#ifdef __CUDA_ARCH__
    if constexpr (OF == FP16) {
        float number;
        asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
        return number;
    }
#endif
    return number_of<OF>(bits);
}

template <int OF, int DIM>
__device__ __forceinline__ void store_numbers(
    void* head, int lane, const float (&numbers)[Share<DIM>::COUNT], float scale) {
    typename Element<OF>::Bits bits[Share<DIM>::COUNT];
#pragma unroll
    for (int i = 0; i < Share<DIM>::COUNT; ++i) bits[i] = bits_of<OF>(numbers[i], scale);
    store_share<typename Element<OF>::Bits, DIM>(head, lane, bits);
}

__device__ __forceinline__ float sum_of_warp(float number) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) number = __fadd_rn(number, __shfl_xor_sync(ALL, number, step));
    return number;
}

// 1 / sqrt(squares / DIM + eps), each step rounded. A power of two divides as its inverse multiplies.
template <int DIM>
__device__ __forceinline__ float inverse_root(float squares, float eps) {
    const float mean = DIM & (DIM - 1) ? __fdiv_rn(squares, float(DIM)) : __fmul_rn(squares, 1.0f / DIM);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

// What the norm multiplies a head by. Squares are summed by lane in the order of its share, then over lanes 16, 8, 4, 2
// and 1 apart.
template <int DIM>
__device__ __forceinline__ float shrink_of(const float (&numbers)[Share<DIM>::COUNT], float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < Share<DIM>::COUNT; ++i) squares = __fadd_rn(squares, __fmul_rn(numbers[i], numbers[i]));
    return inverse_root<DIM>(sum_of_warp(squares), eps);
}
