// Ziv's rounding test (Ziv, ACM TOMS 17 (1991) 410) for the float64 results of rows.h, with
// rounding="nearest": a result is certified if no midpoint of its type lies within its error bound.
//
// Bounds, with u = 2**-53, k the guess, c = x - k, d = mean(c), q = rstd**2 mean(c**2) >=
// rms(xhat)**2 and D = |d| rstd. H is the longest chain of additions of a sum along a row. Terms of
// u**2 add 2 % at most. Then
//     d: H u rms(c), and rms(c) rstd = sqrt(q): c rounded, the sum, the division. The error of a
//         term grows with the additions that it goes through; their root mean square is at most H -
//         2, since the later terms of a run of 8 go through fewer (Cauchy and Schwarz)
//     mean(c**2): (H + 4) u of it
//     var: their difference: rstd**2 times its error is u ((H + 4) q + 2 D sqrt(q) H + D**2 + 1)
//     rstd: half of that and 3 u: the sum with eps, the root, the quotient
//     xhat: a |xhat| + b with a = rstd's + 2.5 u, since mean + mean_lo is k + d exactly, and b = (H
//         + 1) u sqrt(q); where x rstd - mean rstd stands for (x - mean) rstd, b has M u more, with
//         M = |mean| rstd
//     y: a |gamma xhat| + b |gamma| + u |y|, with |gamma xhat| <= |y| + |beta|; 2 u |y| more, since
//         the test rounds y - bound and y + bound, and computes them from the y that has the error
//     mean(g - m): (H + 2) u G, with G = rms(g - m), to which g - m is rounded once
//     slope, the mean of (g - m) xhat: (H + 5) u G; and, since rstd and the mean err alike in all
//         elements of a row, a |slope| + b |mean(g - m)|, mostly far less than G
//     dx: (a + 3 u) |dx| + rstd (1 + |xhat|) ((H + 5) u G + (2 a + 7 M u) |slope| + (b + 6 u)
//         (|mean(g - m)| + |slope|)), with one a from the slope and one from xhat
//     dgamma: the sum of |dy| (a |xhat| + b), and u |dy xhat| for each addition in a part of the
//         rows; merging adds < 1 %
//     dbeta: u |dy| for each addition
// RMS norm: d, D, b and mean(g - m) are 0. A constant row has q = 0 and b = M u. A constant g has G
// = 0. A step whose bound is 0 is exact.
//
// The test has two steps. A register at a time is tested by one bound for all of a row: |xhat| <=
// sqrt(n q) and |g - m| <= sqrt(n) G. The elements of a register that fails are tested each by its
// own bound: the result less the bound, and plus it, must round alike. A row with an element that
// fails is repeated in pairs.
#pragma once
#include <cmath>

#include "lanes.h"

