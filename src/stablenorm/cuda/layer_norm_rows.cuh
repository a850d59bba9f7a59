// Rows of layer_norm.cu: the statistics, and from them xhat, y and dx of an element.

#if LN_PAIRS
// What xhat takes, of x * 2**-exponent: rows far from 1 are brought near it first, exactly, so
// that no square, and no low word of one, leaves the range. rstd is rstd * 2**rstd_exponent.
struct Row {
    Word mean;
    Pair rest;
    Pair rstd;
    Word half_scale, other_half;
    int exponent, rstd_exponent;
};

// Within 2**+-MODERATE a row is not scaled: three factors and all their bits stay in range. An
// eps beyond LARGEST_EPS, in the scale of the row, leaves nothing of var.
#if LN_ARITHMETIC == 2
constexpr int MODERATE = 20;
constexpr double LARGEST_EPS = 0x1p90;
#else
constexpr int MODERATE = 200;
constexpr double LARGEST_EPS = 0x1p520;
#endif

LN_INLINE void set_exponent(Row& row, int exponent) {
    row.exponent = exponent;
    // Two factors: 2**-exponent alone may be out of range.
    row.half_scale = (Word)power_of_two(-(exponent / 2));
    row.other_half = (Word)power_of_two(-(exponent - exponent / 2));
}

LN_INLINE Word raised(const Row& row, Word word) {
    return row.exponent == 0 ? word : mul(mul(word, row.half_scale), row.other_half);
}

// The low word may exceed half an ulp of the high one by a few bits, here and in xhat_of.
LN_INLINE Pair centered(const Row& row, Word v) {
    Pair c = two_sum(v, -row.mean);
    Pair less = two_sum(c.hi, -row.rest.hi);
    return {less.hi, add(add(less.lo, c.lo), -row.rest.lo)};
}

// x - mean and rstd have two scales: by 2**scale_left, xhat is less than their product. It is 0 but
// for rows beside whose eps var is nothing.
LN_INLINE int scale_left(const Row& row) { return row.exponent + row.rstd_exponent; }

LN_INLINE Pair shifted(Pair v, int k) {
    return {(Word)scaled((double)v.hi, k), (Word)scaled((double)v.lo, k)};
}

LN_INLINE Number product_with_rstd(const Row& row, Word v) {
    return loose_product(centered(row, v), row.rstd);
}

LN_INLINE Number xhat_of(const Row& row, Word v) {
    const Number product = product_with_rstd(row, v);
    return scale_left(row) == 0 ? product : shifted(product, scale_left(row));
}

LN_INLINE Number centered_g(Word dy, Word gamma, Number mean_g) {
    Pair g = product_of(dy, gamma);
    Pair c = two_sum(g.hi, -mean_g.hi);
    return {c.hi, add(c.lo, add(g.lo, -mean_g.lo))};
}

LN_INLINE Number affine(Number xhat, Word gamma, Word beta) {
    Pair p = product_of(xhat.hi, gamma);
    Word error = fma_rn(xhat.lo, gamma, p.lo);
    Pair total = two_sum(p.hi, beta);
    // An infinite sum has a NaN for an error.
    if (!is_finite(total.hi)) return {total.hi, Word(0)};
    return two_sum(total.hi, add(total.lo, error));
}

LN_INLINE Number projected(Number q, Number xhat, Number slope, Number rstd) {
    return mul(add(settled(q), negative(mul(settled(xhat), slope))), rstd);
}

LN_INLINE void add_product(Number& sum, Word dy, Number xhat) {
    accumulate(sum, loose_product(dy, xhat));
}

LN_INLINE Pair pair_of(double v) {
    Word hi = (Word)v;
    return {hi, (Word)(v - (double)hi)};
}

#if LN_ARITHMETIC == 2
// The low word of a sum over rows is kept so many times as large: what is below 2**-149 would be
// lost from every term of a dgamma that is subnormal. Half an ulp of the high word becomes at most
// the high word itself, so that no range is lost; each row loses 2**-174, which for all 2**23 of a
// tall array is still a quarter of the last subnormal's unit.
constexpr float LOW_SCALE = 0x1p24f;

LN_INLINE void add_to_dbeta(Number& sum, Word dy) {
    const Pair high = two_sum(sum.hi, dy);
    sum = {high.hi, fma_rn(high.lo, LOW_SCALE, sum.lo)};
}

