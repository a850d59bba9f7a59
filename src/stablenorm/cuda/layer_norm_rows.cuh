// Rows of layer_norm.cu: the statistics, and from them xhat, y and dx of an element.

// The statistics that xhat takes. With LN_PAIRS it is of x * 2**-exponent, with elements near 1, so that no square,
// and no low word of one, leaves the range; and rstd stands for rstd * 2**rstd_exponent.
struct Row {
    double mean;
    Number rest; // the rounding of the mean to float64, which all elements share
    Number rstd;
    int exponent, rstd_exponent; // 0 without LN_PAIRS
};

INLINE double raised(const Row& row, double v) { return LN_PAIRS ? v * power_of_two(-row.exponent) : v; }
INLINE double lowered(const Row& row, double v) { return LN_PAIRS ? v * power_of_two(row.exponent) : v; }
INLINE Number centered(const Row& row, double v) { return difference(raised(row, v), row.mean) - row.rest; }

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
INLINE Number mean_of(const Parameters& p, Reduction& reduction, Index n, F term,
                         const Sources&... sources) {
    Number sum = number(0.0);
    for_each(n, [&](int, auto... elements) { sum = sum + term(elements...); }, sources...);
    return over_n(reduction.sum(sum), (double)p.n);
}

#if LN_PAIRS
INLINE void choose_scale(Row& row, const Columns<X>& x, Reduction& reduction) {
    double largest = 0.0;
    for_each(x.n, [&](int, double v) { largest = magnitude(v) > largest ? magnitude(v) : largest; }, x);
    // Within 2**+-1000 it is undone by one factor.
    row.exponent = clamped(exponent_of(high(reduction.largest(number(largest)))), 1000);
}

INLINE void set_rstd(Row& row, Number var, double eps) {
    const int of_var = exponent_of(high(var)) + 2 * row.exponent, of_eps = exponent_of(eps);
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
    row.mean = high(mean_of(p, reduction, x.n, [&](double v) { return number(raised(row, v)); }, x));
    // It is kept in the scale of x: if it is subnormal there, take it from that grid.
    row.mean = raised(row, lowered(row, row.mean));
    // Centered first, and the mean of what is left kept, before anything is squared.
    row.rest = mean_of(p, reduction, x.n, [&](double v) { return centered(row, v); }, x);
    const Number var = mean_of(p, reduction, x.n, [&](double v) {
        const Number c = centered(row, v);
        return c * c;
    }, x);
    set_rstd(row, var, p.eps);
    return row;
}

INLINE void keep(const Row& row, const Parameters& p, long long at) {
    p.mean[at] = lowered(row, row.mean);
    p.mean_lo[at] = high(row.rest);
    p.rstd[at] = high(row.rstd);
#if LN_PAIRS
    p.mean_tail[at] = row.rest.low;
    p.rstd_lo[at] = row.rstd.low;
    p.exponent[2 * at] = (short)row.exponent;
    p.exponent[2 * at + 1] = (short)row.rstd_exponent;
#endif
}

INLINE Row kept(const Parameters& p, long long at) {
    Row row = {};
    row.mean = p.mean[at];
    row.rest = number(p.mean_lo[at]);
    row.rstd = number(p.rstd[at]);
#if LN_PAIRS
    row.exponent = p.exponent[2 * at];
    row.rstd_exponent = p.exponent[2 * at + 1];
    row.mean = raised(row, row.mean);
    row.rest.low = p.mean_tail[at];
    row.rstd.low = p.rstd_lo[at];
#endif
    return row;
}
