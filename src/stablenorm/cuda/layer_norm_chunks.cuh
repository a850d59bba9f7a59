// The backward of one chunk of rows, for layer_norm.cu.

// ---- one row ----

// Rows of which the path without vectors in registers keeps the projections.
[[maybe_unused]] constexpr int GENERIC_ROWS = 16;

struct Projection {
    Row row;
    Number mean_g, slope; // mean of g; mean of (g - mean of g) * xhat
};

LN_INLINE Projection project(Columns<X>& x, Columns<DY>& dy, const Row& row,
                             const Parameter& gamma, const Parameters& p, Reduction& reduction) {
    const Word n = (Word)p.n, inverse = divide(Word(1), n);
    Projection result;
    result.row = row;
    Number sum = number(0);
#pragma unroll
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        const Index col = column(v);
        const Vector<DY> dys = vector_at(dy, v, count_from(col, dy.present));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) add_product(sum, lift(dys, i), number(gamma.at(col + i)));
    }
    result.mean_g = over_n(reduction.sum(sum), n, inverse);
    forget(dy);
    // g is centered before it meets xhat: then a large mean of g costs no digit.
    sum = number(0);
#pragma unroll
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        const Index col = column(v);
        const int count = count_from(col, x.present);
        const Vector<X> xs = vector_at(x, v, count);
        const Vector<DY> dys = vector_at(dy, v, count);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Number xhat = xhat_of(row, raised(row, lift(xs, i)));
            const Number q = centered_g(lift(dys, i), gamma.at(col + i), result.mean_g);
#if LN_PAIRS
            accumulate(sum, select(i < count, loose_product(q, xhat)));
#else
            // Past the end neither is zero.
            sum = fma_rn(select(i < count, q), select(i < count, xhat), sum);
#endif
        }
    }
    result.slope = over_n(reduction.sum(sum), n, inverse);
    forget(x);
    forget(dy);
    return result;
}

// From one sum of a thread to its next: neighbouring threads in neighbouring banks.
#if LN_SHARED_SUMS
constexpr int SUM_STRIDE = BLOCK;
#else
constexpr int SUM_STRIDE = 1;
#endif

// dx of one vector of columns, if wanted, and its share of the sums over rows.
LN_INLINE void pull_back(const Projection& of, const Vector<X>& xs, const Vector<DY>& dys,
                         const Parameter& gamma, Index col, int count, bool summing,
                         X* dx, bool aligned, Number* dgamma, Number* dbeta) {
    Vector<X> result = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const Word cotangent = lift(dys, i);
        const Word element = raised(of.row, lift(xs, i));
        const Number xhat = xhat_of(of.row, element);
        if (summing) {
            // dy is 0 past the end of the row, and a row past the last has xhat = 0.
            add_to_dgamma(dgamma[i * SUM_STRIDE], of.row, cotangent, element);
            add_to_dbeta(dbeta[i * SUM_STRIDE], cotangent);
        }
        if (dx != nullptr) {
            const Number q = centered_g(cotangent, gamma.at(col + i), of.mean_g);
            X rounded;
            round_scaled(rounded, projected(q, xhat, of.slope, of.row.rstd), scale_of(of.row));
            set(result, i, rounded);
        }
    }
    if (dx != nullptr) store(dx + col, result, count, aligned);
}

// ---- chunks ----

// Add up the row slots of the block, in order, and put the chunk's sums away.
LN_INLINE void flush(const Parameters& p, long long chunk, int which, const Number* sums,
                     Number* combined) {
    if (SLOTS == 1) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                Pair total = {0, 0};
                add_to(total, sums[(v * VECTOR + i) * SUM_STRIDE]);
                if (column(v) + i < p.n) put(p, chunk, which, column(v) + i, total);
            }
        return;
    }
    Number* mine = combined + threadIdx.x / ROW_THREADS * COLUMNS;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) mine[column(v) + i] = sums[(v * VECTOR + i) * SUM_STRIDE];
    // Orders the sums of all slots before they are read.
    __syncthreads();
    for (int col = threadIdx.x; col < p.n; col += BLOCK) {
        Pair total = {0, 0};
        for (int slot = 0; slot < SLOTS; ++slot) add_to(total, combined[slot * COLUMNS + col]);
        put(p, chunk, which, col, total);
    }
    // Orders these reads before the next sums are written.
    __syncthreads();
}

struct Work {
    const X* x;
    const DY* dy;
    X* dx;
    bool summing;
};

