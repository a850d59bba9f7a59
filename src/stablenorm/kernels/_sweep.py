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
from stablenorm.kernels._sweep_predict import (
    HARD,
    LIMITS,
    LOSSES,
    TOGETHER,
    WRITTEN,
    predict_rows,
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

__all__ = ["HARD", "measure_rows", "sweep_rows"]

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


@inlined
def _ask(x, at):
    """Ask for the columns of a row to come: there, as here, memory is to be kept busy."""
    prefetch(x, at, 0, _one())
    if itemsize(x) * COLUMNS > LINE:
        prefetch(x, at + LINE, 0, _one())


@inlined
def _take_in(v, portion, total, squares, lowest, highest, means, m2s):
    """Return the sums with sixteen more elements."""
    delta = v - means
    means = means + delta * portion
    return (
        total + v,
        squares + v * v,
        smaller(lowest, v),
        larger(highest, v),
        means,
        m2s + delta * (v - means),
    )


@inner
def _read_once(x, at, other, ahead, n, like, numbers, others, stride, space):
    """
    Sum two rows as they are, and write the sums.

    Two, since Welford's next mean waits for the one before, ten cycles for sixteen elements.
    """
    width, whole = itemsize(x), n - n % COLUMNS
    total, squares, means, m2s = like, like, like, like
    total_2, squares_2, means_2, m2s_2 = like, like, like, like
    lowest, highest = fill(math.inf, like), fill(-math.inf, like)
    lowest_2, highest_2 = lowest, highest
    chunks = 0
    for col in range(0, whole, COLUMNS):
        _ask(x, at + ahead + col * width)
        _ask(x, other + ahead + col * width)
        chunks += 1
        portion = fill(1.0 / chunks, like)
        v, w = load_columns(x, at + col * width, like), load_columns(x, other + col * width, like)
        total, squares, lowest, highest, means, m2s = _take_in(
            v, portion, total, squares, lowest, highest, means, m2s
        )
        total_2, squares_2, lowest_2, highest_2, means_2, m2s_2 = _take_in(
            w, portion, total_2, squares_2, lowest_2, highest_2, means_2, m2s_2
        )
    fold_welford(means, m2s, float(chunks), space)
    mean, m2 = space[0], space[1]
    ends = fold_smallest(lowest), fold_largest(highest)
    sums = fold_sum(total), fold_sum(squares)
    _write_sums(x, at, n, like, numbers, stride, ends, sums, mean, m2)
    fold_welford(means_2, m2s_2, float(chunks), space)
    mean, m2 = space[0], space[1]
    ends = fold_smallest(lowest_2), fold_largest(highest_2)
    sums = fold_sum(total_2), fold_sum(squares_2)
    _write_sums(x, other, n, like, others, stride, ends, sums, mean, m2)


@inner
def _write_sums(x, at, n, like, numbers, stride, ends, sums, mean, m2):
    """Write the sums of a row, with the elements that are left over."""
    width, whole = itemsize(x), n - n % COLUMNS
    low, high = ends
    sum_, sum_squares = sums
    for col in range(whole, n):
        v = _element(x, at + col * width)
        sum_ = narrow(sum_ + v, like)
        sum_squares = narrow(sum_squares + narrow(v * v, like), like)
        # Not min and max: NaN is passed over.
        low, high = v if v < low else low, v if v > high else high  # noqa: FURB136
        mean, m2 = _update(x, at + col * width, float(col + 1), mean, m2, like)
    numbers[3 * stride], numbers[4 * stride] = low, high
    numbers[5 * stride], numbers[6 * stride] = sum_, sum_squares
    numbers[8 * stride], numbers[9 * stride] = mean, m2


@inner
def _exact_mean(x, at, n):
    """Return the mean of a row whose sum overflows the precision that it is computed in."""
    width, total = itemsize(x), 0.0
    for col in range(n):
        total += _element(x, at + col * width)
    return total / n


@inner
def _read_again(x, at, n, like, numbers, stride):
    """
    Sum the deviations from the mean that a two-pass would take.

    What it is off by is their mean: the exact statistics need no sum of their own before.
    """
    width, whole = itemsize(x), n - n % COLUMNS
    working_mean = narrow(numbers[5 * stride] / n, like)
    mean = working_mean
    if not abs(mean) < math.inf:
        mean = _exact_mean(x, at, n)
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
    rest = sum_rests / n
    # Infinite or NaN where the row is: so without a rest.
    rounded = mean + rest if abs(mean) < math.inf else mean
    numbers[0], numbers[1 * stride] = rounded, (mean - rounded) + rest
    numbers[2 * stride] = sum_exact / n - rest * rest
    numbers[7 * stride] = sum_squares


def _tiles_with(zeros):
    @njit(error_model="numpy")
    def sweep_tiles(
        crew, me, rows, tiles, tile_rows, room, x, stride, n, numbers, kept,
        written, losses, marks, limits,
    ):  # fmt: skip
        space = np.empty(2, np.float64)
        # Where nobody asks for the numbers, they do not leave the nearest cache.
        stride_of = room if kept == 0 else kept
        own = np.empty(NUMBERS * room if kept == 0 else 0, np.float64)
        like = zeros()
        tile = take(crew, me, -1)
        while tile < tiles:
            first, place = tile * tile_rows, tile * room
            base = address(numbers) if kept != 0 else address(pointer(own)) - 8 * place
            held = pointer_at(base, numbers)
            last = min(first + tile_rows, rows) - 1
            for row in range(first, last + 1, 2):
                # Where there is no second one, the last twice.
                other = min(row + 1, last)
                to = pointer_at(base + 8 * (place + row - first), numbers)
                others = pointer_at(base + 8 * (place + other - first), numbers)
                at, beside = row * stride, other * stride
                _read_once(
                    x, at, beside, 2 * stride, n, like, to, others, stride_of, pointer(space)
                )
                _read_again(x, at, n, like, to, stride_of)
                _read_again(x, beside, n, like, others, stride_of)
            # Some rows of the last group may not be there: what is written of them is cut off.
            for at in range(place, place + room, TOGETHER):
                predict_rows(
                    held, 8 * stride_of, at, written, 8 * room * tiles, losses, marks, limits, like
                )
            tile = take(crew, me, tile)
            # Until here, whatever was made of its address.
            own[:0] = 0.0

    return sharing(sweep_tiles)


_share_singles, _share_doubles = _tiles_with(SINGLES), _tiles_with(DOUBLES)


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
        room = written.shape[1] // max(tiles, 1)
        arguments = (
            rows, tiles, tile_rows, room, pointer(x), x.strides[0], n,
            pointer(numbers), numbers.shape[1],
            pointer(written), pointer(losses), pointer(marks), pointer(limits),
        )  # fmt: skip
        if is_double:
            _share_doubles(arguments, tiles, pointer(crew), helpers)
        else:
            _share_singles(arguments, tiles, pointer(crew), helpers)

    numbers, losses = types.float64[:, ::1], types.float32[:, ::1]
    words, limits, crew = types.uint16[::1], types.float64[::1], types.int64[::1]
    kinds = (matrix(element), numbers, numbers, losses, words, limits, types.int64, crew)
    return compiled(sweep, types.void(*kinds, types.int64))


def sweep_rows(x: Any, shared: bool = True) -> Any:
    """Return the numbers, (10, rows), of `x`, (rows, n); on this thread alone if not `shared`."""
    return _swept(x, np.ones(LIMITS), shared, keep=True)[0]


def measure_rows(x: Any, limits: Any, shared: bool = True) -> tuple[Any, Any, Any]:
    """
    Return what is predicted of the rows of `x`, (rows, n).

    That is (5, rows) float64 of mean, std, condition numbers and share of eps; (6, rows) float32 of
    bits lost; marks. Of rows marked `HARD`, none of this has a meaning. `limits` is what
    `stablenorm.analysis._diagnose_predict.limits` returns.
    """
    return _swept(x, limits, shared, keep=False)[1:]


def _swept(x: Any, limits: Any, shared: bool, keep: bool) -> Any:
    rows, n = x.shape
    x = x if has_contiguous_rows(x) else np.ascontiguousarray(x)
    tile_rows = forward_rows(rows, n)
    tiles = -(-rows // tile_rows)
    # Whole groups for each tile, which is another thread's business.
    room = tile_rows + -tile_rows % TOGETHER
    found = (
        np.empty((NUMBERS, tiles * room if keep else 0)),
        np.empty((WRITTEN, tiles * room)),
        np.empty((LOSSES, tiles * room), np.float32),
        np.empty(tiles * room, np.uint16),
    )
    crew = crew_for(rows * n if shared else 0, tiles)
    _sweep_job(x.dtype)(bits(x), *found, limits, tile_rows, *crew)
    if room != tile_rows:
        found = tuple(_joined(each, tiles, room, tile_rows) for each in found)
    return tuple(each[..., :rows] for each in found)


def _joined(found: Any, tiles: int, room: int, tile_rows: int) -> Any:
    """Return the rows without what lies between tiles."""
    shape = found.shape[:-1]
    if not found.size:
        return found
    return found.reshape(*shape, tiles, room)[..., :tile_rows].reshape(*shape, tiles * tile_rows)
