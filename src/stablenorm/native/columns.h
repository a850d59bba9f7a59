// Vectors of float64: gamma and beta widened, sums over rows merged, rounded and handed on.
#pragma once
#include "finish.h"

namespace {

// Adds `part` to the compensated sum total + low; the low part of an infinite sum is 0, where the
// formula gives NaN.
template <class V> INLINE void merge(V part, V& total, V& low) {
    V high = total + part;
    V t = high - total;
    V error = (total - (high - t)) + (part - t);
    error = (high - high == high - high) ? error + low : V{};
    total = high + error;
    low = (high - high == high - high) ? error - (total - high) : V{};
}

NOINLINE inline void merge_columns(const double* part, double* total, double* low, Index n) {
    using V = Register<double, WIDEST>;
    // Vectors are padded.
    for (Index j = 0; j < n; j += WIDEST) {
        V t = read<V>(total + j);
        V l = read<V>(low + j);
        merge(read<V>(part + j), t, l);
        write(total + j, t);
        write(low + j, l);
    }
}

// ---- gamma and beta ----

// Widens n elements of a parameter, with one NaN for all, or fills in the neutral one; zeros follow
// them.
inline void widen(const char* from, Type type, double neutral, double* to, Index n) {
    memset(to + n, 0, (size_t)(padded(n) - n) * sizeof(double));
    for (Index j = 0; !from && j < n; j++) to[j] = neutral;
    if (from)
        of_type(type, [&](auto* kind) {
            each_columns<L>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
                Lanes<L> v = load<L>((decltype(kind))from + j, count);
                for (auto& e : v.v) e = e == e ? e : broadcast<WIDEST>(__builtin_nan("")).v[0];
                store(to + j, v, count);
            });
        });
}

// Whether all are 0 or between `least` and the largest in size. NaN is neither.
inline bool is_within(const double* v, Index n, double least) {
    Pair<double> range = pairs::range_of(v, n);
    return !(range.high < least) && range.low <= LARGEST;
}

inline bool prepare(const Call& c) {
    widen(c.gamma, c.gamma_type, 1.0, c.wide_gamma, c.n);
    if (!c.backward) widen(c.beta, c.beta_type, c.nearest ? 0.0 : -0.0, c.wide_beta, c.n);
    const double* gamma = c.wide_gamma;
    const double* beta = c.wide_beta;
    double* __restrict sizes = c.sizes;
    for (Index j = 0, stop = c.padded_n(); sizes && j < stop; j++) {
        double size = magnitude(gamma[j]) + magnitude(beta[j]);
        // A bound of at least 2**-52 times this is at least LEAST_BOUND.
        sizes[j] = size > 0 ? size + LEAST_BOUND * 0x1p52 : 0;
    }
    // float64 holds the products of float64 parameters and narrower data unless they are huge.
    if (!c.pairs()) {
        bool moderate = c.gamma_type != F64 || is_within(gamma, c.n, 0);
        // |xhat| is at most sqrt(n): y stays below the largest number of its type.
        double largest = c.y.type == F16 ? 0x1p15 : 0x1p127;
        double most = std::sqrt((double)c.n);
        for (Index j = 0; c.over && !c.backward && j < c.n; j++)
            moderate = moderate && most * magnitude(gamma[j]) + magnitude(beta[j]) < largest;
        return moderate && (c.beta_type != F64 || c.backward || is_within(beta, c.n, 0));
    }
    // Finite numbers of narrow types are in range.
    bool within = c.in_pairs ? is_within(c.wide_gamma, c.n, SMALLEST)
                             : is_within(c.backward ? gamma : sizes, c.n, 0);
    if (!within || c.backward) return within;
    return (!c.in_pairs || is_within(beta, c.n, 0)) &&
           (!c.nearest || c.eps == 0 || (c.eps >= SMALLEST && c.eps <= LARGEST));
}

// ---- sums ----

// Some columns of a sum: pairs, the two sums that error bounds are made of, and the bounds.
struct ColumnSums {
    const double *high, *low;
    double *size, *other;
    double room[4][COLUMNS + 16], error[COLUMNS + 16];
};
constexpr double ZEROS[COLUMNS + 16] = {};

inline void add_tiles(const Call& c, int which, Index start, Index count, ColumnSums& of) {
    Index p = c.padded_n();
    Index sizes = c.in_pairs ? 4 + which : 4;
    Index place = which * c.words() * p;
    bool deep = c.words() == 2;
    if (c.tiles == 1) {
        double* sums = c.sums + start;
        of.high = sums + place;
        of.low = deep ? of.high + p : ZEROS;
        of.size = sums + sizes * p;
        of.other = sums + 5 * p;
        return;
    }
    memset(of.room, 0, sizeof of.room);
    double* high = of.room[0];
    double* low = of.room[1];
    of.high = high;
    of.low = low;
    of.size = of.room[2];
    of.other = of.room[3];
    for (Index tile = 0; tile < c.tiles; tile++) {
        const double* sums = c.sums + c.sums_per_tile() * tile + start;
        merge_columns(sums + place, high, low, count);
        if (deep) merge_columns(sums + place + p, high, low, count);
        for (Index j = 0; c.nearest && j < count; j++) {
            of.size[j] += sums[sizes * p + j];
            of.other[j] += sums[5 * p + j];
        }
    }
}

