// rounding="nearest" by float64: bounds of the errors of rows.h, and whether a result is certain to round as the exact
// value does.
//
// Bounds, with u = 2**-53, k the guess, c = x - k, d = mean(c), q = rstd**2 mean(c**2), which is rms(xhat)**2 or more,
// and D = |d| rstd. H is the longest chain of additions of a sum along a row. Terms of u**2 are 2 % at most. Then
//     d: H u rms(c), and rms(c) rstd = sqrt(q): c rounded, the sum, the division. Of a sum, what each term errs by grows with
//         the additions that it goes through. Their root mean square is at most H - 2, since of a run of 8 the later terms
//         go through fewer (Cauchy and Schwarz)
//     mean(c**2): (H + 4) u of it
//     var: their difference: rstd**2 times its error is u ((H + 4) q + 2 D sqrt(q) H + D**2 + 1)
//     rstd: half of that and 3 u: the sum with eps, the root, the quotient
//     xhat: a |xhat| + b with a = rstd's + 2.5 u, since mean + rest is k + d exactly, and b = (H + 1) u sqrt(q); where
//         x rstd - mean rstd stands for (x - mean) rstd, b has M u more, with M = |mean| rstd
//     y: a |gamma xhat| + b |gamma| + u |y|, with |gamma xhat| <= |y| + |beta|
//     mean(g - m): (H + 2) u G, with G = rms(g - m), to which g - m is rounded once
//     slope, the mean of (g - m) xhat: (H + 5) u G; and since rstd and the mean err alike in all of a row, a |slope| +
//         b |mean(g - m)|, of which both are mostly far less than G
//     dx: (a + 3 u) |dx| + rstd (1 + |xhat|) ((H + 5) u G + (2 a + 7 M u) |slope| + (b + 6 u) (|mean(g - m)| + |slope|))
//     dgamma: the sum of |dy| (a |xhat| + b), and u |dy xhat| for each addition in a part of the rows; the parts are
//         merged with compensation, whose errors are less than 1 % of these
//     dbeta: the second alone, of |dy|
// RMS norm: d, D, b and mean(g - m) are 0. Constant rows: q and b are 0 but for M, g constant: G is 0, and what these
// multiply is exact. An x - mean that is 0 for all that is kept of the mean is not: b is not 0 then.
//
// A result is certain if no midpoint of its type is within its bound. First, a register at a time, by one bound for all
// of a row: |xhat| <= sqrt(n q) and |g - m| <= sqrt(n) G. Then each element of a register that fails, by its own: what is
// that much less and that much more must round alike. Then the row in pairs.
#pragma once
#include <cmath>

#include "lanes.h"

