"""
The sums over rows, dgamma and dbeta: compensated, so that their error does not grow with the rows.

A tile has sums of its own. They are laid out as eight sums, then what rounding took from them,
then the next eight: side by side, since addresses a multiple of 4096 apart make a load wait for an
unrelated store.
"""

from __future__ import annotations

from numba import njit

from stablenorm.kernels._control import restore, set_default
from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._vector_memory import itemsize, load, store, store_some
from stablenorm.kernels._vectors import ZEROS, finite_or, keep, sum_rows

_one = ZEROS[1]


@njit(error_model="numpy")
def sums_size(n):
    """Return how many float64 hold n compensated sums: two each, whole vectors."""
    return 2 * (n + -n % WIDTH)


@inner
def two_sum(a, b):
    """Return ``fl(a + b)`` and its exact error (Knuth); nothing here may be reassociated."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


@inner
def accumulate(sums, col, v, fresh):
    """Add the rows of `v` to the eight sums from `col` on; to zeros, if `fresh`."""
    at, rest_at, one = 16 * col, 16 * col + 8 * WIDTH, _one()
    # Whatever memory holds before that is loaded as well: a branch would be twice the code.
    valid = 0 if fresh else WIDTH
    total, error = two_sum(keep(load(sums, at, 0, one), valid), sum_rows(v))
    store(sums, at, 0, total)
    store(sums, rest_at, 0, keep(load(sums, rest_at, 0, one), valid) + error)


@inner
def total_of_tiles(sums, tiles, n, which, out):
    """Write the sum over the tiles of dgamma, 0, or dbeta, 1, rounded once to the type of `out`."""
    word = set_default()
    one, width, size = _one(), itemsize(out), sums_size(n)
    for col in range(0, n, WIDTH):
        total, rest = one, one
        for tile in range(tiles):
            at = 8 * size * (2 * tile + which) + 16 * col
            total, error = two_sum(total, load(sums, at, 0, one))
            rest = rest + (error + load(sums, at + 8 * WIDTH, 0, one))
        # What rounding takes from an infinite sum is a NaN.
        store_some(out, col * width, 0, min(n - col, WIDTH), finite_or(total + rest, total))
    restore(word)
