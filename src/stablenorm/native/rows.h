// Layer norm of rows of float16, bfloat16 and float32, in float64: two passes over a row each way.
// simple.h has the same kernel on one page, a column at a time: read it first. In
// docs/explanation, derivation.md derives the equations, and error-analysis.md the errors.
//
// Forward. Pass 1 (`measure`) sums both moments about a guess k of the mean: d = mean(x - k), s =
// mean((x - k)**2). Then mean = k + d and var = s - d**2, for any k. The guess is the mean of 8
// elements, equally spaced (NEAREST: of the first 64 if n >= 256), rounded to float32. The
// difference x - k is exact, unless one is 2**28 times as large as the other.
//
// The subtraction s - d**2 cancels if k is far from the mean. `statistics` allows d**2 <= 2 var, a
// loss of log2(3) bits. If d is larger, it repeats pass 1 with k' = k + d, rounded to float32. Each
// x is a float32 as well, so none is nearer to the mean than k' is: (k' - mean)**2 <= (x - mean)**2
// for all x of the row, and d**2 <= var about k'. Once is enough.
//
// Pass 2 (`write_y`) writes y = (x - mean - mean_lo) * rstd * gamma + beta. The sum mean + mean_lo
// is k + d exactly: for rows of neighbouring floats the last bit of a float64 mean is too coarse
// (types.py has the figures).
//
// Backward (back_rows.h). The pivot m, of four g = gamma * dy the one of least magnitude, is
// subtracted from g, so that g - m is 0 where g is constant. Pass 1 (`pull`) sums mean(g - m) and
// slope = mean((g - m) * xhat). The equation has mean((g - mean(g)) * xhat), which is the same, as
// mean(xhat) = 0; certain.h counts the error mean(g - m) mean(xhat) of the rounded xhat. Pass 2
// (`write_dx`) writes dx = rstd * ((g - m) - mean(g - m) - xhat * slope). RMS norm: k, d, m and
// mean(g - m) are 0.
//
// Errors, u = 2**-53: a term of a sum along a row goes through at most H = 1024 / 16 + n / 1024 + 4
// additions (blocks of 1024, 16 lanes), in the backward 1024 / 4 + n / 1024 + 2 (4 lanes). NEAREST
// sums are pairwise: H is log2(n) + 5, but at least 12, in the backward log2(n) + 13 to 15.
// certain.h derives the NEAREST bounds from H.
//
// Read next: lanes.h for the registers, certain.h for the rounding test, tiles.cpp for the loops
// over rows and for the ladder: rows that float64 leaves uncertified go to pairs, then to integers.
#pragma once
#include <cmath>
#include <type_traits>

#include "call.h"
#include "certain.h"
#include "lanes.h"
#include "numbers.h"

namespace {

// Lanes of the forward's sums and of dx. Each sum has a lane for each column of a register of 16:
// results have the same bits on all processors, and the H above counts 16.
constexpr int LANES = 16;

// Two rows of y share the loads of gamma and beta: n = 4096, 0.9 ns an element, row by row 1.1.
constexpr int ROWS_OF_Y = 2;
// Columns of y written at once. Types of 16 bits are rounded sixteen at a time: n = 1024, 0.30 ns,
// eight at a time 0.41.
template <class T> constexpr int COLUMNS_OF_Y = sizeof(T) == 2 ? 16 : 8;

// How rows are done. LAYER: as a layer norm, not an RMS norm. CENTER: x - mean is formed first, and
// then scaled; else x * rstd - mean * rstd. NEAREST: with the bounds of certain.h.
template <bool LAYER_, bool CENTER_, bool NEAREST_> struct Mode {
    static constexpr bool LAYER = LAYER_;
    static constexpr bool CENTER = CENTER_;
    static constexpr bool NEAREST = NEAREST_;
    static_assert(LAYER || !CENTER, "an RMS norm has no mean");
};
// All modes: FAST, and NEAR and FAR from zero with rounding to nearest. RMS norm has no FAR.
template <bool LAYER> using Fast = Mode<LAYER, LAYER, false>;
template <bool LAYER> using Near = Mode<LAYER, false, true>;
template <bool LAYER> using Far = Mode<LAYER, LAYER, true>;

// True if a row is far from zero, given |mean| rstd: at more than 8, x * rstd - mean * rstd loses
// more than 3 bits.
INLINE bool is_far(double M) { return M > 8; }

// The statistics of a group of rows: xhat is (x - mean - mean_lo) * rstd.
struct Stats {
    double mean[GROUP], mean_lo[GROUP], rstd[GROUP];
    double first[GROUP], second[GROUP];  // the moments d and s about the guess
};

// What all rows of a call share: gamma and beta, with |gamma| + |beta| (`sizes`) for NEAREST; their
// length; and the distance of prefetches, in columns.
struct Columns {
    const double* gamma;
    const double* beta;
    const double* sizes;
    Index n;
    Index ahead;
};

// ---- pass 1: sums along rows ----

// Columns of a block, which are added one after the other. Errors grow with the block; longer rows
// add up the sums of blocks.
template <bool NEAREST, Index OF_NEAREST> constexpr Index BLOCK = NEAREST ? OF_NEAREST : 1024;

// Adds the sums of blocks: one after the other or, NEAREST, pairwise, as a binary counter carries.
template <bool NEAREST, class Sums> struct Blocks {
    Sums sum = {};
    Sums held[NEAREST ? 64 : 1];
    Index count = 0;
    Index top = 0;
    INLINE void add(const Sums& block) {
        count++;
        if (!NEAREST || count % 2 == 0) {
            sum += block;
            // Two sums of as many blocks are merged for each further time that 2 divides the count.
            for (Index k = count / 2; NEAREST && k % 2 == 0; k /= 2) sum += held[--top];
            return;
        }
        if (count > 1) held[top++] = sum;
        sum = block;
    }
    INLINE Sums total() {
        while (top) sum += held[--top];
        return sum;
    }
};

struct Moments {
    Lanes<LANES> first, second;
    INLINE void operator+=(const Moments& other) {
        first = first + other.first;
        second = second + other.second;
    }
};

struct RowMoments {
    double first, second;
};

template <bool LAYER, class T>
INLINE Moments moments_of_block(const T* x, Index n, Lanes<LANES> k) {
    Moments of = {};
    each_columns<LANES>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        Lanes<LANES> v = load<LANES>(x + j, count);
        Lanes<LANES> c = LAYER ? minus(v, k) : v;
        if (count < LANES) c = first(c, count);
        if (LAYER) of.first = of.first + c;
        of.second = fma(c, c, of.second);
    });
    return of;
}

