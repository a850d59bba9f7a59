// Loops over the rows of a tile: what float64 and pairs share.
#pragma once
#include "columns.h"
#include "strips.h"

namespace {

template <class T> Index columns_ahead(const Call& c, Index rows) {
    Index least = LEAST_AHEAD / (Index)sizeof(T);
    Index distance = 2 * rows * c.n;
    return !c.ahead ? 0 : distance > least ? distance : least;
}

Own own_of(const Call& c, int thread) {
    Arena arena{c.own + c.own_size * thread, 0};
    return Own(c, arena);
}

Tile tile_of(const Call& c, Index number) {
    Index first = number * c.tile_rows;
    Index stop = first + c.tile_rows;
    return {first, stop < c.rows ? stop : c.rows};
}

// Row i of x, where it lies or lifted to `room`, after adding the residual.
template <class T> INLINE const T* x_row(const Call& c, Index i, double* room) {
    if (c.source.data) add_residual(c, i);
    return row_as<T>(c, c.x, i, room);
}

// Measures the rows of a tile, some together, and calls write(first row, how many, their x, their
// statistics).
template <bool LAYER, class T, class StatsType, class Write>
INLINE void measure_tile(const Call& c, const Own& own, Tile tile, Write write) {
    StatsType stats[2];
    const T* x[2][GROUP];
    auto count_from = [&](Index top) { return (int)at_most(tile.stop - top, c.step); };
    auto measure_from = [&](Index top, int which) {
        for (int r = 0; r < count_from(top); r++)
            x[which][r] = x_row<T>(c, top + r, own.x[which] + r * c.padded_n());
        statistics<LAYER>(x[which], c, count_from(top), stats[which]);
    };
    bool early = c.n <= EARLY;
    if (early) measure_from(tile.first, 0);
    int now = 0;
    for (Index top = tile.first; top < tile.stop; top += c.step, now = early - now) {
        if (!early)
            measure_from(top, now);
        else if (top + c.step < tile.stop)
            measure_from(top + c.step, 1 - now);
        write(top, count_from(top), x[now], stats[now]);
    }
}

}  // namespace
