// Attention of windows of rows over their worklists on Hopper (sm_90a): heads of 256, blocks of 4 tokens.
//
// A program serves one unit, or a part of one: one window and one KV head. A warp group of producers gathers keys and
// values, tile by tile of 64 tokens, into rings of stages in shared memory. Each of CONSUMERS warp groups holds 64
// query lines (rows times query heads) and works on every tile with wgmma and an online softmax, in which the products
// of one tile with the values overlap the softmax of the next. Consumers wait for tiles alone, not for each other, so
// one's softmax hides the other's products.
//
// Compiled with -D: CONSUMERS 1 or 2; STAGES; HEADS, query heads per KV head; BF16 0 or 1, type of queries, gate and
// output; FP8 0 or 1, type of the cache (else as the queries): keys and values are then converted to FP16 on their way;
// PRODUCER_REGISTERS and CONSUMER_REGISTERS, of a thread, where CONSUMERS is 2.

typedef unsigned int word;
typedef unsigned long long wide;

#define D 256
#define N 64                        // tokens of a tile
#define BLOCKS (N / 4)              // worklist entries of a tile
#define LINES 64                    // query lines of a consumer
#define SLAB (64 * 128)             // bytes of 64 rows x 64 elements, in 128-byte rows, 16-byte chunks swizzled by row
#define TILE (4 * SLAB)             // bytes of 64 rows x 256 elements: 4 slabs
#define ROWS (LINES / HEADS)        // rows of a consumer
#define PRODUCERS 128               // threads
#define CONSUMER_THREADS 128
#define FULL 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define LN_2 0.6931471805599453f
#define LOG2_E 1.4426950408889634f

#if BF16 && !FP8
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

#include "hopper.cuh"

