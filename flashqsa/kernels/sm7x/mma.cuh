// Tensor-core products of Volta (TURING 0: mma.m8n8k4, four quad pairs that make 8 x 8 each) and of Turing (TURING 1:
// mma.m16n8k8), as one interface: tiles of 16 x 16 FP32 numbers, 8 in each lane, from FP16 operands in shared memory.
//
// Which numbers of a tile a lane holds, for both: c[4 * p + 2 * h + i] is line `line_of(lane, h)` and column
// `column_of(lane, p) + i`, with h, p and i in 0 and 1. Lanes that share a line differ in the bits LINE_LANES_A and
// LINE_LANES_B of their number.
//
// Rows in shared memory (query lines, keys, values) lie PITCH bytes apart, PITCH a multiple of 128, in chunks of 16
// bytes whose places are exclusive-ored with `swizzle(row)`, so that the 8 lanes that a load serves at a time meet 8
// groups of 4 banks. Fragment layouts: PTX ISA, "Matrix Fragments for mma.m8n8k4" and "for mma.m16n8k8".

typedef unsigned int word;

#define FULL 0xffffffffu

#ifdef __CUDA_ARCH__  // elsewhere the tests bring the instructions, by their layout formulas
// Of a quad pair: d [8 x 8] += a [8 x 4] b [4 x 8], with b's columns contiguous (keys), or its rows (values).
__device__ __forceinline__ void mma_m8n8k4_keys(float (&d)[8], word a0, word a1, word b0, word b1) {
    asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m8n8k4_values(float (&d)[8], word a0, word a1, word b0, word b1) {
    asm("mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
#if TURING
// d [16 x 8] += a [16 x 8] b [8 x 8].
__device__ __forceinline__ void mma_m16n8k8(float& d0, float& d1, float& d2, float& d3, word a0, word a1, word b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a0), "r"(a1), "r"(b));
}
// Four matrices of 8 x 8: lane l names the row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix(word (&w)[4], const char* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"((word)__cvta_generic_to_shared(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(word (&w)[4], const char* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"((word)__cvta_generic_to_shared(row))
                 : "memory");
}
#endif
// Two numbers as FP16, nearest, the first in the lower half.
__device__ __forceinline__ word pack_halves(float low, float high) {
    word packed;
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
        : "=r"(packed)
        : "f"(low), "f"(high));
    return packed;
}
__device__ __forceinline__ void unpack_halves(word packed, float& low, float& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high)
        : "r"(packed));
}
__device__ __forceinline__ word multiply_halves(word a, word b) {
    word product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
// The same number, which the compiler takes for another: what follows from it is worked out anew and not kept.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log_2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// Two rounded numbers times sigmoid(gate) in FP32, rounded once more.
__device__ __forceinline__ word gated(word rounded, word gate) {
    constexpr float LOG2_E_NEGATIVE = -1.4426950408889634f;
    float x, y, p, r;
    unpack_halves(rounded, x, y);
    unpack_halves(gate, p, r);
    x = __fdividef(x, 1.0f + power_of_2(p * LOG2_E_NEGATIVE));
    return pack_halves(x, __fdividef(y, 1.0f + power_of_2(r * LOG2_E_NEGATIVE)));
}

#if TURING

#define OPERAND_WORDS 4            // of 16 x 16 FP16 numbers, in a lane
#define LINE_LANES_A 1
#define LINE_LANES_B 2

__device__ __forceinline__ int swizzle(int row) { return row & 7; }
__device__ __forceinline__ int line_of(int lane, int h) { return (lane >> 2) + 8 * h; }
__device__ __forceinline__ int column_of(int lane, int p) { return 8 * p + 2 * (lane & 3); }

#else

#define OPERAND_WORDS 8
#define LINE_LANES_A 2
#define LINE_LANES_B 8

// A quad pair is 4 lanes of the warp's lower half and 4 of its upper. Bit 2 of a lane gives its quad pair's half of the
// lines, bit 3 its half of the columns.
__device__ __forceinline__ int swizzle(int row) { return (row & 3) | (row >> 1 & 4); }
__device__ __forceinline__ int line_of(int lane, int h) {
    return (lane & 1) + 2 * h + (lane >> 2 & 4) + 2 * (lane & 4);
}
__device__ __forceinline__ int column_of(int lane, int p) { return (lane & 8) + 4 * p + (lane & 2); }

#endif

struct Operand {
    word w[OPERAND_WORDS];
};

template <int PITCH>
__device__ __forceinline__ int place_of(int row, int chunk) {
    return row * PITCH + (chunk ^ swizzle(row)) * 16;
}

#if TURING

// The first of two neighbouring dimensions, of tile `tile` of the products with the values, that a lane holds.
__device__ __forceinline__ int dim_of(int lane, int tile, int p) { return 16 * tile + column_of(lane, p); }

// Operand of 16 lines from `line` on and the 16 dimensions from chunk `chunk` on.
template <int PITCH>
__device__ __forceinline__ Operand load_lines(const char* lines, int line, int chunk, int lane) {
    Operand a;
    ldmatrix(a.w, lines + place_of<PITCH>(line + (lane & 15), chunk + (lane >> 4)));
    return a;
}

// The same from device memory: dimensions from `dim` on of a lane's two lines, null for a line of zeros.
__device__ __forceinline__ Operand fetch_lines(const char* const (&line)[2], int dim, int lane) {
    Operand a;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const word* const from = (const word*)(line[h] + 2 * dim) + (lane & 3);
        a.w[h] = line[h] ? __ldg(from) : 0;
        a.w[2 + h] = line[h] ? __ldg(from + 4) : 0;
    }
    return a;
}

