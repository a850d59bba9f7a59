"""
The tiles of a call of float16, bfloat16 and float32, from memory to memory.

Results that are too many for the caches, or that overwrite an input, are first written to a stage in
the first-level cache, and copied from there in whole cache lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm.cpu import rows as equations
from stablenorm.cpu.compiling import address_of_compiled
from stablenorm.cpu.memory import (
    LINE,
    copy_bytes,
    copy_line,
    fence,
    float_of,
    further,
    inner,
    pasted,
    pointer_at,
    stream_line,
    width,
)
from stablenorm.cpu.record import float64_at, read_record
from stablenorm.cpu.sums import fill, merge

# Bytes of x that the forward asks for ahead of time, at least: at n = 769, 256 MiB, 9 % faster than two
# pairs of rows.
AHEAD = 1 << 14

# Bytes of the lanes and a line of zeros, and of the stage behind them: a piece of float32 of each row, and
# two lines more.
_LANES = 8 * equations.LANES + LINE
_STAGE = 4 * equations.PIECE * equations.TOGETHER + 2 * LINE

# Straight; through the stage; through it and past the caches, by non-temporal stores.
STRAIGHT, STAGED, STREAMED = range(3)


@inner
def _empty_stage(place, end, stage, way):
    """
    Copy what is staged for the addresses [place, end), but for a last line that is not whole.

    Return where the rest goes, which is moved to the front: the stage begins with the line of `place`.
    """
    whole, source = end & -LINE, stage - (place & -LINE)
    if whole <= place:
        return place
    begin = place + -place % LINE
    copy_bytes(place, source + place, begin - place)
    for line in range(begin, whole, LINE):
        if way == STREAMED:
            stream_line(line, source + line)
        else:
            copy_line(line, source + line)
    copy_line(stage, source + whole)
    return whole


@pasted
def _close_stage(staged):
    """Copy the rest, and order everything stored before what follows."""
    place, end, stage = staged
    copy_bytes(place, stage + place % LINE, end - place)
    fence()


# ---- tiles ----


@pasted
def tile_of(record, number, me):
    """Return a call, the first row of a tile and the one behind its last, and a thread's scratch memory."""
    p = read_record(record)
    first = number * p.tile_rows
    return p, first, min(first + p.tile_rows, p.rows), p.scratch + me * p.scratch_bytes


@pasted
def row_at(p, i):
    """Return which row of the arrays the i-th of a call is."""
    return i if p.numbers == 0 else pointer_at(p.numbers, np.int64)[i]


@pasted
def _numbers_from(p, top):
    """Return a pointer to the numbers of a call from the one of row `top` on."""
    return further(pointer_at(p.numbers, np.int64), 8 * top)


