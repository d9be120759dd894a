// Attention of windows of rows over their worklists on the tensor cores of Volta (sm_70) and Turing (sm_75): FP16
// queries, FP16 or FP8-E4M3 caches, blocks of 4 tokens.
//
// A program serves one unit, or a part of one: one window and one KV head. Each of its 8 warps holds 16 query lines
// (rows times query heads) and the whole of their output, so that nothing but keys, values and masks is shared and no
// barrier stands within a tile's softmax. A tile is 32 tokens; warp w brings its block w, keys and values in turn: they
// are fetched into registers before the products that they are not part of, and stored to shared memory after them.
// A warp passes over tiles that none of its rows attends to; warps without lines only bring tokens.
//
// Compiled with -D: TURING 0 or 1; D, head_dim; HEADS, query heads per KV head; FP8 0 or 1, type of the cache;
// KEPT, groups of 16 dimensions of the queries that stay in registers (Turing); the others lie in shared memory.

#include "mma.cuh"

typedef unsigned long long wide;

#define N 32                        // tokens of a tile: lanes of a warp
#define BLOCKS (N / 4)              // worklist entries of a tile: warps
#define WARPS 8
#define LINES (16 * WARPS)          // query lines of a program
#define GROUPS (D / 16)             // of 16 dimensions
#define PITCH (2 * D)               // bytes of a token in shared memory
#define Q_PITCH (32 * (GROUPS - KEPT))  // bytes of a query line there
#define TOKEN_LOADS (FP8 ? D / 16 : D / 8)  // loads of 16 bytes that bring a token
#define LOADS ((4 * TOKEN_LOADS + 31) / 32)  // of a lane, for its share of a block
#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)
#define LN_2 0.6931471805599453f
#define LOG2_E 1.4426950408889634f

static_assert(Q_PITCH % 128 == 0 && KEPT <= GROUPS && (TURING || KEPT == 0), "queries in chunks that can be swizzled");
static_assert(D == 64 || D == 128 || D == 256, "head_dim");

struct Arguments {
    const char* q;                 // [rows, q_heads, D] FP16
    const char* keys;
    const char* values;
    const float* k_scales;         // [kv_heads], or null: in `scale`
    const float* v_scales;         // [kv_heads], or null: `v_scale`
    const char* gate;              // as q, or null
    char* out;                     // as q
    float* lse;                    // [rows, q_heads], or null
    const int* places;             // worklist: see worklist.cu
    const int* value_places;       // null: `places`
    const word* token_masks;
    const int* entries;
    int* done;                     // [units], 0
    float* part_out;               // [parts, part_rows, q_heads, D]
    float* part_lse;               // [parts, part_rows, q_heads]
    long long unit_bytes;          // strides are in bytes
    long long q_row, q_head, k_token, k_head, v_token, v_head, gate_row, gate_head, out_row, out_head;
    int rows, kv_heads, group_rows, capacity, whole, parts, first_part_row, part_rows;
    int inside;                    // whether the part that ends last merges its unit's parts
    float scale;                   // head_dim^-1/2 * log2(e), times the keys' scale
    float v_scale;
};

struct Work {                      // what a program does
    int window, kv_head, unit, part, first, last;
    bool cut;
};

__device__ __forceinline__ Work work_of(const Arguments& a, int program) {
    Work w;
    w.cut = program >= a.whole;
    w.unit = w.cut ? a.whole + (program - a.whole) / a.parts : program;
    w.part = w.cut ? (program - a.whole) % a.parts : 0;
    w.window = w.unit / a.kv_heads;
    w.kv_head = w.unit % a.kv_heads;
    const int tiles = (a.entries[w.window] + BLOCKS - 1) / BLOCKS;
    w.first = w.cut ? tiles * w.part / a.parts : 0;
    w.last = w.cut ? tiles * (w.part + 1) / a.parts : tiles;
    return w;
}

struct Line {
    long long row;
    int head;                      // of all q_heads
    word bit;                      // of the row in masks; 0 where there is no row
};

