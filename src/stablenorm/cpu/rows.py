"""
Rows of float16, bfloat16 and float32: the equations of `reference` in float64, in two passes.

Two rows at a time are summed: one's chain of additions overlaps with the other's, and in the backward
both share what is read of gamma and of the sums over rows. No element of a row depends on the other.
What is known of a row as a whole is in its lane: a column of a small table of float64.

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

RMS norm
--------
There is nothing to subtract: mean = 0, m = 0, A = 0, and no sum is made for them. B = mean(g * xhat).

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
- RMS norm: the same with d = A = b = 0, so that a = 1.01 (H/2 + 10) u.
- gamma + gamma_offset is rounded to float64: u |gamma xhat| more of y, and of dx as much as u |g| each
  brings, rstd u (|g| + |xhat| mean|g xhat|), and for a layer norm rstd u mean|g|.
"""

from __future__ import annotations

import math

import numpy as np

from stablenorm.cpu.memory import (
    further,
    get,
    named,
    prefetch,
    put,
    put_nearly,
    wide_vectors,
    within,
)
from stablenorm.cpu.sums import mean_of_eight

# Columns of a row that are summed in one go: it bounds the longest chain of additions.
BLOCK = 2048

# Rows that are done together, where they are short: divisions and roots, which all that follows waits
# for, are made for all at once, and calls are fewer. Of longer rows two, so that they stay in the cache.
TOGETHER, SHORT = 8, 1024

# The lanes of so many rows. Forward: k, the sums of x - k and of its squares. Backward: m, the sums of
# g - m and of (g - m) * xhat, and p and q of ``dx = rstd * (g - m) + (x - mean) * p + q``.
# Last, eight elements of x of each row. Functions of all lanes, used or not, are given their number,
# `every`: of a number that it knows, LLVM would unroll the loop before it makes vectors of it.
_MEAN, _REST, _RSTD, _K, _TOTAL, _PRODUCTS, _P, _Q, SAMPLES = range(0, 9 * TOGETHER, TOGETHER)
LANES = 12 * TOGETHER

# Columns that are written in one go, while as many of a later row are asked for: more at a time, and the
# processor cannot keep them in mind.
PIECE = 256

# LLVM makes vector instructions of loops. For a sum it must be allowed to add in another order
# ("reassoc"), which is fixed when it compiles and depends on n alone; "contract" makes a * b + c
# one rounding.
_exactly = within(forceinline=True, fastmath={"contract"})
_summing = within(fastmath={"reassoc", "contract"})


@_exactly
def lane(lanes, r):
    """Return mean, rest, rstd, k or m, p and q."""
    mean, rest, rstd, k = lanes[_MEAN + r], lanes[_REST + r], lanes[_RSTD + r], lanes[_K + r]
    return mean, rest, rstd, k, lanes[_P + r], lanes[_Q + r]


@_exactly
def load(lanes, r, mean, rest, rstd, m):
    """Fill a lane of the backward."""
    lanes[_MEAN + r], lanes[_REST + r], lanes[_RSTD + r], lanes[_K + r] = mean, rest, rstd, m


@_exactly
def row_of(p, r, stride, numbers):
    """Return a pointer to row r; with `numbers`, to the row whose number is the r-th of these."""
    return further(p, (r if numbers is None else numbers[r]) * stride)


@_exactly
def _distance(r, ahead, stride, numbers):
    """Return how many bytes ahead to look from row r: so many as given, or with `numbers` so many of these."""
    return ahead if numbers is None else (numbers[r + ahead] - numbers[r]) * stride


# ---- forward ----


@_exactly
def guess(x, stride, numbers, rows, n, lanes, samples, every):
    """Guess the means of some rows, of eight elements each."""
    # Copied as they are: converted one by one, they took a third of the time at n = 64, float16.
    step = n // 8
    for r in range(rows + rows % 2):
        row = row_of(x, min(r, rows - 1), stride, numbers)
        for i in range(8):
            samples[TOGETHER * i + r] = row[i * step]
    for r in range(every):
        lanes[_K + r] = np.float32(mean_of_eight(samples, r, TOGETHER))


