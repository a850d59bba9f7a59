// The backward of one chunk of rows, for layer_norm.cu.

// What a block goes through its chunks with.
struct Work {
    const X* x;
    const DY* dy;
    X* dx;        // or null
    bool summing; // dgamma or dbeta is wanted
    Parameter gamma;
};

struct Projection {
    Row row;
    Number mean_g, slope; // mean of g; mean of (g - mean of g) * xhat
};

LN_INLINE Projection project(const Columns<X>& x, const Columns<DY>& dy, const Row& row, const Work& work,
                             const Parameters& p, Reduction& reduction) {
    const double n = (double)p.n, inverse = __ddiv_rn(1.0, n);
    Number sum = number(0.0);
    for_each(x, dy, p.n, [&](Index col, double, double cotangent, bool) {
        add_product(sum, cotangent, work.gamma.at(col));
    });
    const Number mean_g = over_n(reduction.sum(sum), n, inverse);
    // g is centered before it meets xhat: then a large mean of g costs no digit.
    sum = number(0.0);
    for_each(x, dy, p.n, [&](Index col, double element, double cotangent, bool of_row) {
        const Number q = centered_g(cotangent, work.gamma.at(col), mean_g);
        // Past the end neither is zero.
        add_product(sum, select(of_row, q), select(of_row, xhat_of(row, element)));
    });
    const Number slope = over_n(reduction.sum(sum), n, inverse);
    return {row, mean_g, slope};
}

// dx of one vector of columns, if wanted, and its share of the sums over rows.
LN_INLINE void pull_back(const Projection& of, const Vector<X>& xs, const Vector<DY>& dys,
                         const Work& work, Index col, int count, X* dx,
                         Number* dgamma, Number* dbeta) {
    Vector<X> result = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const double cotangent = lift(dys, i), element = lift(xs, i);
        if (work.summing) {
            // dy is 0 past the end of the row, and a row past the last has xhat = 0.
            add_to_dgamma(dgamma[i], of.row, cotangent, element);
            accumulate(dbeta[i], cotangent);
        }
        if (dx != nullptr) {
            const Number q = centered_g(cotangent, work.gamma.at(col + i), of.mean_g);
            const Number xhat = xhat_of(of.row, element);
            X rounded;
            round_scaled(rounded, projected(q, xhat, of.slope, of.row.rstd), scale_of(of.row));
            set(result, i, rounded);
        }
    }
    if (dx != nullptr) store(dx + col, result, count);
}

// Add up the row slots of the block, in order, and put the chunk's sums away. `combined` is
// (SLOTS, COLUMNS) in shared memory.
LN_INLINE void flush(const Parameters& p, long long chunk, int which, const Number* sums,
                     Number* combined) {
    Number* mine = combined + slot() * COLUMNS;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Index col = column(v) + i;
            if (SLOTS > 1) mine[col] = sums[v * VECTOR + i];
            else if (col < p.n)
                store_shared(partial_at(p, chunk, which, col), collapsed(sums[v * VECTOR + i]));
        }
    if (SLOTS == 1) return;
    // Orders the sums of all slots before they are read.
    __syncthreads();
    for (int col = threadIdx.x; col < p.n; col += BLOCK) {
        Pair total = {0.0, 0.0};
        for (int s = 0; s < SLOTS; ++s) accumulate(total, combined[s * COLUMNS + col]);
        store_shared(partial_at(p, chunk, which, col), collapsed(total));
    }
    // Orders these reads before the next sums are written.
    __syncthreads();
}

// Rows [first, stop), in registers, SLOTS at a time; each is read once, the next while this one
// is computed.
LN_INLINE void resident_chunk(const Parameters& p, const Work& work, long long chunk,
                              long long first, long long stop, Reduction& reduction,
                              Number* combined) {
    Number dgamma[VECTORS * VECTOR], dbeta[VECTORS * VECTOR];
#pragma unroll
    for (int i = 0; i < VECTORS * VECTOR; ++i) dgamma[i] = dbeta[i] = number(0.0);
    long long row = first + slot();
    Columns<X> next_x;
    Columns<DY> next_dy;
    next_x.open(work.x + row * p.x_stride, row < stop, p.n);
    next_dy.open(work.dy + row * p.dy_stride, row < stop, p.n);
    Row next_row = kept(p, row, row < stop);
    // As many turns for every thread of the block, rows past the end masked: barriers are legal.
    for (long long base = first; base < stop; base += SLOTS, row += SLOTS) {
        const Columns<X> x = next_x;
        const Columns<DY> dy = next_dy;
        Projection of = {};
        of.row = next_row;
        const long long after = row + SLOTS;
        next_x.open(work.x + after * p.x_stride, after < stop, p.n);
        next_dy.open(work.dy + after * p.dy_stride, after < stop, p.n);
        next_row = kept(p, after, after < stop);
        if (work.dx != nullptr) of = project(x, dy, of.row, work, p, reduction);
        X* dx = work.dx == nullptr ? nullptr : work.dx + row * p.out_stride;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            pull_back(of, x.held[v], dy.held[v], work, column(v), count_from(column(v), x.present),
                      dx, dgamma + v * VECTOR, dbeta + v * VECTOR);
    }
    if (!work.summing) return;
    flush(p, chunk, 0, dgamma, combined);
    flush(p, chunk, 1, dbeta, combined);
}

// Rows whose projections the path for any n keeps in shared memory.
constexpr int GENERIC_ROWS = 16;
static_assert(sizeof(Projection) <= 128, "plan.py counts on it");

// The same for any n: the projections of GENERIC_ROWS rows, then their columns from memory again,
// so that the sums over rows, which only fit memory, are touched once in GENERIC_ROWS rows.
LN_INLINE void generic_chunk(const Parameters& p, const Work& work, long long chunk,
                             long long first, long long stop, Reduction& reduction,
                             Projection* projections) {
    for (long long base = first; base < stop; base += GENERIC_ROWS) {
        const int rows = stop - base < GENERIC_ROWS ? (int)(stop - base) : GENERIC_ROWS;
        for (int r = 0; r < rows; ++r) {
            Columns<X> x;
            Columns<DY> dy;
            x.open(work.x + (base + r) * p.x_stride, true, p.n);
            dy.open(work.dy + (base + r) * p.dy_stride, true, p.n);
            Projection of = {};
            of.row = kept(p, base + r, true);
            if (work.dx != nullptr) of = project(x, dy, of.row, work, p, reduction);
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
                        ? load_shared(partial_at(p, chunk, which, col + i))
                        : number(0.0);
            for (int r = 0; r < rows; ++r) {
                X* dx = work.dx == nullptr ? nullptr : work.dx + (base + r) * p.out_stride;
                pull_back(projections[r], load(work.x + (base + r) * p.x_stride + col, count),
                          load(work.dy + (base + r) * p.dy_stride + col, count), work, col, count,
                          dx, sums[0], sums[1]);
            }
            if (!work.summing) continue;
            // The same thread has these columns in every turn: nothing to order.
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                for (int which = 0; which < 2; ++which)
                    if (i < count)
                        store_shared(partial_at(p, chunk, which, col + i),
                                     collapsed(sums[which][i]));
        }
        // Orders the reads of the projections before they are written again.
        __syncthreads();
    }
}
