"""
Rows of float16, bfloat16 and float32: the equations of `reference` in float64, in two passes.

Two rows at a time are measured: one's chain of additions overlaps with the other's, and in the backward
both share what is read of gamma and of the sums over rows. No element of a row depends on the other.

Forward
-------
`reference` subtracts the mean, then averages the squares of what is left: three passes over a row.
Here a guess k of the mean is subtracted in its place. With d = mean(x - k)::

    mean = k + d        var = mean((x - k)**2) - d**2

so that one pass gives both, and the second writes y. This is exact algebra for any k. In float64
it loses nothing either, as long as d**2 is no larger than a few var:

- k is the mean of eight elements, rounded to float32. So x - k has at most 25 significant bits
  where x and k are near each other, and is exact; where they are not, it is rounded to 53 bits.
- The guard: if d**2 > 2 var, k was a bad guess (the eight elements are not like the others), and
  the difference of squares has lost more than log2(3) bits. Then k + d, rounded to float32, is
  the new k, and the pass is made once more.

k + d is kept as two float64, as in `reference`: mean, the nearest float64, and the rest.

Backward
--------
In ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))`` the second mean may be taken of
``(g - m) * xhat`` for any constant m, since mean(xhat) = 0. With m = mean(g), as in `reference`, that
needs a pass of its own. Here m is the smallest of four elements of g: where g is constant along
the row, g - m is exactly zero, and where mean(g) is large against the spread of g, so is m.
With A = mean(g - m), B = mean((g - m) * xhat)::

    dx = rstd * ((g - m) - A - xhat * B)

Error bounds
------------
u = 2**-53; H is the longest chain of additions in a sum along a row: ``BLOCK / 32 + n / BLOCK + 20`` at
most, where LLVM adds 32 elements at a time, as with AVX-512.

- The computed xhat is within a |xhat| + b of the exact one. With D = |d| rstd, q = rstd**2 mean((x - k)**2),
  w = (1 + q) / 2 and e = (H + 6) u q + 2 D (H + 4) u w + u (D**2 + 1): a = 1.01 (e/2 + 6.5 u) and
  b = 1.01 (H + 4) u w. The guard keeps D**2 below 2 and q below 3.
- y, before it is rounded: |gamma| (a |xhat| + b) + 2 u |y|.
- dx, with B as above, G = rms(g), X >= max|xhat|: (a + 8 u) |dx| + rstd ((H + 3) u G +
  2 |A| (a + 4 u) + b |B| + (X + 1.5) ((a + b + (H + 5) u) G + |B| (3 a + 8 u))).
- dgamma: sum |dy| ((a + 64 u) |xhat| + b) + 3 u |dgamma|; dbeta: 64 u sum |dy| + 3 u |dbeta|. Sums
  over rows are plain within 64 rows, and compensated between such parts.
"""

from __future__ import annotations

import math

import numpy as np

from stablenorm.cpu.memory import (
    get,
    named,
    pasted,
    prefetch,
    put,
    put_nearly,
    wide_vectors,
    within,
)

# Columns of a row that are summed in one go: it bounds the longest chain of additions.
BLOCK = 2048

# Columns that are written in one go, while as many of a later row are asked for: more at a time, and the
# processor cannot keep them in mind.
CHUNK = 256

# LLVM makes vector instructions of loops. For a sum it must be allowed to add in another order
# ("reassoc"), which is fixed when it compiles and depends on n alone; "contract" makes a * b + c
# one rounding.
_summing = within(forceinline=True, fastmath={"reassoc", "contract"})
_exactly = within(forceinline=True, fastmath={"contract"})
# Of many columns at a time, where a call costs nothing: compiled once, not again where it is used.
_apart = within(fastmath={"contract"})
_summing_apart = within(fastmath={"reassoc", "contract"})


# ---- forward ----


# Rows whose statistics are computed together, where they are short: divisions and roots, which all that
# follows waits for, are made for all at once. Of longer rows two, so that they stay in the cache.
TOGETHER, SHORT = 8, 512

# Of so many rows: k, the sums of x - k and of its squares; mean, rest and rstd; whether k was bad.
_K, _TOTAL, _SQUARES, _MEAN, _REST, _RSTD, _BAD = range(0, 7 * TOGETHER, TOGETHER)
LANES = 7 * TOGETHER


@_exactly
def as_float32(v):
    """Return `v` rounded to float32, as a float64."""
    return np.float64(np.float32(v))


@_summing_apart
def _measure(x, x2, n, k, k2):
    """Return the sums of x - k and of its squares, of two rows."""
    wide_vectors()
    total, squares, total2, squares2 = 0.0, 0.0, 0.0, 0.0
    for start in range(0, n, BLOCK):
        a, b, a2, b2 = 0.0, 0.0, 0.0, 0.0
        for j in range(start, min(start + BLOCK, n)):
            c, c2 = get(x, j) - k, get(x2, j) - k2
            a += c
            b += c * c
            a2 += c2
            b2 += c2 * c2
        total += a
        squares += b
        total2 += a2
        squares2 += b2
    return total, squares, total2, squares2