__device__ __forceinline__ Line query_line(const Arguments& a, const Work& w, int line) {
    const int in_window = line / HEADS;
    const long long row = (long long)w.window * a.group_rows + in_window;
    const bool there = in_window < a.group_rows && row < a.rows;
    return {row, w.kv_head * HEADS + line % HEADS, there ? 1u << in_window : 0u};
}

// Of a tile's worklist a warp holds where its block lies, and each lane the mask of one token of the tile.
struct Entry {
    word place, value_place, mask;
};

__device__ __forceinline__ Entry fetch_entry(const Arguments& a, const Work& w, int tile, int warp, int lane) {
    Entry e = {0, 0, 0};
    if (tile < w.last) {
        const long long at = (long long)w.window * a.capacity + tile * BLOCKS;
        e.place = __ldg((const word*)a.places + at + warp);
        e.value_place = a.value_places ? __ldg((const word*)a.value_places + at + warp) : e.place;
        e.mask = __ldg(a.token_masks + at * 4 + lane);
    }
    return e;
}

// A warp's block on its way to shared memory. Tokens that no row attends to are zeros, unread.
struct Block {
    uint4 part[LOADS];
};

__device__ __forceinline__ void fetch_block(
    Block& b, const char* base, long long unit_bytes, long long token_bytes, word place, word mask, int warp, int lane
) {
    const word attended = __ballot_sync(FULL, mask != 0) >> 4 * warp;
    const char* const from = base + (wide)place * unit_bytes;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int token = (i * 32 + lane) / TOKEN_LOADS, load = (i * 32 + lane) % TOKEN_LOADS;
        b.part[i] = make_uint4(0, 0, 0, 0);
        if (token < 4 && (attended >> token & 1)) {
            b.part[i] = __ldg((const uint4*)(from + token * token_bytes + load * 16));
        }
    }
}

// Four E4M3 numbers as FP16, exactly: their bits are moved to FP16's places, where they mean 2^-8 of the number. Of a
// NaN the seven lower bits are all 1, so that adding 1 carries into FP16's highest exponent bit.
__device__ __forceinline__ void widen(word numbers, word& first, word& second) {
    const word spread[2] = {__byte_perm(numbers, 0, 0x1404), __byte_perm(numbers, 0, 0x3424)};
    word found[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const word magnitude = spread[i] >> 1 & 0x3f803f80u;
        const word nan = (magnitude + 0x00800080u) & 0x40004000u;
        found[i] = multiply_halves(magnitude | nan | (spread[i] & 0x80008000u), 0x5c005c00u);
    }
    first = found[0];
    second = found[1];
}

__device__ __forceinline__ void store_block(const Block& b, char* tile, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int token = (i * 32 + lane) / TOKEN_LOADS, load = (i * 32 + lane) % TOKEN_LOADS;
        if (token >= 4) continue;
        const int row = 4 * warp + token;
#if FP8
        uint4 low, high;
        widen(b.part[i].x, low.x, low.y);
        widen(b.part[i].y, low.z, low.w);
        widen(b.part[i].z, high.x, high.y);
        widen(b.part[i].w, high.z, high.w);
        // Four of 8 lanes store their chunks the other way round: with even chunks alone they would meet half the banks.
        const int flip = load >> 2 & 1;
        *(uint4*)(tile + place_of<PITCH>(row, 2 * load + flip)) = flip ? high : low;
        *(uint4*)(tile + place_of<PITCH>(row, 2 * load + 1 - flip)) = flip ? low : high;
#else
        *(uint4*)(tile + place_of<PITCH>(row, load)) = b.part[i];
#endif
    }
}

