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
// Bounds, in units of u**2 = 2**-106, after docs/explanation/error-analysis.md, whose steps hold with
// H = 1.45 n + 60 for the sums along a row. A sum of d additions errs by (d + 5) / 2 + (d + 1) / d each: 11.6
// for d = 16 columns of one of 8 lanes, 11.6 n / 8 in all; to add up 8 lanes takes 3 times 6, and low parts of
// terms, 1 / n as a pair and near rows add a constant, 42. Tiles: T of R rows; w: rms(xhat); S: rms(g - m). The largest factors:
//     y: 4 H + 40, on |xhat|; dx: (14.74 H + 16 sqrt(n) + 238) / 3, on |xhat| 3 S: 7.2 n + 5.4 sqrt(n) + 375;
//     dgamma: 4 H + 36 R + 8 T + 370, and on w 1.74 H + 101 sqrt(n) + 67.
// `row_bound` and `sums_bound` are these, rounded up. Near rows leave out the tail, below
// 2**-106 |mean| <= 32 u**2 sqrt(var / n), and round c.low - mean_lo, of at most u (|c| + |mean|): both are within
// the 64 u**2 sqrt(var / n) that the steps allow for a tail.
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
    double square[GROUP], v[GROUP], spread[GROUP],
        excess[GROUP];  // excess: d**2 - 2 var, > 0 for a bad guess
    RowStats at(int r, double center) const {
        return {mean[r], mean_lo[r], mean_tail[r], {rstd[r], rstd_lo[r]}, spread[r], center};
    }
};

// The sums along the rows of a group, each reduced to the lanes of one register.
struct Sums {
    double plain[2][WIDEST][GROUP], product[2][WIDEST][GROUP];
};

// Reduces a sum by halves, as in lanes.h: to one register here, and for all rows at once in
// `total`.
INLINE void reduce(Pairs a, double (*lanes)[WIDEST][GROUP], int r) {
    using One = Pair<Lanes<WIDEST>>;
    One part[P / WIDEST];
    for (int i = 0; i < P / WIDEST; i++) part[i] = {{a.high.v[i]}, {a.low.v[i]}};
    for (int half = P / WIDEST / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] + part[i + half];
    for (int i = 0; i < WIDEST; i++) {
        lanes[0][i][r] = part[0].high.v[0][i];
        lanes[1][i][r] = part[0].low.v[0][i];
    }
}
INLINE Pairs total(const double (*lanes)[WIDEST][GROUP]) {
    Pairs a[WIDEST];
    for (int i = 0; i < WIDEST; i++) a[i] = {load<GROUP>(lanes[0][i]), load<GROUP>(lanes[1][i])};
    for (int half = WIDEST / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] = a[i] + a[i + half];
    return settled(a[0]);
}

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
            if (count < P) c = {first(c.high, count), first(c.low, count)};
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
    for (Index start = 0; start < n; start += DEPTH * P) {
        each_columns<P>(start, at_most(start + DEPTH * P, n), add);
        sum = settled(sum);
        squares = settled(squares);
    }
    reduce(sum, sums.plain, r);
    reduce(squares, sums.product, r);
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

INLINE Pair<double> reciprocal(double n) { return {1 / n, fma(-1 / n, n, 1) / n}; }