struct Arguments {
    const char* q;                 // [rows, q_heads, D]
    const char* keys;
    const char* values;
    const float* k_scales;         // [kv_heads], or null: in `scale`
    const float* v_scales;         // [kv_heads], or null: `v_scale`
    const char* gate;              // [rows, q_heads, D], or null
    char* out;                     // [rows, q_heads, D]
    float* lse;                    // [rows, q_heads], or null
    const int* places;             // worklist: see worklist.cu
    const int* value_places;       // null: `places`
    const word* token_masks;
    const int* entries;
    int* done;                     // [units * CONSUMERS], 0
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

__device__ __forceinline__ Work work_of(const Arguments& a) {
    Work w;
    const int program = blockIdx.x;
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

__device__ __forceinline__ void store_shared(word address, word v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

struct Shared {                    // byte addresses in shared memory
    word queries, keys, values, masks, keys_full, keys_free, values_full, values_free;
};

// ---------------------------------------------------------------------------------------------------------- producers

// A warp brings 16 of a tile's tokens, four blocks. Of a tile's worklist a lane holds what belongs to its token (lanes
// 16 to 31 repeat 0 to 15); the entries are fetched two tiles ahead of the keys and values they lead to.
struct Entry {
    word place, value_place, mask;
};

__device__ __forceinline__ Entry fetch_entry(const Arguments& a, const Work& w, int tile, int token) {
    Entry e = {0, 0, 0};
    if (tile < w.last) {
        const long long at = (long long)w.window * a.capacity + tile * BLOCKS;
        e.place = __ldg((const word*)a.places + at + (token >> 2));
        e.value_place = a.value_places ? __ldg((const word*)a.value_places + at + (token >> 2)) : e.place;
        e.mask = __ldg(a.token_masks + at * 4 + token);
    }
    return e;
}

#if FP8
#define RAW_LOADS 8                // 16-byte loads of a thread for its share of a tile: two tokens of 256 bytes a warp

__device__ __forceinline__ void load_raw(
    uint4 (&raw)[RAW_LOADS], const char* base, word unit_bytes, word token_bytes, word place, word mask, int lane
) {
    const word attended = __ballot_sync(FULL, mask != 0) >> (lane >> 4);
    const char* const own = base + (lane >> 4) * token_bytes + (lane & 15) * 16;
#pragma unroll
    for (int i = 0; i < RAW_LOADS; ++i) {
        const wide block = (wide)__shfl_sync(FULL, place, 4 * (i >> 1)) * unit_bytes;
        raw[i] = make_uint4(0, 0, 0, 0);
        if (attended >> 2 * i & 1) raw[i] = __ldg((const uint4*)(own + block + (i & 1) * 2 * token_bytes));
    }
}
__device__ __forceinline__ void convert_word(word w, word& first, word& second) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(first), "=r"(second)
        : "r"(w));
}
__device__ __forceinline__ void store_raw(const uint4 (&raw)[RAW_LOADS], word tile, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < RAW_LOADS; ++i) {
        const int row = warp * 16 + 2 * i + (lane >> 4), chunk = 2 * (lane & 15);
        uint4 low, high;
        convert_word(raw[i].x, low.x, low.y);
        convert_word(raw[i].y, low.z, low.w);
        convert_word(raw[i].z, high.x, high.y);
        convert_word(raw[i].w, high.z, high.w);
        store_shared(tile + swizzled(row, chunk), low);
        store_shared(tile + swizzled(row, chunk + 1), high);
    }
}
#else
// Copies tokens of 512 bytes, one a copy of the warp; a token that no row attends to is filled with zeros, unread.
__device__ __forceinline__ void gather(
    word tile, const char* base, word unit_bytes, word token_bytes, word place, word mask, int warp, int lane
) {
    const word attended = __ballot_sync(FULL, mask != 0);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        const char* from = base + lane * 16 + (wide)__shfl_sync(FULL, place, 4 * block) * unit_bytes;
#pragma unroll
        for (int token = 4 * block; token < 4 * block + 4; ++token) {
            const word to = tile + swizzled(warp * 16 + token, lane);
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                         "r"(attended >> token & 1 ? 16 : 0)
                         : "memory");
            from += token_bytes;
        }
    }
}
__device__ __forceinline__ void arrive_when_copied(word barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif

__device__ __forceinline__ void produce(const Arguments& a, const Work& w, const Shared& s) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, token = warp * 16 + (lane & 15);
    const char* const keys = a.keys + w.kv_head * a.k_head;
    const char* const values = a.values + w.kv_head * a.v_head;
    const word unit_bytes = a.unit_bytes, k_token = a.k_token, v_token = a.v_token;
    const int tiles = w.last - w.first;
    Entry now = fetch_entry(a, w, w.first, token), next = fetch_entry(a, w, w.first + 1, token);
    Entry after = fetch_entry(a, w, w.first + 2, token);
#if FP8
    uint4 key[RAW_LOADS], value[RAW_LOADS];
    load_raw(key, keys, unit_bytes, k_token, now.place, now.mask, lane);
    for (int t = 0; t < tiles; ++t) {
        const int stage = t % STAGES, phase = t / STAGES & 1;
        load_raw(value, values, unit_bytes, v_token, now.value_place, now.mask, lane);
        barrier_wait(s.keys_free + 8 * stage, phase ^ 1);
        store_raw(key, s.keys + stage * TILE, warp, lane);
        if (lane < 16) store_shared(s.masks + (stage * N + token) * 4, now.mask);
        publish();
        warp_arrive(s.keys_full + 8 * stage, lane);
        now = next;
        next = after;
        after = fetch_entry(a, w, w.first + t + 3, token);
        load_raw(key, keys, unit_bytes, k_token, now.place, now.mask, lane);
        barrier_wait(s.values_free + 8 * stage, phase ^ 1);
        store_raw(value, s.values + stage * TILE, warp, lane);
        publish();
        warp_arrive(s.values_full + 8 * stage, lane);
    }
#else
    const auto bring_keys = [&](int t, const Entry& e) {
        const int stage = t % STAGES;
        barrier_wait(s.keys_free + 8 * stage, (t / STAGES & 1) ^ 1);
        gather(s.keys + stage * TILE, keys, unit_bytes, k_token, e.place, e.mask, warp, lane);
        if (lane < 16) store_shared(s.masks + (stage * N + token) * 4, e.mask);
        arrive_when_copied(s.keys_full + 8 * stage);
        warp_arrive(s.keys_full + 8 * stage, lane);  // the masks
    };
    // Consumers want the next tile's keys before this one's values.
    if (tiles > 0) bring_keys(0, now);
    for (int t = 0; t < tiles; ++t) {
        const Entry later = fetch_entry(a, w, w.first + t + 3, token);
        if (t + 1 < tiles) bring_keys(t + 1, next);
        const int stage = t % STAGES;
        barrier_wait(s.values_free + 8 * stage, (t / STAGES & 1) ^ 1);
        gather(s.values + stage * TILE, values, unit_bytes, v_token, now.value_place, now.mask, warp, lane);
        arrive_when_copied(s.values_full + 8 * stage);
        now = next;
        next = after;
        after = later;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------------- consumers

struct Line {                      // one of a thread's two query lines
    long long row;
    int head;                      // of all q_heads
    word bit;                      // of the row in masks; 0 where there is no row
};

__device__ __forceinline__ Line line_of(const Arguments& a, const Work& w, int consumer, int line) {
    const int in_window = consumer * ROWS + line / HEADS;
    const long long row = (long long)w.window * a.group_rows + in_window;
    const bool there = line < ROWS * HEADS && in_window < a.group_rows && row < a.rows;
    return {row, w.kv_head * HEADS + line % HEADS, there ? 1u << in_window : 0u};
}

// Queries of a consumer into shared memory. With an FP8 cache each line becomes FP16 over a power of two that is handed
// back in `powers` (a line's in the thread of its number): exact, whatever the queries' range.
__device__ __forceinline__ void load_queries(
    const Arguments& a, const Work& w, const Shared& s, int consumer, int warp, int lane, float* powers
) {
    const word to = s.queries + consumer * TILE;
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
        const int number = warp * 16 + i;
        const Line line = line_of(a, w, consumer, number);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (line.bit) v = __ldg((const uint4*)(a.q + line.row * a.q_row + line.head * a.q_head) + lane);
#if FP8
        float power = 1.0f;
#if BF16
        float x[8];
        unpack(v.x, x[0], x[1]);
        unpack(v.y, x[2], x[3]);
        unpack(v.z, x[4], x[5]);
        unpack(v.w, x[6], x[7]);
        float largest = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(x[j]));
#pragma unroll
        for (int step = 16; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, step));
        const int exponent = min(max(__float_as_int(largest) & 0x7f800000, 67 << 23), 253 << 23);
        power = __int_as_float(exponent);
        const float inverse = __int_as_float((254 << 23) - exponent);
        v.x = pack_product(x[0] * inverse, x[1] * inverse);
        v.y = pack_product(x[2] * inverse, x[3] * inverse);
        v.z = pack_product(x[4] * inverse, x[5] * inverse);
        v.w = pack_product(x[6] * inverse, x[7] * inverse);
#endif
        if (lane == 0) powers[number] = power;
#endif
        store_shared(to + swizzled(number, lane), v);
    }
    publish();
}

