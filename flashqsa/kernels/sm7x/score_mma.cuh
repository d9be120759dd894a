// Matrix products of the scorer on tensor cores: tiles of 16 lines by 16 columns in FP32, of FP16 operands.
//
// One interface over the two kinds of instruction, chosen by the macro QUAD_PAIRS:
//
// 1  mma.m8n8k4 (Volta, HMMA.884): four quad pairs, each a quarter of the tile. Bit 2 of a lane gives the quarter's
//    lines, bit 3 its columns. A lane holds all of a line and all of a column.
// 0  mma.m16n8k8 (Turing, HMMA.1688): two products side by side. A lane holds a quarter of two lines and of two columns.
//
// Layouts: PTX ISA, "Matrix Fragments for mma.m8n8k4" and "for mma.m16n8k8". Along the inner dimension a lane may take its
// numbers from wherever both operands agree, so it takes neighbours, 8 at a time: a load of 16 bytes.
//
// In both, the 8 numbers that a lane holds of a tile are 2 lines (bit 1 of their index) of 2 pairs of columns (bit 2).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

static constexpr int TILE = 16;
static constexpr int PARTS = 8;  // numbers of a tile that a lane holds

#ifdef __CUDA_ARCH__  // elsewhere the tests bring the instructions, by their layout formulas
__device__ __forceinline__ void mma_m8n8k4(float (&c)[PARTS], u32 a0, u32 a1, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k8(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a0), "r"(a1), "r"(b));
}
#endif

// 8 neighbouring FP16 numbers.
struct __align__(16) Eight {
    u32 pair[4];
};

#if QUAD_PAIRS

static constexpr int HELD = 1;       // lines, and columns, of a tile of which a lane holds operands
static constexpr int STEP_DIMS = 8;  // of the inner dimension, that a warp takes at a time
static constexpr int LINE_STEP = 2, COLUMN_STEP = 4;
static constexpr int LINE_PART_BIT = 1;  // the bit of a line that is bit 1 of a part; the others are bits of the lane

// Line and column of a lane's part 0.
__device__ __forceinline__ int first_line(int lane) { return (lane & 1) | (lane >> 4 & 1) << 2 | (lane >> 2 & 1) << 3; }
__device__ __forceinline__ int first_column(int lane) { return (lane & 2) | (lane >> 3 & 1) << 3; }

// The line, the column and the first of 8 dimensions of operand i of a lane.
__device__ __forceinline__ int operand_line(int lane, int) {
    return (lane & 3) | (lane >> 4 & 1) << 2 | (lane >> 2 & 1) << 3;
}
__device__ __forceinline__ int operand_column(int lane, int) {
    return (lane & 3) | (lane >> 4 & 1) << 2 | (lane >> 3 & 1) << 3;
}
__device__ __forceinline__ int operand_dim(int) { return 0; }
// A lane that holds operands of a column, and which of its own they are.
__device__ __forceinline__ int lane_of_column(int column) { return (column & 3) | (column & 4) << 2 | (column & 8); }
__device__ __forceinline__ int operand_of_column(int) { return 0; }

// Where a line stands in shared memory: eight neighbouring lanes then read eight different groups of banks.
__device__ __forceinline__ int slot_of(int line) { return (line & ~12) | (line & 8) >> 1 | (line & 4) << 1; }
__device__ constexpr int line_units(int dim) { return dim / 8 | 1; }  // 16 bytes each, from a line to the next

__device__ __forceinline__ void multiply(float (&tile)[PARTS], const Eight (&a)[HELD], const Eight (&b)[HELD]) {
    mma_m8n8k4(tile, a[0].pair[0], a[0].pair[1], b[0].pair[0], b[0].pair[1]);
    mma_m8n8k4(tile, a[0].pair[2], a[0].pair[3], b[0].pair[2], b[0].pair[3]);
}

// What the number of a lane differs in where a bit of its lines does, and where its columns do.
__device__ __forceinline__ constexpr int line_lane(int bit) { return bit == 0 ? 1 : bit == 2 ? 16 : 4; }
static constexpr int COLUMN_LANES[2] = {2, 8};

#else

static constexpr int HELD = 2;
static constexpr int STEP_DIMS = 32;
static constexpr int LINE_STEP = 8, COLUMN_STEP = 8;
static constexpr int LINE_PART_BIT = 3;

__device__ __forceinline__ int first_line(int lane) { return lane >> 2; }
__device__ __forceinline__ int first_column(int lane) { return (lane & 3) * 2; }

__device__ __forceinline__ int operand_line(int lane, int i) { return (lane >> 2) + 8 * i; }
__device__ __forceinline__ int operand_column(int lane, int i) { return (lane >> 2) + 8 * i; }
__device__ __forceinline__ int operand_dim(int lane) { return (lane & 3) * 8; }
__device__ __forceinline__ int lane_of_column(int column) { return (column & 7) << 2; }
__device__ __forceinline__ int operand_of_column(int column) { return column >> 3; }

__device__ __forceinline__ int slot_of(int line) { return line; }
// Eight neighbouring lanes read half of the banks for one line, and the other half for the next.
__device__ constexpr int line_units(int dim) { return dim / 8 + (12 - dim / 8 % 8) % 8; }

__device__ __forceinline__ void multiply(float (&tile)[PARTS], const Eight (&a)[HELD], const Eight (&b)[HELD]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            mma_m16n8k8(
                tile[4 * half], tile[4 * half + 1], tile[4 * half + 2], tile[4 * half + 3], a[0].pair[pair],
                a[1].pair[pair], b[half].pair[pair]);
        }
    }
}

__device__ __forceinline__ constexpr int line_lane(int bit) { return 4 << bit; }
static constexpr int COLUMN_LANES[2] = {1, 2};

#endif

// Adds to each number of a tile that of the line whose `BIT` differs.
template <int BIT>
__device__ __forceinline__ void fold_lines(float (&tile)[PARTS]) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        if (BIT != LINE_PART_BIT) {
            tile[i] += __shfl_xor_sync(0xffffffffu, tile[i], line_lane(BIT));
        } else if (!(i & 2)) {
            tile[i] += tile[i + 2];
            tile[i + 2] = tile[i];
        }
    }
}

// Four E4M3 numbers as FP16, divided by 256: their exponent's bias is 8 less than FP16's. Exact, NaN stays NaN.
__device__ __forceinline__ void decode_e4m3(u32 stored, u32& low, u32& high) {
    const u32 pairs[2] = {__byte_perm(stored, 0, 0x4140), __byte_perm(stored, 0, 0x4342)};
    u32 decoded[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 magnitude = (pairs[i] & 0x007f007fu) << 7;
        // Only NaN, 0x7f, carries into bit 14, with which its exponent is FP16's largest.
        decoded[i] = magnitude | ((magnitude + 0x00800080u) & 0x40004000u) | (pairs[i] & 0x00800080u) << 8;
    }
    low = decoded[0], high = decoded[1];
}
