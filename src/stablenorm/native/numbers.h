// Double-double: a number is high + low, of float64 or of lanes of such.
//
// Sums and products use the error-free transformations of Knuth and Dekker, the latter by the fused
// multiply-add (Joldes, Muller and Popescu, ACM TOMS 44 (2017) 15). The low part of a sum or a product may
// exceed half an ulp of the high one, by a few bits, until the pair is `settled`: what follows takes sums
// and products of these, where that costs nothing.
#pragma once
#include "lanes.h"

namespace {

INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
INLINE double minus(double a, double b) { return a - b; }
INLINE double magnitude(double a) { return __builtin_fabs(a); }

template <class N> struct Pair {
    N high, low;
};

// fl(a + b) and its exact error; half of its operations are for the units that multiply.
template <class N> INLINE Pair<N> two_sum(N a, N b) {
    N sum = a + b, part = minus(sum, a);
    return {sum, minus(a, sum - part) + minus(b, part)};
}

// The same where |a| >= |b|.
template <class N> INLINE Pair<N> fast_two_sum(N a, N b) {
    N sum = a + b;
    return {sum, b - (sum - a)};
}

template <class N> INLINE Pair<N> two_product(N a, N b) {
    N product = a * b;
    return {product, fma(a, b, -product)};
}

template <class N> INLINE Pair<N> settled(Pair<N> a) { return fast_two_sum(a.high, a.low); }
template <class N> INLINE Pair<N> operator-(Pair<N> a) { return {-a.high, -a.low}; }

// ---- sums ----

template <class N> INLINE Pair<N> operator+(Pair<N> a, N b) {
    Pair<N> sum = two_sum(a.high, b);
    return {sum.high, sum.low + a.low};
}
template <class N> INLINE Pair<N> operator+(Pair<N> a, Pair<N> b) {
    Pair<N> sum = two_sum(a.high, b.high);
    return {sum.high, a.low + (sum.low + b.low)};
}
template <class N> INLINE Pair<N> operator-(Pair<N> a, Pair<N> b) {
    Pair<N> sum = two_sum(a.high, -b.high);
    return {sum.high, sum.low + (a.low - b.low)};
}

// ---- products ----

template <class N> INLINE Pair<N> operator*(Pair<N> a, N b) {
    Pair<N> product = two_product(a.high, b);
    return {product.high, fma(a.low, b, product.low)};
}
template <class N> INLINE Pair<N> operator*(Pair<N> a, Pair<N> b) {
    Pair<N> product = two_product(a.high, b.high);
    return {product.high, fma(a.high, b.low, fma(a.low, b.high, product.low))};
}
// But for low**2, which is below the last bit of a pair.
template <class N> INLINE Pair<N> square(Pair<N> a) {
    Pair<N> product = two_product(a.high, a.high);
    return {product.high, fma(a.high + a.high, a.low, product.low)};
}

INLINE Pair<double> reciprocal(double n) { return {1 / n, fma(-1 / n, n, 1) / n}; }

// v**-0.5: a Newton step of second order from float64's own.
template <int L, int W> INLINE Pair<Lanes<L, W>> reciprocal_root(Pair<Lanes<L, W>> v) {
    using N = Lanes<L, W>;
    N start = spread<L, W>(1.0) / root(v.high);
    Pair<N> product = v * two_product(start, start);
    // About 2**-52; the subtraction is exact.
    N delta = (spread<L, W>(1.0) - product.high) - product.low;
    return fast_two_sum(start, start * fma(spread<L, W>(0.375) * delta, delta, spread<L, W>(0.5) * delta));
}

// high + low rounded to odd, given that `high` is the sum rounded to nearest: where that is even and `low`
// is not zero, its neighbour on the side of `low`.
template <int L, int W> INLINE Lanes<L, W> odd_sum(Lanes<L, W> high, Lanes<L, W> low) {
    EACH {
        using I = Register<int64_t, W>;
        I bits = (I)high.v[i], away = ((bits ^ (I)low.v[i]) >> 63) | 1;
        I moves = (low.v[i] != 0) & ((bits & 1) == 0) & ((bits & INT64_MAX) < (0x7ffLL << 52));
        high.v[i] = (Register<double, W>)(bits + (moves & away));
    }
    return high;
}

// Where a number known to within `error`, whose high + low is s in float64, may round to a narrower To otherwise than
// s: it may be an ulp from s, s is a midpoint of To, or s is below To's normal numbers, whose midpoints are elsewhere.
// Midpoints are float64: what is less than an ulp from s lies on the same side of them as s.
template <class To, int L, int W> INLINE Words<L, W> in_doubt(Lanes<L, W> s, Lanes<L, W> low, Lanes<L, W> error) {
    constexpr int64_t half = 1LL << (52 - DIGITS<To>), mask = 2 * half - 1;
    constexpr double normal = DIGITS<To> == 11 ? 0x1p-14 : 0x1p-126;
    Lanes<L, W> size = magnitude(s), room = fma(spread<L, W>(4.0), magnitude(low), spread<L, W>(0x1p54) * error);
    Words<L, W> bits = bits_of(s);
    EACH bits.v[i] = ~(room.v[i] <= size.v[i]) | (size.v[i] < normal) | ((bits.v[i] & mask) == half);
    return bits;
}

// Adds `part` to the compensated sum total + low. Of an infinite sum, what is left over is NaN.
template <class V> INLINE void merge(V part, V& total, V& low) {
    V high = total + part, t = high - total, error = (total - (high - t)) + (part - t);
    error = (high - high == high - high) ? error + low : V{};
    total = high + error;
    low = (high - high == high - high) ? error - (total - high) : V{};
}

}  // namespace
