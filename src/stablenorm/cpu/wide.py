"""
Rows of which something is float64: the equations of `rows` in double-double, in two passes.

As there, a guess k of the mean is subtracted first, and m, one of a few elements of g. Here x - k is
exact as a pair, whatever k is. Where a row's samples differ in sign, k is 0, and so is m: nothing is
subtracted, and a loop without that is taken. The mean is then written as ``mean + rest + tail``, three
float64 that do not overlap, of which the last matters only where the row is far off zero against its spread.

LLVM may not split sums of pairs by itself. So the source does: column j is added to lane j % 16, and
at the end the lanes are added by halves.

The high part of a sum loses nothing, and its low part gathers what rounding takes from the high one. The
bounds of all steps are derived in docs/reference/accuracy-contract.md.

y and dx are rounded from ``fl(high + low)``: for float64 that is the rounded pair, but for the error of low;
for float32, it is twice rounded, which moves a midpoint by 2**-29 ulp.

Pairs have the range of float64, so that squares of 1e200 overflow, and the low parts of products below
1e-290 vanish. Rows that could come near either are extreme: they are left alone and reported, and the
reference, whose numbers carry exponents, computes them.
"""

from __future__ import annotations

import numpy as np

from stablenorm.cpu.memory import bits_of, fma, get, inlined, pasted, wide_vectors
from stablenorm.cpu.pairs import (
    accumulate,
    add,
    divide,
    fast_two_sum,
    multiply,
    reciprocal_root,
    two_product,
    two_sum,
)
from stablenorm.cpu.sums import fill, mean_of_eight

# gamma, beta and eps, and cotangents but for zeros, are between these in size, or extreme. Then no
# product of three numbers, nor its last 106 bits, leaves the range of float64:
# 3 * 200 + 3 * 53 + 106 < 1022.
LARGEST, SMALLEST = 2.0**200, 2.0**-200

# Their bits; of the smallest, less one.
_SMALLEST_BITS = np.uint64(int(np.float64(SMALLEST).view(np.uint64)) - 1)
_LARGEST_BITS = np.uint64(int(np.float64(LARGEST).view(np.uint64)))

# Lanes of a sum: two vectors of 512 bits. The columns that a lane of the forward adds up in registers,
# before its low part is brought back below half an ulp of the high one: as it grows, it loses digits
# of its own. (The backward, with more at hand, adds two; four took no less time.)
LANES, DEPTH = 16, 4

# The tail of the mean is kept where it exceeds 2**-100 of the least that mean|x - mean| can be,
# sqrt(var / n): a quarter of what the contract allows (2**-98).
_TAIL_MATTERS = 2.0**200


@inlined
def _load(lanes, lane):
    """Return two pairs of a lane."""
    return (
        lanes[lane], lanes[LANES + lane], lanes[2 * LANES + lane], lanes[3 * LANES + lane],
    )  # fmt: skip


@inlined
def _store(lanes, lane, some):
    """Keep two pairs of a lane, each with a low part of at most half an ulp of the high one."""
    lanes[lane], lanes[LANES + lane] = fast_two_sum(some[0], some[1])
    lanes[2 * LANES + lane], lanes[3 * LANES + lane] = fast_two_sum(some[2], some[3])


@inlined
def _means(lanes, n):
    """Return the two sums of all lanes, divided by n."""
    wide_vectors()
    for half in (8, 4, 2, 1):
        for lane in range(half):
            a, a_low, b, b_low = _load(lanes, lane)
            c, c_low, d, d_low = _load(lanes, lane + half)
            _store(lanes, lane, (*accumulate(a, a_low, c, c_low), *accumulate(b, b_low, d, d_low)))
    a, a_low, b, b_low = _load(lanes, 0)
    return *divide(a, a_low, float(n)), *divide(b, b_low, float(n))


# ---- forward ----


@inlined
def _measure_element(v, k, some, layer):
    """Add v - k, for a layer norm, and its square to the pairs of a lane."""
    total, total_low, squares, squares_low = some
    if k is None:
        square, error = two_product(v, v)
        if layer:
            # A low part of -0.0 is nothing, and LLVM leaves it out.
            total, total_low = accumulate(total, total_low, v, -0.0)
        return total, total_low, *accumulate(squares, squares_low, square, error)
    c, c_low = two_sum(v, -k)
    square, error = two_product(c, c)
    # 2 c c_low; c_low**2 is below the last bit of a pair.
    error = fma(c + c, c_low, error)
    if layer:
        total, total_low = accumulate(total, total_low, c, c_low)
    return total, total_low, *accumulate(squares, squares_low, square, error)


