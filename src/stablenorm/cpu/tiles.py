"""
The tiles of a call of float16, bfloat16 and float32, from memory to memory.

Results that are too many for the caches, or that overwrite an input, are first written to a stage of
1 KiB in the first-level cache, and copied from there in whole cache lines.
"""

from __future__ import annotations

from typing import Any

from stablenorm.cpu import rows as equations
from stablenorm.cpu.compiling import address_of_compiled
from stablenorm.cpu.memory import (
    LINE,
    copy_bytes,
    copy_line,
    fence,
    float_of,
    further,
    inlined,
    inner,
    named,
    pasted,
    pointer_at,
    stream_line,
    width,
)
from stablenorm.cpu.record import float64_at, read_record
from stablenorm.cpu.sums import fill, merge, sample_mean

# Columns of a row that are staged at a time.
PIECE = 256

# Columns for which gamma and beta are still in the cache when the next row is written.
SHARED = 512

# Bytes of x that the forward asks for ahead of time, at least: at n = 769, 256 MiB, 9 % faster than two
# pairs of rows.
AHEAD = 1 << 14

# Bytes of the stage: a piece of float32, and a line before and after.
STAGE = 4 * PIECE + 2 * LINE

# Straight; through the stage; through it and past the caches, by non-temporal stores.
STRAIGHT, STAGED, STREAMED = range(3)


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


@pasted
def tile_of(record, number, me):
    """Return a call, the first row of a tile and the one behind its last, and a thread's scratch memory."""
    p = read_record(record)
    first = number * p.tile_rows
    return p, first, min(first + p.tile_rows, p.rows), p.scratch + me * p.scratch_bytes


# Rows whose dgamma and dbeta are summed plainly.
ROWS_OF_PART = 64


@pasted
def padded(n):
    """
    Return at least n, for arrays of float64 that lie one behind the other.

    Whole lines, and no multiple of 4096 bytes apart, where a load waits for an unrelated store.
    """
    return n + 8 + -n % 8


# ---- forward ----


@inlined
def _find_statistics(p, top, bottom, element, lanes):
    """Measure some rows; those whose mean was guessed badly once more."""
    n, eps = p.n, float_of(p.eps)
    for i in range(top, bottom, 2):
        # A last odd row is measured with itself: measured alone, its sums could have other bits.
        second = min(1, bottom - 1 - i)
        x = pointer_at(p.x + i * p.x_stride, element)
        x2 = pointer_at(p.x + (i + second) * p.x_stride, element)
        k = equations.as_float32(sample_mean(x, n))
        k2 = equations.as_float32(sample_mean(x2, n))
        equations.measure(x, x2, n, k, k2, further(lanes, 8 * (i - top)), second)
    if equations.settle(lanes, bottom - top, n, eps):
        for r in range(bottom - top):
            (mean, _, _), bad = equations.statistics(lanes, r)
            if bad:
                x = pointer_at(p.x + (top + r) * p.x_stride, element)
                k = equations.as_float32(mean)
                equations.measure(x, x, n, k, k, further(lanes, 8 * r), 0)
        equations.settle(lanes, bottom - top, n, eps)


@inlined
def _forward_tile(p, first, stop, element, stage):
    n, gamma, beta = p.n, float64_at(p.gamma), float64_at(p.beta)
    lanes, state = float64_at(stage + STAGE), _open_stage(p.out + first * p.out_stride)
    together = equations.TOGETHER if n <= equations.SHORT else 2
    for top in range(first, stop, together):
        bottom = min(top + together, stop)
        _find_statistics(p, top, bottom, element, lanes)
        for r in range(bottom - top if p.mean else 0):
            (mean, rest, rstd), _ = equations.statistics(lanes, r)
            float64_at(p.mean)[top + r], float64_at(p.rest)[top + r] = mean, rest
            float64_at(p.rstd)[top + r] = rstd
        ahead = max(2 * together * p.x_stride, AHEAD) if p.ahead else 0
        for start in range(0, n if p.way == STRAIGHT else 0, SHARED):
            end = min(start + SHARED, n)
            for i in range(top, bottom):
                x = pointer_at(p.x + i * p.x_stride, element)
                y = pointer_at(p.out + i * p.out_stride + start * width(x), element)
                row, _ = equations.statistics(lanes, i - top)
                equations.normalize(x, y, start, end, gamma, beta, row, ahead)
        for i in range(top, top if p.way == STRAIGHT else bottom):
            x = pointer_at(p.x + i * p.x_stride, element)
            row, _ = equations.statistics(lanes, i - top)
            for start in range(0, n, PIECE):
                end = min(start + PIECE, n)
                to = pointer_at(stage + state[1], element)
                equations.normalize(x, to, start, end, gamma, beta, row, ahead)
                state = _empty_stage(state, (end - start) * width(to), stage, p.way)
    if p.way != STRAIGHT:
        _close_stage(state, stage)


