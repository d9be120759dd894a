// Runs a CUDA C++ kernel on the CPU, one thread block at a time: each CUDA thread is a fiber that gives way at block
// barriers and at warp shuffles. Enough for kernels that use barriers, shuffles, shared-memory atomics and no more.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

using std::max;
using std::min;

struct Index {
    int x;
};
struct uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

enum State { running, at_block_barrier, at_warp_barrier, ended };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    State state = running;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline int current;
inline std::vector<int> exchange;

inline void give_way(State state) {
    fibers[current].state = state;
    swapcontext(&fibers[current].context, &scheduler);
}

inline void enter() {
    body();
    fibers[current].state = ended;
    swapcontext(&fibers[current].context, &scheduler);
}

// Lets fibers of [first, last) go on when all that have not ended wait in `state`.
inline void release(int first, int last, State state) {
    for (int i = first; i < last; ++i) {
        if (fibers[i].state != state && fibers[i].state != ended) return;
    }
    for (int i = first; i < last; ++i) {
        if (fibers[i].state == state) fibers[i].state = running;
    }
}

inline void run_block(int threads, std::function<void()> kernel) {
    body = kernel;
    if (int(fibers.size()) != threads) fibers = std::vector<Fiber>(threads);
    exchange.assign(threads, 0);
    for (auto& fiber : fibers) {
        fiber.state = running;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    for (bool alive = true; alive;) {
        alive = false;
        for (current = 0; current < threads; ++current) {
            if (fibers[current].state == running) swapcontext(&scheduler, &fibers[current].context);
            alive |= fibers[current].state != ended;
        }
        for (int warp = 0; warp < threads; warp += 32) release(warp, warp + 32, at_warp_barrier);
        release(0, threads, at_block_barrier);
    }
}

inline int shuffle(int value, int source) {
    exchange[current] = value;
    give_way(at_warp_barrier);
    const int found = exchange[(current & ~31) + source];
    give_way(at_warp_barrier);
    return found;
}

}  // namespace emulator

inline Index thread_index() { return {emulator::current}; }
inline Index block_index, block_size;

#define threadIdx thread_index()
#define blockIdx block_index
#define blockDim block_size
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

inline void __syncthreads() { emulator::give_way(emulator::at_block_barrier); }
inline int __shfl_up_sync(unsigned, int value, int step) {
    const int lane = emulator::current & 31;
    return emulator::shuffle(value, lane >= step ? lane - step : lane);
}
inline int __shfl_sync(unsigned, int value, int source) { return emulator::shuffle(value, source); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
template <typename T>
T __ldg(const T* from) {
    return *from;
}
inline unsigned atomicOr(unsigned* to, unsigned bits) {
    const unsigned before = *to;
    *to |= bits;
    return before;
}
