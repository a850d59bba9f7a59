// The backward of rows.h: R rows at a time, which share the loads of gamma and of the sums over
// rows. Pass 1, `pull`, sums along the rows and over them; pass 2, `write_dx`, writes dx.
#pragma once
#include "rows.h"

namespace {

// Lanes of a row of the backward: two rows, with their sums and constants, fit 16 registers. AVX2,
// n = 1024: 1.90 10^9 elements a second; with eight lanes 1.58, or one row at a time 1.70. NEAREST
// takes the widest register: correctly rounded results do not depend on the order of the sums.
constexpr int LANES_BACK = 4;
template <bool NEAREST>
constexpr int LANES_OF_PULL = NEAREST && (WIDEST > LANES_BACK) ? WIDEST : LANES_BACK;
template <bool NEAREST>
using LanesOfPull = Lanes<LANES_OF_PULL<NEAREST>, NEAREST ? WIDEST : AT_MOST_FOUR>;

// Rows at a time: two fill 16 registers, four 32.
template <bool NEAREST> constexpr int ROWS_OF_DX = NEAREST && WIDEST == 8 ? 4 : 2;

// Whether pass 1 leaves x - mean and g - m in memory for pass 2. Types of 16 bits take longer to
// convert again: backward of n = 64 to 16384 on Zen 4, 0.77 to 0.95 of the time. Float32: 0.9 up to
// n = 128, 1.0 to 1.4 up to 512.
template <class T> constexpr bool KEPT = sizeof(T) == 2;

// A row of the backward. If KEPT, `centered` takes x, or CENTER x - mean, and `g` takes g - m.
// NEAREST: the errors of xhat, `spread` >= rms(xhat), the errors of dx, and a bound for all dx of
// the row.
template <class T> struct Back {
    const T* dy;
    const T* x;
    double* centered = nullptr;
    double* g = nullptr;
    double mean = 0;
    double mean_lo = 0;
    double rstd = 0;
    double pivot = 0;
    Means means = {};
    Errors errors = {};
    double spread = 0;
    Errors of_dx = {};
    double bound = 0;
};

// The pivot m: of four elements of g, the one of smallest magnitude.
template <class T> INLINE double pivot_of(const T* dy, const double* gamma, Index n) {
    Index s = n < 4 ? 0 : n / 4;
    T sample[4] = {read<T>(dy), read<T>(dy + s), read<T>(dy + 2 * s), read<T>(dy + 3 * s)};
    double g[4];
    write(g, load<4, AT_MOST_FOUR>(sample));
    for (int i = 0; i < 4; i++) g[i] *= gamma[i * s];
    double a = std::fabs(g[0]) < std::fabs(g[1]) ? g[0] : g[1];
    double b = std::fabs(g[2]) < std::fabs(g[3]) ? g[2] : g[3];
    return std::fabs(a) < std::fabs(b) ? a : b;
}

// The errors of xhat from the statistics: D**2 = q - 1 + eps rstd**2, since rstd**2 (var + eps) =
// 1; `spread` is sqrt(q). 2**-40 is far above the roundings of D**2.
template <bool LAYER>
INLINE Errors errors_again(double spread, double rstd, double eps, double M, double chain) {
    double d_square = spread * spread - 1 + eps * rstd * rstd;
    return errors_of_xhat<LAYER>(spread, larger(d_square, 0) + 0x1p-40, M, chain);
}

// ---- pass 1 ----

// Sums over rows: the gradients and, NEAREST, the squares of dy and xhat, which bound their errors.
struct OverRows {
    const double* gamma;
    double* dgamma;
    double* dbeta;
    double* dy_squares;
    double* xhat_squares;
    bool begun = false;
};

// Sums along R rows: of g - m, of its product with xhat and, NEAREST, of its square.
template <int R, class N> struct AlongRows {
    N g[R], slope[R], square[R];
    INLINE void operator+=(const AlongRows& other) {
        for (int r = 0; r < R; r++) {
            g[r] = g[r] + other.g[r];
            slope[r] = slope[r] + other.slope[r];
            square[r] = square[r] + other.square[r];
        }
    }
};

// A row of pass 1. Its constants are local copies, since the compiler must assume that stores to
// dgamma change a struct: 0.46 ns an element, without copies 0.66.
template <class M, class T> struct RowOfPull {
    using V = LanesOfPull<M::NEAREST>;
    const T* dy;
    const T* x;
    double* centered;
    double* g;
    V minus_pivot;
    ElementOfXhat<M, V> element;
    INLINE RowOfPull() {}
    INLINE RowOfPull(const Back<T>& of)
        : dy(of.dy),
          x(of.x),
          centered(of.centered),
          g(of.g),
          minus_pivot(V::all(-of.pivot)),
          element(of.mean, of.mean_lo, of.rstd) {}
};

// Adds a register of columns of R rows to the sums along them; dy and dy * xhat to those over rows,
// which FIRST begins.
template <class M, bool FIRST, int R, class T, class V>
INLINE void pull_columns(const RowOfPull<M, T> (&row)[R], Index j, Index count,
    const OverRows& over, AlongRows<R, V>& along) {
    constexpr int K = LANES_OF_PULL<M::NEAREST>;
    constexpr int W = K / V::REGISTERS_OF;
    double* __restrict dgammas = over.dgamma + j;
    double* __restrict dbetas = over.dbeta + j;
    double* __restrict dy_squares = over.dy_squares + j;
    double* __restrict xhat_squares = over.xhat_squares + j;
    V gamma = load<K, W>(over.gamma + j);
    V dgamma = FIRST ? V{} : load<K, W>(dgammas);
    V dbeta = FIRST ? V{} : load<K, W>(dbetas);
    V dy_square = FIRST || !M::NEAREST ? V{} : load<K, W>(dy_squares);
    V xhat_square = FIRST || !M::NEAREST ? V{} : load<K, W>(xhat_squares);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        V dy = load<K, W>(row[r].dy + j, count);
        V x = load<K, W>(row[r].x + j, count);
        V centered = row[r].element.centered(x);
        V xhat = row[r].element.scaled(centered);
        V g = M::LAYER ? fma(dy, gamma, row[r].minus_pivot) : dy * gamma;  // u |g - m|
        if (KEPT<T>) {
            store(row[r].centered + j, centered);
            store(row[r].g + j, g);
        }
        if (count < K) g = first(g, count);
        if (M::LAYER) along.g[r] = along.g[r] + g;
        along.slope[r] = fma(g, xhat, along.slope[r]);
        dbeta = dbeta + dy;              // u |dy|
        dgamma = fma(dy, xhat, dgamma);  // |dy| (a |xhat| + b), and u |dy xhat|
        if (M::NEAREST) {
            along.square[r] = fma(g, g, along.square[r]);
            dy_square = fma(dy, dy, dy_square);
            xhat_square = fma(xhat, xhat, xhat_square);
        }
    }
    store(dgammas, dgamma);
    store(dbetas, dbeta);
    if (M::NEAREST) {
        store(dy_squares, dy_square);
        store(xhat_squares, xhat_square);
    }
}