LN_INLINE void add_to_dgamma(Number& sum, const Row& row, Word dy, Word v) {
    const Number product = product_with_rstd(row, v);
    if (scale_left(row) == 0) {
        const Pair term = loose_product(dy, product), high = two_sum(sum.hi, term.hi);
        sum = {high.hi, fma_rn(add(high.lo, term.lo), LOW_SCALE, sum.lo)};
        return;
    }
    // xhat may be subnormal, and the product with it: both in float64, whose range holds them.
    const double xhat = add((double)product.hi, (double)product.lo);
    const double term = scaled(mul((double)dy, xhat), scale_left(row));
    const Word near = (Word)term;
    const Pair high = two_sum(sum.hi, near);
    const Word below = (Word)mul(add(term, -(double)near), (double)LOW_SCALE);
    sum = {high.hi, fma_rn(high.lo, LOW_SCALE, add(sum.lo, below))};
}
#else
// dgamma is summed in a scale of its own: a sum of subnormals has low words too.
constexpr int DGAMMA_SCALE = 128;

LN_INLINE void add_to_dgamma(Number& sum, const Row& row, Word dy, Word v) {
    const Number product = product_with_rstd(row, v);
    if (scale_left(row) == 0)
        add_product(sum, mul(dy, (Word)power_of_two(DGAMMA_SCALE)), product);
    else
        add_product(sum, dy, shifted(product, scale_left(row) + DGAMMA_SCALE));
}
#endif

LN_INLINE int row_exponent(Word largest) {
    const bool moderate = largest <= (Word)power_of_two(MODERATE) &&
                          largest >= (Word)power_of_two(-MODERATE);
    return moderate || largest == Word(0) ? 0 : exponent_of((double)largest);
}

// Take eps in: rstd of the row, given var in its scale.
LN_INLINE void finish_statistics(Row& row, Number var, double eps) {
    const double here = scaled(scaled(eps, -row.exponent), -row.exponent);
    const bool tiny = var.hi == Word(0) && !(here >= 1.0 / LARGEST_EPS);
    row.rstd_exponent = -row.exponent;
    Number v = add(var, pair_of(here));
    if (eps > 0.0 && (tiny || !(here <= LARGEST_EPS))) {
        // var is nothing beside eps: rstd is that of eps, in a scale of its own.
        const int half = (exponent_of(eps) + 1) >> 1;
        v = pair_of(scaled(eps, -2 * half));
        row.rstd_exponent = -half;
    }
    row.rstd = reciprocal_root(v);
}

LN_INLINE Row statistics(const Columns<X>& x, const Parameters& p, Reduction& reduction) {
    const Word n = (Word)p.n, inverse = divide(Word(1), n);
    Word largest = 0;
#pragma unroll
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        const Vector<X> xs = vector_at(x, v, count_from(column(v), x.present));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Word size = magnitude(lift(xs, i));
            largest = size > largest ? size : largest;
        }
    }
    Row row;
    set_exponent(row, row_exponent(reduction.largest(largest)));
    Number sum = number(0);
#pragma unroll
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        const Vector<X> xs = vector_at(x, v, count_from(column(v), x.present));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) accumulate(sum, number(raised(row, lift(xs, i))));
    }
    row.mean = over_n(reduction.sum(sum), n, inverse).hi;
#if LN_ARITHMETIC == 1
    // The mean is kept in the scale of x: if it is subnormal there, take it from that grid.
    if (row.exponent != 0) row.mean = scaled(scaled(row.mean, row.exponent), -row.exponent);
#endif
    row.rest = {Word(0), Word(0)};
    sum = number(0);
#pragma unroll
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        const int count = count_from(column(v), x.present);
        const Vector<X> xs = vector_at(x, v, count);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            accumulate(sum, select(i < count, centered(row, raised(row, lift(xs, i)))));
    }
    row.rest = over_n(reduction.sum(sum), n, inverse);
    Number squares = number(0);
#pragma unroll
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        const int count = count_from(column(v), x.present);
        const Vector<X> xs = vector_at(x, v, count);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Pair c = centered(row, raised(row, lift(xs, i)));
            accumulate(squares, select(i < count, loose_product(c, c)));
        }
    }
    finish_statistics(row, over_n(reduction.sum(squares), n, inverse), p.eps);
    return row;
}

