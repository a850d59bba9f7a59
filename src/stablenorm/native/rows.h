// Rows of float16, bfloat16 and float32: the equations of the norms in float64, in two passes each way.
//
// Forward: a guess k of the mean is subtracted. With d = mean(x - k), mean = k + d and
// var = mean((x - k)**2) - d**2: exact algebra for any k, so that one pass gives both, and the second writes
// y. k is the mean of some elements, rounded to float32: x - k has at most 25 bits, and is exact, where the two
// are near each other. If d**2 > 2 var it was a bad guess, and the difference has lost more than
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
// follows from H. For rounding="nearest" sums are pairwise, so that H is log2(n) + 5, of the backward log2(n) + 13 to
// 15; certain.h has its bounds, and NEAREST says here that results are judged by them.
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

// Up to so many short rows are done together: what waits for divisions and roots waits for all at once.
constexpr int GROUP = 8;

// Of the rows of a group: (x - mean - rest) * rstd is xhat.
struct Stats {
    double mean[GROUP], rest[GROUP], rstd[GROUP];
    double d[GROUP], square[GROUP];  // means of x - k and of its square
};

// ---- forward ----

// Sums along R rows: of x - k or g - m, of squares or of products with xhat, and NEAREST, of the backward, (g - m)**2.
template <int R, class N> struct Along {
    N plain[R], product[R], square[R];
    INLINE void operator+=(const Along& other) {
        for (int r = 0; r < R; r++)
            plain[r] = plain[r] + other.plain[r], product[r] = product[r] + other.product[r], square[r] = square[r] + other.square[r];
    }
};

// Columns of a row that are added up one after the other.
template <bool NEAREST, Index SHORT> constexpr Index BLOCK = NEAREST ? SHORT : 1024;

// The sum of what blocks add up to: one after the other or, NEAREST, in pairs, as a binary counter carries.
template <bool NEAREST, class Part> struct Blocks {
    Part sum = {}, held[NEAREST ? 64 : 1];
    Index count = 0, top = 0;
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

template <bool LAYER, class T> INLINE Along<1, Lanes<L>> measure_block(const T* x, Index n, Lanes<L> k) {
    Along<1, Lanes<L>> of = {};
    auto add = [&](Lanes<L> c) INLINED {
        if (LAYER) of.plain[0] = of.plain[0] + c;
        of.product[0] = fma(c, c, of.product[0]);
    };
    Index j = 0;
// Unrolled, GCC 12 leaves sums in memory where there are 16 registers: 0.17 ns against 0.09.
#pragma GCC unroll 1
    for (; j + L <= n; j += L) add(LAYER ? minus(load<L>(x + j), k) : load<L>(x + j));
    if (j < n) add(first(LAYER ? load<L>(x + j, n - j) - k : load<L>(x + j, n - j), n - j));
    return of;
}

// Of some rows, the sums of x - k and of its square.
template <bool LAYER, bool NEAREST, class T>
APART void measure(const T* const* x, int rows, Index n, const double* guess, double* plain, double* product) {
    constexpr Index block = BLOCK<NEAREST, RUN * L>;
    for (int r = 0; r < rows; r++) {
        Lanes<L> k = spread<L>(guess[r]);
        Blocks<NEAREST, Along<1, Lanes<L>>> blocks;
        for (Index start = 0; start < n; start += block)
            blocks.add(measure_block<LAYER>(x[r] + start, n - start < block ? n - start : block, k));
        auto all = blocks.total();
        plain[r] = total(all.plain[0]), product[r] = total(all.product[0]);
    }
}

template <class T> INLINE double guess_of(const T* x, Index n) {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, f32>;
    auto at = [&](int i) INLINED { return read<Bits>(x + i * (n / 8)); };
    // A register: an array would be read before all of it is written.
    Register<Bits, 8> some = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)};
    return (f32)(total(load<8>((const T*)&some)) * 0.125);
}

// For nearest, whose bounds grow with |d|: of the first 64. Of 20 backwards of (65536, 1024) 13 left a column open, now 9.
template <class T> INLINE double better_guess_of(const T* x) {
    Lanes<L> sum = {};
    for (Index j = 0; j < 64; j += L) sum = sum + load<L>(x + j);
    return (f32)(total(sum) / 64);
}

INLINE void settle(double k, double d, double square, double eps, Stats& of, int r) {
    double var = square - d * d, mean = k + d, part = mean - k;
    of.mean[r] = mean, of.rest[r] = (k - (mean - part)) + (d - part), of.d[r] = d, of.square[r] = square;
    // Rounding can make the difference of two equal squares negative; NaN stays.
    of.rstd[r] = 1 / std::sqrt((var < 0 ? 0 : var) + eps);
}

template <bool LAYER, class T> APART void statistics(const T* const* x, const Call& c, int rows, Stats& of) {
    double k[GROUP] = {}, d[GROUP] = {}, square[GROUP] = {}, eps = c.eps, n = (double)c.n;
    auto measure_rows = c.nearest ? measure<LAYER, true, T> : measure<LAYER, false, T>;
    for (int r = 0; LAYER && r < rows; r++) k[r] = c.nearest && c.n >= 256 ? better_guess_of(x[r]) : guess_of(x[r], c.n);
    measure_rows(x, rows, c.n, k, d, square);
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
            measure_rows(x + r, 1, c.n, &better, d + r, square + r);
            settle(better, d[r] / n, square[r] / n, eps, of, r);
        }
}

