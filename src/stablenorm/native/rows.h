// Rows of float16, bfloat16 and float32: the equations of the norms in float64, in two passes each way.
//
// Forward: a guess k of the mean is subtracted. With d = mean(x - k), mean = k + d and
// var = mean((x - k)**2) - d**2: exact algebra for any k, so that one pass gives both, and the second writes
// y. k is the mean of eight elements, rounded to float32: x - k has at most 25 bits, and is exact, where the
// two are near each other. If d**2 > 2 var it was a bad guess, and the difference has lost more than
// log2(3) bits: then k + d is the new one, and the pass is made once more. k + d is kept as mean + rest.
//
// Backward: m, the smallest of four g = gamma * dy, is subtracted from g, so that 0 is left where g is
// constant, and little where mean(g) is large. With A = mean(g - m), B = mean((g - m) * xhat), which is
// mean((g - mean(g)) * xhat) since mean(xhat) = 0: dx = rstd * ((g - m) - A - xhat * B).
//
// RMS norm: the same with k = d = m = A = 0.
//
// Errors, with u = 2**-53: the longest chain of additions of a sum along a row is H = 64 + n / 1024 + 4 (16
// lanes), of the backward 256 + n / 1024 + 2 (4 lanes). docs/reference/accuracy-contract.md derives what
// follows from H.
#pragma once
#include <cmath>

#include "call.h"
#include "lanes.h"
#include "numbers.h"

