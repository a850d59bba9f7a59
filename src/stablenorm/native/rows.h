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
// lanes), of the backward 256 + n / 1024 + 2 (4 lanes). docs/explanation/error-analysis.md derives what
// follows from H. For rounding="nearest" blocks are shorter, so that H is about sqrt(n / 4); certain.h has its bounds,
// and NEAREST says here that results are judged by them.
#pragma once
#include <cmath>
#include <type_traits>

#include "call.h"
#include "certain.h"
#include "lanes.h"
#include "numbers.h"

namespace {

constexpr int L = 16;          // lanes of the forward
// Lanes in which y is written, of two rows at a time, which share what is read of gamma and beta: n = 4096, 0.9 ns
// an element against 1.1 one by one. Two bytes each are rounded sixteen at a time: n = 1024, 0.30 ns against 0.41.
constexpr int ROWS_OF_Y = 2;
template <class T> constexpr int Y_OF = sizeof(T) == 2 ? 16 : 8;

// Lanes of each row of the backward: two rows, with their sums and constants, then fit 16 registers. On an
// AVX2 machine, n = 1024: 1.90 10^9/s; with eight lanes 1.58, or one row at a time 1.70.
constexpr int B = 4;

// Up to so many short rows are done together: what waits for divisions and roots waits for all at once.
constexpr int GROUP = 8;

// Of the rows of a group: (x - mean - rest) * rstd is xhat.
struct Stats {
    double mean[GROUP], rest[GROUP], rstd[GROUP];
    double d[GROUP], square[GROUP];  // means of x - k and of its square
};

// ---- forward ----

template <bool LAYER, class T>
INLINE void measure_block(const T* x, Index n, Lanes<L> k, Lanes<L>& sum, Lanes<L>& squares) {
    auto add = [&](Lanes<L> c) INLINED {
        if (LAYER) sum = sum + c;
        squares = fma(c, c, squares);
    };
    Index j = 0;
    for (; j + L <= n; j += L) add(LAYER ? minus(load<L>(x + j), k) : load<L>(x + j));
    if (j < n) add(first(LAYER ? load<L>(x + j, n - j) - k : load<L>(x + j, n - j), n - j));
}

// Of some rows, the sums of x - k and of its square; of so many columns at a time.
template <bool LAYER, class T>
APART void measure(const T* const* x, int rows, Index n, Index block, const double* guess, double* plain, double* product) {
    for (int r = 0; r < rows; r++) {
        Lanes<L> k = spread<L>(guess[r]), sum = {}, squares = {};
        measure_block<LAYER>(x[r], n < block ? n : block, k, sum, squares);
        for (Index start = block; start < n; start += block) {
            Lanes<L> a = {}, b = {};
            measure_block<LAYER>(x[r] + start, n - start < block ? n - start : block, k, a, b);
            sum = sum + a, squares = squares + b;
        }
        plain[r] = total(sum), product[r] = total(squares);
    }
}

template <class T> INLINE double guess_of(const T* x, Index n) {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, f32>;
    auto at = [&](int i) INLINED { return read<Bits>(x + i * (n / 8)); };
    // A register: an array would be read before all of it is written.
    Register<Bits, 8> some = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)};
    return (f32)(total(load<8>((const T*)&some)) * 0.125);
}

INLINE void settle(double k, double d, double square, double eps, Stats& of, int r) {
    double var = square - d * d, mean = k + d, part = mean - k;
    of.mean[r] = mean, of.rest[r] = (k - (mean - part)) + (d - part), of.d[r] = d, of.square[r] = square;
    // Rounding can make the difference of two equal squares negative; NaN stays.
    of.rstd[r] = 1 / std::sqrt((var < 0 ? 0 : var) + eps);
}

template <bool LAYER, class T> APART void statistics(const T* const* x, const Call& c, int rows, Stats& of) {
    double k[GROUP] = {}, d[GROUP] = {}, square[GROUP] = {}, eps = c.eps, n = (double)c.n;
    for (int r = 0; LAYER && r < rows; r++) k[r] = guess_of(x[r], c.n);
    measure<LAYER>(x, rows, c.n, c.block, k, d, square);
    for (int r = 0; r < GROUP; r++) d[r] /= n, square[r] /= n;
    if (!LAYER) {
        for (int r = 0; r < GROUP; r++) {
            double v = square[r] + eps;
            // v - v: infinity spoils all of its row, as it does a mean.
            of.mean[r] = of.rest[r] = of.d[r] = 0, of.rstd[r] = 1 / std::sqrt(v) + (v - v), of.square[r] = square[r];
        }
        return;
    }
    for (int r = 0; r < GROUP; r++) settle(k[r], d[r], square[r], eps, of, r);
    for (int r = 0; r < rows; r++)
        if (__builtin_expect(d[r] * d[r] > 2 * (square[r] - d[r] * d[r]), 0)) {
            double better = (f32)(k[r] + d[r]);
            measure<true>(x + r, 1, c.n, c.block, &better, d + r, square + r);
            settle(better, d[r] / n, square[r] / n, eps, of, r);
        }
}

