// Sums over rows of layer_norm.cu: from the chunks to dgamma and dbeta, and how blocks meet for it.

// A test takes one of these out, to see that the race it leaves is found.
#ifndef LN_RELEASE_FENCE
#define LN_RELEASE_FENCE() __threadfence()
#endif
#ifndef LN_ACQUIRE_FENCE
#define LN_ACQUIRE_FENCE() __threadfence()
#endif

// ---- partial sums ----

// Past the first-level cache, which is not kept coherent between multiprocessors.
LN_INLINE double load_shared(const double* p) { return __ldcg(p); }
LN_INLINE Pair load_shared(const Pair* p) {
    const double2 v = __ldcg(reinterpret_cast<const double2*>(p));
    return {v.x, v.y};
}
LN_INLINE void store_shared(double* p, double v) { __stcg(p, v); }
LN_INLINE void store_shared(Pair* p, Pair v) {
    __stcg(reinterpret_cast<double2*>(p), make_double2(v.hi, v.lo));
}

LN_INLINE double collapsed(double sum) { return sum; }
#if LN_PAIRS
LN_INLINE Pair collapsed(Pair sum) { return settled(sum); }
#else
LN_INLINE double collapsed(Pair sum) { return add(sum.hi, sum.lo); }
#endif

// `which` is 0 for dgamma, 1 for dbeta.
LN_INLINE Number* partial_at(const Parameters& p, long long chunk, int which, long long col) {
    return static_cast<Number*>(p.partials) + (2 * chunk + which) * p.n + col;
}

template <class T> LN_INLINE void write_rounded(void* out, long long col, Pair total) {
    T result;
    round_into(result, total);
    static_cast<T*>(out)[col] = result;
}

// Round once to the dtype of gamma, or beta.
LN_INLINE void write_total(const Parameters& p, int which, long long col, Pair total) {
    void* out = which == 0 ? p.dgamma : p.dbeta;
    const int type = which == 0 ? p.gamma_type : p.beta_type;
    if (out == nullptr) return;
    total = settled(total);
    // The error of an infinite sum is a NaN.
    if (!is_finite(total.hi)) total.lo = 0.0;
#if LN_PAIRS
    // Where this is subnormal, it is rounded to float64, and narrower types are all zero.
    if (which == 0) total = {scaled_once(total, -DGAMMA_SCALE), scaled(total.lo, -DGAMMA_SCALE)};
    if (type == 3) return write_rounded<double>(out, col, total);
#endif
    if (type == 2) write_rounded<float>(out, col, total);
    else if (type == 1) write_rounded<Bfloat16>(out, col, total);
    else write_rounded<Float16>(out, col, total);
}

// ---- blocks meet ----

#ifdef __CUDA_ARCH__
LN_INLINE unsigned load_acquire(unsigned* p) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
#endif

// All blocks must be resident. The top bit of the counter turns when the last one arrives, so
// that no launch needs it reset, whatever its grid.
LN_INLINE void grid_barrier(unsigned* counter) {
    // Orders the partial sums of the block before the fence of its first thread.
    __syncthreads();
    if (threadIdx.x == 0) {
        // Release: the partial sums of this block are visible before its arrival is.
        LN_RELEASE_FENCE();
        const unsigned step = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        const unsigned before = atomicAdd(counter, step);
        while (((before ^ load_acquire(counter)) & 0x80000000u) == 0) __nanosleep(32);
        // Acquire: what the others stored before they arrived is visible from here on.
        LN_ACQUIRE_FENCE();
    }
    // Orders the acquire of the first thread before what the others read.
    __syncthreads();
}

// Tell the whole block whether it is the last to come; the ticket is 0 again then.
LN_INLINE bool is_last(unsigned* ticket, volatile unsigned* flag) {
    // Orders the same as the first barrier of grid_barrier.
    __syncthreads();
    if (threadIdx.x == 0) {
        // Release, as in grid_barrier.
        LN_RELEASE_FENCE();
        *flag = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1 ? 1u : 0u;
        // Acquire.
        LN_ACQUIRE_FENCE();
    }
    // Orders the flag, and the acquire, before what the block does then.
    __syncthreads();
    return *flag != 0;
}

// Chunks are summed in this many runs of neighbors, and these in order: enough to keep loads in
// flight.
constexpr int RUNS = 8;

// Add up the chunks, as block `block` of `blocks`: they share the columns, a warp's width at a time,
// and the warps of a block share the runs. What is added to what depends on the chunks alone. `sums`
// is (RUNS, WARP) in shared memory.
LN_INLINE void finish(const Parameters& p, unsigned block, unsigned blocks, Pair* sums) {
    const int per = (p.chunks + RUNS - 1) / RUNS, runs = (p.chunks + per - 1) / per;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long groups = (p.n + WARP - 1) / WARP * 2;
    for (long long group = block; group < groups; group += blocks) {
        const int which = (int)(group % 2);
        const long long col = group / 2 * WARP + lane;
        for (int run = warp; run < runs && col < p.n; run += WARPS) {
            const int first = run * per, stop = first + per < p.chunks ? first + per : p.chunks;
            Pair total = {0.0, 0.0};
            // Four loads in flight.
#pragma unroll 4
            for (int chunk = first; chunk < stop; ++chunk)
                accumulate(total, load_shared(partial_at(p, chunk, which, col)));
            sums[run * WARP + lane] = settled(total);
        }
        // Orders the sums of all runs before the first warp reads them.
        __syncthreads();
        if (warp == 0 && col < p.n) {
            Pair total = sums[lane];
            for (int run = 1; run < runs; ++run) total = add(total, sums[run * WARP + lane]);
            write_total(p, which, col, total);
        }
        // Orders these reads before the next group is written.
        __syncthreads();
    }
}
