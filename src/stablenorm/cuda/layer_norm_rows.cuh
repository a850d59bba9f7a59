// Rows of layer_norm.cu: the statistics, and from them xhat, y and dx of an element.

#if LN_PAIRS
// What xhat takes, of x * 2**-exponent: rows far from 1 are brought near it first, exactly, so
// that no square, and no low word of one, leaves the range. rstd is rstd * 2**rstd_exponent. Both
// exponents are 0 for x of 16 and 32 bits: the range of float64 is enough for those.
struct Row {
    double mean;
    Pair rest;
    Pair rstd;
    double half_scale, other_half;
    int exponent, rstd_exponent;
};

// Within 2**+-MODERATE a row is not scaled: three factors and all their bits stay in range. An
// eps beyond LARGEST_EPS, in the scale of the row, leaves nothing of var.
constexpr int MODERATE = 200;
constexpr double LARGEST_EPS = 0x1p520;

LN_INLINE void set_exponent(Row& row, int exponent) {
    row.exponent = exponent;
    // Two factors: 2**-exponent alone may be out of range.
    row.half_scale = power_of_two(-(exponent / 2));
    row.other_half = power_of_two(-(exponent - exponent / 2));
}

LN_INLINE double raised(const Row& row, double v) {
    return row.exponent == 0 ? v : mul(mul(v, row.half_scale), row.other_half);
}

// The low word may exceed half an ulp of the high one by a few bits, here and in xhat_of.
LN_INLINE Pair centered(const Row& row, double v) {
    const Pair c = two_sum(raised(row, v), -row.mean), less = two_sum(c.hi, -row.rest.hi);
    return {less.hi, add(add(less.lo, c.lo), -row.rest.lo)};
}

// x - mean and rstd have two scales: by 2**scale_left, xhat is less than their product. It is 0 but
// for rows beside whose eps var is nothing.
LN_INLINE int scale_left(const Row& row) { return row.exponent + row.rstd_exponent; }
LN_INLINE int scale_of(const Row& row) { return row.rstd_exponent; }

LN_INLINE Pair product_with_rstd(const Row& row, double v) {
    return loose_product(centered(row, v), row.rstd);
}

LN_INLINE Pair xhat_of(const Row& row, double v) {
    const Pair product = product_with_rstd(row, v);
    return scale_left(row) == 0 ? product : shifted(product, scale_left(row));
}

LN_INLINE Pair centered_g(double dy, double gamma, Pair mean_g) {
    const Pair g = product_of(dy, gamma), c = two_sum(g.hi, -mean_g.hi);
    return {c.hi, add(c.lo, add(g.lo, -mean_g.lo))};
}

LN_INLINE Pair affine(Pair xhat, double gamma, double beta) {
    const Pair p = product_of(xhat.hi, gamma);
    const double error = fma_rn(xhat.lo, gamma, p.lo);
    const Pair total = two_sum(p.hi, beta);
    // An infinite sum has a NaN for an error.
    if (!is_finite(total.hi)) return {total.hi, 0.0};
    return two_sum(total.hi, add(total.lo, error));
}

LN_INLINE Pair projected(Pair q, Pair xhat, Pair slope, Pair rstd) {
    return mul(add(settled(q), negative(mul(settled(xhat), slope))), rstd);
}

LN_INLINE void add_product(Pair& sum, double a, double b) { accumulate(sum, product_of(a, b)); }
LN_INLINE void add_product(Pair& sum, Pair a, Pair b) { accumulate(sum, loose_product(a, b)); }

// dgamma is summed in a scale of its own: a sum of subnormals has low words too.
constexpr int DGAMMA_SCALE = 128;

LN_INLINE void add_to_dgamma(Pair& sum, const Row& row, double dy, double v) {
    Pair product = product_with_rstd(row, v);
    if (scale_left(row) != 0) product = shifted(product, scale_left(row) + DGAMMA_SCALE);
    else dy = mul(dy, power_of_two(DGAMMA_SCALE));
    accumulate(sum, loose_product(dy, product));
}

LN_INLINE int row_exponent(double largest) {
    const bool moderate = largest <= power_of_two(MODERATE) && largest >= power_of_two(-MODERATE);
    return moderate || largest == 0.0 ? 0 : exponent_of(largest);
}

// Take eps in: rstd of the row, given var in its scale.
LN_INLINE void finish_statistics(Row& row, Pair var, double eps) {
    const double here = scaled(scaled(eps, -row.exponent), -row.exponent);
    const bool tiny = var.hi == 0.0 && !(here >= 1.0 / LARGEST_EPS);
    row.rstd_exponent = -row.exponent;
    Pair v = add(var, Pair{here, 0.0});
    if (eps > 0.0 && (tiny || !(here <= LARGEST_EPS))) {
        // var is nothing beside eps: rstd is that of eps, in a scale of its own.
        const int half = (exponent_of(eps) + 1) >> 1;
        v = {scaled(eps, -2 * half), 0.0};
        row.rstd_exponent = -half;
    }
    row.rstd = reciprocal_root(v);
    if (!WIDE) {
        row.rstd = shifted(row.rstd, row.rstd_exponent);
        row.rstd_exponent = 0;
    }
}