// Rows [first, stop), in registers, SLOTS at a time; each is read once, the next while this one
// is computed.
LN_INLINE void resident_chunk(const Parameters& p, const Work& work, long long chunk,
                              long long first, long long stop, const Parameter& gamma,
                              Reduction& reduction, Number* combined) {
#if LN_SHARED_SUMS
    // (2, VECTORS * VECTOR, BLOCK): no thread touches those of another.
    Number* dgamma = combined + threadIdx.x;
    Number* dbeta = dgamma + VECTORS * VECTOR * BLOCK;
#else
    Number dgamma[VECTORS * VECTOR], dbeta[VECTORS * VECTOR];
#endif
    if (work.summing) {
#pragma unroll
        for (int i = 0; i < VECTORS * VECTOR; ++i)
            dgamma[i * SUM_STRIDE] = dbeta[i * SUM_STRIDE] = number(0);
    }
    long long row = first + threadIdx.x / ROW_THREADS;
    constexpr bool LATE_X = VECTORS >= 4;
    Columns<X> next_x;
    Columns<DY> next_dy;
    if (!LATE_X) open(next_x, work.x + row * p.x_stride, row < stop, p.n);
    open(next_dy, work.dy + row * p.dy_stride, row < stop, p.n);
    Row next_row = kept(p, row, row < stop);
    // As many turns for every thread of the block, rows past the end masked: barriers are legal.
    for (long long base = first; base < stop; base += SLOTS, row += SLOTS) {
        Columns<X> x;
        if (!LATE_X) x = next_x;
        Columns<DY> dy = next_dy;
        Projection of;
        of.row = next_row;
        const long long after = row + SLOTS;
        // Of rows that fill the registers only dy is read ahead: x comes while g is summed.
        if (LATE_X) open(x, work.x + row * p.x_stride, row < stop, p.n);
        else open(next_x, work.x + after * p.x_stride, after < stop, p.n);
        open(next_dy, work.dy + after * p.dy_stride, after < stop, p.n);
        next_row = kept(p, after, after < stop);
        if (work.dx != nullptr) of = project(x, dy, of.row, gamma, p, reduction);
        X* dx = work.dx == nullptr ? nullptr : work.dx + row * p.out_stride;
        const bool aligned = is_aligned(dx);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            pull_back(of, x.held[v], dy.held[v], gamma, column(v), count_from(column(v), x.present),
                      work.summing, dx, aligned, dgamma + v * VECTOR * SUM_STRIDE,
                      dbeta + v * VECTOR * SUM_STRIDE);
    }
    if (!work.summing) return;
    flush(p, chunk, 0, dgamma, combined);
    flush(p, chunk, 1, dbeta, combined);
}

// The same for any n: the statistics of GENERIC_ROWS rows, then their columns from memory again,
// so that the sums over rows, which only fit memory, are touched once in GENERIC_ROWS rows.
LN_INLINE void generic_chunk(const Parameters& p, const Work& work, long long chunk,
                             long long first, long long stop, const Parameter& gamma,
                             Reduction& reduction, Projection* projections) {
    for (long long base = first; base < stop; base += GENERIC_ROWS) {
        const int rows = stop - base < GENERIC_ROWS ? (int)(stop - base) : GENERIC_ROWS;
        for (int r = 0; r < rows; ++r) {
            Columns<X> x;
            Columns<DY> dy;
            open(x, work.x + (base + r) * p.x_stride, true, p.n);
            open(dy, work.dy + (base + r) * p.dy_stride, true, p.n);
            Projection of;
            of.row = kept(p, base + r, true);
            if (work.dx != nullptr) of = project(x, dy, of.row, gamma, p, reduction);
            if (threadIdx.x == 0) projections[r] = of;
        }
        // Orders the projections before they are read, and all reads of dy before dx, which may
        // lie over it, is written.
        __syncthreads();
        for (Index v = 0; v < vectors_of(p.n); ++v) {
            const Index col = column(v);
            const int count = count_from(col, (Index)p.n);
            Number sums[2][VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                for (int which = 0; which < 2; ++which)
                    sums[which][i] = work.summing && base > first && i < count
                        ? load_number(partial_at(p, chunk, which, col + i))
                        : number(0);
            for (int r = 0; r < rows; ++r) {
                const X* x = work.x + (base + r) * p.x_stride + col;
                const DY* dy = work.dy + (base + r) * p.dy_stride + col;
                X* dx = work.dx == nullptr ? nullptr : work.dx + (base + r) * p.out_stride;
                pull_back(projections[r], load(x, count, is_aligned(x)),
                          load(dy, count, is_aligned(dy)), gamma, col, count, work.summing, dx,
                          is_aligned(dx), sums[0], sums[1]);
            }
            if (!work.summing) continue;
            // The same thread has these columns in every turn: nothing to order.
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                for (int which = 0; which < 2; ++which) {
                    Pair total = {0, 0};
                    add_to(total, sums[which][i]);
                    if (i < count) put(p, chunk, which, col + i, total);
                }
        }
        // Orders the reads of the projections before they are written again.
        __syncthreads();
    }
}
