// Results on their way out: pairs rounded once, rows added to.
#pragma once
#include "load.h"
#include "scratch.h"

namespace {

// Vectors of pairs and, or null, of the sizes of their errors.
struct PairVectors {
    const double *high, *low, *size;
};

// Rounds n pairs once, with Ziv's rounding test if there are sizes: each errs by at most bound *
// size. Returns whether an element is uncertified, and writes to `flags`, if it is not null, which
// are.
template <class T>
NOINLINE bool round_pairs(
    T* out, const PairVectors& of, double bound, Index n, uint8_t* flags = nullptr) {
    using N = pairs::N;
    bool uncertified = false;
    auto rounded = [](N a, N b) INLINE_LAMBDA {
        Pair<N> sum = two_sum(a, b);
        // An exact zero is +0.
        if constexpr (sizeof(T) == 8)
            return sum.high + broadcast<8>(0.0);
        else
            return odd_sum(sum.high, sum.low) + broadcast<8>(0.0);
    };
    // With `count` a constant, memcmp and memcpy are no calls.
    each_columns<8>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        N a = load<8>(of.high + j);
        N b = load<8>(of.low + j);
        T upper[8], lower[8];
        bool differ = false;
        if (of.size) {
            N error = pairs::error_of(b, bound, load<8>(of.size + j));
            store(lower, rounded(a, b - error));
            b = b + error;
        }
        store(upper, rounded(a, b));
        if (of.size) {
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

// Rounds a row of results, the pairs in own.high and own.low, and writes it; returns whether all
// are certain. A backward adds dsum before.
NOINLINE inline bool round_row_of_pairs(const Call& c, const Own& own, Index i, double bound) {
    if (c.backward && c.plus.data)
        add_row(row_as<double>(c.plus, i, c.n, own.addend), own.high, own.low, c.n);
    return of_type(c.y.type, [&](auto* kind) {
        PairVectors row = {own.high, own.low, c.nearest ? own.size : nullptr};
        return !round_pairs((decltype(kind))row_of(c.y, i), row, bound, c.n);
    });
}

// Rounds a row of results, the float64 in own.high, and writes it to `place`.
NOINLINE inline void round_row_of_float64(const Call& c, const Own& own, Index i, char* place) {
    of_type(c.y.type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        T* to = (T*)place;
        if (!c.backward || !c.plus.data)
            convert(own.high, to, c.n);
        else if (c.plus.type == c.y.type)
            store_sums(own.high, (const T*)row_of(c.plus, i), to, c.n);
        else
            store_sums(own.high, row_as<double>(c.plus, i, c.n, own.addend), to, c.n);
    });
}

}  // namespace
