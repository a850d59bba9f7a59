// The fast backward of layer_norm.cu for rows within a warp: no barrier of the block but for a chunk's sums.
//
// The sum of g of the next row travels with the slope of this one, so that a row takes one exchange.

// Statistics of a row; of a row past the end all 0, which makes all it adds 0.
struct Kept {
    double mean, mean_lo, rstd;

    INLINE Kept(const Parameters& p, long long at, bool there)
        : mean(there ? p.mean[at] : 0.0),
          mean_lo(there ? p.mean_lo[at] : 0.0),
          rstd(there ? p.rstd[at] : 0.0) {}

    INLINE double centered(double x) const { return (x - mean) - mean_lo; }
};

// The rows of a slot, chunk by chunk; in between lie the chunks of the other blocks.
struct Cursor {
    long long row, jump;
    int left, turns;

    INLINE Cursor(const Parameters& p)
        : row(blockIdx.x * p.chunk_rows + slot()),
          jump((gridDim.x - 1) * p.chunk_rows),
          left((int)p.chunk_rows / SLOTS),
          turns((int)p.chunk_rows / SLOTS) {}

    // Return whether a chunk ends with the row in hand.
    INLINE bool advance() {
        row += SLOTS;
        if (--left > 0) return false;
        left = turns, row += jump;
        return true;
    }
};

struct ShortRows {
    const Parameters& p;
    Vector<X>* stages;  // (STAGES, 2, VECTORS, BLOCK), x and dy: this thread's first
    double* gamma;      // (COLUMNS), a table
    double* combined;   // (COLUMNS), likewise

    INLINE Vector<X>* stage(int s, int which, int v) const {
        return stages + ((s * 2 + which) * VECTORS + v) * BLOCK;
    }
    INLINE int vector(int v) const { return v * ROW_THREADS + row_thread(); }
    INLINE double gamma_of(int v, int i) const { return gamma[place(vector(v), i, COLUMNS / VECTOR)]; }

    INLINE void ask(int s, Cursor& asked) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int count = asked.row < p.rows ? elements(v) : 0;
            const long long row = count ? asked.row : 0, col = count ? column(v) : 0;
            fetch(stage(s, 0, v), p.x + row * p.x_stride + col, count);
            fetch(stage(s, 1, v), p.dy + row * p.dy_stride + col, count);
        }
        commit_copies();
        asked.advance();
    }

    INLINE double sum_of_g(int s) const {
        double sum = 0.0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const Vector<X> dy = *stage(s, 1, v);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum = fma(lift(dy.e[i]), gamma_of(v, i), sum);
        }
        return sum;
    }

    // Call f(v, i, x - mean, dy, g - mean of g) for the elements of this thread.
    template <class F> INLINE void for_each_element(int s, int v, const Kept& row, double mean_g, F f) const {
        const Vector<X> x = *stage(s, 0, v), dy = *stage(s, 1, v);
        const int count = elements(v);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            // A select, since x - mean is not 0 past the end; dy is.
            const double c = i < count ? row.centered(lift(x.e[i])) : 0.0, d = lift(dy.e[i]);
            f(i, c, d, fma(d, gamma_of(v, i), -mean_g));
        }
    }

    // Add up the slots of the block, the lanes of a warp first, and put the sums of a chunk away.
    INLINE void flush(long long chunk, int which, double (&sums)[ELEMENTS]) const {
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) {
#pragma unroll
            for (int lanes = ROW_THREADS; lanes < WARP; lanes *= 2)
                sums[e] = sums[e] + exchanged(sums[e], lanes);
        }
        for (int warp = 0; warp < WARPS; ++warp) {
            // Orders the warps, one after the other, and the reads of the last sums before the first.
            __syncthreads();
            if (threadIdx.x / WARP != warp || threadIdx.x % WARP >= ROW_THREADS) continue;
#pragma unroll
            for (int e = 0; e < ELEMENTS; ++e) {
                double& sum = combined[place(vector(e / VECTOR), e % VECTOR, COLUMNS / VECTOR)];
                sum = warp ? sum + sums[e] : sums[e];
            }
        }
        // Orders the sums before they are read.
        __syncthreads();
        for (int col = threadIdx.x; col < N; col += BLOCK)
            p.partials[(2 * chunk + which) * N + col] =
                combined[place(col / VECTOR, col % VECTOR, COLUMNS / VECTOR)];
    }
};

INLINE void short_chunks(const Parameters& p, unsigned char* shared) {
    double* tables = reinterpret_cast<double*>(shared);
    const ShortRows rows = {p, reinterpret_cast<Vector<X>*>(tables + 2 * COLUMNS) + threadIdx.x,
                            tables, tables + COLUMNS};
    widen(rows.gamma, p.gamma, 1.0, COLUMNS / VECTOR);
    // Orders the table before its use.
    __syncthreads();
    Cursor asked(p), at(p);
#pragma unroll
    for (int s = 0; s < STAGES; ++s) rows.ask(s, asked);
    wait_copies<STAGES - 1>();
    Kept next(p, at.row, at.row < p.rows);
    double next_sum = over_lanes(0.0, rows.sum_of_g(0)).b;
    double sums[2][ELEMENTS] = {};
    int s = 0;
    for (long long chunk = blockIdx.x; chunk < p.chunks;) {
        const Kept row = next;
        const double mean_g = over(next_sum);
        const long long here = at.row;
        const bool ends = at.advance();
        next = Kept(p, at.row, at.row < p.rows);
        // This row and the next have arrived.
        wait_copies<STAGES - 2>();
        double slope = 0.0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            rows.for_each_element(s, v, row, mean_g, [&](int, double c, double, double g) {
                slope = fma(g, c, slope);
            });
        const int after = s + 1 == STAGES ? 0 : s + 1;
        const Two both = over_lanes(slope, rows.sum_of_g(after));
        next_sum = both.b;
        slope = over(both.a) * row.rstd * row.rstd;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            Vector<X> dx;
            rows.for_each_element(s, v, row, mean_g, [&](int i, double c, double dy, double g) {
                double &dgamma = sums[0][v * VECTOR + i], &dbeta = sums[1][v * VECTOR + i];
                dgamma = fma(c * row.rstd, dy, dgamma);
                dbeta += dy;
                round_into(dx.e[i], fma(-c, slope, g) * row.rstd);
            });
            if (p.out && here < p.rows)
                put(p.out + here * p.out_stride + column(v), dx, elements(v));
        }
        rows.ask(s, asked);
        s = after;
        if (!ends) continue;
#pragma unroll
        for (int which = 0; which < 2; ++which)
            if (p.partials) rows.flush(chunk, which, sums[which]);
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) sums[0][e] = sums[1][e] = 0.0;
        chunk += gridDim.x;
    }
    // None is on its way to memory that is used otherwise.
    wait_copies<0>();
}