// A warp's query lines, from group KEPT of their dimensions on, into shared memory.
__device__ __forceinline__ void store_queries(const Arguments& a, const Work& w, char* queries, int warp, int lane) {
    constexpr int LINE_LOADS = Q_PITCH / 16;
#pragma unroll 1
    for (int i = lane; i < 16 * LINE_LOADS; i += 32) {
        const int number = 16 * warp + i / LINE_LOADS, load = i % LINE_LOADS;
        const Line line = query_line(a, w, number);
        const char* const from = a.q + line.row * a.q_row + line.head * a.q_head + KEPT * 32;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (line.bit) v = __ldg((const uint4*)from + load);
        *(uint4*)(queries + place_of<Q_PITCH>(number, load)) = v;
    }
}

struct Sums {                      // of a lane's two lines
    float top[2], total[2];
};

// Logits become weights exp2(scale * logit - top), in place; `fade` is what earlier sums and products are worth.
__device__ __forceinline__ void softmax(
    float (&logits)[2][8], Sums& sums, float (&fade)[2], const word (&own)[2], word mask, float scale, int lane
) {
    float largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            const int token = 16 * j + column_of(lane, p);
            const word low = __shfl_sync(FULL, int(mask), token), high = __shfl_sync(FULL, int(mask), token + 1);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& x = logits[j][4 * p + 2 * h];
                float& y = logits[j][4 * p + 2 * h + 1];
                x = low & own[h] ? x : NEGATIVE_INFINITY;
                y = high & own[h] ? y : NEGATIVE_INFINITY;
                largest[h] = fmaxf(largest[h], fmaxf(x, y));
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(FULL, largest[h], LINE_LANES_A));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(FULL, largest[h], LINE_LANES_B));
        const float new_top = fmaxf(sums.top[h], largest[h] * scale);
        const float reference = new_top == NEGATIVE_INFINITY ? 0.0f : new_top;
        fade[h] = power_of_2(sums.top[h] - reference);
        sums.top[h] = new_top;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                float& x = logits[j][4 * p + 2 * h];
                float& y = logits[j][4 * p + 2 * h + 1];
                x = power_of_2(fmaf(x, scale, -reference));
                y = power_of_2(fmaf(y, scale, -reference));
                sum += x + y;
            }
        }
        sums.total[h] = sums.total[h] * fade[h] + sum;  // of this lane's tokens: the lanes are added up at the end
    }
}

// The whole of a lane's two lines from all parts, in their order, in place of the last part's.
__device__ __forceinline__ void merge_parts(
    const Arguments& a, const Line (&lines)[2], float (&acc)[GROUPS][8], float (&lse)[2], int lane
) {
    const int q_heads = a.kv_heads * HEADS;
    const long long part_heads = (long long)a.part_rows * q_heads;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float best = NEGATIVE_INFINITY, sum = 0.0f;
        const long long at = (lines[h].row - a.first_part_row) * q_heads + lines[h].head;
        if (lines[h].bit) {
            for (int part = 0; part < a.parts; ++part) {
                const float found = __ldcg(a.part_lse + part * part_heads + at);
                best = found <= best || best != best ? best : found;  // NaN stays, which `fmaxf` would lose
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; ++i) acc[i >> 2][(i & 1) + 2 * h + 2 * (i & 2)] = 0.0f;
        if (lines[h].bit && best != NEGATIVE_INFINITY) {
            for (int part = 0; part < a.parts; ++part) {
                const float weight = power_of_2((__ldcg(a.part_lse + part * part_heads + at) - best) * LOG2_E);
                sum += weight;
                const float* const from = a.part_out + (part * part_heads + at) * D;
#pragma unroll
                for (int i = 0; i < 2 * GROUPS; ++i) {
                    const float2 v = __ldcg((const float2*)(from + dim_of(lane, i >> 1, i & 1)));
                    float* const c = acc[i >> 1] + 4 * (i & 1) + 2 * h;
                    c[0] += weight * v.x;
                    c[1] += weight * v.y;
                }
            }
            const float factor = __fdividef(1.0f, sum);
#pragma unroll
            for (int i = 0; i < 4 * GROUPS; ++i) acc[i >> 2][(i & 1) + 2 * h + 2 * (i & 2)] *= factor;
        }
        lse[h] = best + log_2(sum) * LN_2;
    }
}

