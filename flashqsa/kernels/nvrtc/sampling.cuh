// Which blocks of a row are sampled, and what a sample tells: the floor that a row's best blocks reach.

struct Floor {
    float least;  // a block goes on if it scores more, or as much and its id is no higher than `last`; NaN: none does
    int last;
};

static constexpr int EVERY_BLOCK = 0x7fffffff;
static constexpr float LEAST_SCORE = -3.402823466e+38f;

// One of each `stride` neighbouring blocks, a power of two of them; a hash of the sample's number says which, so that no
// period of the scores meets the same ones again and again. (The finaliser of MurmurHash3's 32-bit variant, by A. Appleby.)
__device__ __forceinline__ int sampled_block(int sample, int stride) {
    unsigned hash = unsigned(sample);
    hash = (hash ^ hash >> 16) * 0x85ebca6bu;
    hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
    return sample * stride + int((hash ^ hash >> 16) & unsigned(stride - 1));
}

// Blocks that a row sees; none where it is padding, or where its numbers are past their bounds.
__device__ __forceinline__ int blocks_seen(int owner, int at, int requests, int max_position, int block_tokens) {
    if (unsigned(owner) >= unsigned(requests) || at < 0 || at > max_position) return 0;
    return at / block_tokens + (at % block_tokens == block_tokens - 1);
}

// Blocks sampled of those that a row sees; none where every block goes on, since a sample's cut at `rank` would not tell.
__device__ __forceinline__ int blocks_sampled(int seen, int top, int rank, int stride) {
    return seen > top && seen / stride > rank ? seen / stride : 0;
}
