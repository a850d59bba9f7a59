// Sums over rows of layer_norm.cu: from the chunks to dgamma and dbeta, and how blocks meet for it.

// dgamma is summed in a scale of its own: a sum of subnormals has low words too.
constexpr int DGAMMA_SCALE = LN_PAIRS ? 128 : 0;

// Add up the slots of the block, in order, and put the sums of vector v of a chunk away, for dgamma
// or dbeta. Slots within a warp have been added up by lanes. `combined` is (BLOCK * VECTOR) in
// shared memory.
INLINE void flush(const Parameters& p, long long chunk, int which, Index v, const Number* sums,
    Number* combined) {
    constexpr int WIDTH = ROW_THREADS * VECTOR;
    constexpr int PARTS = ROW_THREADS < WARP ? WARPS : SLOTS;
    unrolled<VECTOR>([&](int i) { combined[threadIdx.x * VECTOR + i] = sums[i]; });
    // Orders the sums of all slots before they are read.
    __syncthreads();
    Number* partial = p.partials + (2 * chunk + which) * p.n + v * WIDTH;
    const long long rest = p.n - v * WIDTH;
    for (int col = threadIdx.x; col < WIDTH && col < rest; col += BLOCK) {
        Number sum = number(0.0);
        for (int i = 0; i < PARTS; ++i) sum = sum + combined[i * (BLOCK * VECTOR / PARTS) + col];
        partial[col] = total(sum);
    }
    // Orders these reads before the next sums are written.
    __syncthreads();
}

// Past the first-level cache, which is not kept coherent between multiprocessors.
INLINE double load_shared(const double* p) { return __ldcg(p); }
INLINE Wide load_shared(const Wide* p) { return {__ldcg(&p->high), __ldcg(&p->low)}; }

// Wait for all blocks of the grid, which must run at once.
//
// Blocks count up to a half of what the counter holds: its top bit turns when the last one arrives,
// and nothing needs a reset before the next launch, whatever its grid.
INLINE void meet_blocks(const Parameters& p) {
    // Orders the partial sums of the block before the fence of its first thread.
    __syncthreads();
    if (threadIdx.x == 0) {
        // Release: the partial sums of this block are visible before its arrival is.
        __threadfence();
        const unsigned step = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        const unsigned before = atomicAdd(p.counter, step);
        for (unsigned now = before + step; ((before ^ now) & 0x80000000u) == 0;
            now = atomicAdd(p.counter, 0u))
            __nanosleep(32);
        // Acquire: what the others stored before they arrived is visible from here on.
        __threadfence();
    }
    // Orders the acquire of the first thread before what the others read.
    __syncthreads();
}

// Add up the chunks: all blocks share the columns. Eight warps share 32 columns, and each of them
// every eighth chunk; so what is added to what depends on the chunks alone. `sums` is (warps of the
// block, 32) in shared memory.
INLINE void finish(const Parameters& p, Wide* sums) {
    constexpr int SHARES = 8;
    constexpr int SETS = LN_THREADS / WARP / SHARES;
    const int warp = threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    const int share = warp % SHARES;
    const int set = warp / SHARES;
    const long long step = (long long)gridDim.x * SETS * WARP;
    // Every thread of the block takes as many turns: barriers are legal.
    for (long long base = (long long)blockIdx.x * SETS * WARP; base < 2 * p.n; base += step) {
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