@inlined
def _measure_some(x, start, count, k, lanes, layer):
    """Add x - k and its square, of one column of each of `count` lanes; of four of each lane, if k is None."""
    wide_vectors()
    for lane in range(count if count is not None else LANES):
        j = start + lane
        some = _measure_element(get(x, j), k, _load(lanes, lane), layer)
        if k is None:
            some = _measure_element(get(x, j + LANES), k, some, layer)
            some = _measure_element(get(x, j + 2 * LANES), k, some, layer)
            some = _measure_element(get(x, j + 3 * LANES), k, some, layer)
        _store(lanes, lane, some)


@inlined
def _measure(x, n, k, lanes, layer):
    """Return the means of x - k, 0 for RMS norm, and of its square, as pairs."""
    fill(lanes, 4 * LANES, 0.0)
    # Of rows about zero; the rest of them by the other loop, where k = 0 changes nothing.
    whole = n - n % (LANES * DEPTH) if k == 0.0 else 0
    for start in range(0, whole, LANES * DEPTH):
        _measure_some(x, start, None, None, lanes, layer)
    for start in range(whole, n, LANES):
        _measure_some(x, start, min(LANES, n - start), k, lanes, layer)
    return _means(lanes, n)


@pasted
def _is_constant(x, n, k):
    same = True
    for j in range(n):
        same = same and get(x, j) == k
    return same


