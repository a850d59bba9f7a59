"""
The jobs of `_jobs` for few float32, with no time to lose.

They take arrays as the caller has them, of any number of axes, and find out for themselves what
Python would need as long for as a layer norm of 64 elements takes: whether they are contiguous,
of lengths that match, and apart from one another.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from stablenorm.kernels import _sums, _tiny
from stablenorm.kernels._compiling import STAMP, compiled
from stablenorm.kernels._control import restore, set_default
from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._jobs import (
    share_narrow_backward,
    share_narrow_forward,
    share_tiny_backward,
    share_tiny_forward,
)
from stablenorm.kernels._sums import sums_size
from stablenorm.kernels._tiles import backward_rows, forward_rows
from stablenorm.kernels._vector_memory import address, load_some, pointer, store_some
from stablenorm.kernels._vectors import ZEROS, fma, splat

_SIZE, _CREW = types.int64, types.int64[::1]
_FLOAT32 = types.float32

_one = ZEROS[1]


@inner
def _contiguous(array):
    """Tell whether the elements of `array` lie side by side, in C order."""
    step = 4
    for axis in range(array.ndim - 1, -1, -1):
        if array.strides[axis] != step and array.shape[axis] != 1:
            return False
        step *= array.shape[axis]
    return True


@inner
def _overlap(a, b):
    """Tell whether two contiguous arrays share memory."""
    here, there = address(pointer(a)), address(pointer(b))
    return here < there + 4 * b.size and there < here + 4 * a.size


@inner
def _is_same(a, b):
    return address(pointer(a)) == address(pointer(b)) and a.size == b.size


@inner
def _products_of_row(dy, x, n, mean, mean_lo, rstd, dgamma, dbeta):
    """Write ``dy * xhat`` and dy, as sums that begin with zero: of -0, they are 0."""
    word = set_default()
    one = _one()
    center, factor = splat(mean, one), splat(rstd, one)
    shift = splat(-(mean_lo * rstd), one)
    for col in range(0, n, WIDTH):
        count = min(n - col, WIDTH)
        cotangent = load_some(dy, 4 * col, 0, count, one)
        xhat = fma(load_some(x, 4 * col, 0, count, one) - center, factor, shift)
        store_some(dgamma, 4 * col, 0, count, one + cotangent * xhat)
        store_some(dbeta, 4 * col, 0, count, one + cotangent)
    restore(word)


def _array(ndim: int) -> Any:
    return types.Array(_FLOAT32, ndim, "A", readonly=True, aligned=False)


def _array_out(ndim: int) -> Any:
    return types.Array(_FLOAT32, ndim, "A", aligned=False)


@functools.lru_cache(1024)
def forward_plan(rows: int, n: int, ndim: int) -> tuple[Any, int, int]:
    """Return the job for such an array, the rows of a tile, and the number of tiles."""
    tile_rows = forward_rows(rows, n)
    return _forward_job(ndim, n <= _tiny.LONGEST_FORWARD), tile_rows, -(-rows // tile_rows)


@functools.cache
def _forward_job(ndim: int, short: bool) -> Any:
    """Return what gives False, and has done nothing, if the arrays are not as it needs them."""
    stamp, last = STAMP, ndim - 1

    def plain_forward(x, gamma, beta, eps, y, in_place, statistics, tile_rows, crew, helpers):
        if stamp == "":
            return False
        n = x.shape[last]
        if not (
            gamma.size == n
            and beta.size == n
            and _contiguous(x)
            and _contiguous(gamma)
            and _contiguous(beta)
            and _contiguous(y)
        ):
            return False
        if _overlap(y, gamma) or _overlap(y, beta):
            return False
        if _overlap(y, x) and not (in_place and _is_same(y, x)):
            return False
        rows = statistics.shape[1]
        tiles = -(-rows // tile_rows)
        arguments = (
            rows, tiles, tile_rows, pointer(x), 4 * n, n, pointer(gamma), pointer(beta), eps,
            pointer(statistics), rows, pointer(y), 4 * n, False,
        )  # fmt: skip
        if short:
            share_tiny_forward(arguments, tiles, pointer(crew), helpers)
        else:
            share_narrow_forward(arguments, tiles, pointer(crew), helpers)
        return True

    plain_forward.__name__ = "tiny_plain_forward" if short else "narrow_plain_forward"
    return compiled(
        plain_forward,
        types.boolean(
            _array(ndim),
            _array(1),
            _array(1),
            types.float64,
            _array_out(ndim),
            types.boolean,
            types.float64[:, ::1],
            _SIZE,
            _CREW,
            _SIZE,
        ),
    )


@functools.lru_cache(1024)
def backward_plan(rows: int, n: int, ndim: int) -> tuple[Any, int, tuple[int, int, int]]:
    """Return the job for such an array, the rows of a tile, and the shape of all tiles' sums."""
    tile_rows = backward_rows(rows, n)
    job = _backward_job(ndim, n <= _tiny.LONGEST_BACKWARD)
    return job, tile_rows, (-(-rows // tile_rows), 2, sums_size.py_func(n))


@functools.cache
def _backward_job(ndim: int, short: bool) -> Any:
    """Return what gives False, and has done nothing, if the arrays are not as it needs them."""
    stamp, last = STAMP, ndim - 1

    def plain_backward(dy, x, gamma, statistics, dx, sums, dgamma, dbeta, tile_rows, crew, helpers):
        if stamp == "":
            return False
        n = x.shape[last]
        if not (
            gamma.size == n
            and _contiguous(dy)
            and _contiguous(x)
            and _contiguous(gamma)
            and _contiguous(dx)
            and _contiguous(dgamma)
            and _contiguous(dbeta)
        ):
            return False
        if (_overlap(dx, dy) and not _is_same(dx, dy)) or _overlap(dx, x) or _overlap(dx, gamma):
            return False
        for total in (dgamma, dbeta):
            if _overlap(total, dy) or _overlap(total, x) or _overlap(total, gamma):
                return False
        if _overlap(dx, dgamma) or _overlap(dx, dbeta) or _overlap(dgamma, dbeta):
            return False
        rows, tiles = statistics.shape[1], len(sums)
        # Sums over one row are its products: 4096 of them in 3 us less than by way of `sums`.
        summing = rows != 1
        arguments = (
            rows, tiles, tile_rows, pointer(dy), 4 * n, pointer(x), 4 * n, n, pointer(gamma),
            pointer(statistics), rows, pointer(dx), 4 * n,
            True, False, pointer(sums), sums.strides[0], summing,
        )  # fmt: skip
        if short:
            share_tiny_backward(arguments, tiles, pointer(crew), helpers)
        else:
            share_narrow_backward(arguments, tiles, pointer(crew), helpers)
        if summing:
            _sums.total_of_tiles(pointer(sums), tiles, n, 0, pointer(dgamma))
            _sums.total_of_tiles(pointer(sums), tiles, n, 1, pointer(dbeta))
        else:
            numbers = pointer(statistics)
            _products_of_row(
                pointer(dy), pointer(x), n, numbers[0], numbers[1], numbers[2],
                pointer(dgamma), pointer(dbeta),
            )  # fmt: skip
        return True

    plain_backward.__name__ = "tiny_plain_backward" if short else "narrow_plain_backward"
    return compiled(
        plain_backward,
        types.boolean(
            _array(ndim),
            _array(ndim),
            _array(1),
            types.float64[:, ::1],
            _array_out(ndim),
            types.float64[:, :, ::1],
            _array_out(1),
            _array_out(1),
            _SIZE,
            _CREW,
            _SIZE,
        ),
    )
