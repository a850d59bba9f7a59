// The plan of a call, by its shape and dtypes alone: tiles, arithmetic, stores.
#pragma once
#include <algorithm>

#include "call.h"

namespace jobs {

// Elements of a tile of the forward: 4 us of work, so that the last tile keeps nobody waiting and
// claiming one (20 ns) costs nothing. Small calls have four tiles, down to 1 us each.
constexpr Index FORWARD_TILE = 1 << 14;
constexpr Index LEAST_FORWARD_TILE = 1 << 12;
constexpr Index FEW_TILES = 4;

// Tiles of the backward have four vectors of sums each: at most 64 tiles, as few as 8 where rows
// are long, keep these within a few MB. Small calls have up to four, if the sums are a small part
// of the work of each.
constexpr Index BACKWARD_TILE = 1 << 16;
constexpr Index LEAST_BACKWARD_TILE = 1 << 13;
constexpr Index LEAST_ROWS = 16;
constexpr Index MOST_TILES = 64;
constexpr Index FEWEST_TILES = 8;
constexpr Index SUMS = 1 << 17;

inline Index rows_together(Index n) { return n > 512 ? 2 : n > 256 ? 4 : GROUP; }

// A forward with non-temporal stores takes rows of this length or more two by two: n = 256, 4.0
// 10^9 elements a second, else 2.9.
constexpr Index LEAST_OF_TWO = 128;

// Results of this size and more use non-temporal stores: (4, 512, 1024) with two threads, 570 to
// 660 us, without up to 1070. Inputs beyond the cache of one core are prefetched.
constexpr Index PAST_CACHES = 4 << 20;
constexpr Index OWN_CACHE = 1 << 20;

inline Index forward_rows(Index rows, Index n, Index together) {
    Index elements = std::min(std::max(rows * n / FEW_TILES, LEAST_FORWARD_TILE), FORWARD_TILE);
    return std::max<Index>(elements / n / together, 1) * together;
}

inline Index backward_rows(Index rows, Index n, bool nearest) {
    Index limit = std::max(std::min(SUMS / n, MOST_TILES), FEWEST_TILES);
    Index few = std::min(
        std::min(rows * n / LEAST_BACKWARD_TILE, rows / (nearest ? 2 * LEAST_ROWS : LEAST_ROWS)),
        FEW_TILES);
    Index tiles = std::min(std::max<Index>(std::max(rows * n / BACKWARD_TILE, few), 1), limit);
    Index size = std::max<Index>((rows + tiles - 1) / tiles, 1);
    return (size + GROUP - 1) / GROUP * GROUP;
}

// Alignment: of rows for non-temporal stores, in bytes.
inline Plan plan_of(const Call& c, Index alignment) {
    Plan plan;
    for (auto array : ARRAYS) plan.strided |= (c.*array).run != 0;
    plan.tile_rows = c.backward ? backward_rows(c.rows, c.n, c.nearest)
                                : forward_rows(c.rows, c.n, plan.strided ? STRIP : GROUP);
    plan.tiles = (c.rows + plan.tile_rows - 1) / plan.tile_rows;
    bool any_float64 = (c.gamma && c.gamma_type == F64) || (c.beta && c.beta_type == F64);
    for (int i = 0; i < 2; i++) any_float64 |= c.sums_out[i] && c.sums_type[i] == F64;
    bool needs_pairs = c.unrounded || (c.rms && c.sums_out[1]) || any_float64;
    bool needs_staging = c.y.type != c.x.type || (c.backward && c.plus.data);
    // Pairs round rare calls correctly, and hold the digits of a float64 result.
    plan.in_pairs =
        c.x.type == F64 || c.y.type == F64 || (c.nearest && (needs_pairs || needs_staging));
    plan.staged = needs_staging || (plan.in_pairs && (c.nearest || c.x.type != F64));
    Index row_bytes = c.n * BYTES[c.x.type];
    Index bytes = c.rows * row_bytes;
    bool aligned = c.y.type == c.x.type && !c.y.run && c.y.stride == row_bytes &&
                   row_bytes % alignment == 0 && (uintptr_t)c.y.data % (uintptr_t)alignment == 0;
    plan.past = aligned && bytes >= PAST_CACHES;
    plan.ahead = bytes >= OWN_CACHE;
    plan.together = plan.past && !c.backward && c.n >= LEAST_OF_TWO ? 2 : rows_together(c.n);
    // Long rows in pairs are done one by one.
    if (plan.in_pairs && c.n > EARLY) plan.together = 1;
    return plan;
}

}  // namespace jobs
