// The backward of rows.h: R rows at a time, which share the loads of gamma and of the sums over
// rows. Pass 1, `pull`, sums along the rows and over them; pass 2, `write_dx`, writes dx.
#pragma once
#include "rows.h"

namespace {

// Lanes of a row of the backward: two rows, with their sums and constants, fit 16 registers. AVX2,
// n = 1024: 1.90 10^9 elements a second; with eight lanes 1.58, or one row at a time 1.70.
constexpr int LANES_BACK = 4;

// m: of four elements of g, the one of smallest magnitude.
template <class T> INLINE double pivot(const T* dy, const double* gamma, Index n) {
    Index s = n < 4 ? 0 : n / 4;
    T sample[4] = {read<T>(dy), read<T>(dy + s), read<T>(dy + 2 * s), read<T>(dy + 3 * s)};
    double g[4];
    write(g, load<4, AT_MOST_FOUR>(sample));
    for (int i = 0; i < 4; i++) g[i] *= gamma[i * s];
    double a = std::fabs(g[0]) < std::fabs(g[1]) ? g[0] : g[1];
    double b = std::fabs(g[2]) < std::fabs(g[3]) ? g[2] : g[3];
    return std::fabs(a) < std::fabs(b) ? a : b;
}

// A row of the backward. plain, slope: A and B, the means of g - m and of its product with xhat.
// NEAREST: the errors of xhat, `spread` >= rms(xhat), `rms_g` >= rms(g - m), the errors of dx, and
// a bound for all dx of the row.
template <class T> struct Back {
    const T *dy, *x;
    double mean, mean_lo, rstd, m;
    double* centered = nullptr;
    double* g = nullptr;  // if KEPT: x, or CENTER x - mean, and g - m
    double plain = 0;
    double slope = 0;
    Errors errors = {};
    double spread = 0;
    double rms_g = 0;
    Errors of_dx = {};
    double bound = 0;
};

// Whether pass 1 leaves x - mean and g - m in memory for pass 2. Types of 16 bits take longer to
// convert again: backward of n = 64 to 16384 on Zen 4, 0.77 to 0.95 of the time. Float32: 0.9 up to
// n = 128, 1.0 to 1.4 up to 512.
template <class T> constexpr bool KEPT = sizeof(T) == 2;

// Sums over rows: the gradients and, NEAREST, the squares of dy and xhat, which bound their errors.
struct Sums {
    double *dgamma, *dbeta, *dy_squares, *xhat_squares;
};

// Rows at a time: two fill 16 registers, four 32.
template <bool NEAREST> constexpr int ROWS_OF_DX = NEAREST && WIDEST == 8 ? 4 : 2;

// Lanes of pass 1. NEAREST takes the widest register: correctly rounded results do not depend on
// the order of the sums.
template <bool NEAREST>
constexpr int LANES_OF_PULL = NEAREST && (WIDEST > LANES_BACK) ? WIDEST : LANES_BACK;
template <bool NEAREST>
using LanesOfPull = Lanes<LANES_OF_PULL<NEAREST>, NEAREST ? WIDEST : AT_MOST_FOUR>;

// Pass 1: the sums along R rows; dy and dy * xhat are added to those over rows, which FIRST begins.
// Row constants are local copies, since the compiler must assume that stores to dgamma change a
// struct: 0.46 ns an element, without copies 0.66.
template <bool FIRST, int R, class M, class T>
NOINLINE void pull(Back<T>* rows, Index n, const double* __restrict gamma, Sums over) {
    using N = LanesOfPull<M::NEAREST>;
    constexpr int K = LANES_OF_PULL<M::NEAREST>;
    constexpr int W = K / N::REGISTERS_OF;
    constexpr Index block = BLOCK<M::NEAREST, RUN_BACK * K>;
    Blocks<M::NEAREST, Along<R, N>> blocks;
    N mean[R], rstd[R], s[R], m[R];
    double *kept_centered[R], *kept_g[R];
    const T *dy[R], *x[R];
    for (int r = 0; r < R; r++) {
        const Back<T>& row = rows[r];
        mean[r] = broadcast<K, W>(row.mean);
        rstd[r] = broadcast<K, W>(row.rstd);
        s[r] = broadcast<K, W>(constant_of<M::CENTER>(row.mean, row.mean_lo, row.rstd));
        m[r] = broadcast<K, W>(-row.m);
        kept_centered[r] = row.centered;
        kept_g[r] = row.g;
        dy[r] = row.dy;
        x[r] = row.x;
    }
    for (Index start = 0; start < n; start += block) {
        Along<R, N> part = {};
        each_columns<K>(start, at_most(start + block, n), [&](Index j, Index count) INLINE_LAMBDA {
            double* __restrict dgamma = over.dgamma;
            double* __restrict dbeta = over.dbeta;
            double* __restrict dy_squares = over.dy_squares;
            double* __restrict xhat_squares = over.xhat_squares;
            N u = load<K, W>(gamma + j);
            N sg = {};
            N sb = {};
            N sd = {};
            N sx = {};
            if (!FIRST) {
                sg = load<K, W>(dgamma + j);
                sb = load<K, W>(dbeta + j);
            }
            if (M::NEAREST && !FIRST) {
                sd = load<K, W>(dy_squares + j);
                sx = load<K, W>(xhat_squares + j);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                N d = load<K, W>(dy[r] + j, count);
                N v = load<K, W>(x[r] + j, count);
                N centered = M::CENTER ? v - mean[r] : v;
                N xhat = M::CENTER || M::NEAREST ? fma(centered, rstd[r], s[r]) : v * rstd[r];
                N g = M::LAYER ? fma(d, u, m[r]) : d * u;  // u |g - m|
                if (KEPT<T>) {
                    store(kept_centered[r] + j, centered);
                    store(kept_g[r] + j, g);
                }
                if (count < K) g = first(g, count);
                if (M::LAYER) part.plain[r] = part.plain[r] + g;
                part.product[r] = fma(g, xhat, part.product[r]);
                sb = sb + d;
                sg = fma(
                    d, xhat, sg);  // u |dy|; |dy| (a |xhat| + b), and u |dy xhat| for each addition
                if (M::NEAREST) {
                    part.square[r] = fma(g, g, part.square[r]);
                    sd = fma(d, d, sd);
                    sx = fma(xhat, xhat, sx);
                }
            }
            store(dgamma + j, sg);
            store(dbeta + j, sb);
            if (M::NEAREST) {
                store(dy_squares + j, sd);
                store(xhat_squares + j, sx);
            }
        });
        blocks.add(part);
    }
    Along<R, N> all = blocks.total();
    double chain = chain_of(n, K, RUN_BACK);
    for (int r = 0; r < R; r++) {
        Back<T>& row = rows[r];
        row.plain = M::LAYER ? total(all.plain[r]) / (double)n : 0;  // (H + 2) u G
        row.slope = total(all.product[r]) / (double)n;  // (H + 5) u G + a |slope| + b |plain|
        if (!M::NEAREST) continue;
        row.rms_g = 1.01 * std::sqrt(total(all.square[r]) / (double)n);  // far above its roundings
        row.of_dx = errors_of_dx(
            row.errors, row.rstd, row.rms_g, std::fabs(row.plain), std::fabs(row.slope), chain);
        row.bound = bound_of_dx(row.of_dx, row.rstd, row.rms_g, row.spread, n);
    }
}

// Computes dx of a register of columns: rstd * (g - m) + (x - mean) * p + q, or with x * p.
// NEAREST: dx less a bound.
template <class M> struct Projected {
    Lanes<L> mean, rstd, m, p, q;
    template <class T>
    INLINE explicit Projected(const Back<T>& of, double bound = 0)
        : mean(broadcast<L>(of.mean)),
          rstd(broadcast<L>(of.rstd)),
          m(broadcast<L>(-of.m)),
          p(broadcast<L>(-of.slope * of.rstd * of.rstd)),
          q(broadcast<L>(
              -(of.plain + of.slope * constant_of<M::CENTER>(of.mean, of.mean_lo, of.rstd)) *
                  of.rstd -
              bound)) {}
    INLINE Lanes<L> operator()(Lanes<L> centered, Lanes<L> g) const {
        return fma(centered, p,
            M::LAYER || M::NEAREST ? fma(g, rstd, q) : g * rstd);  // its error: errors_of_dx
    }
    INLINE Lanes<L> operator()(Lanes<L> d, Lanes<L> v, Lanes<L> u) const {
        return (*this)(M::CENTER ? minus(v, mean) : v, M::LAYER ? fma(d, u, m) : d * u);
    }
};

// The errors of xhat from the statistics: D**2 = q - 1 + eps rstd**2, since rstd**2 (var + eps) =
// 1; `spread` is sqrt(q). 2**-40 is far above the roundings of D**2.
template <bool LAYER> INLINE Errors errors_again(const Call& c, Index i, double m, double chain) {
    double spread = c.spread[i];
    double rstd = c.rstd[i];
    double d_square = spread * spread - 1 + c.eps * rstd * rstd;
    return errors_of_xhat<LAYER>(spread, larger(d_square, 0) + 0x1p-40, m, chain);
}

// Pass 2: writes dx. NEAREST: registers that fail the test by the bound of the row go to
// `uncertified`.
template <class M, bool PAST, class T, class To>
NOINLINE void write_dx(const Back<T>& of, To* dx, Index n, const double* gamma, Index ahead,
    Uncertified* uncertified = nullptr) {
    Projected<M> row(of, of.bound);
    const T* dy = of.dy;
    const T* x = of.x;
    Uncertified failed = {M::NEAREST ? uncertified->at : nullptr, 0};
    // v is dx less the bound: if v and v + 2 bound round alike, it is dx rounded.
    // `beside_midpoints` moves v off midpoints.
    Lanes<L> both = broadcast<L>(2 * of.bound);
    auto at = [&](Index j, Index count) INLINE_LAMBDA {
        // Pass 1 leaves nothing behind a row; what is there must not overflow.
        if (KEPT<T> && count < L)
            return row(first(load<L>(of.centered + j), count), first(load<L>(of.g + j), count));
        if constexpr (KEPT<T>)
            return row(load<L>(of.centered + j), load<L>(of.g + j));
        else
            return row(load<L>(dy + j, count), load<L>(x + j, count), load<L>(gamma + j));
    };
    Index registers = n / L;
    Index step = is_behind(dx, dy) || is_behind(dx, x) ? -L : L;
    Index j = step > 0 ? 0 : (registers - 1) * L;
    for (Index k = 0; k < registers; k++, j += step) {
        for (const T* from : {dy, x}) {
            __builtin_prefetch(from + j + ahead, 0, SECOND_LEVEL);
            __builtin_prefetch(from + j + NEAR);
        }
        Lanes<L> v = at(j, L);
        if (M::NEAREST && __builtin_expect(may_differ<To>(v + both, v), 0))
            failed.at[failed.count++] = j;
        store<PAST>(dx + j, M::NEAREST ? beside_midpoints(v) : v);
    }
    if ((j = registers * L) < n) {
        store(dx + j, at(j, n - j), n - j);
        if (M::NEAREST) failed.at[failed.count++] = j;
    }
    if (M::NEAREST) *uncertified = failed;
}

template <class M, class T>
NOINLINE bool is_uncertified(
    const Back<T>& of, T* dx, Index n, const double* gamma, Uncertified uncertified) {
    Projected<M> row(of);
    return round_failed<L>(
        dx, n, uncertified, [&](Index j, Index count, Lanes<L>& v) INLINE_LAMBDA {
            Lanes<L> x = load<L>(of.x + j, count);
            v = row(load<L>(of.dy + j, count), x, load<L>(gamma + j));
            return bounds_of_dx<M::LAYER>(of.of_dx, v, (M::LAYER ? x - row.mean : x) * row.rstd);
        });
}

}  // namespace
