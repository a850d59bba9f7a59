// Double-double: a number is high + low, of float64 or of lanes of such; on the device, of float64.
//
// Sums and products use the error-free transformations of Knuth and Dekker, the latter by the fused
// multiply-add (Joldes, Muller and Popescu, ACM TOMS 44 (2017) 15). The low part of a sum or a
// product may exceed half an ulp of the high one by a few bits until the pair is `settled`; sums
// and products of such pairs are as exact.
//
// Requires of N: +, -, *, /, fma, minus, root and like(N, double), each rounded once.
#pragma once

namespace {

template <class N> struct Pair {
    N high, low;
};

// fl(a + b) and its exact error; half of its operations run on the units that multiply.
template <class N> INLINE Pair<N> two_sum(N a, N b) {
    N sum = a + b;
    N part = minus(sum, a);
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
// Leaves out low**2, which is below the last bit of a pair.
template <class N> INLINE Pair<N> square(Pair<N> a) {
    Pair<N> product = two_product(a.high, a.high);
    return {product.high, fma(a.high + a.high, a.low, product.low)};
}

// v**-0.5: a Newton step of second order from float64's own.
template <class N> INLINE Pair<N> reciprocal_root(Pair<N> v) {
    N start = like(v.high, 1.0) / root(v.high);
    Pair<N> product = v * two_product(start, start);
    // About 2**-52; the subtraction is exact.
    N delta = (like(v.high, 1.0) - product.high) - product.low;
    return fast_two_sum(
        start, start * fma(like(v.high, 0.375) * delta, delta, like(v.high, 0.5) * delta));
}

}  // namespace