#if LN_ARITHMETIC == 1
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
    // The forward of narrower data, whose dy is float64, has left out the last two, and in float64
    // the exponents as well.
    const bool has_exponent = present && p.exponent != nullptr;
    const int exponent = has_exponent ? p.exponent[2 * at] : 0;
    const int rstd_exponent = has_exponent ? p.exponent[2 * at + 1] : 0;
    set_exponent(row, sizeof(X) == 8 ? exponent : 0);
    if (!present) return row;
    row.mean = row.exponent == 0 ? p.mean[at] : scaled(p.mean[at], -row.exponent);
    row.rest = {p.mean_lo[at], p.mean_tail == nullptr ? 0.0 : p.mean_tail[at]};
    row.rstd = {p.rstd[at], p.rstd_lo == nullptr ? 0.0 : p.rstd_lo[at]};
    if (sizeof(X) == 8) {
        row.rstd_exponent = rstd_exponent;
        return row;
    }
    // The range of float64 is enough for narrower data: dx, in theirs, is not scaled.
    if (exponent != 0) row.rest = shifted(row.rest, exponent);
    if (rstd_exponent != 0) row.rstd = shifted(row.rstd, rstd_exponent);
    return row;
}
#else
LN_INLINE double joined(Pair v) { return add((double)v.hi, (double)v.lo); }

LN_INLINE void keep(const Row& row, const Parameters& p, long long at) {
    p.mean[at] = scaled((double)row.mean, row.exponent);
    p.mean_lo[at] = joined(row.rest);
    p.rstd[at] = joined(row.rstd);
    p.exponent[2 * at] = (short)row.exponent;
    p.exponent[2 * at + 1] = (short)row.rstd_exponent;
}

LN_INLINE Row kept(const Parameters& p, long long at, bool present) {
    Row row = {};
    set_exponent(row, present ? p.exponent[2 * at] : 0);
    if (!present) return row;
    row.rstd_exponent = p.exponent[2 * at + 1];
    row.mean = (Word)scaled(p.mean[at], -row.exponent);
    row.rest = pair_of(p.mean_lo[at]);
    row.rstd = pair_of(p.rstd[at]);
    return row;
}
#endif

#else
// xhat = (x - mean) * rstd + shift, shift = -mean_lo * rstd.
struct Row {
    Word mean, rest, shift, rstd;
};

LN_INLINE Word raised(const Row&, Word word) { return word; }

LN_INLINE Number xhat_of(const Row& row, Word v) {
    return fma_rn(add(v, -row.mean), row.rstd, row.shift);
}

LN_INLINE Number centered_g(Word dy, Word gamma, Number mean_g) {
    return fma_rn(dy, gamma, -mean_g);
}

LN_INLINE Number affine(Number xhat, Word gamma, Word beta) { return fma_rn(xhat, gamma, beta); }

LN_INLINE Number projected(Number q, Number xhat, Number slope, Number rstd) {
    return mul(fma_rn(-xhat, slope, q), rstd);
}

LN_INLINE void add_product(Number& sum, Word dy, Number xhat) { sum = fma_rn(dy, xhat, sum); }

LN_INLINE void add_to_dgamma(Number& sum, const Row& row, Word dy, Word v) {
    add_product(sum, dy, xhat_of(row, v));
}

LN_INLINE Row statistics(const Columns<X>& x, const Parameters& p, Reduction& reduction) {
    const Word n = (Word)p.n, inverse = divide(Word(1), n);
    Row row;
    Number sum = 0;
#pragma unroll
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        const Vector<X> xs = vector_at(x, v, count_from(column(v), x.present));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum = add(sum, lift(xs, i));
    }
    row.mean = over_n(reduction.sum(sum), n, inverse);
    // Centered first, and the mean of what is left kept: a float64 mean alone is off by its own
    // rounding, which every element of the row would share.
    Number sums[2] = {0, 0};
#pragma unroll
    for (Index v = 0; v < vectors_of(p.n); ++v) {
        const int count = count_from(column(v), x.present);
        const Vector<X> xs = vector_at(x, v, count);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Word c = select(i < count, add(lift(xs, i), -row.mean));
            sums[0] = add(sums[0], c);
            sums[1] = fma_rn(c, c, sums[1]);
        }
    }
    reduction.sum(sums);
    row.rest = over_n(sums[0], n, inverse);
    // rest is below 2**-20 of the spread of 32-bit data: its square takes no digit from var.
    const Word var = fma_rn(-row.rest, row.rest, over_n(sums[1], n, inverse));
    row.rstd = divide(1.0, square_root(add(var, p.eps)));
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

#if LN_ARITHMETIC != 2
LN_INLINE void add_to_dbeta(Number& sum, Word dy) { accumulate(sum, number(dy)); }
#endif

LN_INLINE int scale_of(const Row& row) {
#if LN_PAIRS
    return row.rstd_exponent;
#else
    return 0;
#endif
}
