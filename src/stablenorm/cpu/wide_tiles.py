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
from stablenorm.cpu.memory import LINE, float_of, further, inlined, pasted, pointer_at
from stablenorm.cpu.record import float64_at
from stablenorm.cpu.sums import fill, settle
from stablenorm.cpu.tiles import ROWS_OF_PART, padded, tile_of

# The mark of a row that is not extreme, but of which an element is undecided.
UNDECIDED = 2

# Bytes of the lanes of sums.
_LANES = 8 * 4 * equations.LANES


@pasted
def _four(place, apart):
    """Return four pointers to float64, so many bytes from one another."""
    second, third = place + apart, place + 2 * apart
    return float64_at(place), float64_at(second), float64_at(third), float64_at(third + apart)


# ---- forward ----


@inlined
def _forward_tile(p, first, stop, element, scratch, spreads):
    n, gamma, beta, eps = p.n, float64_at(p.gamma), float64_at(p.beta), float_of(p.eps)
    mean, rest = float64_at(p.mean), float64_at(p.rest)
    rstd, rstd_low = float64_at(p.rstd), float64_at(p.rstd_low)
    tails, marks = float64_at(p.tails), pointer_at(p.marks, np.uint8)
    lanes = float64_at(scratch)
    for i in range(first, stop):
        x = pointer_at(p.x + i * p.x_stride, element)
        extreme, row, var = equations.statistics(x, n, eps, lanes)
        marks[i] = extreme
        mean[i], rest[i], tails[i], rstd[i], rstd_low[i] = row
        y = pointer_at(p.out + i * p.out_stride, element)
        if extreme:
            continue
        # Numba compiles no branch that waits for None.
        if spreads is None:
            equations.normalize(x, y, n, gamma, beta, row)
        else:
            spreads[i] = nearest.spread_of(var, rstd[i])
            if nearest.normalize(x, y, n, gamma, beta, row, spreads[i]):
                marks[i] = UNDECIDED


@address_of_compiled
def forward_tile(element: Any, rounding: bool) -> Any:
    """Return what normalizes a tile in double-double."""

    def forward(record, number, me):
        p, first, stop, scratch = tile_of(record, number, me)
        spreads = float64_at(p.spread) if rounding else None
        _forward_tile(p, first, stop, element, scratch, spreads)

    return forward


# ---- backward ----


@pasted
def _settle(sums, n):
    dgamma, dgamma_low, dbeta, dbeta_low = sums
    settle(dgamma, dgamma_low, n)
    settle(dbeta, dbeta_low, n)


@inlined
def _backward_tile(p, first, stop, elements, sums, spreads, scratch):
    n, gamma, (dy_element, x_element) = p.n, float64_at(p.gamma), elements
    mean, rest = float64_at(p.mean), float64_at(p.rest)
    rstd, rstd_low = float64_at(p.rstd), float64_at(p.rstd_low)
    tails, marks = float64_at(p.tails), pointer_at(p.marks, np.uint8)
    lanes = float64_at(scratch)
    factors = _four(scratch + _LANES, 8 * padded(n))
    for i in range(first, stop):
        # As the low parts of the sums grow, they lose digits of their own.
        if sums is not None and i > first and (i - first) % ROWS_OF_PART == 0:
            _settle(sums, n)
        if marks[i] != 0:
            continue
        tail = tails[i] if p.tails else 0.0
        row = mean[i], rest[i], tail, rstd[i], rstd_low[i]
        dy = pointer_at(p.dy + i * p.dy_stride, dy_element)
        x = pointer_at(p.x + i * p.x_stride, x_element)
        arrays = dy, x, gamma
        extreme, means, range_of_dy = equations.pull(arrays, n, row, sums, factors, lanes)
        marks[i] = extreme
        if extreme:
            continue
        dx = pointer_at(p.out + i * p.out_stride, x_element)
        if spreads is None:
            if p.out:
                equations.write_dx(factors, dx, n, means, row)
            continue
        if sums is not None:
            nearest.add_sizes(dy, factors, n, spreads[i], range_of_dy, sizes_behind(sums, n))
        if p.out and nearest.write_dx(arrays, factors, dx, n, means, row):
            marks[i] = UNDECIDED
    if sums is not None:
        _settle(sums, n)


@pasted
def sizes_behind(sums, n):
    """Return where the sums are of what the bounds of dgamma and dbeta are made of."""
    apart = 8 * padded(n)
    return further(sums[3], apart), further(sums[3], 2 * apart)


@pasted
def _cleared_sums(p, number):
    sums = _four(p.sums + p.sums_bytes * number, 8 * padded(p.n))
    fill(sums[0], p.sums_bytes // 8, 0.0)
    return sums


@address_of_compiled
def backward_tile(dy_element: Any, x_element: Any, summing: bool, rounding: bool) -> Any:
    """Return what pulls back a tile in double-double."""
    elements = dy_element, x_element

    def backward(record, number, me):
        p, first, stop, scratch = tile_of(record, number, me)
        sums = _cleared_sums(p, number) if summing else None
        spreads = float64_at(p.spread) if rounding else None
        _backward_tile(p, first, stop, elements, sums, spreads, scratch)

    return backward


def scratch_bytes(n: int, backward: bool) -> int:
    """Return the bytes that a thread needs: the lanes, and four words per column."""
    return LINE + _LANES + (32 * padded.py_func(n) if backward else 0)