@address_of_compiled
def forward_tile(element: Any) -> Any:
    """Return what normalizes a tile of rows of this type."""

    def forward(record, number, me):
        p, first, stop, stage = tile_of(record, number, me)
        _forward_tile(p, first, stop, element, stage)

    return forward


# ---- backward ----


@pasted
def _row(p, i, gamma, dy_element, x_element):
    """Return what the equations need of row i."""
    dy = pointer_at(p.dy + i * p.dy_stride, dy_element)
    x = pointer_at(p.x + i * p.x_stride, x_element)
    mean, rest, rstd = float64_at(p.mean)[i], float64_at(p.rest)[i], float64_at(p.rstd)[i]
    return dy, x, mean, -rest * rstd, rstd, equations.pivot(dy, gamma, p.n)


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
            fill(float64_at(sums), 4 * padded(n), 0.0)
        if summing and deep:
            fill(dgamma, n, 0.0)
            fill(dbeta, n, 0.0)
        state = _open_stage(p.out + first * p.out_stride)
        # A last odd row goes with one of zeros, which adds nothing.
        if (stop - first) % 2:
            fill(float64_at(zeros), padded(n), 0.0)
        dy, x = pointer_at(zeros, dy_element), pointer_at(zeros, x_element)
        nothing = dy, x, 0.0, 0.0, 0.0, 0.0
        ahead = (4 * p.dy_stride, 4 * p.x_stride) if p.ahead else (0, 0)
        for i in range(first, stop, 2):
            if summing and deep and i > first and (i - first) % ROWS_OF_PART == 0:
                _end_part(part, sums, n)
            one, two = _row(p, i, gamma, dy_element, x_element), nothing
            if i + 1 < stop:
                two = _row(p, i + 1, gamma, dy_element, x_element)
            a, b, a2, b2 = pull(one, two, n, gamma, dgamma, dbeta)
            if not p.out:
                continue
            p1, q1 = equations.coefficients(one, a / n, b / n)
            p2, q2 = equations.coefficients(two, a2 / n, b2 / n)
            for start in range(0, n if p.way == STRAIGHT else 0, SHARED):
                end = min(start + SHARED, n)
                dx = p.out + i * p.out_stride + start * width(x)
                to = pointer_at(dx, x_element)
                equations.write_dx(one, to, p1, q1, start, end, gamma, ahead)
                if i + 1 < stop:
                    to = pointer_at(dx + p.out_stride, x_element)
                    equations.write_dx(two, to, p2, q2, start, end, gamma, ahead)
            for _ in range(i, i if p.way == STRAIGHT else min(i + 2, stop)):
                for start in range(0, n, PIECE):
                    end = min(start + PIECE, n)
                    to = pointer_at(stage + state[1], x_element)
                    equations.write_dx(one, to, p1, q1, start, end, gamma, ahead)
                    state = _empty_stage(state, (end - start) * width(to), stage, p.way)
                one, p1, q1 = two, p2, q2
        if summing and deep:
            _end_part(part, sums, n)
        if p.out and p.way != STRAIGHT:
            _close_stage(state, stage)

    return inlined(named(backward_tile, summing))


@pasted
def _end_part(part, sums, n):
    """Add the sums of a part to the totals, and clear them."""
    apart = 8 * padded(n)
    for which in range(0, 4 * apart, 2 * apart):
        some, total = float64_at(part + which), float64_at(sums + which)
        merge(some, total, float64_at(sums + which + apart), n)
        fill(some, n, 0.0)


_summing_tile, _other_tile = _backward_tile(True), _backward_tile(False)


@address_of_compiled
def backward_tile(dy_element: Any, x_element: Any, summing: bool) -> Any:
    """Return what pulls back a tile of rows of these types."""

    def backward(record, number, me):
        p, first, stop, scratch = tile_of(record, number, me)
        sums = p.sums + number * 32 * padded(p.n)
        if summing:
            _summing_tile(p, first, stop, dy_element, x_element, sums, scratch)
        else:
            _other_tile(p, first, stop, dy_element, x_element, sums, scratch)

    return backward


def scratch_bytes(n: int, backward: bool) -> int:
    """Return the bytes that a thread needs: the stage, a row of zeros, and the sums of a part."""
    # dgamma and dbeta of a part are as far apart as the totals: three vectors, of which two are used.
    return STAGE + LINE + 8 * (4 * padded.py_func(n) if backward else equations.LANES)
