// The backward of one chunk of rows for layer_norm.cu: any n, any dtypes.

// Row sums of the backward: mean of g, and mean of (g - mean of g) * xhat.
struct Projection {
    Number mean_g, slope;
};

// g is centered before it meets xhat: then a large mean of g costs no digit.
INLINE Number centered_g(double dy, double gamma, Number mean_g) { return product(dy, gamma) - mean_g; }

// A row with its dy and its statistics, or nothing if it is past the end.
struct RowInHand {
    Columns<X> x;
    Columns<DY> dy;
    Columns<Gamma> gamma;
    Row row;

    INLINE RowInHand(const Parameters& p, long long at, long long stop)
        : x{p.x + at * p.x_stride, at < stop ? p.n : 0},
          dy{p.dy + at * p.dy_stride, at < stop ? p.n : 0},
          gamma(gamma_of(p)),
          row(at < stop ? kept(p, at) : Row{}) {}
};

INLINE Projection project(const Parameters& p, const RowInHand& hand, Reduction& reduction) {
    Projection of;
    of.mean_g = mean_of(p, reduction, hand.x.n, product, hand.dy, hand.gamma);
    of.slope = mean_of(p, reduction, hand.x.n, [&](double x, double dy, double gamma) {
        return centered_g(dy, gamma, of.mean_g) * xhat_of(hand.row, x);
    }, hand.x, hand.dy, hand.gamma);
    return of;
}

// dx of vector v of row `at`, if wanted, and what it adds to the sums over rows: dgamma, dbeta.
INLINE void pull_back(const Parameters& p, const RowInHand& hand, const Projection& of,
                      long long at, Index v, Number (&sums)[2][VECTOR]) {
    const int count = count_of(v, hand.x.n);
    Vector<X> dx = {};
    for_each_of(count, [&](int i, double x, double dy, double gamma) {
        const Number xhat = xhat_of(hand.row, x);
        sums[0][i] = sums[0][i] + xhat_of(hand.row, x, DGAMMA_SCALE) * dy;
        sums[1][i] = sums[1][i] + dy;
        const Number rest = centered_g(dy, gamma, of.mean_g) - xhat * of.slope;
        round_scaled(dx.e[i], rest * hand.row.rstd, hand.row.rstd_exponent);
    }, hand.x.at(v), hand.dy.at(v), hand.gamma.at(v));
    if (p.out != nullptr) store(p.out + at * p.out_stride + column(v), dx, count);
}

// Add up the slots of the block, in order, and put the sums of vector v of a chunk away, for dgamma or
// dbeta. `combined` is (SLOTS, ROW_THREADS * VECTOR) in shared memory.
INLINE void flush(const Parameters& p, long long chunk, int which, Index v,
                  const Number (&sums)[VECTOR], Number* combined) {
    constexpr int WIDTH = ROW_THREADS * VECTOR;
    Number* partial = p.partials + (2 * chunk + which) * p.n + v * WIDTH;
    const long long rest = p.n - v * WIDTH;
    unrolled<VECTOR>([&](int i) { combined[threadIdx.x * VECTOR + i] = sums[i]; });
    // Orders the sums of all slots before they are read.
    __syncthreads();
    for (int col = threadIdx.x; col < WIDTH && col < rest; col += BLOCK) {
        Number sum = number(0.0);
        for (int s = 0; s < SLOTS; ++s) sum = sum + combined[s * WIDTH + col];
        partial[col] = total(sum);
    }
    // Orders these reads before the next sums are written.
    __syncthreads();
}

// The row sums of all rows of [first, stop), then column by column all rows again, because the sums of a
// whole row would not fit registers. `projections` is (chunk_rows) in shared memory.
INLINE void general_chunk(const Parameters& p, long long chunk, Reduction& reduction, Number* combined,
                          Projection* projections) {
    const long long first = chunk * p.chunk_rows, end = first + p.chunk_rows, stop = end < p.rows ? end : p.rows;
    // Every thread of the block takes as many turns, rows past the end empty: barriers are legal.
    for (long long base = first; base < stop && p.out != nullptr; base += SLOTS) {
        const long long at = base + slot();
        const Projection of = project(p, RowInHand(p, at, stop), reduction);
        if (row_thread() == 0 && at < stop) projections[at - first] = of;
    }
    // Orders the projections before they are read.
    __syncthreads();
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        Number sums[2][VECTOR] = {};
        for (long long at = first + slot(); at < stop; at += SLOTS) {
            const Projection of = p.out == nullptr ? Projection{} : projections[at - first];
            pull_back(p, RowInHand(p, at, stop), of, at, v, sums);
        }
        unrolled<2>([&](int which) {
            if (p.partials != nullptr) flush(p, chunk, which, v, sums[which], combined);
        });
    }
    // Orders the reads of the projections before the next chunk's are written.
    __syncthreads();
}

INLINE void general_chunks(const Parameters& p, unsigned char* shared) {
    Reduction reduction = {reinterpret_cast<Number*>(shared), 0};
    // Behind the two turns of a number for each warp.
    Number* combined = reduction.held + 2 * WARPS;
    Projection* projections = reinterpret_cast<Projection*>(combined + BLOCK * VECTOR);
    for (long long chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x)
        general_chunk(p, chunk, reduction, combined, projections);
}