// Pass 1 of the forward: n times the moments of a row about a guess.
template <bool LAYER, bool NEAREST, class T>
NOINLINE RowMoments measure(const T* x, Index n, double guess) {
    constexpr Index block = BLOCK<NEAREST, RUN * LANES>;
    Lanes<LANES> k = broadcast<LANES>(guess);
    Blocks<NEAREST, Moments> blocks;
    for (Index start = 0; start < n; start += block)
        blocks.add(moments_of_block<LAYER>(x + start, at_most(n - start, block), k));
    Moments all = blocks.total();
    return {LAYER ? total(all.first) : 0, total(all.second)};
}

template <class T> INLINE double guess_of(const T* x, Index n) {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, f32>;
    auto at = [&](int i) INLINE_LAMBDA { return read<Bits>(x + i * (n / 8)); };
    // Eight loads into a register: through an array the next load would wait for the stores.
    Register<Bits, 8> sample = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)};
    return (f32)(total(load<8>((const T*)&sample)) * 0.125);
}

// The mean of the first 64 elements, for NEAREST, whose bounds grow with |d|. Dgamma's bound too:
// of 20 backwards of (65536, 1024), 9 leave a column uncertified; with `guess_of`, 13 do.
template <class T> INLINE double better_guess_of(const T* x) {
    Lanes<LANES> sum = {};
    for (Index j = 0; j < 64; j += LANES) sum = sum + load<LANES>(x + j);
    return (f32)(total(sum) / 64);
}

// Finishes row r, from its guess and the means of its moments. A comment at the end of a line
// bounds the error of its result, in the symbols of certain.h.
INLINE void finish_statistics(double k, double eps, Stats& of, int r) {
    double d = of.first[r];             // H u rms(c)
    double s = of.second[r];            // (H + 4) u of it
    double var = s - d * d;             // u ((H + 4) q + 2 D sqrt(q) H + D**2 + 1) / rstd**2
    Pair<double> mean = two_sum(k, d);  // no error
    of.mean[r] = mean.high;
    of.mean_lo[r] = mean.low;
    // Clamp at 0: rounding can make s - d**2 slightly negative. The comparison keeps NaN.
    double v = (var < 0 ? 0 : var) + eps;
    // v - v is NaN for an infinite row of an RMS norm: an infinity spoils its row, as it does
    // through the mean of a layer norm.
    of.rstd[r] = 1 / std::sqrt(v) + (v - v);  // half of var's, and 3 u: sum, root, quotient
}

