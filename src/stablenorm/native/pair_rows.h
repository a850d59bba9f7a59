// The equations of rows.h in double-double: for float64, its mixtures, and rounding="nearest".
//
// Functions have the names and the order of rows.h, but not its code: float64 lanes fold mean_lo *
// rstd and the slope into constants, which would cost pairs their digits, and keep two rows in
// registers, for which pairs are too large. x - k is exact as a pair for any k; k, and m, are 0
// where the sampled elements differ in sign. The mean is mean + mean_lo + mean_tail, which do not
// overlap: the tail matters for rows whose mean is large beside their spread.
//
// The high part of a sum loses nothing; the low part gathers the rounding errors. As it grows it
// loses digits of its own: `settled` renews the pair every DEPTH columns of a lane.
//
// Pairs have the range of float64: rows whose squares could leave it are marked for integers.
//
// Bounds, in units of u**2 = 2**-106, after docs/explanation/error-analysis.md, whose steps hold
// with H = 1.45 n + 60 for the sums along a row. A sum of d additions errs by (d + 5) / 2 + (d + 1)
// / d each: 11.6 for d = 16 columns of one of 8 lanes, 11.6 n / 8 in all; to add up 8 lanes takes 3
// times 6, and low parts of terms, 1 / n as a pair and near rows add a constant, 42. Tiles: T of R
// rows; w: rms(xhat); S: rms(g - m). The largest factors:
//     y: 4 H + 40, on |xhat|; dx: (14.74 H + 16 sqrt(n) + 238) / 3, on |xhat| 3 S: 7.2 n + 5.4
//         sqrt(n) + 375;
//     dgamma: 4 H + 36 R + 8 T + 370, and on w 1.74 H + 101 sqrt(n) + 67.
// `row_bound` and `sums_bound` are these, rounded up. Near rows leave out the tail, below 2**-106
// |mean| <= 32 u**2 sqrt(var / n), and round c.low - mean_lo, of at most u (|c| + |mean|): both are
// within the 64 u**2 sqrt(var / n) that the steps allow for a tail.
#pragma once
#include "back_rows.h"