NOINLINE inline void finish_statistics(
    const double* k, const Sums& sums, Index n, double eps, Stats& of) {
    Pairs share = broadcast_pair(reciprocal((double)n));
    Pairs d = settled(total(sums.plain) * share);
    Pairs square = settled(total(sums.product) * share);
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
NOINLINE void statistics(const T* const* x, const Call& c, int rows, Stats& of) {
    Index n = c.n;
    double eps = c.eps;
    Sums sums;
    double k[GROUP] = {};
    if (rows < GROUP) memset(&sums, 0, sizeof sums);
    auto measure_row = [&](int r) {
        (LAYER && k[r] != 0 ? measure<LAYER, LAYER, T> : measure<LAYER, false, T>)(x[r], n, k[r],
            sums, r);
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

// Whether squares of a row leave the range of pairs. A mean square of 0 is exact in constant rows
// only; else it underflowed.
template <class T>
INLINE bool is_out_of_range(const Stats& of, int r, const T* x, Index n, bool layer) {
    double square = of.square[r];
    double v = of.v[r];
    if (!(v >= SMALLEST * SMALLEST && v <= LARGEST * LARGEST && square <= LARGEST * LARGEST))
        return true;
    if (square >= SMALLEST * SMALLEST) return false;
    double same = layer ? number(x) : 0;
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
    using I = Register<int64_t, WIDEST>;
    // Sizes order like their bits.
    I is_there = {};
    I least = I{} + INT64_MAX;
    I most = {};
    each_columns<P>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        N v = load<P>(x + j, count);
        for (auto& lanes : v.v) {
            I size = (I)lanes & INT64_MAX;
            I other = size == 0 ? I{} + INT64_MAX : size;
            is_there |= lanes == mean;
            least = other < least ? other : least;
            most = size > most ? size : most;
        }
    });
    if (!any_of<WIDEST>(is_there, -1)) return false;
    double smallest = __builtin_inf();
    double largest = 0;
    for (int k = 0; k < WIDEST; k++) {
        double low = ((Register<double, WIDEST>)least)[k];
        double high = ((Register<double, WIDEST>)most)[k];
        smallest = low < smallest ? low : smallest;
        largest = high > largest ? high : largest;
    }
    Sums sums = {};
    measure<true, true>(x, n, mean, sums, 0);
    Pairs sum = total(sums.plain);
    return magnitude(sum.high.v[0][0] + sum.low.v[0][0]) +
               (double)n * (double)n * 0x1p-100 * largest <
           smallest / last_bits;
}

// Sets the center of a layer norm's row, if it has one.
template <class T> bool find_center(const T* x, const Call& c, RowStats& of) {
    if (!is_mean(x, c.n, of.mean, LAST_BITS[c.x.type])) return false;
    of.center = of.mean;
    of.mean_lo = of.mean_tail = 0;
    return true;
}

// Constants of a row: -mean, -mean_lo, -mean_tail, rstd, its spread and its center.
struct Row {
    N mean, mean_lo, mean_tail;
    Pairs rstd;
    N spread, center;
    INLINE explicit Row(const RowStats& of)
        : mean(broadcast<P>(-of.mean)),
          mean_lo(broadcast<P>(-of.mean_lo)),
          mean_tail(broadcast<P>(-of.mean_tail)),
          rstd(broadcast_pair(of.rstd)),
          spread(broadcast<P>(of.spread)),
          center(broadcast<P>(of.center)) {}
};

// NO_TAIL: for rows near zero.
template <bool LAYER, bool NO_TAIL = false> INLINE Pairs xhat_of(N v, const Row& row) {
    if (!LAYER) return row.rstd * v;
    Pairs c = two_sum(v, row.mean);
    if (NO_TAIL) return Pairs{c.high, c.low + row.mean_lo} * row.rstd;
    // fast_two_sum holds: |mean_lo| is at most half an ulp of the mean, and c is 0 or no smaller.
    Pairs d = fast_two_sum(c.high, row.mean_lo);
    return Pairs{d.high, (d.low + c.low) + row.mean_tail} * row.rstd;
}

// Gamma, and beta or null.
struct Parameters {
    const double *gamma, *beta;
};

// The error term that an element shares with its row, 0 at the center. Layer norm: the rounding of
// the mean. RMS norm: low parts that underflow, less than 2**-100 of the row.
template <bool LAYER> INLINE N shared(N size, N v, N center) {
    N part = LAYER ? size : broadcast<P>(0x1p-100) * size;
    for (int i = 0; i < N::REGISTERS_OF; i++)
        part.v[i] = (Register<double, WIDEST>)((Register<int64_t, WIDEST>)part.v[i] &
                                               (v.v[i] != center.v[i]));
    return part;
}

// y of a row into a sink of finish.h. The error bound of an element is a multiple of its size.
template <bool LAYER, bool NO_TAIL = false, class Out>
NOINLINE Out write_y(
    const double* x, Out out, Index n, const RowStats& of, const Parameters& parameters) {
    constexpr bool STAGED = Out::STAGED;
    Row row(of);
    each_columns<P>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        N v = load<P>(x + j, count);
        N u = load<P>(parameters.gamma + j);
        Pairs h = xhat_of<LAYER, NO_TAIL>(v, row);
        out(j, count, h * u + load<P>(parameters.beta + j),
            STAGED ? magnitude(u) * (magnitude(h.high) + shared<LAYER>(row.spread, v, row.center))
                   : u);
    });
    return out;
}

// ---- backward ----

// A row of the backward: its statistics, m, the means A (plain) and B (slope) of rows.h; `size` >=
// 2 |m| + 3 rms(g - m).
struct Back {
    const double *dy, *x;
    RowStats stats;
    Pair<double> m, plain, slope;
    double size;
};

// Sums over rows, vectors `apart` float64 apart: dgamma, its low part, dbeta, its low part and,
// with `sizes`, the sums of |dy| (|xhat| + w) and |dy|. Null if they are not wanted. `held` counts
// the rows since they were settled.
struct Columns {
    double* at;
    Index apart;
    bool sizes;
    Index held = 0;
};

INLINE Pairs g_of(N d, Index j, const Parameters& parameters) {
    return two_product(d, load<P>(parameters.gamma + j));
}

// m: the smallest of the sampled g; 0 if they differ in sign.
NOINLINE inline Pair<double> pivot(const double* dy, const Parameters& parameters, Index n) {
    Index s = n / 8 > 1 ? n / 8 : 1;
    auto g_at = [&](Index j) { return two_product(number(dy + j), parameters.gamma[j]); };
    Pair<double> m = g_at(0);
    double least = m.high;
    double most = m.high;
    for (Index j = s; j < n; j += s) {
        Pair<double> g = g_at(j);
        least = g.high < least ? g.high : least;
        most = g.high > most ? g.high : most;
        m = magnitude(g.high) < magnitude(m.high) ? g : m;
    }
    return least < 0 && most > 0 ? Pair<double>{0, 0} : m;
}