// The statistics of up to GROUP rows. Loops that divide go over the whole group: their length is a
// constant, and divisions overlap.
template <bool LAYER, bool NEAREST, class T>
NOINLINE void statistics(const T* const* x, int rows, Index n, double eps, Stats& of) {
    double k[GROUP] = {};
    // 64 elements are a large part of a row of less than 256.
    for (int r = 0; LAYER && r < rows; r++)
        k[r] = NEAREST && n >= 256 ? better_guess_of(x[r]) : guess_of(x[r], n);
    auto measure_row = [&](int r) {
        RowMoments sums = measure<LAYER, NEAREST>(x[r], n, k[r]);
        of.first[r] = sums.first;
        of.second[r] = sums.second;
    };
    auto divide = [&](int r) {
        of.first[r] /= (double)n;
        of.second[r] /= (double)n;
    };
    for (int r = 0; r < rows; r++) measure_row(r);
    for (int r = 0; r < GROUP; r++) divide(r);
    for (int r = 0; r < GROUP; r++) finish_statistics(k[r], eps, of, r);
    // A guess from outliers alone: test_statistics_are_near_the_exact_ones[outliers] fails without
    // this loop.
    for (int r = 0; LAYER && r < rows; r++) {
        double d_square = of.first[r] * of.first[r];
        if (__builtin_expect(d_square > 2 * (of.second[r] - d_square), 0)) {
            k[r] = (f32)(k[r] + of.first[r]);
            measure_row(r);
            divide(r);
            finish_statistics(k[r], eps, of, r);
        }
    }
}

// ---- pass 2: an element computes results, a sink writes them ----

// The first columns of registers that failed the test by the bound of their row.
struct Failed {
    Index* at;
    Index count;
};
// A row of results, and the registers that failed.
template <class To> struct Draft {
    To* to;
    Failed failed;
};

// Sinks take registers of R rows: their results v for columns j to j + count, of errors at most the
// bound of the row times `size`. Store rounds and writes; `past`: with non-temporal stores.
template <class To, int R> struct Store {
    To* to[R];
    bool past = false;
    template <int K>
    INLINE void operator()(Index j, Index count, const Lanes<K> (&v)[R], Lanes<K>, bool past) {
        for (int r = 0; r < R; r++) store(to[r] + j, v[r], count, past);
    }
};

// Tests as well, by the bounds. Rows of float32 are tested AT_ONCE: n = 4096, two rows, 0.39 ns an
// element, one by one 0.42. Types of 16 bits lack the registers, but for AVX-512. Parts of
// registers fail untested.
template <class To, int R> struct Test {
    static constexpr int AT_ONCE = sizeof(To) == 2 && WIDEST < 8 ? 1 : R;
    To* to[R];
    bool past = false;
    double bound[R];
    Failed failed[R];
    Draft<To> draft(int r) const { return {to[r], failed[r]}; }
    template <int K>
    INLINE void operator()(Index j, Index count, const Lanes<K> (&v)[R], Lanes<K> size, bool past) {
        using Bits = Register<int64_t, WIDEST>;
        for (int top = 0; top < R; top += AT_ONCE) {
            Bits bits[AT_ONCE];
            Bits all = {};
            for (int k = 0; k < AT_ONCE; k++) {
                Lanes<K> of_row = broadcast<K>(bound[top + k]);
                const Lanes<K>& y = v[top + k];
                bits[k] = between<To>(fma(size, of_row, y), fma(size, -of_row, y));
                all |= bits[k];
            }
            if (__builtin_expect(count < K || may_differ<To, WIDEST>(all), 0))
                for (int k = 0; k < AT_ONCE; k++)
                    if (count < K || may_differ<To, WIDEST>(bits[k]))
                        failed[top + k].at[failed[top + k].count++] = j;
            for (int k = 0; k < AT_ONCE; k++) store(to[top + k] + j, v[top + k], count, past);
        }
    }
};

// Writes rows: compute(j, count, v) sets the results of a register of each, and returns the sizes
// of their errors. `reversed`: from the end. Stores past the caches have a loop of their own.
template <int K, template <class, int> class Sink, class To, int R, class Compute>
INLINE void write_columns(Index n, bool reversed, Sink<To, R>& out, Compute compute) {
    auto loop = [&](auto past) INLINE_LAMBDA {
        auto write = [&](Index j, Index count) INLINE_LAMBDA {
            Lanes<K> v[R];
            Lanes<K> size = compute(j, count, v);
            out(j, count, v, size, past.value);
        };
        each_columns<K>(0, n, write, reversed);
    };
    if (out.past)
        loop(std::true_type{});
    else
        loop(std::false_type{});
}

// The second step of the test: computes the failed registers of a row again, writes them, and tests
// each element by its own bound. Returns whether it certifies all. value_of(j, count, v) sets v,
// the results of a register, and returns their bounds.
template <int K, class To, class Value>
INLINE bool settle(const Draft<To>& row, Index n, Value value_of) {
    bool differ = false;
    for (Index i = 0; i < row.failed.count; i++) {
        Index j = row.failed.at[i];
        Index count = at_most(n - j, K);
        Lanes<K> v;
        Lanes<K> error = value_of(j, count, v);
        // An exact zero is +0.
        v = v + broadcast<K>(0.0);
        differ |= differs<To>(v, error, count);
        store(row.to + j, v, count);
    }
    return !differ;
}

