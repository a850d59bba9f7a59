// Tiles of rows in double-double: float64 data, and the rows that float64 leaves uncertified with
// rounding="nearest".
#pragma once
#include <initializer_list>

#include "tiles.h"

namespace {
namespace pairs {

// ---- both directions ----

// True if a row has a NaN or an infinity, which spoils all of it.
bool is_spoiled(const double* x, Index n) { return !(range_of(x, n).most < __builtin_inf()); }

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

// Writes a row of results, rounded; returns whether all are certain. write(sink) computes them.
template <class Write>
bool round_row(const Call& c, const Own& own, Index i, double bound, Write write) {
    if (!c.nearest && !c.plan.staged) {
        write(ToFloat64{(double*)row_of(c.y, i)});
        return true;
    }
    if (c.nearest && c.y.type == F64 && !(c.backward && c.plus.data) &&
        !any_of<WIDEST>(write(ToCertain{(double*)row_of(c.y, i), bound}).uncertified, -1))
        return true;
    write(ToPairs{own.high, own.low, own.size});
    return round_row_of_pairs(c, own, i, bound);
}

// ---- forward ----

// Writes y of a row; returns whether it is certain.
template <bool LAYER>
bool write_row_of_y(const Call& c, const Own& own, Index i, const double* x, RowStats of) {
    Columns columns = columns_of<double>(c, 1);
    // Near rows, n mean**2 <= 2**10 var, do without the tail: 9 % of the forward's time.
    double M = of.mean * of.rstd.high;
    bool no_tail = M * M * (double)c.n <= 0x1p10 * of.spread * of.spread;
    auto write = [&](auto sink) {
        return no_tail ? write_y<LAYER, true>(x, of, columns, sink)
                       : write_y<LAYER>(x, of, columns, sink);
    };
    double bound = row_bound(c.n);
    // Float64 left rows of narrow types uncertified: mostly those that have a center.
    bool narrow = c.x.type != F64;
    if (LAYER && c.nearest && narrow) find_center(x, c.n, c.x.type, of);
    if (round_row(c, own, i, bound, write)) return true;
    return LAYER && !narrow && find_center(x, c.n, F64, of) && round_row(c, own, i, bound, write);
}

// Writes the statistics of row r of a group. Returns whether pairs can do the row; else it is
// marked for integers, or is NaN.
template <bool LAYER>
bool keep_statistics(const Call& c, const Own& own, const Group<double, Stats>& group, int r) {
    const Stats& of = group.of;
    Index i = group.top + r;
    put(c.mean, i, of.mean[r]);
    put(c.mean_lo, i, of.mean_lo[r]);
    put(c.mean_tail, i, of.mean_tail[r]);
    put(c.rstd, i, of.rstd[r]);
    put(c.rstd_lo, i, of.rstd_lo[r]);
    put(c.spread, i, of.spread[r]);
    c.marks[i] = 0;
    if (!is_out_of_range<LAYER>(of, r, group.x[r], c.n)) return true;
    if (is_spoiled(group.x[r], c.n)) {
        spoil_row(c, own, i);
        return false;
    }
    c.marks[i] = UNCERTIFIED;
    if (c.rstd_lo) {
        c.rstd[i] = 0;
        c.rstd_lo[i] = __builtin_nan("");
    }
    return false;
}

template <bool LAYER> void forward(const Call& c, const Own& own, Tile tile) {
    auto measure = [&](Group<double, Stats>& group) {
        statistics<LAYER>(group.x, group.count, c.n, c.eps, group.of);
    };
    auto write = [&](const Group<double, Stats>& group) {
        for (int r = 0; r < group.count; r++) {
            Index i = group.top + r;
            if (!keep_statistics<LAYER>(c, own, group, r)) continue;
            RowStats of = group.of.at(r, LAYER ? __builtin_nan("") : 0);
            if (!write_row_of_y<LAYER>(c, own, i, group.x[r], of)) c.marks[i] = UNCERTIFIED;
        }
    };
    each_group<double, Stats>(c, own, tile, measure, write);
}

// The second rung for a row whose statistics float64 has written; returns whether it is done.
template <bool LAYER> bool row_of_y(const Call& c, const Own& own, Index i) {
    const double* x = row_as<double>(c.x, i, c.n, own.x[0]);
    Stats of;
    statistics<LAYER>(&x, 1, c.n, c.eps, of);
    if (is_out_of_range<LAYER>(of, 0, x, c.n)) {
        if (!is_spoiled(x, c.n)) return false;
        spoil_results(c, own, i);
        return true;
    }
    return write_row_of_y<LAYER>(c, own, i, x, of.at(0, LAYER ? __builtin_nan("") : 0));
}

// ---- backward ----

// The statistics of a row of the backward, from the forward or anew; false if it is out of range.
// Rows with NaN are done like others.
template <bool LAYER> bool find_statistics(const Call& c, Index i, const double* x, RowStats& of) {
    double center = LAYER ? __builtin_nan("") : 0;
    if (c.rstd_lo) {
        of = {0, 0, 0, {c.rstd[i], c.rstd_lo[i]}, c.spread ? c.spread[i] : 0, center};
        if (LAYER) {
            of.mean = c.mean[i];
            of.mean_lo = c.mean_lo[i];
            of.mean_tail = c.mean_tail[i];
        }
        return true;
    }
    Stats stats;
    statistics<LAYER>(&x, 1, c.n, c.eps, stats);
    if (is_spoiled(x, c.n))
        stats.rstd[0] = __builtin_nan("");
    else if (is_out_of_range<LAYER>(stats, 0, x, c.n))
        return false;
    of = stats.at(0, center);
    return true;
}

// Loads row i as row r of a group; false if it is out of range.
template <bool LAYER> bool begin_row(const Call& c, const Own& own, Index i, int r, Back& of) {
    Index apart = r * padded(c.n);
    of.dy = row_as<double>(c.dy, i, c.n, own.dy[0] + apart);
    of.of_dy = range_of(of.dy, c.n);
    if (of.of_dy.least < SMALLEST || !(of.of_dy.most <= LARGEST)) return false;
    of.x = row_as<double>(c.x, i, c.n, own.x[0] + apart);
    of.xhat = own.xhat + 2 * apart;
    of.pivot = LAYER ? pivot_of(of.dy, columns_of<double>(c, 1)) : Pair<double>{0, 0};
    return find_statistics<LAYER>(c, i, of.x, of.stats);
}

// Pass 1 of row r of a group.
template <bool LAYER, bool SIZED>
void pull_row(const Call& c, Back& of, Sums& along, int r, const OverRows& over) {
    bool shift = LAYER && of.pivot.high != 0;
    auto pull_row = shift ? pull<LAYER, LAYER, SIZED> : pull<LAYER, false, SIZED>;
    pull_row(of, columns_of<double>(c, 1), along, r, over);
}

// If x and g of a row have centers, begins it again about them. Then dx is 0, without error, where
// both are.
inline bool begin_at_centers(const Call& c, const Own& own, Back& of) {
    double* g = own.high;
    bool exact = true;
    for (Index j = 0; j < c.n; j++) {
        Pair<double> product = two_product(number(of.dy + j), c.scratch.gamma[j]);
        g[j] = product.high;
        exact &= product.low == 0;
    }
    double mean = of.pivot.high + of.mean_g.high;
    if (!exact || !is_mean(g, c.n, mean, LAST_BITS[F64]) ||
        !find_center(of.x, c.n, c.x.type, of.stats))
        return false;
    Sums along = {};
    of.pivot = {mean, 0};
    pull<true, true, true>(of, columns_of<double>(c, 1), along, 0, {nullptr, padded(c.n), false});
    finish_means(along, c.n, &of, 1);
    of.mean_g = {0, 0};
    return true;
}

// Writes dx of a row; returns whether it is certain.
template <bool LAYER> bool write_row_of_dx(const Call& c, const Own& own, Index i, Back& of) {
    auto write = [&](auto sink) {
        using Sink = decltype(sink);
        bool shift = LAYER && of.pivot.high != 0;
        auto how = shift ? write_dx<LAYER, LAYER, Sink> : write_dx<LAYER, false, Sink>;
        return how(of, columns_of<double>(c, 1), padded(c.n), sink);
    };
    if (of.stats.rstd.high != of.stats.rstd.high) {
        spoil_results(c, own, i);
        return true;
    }
    double bound = row_bound(c.n) * of.stats.rstd.high;
    if (round_row(c, own, i, bound, write)) return true;
    return LAYER && begin_at_centers(c, own, of) && round_row(c, own, i, bound, write);
}

// Adds the range of |dy| of a row to that of a tile: the largest, and the reciprocal of the last
// bit of the smallest.
inline void add_range(const Call& c, Range of_dy, double* of_tile) {
    if (of_dy.most == 0) return;
    of_tile[0] = larger(of_tile[0], of_dy.most);
    of_tile[1] = larger(of_tile[1], LAST_BITS[c.dy.type] / of_dy.least);
}

template <bool LAYER, bool SIZED>
void backward(const Call& c, const Own& own, Tile tile, OverRows& over, double* range) {
    Sums along = {};
    Back rows[GROUP] = {};
    for (Index top = tile.first; top < tile.stop; top += c.plan.together) {
        Index at[GROUP];
        int count = 0;
        for (Index i = top; i < at_most(top + c.plan.together, tile.stop); i++) {
            if (c.marks[i]) continue;
            if (begin_row<LAYER>(c, own, i, count, rows[count])) {
                if (range) add_range(c, rows[count].of_dy, range);
                pull_row<LAYER, SIZED>(c, rows[count], along, count, over);
                at[count++] = i;
            } else
                c.marks[i] = UNCERTIFIED | UNSUMMED;
        }
        finish_means(along, c.n, rows, count);
        for (int r = 0; r < count && c.y.data; r++)
            if (!write_row_of_dx<LAYER>(c, own, at[r], rows[r])) c.marks[at[r]] = UNCERTIFIED;
        over.held += count;
        if (over.at && over.held > PART - c.plan.together) {
            settle_columns(over, c.n);
            over.held = 0;
        }
    }
}

// The second rung for a row: writes dx, and xhat to own.xhat. Returns whether it is done; `of` has
// no dy if it is out of range.
template <bool LAYER> bool row_of_dx(const Call& c, const Own& own, Index i, Back& of) {
    Sums along = {};
    if (!begin_row<LAYER>(c, own, i, 0, of)) {
        of.dy = nullptr;
        return false;
    }
    pull_row<LAYER, true>(c, of, along, 0, {nullptr, padded(c.n), true});
    finish_means(along, c.n, &of, 1);
    return !c.y.data || write_row_of_dx<LAYER>(c, own, i, of);
}

// Adds the terms of a row to the float64 sums of a tile, compensated.
inline void add_row_to_sums(const Call& c, const Back& of, double* sums) {
    Index p = padded(c.n);
    auto add = [&](N part, double* to) {
        for (int i = 0; i < N::REGISTERS_OF; i++)
            merge_columns((double*)&part.v[i], to + i * WIDEST, to + p + i * WIDEST, WIDEST);
    };
    each_columns<P>(0, c.n, [&](Index j, Index count) {
        N dy = load<P>(of.dy + j, count);
        Pairs term = load_pair(of.xhat + j, p) * dy;
        add(term.high, sums + j);
        add(term.low, sums + j);
        add(dy, sums + 2 * p + j);
        // Bounds of the size of float64's, far above those of pairs.
        double* dy_squares = sums + 4 * p + j;
        double* xhat_squares = dy_squares + p;
        store(dy_squares, fma(dy, dy, load<P>(dy_squares)));
        store(xhat_squares, load<P>(xhat_squares) + broadcast<P>(1.0));
    });
}

}  // namespace pairs
}  // namespace
