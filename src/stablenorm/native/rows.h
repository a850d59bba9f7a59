// Layer norm of rows of float16, bfloat16 and float32, in float64: two passes over a row each way.
// docs/explanation/ derivation.md derives the equations.
//
// Forward. Pass 1 (`measure`) sums both moments about a guess k of the mean: d = mean(x - k), s =
// mean((x - k)**2). Then mean = k + d and var = s - d**2, for any k. The guess is the mean of 8
// elements, equally spaced (NEAREST: of the first 64), rounded to float32; x - k is exact for
// elements near k. The subtraction s - d**2 cancels if k is far from the mean: `statistics` allows
// d**2 <= 2 var, a loss of log2(3) bits, and else repeats pass 1 with k + d rounded to float32: no
// element is nearer to the mean, so that d**2 <= var. The sum mean + mean_lo is k + d exactly. Pass
// 2 (`write_y`) writes y = (x - mean - mean_lo) * rstd * gamma + beta.
//
// Backward (back_rows.h). m, of four g = gamma * dy the one of least magnitude, is subtracted from
// g, so that g - m is 0 where g is constant. Pass 1 (`pull`) sums A = mean(g - m), `plain` in the
// code, and B = mean((g - m) * xhat), `slope`; B is mean((g - mean(g)) * xhat), since mean(xhat) =
// 0. Pass 2 (`write_dx`) writes dx = rstd * ((g - m) - A - xhat * B). RMS norm: k = d = m = A = 0.
//
// Errors, u = 2**-53: a term of a sum along a row goes through at most H = 1024 / 16 + n / 1024 + 4
// additions (blocks of 1024, 16 lanes), in the backward 1024 / 4 + n / 1024 + 2 (4 lanes). NEAREST
// sums are pairwise: H is log2(n) + 5, in the backward log2(n) + 13 to 15. certain.h derives the
// NEAREST bounds from H, and docs/explanation/error-analysis.md explains them.
//
// Read next: lanes.h for the registers, certain.h for the rounding test, tiles.cpp for the loops
// over rows.
#pragma once
#include <cmath>
#include <type_traits>

#include "call.h"
#include "certain.h"
#include "lanes.h"
#include "numbers.h"