__device__ __forceinline__ void consume(
    const Arguments& a, const Work& w, const Shared& s, int consumer, float* powers, int* ended
) {
    const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5, column = 2 * (lane & 3);
    const int numbers[2] = {warp * 16 + (lane >> 2), warp * 16 + (lane >> 2) + 8};
    load_queries(a, w, s, consumer, warp, lane, powers);
    group_barrier(1 + consumer);
    Line lines[2] = {line_of(a, w, consumer, numbers[0]), line_of(a, w, consumer, numbers[1])};
    float scales[2] = {a.scale, a.scale};
    if (a.k_scales) scales[0] = scales[1] = a.scale * a.k_scales[w.kv_head];
#if FP8
    scales[0] *= powers[numbers[0]];
    scales[1] *= powers[numbers[1]];
#endif

    float acc[128], logits[32], top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {0.0f, 0.0f}, fade[2];
    word weights[4][4];            // [16 tokens of the tile][as wgmma takes them]
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
    const word queries = s.queries + consumer * TILE, own_queries = matrix_at(queries, 16);

    const auto keys_product = [&](int t) {
        const int stage = t % STAGES;
        barrier_wait(s.keys_full + 8 * stage, t / STAGES & 1);
        if (!FP8) publish();
        fence_registers(logits);
        products_begin();
        const word keys = matrix_at(s.keys + stage * TILE, 16);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int step = (i >> 2) * SLAB + (i & 3) * 32;
            multiply_keys(logits, matrix(own_queries, step), matrix(keys, step), i > 0);
        }
        products_end();
        fence_registers(logits);
    };
    const auto values_product = [&](int t) {
        const int stage = t % STAGES;
        barrier_wait(s.values_full + 8 * stage, t / STAGES & 1);
        if (!FP8) publish();
        fence_registers(acc);
        products_begin();
        const word values = matrix_at(s.values + stage * TILE, SLAB);
#pragma unroll
        for (int i = 0; i < 4; ++i) multiply_values(acc, weights[i], matrix(values, i * 2048));
        products_end();
        fence_registers(acc);
    };
    // Logits become weights exp2(scale * logit - top), in place; `fade` is what earlier sums and products are worth.
    const auto softmax = [&](int t) {
        const word masks = s.masks + (t % STAGES) * N * 4;
        float largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            word low, high;
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                         : "=r"(low), "=r"(high)
                         : "r"(masks + (8 * j + column) * 4)
                         : "memory");
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& x = logits[4 * j + 2 * h];
                float& y = logits[4 * j + 2 * h + 1];
                x = low & lines[h].bit ? x : NEGATIVE_INFINITY;
                y = high & lines[h].bit ? y : NEGATIVE_INFINITY;
                largest[h] = fmaxf(largest[h], fmaxf(x, y));
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(FULL, largest[h], 1));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(FULL, largest[h], 2));
            const float new_top = fmaxf(top[h], largest[h] * scales[h]);
            const float reference = new_top == NEGATIVE_INFINITY ? 0.0f : new_top;
            fade[h] = power_of_2(top[h] - reference);
            top[h] = new_top;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float& x = logits[4 * j + 2 * h];
                float& y = logits[4 * j + 2 * h + 1];
                x = power_of_2(fmaf(x, scales[h], -reference));
                y = power_of_2(fmaf(y, scales[h], -reference));
                sum += x + y;
            }
            total[h] = total[h] * fade[h] + sum;  // of this thread's columns: the four threads are added up at the end
        }
    };
    const auto pack_weights = [&]() {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            weights[i][0] = pack_product(logits[8 * i], logits[8 * i + 1]);
            weights[i][1] = pack_product(logits[8 * i + 2], logits[8 * i + 3]);
            weights[i][2] = pack_product(logits[8 * i + 4], logits[8 * i + 5]);
            weights[i][3] = pack_product(logits[8 * i + 6], logits[8 * i + 7]);
        }
    };

    const int tiles = w.last - w.first;
    if (tiles > 0) {
        keys_product(0);
        products_wait<0>();
        fence_registers(logits);
        softmax(0);
        warp_arrive(s.keys_free, lane);
        pack_weights();
        for (int t = 1; t < tiles; ++t) {
            keys_product(t);
            values_product(t - 1);
            products_wait<1>();
            fence_registers(logits);
            softmax(t);
            // The sums are never negative; asking keeps the exponentials here, where the products with the values hide
            // them. The assembler would move some of them behind the wait.
            __syncwarp();
            if (lane == 0 || total[0] + total[1] < 0.0f) barrier_arrive(s.keys_free + 8 * (t % STAGES));
            products_wait<0>();
            fence_registers(acc);
            warp_arrive(s.values_free + 8 * ((t - 1) % STAGES), lane);
            pack_weights();
            if (__any_sync(FULL, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < 128; ++i) acc[i] *= fade[i >> 1 & 1];
            }
        }
        values_product(tiles - 1);
        products_wait<0>();
        fence_registers(acc);
    }

    float value_scale = a.v_scale;
    if (a.v_scales) value_scale = a.v_scales[w.kv_head];
    float lse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(FULL, total[h], 1);
        total[h] += __shfl_xor_sync(FULL, total[h], 2);
        lse[h] = (top[h] + log_2(total[h])) * LN_2;
        const float factor = total[h] == 0.0f ? 0.0f : __fdividef(value_scale, total[h]);
