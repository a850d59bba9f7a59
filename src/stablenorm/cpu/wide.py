"""
Rows of which something is float64: the equations of `rows` in double-double, in two passes.

As there, a guess k of the mean is subtracted first, and one of four elements of g. Here x - k is exact
as a pair, whatever k is. The mean is then written as ``mean + rest + tail``, three float64 that do
not overlap, of which the last matters only where the row is far off zero against its spread.

LLVM may not split sums of pairs by itself. So the source does: column j is added to lane j % 32, and
at the end the lanes are added by halves.

Pairs have the range of float64, so that squares of 1e200 overflow, and the low parts of products below
1e-290 vanish. Rows that could come near either are extreme: they are left alone and reported, and the
reference, whose numbers carry exponents, computes them.
"""

from __future__ import annotations

import numpy as np

from stablenorm.cpu.memory import bits_of, fma, further, get, inlined, named, pasted, wide_vectors
from stablenorm.cpu.pairs import (
    accumulate,
    add,
    divide,
    fast_two_sum,
    multiply,
    put_pair,
    put_pair_nearly,
    reciprocal_root,
    two_product,
    two_sum,
)
from stablenorm.cpu.sums import fill, sample_mean

# gamma, beta and eps, and cotangents but for zeros, are between these in size, or extreme. Then no
# product of three numbers, nor its last 106 bits, leaves the range of float64:
# 3 * 200 + 3 * 53 + 106 < 1022.
LARGEST, SMALLEST = 2.0**200, 2.0**-200

_SMALLEST_BITS = np.uint64(2 * int(np.float64(SMALLEST).view(np.uint64)) - 1)

# Lanes of a sum, and columns of a lane until its low part is brought back below half an ulp of the
# high one: as it grows, it loses digits of its own.
LANES, DEPTH = 32, 8

# The tail of the mean is kept where it exceeds 2**-100 of the least that mean|x - mean| can be,
# sqrt(var / n): a quarter of what the contract allows (2**-98).
_TAIL_MATTERS = 2.0**200


@inlined
def _fold(lanes):
    """Return the sum of the lanes of a pair."""
    wide_vectors()
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            lanes[lane], lanes[LANES + lane] = add(
                lanes[lane], lanes[LANES + lane], lanes[lane + half], lanes[LANES + lane + half]
            )
        half //= 2
    return lanes[0], lanes[LANES]


# ---- forward ----


def _measuring(whole):
    def measure(x, start, count, k, lanes):
        """Add x - k and its square, from column `start` on, to all lanes, or to the first `count`."""
        wide_vectors()
        for lane in range(LANES if whole else count):
            c, c_low = two_sum(get(x, start + lane), -k)
            lanes[lane], lanes[LANES + lane] = accumulate(
                lanes[lane], lanes[LANES + lane], c, c_low
            )
            # 2 c c_low; c_low**2 is below the last bit of a pair.
            square, error = two_product(c, c)
            lanes[2 * LANES + lane], lanes[3 * LANES + lane] = accumulate(
                lanes[2 * LANES + lane], lanes[3 * LANES + lane], square, fma(c + c, c_low, error)
            )

    return inlined(named(measure, whole))


_measure_round, _measure_rest = _measuring(True), _measuring(False)


@inlined
def settle(high, low, n):
    """Bring n pairs back to where the low part is at most half an ulp of the high one."""
    wide_vectors()
    for j in range(n):
        high[j], low[j] = fast_two_sum(high[j], low[j])


@pasted
def _settle_lanes(lanes):
    settle(lanes, further(lanes, 8 * LANES), LANES)
    settle(further(lanes, 16 * LANES), further(lanes, 24 * LANES), LANES)


@inlined
def _measure(x, n, k, lanes):
    """Return the means of x - k and of its square, as pairs."""
    fill(lanes, 4 * LANES, 0.0)
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        _measure_round(x, start, LANES, k, lanes)
        if start % (LANES * DEPTH) == 0:
            _settle_lanes(lanes)
    if whole < n:
        _measure_rest(x, whole, n - whole, k, lanes)
    _settle_lanes(lanes)
    count = float(n)
    total, total_low = _fold(lanes)
    square, square_low = _fold(further(lanes, 16 * LANES))
    total, total_low = divide(total, total_low, count)
    square, square_low = divide(square, square_low, count)
    return total, total_low, square, square_low


