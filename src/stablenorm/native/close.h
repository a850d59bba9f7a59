// Open columns: sums over rows that float64 leaves uncertified. All threads close them in one pass
// over the rows, which sums them again, exactly but for the rounding of terms, and with each row's
// own error instead of the worst of all rows. A second pass, with statistics in pairs, does those
// that are left.
#pragma once
#include "pair_tiles.h"

namespace {

// Eight sums as pairs; 1.02 times `error` bounds their errors.
struct Closely {
    using N = Lanes<8>;
    static constexpr Index SIZE = 24;  // float64
    Pair<N> sum = {};
    N error = {};

    INLINE void add(Pair<N> term) {
        Pair<N> next = two_sum(sum.high, term.high);
        Pair<N> rest = two_sum(sum.low, next.low);
        Pair<N> last = two_sum(rest.high, term.low);
        sum = {next.high, last.high};
        error = error + (magnitude(rest.low) + magnitude(last.low));
    }
    INLINE void load_from(const double* at) {
        sum = {load<8>(at), load<8>(at + 8)};
        error = load<8>(at + 16);
    }
    INLINE void store_to(double* at) const {
        // The low part may be the larger after a cancellation.
        Pair<N> settled = two_sum(sum.high, sum.low);
        store(at, settled.high);
        store(at + 8, settled.low);
        store(at + 16, error);
    }
};

// Calls f(sum, columns, how many, their place in the sums of a tile) for eight open columns at a
// time: of dgamma (0), then of dbeta (1).
template <class F> INLINE void each_eight(const Call& c, F f) {
    Index place = 0;
    for (int sum : {DGAMMA, DBETA})
        for (Index k = 0; k < c.open.count[sum]; k += 8, place += Closely::SIZE)
            f(sum, c.open.columns[sum] + k, at_most(c.open.count[sum] - k, 8), place);
}

template <class T> INLINE Lanes<8> gather(const T* row, const Index* columns, Index count) {
    T some[8] = {};
    for (Index k = 0; k < count; k++) some[k] = read<T>(row + columns[k]);
    return load<8>(some);
}

// Terms of dgamma by the statistics of the forward, in float64, or by new ones, in pairs.
template <bool LAYER> struct FloatTerms {
    const Call& c;
    double chain = chain_of(c.n, LANES, RUN);
    template <class T> void begin(const T* const*, Index, Index) {}
    INLINE void add(Closely& of, Lanes<8> d, Lanes<8> v, Index i, Index) const {
        double rstd = c.rstd[i];
        double mean = LAYER ? c.mean[i] : 0;
        double mean_lo = LAYER ? c.mean_lo[i] : 0;
        Errors errors = errors_again<LAYER>(c.spread[i], rstd, c.eps, 0, chain);
        Lanes<8> xhat =
            fma(v - broadcast<8>(mean), broadcast<8>(rstd), broadcast<8>(-mean_lo * rstd));
        of.add(two_product(d, xhat));
        Lanes<8> error = fma(broadcast<8>(errors.a), magnitude(xhat), broadcast<8>(errors.b));
        of.error = fma(magnitude(d), error, of.error);
    }
};
template <bool LAYER> struct PairTerms {
    const Call& c;
    pairs::RowStats rows[GROUP] = {};
    template <class T> void begin(const T* const* x, Index, Index count) {
        pairs::Stats of;
        pairs::statistics<LAYER>(x, (int)count, c.n, c.eps, of);
        for (int r = 0; r < count; r++) {
            rows[r] = of.at(r, LAYER ? __builtin_nan("") : 0);
            bool is_there = false;
            for (Index k = 0; k < c.open.count[0]; k++)
                is_there |= number(x[r] + c.open.columns[0][k]) == rows[r].mean;
            if (LAYER && is_there) pairs::find_center(x[r], c.n, c.x.type, rows[r]);
        }
    }
    INLINE void add(Closely& of, Lanes<8> d, Lanes<8> v, Index, Index r) const {
        pairs::ElementOfXhat<LAYER> element(rows[r]);
        pairs::Pairs xhat = element.of(v);
        of.add(xhat * d);
        Lanes<8> size = element.size(v, xhat);
        of.error = of.error + broadcast<8>(sums_bound(c.n, 0, 0)) * (magnitude(d) * size);
    }
};

// Adds the terms of some plain rows to the sums of a tile.
template <class Terms, class T> void close_rows(const Call& c, Tile rows, double* sums) {
    Terms terms = {c};
    for (Index top = rows.first; top < rows.stop; top += GROUP) {
        Index count = at_most(rows.stop - top, GROUP);
        const T *dy[GROUP], *x[GROUP];
        for (Index r = 0; r < count; r++) {
            dy[r] = (const T*)row_of(c.dy, top + r);
            x[r] = (const T*)row_of(c.x, top + r);
        }
        terms.begin(x, top, count);
        each_eight(c, [&](int sum, const Index* columns, Index together, Index place) {
            Lanes<8> d[GROUP], v[GROUP];
            for (Index r = 0; r < count; r++) {
                d[r] = gather(dy[r], columns, together);
                if (sum == DGAMMA) v[r] = gather(x[r], columns, together);
            }
            Closely of;
            of.load_from(sums + place);
            for (Index r = 0; r < count; r++)
                if (sum == DGAMMA)
                    terms.add(of, d[r], v[r], top + r, r);
                else
                    of.add({d[r], {}});
            of.store_to(sums + place);
        });
    }
}

// Sums the open columns of a tile.
void close_tile(const Call& c, Index number, int thread) {
    double* sums = c.scratch.sums + c.sums_per_tile() * number;
    each_eight(c, [&](int, const Index*, Index, Index place) { Closely().store_to(sums + place); });
    of_type(c.x.type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        if constexpr (sizeof(T) < 8) {
            auto add = c.open.in_pairs ? c.rms ? close_rows<PairTerms<false>, T>
                                               : close_rows<PairTerms<true>, T>
                       : c.rms         ? close_rows<FloatTerms<false>, T>
                                       : close_rows<FloatTerms<true>, T>;
            each_strip(c, own_of(c, thread), tile_of(c, number),
                [&](const Call& plain, Tile strip) { add(plain, strip, sums); });
        }
    });
}