namespace {

INLINE double row_bound(Index n) { return (8.0 * (double)n + 1200.0) * 0x1p-106; }
INLINE double sums_bound(Index n, Index tile_rows, Index tiles) {
    return (6.0 * (double)n + 36.0 * (double)tile_rows + 8.0 * (double)tiles + 2400.0) * 0x1p-106;
}

namespace pairs {

constexpr int P = 8;  // lanes
constexpr Index DEPTH = 16;
// Rows that dgamma and dbeta gather between two renewals of their pairs.
constexpr Index PART = 64;

using N = Lanes<P>;
using Pairs = Pair<N>;

INLINE Pairs broadcast_pair(Pair<double> a) { return {broadcast<P>(a.high), broadcast<P>(a.low)}; }
INLINE Pairs load_pair(const double* p, Index apart) { return {load<P>(p), load<P>(p + apart)}; }
INLINE void store_pair(double* p, Index apart, Pairs a) {
    store(p, a.high);
    store(p + apart, a.low);
}
INLINE Pairs first(Pairs a, Index count) { return {first(a.high, count), first(a.low, count)}; }

// The statistics of a row: mean + mean_lo + mean_tail, rstd, and `spread`, at least the root mean
// square of xhat. `center`: the mean, if it is known to be a number of the row itself, exactly:
// elements equal to it have an xhat of 0, without error. NaN, equal to nothing, if it is not known;
// 0 for RMS norm.
struct RowStats {
    double mean = 0;
    double mean_lo = 0;
    double mean_tail = 0;
    Pair<double> rstd = {};
    double spread = 0;
    double center = __builtin_nan("");
};
struct Stats {
    double mean[GROUP], mean_lo[GROUP], mean_tail[GROUP], rstd[GROUP], rstd_lo[GROUP];
    double square[GROUP], v[GROUP], spread[GROUP];
    double excess[GROUP];  // d**2 - 2 var, > 0 for a bad guess
    RowStats at(int r, double center) const {
        return {mean[r], mean_lo[r], mean_tail[r], {rstd[r], rstd_lo[r]}, spread[r], center};
    }
};

// ---- sums along rows ----

// The sums of columns, `settled` every DEPTH columns of a lane: add(j, count) adds to all of them.
template <class Add, class... Sums> INLINE void add_columns(Index n, Add add, Sums&... sums) {
    for (Index start = 0; start < n; start += DEPTH * P) {
        each_columns<P>(start, at_most(start + DEPTH * P, n), add);
        ((sums = settled(sums)), ...);
    }
}

// Two sums along each row of a group: the forward's moments, or mean(g - m) and the slope. `put`
// sets those of a row; `total` adds up their lanes by halves, as in lanes.h, for all rows of the
// group at once, a row in each lane.
struct Sums {
    double lanes[2][2][P][GROUP];  // which sum, high or low
    INLINE void put(int sum, int r, Pairs a) {
        for (int i = 0; i < P; i++) {
            lanes[sum][0][i][r] = a.high.v[i / WIDEST][i % WIDEST];
            lanes[sum][1][i][r] = a.low.v[i / WIDEST][i % WIDEST];
        }
    }
    INLINE Pairs total(int sum) const {
        const auto& of = lanes[sum];
        Pairs a[P];
        for (int i = 0; i < P; i++) a[i] = {load<GROUP>(of[0][i]), load<GROUP>(of[1][i])};
        for (int half = P / 2; half; half /= 2)
            for (int i = 0; i < half; i++) a[i] = a[i] + a[i + half];
        return settled(a[0]);
    }
    // The means of n columns.
    INLINE Pairs mean(int sum, Index n) const {
        double share = 1 / (double)n;
        Pair<double> reciprocal = {share, fma(-share, (double)n, 1) / (double)n};
        return settled(total(sum) * broadcast_pair(reciprocal));
    }
};

// ---- forward ----

// Sums of x - k and of its square; SHIFT: k is not 0.
template <bool LAYER, bool SHIFT, class T>
NOINLINE void measure(const T* x, Index n, double guess, Sums& sums, int r) {
    N k = broadcast<P>(-guess);
    Pairs sum = {};
    Pairs squares = {};
    auto add = [&](Index j, Index count) INLINE_LAMBDA {
        N v = load<P>(x + j, count);
        if constexpr (SHIFT) {
            Pairs c = two_sum(v, k);
            if (count < P) c = first(c, count);
            sum = sum + c;
            squares = squares + square(c);
        } else {
            if (LAYER) sum = sum + v;
            // The square of a narrow number is exact in float64.
            if constexpr (sizeof(T) < 8)
                squares = squares + v * v;
            else
                squares = squares + two_product(v, v);
        }
    };
    add_columns(n, add, sum, squares);
    sums.put(0, r, sum);
    sums.put(1, r, squares);
}

template <class T> INLINE double guess_of(const T* x, Index n) {
    double least = number(x);
    double most = least;
    double sum = 0;
    for (int i = 0; i < 8; i++) {
        double v = number(x + i * (n / 8));
        least = v < least ? v : least;
        most = v > most ? v : most;
        sum += v;
    }
    return least < 0 && most > 0 ? 0 : sum * 0.125;
}

NOINLINE inline void finish_statistics(
    const double* k, const Sums& sums, Index n, double eps, Stats& of) {
    Pairs d = sums.mean(0, n);
    Pairs square = sums.mean(1, n);
    Pairs mean = two_sum(load<GROUP>(k), d.high);
    Pairs mean_lo = two_sum(mean.low, d.low);
    Pairs var = settled(square - settled(d * d));
    Pairs v = settled(var + broadcast<GROUP>(eps));
    Pairs rstd = reciprocal_root(v);
    double vars[GROUP];
    store(of.mean, mean.high);
    store(of.mean_lo, mean_lo.high);
    store(of.mean_tail, mean_lo.low);
    store(of.rstd, rstd.high);
    store(of.rstd_lo, rstd.low);
    store(of.square, square.high);
    store(of.v, v.high);
    store(of.excess, d.high * d.high - (var.high + var.high));
    store(vars, var.high);
    for (int r = 0; r < GROUP; r++)
        of.spread[r] = std::sqrt(vars[r] > 0 ? vars[r] : 0) * of.rstd[r] * (1 + 0x1p-48);
}

template <bool LAYER, class T>
NOINLINE void statistics(const T* const* x, int rows, Index n, double eps, Stats& of) {
    Sums sums;
    double k[GROUP] = {};
    if (rows < GROUP) memset(&sums, 0, sizeof sums);
    auto measure_row = [&](int r) {
        auto how = LAYER && k[r] != 0 ? measure<LAYER, LAYER, T> : measure<LAYER, false, T>;
        how(x[r], n, k[r], sums, r);
    };
    for (int r = 0; r < rows; r++) {
        k[r] = LAYER ? pairs::guess_of(x[r], n) : 0;
        measure_row(r);
    }
    finish_statistics(k, sums, n, eps, of);
    bool again = false;
    for (int r = 0; LAYER && r < rows; r++)
        if (__builtin_expect(of.excess[r] > 0, 0)) {
            k[r] = of.mean[r];
            measure_row(r);
            again = true;
        }
    if (again) finish_statistics(k, sums, n, eps, of);  // the others come out as before
}

// ---- the range ----

// The smallest magnitude of a row, zeros aside, and the largest; a NaN is larger than all.
struct Range {
    double least, most;
};
template <class T> NOINLINE Range range_of(const T* x, Index n) {
    using I = Register<int64_t, WIDEST>;
    I least = I{} + INT64_MAX;
    I most = {};
    each_columns<P>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        // Magnitudes order like their bits.
        N sizes = magnitude(load<P>(x + j, count));
        for (auto& lanes : sizes.v) {
            I size = (I)lanes;
            I other = size == 0 ? I{} + INT64_MAX : size;
            least = other < least ? other : least;
            most = size > most ? size : most;
        }
    });
    int64_t low = INT64_MAX;
    int64_t high = 0;
    for (int k = 0; k < WIDEST; k++) {
        low = least[k] < low ? least[k] : low;
        high = most[k] > high ? most[k] : high;
    }
    return {read<double>(&low), read<double>(&high)};
}