#pragma unroll
        for (int j = 0; j < 64; ++j) acc[(j >> 1) * 4 + 2 * h + (j & 1)] *= factor;
    }
    const int q_heads = a.kv_heads * HEADS;

    if (w.cut) {
        const long long part_heads = (long long)a.part_rows * q_heads;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!lines[h].bit) continue;
            const long long at = w.part * part_heads + (lines[h].row - a.first_part_row) * q_heads + lines[h].head;
            if (column == 0) a.part_lse[at] = lse[h];
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                const float2 pair = make_float2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
                *(float2*)(a.part_out + at * D + 8 * j + column) = pair;
            }
        }
        if (!a.inside) return;
        // Every thread's stores come before the count, and the other parts' count before the reads below.
        __threadfence();
        group_barrier(1 + consumer);
        if (thread == 0) *ended = atomicAdd(a.done + w.unit * CONSUMERS + consumer, 1);
        group_barrier(1 + consumer);
        if (*ended != a.parts - 1) return;
        __threadfence();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float best = NEGATIVE_INFINITY, sum = 0.0f;
            const long long at = (lines[h].row - a.first_part_row) * q_heads + lines[h].head;
            if (lines[h].bit) {
                for (int p = 0; p < a.parts; ++p) {
                    const float found = __ldcg(a.part_lse + p * part_heads + at);
                    best = found <= best || best != best ? best : found;  // NaN stays, which `fmaxf` would lose
                }
            }
