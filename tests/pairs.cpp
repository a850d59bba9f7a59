// The steps of native/pair_rows.h one by one, for test_nearest_bounds.py. Vectors are `apart` float64 apart.
#include "finish.h"

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
    auto write = LAYER && of.far[0] != 0 ? write_y<LAYER, LAYER, ToPairs> : write_y<LAYER, false, ToPairs>;
    write(x, {{y, y + apart, y + 2 * apart}}, n, of, 0, {given, given + apart, given + 2 * apart});
    for (Index j = 0; j < n; j++) y[2 * apart + j] *= row_bound(n);
    return is_extreme(of, 0, x, n, LAYER);
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
}  // namespace

extern "C" {

int forward_row(int layer, const double* x, Index n, double k, const double* given, double eps, Index apart, double* words, double* y) {
    return (layer ? pairs::forward<true> : pairs::forward<false>)(x, n, k, given, eps, apart, words, y);
}
void backward_row(int layer, const double* dy, const double* x, Index n, const double* row, const double* given, Index apart,
                  double* means, double* xhat, double* dx, double* sums) {
    (layer ? pairs::backward<true> : pairs::backward<false>)(dy, x, n, row, given, apart, means, xhat, dx, sums);
}
void settle_sums(double* sums, Index apart, Index n) { pairs::settle_columns({sums, apart, true}, n); }
double sums_bound_of(Index n, Index rows, Index tiles) { return sums_bound(n, rows, tiles); }
}