@pasted
def _variance(d, d_low, square, square_low):
    product, product_low = multiply(d, d_low, d, d_low)
    return add(square, square_low, -product, -product_low)


@pasted
def _is_constant(x, n, k):
    same = True
    for j in range(n):
        same = same and get(x, j) == k
    return same


@inlined
def statistics(x, n, eps, lanes):
    """Return whether the row is extreme; mean, rest, tail, rstd and its low part; and var."""
    k = sample_mean(x, n)
    d, d_low, square, square_low = _measure(x, n, k, lanes)
    var, var_low = _variance(d, d_low, square, square_low)
    if d * d > 2.0 * var:
        # Elsewhere than the eight elements: the difference has lost two bits or more.
        k += d
        d, d_low, square, square_low = _measure(x, n, k, lanes)
        var, var_low = _variance(d, d_low, square, square_low)
    # A square of zero may be one that has vanished.
    moderate = SMALLEST * SMALLEST <= square <= LARGEST * LARGEST
    if not moderate and not (square == 0.0 and _is_constant(x, n, k)):
        return True, (0.0, 0.0, 0.0, 0.0, 0.0), 0.0
    v, v_low = add(var, var_low, eps, 0.0)
    if not v > 0.0:
        return True, (0.0, 0.0, 0.0, 0.0, 0.0), 0.0
    rstd, rstd_low = reciprocal_root(v, v_low)
    mean, error = two_sum(k, d)
    rest, tail = two_sum(error, d_low)
    if tail * tail * _TAIL_MATTERS * n <= var:
        tail = 0.0
    return False, (mean, rest, tail, rstd, rstd_low), var


@inlined
def xhat_of(v, mean, rest, tail, rstd, rstd_low):
    """
    Return ``(v - mean - rest - tail) * (rstd + rstd_low)`` as a pair.

    Here and in `pull` the low part may exceed half an ulp of the high one, by a few bits: what
    follows takes products and sums of these, where that costs nothing.
    """
    c, c_low = two_sum(v, -mean)
    # |rest| is at most half an ulp of the mean: c is 0, or no smaller.
    c, error = fast_two_sum(c, -rest)
    c_low = (error + c_low) - tail
    product, error = two_product(c, rstd)
    return product, fma(c, rstd_low, fma(c_low, rstd, error))


@inlined
def affine(h, h_low, scale, shift):
    """Return ``(h + h_low) * scale + shift`` as a pair."""
    product, error = two_product(h, scale)
    error = fma(h_low, scale, error)
    total, left = two_sum(product, shift)
    return total, left + error


@inlined
def normalize(x, y, n, gamma, beta, row):
    """Write a row of y."""
    wide_vectors()
    doubt = 0
    for j in range(n):
        high, low = affine(*xhat_of(get(x, j), *row), gamma[j], beta[j])
        doubt = put_pair_nearly(y, j, high, low, doubt)
    if doubt < 0:
        for j in range(n):
            high, low = affine(*xhat_of(get(x, j), *row), gamma[j], beta[j])
            put_pair(y, j, high, low)


# ---- backward ----


