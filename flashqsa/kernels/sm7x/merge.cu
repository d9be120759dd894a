// Merges parts of whole rows for Volta and Turing: one warp per query head. Parts are added in their order, so that the
// result does not depend on which ended last. Compiled with -D: TURING as mma.cuh says; D, head_dim.

#include "mma.cuh"

#define PAIRS (D / 64)              // of neighbouring dimensions, in a lane
#define LN_2 0.6931471805599453f
#define LOG2_E 1.4426950408889634f

extern "C" __global__ void __launch_bounds__(256) flashqsa_merge_sm7x(
    const float* part_out,          // [parts, heads, D], normalised within a part
    const float* part_lse,          // [parts, heads], natural; -inf where a part sees nothing
    const char* gate,               // [rows, q_heads, D] FP16, or null
    char* out,                      // [rows, q_heads, D] FP16
    float* lse,                     // [rows, q_heads], or null
    long long gate_row,             // strides are in bytes
    long long gate_head,
    long long out_row,
    long long out_head,
    long long heads,                // rows * q_heads
    int q_heads,
    int parts
) {
    const int lane = threadIdx.x & 31;
    const long long at = (long long)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (at >= heads) return;
    const long long row = at / q_heads;
    const int head = at % q_heads;
    float best = __uint_as_float(0xff800000u);
    for (int part = 0; part < parts; ++part) best = fmaxf(best, __ldg(part_lse + part * heads + at));
    const float reference = best == __uint_as_float(0xff800000u) ? 0.0f : best;
    float sum = 0.0f, value[PAIRS][2];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) value[i][0] = value[i][1] = 0.0f;
    for (int part = 0; part < parts; ++part) {
        const float weight = power_of_2((__ldg(part_lse + part * heads + at) - reference) * LOG2_E);
        sum += weight;
        const float* const from = part_out + (part * heads + at) * D + 2 * lane;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const float2 v = __ldg((const float2*)(from + 64 * i));
            value[i][0] += weight * v.x;
            value[i][1] += weight * v.y;
        }
    }
    const float factor = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    if (lse && lane == 0) lse[at] = best + log_2(sum) * LN_2;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int dim = 64 * i + 2 * lane;
        word packed = pack_halves(value[i][0] * factor, value[i][1] * factor);
        if (gate) packed = gated(packed, __ldg((const word*)(gate + row * gate_row + head * gate_head + dim * 2)));
        *(word*)(out + row * out_row + head * out_head + dim * 2) = packed;
    }
}
