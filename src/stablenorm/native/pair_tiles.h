// Tiles of rows in double-double: float64 data, and the rows that float64 leaves uncertified with
// rounding="nearest".
#pragma once
#include <initializer_list>

#include "tiles.h"

namespace {
namespace pairs {

Parameters parameters_of(const Call& c) { return {c.wide_gamma, c.wide_beta}; }

// True if a row has a NaN or an infinity, which spoils all of it.
bool is_spoiled(const double* x, Index n) { return !(range_of(x, n).low < __builtin_inf()); }

// Writes NaN into a row of results.
NOINLINE inline void spoil_results(const Call& c, const Own& own, Index i) {
    for (Index j = 0; j < c.n; j++) own.high[j] = __builtin_nan("");
    if (c.y.data)
        of_type(
            c.y.type, [&](auto* kind) { convert(own.high, (decltype(kind))row_of(c.y, i), c.n); });
}

// Writes NaN into the results and statistics of a row of the forward.
NOINLINE inline void spoil_row(const Call& c, const Own& own, Index i) {
    for (double* word : {c.mean, c.mean_lo, c.rstd, c.spread})
        if (word) word[i] = __builtin_nan("");
    for (double* word : {c.mean_tail, c.rstd_lo})
        if (word) word[i] = 0;
    spoil_results(c, own, i);
}

template <bool LAYER> void forward(const Call& c, const Own& own, Tile tile) {
    Parameters parameters = parameters_of(c);
    double bound = row_bound(c.n);
    measure_tile<LAYER, double, Stats>(
        c, own, tile, [&](Index top, int count, const double* const* x, const Stats& of) {
            for (int r = 0; r < count; r++) {
                Index i = top + r;
                if (LAYER && c.mean_lo) {
                    c.mean[i] = of.mean[r];
                    c.mean_lo[i] = of.mean_lo[r];
                }
                if (c.mean_tail) c.mean_tail[i] = of.mean_tail[r];
                if (c.rstd) c.rstd[i] = of.rstd[r];
                if (c.rstd_lo) c.rstd_lo[i] = of.rstd_lo[r];
                if (c.spread) c.spread[i] = of.spread[r];
                c.marks[i] = 0;
                if (is_out_of_range(of, r, x[r], c.n, LAYER)) {
                    if (is_spoiled(x[r], c.n)) {
                        spoil_row(c, own, i);
                        continue;
                    }
                    c.marks[i] = UNCERTIFIED;
                    if (c.rstd_lo) {
                        c.rstd[i] = 0;
                        c.rstd_lo[i] = __builtin_nan("");
                    }
                }
                if (c.marks[i]) continue;
                // Near rows, n mean**2 <= 2**10 var, do without the tail: 9 % of the forward's
                // time.
                double m = of.mean[r] * of.rstd[r];
                bool no_tail = m * m * (double)c.n <= 0x1p10 * of.spread[r] * of.spread[r];
                RowStats stats = of.at(r, LAYER ? __builtin_nan("") : 0);
                auto write = [&](auto out) {
                    return no_tail ? write_y<LAYER, true>(x[r], out, c.n, stats, parameters)
                                   : write_y<LAYER>(x[r], out, c.n, stats, parameters);
                };
                // Float64 left rows of narrow types uncertified: mostly those that have a center.
                if (LAYER && c.nearest && c.x.type != F64) find_center(x[r], c, stats);
                bool differ = finish_pairs(c, own, i, bound, write);
                if (LAYER && differ && c.x.type == F64 && find_center(x[r], c, stats))
                    differ = finish_pairs(c, own, i, bound, write);
                if (differ) c.marks[i] = UNCERTIFIED;
            }
        });
}

// Writes a row of results, rounded; true if an element is uncertified.
template <class Write>
bool finish_pairs(const Call& c, const Own& own, Index i, double bound, Write write) {
    if (!c.staged) {
        write(ToFloat64{(double*)row_of(c.y, i)});
        return false;
    }
    if (c.nearest && c.y.type == F64 && !(c.backward && c.plus.data) &&
        !any_of<WIDEST>(write(ToCertain{(double*)row_of(c.y, i), bound}).uncertified, -1))
        return false;
    write(ToPairs{own.high, own.low, own.size});
    return finish_row(c, own, i, row_of(c.y, i), bound);
}

// Loads a row and its statistics; false, with a mark, if it is out of range. Rows with NaN are done
// like others.
template <bool LAYER>
bool begin_row(const Call& c, const Own& own, Index i, int r, double* of_tile, Back& of) {
    if (c.marks[i]) return false;
    c.marks[i] = UNCERTIFIED | UNSUMMED;
    Index apart = r * c.padded_n();
    of.dy = row_as<double>(c, c.dy, i, own.dy[0] + apart);
    Pair<double> range = range_of(of.dy, c.n);
    if (range.high < SMALLEST || !(range.low <= LARGEST)) return false;
    of.x = row_as<double>(c, c.x, i, own.x[0] + apart);
    of.m = {0, 0};
    if (c.rstd_lo) {
        of.stats = {0, 0, 0, {c.rstd[i], c.rstd_lo[i]}, c.spread ? c.spread[i] : 0,
            LAYER ? __builtin_nan("") : 0};
        if (LAYER) {
            of.stats.mean = c.mean[i];
            of.stats.mean_lo = c.mean_lo[i];
            of.stats.mean_tail = c.mean_tail[i];
        }
    } else {
        Stats stats;
        statistics<LAYER>(&of.x, c, 1, stats);
        if (is_spoiled(of.x, c.n))
            stats.rstd[0] = __builtin_nan("");
        else if (is_out_of_range(stats, 0, of.x, c.n, LAYER))
            return false;
        of.stats = stats.at(0, LAYER ? __builtin_nan("") : 0);
    }
    // The range of |dy| in a tile: the largest, and the reciprocal of the last bit of the smallest.
    if (of_tile && range.low != 0) {
        of_tile[0] = larger(of_tile[0], range.low);
        of_tile[1] = larger(of_tile[1], LAST_BITS[c.dy.type] / range.high);
    }
    if (LAYER) of.m = pivot(of.dy, parameters_of(c), c.n);
    c.marks[i] = 0;
    return true;
}

// Whether x and g of a row have centers; if so, begins it again about them. Then dx is 0, without
// error, where both are.
inline bool begin_at_centers(const Call& c, const Own& own, Back& of, double* h) {
    Parameters parameters = parameters_of(c);
    double* g = own.high;
    bool exact = true;
    for (Index j = 0; j < c.n; j++) {
        Pair<double> product = two_product(number(of.dy + j), parameters.gamma[j]);
        g[j] = product.high;
        exact &= product.low == 0;
    }
    double mean = of.m.high + of.plain.high;
    if (!exact || !is_mean(g, c.n, mean, LAST_BITS[F64]) || !find_center(of.x, c, of.stats))
        return false;
    Sums along = {};
    of.m = {mean, 0};
    pull<true, true, true>(of, c.n, parameters, along, 0, h, {nullptr, c.padded_n(), false});
    finish_means(along, c.n, &of, 1);
    of.plain = {0, 0};
    return true;
}

template <bool LAYER> void write_row(const Call& c, const Own& own, Index i, Back& of, double* h) {
    auto write = [&](auto out) {
        using Out = decltype(out);
        auto how =
            LAYER && of.m.high != 0 ? write_dx<LAYER, LAYER, Out> : write_dx<LAYER, false, Out>;
        return how(of, out, c.n, parameters_of(c), h, c.padded_n());
    };
    if (of.stats.rstd.high != of.stats.rstd.high) return spoil_results(c, own, i);
    double bound = row_bound(c.n) * of.stats.rstd.high;
    bool differ = finish_pairs(c, own, i, bound, write);
    if (LAYER && differ && begin_at_centers(c, own, of, h))
        differ = finish_pairs(c, own, i, bound, write);
    if (differ) c.marks[i] = UNCERTIFIED;
}

template <bool LAYER, bool STAGED>
void backward(const Call& c, const Own& own, Tile tile, Columns& over, double* range) {
    pairs::Sums along = {};
    Back rows[GROUP] = {};
    for (Index top = tile.first; top < tile.stop; top += c.step) {
        Index at[GROUP];
        int count = 0;
        for (Index i = top; i < at_most(top + c.step, tile.stop); i++) {
            Back& of = rows[count];
            if (!begin_row<LAYER>(c, own, i, count, range, of)) continue;
            auto pull_row =
                LAYER && of.m.high != 0 ? pull<LAYER, LAYER, STAGED> : pull<LAYER, false, STAGED>;
            double* h = own.xhat + 2 * count * c.padded_n();
            pull_row(of, c.n, parameters_of(c), along, count, h, over);
            at[count++] = i;
        }
        finish_means(along, c.n, rows, count);
        for (int r = 0; r < count && c.y.data; r++)
            write_row<LAYER>(c, own, at[r], rows[r], own.xhat + 2 * r * c.padded_n());
        if (over.at && (over.held += count) > PART - c.step) {
            settle_columns(over, c.n);
            over.held = 0;
        }
    }
}

}  // namespace pairs
}  // namespace