@inlined
def _guess(x, n):
    """Return about the mean of a row; 0, which costs nothing to subtract, where it is between the samples."""
    least, most = np.inf, -np.inf
    for j in range(0, n, max(n // 8, 1)):
        least, most = min(least, get(x, j)), max(most, get(x, j))
    return 0.0 if least < 0.0 < most else mean_of_eight(x, 0, n // 8)


@inlined
def statistics(x, n, eps, lanes, layer):
    """Return whether the row is extreme; mean, rest, tail, rstd and its low part; and var."""
    k, d, tries = _guess(x, n) if layer else 0.0, 0.0, 2
    while tries > 0:
        k += d
        d, d_low, square, square_low = _measure(x, n, k, lanes, layer)
        product, product_low = multiply(d, d_low, d, d_low)
        var, var_low = add(square, square_low, -product, -product_low)
        # If the mean is elsewhere than the samples, the difference has lost two bits or more.
        tries = tries - 1 if d * d > 2.0 * var else 0
    # A square of zero may be one that has vanished.
    moderate = SMALLEST * SMALLEST <= square <= LARGEST * LARGEST
    v, v_low = add(var, var_low, eps, 0.0)
    if not (moderate or (square == 0.0 and _is_constant(x, n, k))) or not v > 0.0:
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
    Return ``(v - mean - rest - tail) * (rstd + rstd_low)`` as a pair; no mean is None.

    Here and in `pull` the low part may exceed half an ulp of the high one, by a few bits: what
    follows takes products and sums of these, where that costs nothing.
    """
    if mean is None:
        product, error = two_product(v, rstd)
        return product, fma(v, rstd_low, error)
    c, c_low = two_sum(v, -mean)
    # |rest| is at most half an ulp of the mean: c is 0, or no smaller. Or else the mean is all but
    # 0 beside the spread of the row, and what is lost is nothing beside that.
    c, error = fast_two_sum(c, -rest)
    c_low = (error + c_low) - tail
    product, error = two_product(c, rstd)
    return product, fma(c, rstd_low, fma(c_low, rstd, error))


@inlined
def affine(h, h_low, j, gamma, gamma_low, beta):
    """Return ``(h + h_low) * gamma + beta`` of column j as a pair; gamma's low parts may be None."""
    product, error = two_product(h, gamma[j])
    error = fma(h_low, gamma[j], error)
    if gamma_low is not None:
        error = fma(h, gamma_low[j], error)
    total, left = two_sum(product, beta[j])
    return total, left + error


# ---- backward ----


@inlined
def g_of(dy, j, gamma, gamma_low):
    """Return ``g = gamma * dy`` of column j as a pair."""
    g, g_low = two_product(get(dy, j), gamma[j])
    if gamma_low is not None:
        g_low = fma(get(dy, j), gamma_low[j], g_low)
    return g, g_low


@inlined
def less(c, c_low, subtracted):
    """Return a pair less another, which may be None."""
    if subtracted is None:
        return c, c_low
    c, error = two_sum(c, -subtracted[0])
    return c, error + (c_low - subtracted[1])


@inlined
def smallest(dy, gamma, gamma_low, n):
    """Return the smallest of some g = gamma * dy, as a pair; 0 if they differ in sign."""
    s = max(n // 8, 1)
    m, m_low = g_of(dy, 0, gamma, gamma_low)
    least = most = m
    for j in range(s, n, s):
        g, g_low = g_of(dy, j, gamma, gamma_low)
        least, most = min(least, g), max(most, g)
        if abs(g) < abs(m):
            m, m_low = g, g_low
    return (0.0, 0.0) if least < 0.0 < most else (m, m_low)


@inlined
def _range_of(dy, n):
    """Return the bits of the smallest |dy| of a row but for zeros, less one, and of the largest."""
    wide_vectors()
    # They order like the sizes. Those of zero, less one, are the largest.
    least, most = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(0)
    for j in range(n):
        size = bits_of(abs(get(dy, j)))
        least, most = min(least, size - np.uint64(1)), max(most, size)
    return least, most


@inlined
def _pull_element(arrays, j, row, m, sums, factors, some, layer):
    """Do the work of `pull` for column j; return the pairs of its lane."""
    dy, x, gamma, gamma_low = arrays
    c_high, c_rest, xhat, xhat_low = factors
    a, a_low, b, b_low = some
    d = get(dy, j)
    h, h_low = xhat_of(get(x, j), *row)
    c, c_low = g_of(dy, j, gamma, gamma_low)
    c, c_low = less(c, c_low, m)
    c_high[j], c_rest[j], xhat[j], xhat_low[j] = c, c_low, h, h_low
    # Numba compiles no branch that waits for None.
    if sums is not None:
        dgamma, dgamma_low, dbeta, dbeta_low = sums
        product, error = two_product(d, h)
        dgamma[j], dgamma_low[j] = accumulate(
            dgamma[j], dgamma_low[j], product, fma(d, h_low, error)
        )
        dbeta[j], error = two_sum(dbeta[j], d)
        dbeta_low[j] += error
    product, error = two_product(c, h)
    error = fma(c, h_low, fma(c_low, h, error))
    if layer:
        a, a_low = accumulate(a, a_low, c, c_low)
    return a, a_low, *accumulate(b, b_low, product, error)


@inlined
def _pull_some(arrays, start, count, row, m, sums, factors, lanes, layer):
    """Do one column of each of `count` lanes; two of each lane, if m is None."""
    wide_vectors()
    for lane in range(count if count is not None else LANES):
        j, some = start + lane, _load(lanes, lane)
        some = _pull_element(arrays, j, row, m, sums, factors, some, layer)
        if m is None:
            some = _pull_element(arrays, j + LANES, row, m, sums, factors, some, layer)
        _store(lanes, lane, some)


@inlined
def pull(arrays, n, row, sums, factors, lanes, layer):
    """
    Return whether the row is extreme; the means of g - m and of (g - m) * xhat, as pairs; `_range_of` dy.

    Leaves g - m and xhat in `factors`, four words per column: to read them back takes a third of the
    time of computing them again. Adds the row to the sums over rows, unless that is None. Of RMS norm, m
    and the first mean are 0.
    """
    dy, _, gamma, gamma_low = arrays
    m = smallest(dy, gamma, gamma_low, n) if layer else (0.0, 0.0)
    fill(lanes, 4 * LANES, 0.0)
    whole = n - n % (2 * LANES) if m[0] == 0.0 else 0
    for start in range(0, whole, 2 * LANES):
        _pull_some(arrays, start, None, row, None, sums, factors, lanes, layer)
    for start in range(whole, n, LANES):
        count = min(LANES, n - start)
        _pull_some(arrays, start, count, row, m, sums, factors, lanes, layer)
    a, a_low, b, b_low = _means(lanes, n)
    least, most = range_of_dy = _range_of(dy, n)
    extreme = least < _SMALLEST_BITS or most > _LARGEST_BITS
    return extreme, (a, a_low), (b, b_low), range_of_dy


@inlined
def dx_of(shifted, xhat, means, rstd):
    """Return an element of dx as a pair; of the `means`, the first may be None."""
    (c, c_low), (h, h_low), (a, (b, b_low)) = shifted, xhat, means
    along, error = two_product(h, b)
    along_low = fma(h, b_low, fma(h_low, b, error))
    c, c_low = less(c, c_low, a)
    c, c_low = less(c, c_low, (along, along_low))
    product, error = two_product(c, rstd[0])
    return product, fma(c, rstd[1], fma(c_low, rstd[0], error))
