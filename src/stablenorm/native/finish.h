// Rows between memory and arithmetic: lifted to one type on the way in; added to and rounded once
// on the way out.
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

// ---- rows of another type ----

// Least distance of prefetches, in bytes: the processor's own prefetcher stops at pages. (131072,
// 256), two threads: the backward takes 18 ms for 29.
constexpr Index LEAST_AHEAD = 1 << 14;

// Converts n elements, each rounded once. Prefetches what follows, mostly the next row: twice as
// fast beyond the caches.
template <class From, class To> NOINLINE void convert(const From* from, To* to, Index n) {
    each_columns<L>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        __builtin_prefetch((const char*)(from + j) + LEAST_AHEAD);
        store(to + j, load<L>(from + j, count), count);
    });
}

template <class T> NOINLINE void convert_row(Type type, const char* from, T* to, Index n) {
    of_type(type, [&](auto* kind) {
        using From = std::remove_pointer_t<decltype(kind)>;
        if constexpr (sizeof(From) < sizeof(T) || sizeof(T) == 8) convert((const From*)from, to, n);
    });
}

// Row i as elements of T: where it lies, or lifted to `room`.
template <class T> INLINE const T* row_as(const Call& c, const Rows& a, Index i, double* room) {
    const char* at = row_of(a, i);
    return __builtin_expect(a.type == TYPE<T>, 1)
               ? (const T*)at
               : (convert_row(a.type, at, (T*)room, c.n), (const T*)room);
}

// ---- from pairs to a narrower type ----

// Rounds high + low to odd, given that `high` is the sum rounded to nearest: if it is even and
// `low` is not 0, takes its neighbour on the side of `low`.
template <int L, int W> INLINE Lanes<L, W> odd_sum(Lanes<L, W> high, Lanes<L, W> low) {
    EACH {
        using I = Register<int64_t, W>;
        I bits = (I)high.v[i], away = ((bits ^ (I)low.v[i]) >> 63) | 1;
        I moves = (low.v[i] != 0) & ((bits & 1) == 0) & ((bits & INT64_MAX) < (0x7ffLL << 52));
        high.v[i] = (Register<double, W>)(bits + (moves & away));
    }
    return high;
}

// ---- results in pairs: their range, and where they go ----

namespace pairs {

// The smallest |dy| of a row, zeros aside, and the largest; a NaN is larger than all.
NOINLINE inline Pair<double> range_of(const double* dy, Index n) {
    using I = Register<int64_t, WIDEST>;
    I least = I{} + INT64_MAX;
    I most = {};
    each_columns<P>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        // The sizes of finite numbers order like their bits.
        N sizes = magnitude(load<P>(dy + j, count));
        for (auto& lanes : sizes.v) {
            I size = (I)lanes;
            I other = size == 0 ? I{} + INT64_MAX : size;
            least = other < least ? other : least;
            most = size > most ? size : most;
        }
    });
    int64_t low = INT64_MAX;
    int64_t high = 0;
    for (int k = 0; k < WIDEST; k++) {
        low = least[k] < low ? least[k] : low;
        high = most[k] > high ? most[k] : high;
    }
    return {read<double>(&low), read<double>(&high)};
}

// Sinks of results, each of which errs by at most a bound times its size: rounded to float64 at
// once; kept as pairs; or rounded to float64 with Ziv's rounding test.
struct ToFloat64 {
    static constexpr bool STAGED = false;
    double* at;
    INLINE void operator()(Index j, Index count, Pairs v, N) {
        store(at + j, v.high + v.low, count);
    }
};
struct ToPairs {
    static constexpr bool STAGED = true;
    double *high, *low, *sizes;
    INLINE void operator()(Index j, Index, Pairs v, N size) {
        store(high + j, v.high);
        store(low + j, v.low);
        store(sizes + j, size);
    }
};
struct ToCertain {
    static constexpr bool STAGED = true;
    double* at;
    double bound;
    Register<int64_t, WIDEST> uncertified = {};
    INLINE void operator()(Index j, Index count, Pairs v, N size) {
        // The first term covers the rounding of the low part and of its sum with the bound.
        N error = fma(broadcast<P>(0x1p-52), magnitude(v.low), broadcast<P>(bound) * size);
        N most = v.high + (v.low + error);
        N least = v.high + (v.low - error);
        if (count < P) {
            most = first(most, count);
            least = first(least, count);
        }
        uncertified |= differences(most, least);
        // Zero gets the sign of plus.
        store(at + j, most + broadcast<P>(0.0), count);
    }
};

}  // namespace pairs