// Whether squares of row r leave the range of pairs. A mean square of 0 is exact in constant rows
// only; else it underflowed.
template <bool LAYER, class T>
INLINE bool is_out_of_range(const Stats& of, int r, const T* x, Index n) {
    double square = of.square[r];
    double v = of.v[r];
    if (!(v >= SMALLEST * SMALLEST && v <= LARGEST * LARGEST && square <= LARGEST * LARGEST))
        return true;
    if (square >= SMALLEST * SMALLEST) return false;
    double same = LAYER ? number(x) : 0;
    for (Index j = 0; j < n; j++)
        if (square != 0 || number(x + j) != same) return true;
    return false;
}

// ---- exact cases: elements equal to the mean of their row ----

// Whether `mean` is that of a row, exactly, and one of its numbers. All numbers of the row, and so
// the sum of their distances to it, are multiples of the last bit of the smallest: the sum is 0 if
// its bound is less than that. n**2 2**-100 of the largest number is far above the rounding errors
// of the sum.
template <class T> NOINLINE bool is_mean(const T* x, Index n, double mean, double last_bits) {
    Register<int64_t, WIDEST> is_there = {};
    each_columns<P>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        for (auto& lanes : load<P>(x + j, count).v) is_there |= lanes == mean;
    });
    if (!any_of<WIDEST>(is_there, -1)) return false;
    Range range = range_of(x, n);
    // A row of zeros has no smallest number.
    double last_bit = range.most == 0 ? __builtin_inf() : range.least / last_bits;
    Sums sums = {};
    measure<true, true>(x, n, mean, sums, 0);
    Pairs sum = sums.total(0);
    double distances = magnitude(sum.high.v[0][0] + sum.low.v[0][0]);
    return distances + (double)n * (double)n * 0x1p-100 * range.most < last_bit;
}

// Sets the center of a layer norm's row, if it has one.
template <class T> bool find_center(const T* x, Index n, Type type, RowStats& of) {
    if (!is_mean(x, n, of.mean, LAST_BITS[type])) return false;
    of.center = of.mean;
    of.mean_lo = of.mean_tail = 0;
    return true;
}

// ---- an element, and where it goes ----

// Computes xhat of a register of columns.
template <bool LAYER> struct ElementOfXhat {
    N minus_mean, minus_mean_lo, minus_mean_tail;
    Pairs rstd;
    N spread, center;
    INLINE explicit ElementOfXhat(const RowStats& of)
        : minus_mean(broadcast<P>(-of.mean)),
          minus_mean_lo(broadcast<P>(-of.mean_lo)),
          minus_mean_tail(broadcast<P>(-of.mean_tail)),
          rstd(broadcast_pair(of.rstd)),
          spread(broadcast<P>(of.spread)),
          center(broadcast<P>(of.center)) {}
    // NO_TAIL: for rows near zero.
    template <bool NO_TAIL = false> INLINE Pairs of(N x) const {
        if (!LAYER) return rstd * x;
        Pairs c = two_sum(x, minus_mean);
        if (NO_TAIL) return Pairs{c.high, c.low + minus_mean_lo} * rstd;
        // fast_two_sum holds: |mean_lo| is at most half an ulp of the mean, and c is 0 or no
        // smaller.
        Pairs d = fast_two_sum(c.high, minus_mean_lo);
        return Pairs{d.high, (d.low + c.low) + minus_mean_tail} * rstd;
    }
    // The size of the error of xhat: |xhat| and the term that it shares with its row, 0 at the
    // center. Layer norm: the rounding of the mean. RMS norm: low parts that underflow, less than
    // 2**-100 of the row.
    INLINE N size(N x, Pairs xhat) const {
        return magnitude(xhat.high) + shared(spread, x, center);
    }
    static INLINE N shared(N size, N x, N center) {
        N part = LAYER ? size : broadcast<P>(0x1p-100) * size;
        return part.where([&](int i) INLINE_LAMBDA { return x.v[i] != center.v[i]; });
    }
};

