// What kernels that every NVIDIA GPU shares use beyond `emulator.hpp`: votes, float shuffles, arithmetic that rounds
// step by step, and launches from the packed parameters that the CUDA driver would get.
#pragma once

#include "emulator.hpp"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <tuple>

#define __shared__

inline void __syncwarp() { emulator::give_way(emulator::at_warp_barrier); }

inline unsigned __ballot_sync(unsigned, bool vote) {
    emulator::exchange[emulator::current] = vote;
    emulator::give_way(emulator::at_warp_barrier);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
        votes |= unsigned(emulator::exchange[(emulator::current & ~31) + lane]) << lane;
    }
    emulator::give_way(emulator::at_warp_barrier);
    return votes;
}
inline bool __any_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote); }

inline float __uint_as_float(unsigned bits) {
    float number;
    std::memcpy(&number, &bits, sizeof(bits));
    return number;
}
inline unsigned __float_as_uint(float number) {
    unsigned bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits;
}
inline float __shfl_xor_sync(unsigned, float value, int step) {
    const int source = (emulator::current & 31) ^ step;
    return __uint_as_float(emulator::shuffle(int(__float_as_uint(value)), source));
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }

// What a program's dynamic shared memory is, at most.
alignas(16) inline long long dynamic[12 << 10];

namespace emulator {

enum Outcome { done = 0, unknown_kernel = 1, other_parameters = 2, shared_memory_overrun = 3 };

template <typename... Parameters>
int launch(
    void (*kernel)(Parameters...), int programs, int threads, int shared_bytes, const char* packed, std::size_t bytes) {
    std::size_t at = 0;
    const auto next = [&]<typename T>() {
        at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
        T value{};
        if (at + sizeof(T) <= bytes) std::memcpy(&value, packed + at, sizeof(T));
        at += sizeof(T);
        return value;
    };
    const std::tuple<Parameters...> parameters{next.template operator()<Parameters>()...};
    if (at != bytes) return other_parameters;
    block_size.x = threads;
    // The last program first: on a GPU they run in no order, and this is the one in which rows least expect to.
    for (block_index.x = programs - 1; block_index.x >= 0; --block_index.x) {
        std::memset(dynamic, 0xff, sizeof(dynamic));
        run_block(threads, [&] { std::apply(kernel, parameters); });
        for (std::size_t i = shared_bytes; i < sizeof(dynamic); ++i) {
            if (reinterpret_cast<const unsigned char*>(dynamic)[i] != 0xff) return shared_memory_overrun;
        }
    }
    return done;
}

}  // namespace emulator