@inner
def _clear(start, end, zeros, way):
    """Write zeros, made in a line of memory, into the bytes from one address to another."""
    fill(float64_at(zeros), LINE // 8, 0.0)
    begin = min(start + -start % LINE, end)
    whole = max(end & -LINE, begin)
    copy_bytes(start, zeros, begin - start)
    for line in range(begin, whole, LINE):
        if way == STREAMED:
            stream_line(line, zeros)
        else:
            copy_line(line, zeros)
    copy_bytes(whole, zeros, end - whole)


@inner
def clear_between(p, i, zeros):
    """Write zeros between the i-th row, or where all end, and the row before."""
    if p.all_rows == 0:
        return
    behind = row_at(p, i - 1) + 1 if i > 0 else 0
    here = row_at(p, i) if i < p.rows else p.all_rows
    if here > behind:
        _clear(p.out + behind * p.out_stride, p.out + here * p.out_stride, zeros, p.way)


@pasted
def _run_from(p, i, most):
    """Return how many rows from the i-th on, at most so many, follow one another."""
    count = 1
    while count < most and row_at(p, i + count) == row_at(p, i) + count:
        count += 1
    return count


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
def _looking_ahead(given, p, behind):
    """Count what to look ahead in numbers, not in bytes, and no more than there are from `behind` on."""
    arrays, strides, numbers, parameters, lanes, (of_dy, of_x) = given
    count = min(of_x // p.x_stride, p.rows - behind)
    return arrays, strides, numbers, parameters, lanes, (count if of_dy else 0, count)


@pasted
def _write_rows(write, given, p, top, rows, element, staged, plus):
    """
    Write some rows, straight to memory or through the stage; return the state of the stage.

    That is the first address to which it has not been copied, the one behind the last for which something
    is staged, and where the stage is.
    """
    place, end, stage = staged
    straight, size = p.way == STRAIGHT, width(pointer_at(stage, element))
    # What is staged goes to memory in its order, and must fit.
    most, piece = (rows, p.n) if straight or p.n <= equations.PIECE else (1, equations.PIECE)
    at_once = most
    numbered, i = given[2] is not None, 0
    here = _looking_ahead(given, p, top + rows) if numbered else given
    while i < rows:
        row = p.out + (top + i) * p.out_stride
        if numbered:
            at_once = _run_from(p, top + i, min(most, rows - i))
            row = p.out + row_at(p, top + i) * p.out_stride
            clear_between(p, top + i, stage - LINE)
            if not straight and row != end:
                copy_bytes(place, stage + place % LINE, end - place)
                place, end = row, row
        for start in range(0, p.n, piece):
            stop, to = min(start + piece, p.n), stage + end - (place & -LINE)
            if straight:
                to = row
            write(here, pointer_at(to, element), (i, i + at_once), (start, stop), plus)
            if not straight:
                end += at_once * (stop - start) * size
                place = _empty_stage(place, end, stage, p.way)
        i += at_once
    return place, end, stage


# ---- forward ----


@address_of_compiled
def forward_tile(element: Any, numbered: bool, plus: bool, kind: str) -> Any:
    """Return what normalizes a tile of rows, `numbered` or all, with `plus` after adding a residual."""
    layer = kind == "layer"

    def forward(record, number, me):
        p, first, stop, scratch = tile_of(record, number, me)
        n, eps, lanes, stage = p.n, float_of(p.eps), float64_at(scratch), scratch + _LANES
        # Eight rows that are staged piece by piece would leave the cache: 15 % slower at n = 768.
        short = equations.SHORT if p.way == STRAIGHT else equations.PIECE
        together = equations.TOGETHER if n <= short else 2
        out = p.out + (row_at(p, first) if numbered else first) * p.out_stride
        parameters, staged = (float64_at(p.gamma), float64_at(p.beta)), (out, out, stage)
        ahead = max(2 * together * p.x_stride, AHEAD) if p.ahead else 0
        samples = pointer_at(scratch + 8 * equations.SAMPLES, element)
        fill(lanes, equations.LANES, 0.0)
        for top in range(first, stop, together):
            rows = min(together, stop - top)
            numbers = _numbers_from(p, top) if numbered else None
            x = pointer_at(p.x + (0 if numbered else top * p.x_stride), element)
            if plus:
                source = pointer_at(p.source + top * p.source_stride, element)
                residual = pointer_at(p.plus + top * p.plus_stride, element)
                strides = p.source_stride, p.plus_stride, p.x_stride
                equations.add(source, residual, x, strides, rows, n)
            strides = p.x_stride, p.x_stride, p.out_stride
            given = (x, x), strides, numbers, parameters, lanes, (0, ahead)
            last = equations.row_of(x, rows - 1, p.x_stride, numbers)
            if layer:
                every = equations.TOGETHER
                equations.guess(x, p.x_stride, numbers, rows, n, lanes, samples, every)
                for _ in range(2):
                    equations.measure(given, rows, n, (last, last), None)
                    if not equations.settle(lanes, n, eps, equations.TOGETHER):
                        break
            else:
                equations.rms_measure(given, rows, n, (last, last), None)
                equations.rms_settle(lanes, n, eps, equations.TOGETHER)
            for i in range(top, top + rows if p.rstd else top):
                mean, rest, rstd, _, _, _ = equations.lane(lanes, i - top)
                at = row_at(p, i) if numbered and p.all_rows != 0 else i
                if layer:
                    float64_at(p.mean)[at], float64_at(p.rest)[at] = mean, rest
                float64_at(p.rstd)[at] = rstd
            write = equations.write_y if layer else equations.rms_write_y
            staged = _write_rows(write, given, p, top, rows, element, staged, None)
        if numbered and stop == p.rows:
            clear_between(p, stop, stage - LINE)
        if p.way != STRAIGHT:
            _close_stage(staged)

    return forward


# ---- backward ----


@address_of_compiled
def backward_tile(
    dy_element: Any, x_element: Any, summing: bool, numbered: bool, plus: bool, kind: str, jvp: bool
) -> Any:
    """
    Return what pulls back a tile of rows of these types, with `plus` adding dsum to dx.

    With `jvp` it pushes: dy is the tangent of x, and the result that of y.
    """
    layer = kind == "layer"

    def backward(record, number, me):
        p, first, stop, scratch = tile_of(record, number, me)
        n, gamma = p.n, float64_at(p.gamma)
        lanes, stage, apart = float64_at(scratch), scratch + _LANES, 8 * padded(n)
        row_of_zeros, sums = stage + _STAGE, p.sums + p.sums_bytes * number
        # Of more than one part, the sums of a part are apart from the compensated totals. Its dgamma
        # and dbeta are as far from one another.
        deep = stop - first > ROWS_OF_PART
        part = row_of_zeros + apart if deep else sums
        columns = (float64_at(part), float64_at(part + 2 * apart)) if summing else None
        fill(float64_at(row_of_zeros), 4 * padded(n) if deep else padded(n), 0.0)
        if summing:
            fill(float64_at(sums), 4 * padded(n), 0.0)
        zeros = pointer_at(row_of_zeros, dy_element), pointer_at(row_of_zeros, x_element)
        together = equations.TOGETHER if n <= equations.SHORT else 2
        ahead = (2 * together * p.dy_stride, 2 * together * p.x_stride) if p.ahead else (0, 0)
        out = p.out + (row_at(p, first) if numbered else first) * p.out_stride
        staged = out, out, stage
        for top in range(first, stop, together):
            if summing and deep and top > first and (top - first) % ROWS_OF_PART == 0:
                _end_part(part, sums, n)
            rows, at = min(together, stop - top), 0 if numbered else top
            numbers = _numbers_from(p, top) if numbered else None
            dy = pointer_at(p.dy + at * p.dy_stride, dy_element)
            x = pointer_at(p.x + at * p.x_stride, x_element)
            # Behind the last, the lane of a row of zeros.
            equations.load(lanes, rows - 1 + rows % 2, 0.0, 0.0, 0.0, 0.0)
            for r in range(rows):
                i, mean, rest, m = top + r, 0.0, 0.0, 0.0
                if layer:
                    m = equations.pivot(equations.row_of(dy, r, p.dy_stride, numbers), gamma, n)
                    mean, rest = float64_at(p.mean)[i], float64_at(p.rest)[i]
                equations.load(lanes, r, mean, rest, float64_at(p.rstd)[i], m)
            strides = p.dy_stride, p.x_stride, p.out_stride
            given = (dy, x), strides, numbers, gamma, lanes, ahead
            if layer:
                equations.pull(given, rows, n, zeros, columns)
            else:
                equations.rms_pull(given, rows, n, zeros, columns)
            if not p.out:
                continue
            equations.find_coefficients(lanes, n, equations.TOGETHER)
            dsum = None
            if plus:
                added = pointer_at(p.plus + at * p.plus_stride, x_element)
                dsum = added, p.plus_stride, numbers
            if jvp:
                write = equations.write_ty if layer else equations.rms_write_ty
                wanted = _with_tangents(given, p)
                staged = _write_rows(write, wanted, p, top, rows, x_element, staged, dsum)
            else:
                write = equations.write_dx if layer else equations.rms_write_dx
                staged = _write_rows(write, given, p, top, rows, x_element, staged, dsum)
        if summing and deep:
            _end_part(part, sums, n)
        if numbered and stop == p.rows:
            clear_between(p, stop, stage - LINE)
        if p.out and p.way != STRAIGHT:
            _close_stage(staged)

    return backward


@pasted
def _with_tangents(given, p):
    """Put the rows of the table of a jvp behind gamma: the scale, tgamma, tbeta."""
    both, strides, numbers, ones, lanes, aheads = given
    scale, row = float64_at(p.source), 8 * p.n
    table = ones, scale, further(scale, 2 * row), further(scale, 3 * row)
    return both, strides, numbers, table, lanes, aheads


@pasted
def _end_part(part, sums, n):
    """Add the sums of a part to the totals, and clear them."""
    apart = 8 * padded(n)
    for which in range(0, 4 * apart, 2 * apart):
        some, total = float64_at(part + which), float64_at(sums + which)
        merge(some, total, float64_at(sums + which + apart), n)
        fill(some, n, 0.0)


def scratch_bytes(n: int, backward: bool) -> int:
    """Return the bytes that a thread needs: lanes, the stage, a row of zeros, and the sums of a part."""
    # dgamma and dbeta of a part are as far apart as the totals: three vectors, of which two are used.
    return _LANES + _STAGE + (32 * padded.py_func(n) if backward else 0)
