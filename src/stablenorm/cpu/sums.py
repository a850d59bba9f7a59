"""Vectors of float64: gamma and beta widened, sums over rows cleared, merged and rounded."""

from __future__ import annotations

import numpy as np

from stablenorm.cpu.memory import get, inlined, put, wide_vectors
from stablenorm.cpu.pairs import fast_two_sum, put_pair, two_sum


@inlined
def fill(out, n, value):
    """Set n float64 to `value`."""
    wide_vectors()
    for j in range(n):
        out[j] = value


@inlined
def mean_of_eight(x, first, step):
    """Return the mean of eight elements, so many from one another."""
    i, j = first, first + 4 * step
    a = (get(x, i) + get(x, i + step)) + (get(x, i + 2 * step) + get(x, i + 3 * step))
    b = (get(x, j) + get(x, j + step)) + (get(x, j + 2 * step) + get(x, j + 3 * step))
    return (a + b) * 0.125


@inlined
def widen(parameter, out, n):
    """Copy n elements into float64."""
    wide_vectors()
    for j in range(n):
        out[j] = get(parameter, j)


@inlined
def add_offset(parameter, offset, low, n):
    """Add the float64 `offset` to n float64; what rounding takes goes into `low`."""
    wide_vectors()
    for j in range(n):
        parameter[j], low[j] = two_sum(parameter[j], offset)


@inlined
def is_zero(v, n):
    """Tell whether all of n float64 are 0."""
    same = True
    for j in range(n):
        same = same and v[j] == 0.0
    return same


@inlined
def settle(high, low, n):
    """Bring n pairs back to where the low part is at most half an ulp of the high one."""
    wide_vectors()
    for j in range(n):
        high[j], low[j] = fast_two_sum(high[j], low[j])


@inlined
def add_to(total, part, n):
    """Add `part` to the plain sums `total`."""
    wide_vectors()
    for j in range(n):
        total[j] += part[j]


@inlined
def merge(part, total, low, n):
    """Add `part` to the compensated sums ``total + low``."""
    wide_vectors()
    for j in range(n):
        high, error = two_sum(total[j], part[j])
        # Of an infinite sum, what is left over is NaN.
        finite = abs(high) < np.inf
        error = error + low[j] if finite else 0.0
        total[j] = high + error
        low[j] = error - (total[j] - high) if finite else 0.0


@inlined
def round_sums(total, low, n, out):
    """Round ``total + low`` once into `out`."""
    wide_vectors()
    for j in range(n):
        put_pair(out, j, total[j], low[j])


@inlined
def put_sums(total, low, error, n, out):
    """Write ``total + low`` as sums to be merged with others; without `error`, it is not known."""
    for j in range(n):
        high, rest = two_sum(total[j], low[j])
        finite = abs(high) < np.inf
        put(out, 4 * j, high)
        put(out, 4 * j + 1, rest if finite else 0.0)
        put(out, 4 * j + 2, (np.nan if error is None else error[j]) if finite else 0.0)
        put(out, 4 * j + 3, 0.0)