@_exactly
def _shifted(_, x, j, row, _parameters):
    c = get(x, j) - row[3]
    return 0.0, c, c


@_exactly
def _itself(_, x, j, _row, _parameters):
    v = get(x, j)
    return 0.0, v, v


@_exactly
def rms_settle(lanes, n, eps, every):
    """Compute rstd."""
    for r in range(every):
        v = lanes[_PRODUCTS + r] / n + eps
        # v - v: infinity spoils all of its row, as it does a mean.
        lanes[_RSTD + r] = 1.0 / math.sqrt(v) + (v - v)


@_exactly
def settle(lanes, n, eps, every):
    """Compute mean, rest and rstd; return whether a guess was bad, which then is a better one."""
    bad = False
    for r in range(every):
        k, d = lanes[_K + r], lanes[_TOTAL + r] / n
        var = lanes[_PRODUCTS + r] / n - d * d
        mean = k + d
        d_part = mean - k
        lanes[_MEAN + r], lanes[_REST + r] = mean, (k - (mean - d_part)) + (d - d_part)
        # Rounding can make the difference of two equal squares negative.
        lanes[_RSTD + r] = 1.0 / math.sqrt(max(var, 0.0) + eps)
        far = d * d > 2.0 * var
        lanes[_K + r] = np.float64(np.float32(mean)) if far else k
        bad |= far
    return bad


@_exactly
def _y(_, x, j, row, parameters):
    (mean, rest, rstd, _, _, _), (gamma, beta) = row, parameters
    return ((get(x, j) - mean) * rstd + -rest * rstd) * gamma[j] + beta[j]


@_exactly
def _rms_y(_, x, j, row, parameters):
    return get(x, j) * row[2] * parameters[0][j] + parameters[1][j]


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


@_exactly
def _pulled(dy, x, j, row, gamma):
    (mean, rest, rstd, m, _, _), d = row, get(dy, j)
    return d, d * gamma[j] - m, (get(x, j) - mean) * rstd + -rest * rstd


@_exactly
def _rms_pulled(dy, x, j, row, gamma):
    d = get(dy, j)
    return d, d * gamma[j], get(x, j) * row[2]


@_exactly
def find_coefficients(lanes, n, every):
    """Compute p and q from the means of `pull`'s sums."""
    for r in range(every):
        a, b = lanes[_TOTAL + r] / n, lanes[_PRODUCTS + r] / n
        _, rest, rstd, _, _, _ = lane(lanes, r)
        # xhat = (x - mean) * rstd + s
        s = -rest * rstd
        lanes[_P + r], lanes[_Q + r] = -b * rstd * rstd, -(a + b * s) * rstd


@_exactly
def _dx(dy, x, j, row, gamma):
    mean, _, rstd, m, p, q = row
    return (get(x, j) - mean) * p + ((get(dy, j) * gamma[j] - m) * rstd + q)


@_exactly
def _rms_dx(dy, x, j, row, gamma):
    return get(x, j) * row[4] + get(dy, j) * gamma[j] * row[2]


# ---- jvp: dx with gamma = 1, of the tangent of x; gamma comes last ----


def _pushed(name, moved, terms):
    def ty(tx, x, j, row, parameters):
        ones, scale, tgamma, tbeta = parameters
        _, _, xhat = terms(tx, x, j, row, ones)
        return moved(tx, x, j, row, ones) * scale[j] + (xhat * tgamma[j] + tbeta[j])

    return _writing(name, _exactly(named(ty, name)))


# ---- both ----


@_exactly
def add(x, residual, total, strides, rows, n):
    """Write ``x + residual``, rounded once, to where `total` points."""
    wide_vectors()
    for r in range(rows):
        a, b = further(x, r * strides[0]), further(residual, r * strides[1])
        to = further(total, r * strides[2])
        for j in range(n):
            # A sum of two such numbers that float64 has rounded is far from any midpoint of them.
            put(to, j, get(a, j) + get(b, j))