// Rounds a lane's two lines, multiplies them by sigmoid(gate) in FP32, rounds once more, and stores them.
__device__ __forceinline__ void finish(
    const Arguments& a, const Line (&lines)[2], const float (&acc)[GROUPS][8], const float (&lse)[2], int lane
) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (!lines[h].bit) continue;
        const bool first = !(lane & (LINE_LANES_A | LINE_LANES_B));
        if (a.lse && first) a.lse[lines[h].row * (a.kv_heads * HEADS) + lines[h].head] = lse[h];
        char* const to = a.out + lines[h].row * a.out_row + lines[h].head * a.out_head;
        const char* const by = a.gate ? a.gate + lines[h].row * a.gate_row + lines[h].head * a.gate_head : nullptr;
#pragma unroll
        for (int i = 0; i < 2 * GROUPS; ++i) {
            const int at = dim_of(lane, i >> 1, i & 1) * 2;
            const float* const c = acc[i >> 1] + 4 * (i & 1) + 2 * h;
            word packed = pack_halves(c[0], c[1]);
            if (by) packed = gated(packed, __ldg((const word*)(by + at)));
            *(word*)(to + at) = packed;
        }
    }
}

// What follows the last tile: the outputs of a lane's two lines, or a part's, and of its unit where it ends last.
__device__ __forceinline__ void conclude(const Arguments& a, word* ended, float (&acc)[GROUPS][8], const Sums& sums) {
    const int thread = anew(threadIdx.x), lane = thread & 31, warp = thread >> 5;
    const Work w = work_of(a, anew(blockIdx.x));
    const Line lines[2] = {
        query_line(a, w, 16 * warp + line_of(lane, 0)), query_line(a, w, 16 * warp + line_of(lane, 1))};
    const float value_scale = a.v_scales ? __ldg(a.v_scales + w.kv_head) : a.v_scale;
    float lse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float total = sums.total[h];
        total += __shfl_xor_sync(FULL, total, LINE_LANES_A);
        total += __shfl_xor_sync(FULL, total, LINE_LANES_B);
        lse[h] = (sums.top[h] + log_2(total)) * LN_2;
        const float factor = total == 0.0f ? 0.0f : __fdividef(value_scale, total);
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; ++i) acc[i >> 2][(i & 1) + 2 * h + 2 * (i & 2)] *= factor;
    }
    if (w.cut) {
        const int q_heads = a.kv_heads * HEADS;
        const long long part_heads = (long long)a.part_rows * q_heads;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!lines[h].bit) continue;
            const long long at = w.part * part_heads + (lines[h].row - a.first_part_row) * q_heads + lines[h].head;
            if (!(lane & (LINE_LANES_A | LINE_LANES_B))) a.part_lse[at] = lse[h];
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; ++i) {
                const float* const c = acc[i >> 1] + 4 * (i & 1) + 2 * h;
                *(float2*)(a.part_out + at * D + dim_of(lane, i >> 1, i & 1)) = make_float2(c[0], c[1]);
            }
        }
        if (!a.inside) return;
        // Every thread's stores come before the count, and the other parts' count before the reads below.
        __threadfence();
        __syncthreads();
        if (thread == 0) *ended = atomicAdd(a.done + w.unit, 1);
        __syncthreads();
        if (int(*ended) != a.parts - 1) return;
        __threadfence();
        merge_parts(a, lines, acc, lse, lane);
    }
    finish(a, lines, acc, lse, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) flashqsa_attend_sm7x(const Arguments a) {
    extern __shared__ long long dynamic[];
    char* const keys = (char*)dynamic;              // [N, D] FP16, swizzled
    char* const values = keys + N * PITCH;          // the same
    char* const queries = values + N * PITCH;       // [LINES, Q_PITCH bytes], swizzled
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Work w = work_of(a, blockIdx.x);
    const char* const key_base = a.keys + w.kv_head * a.k_head;
    const char* const value_base = a.values + w.kv_head * a.v_head;

    Entry now = fetch_entry(a, w, w.first, warp, lane);
    Block block;
    fetch_block(block, key_base, a.unit_bytes, a.k_token, now.place, now.mask, warp, lane);

    const Line lines[2] = {
        query_line(a, w, 16 * warp + line_of(lane, 0)), query_line(a, w, 16 * warp + line_of(lane, 1))};
    const word own[2] = {lines[0].bit, lines[1].bit};
    word bits = own[0] | own[1];                    // of every row that the warp holds
#pragma unroll
    for (int step = 16; step; step >>= 1) bits |= __shfl_xor_sync(FULL, int(bits), step);
#if KEPT
    Operand kept[KEPT];
    const char* const from[2] = {
        lines[0].bit ? a.q + lines[0].row * a.q_row + lines[0].head * a.q_head : nullptr,
        lines[1].bit ? a.q + lines[1].row * a.q_row + lines[1].head * a.q_head : nullptr};
#pragma unroll
    for (int g = 0; g < KEPT; ++g) kept[g] = fetch_lines(from, 16 * g, lane);
#endif
    if (KEPT < GROUPS) store_queries(a, w, queries, warp, lane);
    float scale = a.scale;
    if (a.k_scales) scale *= __ldg(a.k_scales + w.kv_head);

    float acc[GROUPS][8], fade[2];
    Sums sums = {{NEGATIVE_INFINITY, NEGATIVE_INFINITY}, {0.0f, 0.0f}};
    Operand weights[2];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[g][i] = 0.0f;
    }
    store_block(block, keys, warp, lane);
    __syncthreads();