// Bounds the errors of sums of pairs or of float64.
inline void find_errors(const Call& c, int which, Index count, ColumnSums& of) {
    // The largest ranges of all tiles: in float64 the worst errors of terms; in pairs |dy| and the
    // reciprocal of its last bit.
    Errors worst = {0, 0};
    for (Index tile = 0; tile < c.tiles; tile++)
        worst = {larger(worst.a, c.ranges[2 * tile]), larger(worst.b, c.ranges[2 * tile + 1])};
    if (!c.in_pairs) {
        // Terms of dbeta are exact: its errors are those of its additions.
        if (which == 1)
            worst = {0, (double)(c.tile_rows < PART_OF<true> ? c.tile_rows : PART_OF<true>)*U};
        for (Index j = 0; j < count; j += 8) {
            Lanes<8> other = which == 0 ? magnitude(load<8>(of.other + j)) : Lanes<8>{};
            Lanes<8> error =
                bound_of_sum(worst, magnitude(load<8>(of.size + j)), other, (double)c.rows);
            // NaN certifies nothing; columns of zeros stay certain.
            for (auto& e : error.v)
                e = e < __builtin_inf() ? e > 0 ? e + LEAST_BOUND : e
                                        : Register<double, WIDEST>{} + __builtin_inf();
            store(of.error + j, error);
        }
        return;
    }
    double bound = sums_bound(c.n, c.tile_rows, c.tiles);
    double rows = (double)(c.tiles * c.tile_rows);
    // The sums of dy are multiples of the last bit of the smallest |dy|; if their low parts are at
    // most 2**52 times that, any two add up exactly as pairs.
    bool exact = which == 1 && rows * 0x1p-53 * rows * worst.a * worst.b <= 0x1p52;
    for (Index j = 0; j < count; j++)
        of.error[j] = exact ? 0 : fma(0x1p-52, magnitude(of.low[j]), bound * of.size[j]);
}

// Writes partial sums, to be merged with others.
inline void put_partial(const ColumnSums& of, bool bounded, Index count, double* out) {
    for (Index j = 0; j < count; j++, out += 3) {
        Pair<double> sum = two_sum(of.high[j], of.low[j]);
        bool finite = magnitude(sum.high) < __builtin_inf();
        out[0] = sum.high;
        out[1] = finite ? sum.low : 0;
        out[2] = !finite ? 0 : bounded ? of.error[j] : __builtin_nan("");
    }
}

// Adds up the tiles' sums of some columns and rounds each, with Ziv's rounding test by its own
// bound.
inline void finish(const Call& c, int which, Index start, Index stop, bool unsummed) {
    ColumnSums of;
    Index count = stop - start;
    add_tiles(c, which, start, count, of);
    if (c.nearest) find_errors(c, which, count, of);
    if (unsummed || c.unrounded)
        return put_partial(of, c.nearest, count, c.partial[which] + 3 * start);
    of_type(c.sums_type[which], [&](auto* kind) {
        using To = std::remove_pointer_t<decltype(kind)>;
        To* out = (To*)c.sums_out[which] + start;
        if (!c.nearest && of.low == ZEROS) return convert(of.high, out, count);
        uint8_t* uncertified = c.nearest ? c.uncertified[which] + start : nullptr;
        // Fewer than 2**50 float16, multiples of 2**-24 below 2**16, add up exactly as pairs.
        bool exact = which == 1 && c.dy.type == F16 && !c.in_pairs;
        round_pairs(out, of.high, of.low, c.nearest && !exact ? of.error : nullptr, 1.0, count,
            uncertified);
        // A NaN of pairs comes from a row with NaN, and there is one NaN. Integers decide float64
        // sums that are not finite; others are summed closely.
        const double nan = __builtin_nan("");
        for (Index j = 0; j < count; j++) {
            if (c.in_pairs && of.high[j] != of.high[j]) {
                convert(&nan, out + j, 1);
                c.nearest && (uncertified[j] = 0);
            }
            if (!c.nearest || c.in_pairs) continue;
            if (!(magnitude(of.high[j]) < __builtin_inf()))
                uncertified[j] = UNCERTIFIED;
            else if (uncertified[j])
                uncertified[j] = OPEN;
        }
    });
}

}  // namespace
