// For test_nearest_bounds.py: computes rows by the headers of native/, in pairs and in float64,
// with the headers' bounds of their errors. The stride between vectors is `apart`; `padded` holds
// gamma and beta.
#include <vector>

#include "columns.h"

namespace {

using Room = std::vector<double>;

namespace pairs {

// Writes y, dx, dgamma and dbeta as high parts, low parts and bounds. Returns the number of rows
// out of range.
template <bool LAYER>
int by_pairs(const double* dy, const double* x, Index rows, Index n, double eps,
    const double* padded, Index apart, double* y, double* dx, double* sums) {
    const Parameters parameters = {padded, padded + apart};
    Call c;
    c.n = n;
    c.eps = eps;
    Room xhat((size_t)(2 * apart)), over((size_t)(6 * apart));
    int out_of_range = 0;
    for (Index i = 0; i < rows; i++, dy += n, x += n, y += 3 * apart, dx += 3 * apart) {
        Stats of = {};
        statistics<LAYER>(&x, c, 1, of);
        out_of_range += is_out_of_range(of, 0, x, n, LAYER);
        RowStats at = of.at(0, LAYER ? __builtin_nan("") : 0);
        write_y<LAYER>(x, ToPairs{y, y + apart, y + 2 * apart}, n, at, parameters);
        Back row = {dy, x, at, {0, 0}, {}, {}, 0};
        if (LAYER) row.m = pivot(dy, parameters, n);
        bool shift = LAYER && row.m.high != 0;
        Sums along = {};
        (shift ? pull<LAYER, LAYER, true> : pull<LAYER, false, true>)(row, n, parameters, along, 0,
            xhat.data(), {over.data(), apart, true});
        finish_means(along, n, &row, 1);
        (shift ? write_dx<LAYER, LAYER, ToPairs> : write_dx<LAYER, false, ToPairs>)(row,
            {dx, dx + apart, dx + 2 * apart}, n, parameters, xhat.data(), apart);
        for (Index j = 0; j < n; j++) {
            y[2 * apart + j] *= row_bound(n);
            dx[2 * apart + j] *= row_bound(n) * row.stats.rstd.high;
        }
        if (i % 64 == 63 || i == rows - 1) settle_columns({over.data(), apart, true}, n);
    }
    for (int which = 0; which < 2; which++)
        for (Index j = 0; j < n; j++) {
            double* from = over.data() + j;
            double* to = sums + 3 * which * apart + j;
            to[0] = from[2 * which * apart];
            to[apart] = from[(2 * which + 1) * apart];
            to[2 * apart] = sums_bound(n, rows + 7, 1) * from[(4 + which) * apart];
        }
    return out_of_range;
}

}  // namespace pairs

// Runs the backward's pass along a row; its sums over rows go to `over`.
template <bool LAYER, bool CENTER>
Back<float> pulled(const float* dy, const float* x, Index n, const double* gamma, const Stats& of,
    double spread, Errors errors, Room& over) {
    Back<float> row = {
        dy, x, of.mean[0], of.mean_lo[0], of.rstd[0], LAYER ? pivot(dy, gamma, n) : 0};
    row.spread = spread;
    row.errors = errors;
    double* sums = over.data();
    double* squares = sums + over.size() / 2;
    pull<false, 1, Mode<LAYER, CENTER, true>>(
        &row, n, gamma, {sums, sums + over.size() / 4, squares, squares + over.size() / 4});
    return row;
}

// Writes dgamma and dbeta, 8 columns at a time: high parts, low parts and bounds.
template <bool LAYER, bool DEEP> void closely(const Call& c, Index n, Index apart, double* sums) {
    const Index columns[] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (Index j = 0; j < n; j += 8)
        for (int which = 0; which < 2; which++) {
            Close of = sum_closely<LAYER, DEEP>(c, which, j, columns, n - j < 8 ? n - j : 8);
            double* at = sums + 3 * which * apart + j;
            store(at, of.sum.high);
            store(at + apart, of.sum.low);
            store(at + 2 * apart, broadcast<8>(1.02) * of.error);
        }
}

// Writes y and dx with the bounds of their elements and of their rows, and dgamma and dbeta with
// their bounds. `close` gets dgamma and dbeta by sum_closely, from statistics in float64 and in
// pairs. CENTER: x is centered first, as in rows far from 0.
template <bool LAYER, bool CENTER>
void by_float64(const float* dy, const float* x, Index rows, Index n, double eps,
    const double* padded, Index apart, double* y, double* dx, double* sums, double* close) {
    constexpr int Y = Y_OF<f32>;
    const double* gamma = padded;
    const double* beta = padded + apart;
    const double none = 0;
    Call c;
    c.rms = !LAYER;
    c.rows = rows;
    c.n = n;
    c.eps = eps;
    c.nearest = true;
    Room words((size_t)(4 * rows)), over((size_t)(4 * apart)), sizes((size_t)apart);
    c.spread = words.data();
    c.mean = c.spread + rows;
    c.mean_lo = c.mean + rows;
    c.rstd = c.mean_lo + rows;
    c.dy.data = (char*)dy;
    c.x.data = (char*)x;
    c.dy.stride = c.x.stride = n * 4;
    std::vector<Index> at((size_t)n);
    Errors worst = {0, 0};
    for (Index i = 0; i < rows; i++, dy += n, x += n, y += 3 * apart, dx += 3 * apart) {
        Stats of = {};
        statistics<LAYER>(&x, c, 1, of);
        double size = std::sqrt(of.square[0]) * of.rstd[0];
        double d = of.d[0] * of.rstd[0];
        double m = CENTER ? 0 : std::fabs(of.mean[0]) * of.rstd[0];
        double chain = chain_of(n, L, RUN);
        double bound = bound_of_y(errors_of_xhat<LAYER>(size, d * d, 0, chain), size, n, m);
        Errors errors = errors_of_xhat<LAYER>(size, d * d, m, chain);
        worst = {larger(worst.a, errors.a), larger(worst.b, errors.b)};
        c.spread[i] = size;
        c.mean[i] = of.mean[0];
        c.mean_lo[i] = of.mean_lo[0];
        c.rstd[i] = of.rstd[0];
        Uncertified uncertified = {at.data(), 0};
        write_y<1, Mode<LAYER, CENTER, true>, false>(
            &x, &y, n, of, 0, {gamma, beta, sizes.data()}, 0, &uncertified, &none);
        for (Index j = 0; j < n; j += Y)
            store(y + apart + j,
                bounds_of_y(errors, load<Y>(y + j), load<Y>(gamma + j), load<Y>(beta + j)));
        Back<float> row = pulled<LAYER, CENTER>(dy, x, n, gamma, of, size, errors, over);
        Projected<Mode<LAYER, CENTER, true>> project(row);
        for (Index j = 0; j < n; j += L) {
            Index width = n - j < L ? n - j : L;
            Lanes<L> v = load<L>(x + j, width);
            Lanes<L> xhat = (v - broadcast<L>(of.mean[0]) - broadcast<L>(of.mean_lo[0])) *
                            broadcast<L>(of.rstd[0]);
            store(dx + j, project(load<L>(dy + j, width), v, load<L>(gamma + j)));
            store(dx + apart + j, bounds_of_dx<LAYER>(row.of_dx, load<L>(dx + j), xhat));
        }
        for (Index j = 0; j < n; j++) {
            y[2 * apart + j] = bound * (std::fabs(gamma[j]) + std::fabs(beta[j]));
            dx[2 * apart + j] = row.bound;
        }
    }
    double additions = (double)(rows < 32 ? rows : 32) * U;
    for (int which = 0; which < 2; which++)
        for (Index j = 0; j < n; j += 8) {
            double* from = over.data() + j;
            double* to = sums + 2 * which * apart + j;
            Errors of = which == 0 ? Errors{worst.a + additions, worst.b} : Errors{0, additions};
            store(to, load<8>(from + which * apart));
            store(to + apart, bound_of_sum(of, load<8>(from + 2 * apart), load<8>(from + 3 * apart),
                                  (double)rows));
        }
    closely<LAYER, false>(c, n, apart, close);
    closely<LAYER, true>(c, n, apart, close + 6 * apart);
}

// Writes y and dx with errors set far larger than they are: in float64 to `v`, as To to `out`, and
// 1 to `open` where a result is uncertified. Writes the bounds of both rows; that of y is a factor
// of |gamma| + |beta|.
template <bool LAYER, class To>
void doubts(const float* dy, const float* x, Index n, const double* padded, Index apart,
    Errors errors, double* bounds, double* v, To* out, uint8_t* open) {
    const double* gamma = padded;
    const double* beta = padded + apart;
    Call c;
    c.n = n;
    c.eps = 1e-5;
    c.nearest = true;
    Stats of;
    statistics<LAYER>(&x, c, 1, of);
    Room sizes((size_t)apart), sums((size_t)(4 * apart));
    for (Index j = 0; j < n; j++) sizes[(size_t)j] = std::fabs(gamma[j]) + std::fabs(beta[j]);
    std::vector<Index> at((size_t)n);
    Uncertified uncertified = {at.data(), 0};
    auto mark = [&](Index lanes, uint8_t* columns) {
        for (Index i = 0; i < uncertified.count; i++)
            for (Index j = at[(size_t)i]; j < n && j < at[(size_t)i] + lanes; j++) columns[j] = 1;
        uncertified.count = 0;
    };
    bounds[0] = bound_of_y(errors, 1, n, 0);
    To* y = out;
    write_y<1, Mode<LAYER, false, true>, false>(
        &x, &y, n, of, 0, {gamma, beta, sizes.data()}, 0, &uncertified, bounds);
    mark(Y_OF<f32>, open);
    write_y<1, Mode<LAYER, false, true>, false>(
        &x, &v, n, of, 0, {gamma, beta, sizes.data()}, 0, &uncertified, bounds);
    Back<float> row = pulled<LAYER, false>(dy, x, n, gamma, of, 1, errors, sums);
    uncertified.count = 0;
    bounds[1] = row.bound;
    write_dx<Mode<LAYER, false, true>, false>(row, out + apart, n, gamma, 0, &uncertified);
    mark(L, open + apart);
    Projected<Mode<LAYER, false, true>> project(row);
    for (Index j = 0; j < n; j++)
        v[apart + j] = project(load<L>(dy + j, 1), load<L>(x + j, 1), load<L>(gamma + j)).v[0][0];
}

// Tries bounds for which an element less its bound is a midpoint of float32; counts them, and how
// often dx is wrong.
template <bool LAYER>
void at_midpoints(const float* dy, const float* x, Index n, const double* gamma, Index* tried) {
    Call c;
    c.n = n;
    c.eps = 1e-5;
    c.nearest = true;
    Stats of;
    statistics<LAYER>(&x, c, 1, of);
    Room sums((size_t)(4 * n + 64));
    std::vector<Index> at((size_t)n);
    std::vector<float> out((size_t)n);
    Back<float> row = pulled<LAYER, false>(dy, x, n, gamma, of, 0, {}, sums);
    for (Index j = 0; j + L <= n; j += L) {
        auto value = [&](double bound) {
            return Projected<Mode<LAYER, false, true>>(row, bound)(
                load<L>(dy + j), load<L>(x + j), load<L>(gamma + j))
                .v[0][0];
        };
        double v = value(0);
        double below;
        uint64_t bits;
        memcpy(&bits, &v, 8);
        // Take elements just above a midpoint, farther from the next float32.
        if (v < 0 || (bits >> 26 & 7) != 4) continue;
        bits &= ~((1ull << 28) - 1);
        memcpy(&below, &bits, 8);
        for (int k = -20; k < 20; k++) {
            row.bound = (v - below) * (1 + k * 0x1p-52) + k * 0x1p-53 * v;
            if (!(row.bound > 0) || value(row.bound) != below) continue;
            Uncertified uncertified = {at.data(), 0};
            write_dx<Mode<LAYER, false, true>, false>(row, out.data(), n, gamma, 0, &uncertified);
            bool doubt = false;
            for (Index i = 0; i < uncertified.count; i++) doubt |= at[(size_t)i] == j;
            ++tried[0];
            tried[1] += !doubt && out[(size_t)j] != (float)v;
            break;
        }
    }
}

}  // namespace

