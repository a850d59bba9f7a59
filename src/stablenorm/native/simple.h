// The kernel on one page: layer norm of a row, forward and backward, a column at a time. It is
// the page to read first. rows.h and back_rows.h do the same with registers of several columns, for
// two rows at once, and say why each step is as it is; test_simple.py holds that no bit differs.
// For rounding="fast", types of 16 and 32 bits, and finite rows.
#pragma once
#include <cmath>

#include "lanes.h"
#include "numbers.h"

namespace simple {

// The sums over n columns of two terms each: column j adds to lane j % L, and the lanes are added
// by halves, as registers do. Blocks of 1024 columns keep the chains of additions short.
struct Two {
    double first = 0;
    double second = 0;
    void operator+=(Two other) {
        first += other.first;
        second += other.second;
    }
};
template <int L, class Term> Two sum(Index n, Term term) {
    Two lanes[L];
    for (Index start = 0; start < n; start += 1024) {
        Two block[L];
        for (Index j = start; j < n && j < start + 1024; j++) term(j, block[j % L]);
        for (int i = 0; i < L; i++) lanes[i] += block[i];
    }
    for (int half = L / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

struct Parameters {
    Index n;
    const double* gamma;
    const double* beta;
};

// xhat is (x - mean - mean_lo) * rstd: mean + mean_lo holds more digits than one number.
struct Statistics {
    double mean, mean_lo, rstd;
};
template <class T> double xhat_of(const T* x, Statistics s) {
    return std::fma(number(x) - s.mean, s.rstd, -s.mean_lo * s.rstd);
}

// Moments about a guess k of the mean: d = mean(x - k) and mean((x - k)**2). If d is large, their
// difference loses digits, and k + d is a better guess.
template <class T> Statistics measure(const T* x, Index n, double eps) {
    auto eighth = [&](Index j, Two& sum) { sum.first += number(x + j * (n / 8)); };
    double k = (float)(sum<8>(8, eighth).first / 8);
    for (bool again = true;; again = false) {
        Two of = sum<16>(n, [&](Index j, Two& sum) {
            double c = number(x + j) - k;
            sum.first += c;
            sum.second = std::fma(c, c, sum.second);
        });
        double d = of.first / (double)n;
        double var = of.second / (double)n - d * d;
        Pair<double> mean = two_sum(k, d);
        if (!again || d * d <= 2 * var)
            return {mean.high, mean.low, 1 / std::sqrt((var < 0 ? 0 : var) + eps)};
        k = (float)(k + d);
    }
}

// Rounds v once.
template <class T> void put(T* to, double v) { store(to, broadcast<8>(v), Index{1}); }

// y = xhat * gamma + beta.
template <class T> void forward(const T* x, const Parameters& of, Statistics s, T* y) {
    for (Index j = 0; j < of.n; j++)
        put(y + j, std::fma(xhat_of(x + j, s), of.gamma[j], of.beta[j]));
}

// With g = gamma * dy: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)). The pivot m, one of four
// g, is subtracted from g first: where g is constant, g - m is 0. Adds the row's terms to dgamma
// and dbeta.
template <class T> struct Gradients {
    T* dx;
    double* dgamma;
    double* dbeta;
};
template <class T>
void backward(const T* dy, const T* x, const Parameters& of, Statistics s, const Gradients<T>& to) {
    auto smaller = [](double a, double b) { return std::fabs(a) < std::fabs(b) ? a : b; };
    auto g_at = [&](Index j) { return number(dy + j) * of.gamma[j]; };
    Index apart = of.n < 4 ? 0 : of.n / 4;
    double m = smaller(smaller(g_at(0), g_at(apart)), smaller(g_at(2 * apart), g_at(3 * apart)));
    auto g_of = [&](Index j) { return std::fma(number(dy + j), of.gamma[j], -m); };
    Two sums = sum<4>(of.n, [&](Index j, Two& sum) {
        double xhat = xhat_of(x + j, s);
        sum.first += g_of(j);
        sum.second = std::fma(g_of(j), xhat, sum.second);
        to.dgamma[j] = std::fma(number(dy + j), xhat, to.dgamma[j]);
        to.dbeta[j] += number(dy + j);
    });
    double mean = sums.first / (double)of.n;
    double slope = sums.second / (double)of.n;
    // The equation multiplied out: dx = (x - s.mean) * p + (g - m) * rstd + q.
    double p = -slope * s.rstd * s.rstd;
    double q = -(mean + slope * (-s.mean_lo * s.rstd)) * s.rstd;
    for (Index j = 0; j < of.n; j++)
        put(to.dx + j, std::fma(number(x + j) - s.mean, p, std::fma(g_of(j), s.rstd, q)));
}

}  // namespace simple
