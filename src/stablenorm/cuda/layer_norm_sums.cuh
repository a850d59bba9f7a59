// Sums over rows of layer_norm.cu: from the chunks to dgamma and dbeta, and how blocks meet for it.

// dgamma is summed in a scale of its own: a sum of subnormals has low words too.
constexpr int DGAMMA_SCALE = LN_PAIRS ? 128 : 0;

// Past the first-level cache, which is not kept coherent between multiprocessors.
INLINE double load_shared(const double* p) { return __ldcg(p); }
INLINE Wide load_shared(const Wide* p) { return {__ldcg(&p->high), __ldcg(&p->low)}; }

// Return, to all threads of a block, whether it is to add up the chunks: all blocks do if they may
// wait for one another, otherwise the last to come. All must be resident to wait.
//
// Blocks count up to a half of what the counter holds: its top bit turns when the last one arrives,
// and nothing needs a reset before the next launch, whatever its grid.
INLINE bool blocks_met(const Parameters& p) {
    bool met = false;
    // Orders the partial sums of the block before the fence of its first thread.
    __syncthreads();
    if (threadIdx.x == 0) {
        // Release: the partial sums of this block are visible before its arrival is.
        __threadfence();
        const unsigned step = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        const unsigned before = atomicAdd(p.counter, step);
        unsigned now = before + step;
        while (p.barrier && ((before ^ now) & 0x80000000u) == 0) {
            __nanosleep(32);
            now = atomicAdd(p.counter, 0u);
        }
        met = ((before ^ now) & 0x80000000u) != 0;
        // Acquire: what the others stored before they arrived is visible from here on.
        __threadfence();
    }
    // Orders the acquire of the first thread before what the others read.
    return __syncthreads_or(met);
}

// Add up the chunks: the blocks that do share the columns. Eight warps share 32 columns, and each of them every
// eighth chunk; so what is added to what depends on the chunks alone. `sums` is (warps of the block, 32) in shared
// memory.
INLINE void finish(const Parameters& p, Wide* sums) {
    const unsigned block = p.barrier ? blockIdx.x : 0, blocks = p.barrier ? gridDim.x : 1;
    constexpr int SHARES = 8, SETS = LN_THREADS / WARP / SHARES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int share = warp % SHARES, set = warp / SHARES;
    const long long step = (long long)blocks * SETS * WARP;
    // Every thread of the block takes as many turns: barriers are legal.
    for (long long base = (long long)block * SETS * WARP; base < 2 * p.n; base += step) {
        const long long at = base + set * WARP + lane;
        const bool there = set < SETS && at < 2 * p.n;
        Wide sum = {0.0, 0.0};
        // Loads in flight: a latency of the cache, some 300 clocks, for 8 of them.
#pragma unroll 8
        for (long long chunk = share; there && chunk < p.chunks; chunk += SHARES)
            sum = sum + load_shared(p.partials + chunk * 2 * p.n + at);
        sums[threadIdx.x] = sum;
        // Orders the shares before they are added up.
        __syncthreads();
        for (int other = 1; there && share == 0 && other < SHARES; ++other)
            sum = sum + sums[threadIdx.x + other * WARP];
        if (there && share == 0) {
            if (at < p.n && p.dgamma) round_scaled(p.dgamma[at], sum, -DGAMMA_SCALE);
            if (at >= p.n && p.dbeta) round_scaled(p.dbeta[at - p.n], sum, 0);
        }
        // Orders these reads before the next shares are written.
        __syncthreads();
    }
}