def _adding(name, terms, both=True):
    def add(given, rows, n, last, sums):
        """
        Sum the second of the `terms`, unless not `both`, and its product with the third, of some rows.

        A last odd row goes with `last`: alone, its sums could have other bits. The first term, and its
        product with the third, are added to the sums over rows, unless None.
        """
        wide_vectors()
        (dy, x), (dy_stride, x_stride, _), numbers, parameters, lanes, _ = given
        for r in range(0, rows, 2):
            dy1, x1 = row_of(dy, r, dy_stride, numbers), row_of(x, r, x_stride, numbers)
            dy2, x2 = last
            if r + 1 < rows:
                dy2 = row_of(dy, r + 1, dy_stride, numbers)
                x2 = row_of(x, r + 1, x_stride, numbers)
            row1, row2 = lane(lanes, r), lane(lanes, r + 1)
            total1, products1, total2, products2 = 0.0, 0.0, 0.0, 0.0
            for start in range(0, n, BLOCK):
                a1, b1, a2, b2 = 0.0, 0.0, 0.0, 0.0
                for j in range(start, min(start + BLOCK, n)):
                    d1, g1, h1 = terms(dy1, x1, j, row1, parameters)
                    d2, g2, h2 = terms(dy2, x2, j, row2, parameters)
                    b1 += g1 * h1
                    b2 += g2 * h2
                    if both:
                        a1 += g1
                        a2 += g2
                    if sums is not None:
                        dgamma, dbeta = sums
                        dbeta[j] = (dbeta[j] + d1) + d2
                        dgamma[j] = (dgamma[j] + d1 * h1) + d2 * h2
                total1 += a1
                products1 += b1
                total2 += a2
                products2 += b2
            lanes[_TOTAL + r], lanes[_PRODUCTS + r] = total1, products1
            lanes[_TOTAL + r + 1], lanes[_PRODUCTS + r + 1] = total2, products2

    return _summing(named(add, name))


measure, pull = _adding("measure", _shifted), _adding("pull", _pulled)
rms_measure = _adding("rms_measure", _itself, False)
rms_pull = _adding("rms_pull", _rms_pulled, False)


@_exactly
def _plus(v, plus, r, j):
    return v if plus is None else v + get(row_of(plus[0], r, plus[1], plus[2]), j)


def _writing(name, value):
    def write(given, out, rows, columns, plus):
        """
        Write some columns of some rows, to where `out` points, which is that of the first.

        Meanwhile what lies so many bytes behind dy and x, unless 0, is asked for. Added to the value is
        what `plus` points to, unless None.
        """
        wide_vectors()
        (dys, xs), (dy_stride, x_stride, out_stride), numbers, parameters, lanes, aheads = given
        (top, bottom), (left, right), (dy_ahead, x_ahead) = rows, columns, aheads
        for start in range(left, right, PIECE):
            stop = min(start + PIECE, right)
            for r in range(top, bottom):
                dy, x = row_of(dys, r, dy_stride, numbers), row_of(xs, r, x_stride, numbers)
                to, row, doubt = further(out, (r - top) * out_stride), lane(lanes, r), np.int32(0)
                if dy_ahead:
                    prefetch(dy, start, stop, _distance(r, dy_ahead, dy_stride, numbers))
                if x_ahead:
                    prefetch(x, start, stop, _distance(r, x_ahead, x_stride, numbers))
                for j in range(start, stop):
                    v = _plus(value(dy, x, j, row, parameters), plus, r, j)
                    doubt = put_nearly(to, j - left, v, doubt)
                if doubt < 0:
                    for j in range(start, stop):
                        put(to, j - left, _plus(value(dy, x, j, row, parameters), plus, r, j))

    return _exactly(named(write, name))


write_y, write_dx = _writing("y", _y), _writing("dx", _dx)
rms_write_y, rms_write_dx = _writing("rms_y", _rms_y), _writing("rms_dx", _rms_dx)
write_ty, rms_write_ty = _pushed("ty", _dx, _pulled), _pushed("rms_ty", _rms_dx, _rms_pulled)
