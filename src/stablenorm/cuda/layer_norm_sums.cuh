// Sums over rows of layer_norm.cu: from chunks to dgamma and dbeta, and how blocks meet for it.

// A test takes one of these out, to see that the race it leaves is found.
#ifndef LN_RELEASE_FENCE
#define LN_RELEASE_FENCE() __threadfence()
#endif
#ifndef LN_ACQUIRE_FENCE
#define LN_ACQUIRE_FENCE() __threadfence()
#endif

// ---- sums over rows ----

// A sum over chunks in order: it keeps what rounding takes from it.
#if !LN_PAIRS
LN_INLINE void add_to(Pair& total, Word term) {
    const Pair sum = two_sum(total.hi, term);
    total = {sum.hi, add(total.lo, sum.lo)};
}
#endif

// `settled_total`: the low word at most half an ulp of the high one. `merged`: the sum of two
// that are settled, and settled.
#if LN_ARITHMETIC == 2
// Low words are LOW_SCALE times as large, here and everywhere below.
LN_INLINE void add_to(Pair& total, Pair term) {
    const Pair sum = two_sum(total.hi, term.hi);
    total = {sum.hi, fma_rn(sum.lo, LOW_SCALE, add(total.lo, term.lo))};
}

LN_INLINE Pair settled_total(Pair total) {
    const Word low = mul(total.lo, 1 / LOW_SCALE);
    const Pair sum = two_sum(total.hi, low);
    // Where `low` is subnormal it is not all of the low word.
    return {sum.hi, fma_rn(sum.lo, LOW_SCALE, fma_rn(-low, LOW_SCALE, total.lo))};
}

LN_INLINE Pair merged(Pair a, Pair b) {
    add_to(a, b);
    return settled_total(a);
}
#else
LN_INLINE void add_to(Pair& total, Pair term) {
    const Pair sum = two_sum(total.hi, term.hi);
    total = {sum.hi, add(total.lo, add(sum.lo, term.lo))};
}

LN_INLINE Pair settled_total(Pair total) { return two_sum(total.hi, total.lo); }
LN_INLINE Pair merged(Pair a, Pair b) { return add(a, b); }
#endif

#if LN_PAIRS
LN_INLINE Number collapsed(Pair total) { return settled_total(total); }
#else
LN_INLINE Number collapsed(Pair total) { return add(total.hi, total.lo); }
#endif

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
    total = settled_total(total);
    // The error of an infinite sum is a NaN.
    if (!is_finite(total.hi)) total.lo = 0;
#if LN_ARITHMETIC == 1
    if (which == 0) {
        const double hi = scaled(off_midpoint(total, -DGAMMA_SCALE), -DGAMMA_SCALE);
        // Where this is subnormal, it is rounded to float64, and narrower types are all zero.
        total = {hi, scaled(total.lo, -DGAMMA_SCALE)};
    }
#endif
    if (type == 2) write_rounded<float>(out, col, total);
#if LN_ARITHMETIC == 1
    else if (type == 3) write_rounded<double>(out, col, total);
#endif
    else if (type == 1) write_rounded<Bfloat16>(out, col, total);
    else write_rounded<Float16>(out, col, total);
}

LN_INLINE Number* partial_at(const Parameters& p, long long chunk, int which, long long col) {
    return static_cast<Number*>(p.partials) + (2 * chunk + which) * p.n + col;
}

LN_INLINE void put(const Parameters& p, long long chunk, int which, long long col, Pair total) {
    if (p.final_mode == 0) write_total(p, which, col, total);
    else store_number(partial_at(p, chunk, which, col), collapsed(total));
}

LN_INLINE int chunks_per_segment(const Parameters& p) {
    return (p.chunks + p.segments - 1) / p.segments;
}

// The sum of the chunks of a segment, in order: the same in every final mode.
LN_INLINE Pair segment_total(const Parameters& p, int segment, int which, long long col) {
    const int per = chunks_per_segment(p), first = segment * per;
    const int stop = first + per < p.chunks ? first + per : p.chunks;
    Pair total = {0, 0};
    // Four loads in flight.
#pragma unroll 4
    for (int chunk = first; chunk < stop; ++chunk)
        add_to(total, load_number(partial_at(p, chunk, which, col)));
    return settled_total(total);
}

