// Which rows count, and where a cache's pages are. Numbers no call may have (requests, positions or pages out of range)
// are passed over like padding and holes: nothing outside the tensors is read or written.

static constexpr int WARP = 32;
static constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ bool is_live(int owner, int at, int requests) {
    return unsigned(owner) < unsigned(requests) && at >= 0;
}

struct PageTable {
    const int* entries;  // [requests, pages of a request], -1 for a hole
    long long stride;
    int columns;  // of a request
    int pages;    // of the pool

    // The page of a live row's request; -1 on a hole.
    __device__ __forceinline__ int page(int owner, int column) const {
        if (column >= columns) return -1;
        const int page = __ldg(entries + owner * stride + column);
        return unsigned(page) < unsigned(pages) ? page : -1;
    }
};
