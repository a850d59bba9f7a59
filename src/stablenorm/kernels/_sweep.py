"""
What `diagnose` needs to know of each row, from one sweep: a fast copy of its twin in NumPy.

The exact statistics are computed in float64. Beside them go the sums that methods in common use
form, rounded at every step as they are there, in the precision of theirs: so what those lose is
known for this row, not for a typical one. A row is read from memory once, and from the cache again.
"""
# mypy: ignore-errors
# What Numba compiles has the types that Numba infers.

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import njit, types

from stablenorm.kernels._compiling import ELEMENTS, STAMP, bits, compiled, matrix
from stablenorm.kernels._helpers import crew_for
from stablenorm.kernels._inner import inlined, inner
from stablenorm.kernels._memory import LINE
from stablenorm.kernels._sharing import sharing, take
from stablenorm.kernels._sweep_lanes import (
    COLUMNS,
    DOUBLES,
    SINGLES,
    fill,
    fold_largest,
    fold_smallest,
    fold_sum,
    fold_welford,
    load_columns,
    narrow,
    smaller,
    wide,
)
from stablenorm.kernels._tiles import forward_rows, has_contiguous_rows
from stablenorm.kernels._vector_memory import (
    address,
    itemsize,
    load_everywhere,
    pointer,
    pointer_at,
    prefetch,
)
from stablenorm.kernels._vectors import ZEROS, first_lane, fma, larger

# Numbers that a row is described by, in the order of the twin's fields.
NUMBERS = 10

_one = ZEROS[1]


@inlined
def _element(x, at):
    return first_lane(load_everywhere(x, at, _one()))


@inlined
def _update(x, at, count, mean, m2, like):
    """Take one more element into Welford's mean and sum; return these."""
    v = _element(x, at)
    delta = narrow(v - mean, like)
    mean = narrow(mean + narrow(delta * narrow(1.0 / count, like), like), like)
    m2 = narrow(m2 + narrow(delta * narrow(v - mean, like), like), like)
    return mean, m2


@inner
def _read_once(x, at, stride, n, like, numbers, all_rows, space):
    """Sum the row as it is; return its mean in float64, and in the precision of `like`."""
    width, whole = itemsize(x), n - n % COLUMNS
    total, squares, means, m2s = like, like, like, like
    lowest, highest = fill(math.inf, like), fill(-math.inf, like)
    exact = wide(like)
    chunks = 0
    for col in range(0, whole, COLUMNS):
        # The same columns of the next row: there, as here, memory is to be kept busy.
        prefetch(x, at + stride + col * width, 0, _one())
        if width * COLUMNS > LINE:
            prefetch(x, at + stride + col * width + LINE, 0, _one())
        v = load_columns(x, at + col * width, like)
        chunks += 1
        total = total + v
        squares = squares + v * v
        exact = exact + wide(v)
        lowest, highest = smaller(lowest, v), larger(highest, v)
        delta = v - means
        means = means + delta * fill(1.0 / chunks, like)
        m2s = m2s + delta * (v - means)
    fold_welford(means, m2s, float(chunks), space)
    mean, m2 = space[0], space[1]
    sum_, sum_squares, sum_exact = fold_sum(total), fold_sum(squares), fold_sum(exact)
    low, high = fold_smallest(lowest), fold_largest(highest)
    for col in range(whole, n):
        v = _element(x, at + col * width)
        sum_ = narrow(sum_ + v, like)
        sum_squares = narrow(sum_squares + narrow(v * v, like), like)
        sum_exact += v
        # Not min and max: NaN is passed over.
        low, high = v if v < low else low, v if v > high else high  # noqa: FURB136
        mean, m2 = _update(x, at + col * width, float(col + 1), mean, m2, like)
    numbers[3 * all_rows], numbers[4 * all_rows] = low, high
    numbers[5 * all_rows], numbers[6 * all_rows] = sum_, sum_squares
    numbers[8 * all_rows], numbers[9 * all_rows] = mean, m2
    return sum_exact / n, narrow(sum_ / n, like)


@inner
def _read_again(x, at, n, mean, working_mean, like, numbers, all_rows):
    """Sum the deviations from both means."""
    width, whole = itemsize(x), n - n % COLUMNS
    squares, rests, exact = like, wide(like), wide(like)
    center, working_center = fill(mean, rests), fill(working_mean, like)
    for col in range(0, whole, COLUMNS):
        v = load_columns(x, at + col * width, like)
        c, centered = wide(v) - center, v - working_center
        rests = rests + c
        exact = fma(c, c, exact)
        squares = squares + centered * centered
    sum_rests, sum_exact, sum_squares = fold_sum(rests), fold_sum(exact), fold_sum(squares)
    for col in range(whole, n):
        v = _element(x, at + col * width)
        c, centered = v - mean, narrow(v - working_mean, like)
        sum_rests += c
        sum_exact += c * c
        sum_squares = narrow(sum_squares + narrow(centered * centered, like), like)
    mean_lo = sum_rests / n
    numbers[0], numbers[1 * all_rows] = mean, mean_lo
    numbers[2 * all_rows] = sum_exact / n - mean_lo * mean_lo
    numbers[7 * all_rows] = sum_squares


def _tiles_with(zeros):
    @njit(error_model="numpy")
    def sweep_tiles(crew, me, rows, tiles, tile_rows, x, stride, n, numbers, all_rows):
        space = np.empty(2, np.float64)
        like = zeros()
        tile = take(crew, me, -1)
        while tile < tiles:
            for row in range(tile * tile_rows, min((tile + 1) * tile_rows, rows)):
                at, to = row * stride, pointer_at(address(numbers) + 8 * row, numbers)
                mean, working_mean = _read_once(
                    x, at, stride, n, like, to, all_rows, pointer(space)
                )
                _read_again(x, at, n, mean, working_mean, like, to, all_rows)
            tile = take(crew, me, tile)

    return sharing(sweep_tiles)


_share_singles, _share_doubles = _tiles_with(SINGLES), _tiles_with(DOUBLES)


@functools.cache
def _sweep_job(dtype: np.dtype[Any]) -> Any:
    """Return the sweep over rows of one type."""
    element = ELEMENTS[dtype]
    is_double = dtype == np.dtype(np.float64)
    stamp = STAMP

    def sweep(x, numbers, tile_rows, crew, helpers):
        if stamp == "":
            return
        rows, n = x.shape
        tiles = -(-rows // tile_rows)
        arguments = (
            rows, tiles, tile_rows, pointer(x), x.strides[0], n,
            pointer(numbers), numbers.strides[0] // 8,
        )  # fmt: skip
        if is_double:
            _share_doubles(arguments, tiles, pointer(crew), helpers)
        else:
            _share_singles(arguments, tiles, pointer(crew), helpers)

    numbers = types.float64[:, :]
    crew = types.int64[::1]
    return compiled(sweep, types.void(matrix(element), numbers, types.int64, crew, types.int64))


def sweep_rows(x: Any, shared: bool = True) -> Any:
    """Return the numbers, (10, rows), of `x`, (rows, n); on this thread alone if not `shared`."""
    rows, n = x.shape
    x = x if has_contiguous_rows(x) else np.ascontiguousarray(x)
    numbers = np.empty((NUMBERS, rows))
    tile_rows = forward_rows(rows, n)
    crew = crew_for(rows * n if shared else 0, -(-rows // tile_rows))
    _sweep_job(x.dtype)(bits(x), numbers, tile_rows, *crew)
    return numbers