template <class M, int R, bool FIRST, class T>
NOINLINE auto sums_of(const Back<T>* rows, Index n, const OverRows& to) {
    constexpr int K = LANES_OF_PULL<M::NEAREST>;
    constexpr Index block = BLOCK<M::NEAREST, RUN_BACK * K>;
    using Along = AlongRows<R, LanesOfPull<M::NEAREST>>;
    Blocks<M::NEAREST, Along> blocks;
    const OverRows over = to;
    RowOfPull<M, T> row[R];
    for (int r = 0; r < R; r++) row[r] = rows[r];
    for (Index start = 0; start < n; start += block) {
        Along along = {};
        each_columns<K>(start, at_most(start + block, n), [&](Index j, Index count) INLINE_LAMBDA {
            pull_columns<M, FIRST>(row, j, count, over, along);
        });
        blocks.add(along);
    }
    return blocks.total();
}

// Pass 1 of R rows.
template <class M, int R, class T> INLINE void pull(Back<T>* rows, Index n, OverRows& over) {
    auto sums = (over.begun ? sums_of<M, R, false, T> : sums_of<M, R, true, T>)(rows, n, over);
    over.begun = true;
    double chain = chain_of(n, LANES_OF_PULL<M::NEAREST>, RUN_BACK);
    for (int r = 0; r < R; r++) {
        Back<T>& row = rows[r];
        Means& of = row.means;
        of.mean = M::LAYER ? total(sums.g[r]) / (double)n : 0;  // (H + 2) u G
        of.slope = total(sums.slope[r]) / (double)n;  // (H + 5) u G + a |slope| + b |mean|
        if (!M::NEAREST) continue;
        of.G = 1.01 * std::sqrt(total(sums.square[r]) / (double)n);  // far above its roundings
        row.of_dx = errors_of_dx(row.errors, row.rstd, of, chain);
        row.bound = bound_of_dx(row.of_dx, row.rstd, of.G, row.spread, n);
    }
}