// Sinks of results, each of which errs by at most a bound times its size: rounded to float64 at
// once; kept as pairs; or rounded to float64 with Ziv's rounding test.
struct ToFloat64 {
    static constexpr bool SIZED = false;
    double* at;
    INLINE void operator()(Index j, Index count, Pairs v, N) {
        store(at + j, v.high + v.low, count);
    }
};
struct ToPairs {
    static constexpr bool SIZED = true;
    double *high, *low, *sizes;
    INLINE void operator()(Index j, Index, Pairs v, N size) {
        store(high + j, v.high);
        store(low + j, v.low);
        store(sizes + j, size);
    }
};
// The error of a pair's rounded sum: the first term covers the rounding of the low part and of its
// sum with the bound.
INLINE N error_of(N low, double bound, N size) {
    return fma(broadcast<P>(0x1p-52), magnitude(low), broadcast<P>(bound) * size);
}
struct ToCertain {
    static constexpr bool SIZED = true;
    double* at;
    double bound;
    Register<int64_t, WIDEST> uncertified = {};
    INLINE void operator()(Index j, Index count, Pairs v, N size) {
        N error = error_of(v.low, bound, size);
        N most = v.high + (v.low + error);
        N least = v.high + (v.low - error);
        if (count < P) {
            most = first(most, count);
            least = first(least, count);
        }
        uncertified |= differences(most, least);
        // An exact zero is +0.
        store(at + j, most + broadcast<P>(0.0), count);
    }
};

template <bool LAYER, bool NO_TAIL = false, class Sink>
NOINLINE Sink write_y(const double* xs, const RowStats& of, const Columns& columns, Sink sink) {
    ElementOfXhat<LAYER> element(of);
    each_columns<P>(0, columns.n, [&](Index j, Index count) INLINE_LAMBDA {
        N x = load<P>(xs + j, count);
        N gamma = load<P>(columns.gamma + j);
        Pairs xhat = element.template of<NO_TAIL>(x);
        N size = Sink::SIZED ? magnitude(gamma) * element.size(x, xhat) : gamma;
        sink(j, count, xhat * gamma + load<P>(columns.beta + j), size);
    });
    return sink;
}

// ---- backward ----

// A row of the backward: its statistics, the pivot m, the means A (mean_g) and B (slope) of rows.h;
// `size` >= 2 |m| + 3 rms(g - m). Pass 1 writes xhat as pairs to `xhat`.
struct Back {
    const double *dy, *x;
    double* xhat;
    Range of_dy;
    RowStats stats;
    Pair<double> pivot, mean_g, slope;
    double size;
};

// Sums over rows, vectors `apart` float64 apart: dgamma, its low part, dbeta, its low part and,
// with `sizes`, the sums of |dy| (|xhat| + w) and |dy|. Null if they are not wanted. `held` counts
// the rows since they were settled.
struct OverRows {
    double* at;
    Index apart;
    bool sizes;
    Index held = 0;
};

INLINE Pairs g_of(N dy, Index j, const Columns& columns) {
    return two_product(dy, load<P>(columns.gamma + j));
}

// The smallest of the sampled g; 0 if they differ in sign.
NOINLINE inline Pair<double> pivot_of(const double* dy, const Columns& columns) {
    Index s = columns.n / 8 > 1 ? columns.n / 8 : 1;
    auto g_at = [&](Index j) { return two_product(number(dy + j), columns.gamma[j]); };
    Pair<double> pivot = g_at(0);
    double least = pivot.high;
    double most = pivot.high;
    for (Index j = s; j < columns.n; j += s) {
        Pair<double> g = g_at(j);
        least = g.high < least ? g.high : least;
        most = g.high > most ? g.high : most;
        pivot = magnitude(g.high) < magnitude(pivot.high) ? g : pivot;
    }
    return least < 0 && most > 0 ? Pair<double>{0, 0} : pivot;
}