// Adds up the tiles' sums of the open columns, and writes those that this certifies; dbeta where
// its sum is exact as a pair, since sums of few narrow numbers mostly are, and are often midpoints.
// Others of dbeta are left to integers.
void close_columns(const Call& c) {
    each_eight(c, [&](int sum, const Index* columns, Index count, Index place) {
        Closely all;
        for (Index tile = 0; tile < c.plan.tiles; tile++) {
            Closely of;
            of.load_from(c.scratch.sums + c.sums_per_tile() * tile + place);
            all.add(of.sum);
            all.error = all.error + of.error;
        }
        double words[Closely::SIZE];
        const double* error = words + 16;
        all.store_to(words);
        of_type(c.sums_type[sum], [&](auto* kind) {
            using To = std::remove_pointer_t<decltype(kind)>;
            To results[8];
            uint8_t differ[8];
            PairVectors sums = {words, words + 8, sum == DGAMMA ? error : nullptr};
            round_pairs(results, sums, 1.02, 8, differ);
            for (Index k = 0; k < count; k++) {
                uint8_t& mark = c.uncertified[sum][columns[k]];
                if (sum == DBETA ? error[k] == 0
                                 : !differ[k] && error[k] < __builtin_inf() &&
                                       magnitude(words[k]) < __builtin_inf()) {
                    write((To*)c.sums_out[sum] + columns[k], results[k]);
                    mark = 0;
                } else if (sum == DBETA) {
                    mark = UNCERTIFIED;
                }
            }
        });
    });
}

}  // namespace