// ---- blocks meet ----

#ifdef __CUDA_ARCH__
LN_INLINE unsigned load_acquire(unsigned* p) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
#else
LN_INLINE unsigned load_acquire(unsigned* p) { return atomicAdd(p, 0u); }
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

// Tell the whole block whether it is the last of `of` to come; the ticket is 0 again then.
LN_INLINE bool is_last(unsigned* ticket, unsigned of, volatile unsigned* flag) {
    // Orders the stores of the block before the fence of its first thread, and the reads of an
    // earlier flag before it is written again.
    __syncthreads();
    if (threadIdx.x == 0) {
        // Release, as in grid_barrier.
        LN_RELEASE_FENCE();
        *flag = atomicInc(ticket, of - 1) == of - 1 ? 1u : 0u;
        // Acquire.
        LN_ACQUIRE_FENCE();
    }
    // Orders the flag, and the acquire, before what the block does then.
    __syncthreads();
    return *flag != 0;
}

// Counters: the grid barrier; then for each rank of a cluster the tickets of up to 8 segments and
// the ticket of the last segment. Blocks of one rank have the same columns in every chunk: they
// wait for nothing that the others sum.
constexpr int MOST_SEGMENTS = 8;

LN_INLINE unsigned* tickets_of(const Parameters& p) {
    return p.counters + 1 + rank() * (MOST_SEGMENTS + 1);
}

// Where the columns of this block end.
LN_INLINE long long stop_column(const Parameters& p) {
    const long long stop = first_column() + COLUMNS;
    return CLUSTER == 1 || stop > p.n ? p.n : stop;
}

LN_INLINE Pair* segment_sum_at(const Parameters& p, int segment, int which, long long col) {
    return static_cast<Pair*>(p.segment_sums) + (2LL * segment + which) * p.n + col;
}

// The last block of a segment adds it up, the last of these adds the segments up.
LN_INLINE void finish_by_tickets(const Parameters& p, long long chunk, volatile unsigned* flag) {
    const int per = chunks_per_segment(p), segment = (int)(chunk / per);
    const int segments = (p.chunks + per - 1) / per, first = segment * per;
    const int members = (first + per < p.chunks ? first + per : p.chunks) - first;
    if (!is_last(tickets_of(p) + segment, members, flag)) return;
    for (int which = 0; which < 2; ++which)
        for (long long col = first_column() + threadIdx.x; col < stop_column(p); col += BLOCK) {
            const Pair total = segment_total(p, segment, which, col);
            if (segments == 1) write_total(p, which, col, total);
            else store_number(segment_sum_at(p, segment, which, col), total);
        }
    if (segments == 1 || !is_last(tickets_of(p) + MOST_SEGMENTS, segments, flag)) return;
    for (int which = 0; which < 2; ++which)
        for (long long col = first_column() + threadIdx.x; col < stop_column(p); col += BLOCK) {
            Pair total = load_number(segment_sum_at(p, 0, which, col));
            for (int s = 1; s < segments; ++s)
                total = merged(total, load_number(segment_sum_at(p, s, which, col)));
            write_total(p, which, col, total);
        }
}

// All blocks share the columns, a warp's width at a time; warps share the segments. `sums` is
// (MOST_SEGMENTS, WARP) in shared memory.
LN_INLINE void finish_spread(const Parameters& p, Pair* sums) {
    const int per = chunks_per_segment(p), segments = (p.chunks + per - 1) / per;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long groups = (p.n + WARP - 1) / WARP * 2;
    for (long long group = blockIdx.x; group < groups; group += gridDim.x) {
        const int which = (int)(group % 2);
        const long long col = group / 2 * WARP + lane;
        for (int segment = warp; segment < segments && col < p.n; segment += WARPS)
            sums[segment * WARP + lane] = segment_total(p, segment, which, col);
        // Orders the sums of all segments before the first warp reads them.
        __syncthreads();
        if (warp == 0 && col < p.n) {
            Pair total = sums[lane];
            for (int s = 1; s < segments; ++s) total = merged(total, sums[s * WARP + lane]);
            write_total(p, which, col, total);
        }
        // Orders these reads before the next group is written.
        __syncthreads();
    }
}
