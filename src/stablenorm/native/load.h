// Rows and parameters on their way in: lifted to the type of the arithmetic.
#pragma once
#include "call.h"
#include "pair_rows.h"

namespace {

template <class T> constexpr Type TYPE = F64;
template <> constexpr Type TYPE<f32> = F32;
template <> constexpr Type TYPE<bf16> = BF16;
template <> constexpr Type TYPE<f16> = F16;

// Calls f with a null pointer of the type.
template <class F> INLINE auto of_type(Type type, F f) {
    switch (type) {
        case F32:
            return f((f32*)nullptr);
        case BF16:
            return f((bf16*)nullptr);
        case F16:
            return f((f16*)nullptr);
        default:
            return f((double*)nullptr);
    }
}

// ---- rows ----

// Least distance of prefetches, in bytes: the processor's own prefetcher stops at pages. (131072,
// 256), two threads: the backward takes 18 ms for 29.
constexpr Index LEAST_AHEAD = 1 << 14;

// Converts n elements, each rounded once. Prefetches what follows, mostly the next row: twice as
// fast beyond the caches.
template <class From, class To> NOINLINE void convert(const From* from, To* to, Index n) {
    each_columns<LANES>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        __builtin_prefetch((const char*)(from + j) + LEAST_AHEAD);
        store(to + j, load<LANES>(from + j, count), count);
    });
}

// Row i of n elements of T: where it lies, or lifted to `scratch`.
template <class T> INLINE const T* row_as(const Rows& a, Index i, Index n, double* scratch) {
    const char* from = row_of(a, i);
    if (__builtin_expect(a.type == TYPE<T>, 1)) return (const T*)from;
    of_type(a.type, [&](auto* kind) {
        using From = std::remove_pointer_t<decltype(kind)>;
        if constexpr (sizeof(From) < sizeof(T) || sizeof(T) == 8)
            convert((const From*)from, (T*)scratch, n);
    });
    return (const T*)scratch;
}

// Writes a + b, rounded once. Float64 holds the sum of two T of p digits, or has 2 p + 2 digits:
// then two roundings give the same (Figueroa, SIGNUM 30, 3 (1995) 21).
template <class A, class B, class T>
NOINLINE void store_sums(const A* a, const B* b, T* to, Index n) {
    each_columns<8>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        store(to + j, load<8>(a + j, count) + load<8>(b + j, count), count);
    });
}

// Writes source + plus, the residual, to row i of x.
NOINLINE inline void add_residual(const Call& c, Index i) {
    of_type(c.x.type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        store_sums(
            (const T*)row_of(c.source, i), (const T*)row_of(c.plus, i), (T*)row_of(c.x, i), c.n);
    });
}

// ---- gamma and beta ----

// Widens n elements of a parameter, with one NaN for all, or fills in the neutral one; zeros follow
// them.
inline void widen(const char* from, Type type, double neutral, double* to, Index n) {
    memset(to + n, 0, (size_t)(padded(n) - n) * sizeof(double));
    for (Index j = 0; !from && j < n; j++) to[j] = neutral;
    if (from)
        of_type(type, [&](auto* kind) {
            each_columns<LANES>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
                Lanes<LANES> v = load<LANES>((decltype(kind))from + j, count);
                for (auto& e : v.v) e = e == e ? e : broadcast<WIDEST>(__builtin_nan("")).v[0];
                store(to + j, v, count);
            });
        });
}

// Whether all are 0 or between `least` and the largest in size. NaN is neither.
inline bool is_within(const double* v, Index n, double least) {
    pairs::Range range = pairs::range_of(v, n);
    return !(range.least < least) && range.most <= LARGEST;
}

// Widens gamma and beta; false if they, or eps, are out of range.
inline bool prepare(const Call& c) {
    widen(c.gamma, c.gamma_type, 1.0, c.scratch.gamma, c.n);
    if (!c.backward) widen(c.beta, c.beta_type, c.nearest ? 0.0 : -0.0, c.scratch.beta, c.n);
    const double* gamma = c.scratch.gamma;
    const double* beta = c.scratch.beta;
    double* __restrict sizes = c.scratch.sizes;
    for (Index j = 0, stop = padded(c.n); sizes && j < stop; j++) {
        double size = magnitude(gamma[j]) + magnitude(beta[j]);
        // A bound of at least 2**-52 times this is at least LEAST_BOUND.
        sizes[j] = size > 0 ? size + LEAST_BOUND * 0x1p52 : 0;
    }
    // float64 holds the products of float64 parameters and narrower data unless they are huge.
    if (!c.has_pairs()) {
        bool moderate = c.gamma_type != F64 || is_within(gamma, c.n, 0);
        // |xhat| is at most sqrt(n): y stays below the largest number of its type.
        double largest = c.y.type == F16 ? 0x1p15 : 0x1p127;
        double most = std::sqrt((double)c.n);
        for (Index j = 0; c.over && !c.backward && j < c.n; j++)
            moderate = moderate && most * magnitude(gamma[j]) + magnitude(beta[j]) < largest;
        return moderate && (c.beta_type != F64 || c.backward || is_within(beta, c.n, 0));
    }
    // Finite numbers of narrow types are in range.
    bool within = c.plan.in_pairs ? is_within(c.scratch.gamma, c.n, SMALLEST)
                                  : is_within(c.backward ? gamma : sizes, c.n, 0);
    if (!within || c.backward) return within;
    return (!c.plan.in_pairs || is_within(beta, c.n, 0)) &&
           (!c.nearest || c.eps == 0 || (c.eps >= SMALLEST && c.eps <= LARGEST));
}

}  // namespace
