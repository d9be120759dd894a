// What kernels that rank scores use beyond `nvrtc_emulator.hpp`: vectors of two and four numbers, atomics on shared memory
// and on memory, which run to their end one after the other, and counts of bits.
#pragma once

#include "nvrtc_emulator.hpp"

#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline unsigned __shfl_xor_sync(unsigned, unsigned value, int step) {
    return emulator::shuffle(int(value), (emulator::current & 31) ^ step);
}

inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }

template <typename T>
T atomicAdd(T* to, T more) {
    const T before = *to;
    *to += more;
    return before;
}
inline int atomicMax(int* to, int other) {
    const int before = *to;
    *to = max(before, other);
    return before;
}
