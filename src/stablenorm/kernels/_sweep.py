"""
What `diagnose` needs to know of each row, from one sweep: a fast copy of its twin in NumPy.

The exact statistics are computed in float64. Beside them go the sums that methods in common use
form, rounded at every step as they are there, in the precision of theirs: so what those lose is
known for this row, not for a typical one.
"""
# mypy: ignore-errors
# What Numba compiles has the types that Numba infers.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit, types

from stablenorm.kernels._compiling import (
    ELEMENTS,
    STAMP,
    bits,
    compiled,
    matrix,
    matrix_out,
    vector_out,
)
from stablenorm.kernels._helpers import crew_for
from stablenorm.kernels._inner import inlined
from stablenorm.kernels._sharing import named, sharing, take
from stablenorm.kernels._sweep_fold import ROWS
from stablenorm.kernels._sweep_lanes import DOUBLES, SINGLES
from stablenorm.kernels._sweep_predict import HARD, LIMITS, LOSSES, WRITTEN, predict_rows
from stablenorm.kernels._sweep_sums import NUMBERS, WAITING, describe_rows, of_row
from stablenorm.kernels._tiles import forward_rows, has_contiguous_rows
from stablenorm.kernels._vector_memory import pointer

__all__ = ["HARD", "measure_rows", "sweep_rows"]

# How far ahead memory is asked for, in bytes, where rows are short: two of them are gone before it
# comes. Of 512, 2048, 4096 and 8192 the last two were best, 1.3 times 512 for 64 float32.
_AHEAD = 4096


@inlined
def _copy_some(spare, lost, marked, rows, written, apart, losses, losses_apart, marks):
    """Write what is predicted of the first of sixteen rows: the others are not there."""
    for row in range(rows):
        for place in range(WRITTEN):
            of_row(written, apart, place)[row] = spare[place * ROWS + row]
        for place in range(LOSSES):
            of_row(losses, losses_apart, place)[row] = lost[place * ROWS + row]
        marks[row] = marked[row]


@inlined
def _copy_numbers(own, rows, numbers, apart):
    for row in range(rows):
        for place in range(NUMBERS):
            numbers[place * apart + row] = own[place * ROWS + row]


def _tiles_with(zeros, name):
    def sweep_tiles(
        crew, me, rows, tiles, tile_rows, x, stride, n, numbers, kept,
        written, apart, losses, losses_apart, marks, limits,
    ):  # fmt: skip
        # They do not leave the nearest cache.
        space = np.empty(WAITING // 8, np.float64)
        own, spare = np.empty((NUMBERS, ROWS)), np.empty((WRITTEN, ROWS))
        lost = np.empty((LOSSES, ROWS), np.float32)
        marked = np.empty(ROWS, np.uint16)
        like = zeros()
        ahead = stride * (2 * max(1, _AHEAD // (2 * stride)))
        tile = take(crew, me, -1)
        while tile < tiles:
            end = min((tile + 1) * tile_rows, rows)
            for first in range(tile * tile_rows, end, ROWS):
                last = min(first + ROWS, end) - 1
                held, there = pointer(own), last + 1 - first
                describe_rows(x, first, last, stride, ahead, n, like, held, pointer(space))
                to, lost_to = of_row(written, 8, first), of_row(losses, 4, first)
                marks_to = of_row(marks, 2, first)
                if there == ROWS:
                    predict_rows(held, to, apart, lost_to, losses_apart, marks_to, limits, like)
                else:
                    predict_rows(
                        held, pointer(spare), 8 * ROWS, pointer(lost), 4 * ROWS,
                        pointer(marked), limits, like,
                    )  # fmt: skip
                    _copy_some(
                        pointer(spare), pointer(lost), pointer(marked), there,
                        to, apart, lost_to, losses_apart, marks_to,
                    )  # fmt: skip
                if kept != 0:
                    _copy_numbers(held, there, of_row(numbers, 8, first), kept)
            tile = take(crew, me, tile)
        # Until here, whatever was made of their addresses.
        space[:0], own[:0], spare[:0] = 0.0, 0.0, 0.0
        lost[:0], marked[:0] = np.float32(0.0), np.uint16(0)

    return sharing(njit(error_model="numpy")(named(sweep_tiles, name)))


_share_singles = _tiles_with(SINGLES, "singles")
_share_doubles = _tiles_with(DOUBLES, "doubles")


@functools.cache
def _sweep_job(dtype: np.dtype[Any]) -> Any:
    """Return the sweep over rows of one type."""
    element = ELEMENTS[dtype]
    is_double = dtype == np.dtype(np.float64)
    stamp = STAMP

    def sweep(x, numbers, written, losses, marks, limits, tile_rows, crew, helpers):
        if stamp == "":
            return
        rows, n = x.shape
        tiles = -(-rows // tile_rows)
        arguments = (
            rows, tiles, tile_rows, pointer(x), x.strides[0], n,
            pointer(numbers), numbers.shape[1], pointer(written), written.strides[0],
            pointer(losses), losses.strides[0], pointer(marks), pointer(limits),
        )  # fmt: skip
        if is_double:
            _share_doubles(arguments, tiles, pointer(crew), helpers)
        else:
            _share_singles(arguments, tiles, pointer(crew), helpers)

    numbers, limits, crew = types.float64[:, ::1], types.float64[::1], types.int64[::1]
    found = (matrix_out(types.float64), matrix_out(types.float32), vector_out(types.uint16))
    kinds = (matrix(element), numbers, *found, limits, types.int64, crew, types.int64)
    return compiled(sweep, types.void(*kinds))


def sweep_rows(x: Any, shared: bool = True) -> Any:
    """Return the numbers, (10, rows), of `x`, (rows, n); on this thread alone if not `shared`."""
    numbers = np.empty((NUMBERS, len(x)))
    _sweep(x, np.ones(LIMITS), numbers, _room_for(len(x)), shared)
    return numbers


def measure_rows(x: Any, limits: Any, into: Any, shared: bool = True) -> None:
    """
    Write what is predicted of the rows of `x`, (rows, n).

    `into` is (5, rows) float64 of mean, std, condition numbers and share of eps; (6, rows) float32
    of bits lost; (rows,) uint16 of marks: each row of them contiguous. Of rows marked `HARD`, none
    of this has a meaning. `limits` is what `stablenorm.analysis._diagnose_predict.limits` returns.
    """
    _sweep(x, limits, np.empty((NUMBERS, 0)), into, shared)


def _room_for(rows: int) -> Any:
    return (
        np.empty((WRITTEN, rows)),
        np.empty((LOSSES, rows), np.float32),
        np.empty(rows, np.uint16),
    )


def _sweep(x: Any, limits: Any, numbers: Any, into: Any, shared: bool) -> None:
    rows, n = x.shape
    x = x if has_contiguous_rows(x) else np.ascontiguousarray(x)
    tile_rows = forward_rows(rows, n)
    # Whole groups in each tile but the last.
    tile_rows += -tile_rows % ROWS
    crew = crew_for(rows * n if shared else 0, -(-rows // tile_rows))
    _sweep_job(x.dtype)(bits(x), numbers, *into, limits, tile_rows, *crew)
