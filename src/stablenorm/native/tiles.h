// Loops over the rows of a tile: what float64 and pairs share.
#pragma once
#include "columns.h"
#include "strips.h"

namespace {

Own own_of(const Call& c, int thread) {
    Arena arena{c.scratch.own + c.scratch.own_size * thread, 0};
    return Own(c, arena);
}

Tile tile_of(const Call& c, Index number) {
    Index first = number * c.plan.tile_rows;
    return {first, at_most(first + c.plan.tile_rows, c.rows)};
}

// The columns of a call, and the distance of prefetches where `together` rows of T are done at
// once.
template <class T> Columns columns_of(const Call& c, Index together) {
    Index least = LEAST_AHEAD / (Index)sizeof(T);
    Index distance = 2 * together * c.n;
    Index ahead = !c.plan.ahead ? 0 : distance > least ? distance : least;
    return {c.scratch.gamma, c.scratch.beta, c.scratch.sizes, c.n, ahead};
}

INLINE void put(double* words, Index i, double v) {
    if (words) words[i] = v;
}

// A group of rows of the forward: the first, how many, their x and their statistics.
template <class T, class Stats> struct Group {
    Index top;
    int count;
    const T* x[GROUP];
    Stats of;
};

// Calls measure(group) and then write(group) for the rows of a tile, c.plan.together at a time.
// Rows of up to EARLY columns measure the next group before they write this one.
template <class T, class Stats, class Measure, class Write>
INLINE void each_group(const Call& c, const Own& own, Tile tile, Measure measure, Write write) {
    Group<T, Stats> groups[2];
    auto begin = [&](Index top, int place) {
        Group<T, Stats>& group = groups[place];
        group.top = top;
        group.count = (int)at_most(tile.stop - top, c.plan.together);
        for (int r = 0; r < group.count; r++) {
            if (c.source.data) add_residual(c, top + r);
            group.x[r] = row_as<T>(c.x, top + r, c.n, own.x[place] + r * padded(c.n));
        }
        measure(group);
    };
    bool early = c.n <= EARLY;
    if (early) begin(tile.first, 0);
    int now = 0;
    for (Index top = tile.first; top < tile.stop; top += c.plan.together, now = early - now) {
        if (!early)
            begin(top, now);
        else if (top + c.plan.together < tile.stop)
            begin(top + c.plan.together, 1 - now);
        write(groups[now]);
    }
}

}  // namespace
