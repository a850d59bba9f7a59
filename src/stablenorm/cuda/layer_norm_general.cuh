// The general kernels of layer_norm.cu: any n, any dtypes, float64 in pairs; a block a row, short
// rows a warp each.
//
// Forward, each step a pass over the row, which the caches hold: mean; mean of x - mean, the
// rounding of the first one; variance of what is centered so; y. E[x^2] - E[x]^2 would lose every
// digit where the mean is far from 0. Backward, chunk by chunk: the mean of g and the slope, that
// of (g - mean of g) * xhat, of all its rows; then column by column all rows again for dx and the
// sums over rows, because the sums of a whole row would not fit registers. Each sum is a fixed
// tree. xhat is made anew from x and the statistics, which cost 24 bytes a row. Read next:
// layer_norm_forward.cuh, which does all of it in one pass.

// Rows of the general kernels have whole warps.
using Reduction = Exchange<Number>;

// Return what the v of all threads of a row combine to, in a fixed tree: lanes by halves, then
// warps in order. Every thread of the block must call it.
template <class F> INLINE Number over_row(Reduction& reduction, Number v, F combine) {
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) v = combine(v, exchanged(v, lanes));
    return reduction.over_warps(v, combine);
}

// ---- rows ----

// The statistics that xhat takes. With LN_PAIRS it is of x * 2**-exponent, with elements near 1, so
// that no square, and no low word of one, leaves the range; and rstd stands for rstd *
// 2**rstd_exponent.
struct Row {
    double mean;
    Number rest;  // the rounding of the mean to float64, which all elements share
    Number rstd;
    int exponent, rstd_exponent;  // 0 without LN_PAIRS
    // Backward, if dx is wanted: means over the row of g, and of (g - mean_g) * xhat.
    Number mean_g, slope;
};

INLINE double raised(const Row& row, double v) {
    return LN_PAIRS ? v * power_of_two(-row.exponent) : v;
}
INLINE double lowered(const Row& row, double v) {
    return LN_PAIRS ? v * power_of_two(row.exponent) : v;
}
INLINE Number centered(const Row& row, double v) {
    return difference(raised(row, v), row.mean) - row.rest;
}

// xhat * 2**k; only pairs have a k.
INLINE Number xhat_of(const Row& row, double v, int k = 0) {
    return scaled_number(centered(row, v) * row.rstd, row.exponent + row.rstd_exponent + k);
}

INLINE Number affine(Number xhat, double gamma, double beta) {
    const Number y = xhat * gamma + beta;
    // The low word of what is infinite is a NaN.
    return is_finite(high(y)) ? y : number(fma(high(xhat), gamma, beta));
}

// The mean over a row of what `term` makes of the elements of `sources`; n is 0 past the end.
template <class F, class... Sources>
INLINE Number mean_of(
    const Parameters& p, Reduction& reduction, Index n, F term, const Sources&... sources) {
    Number sum = number(0.0);
    for_each(n, [&](int, auto... elements) { sum = sum + term(elements...); }, sources...);
    sum = over_row(reduction, total(sum), [](Number a, Number b) { return a + b; });
    return over_n(sum, (double)p.n);
}

#if LN_PAIRS
INLINE void choose_scale(Row& row, const Columns<X>& x, Reduction& reduction) {
    double largest = 0.0;
    for_each(
        x.n, [&](int, double v) { largest = magnitude(v) > largest ? magnitude(v) : largest; }, x);
    const auto larger = [](Number a, Number b) { return high(b) > high(a) ? b : a; };
    // Within 2**+-1000 it is undone by one factor.
    row.exponent = clamped(exponent_of(high(over_row(reduction, number(largest), larger))), 1000);
}

INLINE void set_rstd(Row& row, Number var, double eps) {
    const int of_var = exponent_of(high(var)) + 2 * row.exponent;
    const int of_eps = exponent_of(eps);
    const bool by_var = high(var) > 0.0 && (eps == 0.0 || of_var > of_eps);
    // Brings the sum near 1: what of it is lost then is nothing beside the rest.
    const int half = (by_var ? of_var : of_eps) >> 1;
    row.rstd_exponent = -half;
    var = scaled_number(var, 2 * (row.exponent - half));
    row.rstd = reciprocal_root(settled(var + scaled(eps, -2 * half)));
}
#else
INLINE void choose_scale(Row&, const Columns<X>&, Reduction&) {}
INLINE void set_rstd(Row& row, Number var, double eps) { row.rstd = 1.0 / root(var + eps); }
#endif

INLINE Row statistics(const Columns<X>& x, const Parameters& p, Reduction& reduction) {
    Row row = {};
    choose_scale(row, x, reduction);
    row.mean =
        high(mean_of(p, reduction, x.n, [&](double v) { return number(raised(row, v)); }, x));
    // It is kept in the scale of x: if it is subnormal there, take it from that grid.
    row.mean = raised(row, lowered(row, row.mean));
    // Centered first, and the mean of what is left kept, before anything is squared.
    row.rest = mean_of(p, reduction, x.n, [&](double v) { return centered(row, v); }, x);
    const Number var = mean_of(
        p, reduction, x.n,
        [&](double v) {
            const Number c = centered(row, v);
            return c * c;
        },
        x);
    set_rstd(row, var, p.eps);
    return row;
}

