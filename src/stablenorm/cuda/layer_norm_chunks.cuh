// The backward of one chunk of rows, for layer_norm.cu.

// What the dx of a row takes beside its statistics: mean of g, and mean of (g - mean of g) * xhat.
struct Projection {
    Number mean_g, slope;
};

// A row with its dy and its statistics, or nothing if it is past the end.
struct RowInHand {
    Columns<X> x;
    Columns<DY> dy;
    Row row;

    INLINE void open(const Parameters& p, long long at, long long stop) {
        x.open(p.x + at * p.x_stride, at < stop ? p.n : 0);
        dy.open(p.dy + at * p.dy_stride, at < stop ? p.n : 0);
        row = at < stop ? kept(p, at) : Row{};
    }
};

INLINE Parameter<Gamma> gamma_of(const Parameters& p) { return {p.gamma, (Index)p.n, 1.0}; }

// g is centered before it meets xhat: then a large mean of g costs no digit.
INLINE Number centered_g(double dy, double gamma, Number mean_g) {
    return product(dy, gamma) - mean_g;
}

INLINE Projection project(const Parameters& p, const RowInHand& hand, Reduction& reduction) {
    const Parameter<Gamma> gamma = gamma_of(p);
    Projection of;
    of.mean_g = mean_of(p, reduction, hand.x.n, product, hand.dy, gamma);
    of.slope = mean_of(p, reduction, hand.x.n, [&](double x, double dy, double gamma) {
        return centered_g(dy, gamma, of.mean_g) * xhat_of(hand.row, x);
    }, hand.x, hand.dy, gamma);
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
    }, hand.x.at(v), hand.dy.at(v), gamma_of(p).at(v));
    if (p.out != nullptr) store(p.out + at * p.out_stride + column(v), dx, count);
}

// Add up the row slots of the block, in order, and put the chunk's sums of vector v away, for dgamma
// or dbeta. `combined` is (SLOTS, COLUMNS) in shared memory; rows that share a block have one vector
// for each thread.
INLINE void flush(const Parameters& p, long long chunk, int which, Index v,
                     const Number (&sums)[VECTOR], Number* combined) {
    Number* partial = p.partials + (2 * chunk + which) * p.n;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const Index col = column(v) + i;
        if (SLOTS > 1) combined[slot() * COLUMNS + col] = sums[i];
        else if (col < p.n) partial[col] = total(sums[i]);
    }
    if (SLOTS == 1) return;
    // Orders the sums of all slots before they are read.
    __syncthreads();
    for (int col = threadIdx.x; col < p.n; col += BLOCK) {
        Number sum = number(0.0);
        for (int s = 0; s < SLOTS; ++s) sum = sum + combined[s * COLUMNS + col];
        partial[col] = total(sum);
    }
    // Orders these reads before the next sums are written.
    __syncthreads();
}

// Rows [first, stop), in registers, SLOTS at a time; each is read once, the next while this one
// is computed.
INLINE void resident_chunk(const Parameters& p, long long chunk, long long first, long long stop,
                              Reduction& reduction, Number* combined) {
    Number sums[VECTORS][2][VECTOR] = {};
    long long at = first + slot();
    RowInHand next;
    next.open(p, at, stop);
    // As many turns for every thread of the block, rows past the end empty: barriers are legal.
    for (long long base = first; base < stop; base += SLOTS, at += SLOTS) {
        const RowInHand hand = next;
        next.open(p, at + SLOTS, stop);
        const Projection of = p.out == nullptr ? Projection{} : project(p, hand, reduction);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) pull_back(p, hand, of, at, v, sums[v]);
    }
    if (p.partials == nullptr) return;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        flush(p, chunk, 0, v, sums[v][0], combined);
        flush(p, chunk, 1, v, sums[v][1], combined);
    }
}

// The same for any n: the projections of all rows, then column by column all rows again, because
// the sums of a whole row would not fit registers. `projections` is (chunk_rows) in shared memory.
INLINE void generic_chunk(const Parameters& p, long long chunk, long long first, long long stop,
                             Reduction& reduction, Projection* projections) {
    RowInHand hand;
    for (long long at = first; at < stop && p.out != nullptr; ++at) {
        hand.open(p, at, stop);
        const Projection of = project(p, hand, reduction);
        if (threadIdx.x == 0) projections[at - first] = of;
    }
    // Orders the projections before they are read.
    __syncthreads();
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        Number sums[2][VECTOR] = {};
        for (long long at = first; at < stop; ++at) {
            hand.open(p, at, stop);
            const Projection of = p.out == nullptr ? Projection{} : projections[at - first];
            pull_back(p, hand, of, at, v, sums);
        }
        if (p.partials == nullptr) continue;
        flush(p, chunk, 0, v, sums[0], nullptr);
        flush(p, chunk, 1, v, sums[1], nullptr);
    }
    // Orders the reads of the projections before the next chunk's are written.
    __syncthreads();
}