// Adds the terms of a register of columns to the sums over rows.
template <bool SIZED> INLINE void add_terms(OverRows over, Index j, N dy, Pairs xhat, N size) {
    Index apart = over.apart;
    double* dgamma = over.at + j;
    double* dbeta = dgamma + 2 * apart;
    store_pair(dgamma, apart, load_pair(dgamma, apart) + xhat * dy);
    store_pair(dbeta, apart, load_pair(dbeta, apart) + dy);
    if (!SIZED || !over.sizes) return;
    double* of_dgamma = dgamma + 4 * apart;
    double* of_dbeta = of_dgamma + apart;
    store(of_dgamma, load<P>(of_dgamma) + magnitude(dy) * size);
    store(of_dbeta, load<P>(of_dbeta) + magnitude(dy));
}

// Pass 1: the sums along the row go to row r of `along`, its terms to the sums over rows. SHIFT:
// the pivot is not 0.
template <bool LAYER, bool SHIFT, bool SIZED>
NOINLINE void pull(Back& of, const Columns& columns, Sums& along, int r, const OverRows& to) {
    ElementOfXhat<LAYER> element(of.stats);
    Pairs sum = {};
    Pairs slope = {};
    Pairs pivot = broadcast_pair(-of.pivot);
    N squares = {};
    const double* dys = of.dy;
    const double* xs = of.x;
    double* __restrict xhats = of.xhat;
    const OverRows over = to;
    auto add = [&](Index j, Index count) INLINE_LAMBDA {
        N dy = load<P>(dys + j, count);
        N x = load<P>(xs + j, count);
        Pairs xhat = element.of(x);
        Pairs g = g_of(dy, j, columns);
        store_pair(xhats + j, over.apart, xhat);
        if (SHIFT) g = g + pivot;
        if (SHIFT && count < P) g = first(g, count);
        if (LAYER) sum = sum + g;
        slope = slope + g * xhat;
        if (SIZED) squares = fma(g.high, g.high, squares);
        if (over.at) add_terms<SIZED>(over, j, dy, xhat, SIZED ? element.size(x, xhat) : dy);
    };
    add_columns(columns.n, add, sum, slope);
    along.put(0, r, sum);
    along.put(1, r, slope);
    of.size = SIZED ? total(squares) : 0;
}

// Sets the means of `count` rows, and `size`, at least 2 |m| + 3 rms(g - m), and 0 only where all g
// - m are 0. They are if their computed squares add up to 0, since g is an exact product.
NOINLINE inline void finish_means(const Sums& along, Index n, Back* rows, int count) {
    double means[4][GROUP];
    store_pair(means[0], GROUP, along.mean(0, n));
    store_pair(means[2], GROUP, along.mean(1, n));
    for (int r = 0; r < count; r++) {
        Back& of = rows[r];
        of.mean_g = {means[0][r], means[1][r]};
        of.slope = {means[2][r], means[3][r]};
        of.size =
            of.size == 0 ? 0 : 2 * magnitude(of.pivot.high) + 3.1 * std::sqrt(of.size / (double)n);
    }
}

// Renews the pairs of the sums over rows, whose low parts grow as those along rows.
NOINLINE inline void settle_columns(OverRows over, Index n) {
    for (Index j = 0; j < n; j += P)
        for (double* of : {over.at, over.at + 2 * over.apart})
            store_pair(of + j, over.apart, settled(load_pair(of + j, over.apart)));
}

// Pass 2; xhat, whose low part is `apart` behind, is that of pass 1.
template <bool LAYER, bool SHIFT, class Sink>
NOINLINE Sink write_dx(const Back& of, const Columns& columns, Index apart, Sink sink) {
    Pairs pivot = broadcast_pair(-of.pivot);
    Pairs mean_g = broadcast_pair(-of.mean_g);
    Pairs slope = broadcast_pair(-of.slope);
    Pairs rstd = broadcast_pair(of.stats.rstd);
    N size_of_row = broadcast<P>(of.size);
    N center = broadcast<P>(of.stats.center);
    const double* dys = of.dy;
    const double* xs = of.x;
    const double* xhats = of.xhat;
    each_columns<P>(0, columns.n, [&](Index j, Index count) INLINE_LAMBDA {
        Pairs g = g_of(load<P>(dys + j, count), j, columns);
        Pairs xhat = load_pair(xhats + j, apart);
        if (SHIFT) g = g + pivot;
        N size = magnitude(g.high);
        if (Sink::SIZED) {
            N x = load<P>(xs + j, count);
            N shared = ElementOfXhat<LAYER>::shared(broadcast<P>(1.0), x, center);
            size = size + (shared + magnitude(xhat.high)) * size_of_row;
        }
        if (LAYER) g = g + mean_g;
        sink(j, count, (g + xhat * slope) * rstd, size);
    });
    return sink;
}

}  // namespace pairs
}  // namespace