__device__ __forceinline__ void multiply(float (&c)[8], const Operand& a, const word (&b)[4]) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        mma_m16n8k8(c[4 * p], c[4 * p + 1], c[4 * p + 2], c[4 * p + 3], a.w[0], a.w[1], b[2 * p]);
        mma_m16n8k8(c[4 * p], c[4 * p + 1], c[4 * p + 2], c[4 * p + 3], a.w[2], a.w[3], b[2 * p + 1]);
    }
}

// c [16 lines x 16 tokens] += lines a by the keys from `token` on, over the 16 dimensions from chunk `chunk` on.
template <int PITCH>
__device__ __forceinline__ void multiply_keys(
    float (&c)[8], const Operand& a, const char* keys, int token, int chunk, int lane
) {
    word b[4];
    ldmatrix(b, keys + place_of<PITCH>(token + (lane >> 1 & 8) + (lane & 7), chunk + (lane >> 3 & 1)));
    multiply(c, a, b);
}

// Tiles 2 * pair and 2 * pair + 1 of the output += weights a [16 lines x 16 tokens] by the values from `token` on.
template <int PITCH>
__device__ __forceinline__ void multiply_values(
    float (&first)[8], float (&second)[8], const Operand& a, const char* values, int token, int pair, int lane
) {
    word b[4];
    const char* const row = values + (token + (lane & 15)) * PITCH;
    const int chunk = 4 * pair + (lane >> 4), flip = swizzle(lane);
    ldmatrix_transposed(b, row + (chunk ^ flip) * 16);
    multiply(first, a, b);
    ldmatrix_transposed(b, row + ((chunk + 2) ^ flip) * 16);
    multiply(second, a, b);
}

// Weights as the operand of the products with the values: a lane's own numbers.
__device__ __forceinline__ Operand operand_of(const float (&c)[8]) {
    Operand a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.w[i] = pack_halves(c[2 * i], c[2 * i + 1]);
    return a;
}

#else

// A lane loads 8 neighbouring dimensions of a value: 4 columns of a tile, and 4 of the tile beside it.
__device__ __forceinline__ int dim_of(int lane, int tile, int p) {
    return 32 * (tile >> 1) + 4 * (tile & 1) + 2 * (lane & 8) + 8 * p + (lane & 2);
}

template <int PITCH>
__device__ __forceinline__ Operand load_rows(const char* rows, int row, int chunk) {
    Operand a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 v = *(const uint4*)(rows + place_of<PITCH>(row, chunk + i));
        a.w[4 * i] = v.x;
        a.w[4 * i + 1] = v.y;
        a.w[4 * i + 2] = v.z;
        a.w[4 * i + 3] = v.w;
    }
    return a;
}

template <int PITCH>
__device__ __forceinline__ Operand load_lines(const char* lines, int line, int chunk, int lane) {
    return load_rows<PITCH>(lines, line + (lane & 3) + (lane >> 2 & 4) + 2 * (lane & 4), chunk);
}

template <int PITCH>
__device__ __forceinline__ void multiply_keys(
    float (&c)[8], const Operand& a, const char* keys, int token, int chunk, int lane
) {
    const Operand b = load_rows<PITCH>(keys, token + (lane & 3) + (lane >> 2 & 4) + (lane & 8), chunk);
#pragma unroll
    for (int s = 0; s < 4; ++s) mma_m8n8k4_keys(c, a.w[2 * s], a.w[2 * s + 1], b.w[2 * s], b.w[2 * s + 1]);
}

template <int PITCH>
__device__ __forceinline__ void multiply_values(
    float (&first)[8], float (&second)[8], const Operand& a, const char* values, int token, int pair, int lane
) {
    const int chunk = 4 * pair + (lane >> 2 & 2) + (lane >> 4);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const uint4 b = *(const uint4*)(values + place_of<PITCH>(token + 4 * s + (lane & 3), chunk));
        mma_m8n8k4_values(first, a.w[2 * s], a.w[2 * s + 1], b.x, b.y);
        mma_m8n8k4_values(second, a.w[2 * s], a.w[2 * s + 1], b.z, b.w);
    }
}

// A lane holds 2 of each 4 tokens of two lines, and wants all 16 tokens of one: the other 2 come from the lane that
// holds them of both lines, the other 8 from the quad pair that holds the other half of the columns.
__device__ __forceinline__ Operand operand_of(const float (&c)[8]) {
    const int lane = threadIdx.x & 31;
    const bool upper_line = lane & 2, upper_half = lane & 8;
    Operand a;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        const word even = pack_halves(c[4 * p], c[4 * p + 1]), odd = pack_halves(c[4 * p + 2], c[4 * p + 3]);
        const word own = upper_line ? odd : even;
        const word got = __shfl_xor_sync(FULL, upper_line ? even : odd, 2);
        const word near[2] = {upper_line ? got : own, upper_line ? own : got};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const word far = __shfl_xor_sync(FULL, near[i], 8);
            a.w[2 * p + i] = upper_half ? far : near[i];
            a.w[2 * p + 4 + i] = upper_half ? near[i] : far;
        }
    }
    return a;
}

#endif
