// rounding="nearest" by float64: bounds of the errors of rows.h, and whether a result is certain to round as the exact
// value does.
//
// Bounds, with u = 2**-53, k the guess, c = x - k, d = mean(c), q = rstd**2 mean(c**2), which is rms(xhat)**2 or more,
// and D = |d| rstd. H is the longest chain of additions of a sum along a row. Terms of u**2 are 2 % at most. Then
//     d: (H + 3) u mean|c|, and mean|c| rstd <= sqrt(q): c rounded, the sum, the division
//     mean(c**2): (H + 4) u of it
//     var: their difference: rstd**2 times its error is u ((H + 4) q + 2 D sqrt(q) (H + 3) + D**2 + 1)
//     rstd: half of that and 3 u: the sum with eps, the root, the quotient
//     xhat: a |xhat| + b with a = rstd's + 2.5 u, since mean + rest is k + d exactly, and b = (H + 4) u sqrt(q)
//     y: a |gamma xhat| + b |gamma| + u |y|, with |gamma xhat| <= |y| + |beta|
//     mean(g - m): (H + 2) u G, with G = rms(g - m), to which g - m is rounded once
//     slope, the mean of (g - m) xhat: ((H + 4) u + a + b) G
//     dx: (a + 4 u) |dx| + rstd G (1 + |xhat|) ((H + 10) u + 2 a + b), since |mean(g - m)|, |slope| <= G
//     dgamma: of each row |dy| (a |xhat| + b), and of a part of rows u |dy xhat| for each addition that is left in
//         it; the parts are merged with compensation, whose errors are less than 1 % of these
//     dbeta: the second alone, of |dy|
// RMS norm: d, D, b and mean(g - m) are 0. Constant rows: q and b are 0, g constant: G is 0, and what these multiply is
// exact. An x - mean that is 0 for all that is kept of the mean is not: b is not 0 then.
//
// A result is certain if no midpoint of its type is within the bound. First, a register at a time, within ROOM ulp of
// float64: a shift puts the bits that rounding drops to the top. That is enough for results that are large beside what
// they are the sum of; and midpoints of subnormal results are elsewhere. Then each element of a register that fails,
// by its own bound: what is that much less and that much more must round alike. Then the row in pairs.
#pragma once
#include <cmath>

#include "lanes.h"

namespace {

constexpr double U = 0x1p-53;

// Of a row: the error of xhat is at most a |xhat| + b.
struct Errors {
    double a, b;
};

// Given sqrt(q) and D, or a little more.
template <bool LAYER> INLINE Errors errors_of_xhat(double size, double d, double chain) {
    double var = (chain + 4) * size * size + 2 * d * size * (chain + 3) + d * d + 1;
    Errors of = {1.02 * U * (var / 2 + 5.5), LAYER ? 1.02 * U * (chain + 4) * size : 0};
    // What has no bound, NaN too, is certain of nothing.
    return of.a < 0x1p-20 ? of : Errors{__builtin_inf(), __builtin_inf()};
}

// An error is at most `own` of the result and `others` of what else it is the sum of: what room of ulp leaves that.
INLINE double least_result(double own, double others, double room) {
    double rest = room * U - own;
    return rest > 0 ? others / rest : __builtin_inf();
}

// Bits that rounding to a narrower type drops, ulp of float64 to its midpoints that are room enough, most of which are
// further off, and the smallest normal number.
template <class To> constexpr int DROPPED = 53 - DIGITS<To>;
template <class To> constexpr int64_t ROOM = 1LL << (sizeof(To) == 4 ? 17 : 26);
template <class To> constexpr double NORMAL = DIGITS<To> == 11 ? 0x1p-14 : 0x1p-126;

// Whether a result may be too near to a midpoint, or is less than `least` in size, or NaN.
template <class To, int L, int W> INLINE bool in_doubt(Lanes<L, W> v, Lanes<L, W> least) {
    constexpr int up = 64 - DROPPED<To>;
    int found = 0;
    EACH {
        auto place = ((Register<uint64_t, W>)v.v[i] << up) + ((uint64_t)ROOM<To> << up);
        auto limit = Register<int64_t, W>{} + (int64_t)((1ULL << 63) + ((2 * (uint64_t)ROOM<To> + 1) << up));
        found |= Vector<W>::any_below((Register<int64_t, W>)place, limit, magnitude(v).v[i], least.v[i]);
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