extern "C" {

int in_pairs(int layer, const double* dy, const double* x, Index rows, Index n, double eps,
    const double* padded, Index apart, double* y, double* dx, double* sums) {
    return (layer ? pairs::by_pairs<true> : pairs::by_pairs<false>)(dy, x, rows, n, eps, padded,
        apart, y, dx, sums);
}
void in_float64(int layer, int far, const float* dy, const float* x, Index rows, Index n,
    double eps, const double* padded, Index apart, double* y, double* dx, double* sums,
    double* close) {
    (far        ? by_float64<true, true>
        : layer ? by_float64<true, false>
                : by_float64<false, false>)(dy, x, rows, n, eps, padded, apart, y, dx, sums, close);
}
void with_errors(int layer, int half, const float* dy, const float* x, Index n,
    const double* padded, Index apart, double a, double b, double* bounds, double* v, void* out,
    uint8_t* open) {
    if (half)
        (layer ? doubts<true, f16> : doubts<false, f16>)(dy, x, n, padded, apart, {a, b}, bounds, v,
            (f16*)out, open);
    else
        (layer ? doubts<true, f32> : doubts<false, f32>)(dy, x, n, padded, apart, {a, b}, bounds, v,
            (f32*)out, open);
}
void try_midpoints(
    int layer, const float* dy, const float* x, Index n, const double* gamma, Index* tried) {
    (layer ? at_midpoints<true> : at_midpoints<false>)(dy, x, n, gamma, tried);
}
}
