// What the scorer of sm7x uses beyond `nvrtc_emulator.hpp`: vectors of floats, byte permutations, and the tensor cores'
// two products, by the formulas of PTX ISA ("Matrix Fragments for mma.m8n8k4", "for mma.m16n8k8").
//
// Names are macros, so that a header which brings them too is no obstacle.
#pragma once

#include "nvrtc_emulator.hpp"

namespace score_emulator {

struct Float2 {
    float x, y;
};
struct Float4 {
    float x, y, z, w;
};
inline Float2 make_two(float x, float y) { return {x, y}; }
inline Float4 make_four(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int shuffle_xor(unsigned, int value, int step) {
    return emulator::shuffle(value, (emulator::current & 31) ^ step);
}
inline float shuffle_xor(unsigned, float value, int step) {
    return __uint_as_float(shuffle_xor(0u, int(__float_as_uint(value)), step));
}

inline unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = a | (unsigned long long)(b) << 32;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return found;
}

// What the lanes of all warps bring to a product: up to two registers of either operand.
struct Operands {
    unsigned a[2], b[2];
};
inline std::vector<Operands> brought(1024);

inline float half_of(unsigned pair, int which) {
    const std::uint16_t bits = pair >> 16 * which;
    _Float16 number;
    std::memcpy(&number, &bits, sizeof(bits));
    return number;
}

inline const Operands* all_bring(unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    brought[emulator::current] = {{a0, a1}, {b0, b1}};
    emulator::give_way(emulator::at_warp_barrier);
    return &brought[emulator::current & ~31];
}
inline void all_have_read() { emulator::give_way(emulator::at_warp_barrier); }

}  // namespace score_emulator

inline void mma_m8n8k4(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    using namespace score_emulator;
    const Operands* lanes = all_bring(a0, a1, b0, b1);
    const int lane = emulator::current & 31, quad_pair = lane & 12;
    for (int i = 0; i < 8; ++i) {
        const int row = (lane & 1) + (i & 2) + (lane >= 16 ? 4 : 0), column = (i & 4) + (lane & 2) + (i & 1);
        const Operands& a = lanes[row % 4 + quad_pair + (row >= 4 ? 16 : 0)];
        const Operands& b = lanes[column % 4 + quad_pair + (column >= 4 ? 16 : 0)];
        for (int k = 0; k < 4; ++k) c[i] += half_of(a.a[k / 2], k % 2) * half_of(b.b[k / 2], k % 2);
    }
    all_have_read();
}

inline void mma_m16n8k8(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned b) {
    using namespace score_emulator;
    const Operands* lanes = all_bring(a0, a1, b, 0);
    const int lane = emulator::current & 31;
    float* c[4] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 8; ++k) {
            *c[i] += half_of(lanes[row * 4 + k / 2].a[i / 2], k % 2) * half_of(lanes[column * 4 + k / 2].b[0], k % 2);
        }
    }
    all_have_read();
}

#define float2 score_emulator::Float2
#define float4 score_emulator::Float4
#define make_float2 score_emulator::make_two
#define make_float4 score_emulator::make_four
#define __shfl_xor_sync score_emulator::shuffle_xor
#define __byte_perm score_emulator::permute_bytes
#define __ffs __builtin_ffs
#define __align__(bytes) __attribute__((aligned(bytes)))