// Gamma, beta, and |gamma| + |beta|, with which errors grow.
struct Parameters {
    const double *gamma, *beta, *sizes;
};

// The registers of a row that are in doubt, by their first columns.
struct Doubts {
    Index *at, count;
};

// y, of some columns of a row.
template <bool LAYER, int Y> struct Affine {
    Lanes<Y> mean, rstd, s;
    INLINE Affine() {}
    INLINE Affine(const Stats& of, int r)
        : mean(spread<Y>(of.mean[r])), rstd(spread<Y>(of.rstd[r])), s(spread<Y>(-of.rest[r] * of.rstd[r])) {}
    INLINE Lanes<Y> operator()(Lanes<Y> v, Lanes<Y> scale, Lanes<Y> shift) const {
        Lanes<Y> xhat = LAYER ? fma(minus(v, mean), rstd, s) : v * rstd;
        return fma(xhat, scale, shift);
    }
};

// y of R rows of a group, from row r on; what lies so many columns `ahead` is asked for. NEAREST: for each row there
// is a list of doubts to be filled, and a bound of the error beside |gamma| + |beta|.
template <int R, bool LAYER, bool PAST, bool NEAREST, class T, class To>
APART void write_y(const T* const* x, To* const* y, Index n, const Stats& of, int r, const Parameters& given, Index ahead,
                   Doubts* doubts = nullptr, const double* bounds = nullptr) {
    constexpr int Y = Y_OF<T>;
    const double *gamma = given.gamma, *beta = given.beta, *sizes = given.sizes;
    Affine<LAYER, Y> row[R];
    Lanes<Y> bound[R];
    const T* from[R];
    To* to[R];
    Doubts found[R];
    for (int i = 0; i < R; i++) {
        row[i] = Affine<LAYER, Y>(of, r + i), from[i] = x[r + i], to[i] = y[i];
        if (NEAREST) bound[i] = spread<Y>(bounds[i]), found[i] = {doubts[i].at, 0};
    }
    Index j = 0;
    for (; j + Y <= n; j += Y) {
        Lanes<Y> scale = load<Y>(gamma + j), shift = load<Y>(beta + j);
        Lanes<Y> size = NEAREST ? load<Y>(sizes + j) : scale;
#pragma GCC unroll 2
        for (int i = 0; i < R; i++) {
            ask_for(from[i] + j + ahead);
            Lanes<Y> v = row[i](load<Y>(from[i] + j), scale, shift);
            if (NEAREST && __builtin_expect(may_differ<To>(fma(size, bound[i], v), fma(size, -bound[i], v)), 0)) found[i].at[found[i].count++] = j;
            store<PAST>(to[i] + j, v);
        }
    }
    for (int i = 0; i < R; i++) {
        if (j < n) {
            store(to[i] + j, row[i](load<Y>(from[i] + j, n - j), load<Y>(gamma + j), load<Y>(beta + j)), n - j);
            if (NEAREST) found[i].at[found[i].count++] = j;
        }
        if (NEAREST) doubts[i] = found[i];
    }
}

