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
    double room[4][COLUMNS + 16], error[COLUMNS + 16];
};
constexpr double ZEROS[COLUMNS + 16] = {};

inline void add_tiles(const Call& c, int which, Index start, Index count, ColumnSums& of) {
    Index p = padded(c.n);
    Index sizes = c.plan.in_pairs ? 4 + which : 4;
    Index place = which * c.words() * p;
    bool deep = c.words() == 2;
    if (c.plan.tiles == 1) {
        double* sums = c.scratch.sums + start;
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
    for (Index tile = 0; tile < c.plan.tiles; tile++) {
        const double* sums = c.scratch.sums + c.sums_per_tile() * tile + start;
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
    for (Index tile = 0; tile < c.plan.tiles; tile++)
        worst = {larger(worst.a, c.scratch.ranges[2 * tile]),
            larger(worst.b, c.scratch.ranges[2 * tile + 1])};
    if (!c.plan.in_pairs) {
        // Terms of dbeta are exact: its errors are those of its additions.
        if (which == 1)
            worst = {
                0, (double)(c.plan.tile_rows < PART_OF<true> ? c.plan.tile_rows : PART_OF<true>)*U};
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
    double bound = sums_bound(c.n, c.plan.tile_rows, c.plan.tiles);
    double rows = (double)(c.plan.tiles * c.plan.tile_rows);
    // The sums of dy are multiples of the last bit of the smallest |dy|; if their low parts are at
    // most 2**52 times that, any two add up exactly as pairs.
    bool exact = which == 1 && rows * 0x1p-53 * rows * worst.a * worst.b <= 0x1p52;
    for (Index j = 0; j < count; j++)
        of.error[j] = exact ? 0 : fma(0x1p-52, magnitude(of.low[j]), bound * of.size[j]);
}

// Sums as pairs; 1.02 times `error` bounds their errors.
struct Close {
    Pair<Lanes<8>> sum;
    Lanes<8> error;
};

// Sums up to 8 columns of dgamma or dbeta again, exactly but for the rounding of terms, and with
// each row's own error instead of the worst of all rows. DEEP: with statistics in pairs.
template <bool LAYER, bool DEEP>
inline Close sum_closely(const Call& c, int which, Index start, const Index* columns, Index count) {
    using N = Lanes<8>;
    constexpr Index TOGETHER =
        16;  // rows gathered before one is loaded: a load waits for stores of its parts
    double chain = chain_of(c.n, LANES, RUN);
    N bound = broadcast<8>(sums_bound(c.n, 0, 0));
    Pair<N> sum = {};
    N size = {};
    auto add = [&](Pair<N> term) INLINE_LAMBDA {
        Pair<N> next = two_sum(sum.high, term.high);
        Pair<N> rest = two_sum(sum.low, next.low);
        Pair<N> last = two_sum(rest.high, term.low);
        sum = {next.high, last.high};
        return magnitude(rest.low) + magnitude(last.low);
    };
    of_type(c.x.type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        T gathered[2][TOGETHER][8] = {};
        for (Index top = 0; top < c.rows; top += TOGETHER) {
            Index rows = at_most(c.rows - top, TOGETHER);
            for (Index i = 0; i < rows; i++) {
                const T* dy = (T*)row_of(c.dy, top + i) + start;
                const T* x = (T*)row_of(c.x, top + i) + start;
                for (Index k = 0; k < count; k++) gathered[0][i][k] = read<T>(dy + columns[k]);
                for (Index k = 0; which == 0 && k < count; k++)
                    gathered[1][i][k] = read<T>(x + columns[k]);
            }
            for (Index i = 0; i < rows; i++) {
                N d = load<8>(gathered[0][i]);
                N v = load<8>(gathered[1][i]);
                if (which == 1) {
                    size = size + add({d, N{}});
                } else if constexpr (DEEP) {
                    pairs::Stats of;
                    const T* x = (T*)row_of(c.x, top + i);
                    pairs::statistics<LAYER>(&x, 1, c.n, c.eps, of);
                    pairs::RowStats at = of.at(0, LAYER ? __builtin_nan("") : 0);
                    if (LAYER) pairs::find_center(x, c.n, c.x.type, at);
                    pairs::ElementOfXhat<LAYER> row(at);
                    Pair<N> xhat = row.of(v);
                    size = size + add(xhat * d) + bound * (magnitude(d) * row.size(v, xhat));
                } else {
                    double mean = LAYER ? c.mean[top + i] : 0;
                    double mean_lo = LAYER ? c.mean_lo[top + i] : 0;
                    double rstd = c.rstd[top + i];
                    Errors of = errors_again<LAYER>(c.spread[top + i], rstd, c.eps, 0, chain);
                    N xhat = fma(
                        v - broadcast<8>(mean), broadcast<8>(rstd), broadcast<8>(-mean_lo * rstd));
                    add(two_product(d, xhat));
                    size = fma(magnitude(d),
                        fma(broadcast<8>(of.a), magnitude(xhat), broadcast<8>(of.b)), size);
                }
            }
            // The low part may be the larger after a cancellation.
            sum = two_sum(sum.high, sum.low);
        }
    });
    return {sum, size};
}

// Sums the uncertified columns closely, with statistics in float64 and then in pairs, and rounds
// those that this certifies. dbeta is certified where its sum is exact as a pair: sums of few
// narrow numbers mostly are, and are often midpoints.
template <class To>
void finish_uncertified(const Call& c, int which, Index start, Index count, const ColumnSums& of,
    To* out, uint8_t* uncertified) {
    Index columns[COLUMNS];
    Index remaining = 0;
    for (Index j = 0; j < count; j++)
        if (uncertified[j] && magnitude(of.high[j]) < __builtin_inf()) columns[remaining++] = j;
    auto shallow = c.rms ? sum_closely<false, false> : sum_closely<true, false>;
    auto deep = c.rms ? sum_closely<false, true> : sum_closely<true, true>;
    for (auto sum : {shallow, deep}) {
        Index rest = 0;
        for (Index first = 0; first < remaining; first += 8) {
            Index together = at_most(remaining - first, 8);
            Close close = sum(c, which, start, columns + first, together);
            double high[8], low[8], error[8];
            store(high, close.sum.high);
            store(low, close.sum.low);
            store(error, close.error);
            To results[8];
            uint8_t differ[8];
            round_pairs(results, {high, low, which == 0 ? error : nullptr}, 1.02, 8, differ);
            for (Index k = 0; k < together; k++) {
                Index column = columns[first + k];
                bool certain = which == 0 ? !differ[k] && error[k] < __builtin_inf() &&
                                                magnitude(high[k]) < __builtin_inf()
                                          : error[k] == 0;
                if (certain) {
                    write(out + column, results[k]);
                    uncertified[column] = 0;
                } else
                    columns[rest++] = column;
            }
        }
        remaining = which == 0 ? rest : 0;
    }
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
        bool exact = which == 1 && c.dy.type == F16 && !c.plan.in_pairs;
        PairVectors sums = {of.high, of.low, c.nearest && !exact ? of.error : nullptr};
        round_pairs(out, sums, 1.0, count, uncertified);
        if constexpr (sizeof(To) < 8)
            if (c.nearest && !c.plan.in_pairs && !exact && !c.plan.strided)
                finish_uncertified(c, which, start, count, of, out, uncertified);
        // A NaN of pairs comes from a row with NaN, and there is one NaN. Integers decide float64
        // sums that are not finite.
        const double nan = __builtin_nan("");
        for (Index j = 0; j < count; j++) {
            if (c.plan.in_pairs && of.high[j] != of.high[j]) {
                convert(&nan, out + j, 1);
                c.nearest && (uncertified[j] = 0);
            }
            if (c.nearest && !c.plan.in_pairs)
                uncertified[j] |= !(magnitude(of.high[j]) < __builtin_inf());
        }
    });
}

}  // namespace