#pragma unroll
            for (int j = 0; j < 64; ++j) acc[(j >> 1) * 4 + 2 * h + (j & 1)] = 0.0f;
            if (lines[h].bit && best != NEGATIVE_INFINITY) {
                for (int p = 0; p < a.parts; ++p) {
                    const float weight = power_of_2((__ldcg(a.part_lse + p * part_heads + at) - best) * LOG2_E);
                    sum += weight;
                    const float* const from = a.part_out + (p * part_heads + at) * D + column;
#pragma unroll
                    for (int j = 0; j < 32; ++j) {
                        const float2 v = __ldcg((const float2*)(from + 8 * j));
                        acc[4 * j + 2 * h] += weight * v.x;
                        acc[4 * j + 2 * h + 1] += weight * v.y;
                    }
                }
                const float factor = __fdividef(1.0f, sum);
#pragma unroll
                for (int j = 0; j < 64; ++j) acc[(j >> 1) * 4 + 2 * h + (j & 1)] *= factor;
            }
            lse[h] = best + log_2(sum) * LN_2;
        }
    }

    // Rounded once, and through shared memory (the queries' place) into whole rows for the gate and the store.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (a.lse && column == 0 && lines[h].bit) a.lse[lines[h].row * q_heads + lines[h].head] = lse[h];
    }
    group_barrier(1 + consumer);   // every warp's products with the queries have ended
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const word packed = pack_output(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
            store_shared(queries + swizzled(numbers[h], j) + column * 2, packed);
        }
    }
    group_barrier(1 + consumer);
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
        const int number = warp * 16 + i;
        const Line line = line_of(a, w, consumer, number);
        if (!line.bit) continue;
        uint4 v = load_shared(queries + swizzled(number, lane));
        if (a.gate) {
            const uint4 g = __ldg((const uint4*)(a.gate + line.row * a.gate_row + line.head * a.gate_head) + lane);
            const word from[4] = {v.x, v.y, v.z, v.w}, by[4] = {g.x, g.y, g.z, g.w};
            word gated[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float x, y, p, r;
                unpack(from[j], x, y);
                unpack(by[j], p, r);
                gated[j] = pack_output(__fdividef(x, 1.0f + __expf(-p)), __fdividef(y, 1.0f + __expf(-r)));
            }
            v = make_uint4(gated[0], gated[1], gated[2], gated[3]);
        }
        *((uint4*)(a.out + line.row * a.out_row + line.head * a.out_head) + lane) = v;
    }
}

extern "C" __global__ void __launch_bounds__(PRODUCERS + CONSUMERS * CONSUMER_THREADS, 1)
flashqsa_attend_sm90(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char dynamic[];
    __shared__ float powers[CONSUMERS][LINES];
    __shared__ int ended[CONSUMERS];
    const word base = ((word)__cvta_generic_to_shared(dynamic) + 1023) & ~1023u;
    Shared s;
    s.queries = base;
    s.keys = base + CONSUMERS * TILE;
    s.values = s.keys + STAGES * TILE;
    s.masks = s.values + STAGES * TILE;
    s.keys_full = s.masks + STAGES * N * 4;
    s.keys_free = s.keys_full + STAGES * 8;
    s.values_full = s.keys_free + STAGES * 8;
    s.values_free = s.values_full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            // Copies count by thread, everything else by warp.
            barrier_init(s.keys_full + 8 * i, FP8 ? 4 : PRODUCERS + 4);
            barrier_init(s.values_full + 8 * i, FP8 ? 4 : PRODUCERS);
            barrier_init(s.keys_free + 8 * i, CONSUMERS * 4);
            barrier_init(s.values_free + 8 * i, CONSUMERS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const Work w = work_of(a);
    const int role = __shfl_sync(FULL, threadIdx.x >> 7, 0);
    if (role == 0) {
#if CONSUMERS == 2
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
#endif
        produce(a, w, s);
    } else {
#if CONSUMERS == 2
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
#endif
        consume(a, w, s, role - 1, powers[role - 1], ended + role - 1);
    }
}