// Computes xhat of a register of columns: x * rstd or, CENTER, (x - mean) * rstd, and a constant.
template <class M, class V> struct ElementOfXhat {
    V mean, rstd, constant;
    INLINE ElementOfXhat() {}
    INLINE ElementOfXhat(double mean, double mean_lo, double rstd)
        : mean(V::all(mean)),
          rstd(V::all(rstd)),
          constant(V::all(constant_of(mean, mean_lo, rstd))) {}
    static INLINE double constant_of(double mean, double mean_lo, double rstd) {
        return M::CENTER ? -mean_lo * rstd : fma(-mean, rstd, -mean_lo * rstd);
    }
    INLINE V centered(V x) const { return M::CENTER ? minus(x, mean) : x; }
    // Its error is a |xhat| + b.
    INLINE V scaled(V centered) const {
        return M::LAYER ? fma(centered, rstd, constant) : centered * rstd;
    }
    // Its error is a |gamma xhat| + b |gamma| + u |y|.
    INLINE V y(V x, V gamma, V beta) const { return fma(scaled(centered(x)), gamma, beta); }
};
template <class M, class T> using ElementOfY = ElementOfXhat<M, Lanes<COLUMNS_OF_Y<T>>>;

// True if the results lie up to 1023 bytes behind the inputs, modulo 4096. A load waits for an
// earlier store whose address agrees in the last 12 bits, so such a row is written from its end:
// (4, 512, 1024) with out= 16 to 48 bytes behind x takes 400 us, from its beginning 1300. For the
// same reason all R rows are read before one is written.
INLINE bool is_behind(const void* to, const void* from) {
    return ((uintptr_t)to - (uintptr_t)from - 1) % 4096 < 1023;
}

// Prefetches: far ones go into the second-level cache, since two rows of 16 KB would fill the
// first; the backward prefetches NEAR columns into the first as well. Zen 4, two threads, float32
// past the caches, 10^9 elements a second with far ones into the first level alone, and so: forward
// of (131072, 256) 3.7 and 4.0, (65536, 512) 3.6 and 5.3, (2048, 16384) 4.0 and 4.6; backward 2.2
// and 3.6, 1.9 and 3.1, 2.3 and 2.7. Nothing is lost in the caches.
constexpr int SECOND_LEVEL = 2;
constexpr Index NEAR = 1024;

// Pass 2 of the forward: y of R rows of a group, from row r on, into a sink of R rows.
template <class M, int R, class T, class Sink>
NOINLINE void write_y(
    const T* const* rows, const Stats& of, int r, const Columns& columns, Sink& sink) {
    constexpr int K = COLUMNS_OF_Y<T>;
    // Local copies: stores of results might change what is behind a reference.
    const Columns at = columns;
    Sink out = sink;
    ElementOfY<M, T> element[R];
    const T* x[R];
    for (int i = 0; i < R; i++) {
        element[i] = {of.mean[r + i], of.mean_lo[r + i], of.rstd[r + i]};
        x[i] = rows[r + i];
    }
    auto compute = [&](Index j, Index count, Lanes<K>* v) INLINE_LAMBDA {
        Lanes<K> gamma = load<K>(at.gamma + j);
        Lanes<K> beta = load<K>(at.beta + j);
#pragma GCC unroll 2
        for (int i = 0; i < R; i++) {
            __builtin_prefetch(x[i] + j + at.ahead, 0, SECOND_LEVEL);
            v[i] = element[i].y(load<K>(x[i] + j, count), gamma, beta);
        }
        return M::NEAREST ? load<K>(at.sizes + j) : gamma;
    };
    write_columns<K>(at.n, is_behind(out.to[0], x[0]), out, compute);
    sink = out;
}

// Settles the failed registers of a row, with x centered first.
template <bool LAYER, class T, class To>
NOINLINE bool settle_y(const T* x, const ElementOfY<Far<LAYER>, T>& element, const Columns& columns,
    Errors errors, const Draft<To>& row) {
    constexpr int K = COLUMNS_OF_Y<T>;
    auto value_of = [&](Index j, Index count, Lanes<K>& v) INLINE_LAMBDA {
        Lanes<K> gamma = load<K>(columns.gamma + j);
        Lanes<K> beta = load<K>(columns.beta + j);
        v = element.y(load<K>(x + j, count), gamma, beta);
        return bounds_of_y(errors, v, gamma, beta);
    };
    return settle<K>(row, columns.n, value_of);
}

}  // namespace
