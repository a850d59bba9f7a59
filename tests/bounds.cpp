// The steps of native/pair_rows.h and native/rows.h one by one, for test_nearest_bounds.py. Vectors are `apart` float64
// apart.
#include <vector>

#include "columns.h"

namespace {

namespace pairs {

template <bool LAYER>
bool forward(const double* x, Index n, double k, const double* given, double eps, Index apart, double* words, double* y) {
    Sums sums = {};
    measure<LAYER>(x, n, k, sums, 0);
    Wide share = spread_pair(reciprocal((double)n));
    Wide d = settled(total(sums.plain) * share), square = settled(total(sums.product) * share);
    Wide var = settled(square - settled(d * d));
    Wide steps[] = {d, square, var};
    for (int i = 0; i < 3; i++) words[2 * i] = steps[i].high.v[0][0], words[2 * i + 1] = steps[i].low.v[0][0];
    Stats of = {};
    Call c;
    c.n = n, c.eps = eps;
    statistics<LAYER>(&x, c, 1, of);
    const double* row[] = {of.mean, of.rest, of.tail, of.rstd, of.rstd_low, of.spread};
    for (int i = 0; i < 6; i++) words[6 + i] = row[i][0];
    write_y<LAYER>(x, ToPairs{{y, y + apart, y + 2 * apart}}, n, of, 0, {given, given + apart, given + 2 * apart});
    for (Index j = 0; j < n; j++) y[2 * apart + j] *= row_bound(n);
    return is_out_of_range(of, 0, x, n, LAYER);
}

// One row of a tile: what is done of it is added to `sums`.
template <bool LAYER>
void backward(const double* dy, const double* x, Index n, const double* row, const double* given, Index apart,
              double* means, double* xhat, double* dx, double* sums) {
    Parameters parameters = {given, given + apart, nullptr};
    Back of = {dy, x, row[0], row[1], row[2], {row[3], row[4]}, row[5], {0, 0}, {}, {}, 0};
    if (LAYER) of.m = pivot(dy, parameters, n);
    bool shift = LAYER && of.m.high != 0, exact = true;
    for (Index j = 0; j < n; j++) exact = exact && given[apart + j] == 0;
    Sums along = {};
    auto pull_row = shift ? pull<LAYER, LAYER, true> : pull<LAYER, false, true>;
    pull_row(of, n, parameters, along, 0, xhat, {sums, apart, true});
    settle(along, n, &of, 1, exact);
    Pair<double> found[] = {of.plain, of.slope, of.m};
    for (int i = 0; i < 3; i++) means[2 * i] = found[i].high, means[2 * i + 1] = found[i].low;
    auto write = shift ? write_dx<LAYER, LAYER, ToPairs> : write_dx<LAYER, false, ToPairs>;
    write(of, {{dx, dx + apart, dx + 2 * apart}}, n, parameters, xhat, apart);
    for (Index j = 0; j < n; j++) dx[2 * apart + j] *= row_bound(n) * of.rstd.high;
}

}  // namespace pairs

namespace narrow {

constexpr int Y = Y_OF<f32>;

// Words: rms(xhat), a, b, the row's bound beside |gamma| + |beta|. y, then bounds. A row is centered before it is scaled,
// as far ones are, or not.
template <bool LAYER, bool CENTER>
void forward(const float* x, Index n, const Call& c, const double* given, Index apart, Stats& of, double* words, double* y) {
    const Parameters parameters = {given, given + 2 * apart, nullptr};
    statistics<LAYER>(&x, c, 1, of);
    double size = std::sqrt(of.square[0]) * of.rstd[0];
    double d = of.d[0] * of.rstd[0];
    Errors errors = errors_of_xhat<LAYER>(size, d * d, CENTER ? 0 : std::fabs(of.mean[0]) * of.rstd[0], chain_of(n, L, RUN));
    words[0] = size, words[1] = errors.a, words[2] = errors.b, words[3] = bound_of_y(errors, size, n), words[4] = errors.m;
    std::vector<double> sizes((size_t)apart);
    std::vector<Index> at((size_t)n);
    Doubts found = {at.data(), 0};
    const double none = 0;
    write_y<1, CENTER, false, true>(&x, &y, n, of, 0, {parameters.gamma, parameters.beta, sizes.data()}, 0, &found, &none);
    for (Index j = 0; j < n; j += Y) store(y + apart + j, bounds_of_y(errors, load<Y>(y + j), load<Y>(given + j), load<Y>(given + 2 * apart + j)));
}

// dx, then bounds; sums: dgamma, dbeta and the squares. Words: also all dx's bound. Of dx's bounds |xhat| is part.
template <bool LAYER, bool CENTER>
void backward(const float* dy, const float* x, Index n, const Call& c, const Stats& of, const double* given, Index apart,
              const double* xhat, double* words, double* dx, double* sums) {
    Back<float> row = {dy, x, of.mean[0], of.rest[0], of.rstd[0], LAYER ? pivot(dy, given, n) : 0};
    row.spread = words[0], row.errors = {words[1], words[2], words[4]};
    pull<false, 1, LAYER, CENTER, true>(&row, n, given, {sums, sums + apart, sums + 2 * apart, sums + 3 * apart});
    words[5] = row.bound;
    Projected<LAYER, CENTER, true> project(row);
    for (Index j = 0; j < n; j += L) {
        Index some = n - j < L ? n - j : L;
        store(dx + j, project(load<L>(dy + j, some), load<L>(x + j, some), load<L>(given + j)));
    }
    for (Index j = 0; j < n; j += L) store(dx + apart + j, bounds_of_dx<LAYER>(row.of_dx, load<L>(dx + j), load<L>(xhat + j)));
}

// dgamma and dbeta of 8 columns at a time: high and low parts, and bounds. Words of each row: rms(xhat), mean, rest, rstd.
void closely(bool rms, bool deep, const float* dy, const float* x, Index rows, Index n, double eps, double* words, Index apart, double* sums) {
    Call c;
    c.rms = rms, c.rows = rows, c.n = n, c.eps = eps;
    c.spread = words, c.mean = words + rows, c.rest = words + 2 * rows, c.rstd = words + 3 * rows;
    Rows* arrays[] = {&c.dy, &c.x};
    for (int i = 0; i < 2; i++) {
        Rows& a = *arrays[i];
        a.data = (char*)(i ? x : dy), a.stride = n * 4;
    }
    const Index columns[] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (Index j = 0; j < n; j += 8)
        for (int which = 0; which < 2; which++) {
            auto how = deep ? rms ? sum_closely<false, true> : sum_closely<true, true> : rms ? sum_closely<false, false> : sum_closely<true, false>;
            Close of = how(c, which, j, columns, n - j < 8 ? n - j : 8);
            double* at = sums + 3 * which * apart + j;
            store(at, of.sum.high), store(at + apart, of.sum.low), store(at + 2 * apart, spread<8>(1.02) * of.error);
        }
}

// y and dx with errors as given, which may be far larger than they are: in float64, as To, and of each column whether it
// is in doubt; both rows' bounds, that of y beside |gamma| + |beta|.
template <bool LAYER, class To>
void doubts(const float* dy, const float* x, Index n, const double* given, Index apart, Errors errors, double* bounds,
            double* v, To* out, uint8_t* open) {
    Call c;
    c.n = n, c.eps = 1e-5, c.nearest = true;
    Stats of;
    statistics<LAYER>(&x, c, 1, of);
    std::vector<double> sizes((size_t)apart), sums((size_t)(4 * apart));
    for (Index j = 0; j < n; j++) sizes[(size_t)j] = std::fabs(given[j]) + std::fabs(given[2 * apart + j]);
    const Parameters parameters = {given, given + 2 * apart, sizes.data()};
    std::vector<Index> at((size_t)n);
    auto mark = [&](const Doubts& found, Index lanes, uint8_t* of_columns) {
        for (Index i = 0; i < found.count; i++)
            for (Index j = found.at[i]; j < n && j < found.at[i] + lanes; j++) of_columns[j] = 1;
    };
    bounds[0] = bound_of_y(errors, 1, n);
    Doubts found = {at.data(), 0};
    To* y = out;
    write_y<1, false, false, true>(&x, &y, n, of, 0, parameters, 0, &found, bounds);
    mark(found, Y, open);
    write_y<1, false, false, true>(&x, &v, n, of, 0, parameters, 0, &found, bounds);
    Back<float> row = {dy, x, of.mean[0], of.rest[0], of.rstd[0], LAYER ? pivot(dy, given, n) : 0};
    row.spread = 1, row.errors = errors;
    pull<false, 1, LAYER, false, true>(&row, n, given, {sums.data(), sums.data() + apart, sums.data() + 2 * apart, sums.data() + 3 * apart});
    found.count = 0, bounds[1] = row.bound;
    write_dx<LAYER, false, false, true>(row, out + apart, n, given, 0, &found);
    Projected<LAYER, false, true> project(row);
    for (Index j = 0; j < n; j++) v[apart + j] = project(load<L>(dy + j, 1), load<L>(x + j, 1), load<L>(given + j)).v[0][0];
    mark(found, L, open + apart);
}

// How many elements of dx were tried, and of how many dx is wrong, whose bound is such that what is that much less is a
// midpoint of float32 itself.
template <bool LAYER>
void at_midpoints(const float* dy, const float* x, Index n, const double* gamma, Index* tried, Index* wrong) {
    Call c;
    c.n = n, c.eps = 1e-5, c.nearest = true;
    Stats of;
    statistics<LAYER>(&x, c, 1, of);
    std::vector<double> sums((size_t)(4 * n + 64));
    std::vector<Index> at((size_t)n);
    std::vector<float> out((size_t)n);
    Back<float> row = {dy, x, of.mean[0], of.rest[0], of.rstd[0], LAYER ? pivot(dy, gamma, n) : 0};
    pull<false, 1, LAYER, false, true>(&row, n, gamma, {sums.data(), sums.data() + n, sums.data() + 2 * n, sums.data() + 3 * n});
    for (Index j = 0; j + L <= n; j += L) {
        auto value = [&](double bound) { return Projected<LAYER, false, true>(row, bound)(load<L>(dy + j), load<L>(x + j), load<L>(gamma + j)).v[0][0]; };
        double v = value(0), below;
        uint64_t bits;
        memcpy(&bits, &v, 8);
        // A midpoint is below, nearer than a number of float32 is above.
        if (v < 0 || (bits >> 26 & 7) != 4) continue;
        bits &= ~((1ull << 28) - 1);
        memcpy(&below, &bits, 8);
        for (int k = -20; k < 20; k++) {
            row.bound = (v - below) * (1 + k * 0x1p-52) + k * 0x1p-53 * v;
            if (!(row.bound > 0) || value(row.bound) != below) continue;
            Doubts found = {at.data(), 0};
            write_dx<LAYER, false, false, true>(row, out.data(), n, gamma, 0, &found);
            bool doubt = false;
            for (Index i = 0; i < found.count; i++) doubt |= at[(size_t)i] == j;
            ++*tried, *wrong += !doubt && out[(size_t)j] != (float)v;
            break;
        }
    }
}

template <bool LAYER, bool CENTER>
void both(const float* dy, const float* x, Index n, double eps, const double* given, Index apart, double* words, double* xhat, double* y, double* dx, double* sums) {
    Call c;
    c.n = n, c.eps = eps, c.nearest = true;
    Stats of;
    // xhat is y of gamma = 1 and beta = 0.
    forward<LAYER, CENTER>(x, n, c, given + 3 * apart, apart, of, words, xhat), forward<LAYER, CENTER>(x, n, c, given, apart, of, words, y);
    backward<LAYER, CENTER>(dy, x, n, c, of, given, apart, xhat, words, dx, sums);
    words[6] = of.mean[0], words[7] = of.rest[0], words[8] = of.rstd[0];
}

}  // namespace narrow
}  // namespace

