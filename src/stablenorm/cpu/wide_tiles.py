"""
The tiles of a call of which something is float64: row by row, from memory to memory.

Rows that are extreme are marked and left alone: what is in their place before stays there.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from stablenorm.cpu import wide as equations
from stablenorm.cpu.compiling import STAMP, compiled_c
from stablenorm.cpu.memory import LINE, float_of, inlined, pasted, pointer_at, width
from stablenorm.cpu.pool import take
from stablenorm.cpu.record import float64_at, read_record
from stablenorm.cpu.stage import PIECE, STAGE, STRAIGHT, close_stage, empty_stage, open_stage
from stablenorm.cpu.sums import clear
from stablenorm.cpu.tiles import ROWS_OF_PART, padded

# Bytes of the lanes of sums.
_LANES = 8 * 4 * equations.LANES


@pasted
def _four(place, apart):
    """Return four pointers to float64, so many bytes from one another."""
    second, third = place + apart, place + 2 * apart
    return float64_at(place), float64_at(second), float64_at(third), float64_at(third + apart)


# ---- forward ----


@inlined
def _forward_tile(p, first, stop, element, scratch):
    n, gamma, beta, eps = p.n, float64_at(p.gamma), float64_at(p.beta), float_of(p.eps)
    mean, rest, rstd, rstd_low = _four(p.numbers, p.words_apart)
    tails, marks = float64_at(p.tails), pointer_at(p.marks, np.uint8)
    stage, lanes = scratch, float64_at(scratch + STAGE)
    state, is_open = open_stage(p.out), False
    for i in range(first, stop):
        x = pointer_at(p.x + i * p.x_stride, element)
        extreme, row = equations.statistics(x, n, eps, lanes)
        marks[i] = extreme
        mean[i], rest[i], tails[i], rstd[i], rstd_low[i] = row
        if is_open and extreme:
            close_stage(state, stage)
            is_open = False
        if extreme:
            continue
        y = pointer_at(p.out + i * p.out_stride, element)
        if p.way == STRAIGHT:
            equations.normalize(x, y, np.int64(0), n, gamma, beta, row)
            continue
        if not is_open:
            state, is_open = open_stage(p.out + i * p.out_stride), True
        for start in range(0, n, PIECE):
            end = min(start + PIECE, n)
            to = pointer_at(stage + state[1], element)
            equations.normalize(x, to, start, end, gamma, beta, row)
            state = empty_stage(state, (end - start) * width(to), stage, p.way)
    if is_open:
        close_stage(state, stage)


@functools.cache
def forward_tiles(element: Any) -> int:
    """Return the address of what normalizes tile after tile in double-double."""
    stamp = STAMP

    def tiles(record, pool, me):
        if stamp == "":
            return
        p = read_record(record)
        scratch = p.scratch + me * p.scratch_bytes
        tile = take(pool, -1)
        while tile * p.tile_rows < p.rows:
            first = tile * p.tile_rows
            _forward_tile(p, first, min(first + p.tile_rows, p.rows), element, scratch)
            tile = take(pool, tile)

    return compiled_c(tiles, f"wide_forward_tiles_{element.__name__}")


# ---- backward ----


@inlined
def _backward_tile(p, first, stop, dy_element, x_element, summing, sums, scratch):
    n, gamma = p.n, float64_at(p.gamma)
    mean, rest, rstd, rstd_low = _four(p.numbers, p.words_apart)
    tails, marks = float64_at(p.tails), pointer_at(p.marks, np.uint8)
    stage, lanes = scratch, float64_at(scratch + STAGE)
    factors = _four(scratch + STAGE + _LANES, 8 * padded(n))
    state, is_open = open_stage(p.out), False
    for i in range(first, stop):
        # As the low parts of the sums grow, they lose digits of their own.
        if summing and i > first and (i - first) % ROWS_OF_PART == 0:
            equations.settle(sums, n)
        tail = tails[i] if p.tails else 0.0
        row = mean[i], rest[i], tail, rstd[i], rstd_low[i]
        extreme, means = marks[i] != 0, (0.0, 0.0, 0.0, 0.0)
        if not extreme:
            dy = pointer_at(p.dy + i * p.dy_stride, dy_element)
            x = pointer_at(p.x + i * p.x_stride, x_element)
            extreme, means = equations.pull(dy, x, n, gamma, row, summing, sums, factors, lanes)
            marks[i] = extreme
        if is_open and extreme:
            close_stage(state, stage)
            is_open = False
        if extreme or not p.wanted:
            continue
        dx = pointer_at(p.out + i * p.out_stride, x_element)
        if p.way == STRAIGHT:
            equations.write_dx(factors, dx, np.int64(0), n, means, row)
            continue
        if not is_open:
            state, is_open = open_stage(p.out + i * p.out_stride), True
        for start in range(0, n, PIECE):
            end = min(start + PIECE, n)
            to = pointer_at(stage + state[1], x_element)
            equations.write_dx(factors, to, start, end, means, row)
            state = empty_stage(state, (end - start) * width(to), stage, p.way)
    if summing:
        equations.settle(sums, n)
    if is_open:
        close_stage(state, stage)


@functools.cache
def backward_tiles(dy_element: Any, x_element: Any, summing: bool) -> int:
    """Return the address of what pulls back tile after tile in double-double."""
    stamp = STAMP

    def tiles(record, pool, me):
        if stamp == "":
            return
        p = read_record(record)
        scratch, apart = p.scratch + me * p.scratch_bytes, 8 * padded(p.n)
        tile = take(pool, -1)
        while tile * p.tile_rows < p.rows:
            first = tile * p.tile_rows
            stop = min(first + p.tile_rows, p.rows)
            sums = _four(p.sums + 4 * apart * tile, apart)
            if summing:
                clear(sums[0], apart // 2)
            _backward_tile(p, first, stop, dy_element, x_element, summing, sums, scratch)
            tile = take(pool, tile)

    names = dy_element.__name__, x_element.__name__, summing
    return compiled_c(tiles, "_".join(map(str, ("wide_backward_tiles", *names))))


_padded: Any = padded.py_func


def scratch_bytes(n: int, backward: bool) -> int:
    """Return the bytes that a thread needs: the stage, the lanes, and four words per column."""
    return STAGE + LINE + _LANES + (32 * _padded(n) if backward else 0)