namespace {

constexpr int L = 16;  // lanes, but for those of `pull`
// Two rows of y share the loads of gamma and beta: n = 4096, 0.9 ns an element, row by row 1.1.
// Y_OF: columns of y written at once. Types of 16 bits are rounded sixteen at a time: n = 1024,
// 0.30 ns, eight at a time 0.41.
constexpr int ROWS_OF_Y = 2;
template <class T> constexpr int Y_OF = sizeof(T) == 2 ? 16 : 8;

// How rows are done. LAYER: as a layer norm, not an RMS norm. CENTER: x - mean is formed first, and
// then scaled. NEAREST: with the bounds of certain.h.
template <bool LAYER_, bool CENTER_, bool NEAREST_> struct Mode {
    static constexpr bool LAYER = LAYER_;
    static constexpr bool CENTER = CENTER_;
    static constexpr bool NEAREST = NEAREST_;
};

// The statistics of a group of rows: xhat is (x - mean - mean_lo) * rstd.
struct Stats {
    double mean[GROUP], mean_lo[GROUP], rstd[GROUP];
    double d[GROUP], square[GROUP];  // means of x - k and of its square
};

// ---- forward ----

// Sums along R rows. Forward: x - k and its square. Backward: g - m, its product with xhat and,
// NEAREST, its square.
template <int R, class N> struct Along {
    N plain[R], product[R], square[R];
    INLINE void operator+=(const Along& other) {
        for (int r = 0; r < R; r++) {
            plain[r] = plain[r] + other.plain[r];
            product[r] = product[r] + other.product[r];
            square[r] = square[r] + other.square[r];
        }
    }
};

// Columns of a block, which are added one after the other. Longer rows add up the sums of blocks:
// errors grow with the block.
template <bool NEAREST, Index OF_NEAREST> constexpr Index BLOCK = NEAREST ? OF_NEAREST : 1024;

// Adds the sums of blocks: one after the other or, NEAREST, pairwise (a stack of partial sums,
// merged like the carries of a binary counter).
template <bool NEAREST, class Part> struct Blocks {
    Part sum = {};
    Part held[NEAREST ? 64 : 1];
    Index count = 0;
    Index top = 0;
    INLINE void add(const Part& part) {
        if (!NEAREST) return sum += part;
        Index k = ++count;
        if (k % 2) {
            if (k > 1) held[top++] = sum;
            sum = part;
            return;
        }
        for (sum += part; (k /= 2) % 2 == 0;) sum += held[--top];
    }
    INLINE Part total() {
        while (top) sum += held[--top];
        return sum;
    }
};

template <bool LAYER, class T>
INLINE Along<1, Lanes<L>> measure_block(const T* x, Index n, Lanes<L> k) {
    Along<1, Lanes<L>> of = {};
    each_columns<L>(0, n, [&](Index j, Index count) INLINE_LAMBDA {
        Lanes<L> v = load<L>(x + j, count);
        Lanes<L> c = LAYER ? minus(v, k) : v;
        if (count < L) c = first(c, count);
        if (LAYER) of.plain[0] = of.plain[0] + c;
        of.product[0] = fma(c, c, of.product[0]);
    });
    return of;
}

// Pass 1 of the forward: the sums of x - k and of its square, for some rows.
template <bool LAYER, bool NEAREST, class T>
NOINLINE void measure(
    const T* const* x, int rows, Index n, const double* guess, double* plain, double* product) {
    constexpr Index block = BLOCK<NEAREST, RUN * L>;
    for (int r = 0; r < rows; r++) {
        Lanes<L> k = broadcast<L>(guess[r]);
        Blocks<NEAREST, Along<1, Lanes<L>>> blocks;
        for (Index start = 0; start < n; start += block)
            blocks.add(measure_block<LAYER>(x[r] + start, at_most(n - start, block), k));
        auto all = blocks.total();
        plain[r] = total(all.plain[0]);
        product[r] = total(all.product[0]);
    }
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
    Lanes<L> sum = {};
    for (Index j = 0; j < 64; j += L) sum = sum + load<L>(x + j);
    return (f32)(total(sum) / 64);
}

// A comment at the end of a line bounds the error of its result, in the symbols of certain.h.
INLINE void finish_statistics(double k, double d, double square, double eps, Stats& of, int r) {
    double var = square - d * d;  // u ((H + 4) q + 2 D sqrt(q) H + D**2 + 1) / rstd**2
    double mean = k + d;
    double part = mean - k;
    double mean_lo = (k - (mean - part)) + (d - part);  // no error: mean + mean_lo is k + d
    of.mean[r] = mean;
    of.mean_lo[r] = mean_lo;
    of.d[r] = d;
    of.square[r] = square;
    // Clamp at 0: rounding can make s - d**2 slightly negative. The comparison keeps NaN.
    double v = (var < 0 ? 0 : var) + eps;
    // v - v is NaN for an infinite row of an RMS norm: an infinity spoils its row, as it does
    // through the mean of a layer norm.
    of.rstd[r] = 1 / std::sqrt(v) + (v - v);  // half of var's, and 3 u: sum, root, quotient
}

template <bool LAYER, class T>
NOINLINE void statistics(const T* const* x, const Call& c, int rows, Stats& of) {
    double k[GROUP] = {};
    double d[GROUP] = {};
    double square[GROUP] = {};
    double eps = c.eps;
    double n = (double)c.n;
    auto measure_rows = c.nearest ? measure<LAYER, true, T> : measure<LAYER, false, T>;
    // 64 elements are a large part of a row of less than 256.
    for (int r = 0; LAYER && r < rows; r++)
        k[r] = c.nearest && c.n >= 256 ? better_guess_of(x[r]) : guess_of(x[r], c.n);
    measure_rows(x, rows, c.n, k, d, square);
    for (int r = 0; r < GROUP; r++) {
        d[r] /= n;
        square[r] /= n;
    }  // H u rms(c); (H + 4) u of the square
    for (int r = 0; r < GROUP; r++) finish_statistics(k[r], d[r], square[r], eps, of, r);
    // A guess from outliers alone: test_statistics_are_near_the_exact_ones[outliers] fails without
    // this loop.
    for (int r = 0; LAYER && r < rows; r++)
        if (__builtin_expect(d[r] * d[r] > 2 * (square[r] - d[r] * d[r]), 0)) {
            double better = (f32)(k[r] + d[r]);
            measure_rows(x + r, 1, c.n, &better, d + r, square + r);
            finish_statistics(better, d[r] / n, square[r] / n, eps, of, r);
        }
}

// The parameters of y; `sizes` is |gamma| + |beta|, with which its errors grow.
struct Parameters {
    const double *gamma, *beta, *sizes;
};

// The first columns of the registers that failed the quick rounding test by the bound of their row.
struct Uncertified {
    Index *at, count;
};

// True if a row needs x - mean before the multiplication by rstd: at |mean| rstd > 8 the fused form
// loses more than 3 bits.
INLINE bool is_far(double m) { return m > 8; }

// The constant term of xhat: xhat is x * rstd or, CENTER, (x - mean) * rstd, plus this.
template <bool CENTER> INLINE double constant_of(double mean, double mean_lo, double rstd) {
    return CENTER ? -mean_lo * rstd : fma(-mean, rstd, -mean_lo * rstd);
}

// Computes y of a register of columns.
template <class M, int Y> struct Affine {
    Lanes<Y> mean, rstd, s;
    INLINE Affine() {}
    INLINE Affine(const Stats& of, int r)
        : mean(broadcast<Y>(of.mean[r])),
          rstd(broadcast<Y>(of.rstd[r])),
          s(broadcast<Y>(constant_of<M::CENTER>(of.mean[r], of.mean_lo[r], of.rstd[r]))) {}
    INLINE Lanes<Y> operator()(Lanes<Y> v, Lanes<Y> scale, Lanes<Y> shift) const {
        Lanes<Y> xhat = M::CENTER    ? fma(minus(v, mean), rstd, s)
                        : M::NEAREST ? fma(v, rstd, s)
                                     : v * rstd;  // a |xhat| + b
        return fma(xhat, scale, shift);           // a |gamma xhat| + b |gamma| + u |y|
    }
};

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

// Pass 2 of the forward: y of R rows of a group, from row r on; `ahead` is the distance of
// prefetches, in columns. NEAREST: `bounds` times |gamma| + |beta| bounds the error of a row, and
// registers that fail the test by it go to `uncertified`. Rows of RMS norm need no CENTER, nor do,
// NEAREST, rows whose mean is near zero.
template <int R, class M, bool PAST, class T, class To>
NOINLINE void write_y(const T* const* x, To* const* y, Index n, const Stats& of, int r,
    const Parameters& parameters, Index ahead, Uncertified* uncertified = nullptr,
    const double* bounds = nullptr) {
    // Two rows of float32 are tested at once: n = 4096, 0.39 ns an element for 0.42. Types of 16
    // bits lack the registers.
    constexpr int Y = Y_OF<T>;
    constexpr int AT_ONCE = M::NEAREST && sizeof(T) == 4 ? R : 1;
    const double* gamma = parameters.gamma;
    const double* beta = parameters.beta;
    const double* sizes = parameters.sizes;
    Affine<M, Y> row[R];
    Lanes<Y> bound[R];
    const T* from[R];
    To* to[R];
    Uncertified failed[R];
    for (int i = 0; i < R; i++) {
        row[i] = Affine<M, Y>(of, r + i);
        from[i] = x[r + i];
        to[i] = y[i];
        if (M::NEAREST) {
            bound[i] = broadcast<Y>(bounds[i]);
            failed[i] = {uncertified[i].at, 0};
        }
    }
    Index count = n / Y;
    Index step = is_behind(to[0], from[0]) ? -Y : Y;
    Index j = step > 0 ? 0 : (count - 1) * Y;
    for (Index k = 0; k < count; k++, j += step) {
        Lanes<Y> scale = load<Y>(gamma + j);
        Lanes<Y> shift = load<Y>(beta + j);
        Lanes<Y> size = M::NEAREST ? load<Y>(sizes + j) : scale;
        Lanes<Y> v[R];
#pragma GCC unroll 2
        for (int i = 0; i < R; i++) {
            __builtin_prefetch(from[i] + j + ahead, 0, SECOND_LEVEL);
            v[i] = row[i](load<Y>(from[i] + j), scale, shift);
        }
#pragma GCC unroll 2
        for (int i = 0; i < R; i += AT_ONCE) {
            Lanes<Y> most[AT_ONCE], least[AT_ONCE];
            for (int a = 0; M::NEAREST && a < AT_ONCE; a++) {
                most[a] = fma(size, bound[i + a], v[i + a]);
                least[a] = fma(size, -bound[i + a], v[i + a]);
            }
            if (M::NEAREST && __builtin_expect(may_differ<To>(read<Lanes<AT_ONCE * Y>>(most),
                                                   read<Lanes<AT_ONCE * Y>>(least)),
                                  0))
                for (int a = 0; a < AT_ONCE; a++)
                    if (may_differ<To>(most[a], least[a]))
                        failed[i + a].at[failed[i + a].count++] = j;
            for (int a = 0; a < AT_ONCE; a++) store<PAST>(to[i + a] + j, v[i + a]);
        }
    }
    j = count * Y;
    for (int i = 0; i < R; i++) {
        if (j < n) {
            store(to[i] + j,
                row[i](load<Y>(from[i] + j, n - j), load<Y>(gamma + j), load<Y>(beta + j)), n - j);
            if (M::NEAREST)
                failed[i].at[failed[i].count++] = j;  // part of a register: no quick test
        }
        if (M::NEAREST) uncertified[i] = failed[i];
    }
}

// Rounds the failed registers of a row again, and tests each element with its own bound; true if
// one is uncertified. value_of(j, count, v) sets v, the values of a register, and returns the
// bounds of their errors.
template <int K, class To, class Value>
INLINE bool round_failed(To* out, Index n, Uncertified uncertified, Value value_of) {
    bool differ = false;
    for (Index i = 0; i < uncertified.count; i++) {
        Index j = uncertified.at[i];
        Index count = at_most(n - j, K);
        Lanes<K> v;
        Lanes<K> error = value_of(j, count, v);
        v = v + broadcast<K>(0.0);  // zero gets the sign of plus
        differ |= differs<To>(v, error, count);
        store(out + j, v, count);
    }
    return differ;
}

template <bool LAYER, class T>
NOINLINE bool is_uncertified(const T* x, T* y, Index n, const Stats& of, int r,
    const Parameters& parameters, Errors errors, Uncertified uncertified) {
    constexpr int Y = Y_OF<T>;
    Affine<Mode<LAYER, LAYER, true>, Y> row(of, r);
    return round_failed<Y>(y, n, uncertified, [&](Index j, Index count, Lanes<Y>& v) INLINE_LAMBDA {
        Lanes<Y> scale = load<Y>(parameters.gamma + j);
        Lanes<Y> shift = load<Y>(parameters.beta + j);
        v = row(load<Y>(x + j, count), scale, shift);
        return bounds_of_y(errors, v, scale, shift);
    });
}

}  // namespace
