"""
``rounding="nearest"``: the results of `wide` with bounds of their errors, and what these leave undecided.

Each element is computed as a pair, and known to within e of it. It is decided if all numbers that
close to the pair round alike. Rows and columns in which an element is not decided are marked,
and the reference computes them, with integers at last.

Whether an element is decided is asked twice. First of a row as a whole, at once with the results:
a float32 or a 16-bit float can only be in doubt where the float64 next to the pair is a midpoint of
it. Rows in doubt are then asked element by element.

The bounds, and why the neighbours of a midpoint are in no doubt, are derived in
docs/reference/accuracy-contract.md: of y, ``b |gamma| (|xhat| + w)``, with b = `row_bound` and
``w = rms(xhat)``; of dx, ``b rstd (|g - m| + (1 + |xhat|) M)``, where m is what is subtracted from g, and
``M = 2 |m| + 3 rms(g - m)``; of dgamma and dbeta, `sums_bound` times the sums of ``|dy| (|xhat| + w)`` and
``|dy|``. All are 0 where nothing is lost. The rounding of the low part comes on top.
"""

from __future__ import annotations

import math

import numpy as np

from stablenorm.cpu.memory import (
    bits_of,
    float_of,
    fma,
    get,
    inlined,
    named,
    pasted,
    put,
    put_sum_nearly,
    wide_vectors,
    width,
    within,
)
from stablenorm.cpu.pairs import put_pair, two_product, two_sum
from stablenorm.cpu.wide import affine, dx_of, smallest, xhat_of

_UNIT = 2.0**-106

# The low part of a pair is a float64 that has been rounded itself; so is the sum with the bound.
_OF_LOW = 2.0**-52

# How far a float64 is from its neighbour, at least, as a part of its size; half of it is kept for the bound.
_HALF_ULP = 2.0**54

# Of RMS norm, an error is a part of the element itself, but for low parts that vanish: beside the row's
# root mean square, they are less than this.
_VANISHING = 2.0**-100

# For sums that nobody needs in one order.
_in_any_order = within(forceinline=True, fastmath={"reassoc", "contract"})


@pasted
def row_bound(n):
    """Return b for rows of n elements."""
    return (2.0 * n + 800.0) * _UNIT


@pasted
def sums_bound(n, tile_rows, tiles):
    """Return the same for sums over so many tiles of rows."""
    return (2.0 * n + 36.0 * tile_rows + 8.0 * tiles + 2000.0) * _UNIT


@pasted
def total_error(low, error):
    """Return `error`, and that of a low part that has been rounded and will be once more."""
    return fma(_OF_LOW, abs(low), error)


@pasted
def _put(y, j, high, low, error, doubt):
    """Round ``high + low`` into element j; return `doubt`, negative if it may be another number."""
    if width(y) == 8:
        error = total_error(low, error)
        lower, upper = high + (low - error), high + (low + error)
        # Zero gets the sign of plus.
        put(y, j, upper + 0.0)
        same = lower == upper
        return doubt if same else np.int64(-1)
    total = (high + low) + 0.0
    doubt = put_sum_nearly(y, j, total, doubt)
    rest = fma(-_HALF_ULP, error, fma(-4.0, abs(low), abs(total)))
    return doubt | np.int64(bits_of(rest))


@pasted
def put_decided(y, j, high, low, error):
    """Round ``high + low`` once into element j; return whether all numbers within `error` round alike."""
    put_pair(y, j, high, low - error)
    lower = bits_of(get(y, j))
    put_pair(y, j, high, low + error)
    return bits_of(get(y, j)) == lower


# ---- forward ----


@inlined
def spread_of(square, rstd):
    """Return rms(xhat), or a little more, given the row's variance."""
    return math.sqrt(max(square, 0.0)) * rstd * (1.0 + 2.0**-48)


@inlined
def _shared(size, v, mean):
    """Return what the elements of a row of this size share of an error, given x of one of them."""
    if mean is None:
        return _VANISHING * size if v != 0.0 else 0.0
    return size


@inlined
def _y(given, j):
    x, gamma, gamma_low, beta, row, spread = given
    h, h_low = xhat_of(get(x, j), *row)
    high, low = affine(h, h_low, j, gamma, gamma_low, beta)
    return high, low, abs(gamma[j]) * (abs(h) + _shared(spread, get(x, j), row[0]))


# ---- backward ----


@_in_any_order
def _sum_of_squares(shifted, shifted_low, n):
    total = 0.0
    for j in range(n):
        c = abs(shifted[j]) + abs(shifted_low[j])
        total += c * c
    return total