namespace {

constexpr Index BLOCK = 1024;  // columns summed in one go: it bounds the chains of additions
constexpr int L = 16;          // lanes of the forward
// Lanes in which y is written, of two rows at a time, which share what is read of gamma and beta: n = 4096, 0.9 ns
// an element against 1.1 one by one.
constexpr int Y = 8, ROWS_OF_Y = 2;

// Lanes of each row of the backward: two rows, with their sums and constants, then fit 16 registers. On an
// AVX2 machine, n = 1024: 1.90 10^9/s; with eight lanes 1.58, or one row at a time 1.70.
constexpr int B = 4;

// Up to so many short rows are done together: what waits for divisions and roots waits for all at once.
constexpr int GROUP = 8;

// Of the rows of a group: (x - mean - rest) * rstd is xhat.
struct Stats {
    double mean[GROUP], rest[GROUP], rstd[GROUP];
};

// ---- forward ----

template <bool LAYER, class T>
INLINE void measure_block(const T* x, Index n, Lanes<L> k, Lanes<L>& sum, Lanes<L>& squares) {
    auto add = [&](Lanes<L> c) INLINED {
        if (LAYER) sum = sum + c;
        squares = fma(c, c, squares);
    };
    Index j = 0;
    for (; j + L <= n; j += L) add(LAYER ? load<L>(x + j) - k : load<L>(x + j));
    if (j < n) add(first(LAYER ? load<L>(x + j, n - j) - k : load<L>(x + j, n - j), n - j));
}

struct Means {
    double plain, product;
};

// Means of x - k and of its square.
template <bool LAYER, class T> APART Means measure(const T* x, Index n, double guess) {
    Lanes<L> k = spread<L>(guess), sum = {}, squares = {};
    measure_block<LAYER>(x, n < BLOCK ? n : BLOCK, k, sum, squares);
    for (Index start = BLOCK; start < n; start += BLOCK) {
        Lanes<L> a = {}, b = {};
        measure_block<LAYER>(x + start, n - start < BLOCK ? n - start : BLOCK, k, a, b);
        sum = sum + a, squares = squares + b;
    }
    return {total(sum) / (double)n, total(squares) / (double)n};
}

template <class T> INLINE double guess_of(const T* x, Index n) {
    T some[8];
    for (int i = 0; i < 8; i++) some[i] = x[i * (n / 8)];
    return (f32)(total(load<8>(some)) * 0.125);
}

INLINE void settle(double k, double d, double square, double eps, Stats& of, int r) {
    double var = square - d * d, mean = k + d, part = mean - k;
    of.mean[r] = mean, of.rest[r] = (k - (mean - part)) + (d - part);
    // Rounding can make the difference of two equal squares negative; NaN stays.
    of.rstd[r] = 1 / std::sqrt((var < 0 ? 0 : var) + eps);
}

template <bool LAYER, class T> APART void statistics(const T* const* x, Index n, int rows, double eps, Stats& of) {
    double k[GROUP] = {}, d[GROUP] = {}, square[GROUP] = {};
    for (int r = 0; r < rows; r++) {
        k[r] = LAYER ? guess_of(x[r], n) : 0;
        Means means = measure<LAYER>(x[r], n, k[r]);
        d[r] = means.plain, square[r] = means.product;
    }
    if (!LAYER) {
        for (int r = 0; r < GROUP; r++) {
            double v = square[r] + eps;
            // v - v: infinity spoils all of its row, as it does a mean.
            of.mean[r] = of.rest[r] = 0, of.rstd[r] = 1 / std::sqrt(v) + (v - v);
        }
        return;
    }
    for (int r = 0; r < GROUP; r++) settle(k[r], d[r], square[r], eps, of, r);
    for (int r = 0; r < rows; r++)
        if (__builtin_expect(d[r] * d[r] > 2 * (square[r] - d[r] * d[r]), 0)) {
            double better = (f32)(k[r] + d[r]);
            Means means = measure<true>(x[r], n, better);
            settle(better, means.plain, means.product, eps, of, r);
        }
}

// y of R rows of a group, from row r on; what lies so many columns `ahead` is asked for.
template <int R, bool LAYER, bool PAST, class T, class To>
APART void write_y(const T* const* x, To* const* y, Index n, const Stats& of, int r, const double* gamma, const double* beta, Index ahead) {
    Lanes<Y> mean[R], rstd[R], s[R];
    const T* from[R];
    To* to[R];
    for (int i = 0; i < R; i++) {
        mean[i] = spread<Y>(of.mean[r + i]), rstd[i] = spread<Y>(of.rstd[r + i]);
        s[i] = spread<Y>(-of.rest[r + i] * of.rstd[r + i]);
        from[i] = x[r + i], to[i] = y[i];
    }
    auto value = [&](Lanes<Y> v, int i, Lanes<Y> scale, Lanes<Y> shift) INLINED {
        Lanes<Y> xhat = LAYER ? fma(v - mean[i], rstd[i], s[i]) : v * rstd[i];
        return fma(xhat, scale, shift);
    };
    Index j = 0;
    for (; j + Y <= n; j += Y) {
        Lanes<Y> scale = load<Y>(gamma + j), shift = load<Y>(beta + j);
#pragma GCC unroll 2
        for (int i = 0; i < R; i++) {
            ask_for(from[i] + j + ahead);
            store<PAST>(to[i] + j, value(load<Y>(from[i] + j), i, scale, shift));
        }
    }
    for (int i = 0; i < R && j < n; i++)
        store(to[i] + j, value(load<Y>(from[i] + j, n - j), i, load<Y>(gamma + j), load<Y>(beta + j)), n - j);
}

// ---- backward: R rows at a time, which share what is read of gamma and of the sums over rows ----

template <class T> INLINE double pivot(const T* dy, const double* gamma, Index n) {
    Index s = n < 4 ? 0 : n / 4;
    T some[4] = {dy[0], dy[s], dy[2 * s], dy[3 * s]};
    double g[4];
    write(g, load<4, AT_MOST_FOUR>(some));
    for (int i = 0; i < 4; i++) g[i] *= gamma[i * s];
    double a = std::fabs(g[0]) < std::fabs(g[1]) ? g[0] : g[1], b = std::fabs(g[2]) < std::fabs(g[3]) ? g[2] : g[3];
    return std::fabs(a) < std::fabs(b) ? a : b;
}

// A row of the backward: dx = rstd * (g - m) + (x - mean) * p + q.
template <class T> struct Back {
    const T *dy, *x;
    double mean, rest, rstd, m, p, q;
};

// Vectors of the sums over rows.
struct Sums {
    double *dgamma, *dbeta;
};

using Few = Lanes<B, AT_MOST_FOUR>;

template <int R> struct Constants {
    Few mean[R], rstd[R], s[R], m[R];
};

// Four columns of R rows, or the first `some` of them, go to the sums along the rows and over them.
template <bool SOME, int R, bool LAYER, class T>
INLINE void pull_columns(const T* const* dy, const T* const* x, Index j, Index some, const double* gamma,
                         const Constants<R>& of, double* dgamma, double* dbeta, Few* a, Few* b) {
    constexpr int W = AT_MOST_FOUR;
    Few u = load<B, W>(gamma + j), sg = load<B, W>(dgamma + j), sb = load<B, W>(dbeta + j);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        Few d = load<B, W>(dy[r] + j), v = load<B, W>(x[r] + j);
        Few xhat = LAYER ? fma(v - of.mean[r], of.rstd[r], of.s[r]) : v * of.rstd[r];
        Few g = LAYER ? fma(d, u, of.m[r]) : d * u;
        if (SOME) g = first(g, some);
        if (LAYER) a[r] = a[r] + g;
        b[r] = fma(g, xhat, b[r]);
        sb = sb + d, sg = fma(d, xhat, sg);
    }
    store(dgamma + j, sg), store(dbeta + j, sb);
}

