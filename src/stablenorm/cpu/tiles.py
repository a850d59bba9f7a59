"""
The tiles of a call of float16, bfloat16 and float32: rows two by two, from memory to memory.

Each function that is compiled for given types takes tile after tile until none is left. Results that
are too many for the caches, or that overwrite an input, are first written to a stage of 1 KiB in the
first-level cache, and copied from there in whole cache lines.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from stablenorm.cpu import rows as equations
from stablenorm.cpu.compiling import STAMP, compiled_c
from stablenorm.cpu.memory import (
    LINE,
    copy_bytes,
    copy_line,
    fence,
    float_of,
    inlined,
    inner,
    named,
    pasted,
    pointer_at,
    prefetch,
    stream_line,
    width,
)
from stablenorm.cpu.pool import take
from stablenorm.cpu.record import float64_at, read_record
from stablenorm.cpu.sums import clear, merge

# Columns of a row that are staged at a time.
PIECE = 256

# Bytes of the stage: a piece of float32, and a line before and after.
STAGE = 4 * PIECE + 2 * LINE

# Straight; through the stage; through it and past the caches, by non-temporal stores.
STRAIGHT, STAGED, STREAMED = range(3)


@pasted
def way_of(out, source, past_caches):
    """Return the way of results to the address `out` from the input at `source`."""
    if out == source:
        return STAGED
    return STREAMED if past_caches else STRAIGHT


@pasted
def _open_stage(out):
    """
    Return the state of a stage for results that begin at the address `out`.

    That is the address of a line, the bytes in the stage that go there, and how many of the first
    line's bytes are not ours.
    """
    before = out % LINE
    return out - before, before, before


@inner
def _empty_stage(state, added, stage, way):
    """Copy the whole lines of the stage, so many bytes more, and move the rest of a line to its front."""
    line, filled, before = state
    filled += added
    whole = filled - filled % LINE
    if whole == 0:
        return line, filled, before
    begin = 0
    if before > 0:
        copy_bytes(line + before, stage + before, LINE - before)
        begin = LINE
    if way == STREAMED:
        for at in range(begin, whole, LINE):
            stream_line(line + at, stage + at)
    else:
        for at in range(begin, whole, LINE):
            copy_line(line + at, stage + at)
    copy_line(stage, stage + whole)
    return line + whole, filled - whole, 0


@pasted
def _close_stage(state, stage):
    """Copy what is left, and order everything stored before what follows."""
    line, filled, before = state
    copy_bytes(line + before, stage + before, filled - before)
    fence()


# ---- tiles ----

# Rows whose dgamma and dbeta are summed plainly.
ROWS_OF_PART = 64


@pasted
def padded(n):
    """
    Return at least n, for arrays of float64 that lie one behind the other.

    Whole lines, and no multiple of 4096 bytes apart, where a load waits for an unrelated store.
    """
    return n + 8 + -n % 8


@pasted
def _prefetch_columns(place, row, stride, start, stop, size):
    """Ask for some columns of a row to come."""
    prefetch(place + row * stride + start * size, (stop - start) * size)


# ---- forward ----


@inlined
def _forward_tile(p, first, stop, element, stage):
    n, gamma, beta = p.n, float64_at(p.gamma), float64_at(p.beta)
    mean, rest = float64_at(p.numbers), float64_at(p.numbers + p.words_apart)
    rstds, eps = float64_at(p.numbers + 2 * p.words_apart), float_of(p.eps)
    state = _open_stage(p.out + first * p.out_stride)
    for i in range(first, stop, 2):
        # A last odd row is measured with itself: measured alone, its sums could have other bits.
        j = min(i + 1, stop - 1)
        x = pointer_at(p.x + i * p.x_stride, element)
        x2 = pointer_at(p.x + j * p.x_stride, element)
        one, two = equations.statistics(x, x2, n, eps)
        mean[i], rest[i], rstds[i] = one
        mean[j], rest[j], rstds[j] = two
        y = pointer_at(p.out + i * p.out_stride, element)
        if p.way == STRAIGHT and i < j:
            y2 = pointer_at(p.out + j * p.out_stride, element)
            step = PIECE if p.ahead else n
            for start in range(0, n, step):
                end = min(start + step, n)
                if p.ahead:
                    _prefetch_columns(p.x, i + 2, p.x_stride, start, end, width(x))
                    _prefetch_columns(p.x, i + 3, p.x_stride, start, end, width(x))
                equations.normalize(x, y, x2, y2, start, end, gamma, beta, one, two)
        elif p.way == STRAIGHT:
            # Not 0, for which Numba would compile another one.
            equations.normalize_piece(x, y, np.int64(0), n, gamma, beta, one)
        else:
            for _ in range(i, j + 1):
                for start in range(0, n, PIECE):
                    end = min(start + PIECE, n)
                    to = pointer_at(stage + state[1], element)
                    equations.normalize_piece(x, to, start, end, gamma, beta, one)
                    state = _empty_stage(state, (end - start) * width(to), stage, p.way)
                x, one = x2, two
    if p.way != STRAIGHT:
        _close_stage(state, stage)


@functools.cache
def forward_tiles(element: Any) -> int:
    """Return the address of what normalizes tile after tile of rows of this type."""
    stamp = STAMP

    def tiles(record, pool, me):
        if stamp == "":
            return
        p = read_record(record)
        stage = p.scratch + me * p.scratch_bytes
        tile = take(pool, -1)
        while tile * p.tile_rows < p.rows:
            first = tile * p.tile_rows
            _forward_tile(p, first, min(first + p.tile_rows, p.rows), element, stage)
            tile = take(pool, tile)

    return compiled_c(tiles, f"forward_tiles_{element.__name__}")


# ---- backward ----


@pasted
def _row(p, i, gamma, dy_element, x_element):
    """Return what the equations need of row i."""
    dy = pointer_at(p.dy + i * p.dy_stride, dy_element)
    x = pointer_at(p.x + i * p.x_stride, x_element)
    mean, rest = float64_at(p.numbers), float64_at(p.numbers + p.words_apart)
    rstd = float64_at(p.numbers + 2 * p.words_apart)[i]
    return dy, x, mean[i], -rest[i] * rstd, rstd, equations.pivot(dy, gamma, p.n)


def _backward_tile(summing: bool) -> Any:
    pull = equations.pull_summing if summing else equations.pull

    def backward_tile(p, first, stop, dy_element, x_element, sums, scratch):
        n, apart, gamma = p.n, 8 * padded(p.n), float64_at(p.gamma)
        stage, zeros = scratch, scratch + STAGE
        # Of more than one part, the sums of a part are apart from the compensated totals.
        deep = stop - first > ROWS_OF_PART
        part = zeros + apart if deep else sums
        # dgamma and dbeta of a part are as far from one another as the totals.
        dgamma, dbeta = float64_at(part), float64_at(part + 2 * apart)
        if summing:
            clear(float64_at(sums), 4 * padded(n))
        if summing and deep:
            clear(dgamma, n)
            clear(dbeta, n)
        state = _open_stage(p.out + first * p.out_stride)
        # A last odd row goes with one of zeros, which adds nothing.
        dy, x = pointer_at(zeros, dy_element), pointer_at(zeros, x_element)
        nothing = dy, x, 0.0, 0.0, 0.0, 0.0
        for i in range(first, stop, 2):
            if summing and deep and i > first and (i - first) % ROWS_OF_PART == 0:
                _end_part(part, sums, n)
            one, two = _row(p, i, gamma, dy_element, x_element), nothing
            if i + 1 < stop:
                two = _row(p, i + 1, gamma, dy_element, x_element)
            a, b, a2, b2 = pull(one, two, n, gamma, dgamma, dbeta)
            if not p.wanted:
                continue
            p1, q1 = equations.coefficients(one, a / n, b / n)
            p2, q2 = equations.coefficients(two, a2 / n, b2 / n)
            dx = pointer_at(p.out + i * p.out_stride, x_element)
            if p.way == STRAIGHT and i + 1 < stop:
                dx2 = pointer_at(p.out + (i + 1) * p.out_stride, x_element)
                equations.write_dx(one, dx, p1, q1, two, dx2, p2, q2, n, gamma)
            elif p.way == STRAIGHT:
                equations.write_dx_piece(one, dx, p1, q1, np.int64(0), n, gamma)
            else:
                for _ in range(i, min(i + 2, stop)):
                    for start in range(0, n, PIECE):
                        end = min(start + PIECE, n)
                        to = pointer_at(stage + state[1], x_element)
                        equations.write_dx_piece(one, to, p1, q1, start, end, gamma)
                        state = _empty_stage(state, (end - start) * width(to), stage, p.way)
                    one, p1, q1 = two, p2, q2
        if summing and deep:
            _end_part(part, sums, n)
        if p.wanted and p.way != STRAIGHT:
            _close_stage(state, stage)

    return inlined(named(backward_tile, summing))


@pasted
def _end_part(part, sums, n):
    """Add the sums of a part to the totals, and clear them."""
    apart = 8 * padded(n)
    for which in range(0, 4 * apart, 2 * apart):
        some, total = float64_at(part + which), float64_at(sums + which)
        merge(some, total, float64_at(sums + which + apart), n)
        clear(some, n)


_summing_tile, _other_tile = _backward_tile(True), _backward_tile(False)


@functools.cache
def backward_tiles(dy_element: Any, x_element: Any, summing: bool) -> int:
    """Return the address of what pulls back tile after tile of rows of these types."""
    stamp = STAMP

    def tiles(record, pool, me):
        if stamp == "":
            return
        p = read_record(record)
        scratch = p.scratch + me * p.scratch_bytes
        if p.rows % 2:
            clear(float64_at(scratch + STAGE), padded(p.n))
        tile = take(pool, -1)
        while tile * p.tile_rows < p.rows:
            first = tile * p.tile_rows
            stop = min(first + p.tile_rows, p.rows)
            if summing:
                sums = p.sums + tile * 32 * padded(p.n)
                _summing_tile(p, first, stop, dy_element, x_element, sums, scratch)
            else:
                _other_tile(p, first, stop, dy_element, x_element, 0, scratch)
            tile = take(pool, tile)

    names = dy_element.__name__, x_element.__name__, summing
    return compiled_c(tiles, "_".join(map(str, ("backward_tiles", *names))))


_padded: Any = padded.py_func


def scratch_bytes(n: int, backward: bool) -> int:
    """Return the bytes that a thread needs: the stage, a row of zeros, and the sums of a part."""
    # dgamma and dbeta of a part are as far apart as the totals: three vectors, of which two are used.
    return STAGE + LINE + (8 * _padded(n) * 4 if backward else 0)