// ---- rounding ----

// Rounds pairs once, with Ziv's rounding test if there are sizes: each errs by at most bound *
// size. Returns whether an element is uncertified, and writes to `flags`, if it is not null, which
// are.
template <class T>
NOINLINE bool round_pairs(T* out, const double* high, const double* low, const double* size,
    double bound, Index n, uint8_t* flags = nullptr) {
    using N = pairs::N;
    bool uncertified = false;
    auto rounded = [](N a, N b) INLINE_LAMBDA {
        Pair<N> sum = two_sum(a, b);
        // Zero gets the sign of plus.
        if constexpr (sizeof(T) == 8)
            return sum.high + broadcast<8>(0.0);
        else
            return odd_sum(sum.high, sum.low) + broadcast<8>(0.0);
    };
    // With `count` a constant, memcmp and memcpy are no calls.
    each_columns<8>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        N a = load<8>(high + j);
        N b = load<8>(low + j);
        T upper[8], lower[8];
        bool differ = false;
        if (size) {
            // The first term covers the rounding of the low part and of its sum with the bound.
            N error =
                fma(broadcast<8>(0x1p-52), magnitude(b), broadcast<8>(bound) * load<8>(size + j));
            store(lower, rounded(a, b - error));
            b = b + error;
        }
        store(upper, rounded(a, b));
        if (size) {
            differ = memcmp(lower, upper, sizeof(T) * (size_t)count) != 0;
            uncertified |= differ;
        }
        if (flags) memset(flags + j, 0, (size_t)count);
        for (Index k = 0; flags && differ && k < count; k++)
            flags[j + k] = memcmp(lower + k, upper + k, sizeof(T)) != 0;
        memcpy(out + j, upper, sizeof(T) * (size_t)count);
    });
    return uncertified;
}

// Adds a row to results in pairs. Writes one NaN for all, and 0 as the low part of an infinite sum.
NOINLINE inline void add_row(const double* plus, double* high, double* low, Index n) {
    for (Index j = 0; j < n; j++) {
        Pair<double> sum = two_sum(high[j], number(plus + j));
        high[j] = sum.high == sum.high ? sum.high : __builtin_nan("");
        low[j] = magnitude(sum.high) < __builtin_inf() ? low[j] + sum.low : 0;
    }
}

// Writes the sums of two rows: a + b holds them, or may be rounded twice.
template <class A, class B, class T>
NOINLINE void store_sums(const A* a, const B* b, T* to, Index n) {
    each_columns<8>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        store(to + j, load<8>(a + j, count) + load<8>(b + j, count), count);
    });
}

// Adds dsum to a row of results, pairs or float64 in own.high, rounds each once and writes it to
// `place`; returns whether one is uncertified.
NOINLINE inline bool finish_row(const Call& c, const Own& own, Index i, char* place, double bound) {
    bool adds = c.backward && c.plus.data;
    if (adds && c.in_pairs)
        add_row(row_as<double>(c, c.plus, i, own.addend), own.high, own.low, c.n);
    return of_type(c.y.type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        T* to = (T*)place;
        if (c.in_pairs)
            return round_pairs(to, own.high, own.low, c.nearest ? own.size : nullptr, bound, c.n);
        if (!adds)
            convert(own.high, to, c.n);
        else if (c.plus.type == c.y.type)
            store_sums(own.high, (const T*)row_of(c.plus, i), to, c.n);
        else
            store_sums(own.high, row_as<double>(c, c.plus, i, own.addend), to, c.n);
        return false;
    });
}

// Writes source + plus, the residual, rounded once, to row i of x.
NOINLINE inline void add_residual(const Call& c, Index i) {
    of_type(c.x.type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        // The sum of two T of p digits may be rounded twice: float64 has 2 p + 2 (Figueroa, SIGNUM
        // 30, 3 (1995) 21).
        store_sums(
            (const T*)row_of(c.source, i), (const T*)row_of(c.plus, i), (T*)row_of(c.x, i), c.n);
    });
}

}  // namespace
