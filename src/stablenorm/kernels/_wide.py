"""
float64: the equations of `reference` in double-double, rounded once.

Pairs have the range of float64, so squares of 1e200 overflow, and the low parts of products
below 1e-290 vanish. Rows that could come near either are left alone and reported as `hard`:
`cpu` hands them to the reference, whose numbers carry exponents.

This is what `_wide_forward` and `_wide_backward` share, and what looks for extremes; the
arithmetic is in `_pairs`.
"""

from __future__ import annotations

import numpy as np

from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._memory import stream_bytes
from stablenorm.kernels._pairs import over_lanes, product_of, two_sum
from stablenorm.kernels._vector_memory import address, itemsize, load, load_some, pointer
from stablenorm.kernels._vectors import (
    SWAPPED,
    ZEROS,
    first_lane,
    fma,
    larger,
    magnitude,
    negative,
    smaller_nonzero,
    splat,
)

# Rows whose largest |x| or |dy|, or smallest |dy| but for zeros, is beyond this are hard. Within,
# no product of three numbers, nor its last 106 bits, leaves the range of float64:
# 3 * 200 + 3 * 53 + 106 < 1022.
LARGEST, SMALLEST = 2.0**200, 2.0**-200

# Columns that one lane sums before the partial sum is put aside: 128 of them.
SPAN = 1024

_one = ZEROS[1]
_swap4, _swap2, _swap1 = SWAPPED[4], SWAPPED[2], SWAPPED[1]


@inner
def is_moderate(largest):
    return largest <= LARGEST and (largest >= SMALLEST or largest == 0.0)


@inner
def load_columns(x, at, col, count):
    """Return eight columns, or the first `count` and zeros."""
    at = at + col * itemsize(x)
    if count == WIDTH:
        return load(x, at, 0, _one())
    return load_some(x, at, 0, count, _one())


@inner
def largest_lane(v):
    v = larger(v, _swap4(v))
    v = larger(v, _swap2(v))
    return larger(v, _swap1(v))


@inner
def xhat_of(v, mean, mean_lo, mean_tail, rstd, rstd_lo):
    """
    Return ``(v - mean - mean_lo - mean_tail) * (rstd + rstd_lo)`` as a pair.

    Here and in `_wide_backward._centered_g` the low part may exceed half an ulp of the high one, by
    a few bits: what follows takes products and sums of these, where that costs nothing.
    """
    c, c_low = two_sum(v, negative(mean))
    c, error = two_sum(c, negative(mean_lo))
    c_low = (error + c_low) - mean_tail
    product, error = product_of(c, rstd)
    return product, fma(c, rstd_lo, fma(c_low, rstd, error))


@inner
def copy_out(stage, begin, end, row_bytes, written, out, stride, hard):
    """Copy staged rows ``[begin, end)`` to `out`, without those marked in `hard`."""
    source, to = address(pointer(stage)), address(out)
    if written == end - begin:
        stream_bytes(to + begin * stride, source, written * row_bytes)
        return
    for row in range(begin, end):
        if not hard[row - begin]:
            stream_bytes(to + row * stride, source + (row - begin) * row_bytes, row_bytes)


@inner
def find_hard(dy, dy_stride, x, x_stride, rows, n, hard):
    """Mark the rows that `_wide_backward.backward_tile` would."""
    zero = _one()
    for row in range(rows):
        largest, most, least, total = zero, zero, splat(LARGEST, zero), zero
        for col in range(0, n, WIDTH):
            count = min(n - col, WIDTH)
            largest = larger(largest, magnitude(load_columns(x, row * x_stride, col, count)))
            size = magnitude(load_columns(dy, row * dy_stride, col, count))
            most, least, total = larger(most, size), smaller_nonzero(least, size), total + size
        total, _ = over_lanes(total, zero)
        if not (
            is_moderate(first_lane(largest_lane(largest)))
            and first_lane(largest_lane(most)) <= LARGEST
            and -first_lane(largest_lane(negative(least))) >= SMALLEST
            and first_lane(total) < np.inf
        ):
            hard[row] = 1


@inner
def all_moderate(parameter, n, least):
    """Tell whether all of n elements are 0 or, in size, between `least` and `LARGEST`."""
    zero = _one()
    largest, smallest, total = zero, splat(LARGEST, zero), zero
    for col in range(0, n, WIDTH):
        size = magnitude(load_columns(parameter, 0, col, min(n - col, WIDTH)))
        largest, smallest = larger(largest, size), smaller_nonzero(smallest, size)
        total = total + size
    total, _ = over_lanes(total, zero)
    return (
        first_lane(largest_lane(largest)) <= LARGEST
        and -first_lane(largest_lane(negative(smallest))) >= least
        # A NaN is neither larger nor smaller than anything, but the sum shows it.
        and first_lane(total) < np.inf
    )