namespace {

constexpr double U = 0x1p-53;

// Like fmax: returns a if b is NaN.
INLINE double larger(double a, double b) { return a < b ? b : a; }

// The errors of a row: that of xhat is at most a |xhat| + b. M: as above, or 0. A row without a
// small bound has infinite ones, which certify nothing.
struct Errors {
    double a = 0;
    double b = 0;
    double M = 0;
    bool are_bounded() const { return a < 1; }
    // Hard rows are computed in pairs, since dgamma's bound takes the worst row for all. Ordinary
    // rows have an error of about 2**-48. 16 times that: a tile is done as near zero by its first
    // row, and may hold a row of larger mean, whose error has the M term.
    bool are_hard() const { return !(a < 0x1p-44 && b < 0x1p-44); }
};

// The errors from `spread` >= sqrt(q), d_square >= D**2 and chain = H; M is 0 if x is centered
// first. Only D**2 is known, so D is bounded by 4 D**2 + 1 / 16 (2 a b <= a**2 + b**2). Both are
// equal at D = 1 / 8, the usual D of a guess from 64 elements.
template <bool LAYER>
INLINE Errors errors_of_xhat(double spread, double d_square, double M, double chain) {
    double of_d = LAYER ? (8 * d_square + 0.125) * spread * chain + d_square : 0;
    double var = (chain + 4) * spread * spread + of_d + 1;
    double a = 1.02 * U * (var / 2 + 5.5);
    double b = LAYER ? 1.02 * U * ((chain + 1) * spread + M) : 0;
    // The comparison fails for a NaN.
    return a < 0x1p-20 ? Errors{a, b, M} : Errors{__builtin_inf(), __builtin_inf()};
}

// Registers of a run, which is added sequentially; the sums of runs are added pairwise. The
// backward sets six sums aside after a run: with runs of 16 instead of 8 it takes 3 % less time.
constexpr Index RUN = 8;
constexpr Index RUN_BACK = 16;

// The longest chain of additions of a sum of n columns, in so many lanes, of up to 16.
INLINE double chain_of(Index n, Index lanes, Index run) {
    double chain = (double)run + 4;
    for (Index runs = (n - 1) / (run * lanes); runs; runs /= 2) chain++;
    return chain;
}

// The least bound that is not 0. Subnormal numbers have fewer digits and other midpoints: with this
// bound no subnormal float32 or bfloat16 passes the quick test.
constexpr double LEAST_BOUND = 0x1p-134;

// The bound of all y of a row, as a multiple of |gamma| + |beta|; and of each y. M: 0 for x that is
// centered first.
INLINE double bound_of_y(Errors of, double spread, Index n, double M) {
    return 1.02 * ((of.a + 3 * U) * larger(1, std::sqrt((double)n) * spread) + of.b + 1.02 * U * M);
}
template <class N> INLINE N bounds_of_y(Errors of, N v, N gamma, N beta) {
    return fma(like(v, 1.02 * (of.a + 3 * U)), magnitude(v),
        fma(like(v, of.a), magnitude(beta), like(v, of.b) * magnitude(gamma)));
}

// The means of a row of the backward: G = rms(g - m), mean(g - m), and the slope, that of (g - m)
// xhat.
struct Means {
    double G = 0;
    double mean = 0;
    double slope = 0;
};

// The errors of dx: at most a |dx| + b (1 + |xhat|). Then one bound for all dx of a row, and the
// bound of each dx.
INLINE Errors errors_of_dx(Errors of, double rstd, const Means& means, double chain) {
    double slope = magnitude(means.slope);
    double from_xhat = (2 * of.a + 7 * U * of.M) * slope;
    double from_both = (of.b + 6 * U) * (magnitude(means.mean) + slope);
    double b = 1.02 * rstd * ((chain + 5) * U * means.G + (from_xhat + from_both));
    return {1.02 * (of.a + 3 * U), b};
}
INLINE double bound_of_dx(Errors of_dx, double rstd, double G, double spread, Index n) {
    double root = std::sqrt((double)n);
    double largest_xhat = root * spread;
    return of_dx.a * rstd * G * (root + 1 + largest_xhat) + of_dx.b * (1 + largest_xhat) +
           LEAST_BOUND;
}
template <bool LAYER, class N> INLINE N bounds_of_dx(Errors of_dx, N v, N xhat) {
    return fma(like(v, of_dx.a), magnitude(v),
        fma(like(v, of_dx.b), magnitude(xhat), like(v, LAYER ? of_dx.b : 0)));
}

// The bound of dgamma from the sums of squares of dy and xhat; a includes the additions. The root
// of sum v**2 sum w**2 stands for sum |v w|, which may be far less; 1.03: 2 % for terms of u**2, 1
// % for merging.
INLINE Lanes<8> bound_of_sum(
    Errors worst, Lanes<8> dy_squares, Lanes<8> xhat_squares, double rows) {
    return root(dy_squares) * fma(broadcast<8>(1.03 * worst.a), root(xhat_squares),
                                  broadcast<8>(1.03 * worst.b * std::sqrt(rows)));
}

// Ziv's test by bits, for a register: if the two bounds of a result share all bits down to the
// first that rounding drops, neither a midpoint nor a number of the type lies between them.
// `between` has the bits in which the bounds of any lane differ, and the sign for subnormal
// float16, which have other midpoints.
template <class To, int L, int W>
INLINE Register<int64_t, W> between(Lanes<L, W> most, Lanes<L, W> least) {
    using I = Register<int64_t, W>;
    I all = differences(most, least);
    if constexpr (DIGITS<To> == 11) {
        Lanes<L, W> size = magnitude(most);
        I small = {};
        for (auto& lanes : size.v) small |= (I)lanes - (I)broadcast<W, W>(0x1p-14).v[0];
        all |= small & INT64_MIN;
    }
    return all;
}
template <class To, int W> INLINE bool may_differ(Register<int64_t, W> bits) {
    return any_of<W>(bits, -(1LL << (52 - DIGITS<To>)));
}

// Whether v - error and v + error round differently.
template <class To, int L, int W>
NOINLINE bool differs(const Lanes<L, W>& v, const Lanes<L, W>& error, Index count) {
    To less[L], more[L];
    store(less, v - error);
    store(more, v + error);
    return memcmp(less, more, (size_t)count * sizeof(To)) != 0;
}

}  // namespace
