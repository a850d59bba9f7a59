// For test_nearest_bounds.py: computes rows by the headers of native/, in pairs and in float64,
// with the headers' bounds of their errors. The stride between vectors is `apart`; `padded` holds
// gamma and beta.
#include <vector>

#include "close.h"

namespace {

using Room = std::vector<double>;

namespace pairs {

// Writes y, dx, dgamma and dbeta as high parts, low parts and bounds. Returns the number of rows
// out of range.
template <bool LAYER>
int by_pairs(const double* dy, const double* x, Index rows, Index n, double eps,
    const double* padded, Index apart, double* y, double* dx, double* sums) {
    const Columns columns = {padded, padded + apart, nullptr, n, 0};
    Room xhat((size_t)(2 * apart)), over((size_t)(6 * apart));
    int out_of_range = 0;
    for (Index i = 0; i < rows; i++, dy += n, x += n, y += 3 * apart, dx += 3 * apart) {
        Stats of = {};
        statistics<LAYER>(&x, 1, n, eps, of);
        out_of_range += is_out_of_range<LAYER>(of, 0, x, n);
        RowStats at = of.at(0, LAYER ? __builtin_nan("") : 0);
        write_y<LAYER>(x, at, columns, ToPairs{y, y + apart, y + 2 * apart});
        Back row = {dy, x, xhat.data(), {}, at, {0, 0}, {}, {}, 0};
        if (LAYER) row.pivot = pivot_of(dy, columns);
        bool shift = LAYER && row.pivot.high != 0;
        Sums along = {};
        auto pull_row = shift ? pull<LAYER, LAYER, true> : pull<LAYER, false, true>;
        pull_row(row, columns, along, 0, {over.data(), apart, true});
        finish_means(along, n, &row, 1);
        auto write = shift ? write_dx<LAYER, LAYER, ToPairs> : write_dx<LAYER, false, ToPairs>;
        write(row, columns, apart, {dx, dx + apart, dx + 2 * apart});
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
Back<float> pulled(Back<float> row, Index n, const double* gamma, const Stats& of, Room& over) {
    row.mean = of.mean[0];
    row.mean_lo = of.mean_lo[0];
    row.rstd = of.rstd[0];
    row.pivot = LAYER ? pivot_of(row.dy, gamma, n) : 0;
    double* sums = over.data();
    size_t apart = over.size() / 4;
    OverRows places = {gamma, sums, sums + apart, sums + 2 * apart, sums + 3 * apart, true};
    pull<Mode<LAYER, CENTER, true>, 1>(&row, n, places);
    return row;
}

// Writes dgamma and dbeta as if all columns were open: high parts, low parts and bounds.
template <class Terms> void closely(Call& c, Index apart, double* sums) {
    std::vector<Index> columns((size_t)c.n);
    for (Index j = 0; j < c.n; j++) columns[(size_t)j] = j;
    c.open = {{columns.data(), columns.data()}, {c.n, c.n}};
    Room room((size_t)(2 * Closely::SIZE * (c.n / 8 + 1)));
    close_rows<Terms, f32>(c, {0, c.rows}, room.data());
    each_eight(c, [&](int which, const Index* eight, Index, Index place) {
        Closely of;
        of.load_from(room.data() + place);
        double* at = sums + 3 * which * apart + *eight;
        store(at, of.sum.high);
        store(at + apart, of.sum.low);
        store(at + 2 * apart, broadcast<8>(1.02) * of.error);
    });
}

// Writes y and dx with the bounds of their elements and of their rows, and dgamma and dbeta with
// their bounds. `close` gets dgamma and dbeta by close.h, from statistics in float64 and in
// pairs. CENTER: x is centered first, as in rows far from 0.
template <bool LAYER, bool CENTER>
void by_float64(const float* dy, const float* x, Index rows, Index n, double eps,
    const double* padded, Index apart, double* y, double* dx, double* sums, double* close) {
    constexpr int Y = COLUMNS_OF_Y<f32>;
    const double* gamma = padded;
    const double* beta = padded + apart;
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
    Columns columns = {gamma, beta, sizes.data(), n, 0};
    Errors worst = {0, 0};
    for (Index i = 0; i < rows; i++, dy += n, x += n, y += 3 * apart, dx += 3 * apart) {
        Stats of = {};
        statistics<LAYER, true>(&x, 1, n, c.eps, of);
        double size = std::sqrt(of.second[0]) * of.rstd[0];
        double d = of.first[0] * of.rstd[0];
        double m = CENTER ? 0 : std::fabs(of.mean[0]) * of.rstd[0];
        double chain = chain_of(n, LANES, RUN);
        double bound = bound_of_y(errors_of_xhat<LAYER>(size, d * d, 0, chain), size, n, m);
        Errors errors = errors_of_xhat<LAYER>(size, d * d, m, chain);
        worst = {larger(worst.a, errors.a), larger(worst.b, errors.b)};
        c.spread[i] = size;
        c.mean[i] = of.mean[0];
        c.mean_lo[i] = of.mean_lo[0];
        c.rstd[i] = of.rstd[0];
        Store<double, 1> sink = {{y}};
        write_y<Mode<LAYER, CENTER, true>, 1>(&x, of, 0, columns, sink);
        for (Index j = 0; j < n; j += Y)
            store(y + apart + j,
                bounds_of_y(errors, load<Y>(y + j), load<Y>(gamma + j), load<Y>(beta + j)));
        Back<float> row = {dy, x};
        row.spread = size;
        row.errors = errors;
        row = pulled<LAYER, CENTER>(row, n, gamma, of, over);
        ElementOfDx<Mode<LAYER, CENTER, true>> project(row);
        for (Index j = 0; j < n; j += LANES) {
            Index width = n - j < LANES ? n - j : LANES;
            Lanes<LANES> v = load<LANES>(x + j, width);
            Lanes<LANES> xhat =
                (v - broadcast<LANES>(of.mean[0]) - broadcast<LANES>(of.mean_lo[0])) *
                broadcast<LANES>(of.rstd[0]);
            store(dx + j, project(load<LANES>(dy + j, width), v, load<LANES>(gamma + j)));
            store(dx + apart + j, bounds_of_dx<LAYER>(row.of_dx, load<LANES>(dx + j), xhat));
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
    closely<FloatTerms<LAYER>>(c, apart, close);
    closely<PairTerms<LAYER>>(c, apart, close + 6 * apart);
}

// Writes y and dx with errors set far larger than they are: in float64 to `v`, as To to `out`, and
// 1 to `open` where a result is uncertified. Writes the bounds of both rows; that of y is a factor
// of |gamma| + |beta|.
template <bool LAYER, class To>
void doubts(const float* dy, const float* x, Index n, const double* padded, Index apart,
    Errors errors, double* bounds, double* v, To* out, uint8_t* open) {
    const double* gamma = padded;
    Stats of;
    statistics<LAYER, true>(&x, 1, n, 1e-5, of);
    Room sizes((size_t)apart), sums((size_t)(4 * apart));
    for (Index j = 0; j < apart; j++)
        sizes[(size_t)j] = std::fabs(gamma[j]) + std::fabs(padded[apart + j]);
    Columns columns = {gamma, padded + apart, sizes.data(), n, 0};
    std::vector<Index> at((size_t)n);
    auto mark = [&](Failed failed, Index lanes, uint8_t* to) {
        for (Index i = 0; i < failed.count; i++)
            for (Index j = at[(size_t)i]; j < n && j < at[(size_t)i] + lanes; j++) to[j] = 1;
    };
    using M = Near<LAYER>;
    bounds[0] = bound_of_y(errors, 1, n, 0);
    Test<To, 1> test = {{out}, false, {bounds[0]}, {{at.data(), 0}}};
    Store<double, 1> write = {{v}};
    write_y<M, 1>(&x, of, 0, columns, test);
    write_y<M, 1>(&x, of, 0, columns, write);
    mark(test.failed[0], COLUMNS_OF_Y<f32>, open);
    Back<float> row = {dy, x};
    row.spread = 1;
    row.errors = errors;
    row = pulled<LAYER, false>(row, n, gamma, of, sums);
    bounds[1] = row.bound;
    test = {{out + apart}, false, {row.bound}, {{at.data(), 0}}};
    write = {{v + apart}};
    write_dx<M>(row, columns, test);
    write_dx<M>(row, columns, write);
    mark(test.failed[0], LANES, open + apart);
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
}
