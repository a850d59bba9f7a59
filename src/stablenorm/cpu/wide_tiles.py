"""
The tiles of a call of which something is float64: row by row, from memory to memory.

Rows that are extreme are marked and left alone: what is in their place before stays there. Results go straight
to memory: the arithmetic takes longer than the way past the caches would save.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm.cpu import nearest
from stablenorm.cpu import wide as equations
from stablenorm.cpu.compiling import address_of_compiled
from stablenorm.cpu.memory import LINE, float_of, further, pasted, pointer_at
from stablenorm.cpu.record import float64_at
from stablenorm.cpu.sums import fill, is_zero, settle
from stablenorm.cpu.tiles import ROWS_OF_PART, clear_between, padded, row_at, tile_of

# The mark of a row that is not extreme, but of which an element is undecided.
UNDECIDED = 2

# Bytes of the lanes of sums.
_LANES = 8 * 4 * equations.LANES


@pasted
def _four(place, apart):
    """Return four pointers to float64, so many bytes from one another."""
    second, third = place + apart, place + 2 * apart
    return float64_at(place), float64_at(second), float64_at(third), float64_at(third + apart)


@address_of_compiled
def forward_tile(element: Any, rounding: bool, kind: str, offset: bool) -> Any:
    """Return what normalizes a tile in double-double."""
    layer = kind == "layer"

    def forward(record, number, me):
        p, first, stop, scratch = tile_of(record, number, me)
        n, gamma, beta, eps = p.n, float64_at(p.gamma), float64_at(p.beta), float_of(p.eps)
        mean, rest, tails = float64_at(p.mean), float64_at(p.rest), float64_at(p.tails)
        gamma_low = float64_at(p.gamma + 16 * padded(n)) if offset else None
        rstd, rstd_low = float64_at(p.rstd), float64_at(p.rstd_low)
        marks, lanes = pointer_at(p.marks, np.uint8), float64_at(scratch)
        bound = nearest.row_bound(n) if rounding else None
        for i in range(first, stop):
            at = row_at(p, i)
            clear_between(p, i, scratch)
            x = pointer_at(p.x + at * p.x_stride, element)
            extreme, found, var = equations.statistics(x, n, eps, lanes, layer)
            marks[i], rstd[i], rstd_low[i] = extreme, found[3], found[4]
            if layer:
                mean[i], rest[i], tails[i] = found[:3]
            row = found if layer else (None, None, None, found[3], found[4])
            if extreme:
                continue
            spread = nearest.spread_of(var, rstd[i])
            if rounding:
                float64_at(p.spread)[i] = spread
            y = pointer_at(p.out + at * p.out_stride, element)
            if nearest.write_y((x, gamma, gamma_low, beta, row, spread), y, n, bound):
                marks[i] = UNDECIDED
        if stop == p.rows:
            clear_between(p, stop, scratch)

    return forward


@pasted
def _settle(sums, n):
    dgamma, dgamma_low, dbeta, dbeta_low = sums
    settle(dgamma, dgamma_low, n)
    settle(dbeta, dbeta_low, n)


@address_of_compiled
def backward_tile(
    dy_element: Any,
    x_element: Any,
    summing: bool,
    plus: bool,
    rounding: bool,
    kind: str,
    offset: bool,
    jvp: bool,
) -> Any:
    """
    Return what pulls back a tile in double-double, with `plus` adding dsum to dx.

    With `jvp` it pushes: dy is the tangent of x, and the result that of y.
    """
    layer = kind == "layer"

    def backward(record, number, me):
        p, first, stop, scratch = tile_of(record, number, me)
        n, gamma, lanes = p.n, float64_at(p.gamma), float64_at(scratch)
        gamma_low = float64_at(p.gamma + 16 * padded(n)) if offset else None
        exact = is_zero(gamma_low, n) if offset else True
        mean, rest = float64_at(p.mean), float64_at(p.rest)
        rstd, rstd_low = float64_at(p.rstd), float64_at(p.rstd_low)
        tails, marks = float64_at(p.tails), pointer_at(p.marks, np.uint8)
        apart = 8 * padded(n)
        factors = _four(scratch + _LANES, apart)
        sums = _four(p.sums + p.sums_bytes * number, apart) if summing else None
        if summing:
            fill(sums[0], p.sums_bytes // 8, 0.0)
        for i in range(first, stop):
            # As the low parts of the sums grow, they lose digits of their own.
            if summing and i > first and (i - first) % ROWS_OF_PART == 0:
                _settle(sums, n)
            clear_between(p, i, scratch)
            if marks[i] != 0:
                continue
            if layer:
                tail = tails[i] if p.tails else 0.0
                row = mean[i], rest[i], tail, rstd[i], rstd_low[i]
            else:
                row = None, None, None, rstd[i], rstd_low[i]
            at = row_at(p, i)
            dy = pointer_at(p.dy + at * p.dy_stride, dy_element)
            x = pointer_at(p.x + at * p.x_stride, x_element)
            arrays = dy, x, gamma, gamma_low
            found = equations.pull(arrays, n, row, sums, factors, lanes, layer)
            extreme, of_g, of_products, range_of_dy = found
            means = (of_g if layer else None), of_products
            marks[i] = extreme
            if extreme:
                continue
            if rounding and summing:
                # Behind the sums: what the bounds of dgamma and dbeta are made of.
                sizes = further(sums[3], apart), further(sums[3], 2 * apart)
                spread = float64_at(p.spread)[i]
                nearest.add_sizes(dy, x, factors, n, row[0], spread, range_of_dy, sizes)
            if p.out:
                dx = pointer_at(p.out + at * p.out_stride, x_element)
                size = nearest.size_of(arrays, factors, n, layer, exact) if rounding else 0.0
                bound = nearest.row_bound(n) * rstd[i] if rounding else None
                given = x, factors, means, row, size
                if jvp:
                    nearest.write_ty((given, _four(p.source, 8 * n)), dx, n, bound)
                elif plus:
                    dsum = pointer_at(p.plus + at * p.plus_stride, x_element)
                    if nearest.write_dx_and_sum((given, dsum), dx, n, bound):
                        marks[i] = UNDECIDED
                elif nearest.write_dx(given, dx, n, bound, nearest.most_of(size, n)):
                    marks[i] = UNDECIDED
        if stop == p.rows:
            clear_between(p, stop, scratch)
        if summing:
            _settle(sums, n)

    return backward


def scratch_bytes(n: int, backward: bool) -> int:
    """Return the bytes that a thread needs: the lanes, and four words per column."""
    return LINE + _LANES + (32 * padded.py_func(n) if backward else 0)