// Call f(word stored, word of the row) for the statistics of a row.
template <class F> INLINE void for_each_word(const Parameters& p, long long at, Row& row, F f) {
    f(p.mean[at], row.mean);
#if LN_PAIRS
    f(p.mean_lo[at], row.rest.high);
    f(p.mean_tail[at], row.rest.low);
    f(p.rstd[at], row.rstd.high);
    f(p.rstd_lo[at], row.rstd.low);
    f(p.exponent[2 * at], row.exponent);
    f(p.exponent[2 * at + 1], row.rstd_exponent);
#else
    f(p.mean_lo[at], row.rest);
    f(p.rstd[at], row.rstd);
#endif
}

INLINE Row read_row(const Parameters& p, long long at) {
    Row row = {};
    for_each_word(p, at, row, [](auto& stored, auto& word) { word = stored; });
    row.mean = raised(row, row.mean);
    return row;
}

#if LN_FORWARD
// ---- the forward ----

INLINE void do_rows(const Parameters& p, unsigned char* shared) {
    Reduction reduction = {reinterpret_cast<Number*>(shared)};
    const Columns<Gamma> gamma = gamma_of(p);
    const Columns<Beta> beta = beta_of(p);
    const long long step = (long long)gridDim.x * SLOTS;
    // Every thread of the block takes as many turns, rows past the end empty: barriers are legal.
    for (long long base = (long long)blockIdx.x * SLOTS; base < p.rows; base += step) {
        const long long at = base + slot();
        const Columns<X> x = {p.x + at * p.x_stride, at < p.rows ? p.n : 0};
        Row row = statistics(x, p, reduction);
        for (Index v = 0; v < vectors_of(p.n); ++v) {
            const int count = count_of(v, x.n);
            Vector<X> y = {};
            for_each_of(
                count,
                [&](int i, double x, double gamma, double beta) {
                    round_scaled(y.e[i], affine(xhat_of(row, x), gamma, beta), 0);
                },
                x.at(v), gamma.at(v), beta.at(v));
            store(p.out + at * p.out_stride + column(v), y, count);
        }
        // The mean is kept in the scale of x.
        row.mean = lowered(row, row.mean);
        if (x.n > 0 && row_thread() == 0)
            for_each_word(p, at, row, [](auto& stored, auto& word) { stored = word; });
    }
}

#else
// ---- the backward, chunk by chunk ----

// g is centered before it meets xhat: then a large mean of g costs no digit.
INLINE Number centered_g(double dy, double gamma, Number mean_g) {
    return product(dy, gamma) - mean_g;
}

// Put rows [first, stop) into `rows`.
INLINE void project(
    const Parameters& p, long long first, long long stop, Reduction& reduction, Row* rows) {
    const Columns<Gamma> gamma = gamma_of(p);
    // Every thread of the block takes as many turns, rows past the end empty: barriers are legal.
    for (long long base = first; base < stop; base += SLOTS) {
        const long long at = base + slot();
        const Index n = at < stop ? p.n : 0;
        const Columns<X> x = {p.x + at * p.x_stride, n};
        const Columns<X> dy = {p.dy + at * p.dy_stride, n};
        Row row = at < stop ? read_row(p, at) : Row{};
        if (p.out != nullptr) {
            row.mean_g = mean_of(p, reduction, n, product, dy, gamma);
            row.slope = mean_of(
                p, reduction, n,
                [&](double x, double dy, double gamma) {
                    return centered_g(dy, gamma, row.mean_g) * xhat_of(row, x);
                },
                x, dy, gamma);
        }
        if (row_thread() == 0 && at < stop) rows[at - first] = row;
    }
    // Orders the rows before they are read.
    __syncthreads();
}

// Write dx of vector v of row `at`, if wanted; add what it adds to the sums over rows: dgamma,
// dbeta.
INLINE void pull_back(
    const Parameters& p, long long at, const Row row, Index v, Number (&sums)[2][VECTOR]) {
    const int count = count_of(v, p.n);
    Vector<X> dx = {};
    for_each_of(
        count,
        [&](int i, double x, double dy, double gamma) {
            const Number xhat = xhat_of(row, x);
            sums[0][i] = sums[0][i] + xhat_of(row, x, DGAMMA_SCALE) * dy;
            sums[1][i] = sums[1][i] + dy;
            const Number rest = centered_g(dy, gamma, row.mean_g) - xhat * row.slope;
            round_scaled(dx.e[i], rest * row.rstd, row.rstd_exponent);
        },
        load(p.x + at * p.x_stride + column(v), count),
        load(p.dy + at * p.dy_stride + column(v), count), gamma_of(p).at(v));
    if (p.out != nullptr) store(p.out + at * p.out_stride + column(v), dx, count);
}

INLINE void do_rows(const Parameters& p, unsigned char* shared) {
    Reduction reduction = {reinterpret_cast<Number*>(shared)};
    // Behind the two turns of a number for each warp; then (chunk_rows) rows.
    Number* combined = reduction.parts + 2 * WARPS;
    Row* rows = reinterpret_cast<Row*>(combined + BLOCK * VECTOR);
    for (long long chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x) {
        const long long first = chunk * p.chunk_rows;
        const long long end = first + p.chunk_rows;
        const long long stop = end < p.rows ? end : p.rows;
        project(p, first, stop, reduction, rows);
        for (Index v = 0; v < vectors_of(p.n); ++v) {
            Number sums[2][VECTOR] = {};
            for (long long at = first + slot(); at < stop; at += SLOTS)
                pull_back(p, at, rows[at - first], v, sums);
            unrolled<2>([&](int which) {
                if (p.partials != nullptr) flush(p, chunk, which, v, sums[which], combined);
            });
        }
        // Orders the reads of the rows before the next chunk's are written.
        __syncthreads();
    }
}
#endif
