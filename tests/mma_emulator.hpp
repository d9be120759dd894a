// Tensor-core products of a warp by the layout formulas of the PTX ISA ("Matrix Fragments for mma.m8n8k4" and "for
// mma.m16n8k8", "ldmatrix"), and the rest of what `kernels/sm7x` asks of a GPU. Every lane hands in its operands, waits
// for the others, and works out its own numbers.
#pragma once

#include "nvrtc_emulator.hpp"

#include <cstdio>
#include <cstdlib>

struct uint2 {
    unsigned x, y;
};
struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulator {

struct Handed {
    unsigned words[4];
    const char* row;
};
inline std::vector<Handed> handed(1024);

inline float number_of_half(unsigned bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float number = exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24);
    if (exponent == 31) number = fraction ? NAN : INFINITY;
    return bits & 0x8000 ? -number : number;
}
inline const std::vector<float> numbers_of_halves = [] {
    std::vector<float> numbers(1 << 16);
    for (unsigned bits = 0; bits < 1 << 16; ++bits) numbers[bits] = number_of_half(bits);
    return numbers;
}();

// The nearest, ties to even.
inline unsigned half_of_number(float number) {
    const unsigned sign = std::signbit(number) ? 0x8000 : 0;
    const float magnitude = std::fabs(number);
    if (std::isnan(number)) return sign | 0x7fff;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    const int exponent = magnitude > 0.0f ? max(std::ilogb(magnitude), -14) : -14;
    // From 1,024 to 2,048 of the last place's units; fewer where the number is subnormal.
    return sign + (unsigned(exponent + 14) << 10) + unsigned(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
}

inline float half_at(const unsigned (&words)[4], int first, int index) {
    return numbers_of_halves[words[first + index / 2] >> 16 * (index & 1) & 0xffff];
}

// Hands in, waits, works out, waits again: nobody overwrites what another lane still reads.
template <typename Work>
void together(const Handed& own, Work work) {
    handed[current] = own;
    give_way(at_warp_barrier);
    work(&handed[current & ~31], current & 31);
    give_way(at_warp_barrier);
}

template <bool VALUES>
void multiply_8x8x4(float (&d)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    together({{a0, a1, b0, b1}, nullptr}, [&](const Handed* lanes, int lane) {
        const int quad_pair = lane & 12;
        for (int i = 0; i < 8; ++i) {
            const int row = (lane & 1) + (i & 2) + (lane >= 16 ? 4 : 0), column = (i & 4) + (lane & 2) + (i & 1);
            const int a = quad_pair + (row & 3) + (row >= 4 ? 16 : 0);
            double sum = d[i];
            for (int k = 0; k < 4; ++k) {
                const int b = quad_pair + (VALUES ? k : column & 3) + (column >= 4 ? 16 : 0);
                sum += double(half_at(lanes[a].words, 0, k)) * half_at(lanes[b].words, 2, VALUES ? column & 3 : k);
            }
            d[i] = float(sum);
        }
    });
}

template <bool TRANSPOSED>
void load_matrices(unsigned (&w)[4], const char* row) {
    if (reinterpret_cast<std::uintptr_t>(row) % 16) {
        std::fputs("ldmatrix: a row that does not begin at a multiple of 16 bytes\n", stderr);
        std::abort();
    }
    together({{}, row}, [&](const Handed* lanes, int lane) {
        for (int m = 0; m < 4; ++m) {
            unsigned short pair[2];
            for (int i = 0; i < 2; ++i) {
                const int r = TRANSPOSED ? 2 * (lane % 4) + i : lane / 4, c = TRANSPOSED ? lane / 4 : 2 * (lane % 4) + i;
                std::memcpy(pair + i, lanes[8 * m + r].row + 2 * c, 2);
            }
            w[m] = pair[0] | unsigned(pair[1]) << 16;
        }
    });
}

}  // namespace emulator

inline void mma_m8n8k4_keys(float (&d)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    emulator::multiply_8x8x4<false>(d, a0, a1, b0, b1);
}
inline void mma_m8n8k4_values(float (&d)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    emulator::multiply_8x8x4<true>(d, a0, a1, b0, b1);
}
inline void mma_m16n8k8(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned b) {
    emulator::together({{a0, a1, b, 0}, nullptr}, [&](const emulator::Handed* lanes, int lane) {
        float* const d[4] = {&d0, &d1, &d2, &d3};
        for (int i = 0; i < 4; ++i) {
            const int column = 2 * (lane % 4) + i % 2;
            double sum = *d[i];
            for (int k = 0; k < 8; ++k) {
                const double a = emulator::half_at(lanes[lane / 4 * 4 + k / 2].words, i / 2, k % 2);
                sum += a * emulator::half_at(lanes[column * 4 + k / 2].words, 2, k % 2);
            }
            *d[i] = float(sum);
        }
    });
}
inline void ldmatrix(unsigned (&w)[4], const char* row) { emulator::load_matrices<false>(w, row); }
inline void ldmatrix_transposed(unsigned (&w)[4], const char* row) { emulator::load_matrices<true>(w, row); }

inline unsigned pack_halves(float low, float high) {
    return emulator::half_of_number(low) | emulator::half_of_number(high) << 16;
}
inline void unpack_halves(unsigned packed, float& low, float& high) {
    low = emulator::numbers_of_halves[packed & 0xffff];
    high = emulator::numbers_of_halves[packed >> 16];
}
inline unsigned multiply_halves(unsigned a, unsigned b) {
    float x[2], y[2];
    unpack_halves(a, x[0], x[1]);
    unpack_halves(b, y[0], y[1]);
    return pack_halves(x[0] * y[0], x[1] * y[1]);
}
inline int anew(int x) { return x; }
inline float power_of_2(float x) { return std::exp2(x); }
inline float log_2(float x) { return std::log2(x); }
inline float fmaxf(float a, float b) { return std::fmax(a, b); }
inline float fmaf(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }

inline unsigned __shfl_xor_sync(unsigned, unsigned value, int step) {
    return unsigned(emulator::shuffle(int(value), (emulator::current & 31) ^ step));
}
inline int __shfl_xor_sync(unsigned, int value, int step) {
    return emulator::shuffle(value, (emulator::current & 31) ^ step);
}
inline unsigned __byte_perm(unsigned first, unsigned second, unsigned selector) {
    const unsigned long long bytes = first | (unsigned long long)second << 32;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
template <typename T>
T __ldcg(const T* from) {
    return *from;
}
inline int atomicAdd(int* to, int more) {
    const int before = *to;
    *to += more;
    return before;
}
inline void __threadfence() {}