// The sums along R rows; dy and dy * xhat are added to those over rows. What depends on a row is in local
// variables, since for all that the compiler knows a store to dgamma may change it: 0.46 against 0.66.
template <int R, bool LAYER, class T>
APART void pull(Back<T>* rows, Index n, const double* __restrict gamma, Sums sums) {
    double *__restrict dgamma = sums.dgamma, *__restrict dbeta = sums.dbeta;
    constexpr int W = AT_MOST_FOUR;
    Few a[R] = {}, b[R] = {};
    Constants<R> of;
    const T *dy[R], *x[R];
    for (int r = 0; r < R; r++) {
        const Back<T>& row = rows[r];
        of.mean[r] = spread<B, W>(row.mean), of.rstd[r] = spread<B, W>(row.rstd);
        of.s[r] = spread<B, W>(-row.rest * row.rstd), of.m[r] = spread<B, W>(-row.m);
        dy[r] = row.dy, x[r] = row.x;
    }
    for (Index start = 0; start < n; start += BLOCK) {
        Few c[R] = {}, d[R] = {};
        Index stop = n - start < BLOCK ? n : start + BLOCK, j = start;
        for (; j + B <= stop; j += B)
            pull_columns<false, R, LAYER>(dy, x, j, B, gamma, of, dgamma, dbeta, c, d);
        if (j < stop) {
            T copy[R][2][B] = {};
            const T *last_dy[R], *last_x[R];
            for (int r = 0; r < R; r++) {
                memcpy(copy[r][0], dy[r] + j, (size_t)(stop - j) * sizeof(T));
                memcpy(copy[r][1], x[r] + j, (size_t)(stop - j) * sizeof(T));
                last_dy[r] = copy[r][0], last_x[r] = copy[r][1];
            }
            pull_columns<true, R, LAYER>(last_dy, last_x, 0, stop - j, gamma + j, of, dgamma + j, dbeta + j, c, d);
        }
        for (int r = 0; r < R; r++) a[r] = a[r] + c[r], b[r] = b[r] + d[r];
    }
    for (int r = 0; r < R; r++) {
        double plain = LAYER ? total(a[r]) / (double)n : 0, slope = total(b[r]) / (double)n;
        double rstd = rows[r].rstd, s = -rows[r].rest * rstd;
        rows[r].p = -slope * rstd * rstd;
        rows[r].q = -(plain + slope * s) * rstd;
    }
}

template <bool LAYER, bool PAST, class T, class To>
APART void write_dx(const Back<T>& of, To* dx, Index n, const double* gamma, Index ahead) {
    Lanes<L> mean = spread<L>(of.mean), rstd = spread<L>(of.rstd), m = spread<L>(-of.m);
    Lanes<L> p = spread<L>(of.p), q = spread<L>(of.q);
    auto value = [&](Lanes<L> d, Lanes<L> v, Index j) INLINED {
        Lanes<L> u = load<L>(gamma + j);
        return LAYER ? fma(v - mean, p, fma(fma(d, u, m), rstd, q)) : fma(v, p, d * u * rstd);
    };
    const T *dy = of.dy, *x = of.x;
    Index j = 0;
    for (; j + L <= n; j += L) {
        ask_for(dy + j + ahead), ask_for(x + j + ahead);
        store<PAST>(dx + j, value(load<L>(dy + j), load<L>(x + j), j));
    }
    if (j < n) store(dx + j, value(load<L>(dy + j, n - j), load<L>(x + j, n - j), j), n - j);
}

}  // namespace