#pragma unroll 1
    for (int t = w.first; t < w.last; ++t) {
        fetch_block(block, value_base, a.unit_bytes, a.v_token, now.value_place, now.mask, warp, lane);
        const Entry next = fetch_entry(a, w, t + 1, warp, lane);
        const bool attends = __any_sync(FULL, (now.mask & bits) != 0);
        if (attends) {
            // Each phase works its addresses out anew: kept over the loop they would spill.
            const int at = anew(lane);
            float logits[2][8];
#pragma unroll
            for (int i = 0; i < 16; ++i) logits[i >> 3][i & 7] = 0.0f;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
#if KEPT == GROUPS
                const Operand& query = kept[g];
#elif KEPT
                const Operand query =
                    g < KEPT ? kept[g < KEPT ? g : 0] : load_lines<Q_PITCH>(queries, 16 * warp, 2 * (g - KEPT), at);
#else
                const Operand query = load_lines<Q_PITCH>(queries, 16 * warp, 2 * g, at);
#endif
                multiply_keys<PITCH>(logits[0], query, keys, 0, 2 * g, at);
                multiply_keys<PITCH>(logits[1], query, keys, 16, 2 * g, at);
            }
            softmax(logits, sums, fade, own, now.mask, scale, at);
            weights[0] = operand_of(logits[0]);
            weights[1] = operand_of(logits[1]);
            if (__any_sync(FULL, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) acc[g][i] *= fade[i >> 1 & 1];
                }
            }
        }
        store_block(block, values, warp, lane);
        __syncthreads();  // the values are there, and nobody reads the keys any more
        fetch_block(block, key_base, a.unit_bytes, a.k_token, next.place, next.mask, warp, lane);
        if (attends) {
            const int at = anew(lane);
#pragma unroll
            for (int pair = 0; pair < GROUPS / 2; ++pair) {
                __syncwarp();  // else so many loads move ahead of the products that Turing's registers spill
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    multiply_values<PITCH>(acc[2 * pair], acc[2 * pair + 1], weights[j], values, 16 * j, pair, at);
                }
            }
        }
        now = next;
        store_block(block, keys, warp, lane);
        __syncthreads();
    }
    conclude(a, (word*)dynamic, acc, sums);
}