@_exactly
def measure(x, x2, n, k, k2, lanes, second):
    """Put the guesses and sums of two rows into lane 0 and lane `second`."""
    lanes[_K], lanes[_K + second] = k, k2
    total, squares, total2, squares2 = _measure(x, x2, n, k, k2)
    lanes[_TOTAL], lanes[_SQUARES] = total, squares
    lanes[_TOTAL + second], lanes[_SQUARES + second] = total2, squares2


@_exactly
def settle(lanes, count, n, eps):
    """Compute mean, rest and rstd of so many rows; return whether one of the guesses was bad."""
    wide_vectors()
    bad = 0.0
    for r in range(count):
        k, d = lanes[_K + r], lanes[_TOTAL + r] / n
        var = lanes[_SQUARES + r] / n - d * d
        lanes[_BAD + r] = 1.0 if d * d > 2.0 * var else 0.0
        bad = max(bad, lanes[_BAD + r])
        mean = k + d
        d_part = mean - k
        lanes[_MEAN + r], lanes[_REST + r] = mean, (k - (mean - d_part)) + (d - d_part)
        # Rounding can make the difference of two equal squares negative.
        lanes[_RSTD + r] = 1.0 / math.sqrt(max(var, 0.0) + eps)
    return bad > 0.0


@pasted
def statistics(lanes, r):
    """Return mean, rest and rstd of row r, and whether its guess was bad."""
    return (lanes[_MEAN + r], lanes[_REST + r], lanes[_RSTD + r]), lanes[_BAD + r] > 0.0


@_apart
def normalize(x, y, start, stop, gamma, beta, row, ahead):
    """
    Write columns ``[start, stop)`` of a row to the front of `y`.

    Meanwhile what lies so many bytes behind x, unless 0, is asked for.
    """
    wide_vectors()
    mean, rest, rstd = row
    shift = -rest * rstd
    for first in range(start, stop, CHUNK):
        last, doubt = min(first + CHUNK, stop), np.int32(0)
        if ahead:
            prefetch(x, first, last, ahead)
        for j in range(first, last):
            h = (get(x, j) - mean) * rstd + shift
            doubt = put_nearly(y, j - start, h * gamma[j] + beta[j], doubt)
        if doubt < 0:
            for j in range(first, last):
                h = (get(x, j) - mean) * rstd + shift
                put(y, j - start, h * gamma[j] + beta[j])


# ---- backward ----


@_exactly
def pivot(dy, gamma, n):
    """Return the smallest of four g = gamma * dy."""
    a = get(dy, 0) * gamma[0]
    if n < 4:
        return a
    s = n // 4
    b = get(dy, s) * gamma[s]
    c = get(dy, 2 * s) * gamma[2 * s]
    d = get(dy, 3 * s) * gamma[3 * s]
    a = a if abs(a) < abs(b) else b
    c = c if abs(c) < abs(d) else d
    return a if abs(a) < abs(c) else c


def _pulling(summing):
    def pull(one, two, n, gamma, dgamma, dbeta):
        """
        Return the sums of g - m and of (g - m) * xhat of two rows.

        Adds both rows to the sums over rows, if so compiled.
        """
        wide_vectors()
        dy, x, mean, s, rstd, m = one
        dy2, x2, mean2, s2, rstd2, m2 = two
        total, along, total2, along2 = 0.0, 0.0, 0.0, 0.0
        for start in range(0, n, BLOCK):
            a, b, a2, b2 = 0.0, 0.0, 0.0, 0.0
            for j in range(start, min(start + BLOCK, n)):
                d, d2 = get(dy, j), get(dy2, j)
                h, h2 = (get(x, j) - mean) * rstd + s, (get(x2, j) - mean2) * rstd2 + s2
                g, g2 = d * gamma[j] - m, d2 * gamma[j] - m2
                a += g
                b += g * h
                a2 += g2
                b2 += g2 * h2
                if summing:
                    dbeta[j] = (dbeta[j] + d) + d2
                    dgamma[j] = (dgamma[j] + d * h) + d2 * h2
            total += a
            along += b
            total2 += a2
            along2 += b2
        return total, along, total2, along2

    return _summing(named(pull, summing))


pull, pull_summing = _pulling(False), _pulling(True)


@pasted
def coefficients(row, a, b):
    """Return p and q of ``dx = rstd * (g - m) + (x - mean) * p + q``, from the means of `pull`'s sums."""
    _, _, _, s, rstd, _ = row
    # xhat = (x - mean) * rstd + s
    return -b * rstd * rstd, -(a + b * s) * rstd


@_apart
def write_dx(row, dx, p, q, start, stop, gamma, ahead):
    """Write columns ``[start, stop)`` of a row to the front of `dx`; `ahead` is of dy and x."""
    wide_vectors()
    dy, x, mean, _, rstd, m = row
    dy_ahead, x_ahead = ahead
    for first in range(start, stop, CHUNK):
        last = min(first + CHUNK, stop)
        if x_ahead:
            prefetch(dy, first, last, dy_ahead)
            prefetch(x, first, last, x_ahead)
        for j in range(first, last):
            g = get(dy, j) * gamma[j] - m
            put(dx, j - start, (get(x, j) - mean) * p + (g * rstd + q))