// Gamma, beta, and |gamma| + |beta|, with which errors grow.
struct Parameters {
    const double *gamma, *beta, *sizes;
};

// The registers of a row whose elements the bound of the row does not certify, by their first columns.
struct Doubts {
    Index *at, count;
};

// Whether to center a row before it is scaled, given |mean| rstd: what that saves of the error is worth the time.
INLINE bool is_far(double m) { return m > 8; }

// What is left of xhat once x, or CENTER x - mean, is multiplied by rstd.
template <bool CENTER> INLINE double left_of(double mean, double rest, double rstd) {
    return CENTER ? -rest * rstd : fma(-mean, rstd, -rest * rstd);
}

// y, of some columns of a row.
template <bool CENTER, bool NEAREST, int Y> struct Affine {
    Lanes<Y> mean, rstd, s;
    INLINE Affine() {}
    INLINE Affine(const Stats& of, int r)
        : mean(spread<Y>(of.mean[r])), rstd(spread<Y>(of.rstd[r])), s(spread<Y>(left_of<CENTER>(of.mean[r], of.rest[r], of.rstd[r]))) {}
    INLINE Lanes<Y> operator()(Lanes<Y> v, Lanes<Y> scale, Lanes<Y> shift) const {
        Lanes<Y> xhat = CENTER ? fma(minus(v, mean), rstd, s) : NEAREST ? fma(v, rstd, s) : v * rstd;
        return fma(xhat, scale, shift);
    }
};

// Whether results are written a little behind what is read, by the last 12 bits of their addresses. Loads wait for earlier
// stores that agree in these, so that such a row is written from its end: (4, 512, 1024), out= of 16 to 48 bytes behind
// x, 400 us against 1300. For the same reason, all rows are read before one is written.
INLINE bool is_behind(const void* to, const void* from) { return ((uintptr_t)to - (uintptr_t)from - 1) % 4096 < 1023; }

// y of R rows of a group, from row r on; what lies so many columns `ahead` is asked for. NEAREST: for each row there
// is a list of doubts to be filled, and a bound of the error beside |gamma| + |beta|. Rows of RMS norm, and NEAREST near
// rows, need no CENTER.
template <int R, bool CENTER, bool PAST, bool NEAREST, class T, class To>
APART void write_y(const T* const* x, To* const* y, Index n, const Stats& of, int r, const Parameters& given, Index ahead,
                   Doubts* doubts = nullptr, const double* bounds = nullptr) {
    // Rows of float32 are tested at once: n = 4096, 0.39 ns an element against 0.42. Of 16 bits there are too few registers.
    constexpr int Y = Y_OF<T>, AT_ONCE = NEAREST && sizeof(T) == 4 ? R : 1;
    const double *gamma = given.gamma, *beta = given.beta, *sizes = given.sizes;
    Affine<CENTER, NEAREST, Y> row[R];
    Lanes<Y> bound[R];
    const T* from[R];
    To* to[R];
    Doubts found[R];
    for (int i = 0; i < R; i++) {
        row[i] = Affine<CENTER, NEAREST, Y>(of, r + i), from[i] = x[r + i], to[i] = y[i];
        if (NEAREST) bound[i] = spread<Y>(bounds[i]), found[i] = {doubts[i].at, 0};
    }
    Index count = n / Y, step = is_behind(to[0], from[0]) ? -Y : Y, j = step > 0 ? 0 : (count - 1) * Y;
    for (Index k = 0; k < count; k++, j += step) {
        Lanes<Y> scale = load<Y>(gamma + j), shift = load<Y>(beta + j);
        Lanes<Y> size = NEAREST ? load<Y>(sizes + j) : scale;
        Lanes<Y> v[R];
#pragma GCC unroll 2
        for (int i = 0; i < R; i++) ask_for(from[i] + j + ahead), v[i] = row[i](load<Y>(from[i] + j), scale, shift);
#pragma GCC unroll 2
        for (int i = 0; i < R; i += AT_ONCE) {
            Lanes<Y> most[AT_ONCE], least[AT_ONCE];
            for (int k = 0; NEAREST && k < AT_ONCE; k++) most[k] = fma(size, bound[i + k], v[i + k]), least[k] = fma(size, -bound[i + k], v[i + k]);
            if (NEAREST && __builtin_expect(may_differ<To>(read<Lanes<AT_ONCE * Y>>(most), read<Lanes<AT_ONCE * Y>>(least)), 0))
                for (int k = 0; k < AT_ONCE; k++)
                    if (may_differ<To>(most[k], least[k])) found[i + k].at[found[i + k].count++] = j;
            for (int k = 0; k < AT_ONCE; k++) store<PAST>(to[i + k] + j, v[i + k]);
        }
    }
    j = count * Y;
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
APART bool is_uncertified(const T* x, To* y, Index n, const Stats& of, int r, const Parameters& given, Errors errors, Doubts doubts) {
    constexpr int Y = Y_OF<T>;
    Affine<LAYER, true, Y> row(of, r);
    bool differ = false;
    for (Index i = 0; i < doubts.count; i++) {
        Index j = doubts.at[i], some = n - j < Y ? n - j : Y;
        Lanes<Y> scale = load<Y>(given.gamma + j), shift = load<Y>(given.beta + j);
        // Zero gets the sign of plus.
        Lanes<Y> v = row(load<Y>(x + j, some), scale, shift) + spread<Y>(0.0);
        differ |= differs<To>(v, bounds_of_y(errors, v, scale, shift), some);
        store(y + j, v, some);
    }
    return differ;
}

}  // namespace