LN_INLINE Row statistics(const Columns<X>& x, const Parameters& p, Reduction& reduction) {
    const double n = (double)p.n, inverse = __ddiv_rn(1.0, n);
    double largest = 0.0;
    for_each(x, p.n, [&](double v, bool) {
        const double size = magnitude(v);
        largest = size > largest ? size : largest;
    });
    Row row = {};
    set_exponent(row, row_exponent(reduction.largest(largest)));
    Pair sum = {0.0, 0.0};
    for_each(x, p.n, [&](double v, bool) { accumulate(sum, raised(row, v)); });
    row.mean = over_n(reduction.sum(sum), n, inverse).hi;
    // The mean is kept in the scale of x: if it is subnormal there, take it from that grid.
    if (row.exponent != 0) row.mean = scaled(scaled(row.mean, row.exponent), -row.exponent);
    sum = {0.0, 0.0};
    for_each(x, p.n, [&](double v, bool of_row) {
        accumulate(sum, select(of_row, centered(row, v)));
    });
    row.rest = over_n(reduction.sum(sum), n, inverse);
    sum = {0.0, 0.0};
    for_each(x, p.n, [&](double v, bool of_row) {
        const Pair c = centered(row, v);
        accumulate(sum, select(of_row, loose_product(c, c)));
    });
    finish_statistics(row, over_n(reduction.sum(sum), n, inverse), p.eps);
    return row;
}

LN_INLINE void keep(const Row& row, const Parameters& p, long long at) {
    p.mean[at] = row.exponent == 0 ? row.mean : scaled(row.mean, row.exponent);
    p.mean_lo[at] = row.rest.hi;
    p.mean_tail[at] = row.rest.lo;
    p.rstd[at] = row.rstd.hi;
    p.rstd_lo[at] = row.rstd.lo;
    p.exponent[2 * at] = (short)row.exponent;
    p.exponent[2 * at + 1] = (short)row.rstd_exponent;
}

LN_INLINE Row kept(const Parameters& p, long long at, bool present) {
    Row row = {};
    // A forward in float64, of narrower data whose dy is float64, has kept three words of a row.
    const bool whole = present && p.exponent != nullptr;
    set_exponent(row, whole ? p.exponent[2 * at] : 0);
    if (!present) return row;
    row.rstd_exponent = whole ? p.exponent[2 * at + 1] : 0;
    row.mean = row.exponent == 0 ? p.mean[at] : scaled(p.mean[at], -row.exponent);
    row.rest = {p.mean_lo[at], whole ? p.mean_tail[at] : 0.0};
    row.rstd = {p.rstd[at], whole ? p.rstd_lo[at] : 0.0};
    return row;
}

#else
// xhat = (x - mean) * rstd + shift, shift = -mean_lo * rstd.
struct Row {
    double mean, rest, shift, rstd;
};

LN_INLINE int scale_of(const Row&) { return 0; }

LN_INLINE double xhat_of(const Row& row, double v) {
    return fma_rn(add(v, -row.mean), row.rstd, row.shift);
}

LN_INLINE double centered_g(double dy, double gamma, double mean_g) {
    return fma_rn(dy, gamma, -mean_g);
}

LN_INLINE double affine(double xhat, double gamma, double beta) {
    return fma_rn(xhat, gamma, beta);
}

LN_INLINE double projected(double q, double xhat, double slope, double rstd) {
    return mul(fma_rn(-xhat, slope, q), rstd);
}

LN_INLINE void add_product(double& sum, double a, double b) { sum = fma_rn(a, b, sum); }

LN_INLINE void add_to_dgamma(double& sum, const Row& row, double dy, double v) {
    add_product(sum, dy, xhat_of(row, v));
}

LN_INLINE Row statistics(const Columns<X>& x, const Parameters& p, Reduction& reduction) {
    const double n = (double)p.n, inverse = __ddiv_rn(1.0, n);
    Row row;
    double sum = 0.0;
    for_each(x, p.n, [&](double v, bool) { accumulate(sum, v); });
    row.mean = over_n(reduction.sum(sum), n, inverse);
    // Centered first, and the mean of what is left kept: a float64 mean alone is off by its own
    // rounding, which every element of the row would share.
    double sums[2] = {0.0, 0.0};
    for_each(x, p.n, [&](double v, bool of_row) {
        const double c = select(of_row, add(v, -row.mean));
        accumulate(sums[0], c);
        add_product(sums[1], c, c);
    });
    reduction.sum(sums);
    row.rest = over_n(sums[0], n, inverse);
    // rest is below 2**-20 of the spread of 32-bit data: its square takes no digit from var.
    const double var = fma_rn(-row.rest, row.rest, over_n(sums[1], n, inverse));
    row.rstd = __ddiv_rn(1.0, __dsqrt_rn(add(var, p.eps)));
    row.shift = -mul(row.rest, row.rstd);
    return row;
}

LN_INLINE void keep(const Row& row, const Parameters& p, long long at) {
    p.mean[at] = row.mean;
    p.mean_lo[at] = row.rest;
    p.rstd[at] = row.rstd;
}

LN_INLINE Row kept(const Parameters& p, long long at, bool present) {
    Row row = {};
    if (!present) return row;
    row.mean = p.mean[at];
    row.rstd = p.rstd[at];
    row.shift = -mul(p.mean_lo[at], row.rstd);
    return row;
}
#endif

// Round v * 2**(the scale of dx of this row), which is none but for pairs of float64 data.
LN_INLINE void round_scaled(X& out, Number v, int k) {
#if LN_PAIRS
    if (k != 0) v = {scaled_once(v, k), 0.0};
#endif
    round_into(out, v);
}
