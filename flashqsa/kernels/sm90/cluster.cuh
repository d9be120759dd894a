// What decode.cu asks of Hopper beyond barriers and shuffles, as functions: the shared memory of a cluster's other
// programs, copies that arrive while others are waited for, and the tensor cores' product of a warp.
// Instructions and their operands: PTX ISA, "barrier.cluster", "mapa", "cp.async", "ldmatrix", "Matrix Fragments for
// mma.m16n8k16".

typedef unsigned int u32;
typedef long long i64;

#ifdef __CUDA_ARCH__  // elsewhere the tests bring them

// A program's number within its cluster.
__device__ __forceinline__ int rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of a cluster, in two halves. What was written before the first half, to whichever program's
// shared memory, is read after the second. A thread takes the halves in turn, and whole warps come to them.
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where a program of the cluster has what lies at `own` here.
__device__ __forceinline__ u32 address_at(const void* own, int rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(own)), "r"(rank));
    return address;
}
__device__ __forceinline__ u32 load_at(const u32* own, int rank) {
    u32 found;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(found) : "r"(address_at(own, rank)) : "memory");
    return found;
}
__device__ __forceinline__ uint4 load_at(const uint4* own, int rank) {
    uint4 found;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "r"(address_at(own, rank))
                 : "memory");
    return found;
}
__device__ __forceinline__ void store_at(u32* own, int rank, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_at(own, rank)), "r"(value) : "memory");
}
__device__ __forceinline__ void store_at(uint2* own, int rank, uint2 value) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(address_at(own, rank)), "r"(value.x), "r"(value.y)
                 : "memory");
}
__device__ __forceinline__ void store_at(uint4* own, int rank, uint4 value) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address_at(own, rank)), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// Copies to shared memory that a thread has on their way, in groups: zeros where `there` is false, and nothing is read.
__device__ __forceinline__ void copy_16(char* to, const char* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_4(int* to, const int* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's groups but for the last `LEFT`; for those of a warp's other lanes, __syncwarp comes next.
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Operand a of a product, [16, 16]: lane l brings the address of row l % 16 from column l / 16 * 8 on.
__device__ __forceinline__ void load_operand(u32 (&a)[4], const char* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}

// d [16, 8] += a [16, 16] b [16, 8]. Of b a lane holds column lane / 4 at rows 2 * (lane % 4) and the next, and 8
// further; of d rows lane / 4 and 8 further, each at columns 2 * (lane % 4) and the next.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 low, u32 high) {
#if BF16
#define OPERANDS "bf16.bf16"
#else
#define OPERANDS "f16.f16"
#endif
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ float relu(float x) {  // NaN stays NaN
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(0.0f));
    return y;
}

#endif