// Pass 1: writes xhat to h and the sums along the row to row r of `along`, and adds to the sums
// over rows.
template <bool LAYER, bool SHIFT, bool STAGED>
NOINLINE void pull(Back& of, Index n, const Parameters& parameters, Sums& along, int r,
    double* __restrict h, Columns over) {
    Row row(of.stats);
    Pairs a = {};
    Pairs b = {};
    Pairs m = broadcast_pair(-of.m);
    N squares = {};
    double* __restrict sums = over.at;
    Index apart = over.apart;
    const double* dy = of.dy;
    const double* x = of.x;
    auto add = [&](Index j, Index count) INLINE_LAMBDA {
        N d = load<P>(dy + j, count);
        N v = load<P>(x + j, count);
        Pairs xhat = xhat_of<LAYER>(v, row);
        Pairs g = g_of(d, j, parameters);
        store_pair(h + j, apart, xhat);
        if (SHIFT) g = g + m;
        if (SHIFT && count < P) g = {first(g.high, count), first(g.low, count)};
        if (LAYER) a = a + g;
        b = b + g * xhat;
        if (STAGED) squares = fma(g.high, g.high, squares);
        if (!sums) return;
        store_pair(sums + j, apart, load_pair(sums + j, apart) + xhat * d);
        store_pair(sums + 2 * apart + j, apart, load_pair(sums + 2 * apart + j, apart) + d);
        if (STAGED && over.sizes) {
            double* of_dgamma = sums + 4 * apart + j;
            double* of_dbeta = of_dgamma + apart;
            N part = magnitude(xhat.high) + shared<LAYER>(row.spread, v, row.center);
            store(of_dgamma, load<P>(of_dgamma) + magnitude(d) * part);
            store(of_dbeta, load<P>(of_dbeta) + magnitude(d));
        }
    };
    for (Index start = 0; start < n; start += DEPTH * P) {
        each_columns<P>(start, at_most(start + DEPTH * P, n), add);
        a = settled(a);
        b = settled(b);
    }
    reduce(a, along.plain, r);
    reduce(b, along.product, r);
    of.size = STAGED ? total(squares) : 0;
}

// Sets the means of `count` rows, and `size`, at least 2 |m| + 3 rms(g - m), and 0 only where all g
// - m are 0. They are if their computed squares add up to 0, since g is an exact product.
NOINLINE inline void finish_means(const Sums& along, Index n, Back* rows, int count) {
    Pairs share = broadcast_pair(reciprocal((double)n));
    double means[4][GROUP];
    store_pair(means[0], GROUP, settled(total(along.plain) * share));
    store_pair(means[2], GROUP, settled(total(along.product) * share));
    for (int r = 0; r < count; r++) {
        Back& of = rows[r];
        of.plain = {means[0][r], means[1][r]};
        of.slope = {means[2][r], means[3][r]};
        of.size =
            of.size == 0 ? 0 : 2 * magnitude(of.m.high) + 3.1 * std::sqrt(of.size / (double)n);
    }
}

// Renews the pairs of the sums over rows, whose low parts grow as those along rows.
NOINLINE inline void settle_columns(Columns over, Index n) {
    for (Index j = 0; j < n; j += P)
        for (int which = 0; which < 4; which += 2) {
            double* at = over.at + which * over.apart + j;
            store_pair(at, over.apart, settled(load_pair(at, over.apart)));
        }
}

template <bool LAYER, bool SHIFT, class Out>
NOINLINE Out write_dx(
    const Back& of, Out out, Index n, const Parameters& parameters, const double* h, Index apart) {
    constexpr bool STAGED = Out::STAGED;
    Pairs m = broadcast_pair(-of.m);
    Pairs plain = broadcast_pair(-of.plain);
    Pairs slope = broadcast_pair(-of.slope);
    Pairs rstd = broadcast_pair(of.stats.rstd);
    N size = broadcast<P>(of.size);
    N center = broadcast<P>(of.stats.center);
    const double* dy = of.dy;
    const double* x = of.x;
    each_columns<P>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        N d = load<P>(dy + j, count);
        Pairs g = g_of(d, j, parameters);
        Pairs xhat = load_pair(h + j, apart);
        if (SHIFT) g = g + m;
        N part = magnitude(g.high);
        if (LAYER) g = g + plain;
        N v = STAGED ? load<P>(x + j, count) : d;
        out(j, count, (g + xhat * slope) * rstd,
            STAGED
                ? part + (shared<LAYER>(broadcast<P>(1.0), v, center) + magnitude(xhat.high)) * size
                : d);
    });
    return out;
}

}  // namespace pairs
}  // namespace