// ---- pass 2 ----

// Computes dx of a register of columns: rstd * (g - m) + (x - mean) * p + q, or with x * p: the
// equation of rows.h multiplied out, p = -slope * rstd**2. Its error: errors_of_dx.
template <class M> struct ElementOfDx {
    using V = Lanes<LANES>;
    ElementOfXhat<M, V> xhat;
    V minus_pivot, p, q;
    template <class T>
    INLINE explicit ElementOfDx(const Back<T>& of) : xhat(of.mean, of.mean_lo, of.rstd) {
        double constant = xhat.constant_of(of.mean, of.mean_lo, of.rstd);
        minus_pivot = V::all(-of.pivot);
        p = V::all(-of.means.slope * of.rstd * of.rstd);
        q = V::all(-(of.means.mean + of.means.slope * constant) * of.rstd);
    }
    INLINE V operator()(V centered, V g) const {
        return fma(centered, p, M::LAYER ? fma(g, xhat.rstd, q) : g * xhat.rstd);
    }
    INLINE V operator()(V dy, V x, V gamma) const {
        return (*this)(xhat.centered(x), M::LAYER ? fma(dy, gamma, minus_pivot) : dy * gamma);
    }
};

// Pass 2: dx of a row.
template <class M, class T, class Sink>
NOINLINE void write_dx(const Back<T>& of, const Columns& columns, Sink& sink) {
    ElementOfDx<M> element(of);
    const Columns at = columns;
    Sink out = sink;
    const T* dy = of.dy;
    const T* x = of.x;
    const double* centered = of.centered;
    const double* g = of.g;
    auto compute = [&](Index j, Index count, Lanes<LANES>* v) INLINE_LAMBDA {
        for (const T* from : {dy, x}) {
            __builtin_prefetch(from + j + at.ahead, 0, SECOND_LEVEL);
            __builtin_prefetch(from + j + NEAR);
        }
        if constexpr (KEPT<T>)
            *v = element(load<LANES>(centered + j, count), load<LANES>(g + j, count));
        else
            *v = element(
                load<LANES>(dy + j, count), load<LANES>(x + j, count), load<LANES>(at.gamma + j));
        return broadcast<LANES>(1.0);
    };
    bool reversed = is_behind(out.to[0], dy) || is_behind(out.to[0], x);
    write_columns<LANES>(at.n, reversed, out, compute);
    sink = out;
}

// Settles the failed registers of a row.
template <class M, class T, class To>
NOINLINE bool settle_dx(const Back<T>& of, const Columns& columns, const Draft<To>& row) {
    ElementOfDx<M> element(of);
    auto value_of = [&](Index j, Index count, Lanes<LANES>& v) INLINE_LAMBDA {
        Lanes<LANES> x = load<LANES>(of.x + j, count);
        v = element(load<LANES>(of.dy + j, count), x, load<LANES>(columns.gamma + j));
        Lanes<LANES> xhat = (M::LAYER ? x - element.xhat.mean : x) * element.xhat.rstd;
        return bounds_of_dx<M::LAYER>(of.of_dx, v, xhat);
    };
    return settle<LANES>(row, columns.n, value_of);
}

}  // namespace