// Whether y of row r, where it is in doubt, may round to something else.
template <bool LAYER, class T, class To>
APART bool is_open(const T* x, To* y, Index n, const Stats& of, int r, const Parameters& given, Errors errors, Doubts doubts) {
    constexpr int Y = Y_OF<T>;
    Affine<LAYER, Y> row(of, r);
    bool open = false;
    for (Index i = 0; i < doubts.count; i++) {
        Index j = doubts.at[i], some = n - j < Y ? n - j : Y;
        Lanes<Y> scale = load<Y>(given.gamma + j), shift = load<Y>(given.beta + j);
        // Zero gets the sign of plus.
        Lanes<Y> v = row(load<Y>(x + j, some), scale, shift) + spread<Y>(0.0);
        open |= differs<To>(v, bounds_of_y(errors, v, scale, shift), some);
        store(y + j, v, some);
    }
    return open;
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

// A row of the backward: dx = rstd * (g - m) + (x - mean) * p + q. NEAREST: the errors of xhat; rms(xhat) and
// rms(g - m), or a little more.
template <class T> struct Back {
    const T *dy, *x;
    double mean, rest, rstd, m;
    double *centered = nullptr, *g = nullptr;  // x - mean and g - m, where KEPT
    double p = 0, q = 0;
    Errors errors = {};
    double spread = 0, size = 0;
};

// Whether the sums leave x - mean and g - m in memory for dx. To make them again from 16 bits takes longer: backward of
// n = 64 to 16384 on Zen 4, 0.77 to 0.95 of the time; of float32 0.9 up to n = 128, 1.0 to 1.4 up to 512.
template <class T> constexpr bool KEPT = sizeof(T) == 2;

// Vectors of sums over rows: of the gradients and, NEAREST, of the squares of dy and xhat, which bound their errors.
struct Sums {
    double *dgamma, *dbeta, *of_dy, *of_xhat;
};

// Rows whose dgamma and dbeta are summed plainly, so that their chains of additions are short.
template <bool NEAREST> constexpr Index PART_OF = NEAREST ? 16 : 64;

// Some columns of a row. Of what is rounded correctly no bit depends on the order of sums, nor on how wide registers are.
template <bool NEAREST> constexpr int FEW = NEAREST && (WIDEST > B) ? WIDEST : B;
template <bool NEAREST> using Few = Lanes<FEW<NEAREST>, NEAREST ? WIDEST : AT_MOST_FOUR>;

template <int R, class N> struct Constants {
    N mean[R], rstd[R], s[R], m[R];
    double *centered[R], *g[R];
};

// Of R rows, sums along them: g - m, (g - m) * xhat, and the square of the first.
template <int R, class N> struct Along {
    N plain[R] = {}, product[R] = {}, square[R] = {};
};

// Some columns of R rows, or the first `some` of them, go to the sums along the rows and over them.
template <bool SOME, int R, bool LAYER, bool NEAREST, class T, class N = Few<NEAREST>>
INLINE void pull_columns(const T* const* dy, const T* const* x, Index j, Index some, const double* gamma,
                         const Constants<R, N>& of, const Sums& over, Along<R, N>& along) {
    constexpr int K = FEW<NEAREST>, W = K / N::REGISTERS_OF;
    double *__restrict dgamma = over.dgamma, *__restrict dbeta = over.dbeta;
    double *__restrict of_dy = over.of_dy, *__restrict of_xhat = over.of_xhat;
    N u = load<K, W>(gamma + j), sg = load<K, W>(dgamma + j), sb = load<K, W>(dbeta + j), sd = u, sx = u;
    if (NEAREST) sd = load<K, W>(of_dy + j), sx = load<K, W>(of_xhat + j);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        N d = load<K, W>(dy[r] + j), v = load<K, W>(x[r] + j);
        N centered = LAYER ? v - of.mean[r] : v, xhat = LAYER ? fma(centered, of.rstd[r], of.s[r]) : v * of.rstd[r];
        N g = LAYER ? fma(d, u, of.m[r]) : d * u;
        if (KEPT<T>) store(of.centered[r] + j, centered), store(of.g[r] + j, g);
        if (SOME) g = first(g, some);
        if (LAYER) along.plain[r] = along.plain[r] + g;
        along.product[r] = fma(g, xhat, along.product[r]);
        sb = sb + d, sg = fma(d, xhat, sg);
        if (NEAREST) along.square[r] = fma(g, g, along.square[r]), sd = fma(d, d, sd), sx = fma(xhat, xhat, sx);
    }
    store(dgamma + j, sg), store(dbeta + j, sb);
    if (NEAREST) store(of_dy + j, sd), store(of_xhat + j, sx);
}

// The sums along R rows; dy and dy * xhat are added to those over rows. What depends on a row is in local
// variables, since for all that the compiler knows a store to dgamma may change it: 0.46 against 0.66.
template <int R, bool LAYER, bool NEAREST, class T>
APART void pull(Back<T>* rows, Index n, const double* __restrict gamma, Sums over, Index block) {
    using N = Few<NEAREST>;
    constexpr int K = FEW<NEAREST>, W = K / N::REGISTERS_OF;
    Along<R, N> all;
    Constants<R, N> of;
    const T *dy[R], *x[R];
    for (int r = 0; r < R; r++) {
        const Back<T>& row = rows[r];
        of.mean[r] = spread<K, W>(row.mean), of.rstd[r] = spread<K, W>(row.rstd);
        of.s[r] = spread<K, W>(-row.rest * row.rstd), of.m[r] = spread<K, W>(-row.m);
        of.centered[r] = row.centered, of.g[r] = row.g, dy[r] = row.dy, x[r] = row.x;
    }
    for (Index start = 0; start < n; start += block) {
        Along<R, N> part;
        Index stop = n - start < block ? n : start + block, j = start;
        for (; j + K <= stop; j += K)
            pull_columns<false, R, LAYER, NEAREST>(dy, x, j, K, gamma, of, over, part);
        if (j < stop) {
            T copy[R][2][K] = {};
            const T *last_dy[R], *last_x[R];
            Constants<R, N> last_of = of;
            for (int r = 0; r < R; r++) {
                if (KEPT<T>) last_of.centered[r] += j, last_of.g[r] += j;
                memcpy(copy[r][0], dy[r] + j, (size_t)(stop - j) * sizeof(T));
                memcpy(copy[r][1], x[r] + j, (size_t)(stop - j) * sizeof(T));
                last_dy[r] = copy[r][0], last_x[r] = copy[r][1];
            }
            Sums last = {over.dgamma + j, over.dbeta + j, NEAREST ? over.of_dy + j : nullptr, NEAREST ? over.of_xhat + j : nullptr};
            pull_columns<true, R, LAYER, NEAREST>(last_dy, last_x, 0, stop - j, gamma + j, last_of, last, part);
        }
        for (int r = 0; r < R; r++) {
            all.plain[r] = all.plain[r] + part.plain[r], all.product[r] = all.product[r] + part.product[r];
            if (NEAREST) all.square[r] = all.square[r] + part.square[r];
        }
    }
    for (int r = 0; r < R; r++) {
        double plain = LAYER ? total(all.plain[r]) / (double)n : 0, slope = total(all.product[r]) / (double)n;
        double rstd = rows[r].rstd, s = -rows[r].rest * rstd;
        rows[r].p = -slope * rstd * rstd;
        rows[r].q = -(plain + slope * s) * rstd;
        if (NEAREST) rows[r].size = 1.01 * std::sqrt(total(all.square[r]) / (double)n);
    }
}