extern "C" {

int forward_row(int layer, const double* x, Index n, double k, const double* given, double eps, Index apart, double* words, double* y) {
    return (layer ? pairs::forward<true> : pairs::forward<false>)(x, n, k, given, eps, apart, words, y);
}
void backward_row(int layer, const double* dy, const double* x, Index n, const double* row, const double* given, Index apart,
                  double* means, double* xhat, double* dx, double* sums) {
    (layer ? pairs::backward<true> : pairs::backward<false>)(dy, x, n, row, given, apart, means, xhat, dx, sums);
}
// Of a layer norm, also `far`.
void narrow_row(int layer, int far, const float* dy, const float* x, Index n, double eps, const double* given, Index apart,
                double* words, double* xhat, double* y, double* dx, double* sums) {
    (far ? narrow::both<true, true> : layer ? narrow::both<true, false> : narrow::both<false, false>)(dy, x, n, eps, given, apart, words, xhat, y, dx, sums);
}
void doubts_of(int layer, int half, const float* dy, const float* x, Index n, const double* given, Index apart, double a, double b,
               double* bounds, double* v, void* out, uint8_t* open) {
    if (half) (layer ? narrow::doubts<true, f16> : narrow::doubts<false, f16>)(dy, x, n, given, apart, {a, b}, bounds, v, (f16*)out, open);
    else (layer ? narrow::doubts<true, f32> : narrow::doubts<false, f32>)(dy, x, n, given, apart, {a, b}, bounds, v, (f32*)out, open);
}
void at_midpoints_of(int layer, const float* dy, const float* x, Index n, const double* gamma, Index* tried, Index* wrong) {
    (layer ? narrow::at_midpoints<true> : narrow::at_midpoints<false>)(dy, x, n, gamma, tried, wrong);
}
void sum_closely_of(int layer, int deep, const float* dy, const float* x, Index rows, Index n, double eps, double* words, Index apart, double* sums) {
    narrow::closely(!layer, deep, dy, x, rows, n, eps, words, apart, sums);
}
double sum_bound(double a, double b, double of_dy, double of_xhat, double rows) { return bound_of_sum({a, b}, spread<8>(of_dy), spread<8>(of_xhat), rows).v[0][0]; }
void settle_sums(double* sums, Index apart, Index n) { pairs::settle_columns({sums, apart, true}, n); }
double sums_bound_of(Index n, Index rows, Index tiles) { return sums_bound(n, rows, tiles); }
}
