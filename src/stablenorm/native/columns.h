// Sums over rows: merged, rounded and handed on.
#pragma once
#include "round.h"

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

// Some columns of a sum: pairs, the two sums that error bounds are made of, and the bounds.
struct ColumnSums {
    const double *high, *low;
    double *size, *other;
    double vectors[4][COLUMNS + 16], error[COLUMNS + 16];
};
constexpr double ZEROS[COLUMNS + 16] = {};

inline void add_tiles(const Call& c, int sum, Index start, Index count, ColumnSums& of) {
    Index p = padded(c.n);
    Index sizes = c.plan.in_pairs ? 4 + sum : 4;
    Index place = sum * c.words() * p;
    bool has_low = c.words() == 2;
    if (c.plan.tiles == 1) {
        double* sums = c.scratch.sums + start;
        of.high = sums + place;
        of.low = has_low ? of.high + p : ZEROS;
        of.size = sums + sizes * p;
        of.other = sums + 5 * p;
        return;
    }
    memset(of.vectors, 0, sizeof of.vectors);
    double* high = of.vectors[0];
    double* low = of.vectors[1];
    of.high = high;
    of.low = low;
    of.size = of.vectors[2];
    of.other = of.vectors[3];
    for (Index tile = 0; tile < c.plan.tiles; tile++) {
        const double* sums = c.scratch.sums + c.sums_per_tile() * tile + start;
        merge_columns(sums + place, high, low, count);
        if (has_low) merge_columns(sums + place + p, high, low, count);
        for (Index j = 0; c.nearest && j < count; j++) {
            of.size[j] += sums[sizes * p + j];
            of.other[j] += sums[5 * p + j];
        }
    }
}

// Bounds the errors of sums of pairs or of float64.
inline void find_errors(const Call& c, int sum, Index count, ColumnSums& of) {
    // The largest ranges of all tiles: in float64 the worst errors of terms; in pairs |dy| and the
    // reciprocal of its last bit.
    Errors worst = {0, 0};
    for (Index tile = 0; tile < c.plan.tiles; tile++)
        worst = {larger(worst.a, c.scratch.ranges[2 * tile]),
            larger(worst.b, c.scratch.ranges[2 * tile + 1])};
    if (!c.plan.in_pairs) {
        // Terms of dbeta are exact: its errors are those of its additions.
        if (sum == DBETA)
            worst = {
                0, (double)(c.plan.tile_rows < PART_OF<true> ? c.plan.tile_rows : PART_OF<true>)*U};
        for (Index j = 0; j < count; j += 8) {
            Lanes<8> other = sum == DGAMMA ? magnitude(load<8>(of.other + j)) : Lanes<8>{};
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
    double bound = sums_bound(c.n, c.plan.tile_rows, c.plan.tiles);
    double rows = (double)(c.plan.tiles * c.plan.tile_rows);
    // The sums of dy are multiples of the last bit of the smallest |dy|; if their low parts are at
    // most 2**52 times that, any two add up exactly as pairs.
    bool exact = sum == DBETA && rows * 0x1p-53 * rows * worst.a * worst.b <= 0x1p52;
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
inline void finish(const Call& c, int sum, Index start, Index stop, bool unsummed) {
    ColumnSums of;
    Index count = stop - start;
    add_tiles(c, sum, start, count, of);
    if (c.nearest) find_errors(c, sum, count, of);
    if (unsummed || c.unrounded)
        return put_partial(of, c.nearest, count, c.partial[sum] + 3 * start);
    of_type(c.sums_type[sum], [&](auto* kind) {
        using To = std::remove_pointer_t<decltype(kind)>;
        To* out = (To*)c.sums_out[sum] + start;
        if (!c.nearest && of.low == ZEROS) return convert(of.high, out, count);
        uint8_t* uncertified = c.nearest ? c.uncertified[sum] + start : nullptr;
        // Fewer than 2**50 float16, multiples of 2**-24 below 2**16, add up exactly as pairs.
        bool exact = sum == DBETA && c.dy.type == F16 && !c.plan.in_pairs;
        PairVectors sums = {of.high, of.low, c.nearest && !exact ? of.error : nullptr};
        round_pairs(out, sums, 1.0, count, uncertified);
        // A NaN of pairs comes from a row with NaN, and there is one NaN. Integers decide float64
        // sums that are not finite; others are summed closely.
        const double nan = __builtin_nan("");
        for (Index j = 0; j < count; j++) {
            if (c.plan.in_pairs && of.high[j] != of.high[j]) {
                convert(&nan, out + j, 1);
                if (c.nearest) uncertified[j] = 0;
            }
            if (!c.nearest || c.plan.in_pairs) continue;
            if (!(magnitude(of.high[j]) < __builtin_inf()))
                uncertified[j] = UNCERTIFIED;
            else if (uncertified[j])
                uncertified[j] = OPEN;
        }
    });
}

}  // namespace