// dx, of some columns of a row.
template <bool LAYER> struct Projected {
    Lanes<L> mean, rstd, m, p, q;
    template <class T> INLINE explicit Projected(const Back<T>& of)
        : mean(spread<L>(of.mean)), rstd(spread<L>(of.rstd)), m(spread<L>(-of.m)), p(spread<L>(of.p)), q(spread<L>(of.q)) {}
    INLINE Lanes<L> operator()(Lanes<L> centered, Lanes<L> g) const {
        return fma(centered, p, LAYER ? fma(g, rstd, q) : g * rstd);
    }
    INLINE Lanes<L> operator()(Lanes<L> d, Lanes<L> v, Lanes<L> u) const {
        return (*this)(LAYER ? minus(v, mean) : v, LAYER ? fma(d, u, m) : d * u);
    }
};

template <class T> INLINE Errors errors_of_dx(const Back<T>& of, double chain) {
    return errors_of_dx(of.errors, of.rstd, of.size, chain);
}

// NEAREST: the list of doubts is to be filled.
template <bool LAYER, bool PAST, bool NEAREST, class T, class To>
APART void write_dx(const Back<T>& of, To* dx, Index n, const double* gamma, Index ahead, Doubts* doubts = nullptr, double chain = 0) {
    Projected<LAYER> row(of);
    const T *dy = of.dy, *x = of.x;
    Doubts found = {NEAREST ? doubts->at : nullptr, 0};
    double bound = NEAREST ? bound_of_dx(errors_of_dx(of, chain), of.rstd, of.size, of.spread, n) : 0;
    Lanes<L> all = spread<L>(bound);
    auto at = [&](Index j, Index some) INLINED {
        if constexpr (KEPT<T>) return row(load<L>(of.centered + j), load<L>(of.g + j));
        else return some == L ? row(load<L>(dy + j), load<L>(x + j), load<L>(gamma + j))
                              : row(load<L>(dy + j, some), load<L>(x + j, some), load<L>(gamma + j));
    };
    Index j = 0;
    for (; j + L <= n; j += L) {
        ask_for(dy + j + ahead), ask_for(x + j + ahead);
        Lanes<L> v = at(j, L);
        if (NEAREST && __builtin_expect(may_differ<To>(v + all, v - all), 0)) found.at[found.count++] = j;
        store<PAST>(dx + j, v);
    }
    if (j < n) {
        store(dx + j, at(j, n - j), n - j);
        if (NEAREST) found.at[found.count++] = j;
    }
    if (NEAREST) *doubts = found;
}

// Whether dx of a row, where it is in doubt, may round to something else.
template <bool LAYER, class T, class To>
APART bool is_open(const Back<T>& of, To* dx, Index n, const double* gamma, Doubts doubts, double chain) {
    Projected<LAYER> row(of);
    Errors errors = errors_of_dx(of, chain);
    bool open = false;
    for (Index i = 0; i < doubts.count; i++) {
        Index j = doubts.at[i], some = n - j < L ? n - j : L;
        Lanes<L> at = load<L>(of.x + j, some);
        // Zero gets the sign of plus.
        Lanes<L> v = row(load<L>(of.dy + j, some), at, load<L>(gamma + j)) + spread<L>(0.0);
        open |= differs<To>(v, bounds_of_dx<LAYER>(errors, v, (LAYER ? at - row.mean : at) * row.rstd), some);
        store(dx + j, v, some);
    }
    return open;
}

}  // namespace