namespace {

constexpr double U = 0x1p-53;

// A NaN as b loses.
INLINE double larger(double a, double b) { return a < b ? b : a; }

// Of a row: the error of xhat is at most a |xhat| + b; M, or 0.
struct Errors {
    double a, b, m;
};

// Given sqrt(q), D**2 and M, or a little more, or 0 for the last. D, which the first 64 elements leave at 1 / 8 or so, is at
// most 4 D**2 + 1 / 16.
template <bool LAYER> INLINE Errors errors_of_xhat(double size, double square, double m, double chain) {
    double var = (chain + 4) * size * size + (LAYER ? (8 * square + 0.125) * size * chain + square : 0) + 1;
    Errors of = {1.02 * U * (var / 2 + 5.5), LAYER ? 1.02 * U * ((chain + 1) * size + m) : 0, m};
    // What has no bound, NaN too, is certain of nothing.
    return of.a < 0x1p-20 ? of : Errors{__builtin_inf(), __builtin_inf()};
}

// A row that errs by more is done in pairs, lest its error be that of all rows in a bound of dgamma. Rows of data have some
// 2**-48; 16 times that is left for rows that lie off zero in a tile of others.
constexpr double HARD = 0x1p-44;

// Registers of a sum that are added one after the other; sums of such are added in pairs, sums of pairs in pairs, and so
// on. The backward has six sums to put aside after each run: runs of 16 instead of 8 save 3 % of its time.
constexpr Index RUN = 8, RUN_BACK = 16;

// The longest chain of additions of a sum of n columns, in so many lanes, of up to 16.
INLINE double chain_of(Index n, Index lanes, Index run) {
    double chain = (double)run + 4;
    for (Index runs = (n - 1) / (run * lanes); runs; runs /= 2) chain++;
    return chain;
}

// A bound that is not 0 has to be this at least. The smallest numbers of a type have fewer digits, hence other midpoints:
// by so large a bound none of them is certain. Not of float16, whose small numbers are looked for.
constexpr double LEAST_BOUND = 0x1p-134;

// Of all y of a row, beside |gamma| + |beta|; and of each.
INLINE double bound_of_y(Errors of, double size, Index n) {
    return 1.02 * ((of.a + 3 * U) * larger(1, std::sqrt((double)n) * size) + of.b);
}
template <class N> INLINE N bounds_of_y(Errors of, N v, N gamma, N beta) {
    return fma(like(v, 1.02 * (of.a + 3 * U)), magnitude(v), fma(like(v, of.a), magnitude(beta), like(v, of.b) * magnitude(gamma)));
}

// The errors of dx, given G, |mean(g - m)| and |slope|: so much of it, and this times 1 + |xhat|. Of all dx of a row; and
// of each, by |x - mean| rstd.
INLINE Errors errors_of_dx(Errors of, double rstd, double g, double plain, double slope, double chain) {
    double both = (2 * of.a + 7 * U * of.m) * slope + (of.b + 6 * U) * (plain + slope);
    return {1.02 * (of.a + 3 * U), 1.02 * rstd * ((chain + 5) * U * g + both)};
}
INLINE double bound_of_dx(Errors of_dx, double rstd, double g, double size, Index n) {
    double root = std::sqrt((double)n), most = root * size;
    return of_dx.a * rstd * g * (root + 1 + most) + of_dx.b * (1 + most) + LEAST_BOUND;
}
template <bool LAYER, class N> INLINE N bounds_of_dx(Errors of_dx, N v, N xhat) {
    return fma(like(v, of_dx.a), magnitude(v), fma(like(v, of_dx.b), magnitude(xhat), like(v, LAYER ? of_dx.b : 0)));
}

// Of dgamma, by the sums of squares of dy and xhat: a includes the additions. Sum |v w|, for which the root of
// sum v**2 sum w**2 stands, may be far less.
INLINE Lanes<8> bound_of_sum(Errors worst, Lanes<8> of_dy, Lanes<8> of_xhat, double rows) {
    return root(of_dy) * fma(spread<8>(1.03 * worst.a), root(of_xhat), spread<8>(1.03 * worst.b * std::sqrt(rows)));
}

// Whether a midpoint may be between two bounds of a result. If they have all bits in common down to the first that
// rounding drops, neither a midpoint nor a number of the type is between them.
template <class To, int L, int W> INLINE bool may_differ(Lanes<L, W> most, Lanes<L, W> least) {
    using I = Register<int64_t, W>;
    Lanes<L, W> size = magnitude(most);
    I differ = {}, small = {};
    EACH differ = with_differences<W>(differ, (I)most.v[i], (I)least.v[i]);
    if (DIGITS<To> == 11) EACH small |= (I)size.v[i] - (I)spread<W, W>(0x1p-14).v[0];
    return any_of<W>(differ, -(1LL << (52 - DIGITS<To>))) || (DIGITS<To> == 11 && any_of<W>(small, INT64_MIN));
}

// The same of each, and of midpoints alone, for results that are often numbers of the type: where it is not 0. Half its last
// bit puts them where the others were.
template <class To, int L, int W> INLINE Words<L, W> midpoints_between(Lanes<L, W> most, Lanes<L, W> least) {
    using I = Register<int64_t, W>;
    constexpr int64_t half = 1LL << (52 - DIGITS<To>);
    Words<L, W> found;
    EACH {
        found.v[i] = (((I)most.v[i] + half) ^ ((I)least.v[i] + half)) & (-2 * half);
        if (DIGITS<To> == 11) found.v[i] |= ((I)magnitude(most).v[i] - (I)spread<W, W>(0x1p-14).v[0]) & INT64_MIN;
    }
    return found;
}

// Whether what is `error` less, and more, round to something else.
template <class To, int L, int W> APART bool differs(const Lanes<L, W>& v, const Lanes<L, W>& error, Index some) {
    To less[L], more[L];
    store(less, v - error), store(more, v + error);
    return memcmp(less, more, (size_t)some * sizeof(To)) != 0;
}

}  // namespace