@inlined
def size_of(arrays, factors, n, layer, exact):
    """
    Return ``2 |m| + 3 rms(g - m)``, or a little more; 0 only where all of g - m is.

    Where g - m is computed as 0 it is, if g is an exact product, or m is 0.
    """
    total, m = _sum_of_squares(factors[0], factors[1], n), 0.0
    if layer:
        m = abs(smallest(arrays[0], arrays[2], arrays[3], n)[0])
    return 2.0 * m + 3.1 * math.sqrt(total / n) if total > 0.0 or not exact else 0.0


@pasted
def most_of(size, n):
    """
    Return at least the ``|g - m| + (1 + |xhat|) M`` of all elements, given M.

    None is more than ``sqrt(n)`` times its root mean square, which is at most ``M / 3.1`` and 1.
    """
    return (1.0 + 1.4 * math.sqrt(n)) * size


@inlined
def _dx(given, j):
    x, (shifted, shifted_low, h, h_low), means, row, size = given
    high, low = dx_of((shifted[j], shifted_low[j]), (h[j], h_low[j]), means, row[3:])
    return high, low, abs(shifted[j]) + (_shared(1.0, get(x, j), row[0]) + abs(h[j])) * size


@inlined
def _dx_and_sum(given, j):
    of_dx, dsum = given
    high, low, size = _dx(of_dx, j)
    high, error = two_sum(high, get(dsum, j))
    # Of an infinite sum, what is left over is NaN; a NaN has the bits of any other.
    low = low + error if abs(high) < np.inf else 0.0
    return high if high == high else np.nan, low, size  # noqa: PLR0124


@inlined
def _ty(given, j):
    of_dx, (scale, scale_low, tgamma, tbeta) = given
    _, _, h, h_low = of_dx[1]
    moved, moved_low, size = _dx(of_dx, j)
    high, low = two_product(moved, scale[j])
    low = fma(moved, scale_low[j], fma(moved_low, scale[j], low))
    turned, turned_low = two_product(h[j], tgamma[j])
    high, error = two_sum(high, turned)
    low += fma(h_low[j], tgamma[j], turned_low) + error
    high, error = two_sum(high, tbeta[j])
    return high, low + error, size


@pasted
def digits_of(v):
    """Return 2**p, p the bits of these floats: the last bit of one is more than 2**-p of it."""
    # 53, 24, and at most 11 of 16-bit floats.
    return 2.0**53 if width(v) == 8 else 2.0**24 if width(v) == 4 else 2.0**11


@inlined
def add_sizes(dy, x, factors, n, mean, spread, range_of_dy, sizes):
    """
    Add a row to what the bounds of dgamma and dbeta are made of.

    Behind the last column of dbeta's: the largest |dy|, one over the last bit of the smallest, and what is
    to be added for all columns.
    """
    wide_vectors()
    _, _, h, _ = factors
    (least, most), (of_dgamma, of_dbeta) = range_of_dy, sizes
    for j in range(n):
        d = abs(get(dy, j))
        of_dgamma[j] += d * (abs(h[j]) + _shared(spread, get(x, j), mean))
        if width(dy) == 8:
            of_dbeta[j] += d
    largest = float_of(np.int64(most))
    of_dbeta[n] = max(of_dbeta[n], largest)
    if width(dy) != 8:
        # Sums of narrower floats are exact nearly always: the same for all columns takes less time.
        of_dbeta[n + 2] += largest
    if most > 0:
        of_dbeta[n + 1] = max(of_dbeta[n + 1], digits_of(dy) / float_of(np.int64(least) + 1))


@pasted
def is_exact(rows, most, last):
    """
    Tell whether sums of dy, as pairs, are exact: multiples of the last bit of the smallest |dy|.

    The low parts, of so many rounding errors, are then at most 2**52 times that: so any two add up
    exactly.
    """
    return rows * 2.0**-53 * rows * most * last <= 2.0**52


# ---- both ----


def _writing(name, value):
    def write(given, out, n, bound, most=None):
        """
        Write a row; return whether an element of it is undecided.

        Element j is a pair that is known to within `bound` times its size: what `value` returns, and at most
        `most`. Without a bound, it is the float64 next to the pair that is rounded.
        """
        wide_vectors()
        decided = True
        if bound is None:
            for j in range(n):
                high, low, _ = value(given, j)
                put(out, j, high + low)
        else:
            doubt = np.int64(0)
            for j in range(n):
                high, low, size = value(given, j)
                if most is not None and width(out) != 8:
                    size = most
                doubt = _put(out, j, high, low, bound * size, doubt)
            if doubt < 0:
                for j in range(n):
                    high, low, size = value(given, j)
                    decided &= put_decided(out, j, high, low, total_error(low, bound * size))
        return not decided

    return inlined(named(write, name))


write_y, write_dx = _writing("y", _y), _writing("dx", _dx)
write_dx_and_sum, write_ty = _writing("dx_and_sum", _dx_and_sum), _writing("ty", _ty)