@inlined
def smallest(dy, gamma, n):
    """Return the smallest of four g = gamma * dy, as a pair."""
    s = max(n // 4, 1)
    m, m_low = two_product(get(dy, 0), gamma[0])
    for j in range(s, min(4 * s, n), s):
        g, g_low = two_product(get(dy, j), gamma[j])
        if abs(g) < abs(m):
            m, m_low = g, g_low
    return m, m_low


@inlined
def _least(dy, n):
    """Return the smallest |dy| of a row but for zeros; if there are only zeros, NaN or infinity is larger."""
    wide_vectors()
    # The bits of a float order like its size. Less one, those of zero are the largest.
    least = np.uint64(0xFFFFFFFFFFFFFFFF)
    for j in range(n):
        least = min(least, (bits_of(get(dy, j)) << np.uint64(1)) - np.uint64(1))
    return least


def _pulling(whole):
    def pull_columns(arrays, start, count, row, pivot, sums, factors, lanes):
        """Do the work of `pull` from column `start` on, in all lanes, or in the first `count`."""
        wide_vectors()
        (dy, x, gamma), (m, m_low) = arrays, pivot
        shifted, shifted_low, xhat, xhat_low = factors
        for lane in range(LANES if whole else count):
            j = start + lane
            d = get(dy, j)
            h, h_low = xhat_of(get(x, j), *row)
            g, g_low = two_product(d, gamma[j])
            c, error = two_sum(g, -m)
            c_low = error + (g_low - m_low)
            shifted[j], shifted_low[j], xhat[j], xhat_low[j] = c, c_low, h, h_low
            lanes[lane], lanes[LANES + lane] = accumulate(
                lanes[lane], lanes[LANES + lane], c, c_low
            )
            product, error = two_product(c, h)
            lanes[2 * LANES + lane], lanes[3 * LANES + lane] = accumulate(
                lanes[2 * LANES + lane], lanes[3 * LANES + lane],
                product, fma(c, h_low, fma(c_low, h, error)),
            )  # fmt: skip
            # Numba compiles no branch that waits for None.
            if sums is not None:
                dgamma, dgamma_low, dbeta, dbeta_low = sums
                product, error = two_product(d, h)
                dgamma[j], dgamma_low[j] = accumulate(
                    dgamma[j], dgamma_low[j], product, fma(d, h_low, error)
                )
                dbeta[j], error = two_sum(dbeta[j], d)
                dbeta_low[j] += error

    return inlined(named(pull_columns, whole))


_pull_round, _pull_rest = _pulling(True), _pulling(False)


@inlined
def pull(arrays, n, row, sums, factors, lanes):
    """
    Return whether the row is extreme, and the means of g - m and of (g - m) * xhat, as pairs.

    Leaves g - m and xhat in `factors`, four words per column: to read them back takes a third of the
    time of computing them again. Adds the row to the sums over rows, unless that is None.
    """
    dy, _, gamma = arrays
    pivot = smallest(dy, gamma, n)
    fill(lanes, 4 * LANES, 0.0)
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        _pull_round(arrays, start, LANES, row, pivot, sums, factors, lanes)
        if start % (LANES * DEPTH) == 0:
            _settle_lanes(lanes)
    if whole < n:
        _pull_rest(arrays, whole, n - whole, row, pivot, sums, factors, lanes)
    _settle_lanes(lanes)
    count = float(n)
    a, a_low = _fold(lanes)
    b, b_low = _fold(further(lanes, 16 * LANES))
    a, a_low = divide(a, a_low, count)
    b, b_low = divide(b, b_low, count)
    # NaN and infinity show in the sums.
    most = LARGEST * LARGEST
    moderate = _least(dy, n) >= _SMALLEST_BITS and abs(a) <= most and abs(b) <= most
    return not moderate, (a, a_low, b, b_low)


@inlined
def dx_of(shifted, xhat, means, rstd):
    """Return an element of dx as a pair."""
    (c, c_low), (h, h_low), (a, a_low, b, b_low) = shifted, xhat, means
    along, error = two_product(h, b)
    along_low = fma(h, b_low, fma(h_low, b, error))
    c, error = two_sum(c, -a)
    c_low = error + (c_low - a_low)
    c, error = two_sum(c, -along)
    c_low = error + (c_low - along_low)
    product, error = two_product(c, rstd[0])
    return product, fma(c, rstd[1], fma(c_low, rstd[0], error))


@inlined
def write_dx(factors, dx, n, means, row):
    """Write ``rstd * (g - m - a - xhat * b)``."""
    wide_vectors()
    shifted, shifted_low, xhat, xhat_low = factors
    rstd, doubt = row[3:], 0
    for j in range(n):
        high, low = dx_of((shifted[j], shifted_low[j]), (xhat[j], xhat_low[j]), means, rstd)
        doubt = put_pair_nearly(dx, j, high, low, doubt)
    if doubt < 0:
        for j in range(n):
            high, low = dx_of((shifted[j], shifted_low[j]), (xhat[j], xhat_low[j]), means, rstd)
            put_pair(dx, j, high, low)
