// Runs a kernel whose programs form clusters on the CPU, one cluster at a time: threads of all its programs are fibers,
// each program has shared memory of its own, and barriers of the cluster have two halves. Copies arrive no sooner than
// they are waited for, and warps rest now and then while others run on, so that a barrier that is missing shows.
// Products are worked out by the layout formulas of the PTX ISA ("Matrix Fragments for mma.m16n8k16", "ldmatrix").
//
// What a GPU would not forgive ends the launch with an outcome: barriers that not every thread comes to, and memory of
// another program that is touched before that has surely begun or when it may have ended.
#pragma once

#include <random>

#include "nvrtc_emulator.hpp"

struct uint2 {
    unsigned x, y;
};
struct float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

namespace cluster_emulator {

constexpr auto at_cluster_barrier = emulator::State(100);
constexpr int MEMORY = 232448;  // what a program of compute capability 9.0 may have
enum Outcome { stuck = 4, too_early = 5, too_late = 6, no_cluster = 7 };

struct Copy {
    char* to;
    const char* from;
    int bytes;  // 0: zeros
    int room;
};

struct Thread {
    int arrived = 0, waited = 0;            // at barriers of the cluster
    std::vector<std::vector<Copy>> groups;  // of copies on their way, the last one open
};

struct alignas(128) Memory {
    char bytes[MEMORY];
};

inline std::vector<Thread> threads;
inline std::vector<Memory> memories;
inline std::vector<std::uint64_t> handed;
inline std::vector<int> voted;
inline std::vector<int> resting;  // rounds for which a warp sleeps
inline std::vector<int> touched;  // barriers that whoever touched a program's memory last had arrived at
inline int program_threads, first_program, arrivals, phase, outcome;

inline int program() { return emulator::current / program_threads; }
inline int lane() { return emulator::current & 31; }
inline char* memory() { return memories[program()].bytes; }
inline void fail(int found) {
    if (!outcome) outcome = found;
}

// Hands a value to the warp, waits for the others, and returns that of a lane.
template <typename T>
T exchanged(T value, int source) {
    std::uint64_t& own = handed[emulator::current];
    own = 0;
    std::memcpy(&own, &value, sizeof(T));
    emulator::give_way(emulator::at_warp_barrier);
    T found;
    std::memcpy(&found, &handed[(emulator::current & ~31) + source], sizeof(T));
    emulator::give_way(emulator::at_warp_barrier);
    return found;
}

inline int count_votes(bool vote) {
    voted[emulator::current] = vote;
    emulator::give_way(emulator::at_block_barrier);
    int votes = 0;
    for (int i = 0; i < program_threads; ++i) votes += voted[program() * program_threads + i];
    emulator::give_way(emulator::at_block_barrier);
    return votes;
}

// Where another program has what lies at `own`.
template <typename T>
T* at(const T* own, int rank) {
    if (rank < 0 || rank >= int(memories.size())) {
        fail(no_cluster);
        return const_cast<T*>(own);
    }
    if (threads[emulator::current].waited == 0) fail(too_early);
    for (int i = 0; i < program_threads; ++i) {
        if (emulator::fibers[rank * program_threads + i].state == emulator::ended) fail(too_late);
    }
    touched[rank] = max(touched[rank], threads[emulator::current].arrived);
    const auto offset = reinterpret_cast<const char*>(own) - memory();
    return reinterpret_cast<T*>(memories[rank].bytes + offset);
}

inline void deliver(std::size_t left) {
    auto& groups = threads[emulator::current].groups;
    while (groups.size() > left + 1) {
        for (const Copy& copy : groups.front()) {
            std::memset(copy.to, 0, copy.room);
            std::memcpy(copy.to, copy.from, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

inline float number_of(unsigned bits) {
#if BF16
    return __uint_as_float(bits << 16);
#else
    const std::uint16_t half = bits;
    _Float16 number;
    std::memcpy(&number, &half, sizeof(half));
    return number;
#endif
}

struct Operands {
    unsigned a[4], b[2];
    const char* row;
};
inline std::vector<Operands> operands;

inline void run(int cluster, int count, const std::function<void()>& kernel) {
    const int total = cluster * count;
    program_threads = count;
    arrivals = phase = outcome = 0;
    threads.assign(total, Thread{0, 0, {{}}});
    handed.assign(total, 0);
    voted.assign(total, 0);
    operands.resize(total);
    memories.resize(cluster);
    for (Memory& memory : memories) std::memset(memory.bytes, 0xff, MEMORY);
    resting.assign(total / 32, 0);
    touched.assign(cluster, 0);
    std::minstd_rand drawn(1);
    emulator::body = [&] {
        kernel();
        // Whoever touched this memory is surely done where a barrier that it came to afterwards was waited for.
        if (threads[emulator::current].waited <= touched[program()] && touched[program()]) fail(too_late);
    };
    if (int(emulator::fibers.size()) != total) emulator::fibers = std::vector<emulator::Fiber>(total);
    emulator::exchange.assign(total, 0);
    for (auto& fiber : emulator::fibers) {
        fiber.state = emulator::running;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, emulator::enter, 0);
    }
    for (bool alive = true; alive && !outcome;) {
        bool moved = false;
        for (int& rounds : resting) {
            if (rounds > 0) --rounds, moved = true;
            else if (drawn() % 64 == 0) rounds = drawn() % 64;
        }
        alive = false;
        for (emulator::current = 0; emulator::current < total; ++emulator::current) {
            auto& fiber = emulator::fibers[emulator::current];
            if (fiber.state == emulator::running && !resting[emulator::current / 32]) {
                swapcontext(&emulator::scheduler, &fiber.context);
                moved = true;
            }
            alive |= fiber.state != emulator::ended;
        }
        for (int warp = 0; warp < total; warp += 32) emulator::release(warp, warp + 32, emulator::at_warp_barrier);
        for (int first = 0; first < total; first += count) {
            emulator::release(first, first + count, emulator::at_block_barrier);
        }
        for (int i = 0; i < total; ++i) {
            auto& state = emulator::fibers[i].state;
            if (state == at_cluster_barrier && threads[i].arrived <= phase) state = emulator::running;
        }
        if (alive && !moved) fail(stuck);
    }
    // A barrier that some threads came to and others did not.
    if (arrivals) fail(stuck);
}

template <typename Arguments>
int launch(
    void (*kernel)(Arguments), int programs, int cluster, int count, int shared_bytes, const char* packed,
    long long bytes) {
    if (bytes != sizeof(Arguments)) return emulator::other_parameters;
    if (programs % cluster) return no_cluster;
    Arguments arguments;
    std::memcpy(&arguments, packed, sizeof(arguments));
    for (first_program = programs - cluster; first_program >= 0; first_program -= cluster) {
        run(cluster, count, [&] { kernel(arguments); });
        if (outcome) return outcome;
        for (const Memory& memory : memories) {
            for (int i = shared_bytes; i < MEMORY; ++i) {
                if (static_cast<unsigned char>(memory.bytes[i]) != 0xff) return emulator::shared_memory_overrun;
            }
        }
    }
    return emulator::done;
}

}  // namespace cluster_emulator

#undef threadIdx
#undef blockIdx
#define threadIdx Index{emulator::current % cluster_emulator::program_threads}
#define blockIdx Index{cluster_emulator::first_program + cluster_emulator::program()}
#define __align__(bytes) alignas(bytes)
#define __grid_constant__
#define __syncthreads_count cluster_emulator::count_votes
#define __shfl_sync(lanes, value, source) cluster_emulator::exchanged(value, source)
#define __shfl_xor_sync(lanes, value, step) cluster_emulator::exchanged(value, cluster_emulator::lane() ^ (step))
#define __shfl_up_sync(lanes, value, step) \
    cluster_emulator::exchanged(value, max(cluster_emulator::lane() - (step), cluster_emulator::lane() % (step)))
#define __shfl_down_sync(lanes, value, step) \
    cluster_emulator::exchanged(value, min(cluster_emulator::lane() + (step), 31))

inline float fmaxf(float a, float b) { return std::fmax(a, b); }
inline int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
inline int __ffs(unsigned value) { return __builtin_ffs(int(value)); }
inline unsigned __reduce_add_sync(unsigned lanes, unsigned value) {
    for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(lanes, value, step);
    return value;
}
inline unsigned atomicAdd(unsigned* to, unsigned more) {
    const unsigned before = *to;
    *to += more;
    return before;
}

// The functions of cluster.cuh.

inline int rank_in_cluster() { return cluster_emulator::program(); }
inline void cluster_arrive() {
    using namespace cluster_emulator;
    __syncwarp();
    Thread& own = threads[emulator::current];
    if (own.arrived > own.waited) fail(stuck);  // arrives twice without a wait between
    ++own.arrived;
    if (++arrivals == int(threads.size())) arrivals = 0, ++phase;
}
inline void cluster_wait() {
    using namespace cluster_emulator;
    __syncwarp();
    Thread& own = threads[emulator::current];
    if (own.arrived > phase) emulator::give_way(at_cluster_barrier);
    own.waited = own.arrived;
}
template <typename T>
T load_at(const T* own, int rank) {
    return *cluster_emulator::at(own, rank);
}
template <typename T>
void store_at(T* own, int rank, T value) {
    *cluster_emulator::at(own, rank) = value;
}
inline void copy_16(char* to, const char* from, bool there) {
    if (reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16) {
        cluster_emulator::fail(cluster_emulator::no_cluster);
    }
    cluster_emulator::threads[emulator::current].groups.back().push_back({to, from, there ? 16 : 0, 16});
}
inline void copy_4(int* to, const int* from) {
    auto& groups = cluster_emulator::threads[emulator::current].groups;
    groups.back().push_back({reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), 4, 4});
}
inline void commit_copies() { cluster_emulator::threads[emulator::current].groups.emplace_back(); }
template <int LEFT>
void wait_copies() {
    cluster_emulator::deliver(LEFT);
}
inline void load_operand(unsigned (&a)[4], const char* row) {
    using namespace cluster_emulator;
    operands[emulator::current].row = row;
    emulator::give_way(emulator::at_warp_barrier);
    const Operands* lanes = &operands[emulator::current & ~31];
    for (int m = 0; m < 4; ++m) std::memcpy(a + m, lanes[8 * m + lane() / 4].row + lane() % 4 * 4, 4);
    emulator::give_way(emulator::at_warp_barrier);
}
inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned low, unsigned high) {
    using namespace cluster_emulator;
    Operands& own = operands[emulator::current];
    std::memcpy(own.a, a, sizeof(own.a));
    own.b[0] = low, own.b[1] = high;
    emulator::give_way(emulator::at_warp_barrier);
    const Operands* lanes = &operands[emulator::current & ~31];
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const int holder = k % 8 / 2, shift = k % 2 * 16;
            const unsigned left = lanes[row % 8 * 4 + holder].a[row / 8 + k / 8 * 2] >> shift & 0xffff;
            const unsigned right = lanes[column * 4 + holder].b[k / 8] >> shift & 0xffff;
            sum += double(number_of(left)) * number_of(right);
        }
        d[i] = float(sum);
    }
    emulator::give_way(emulator::at_warp_barrier);
}
inline float relu(float x) { return x > 0.0f ? x : x == x ? 0.0f : x; }
