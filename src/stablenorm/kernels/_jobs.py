"""
The functions that Python calls: one for each set of types, which shares its tiles with helpers.

Their names and the digest of all sources are what the machine code on disk is found by, which is
why each is defined where it sees `stamp`, and refers to it. All end with `crew` and `helpers`, as
`share` takes them; with no helpers, the words of the crew are not touched.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit, types

from stablenorm.kernels import (
    _narrow_backward,
    _narrow_forward,
    _sums,
    _tiny_backward,
    _tiny_forward,
    _wide,
    _wide_backward,
    _wide_forward,
)
from stablenorm.kernels._compiling import (
    ELEMENTS,
    STAMP,
    compiled,
    matrix,
    matrix_out,
    vector,
    vector_out,
)
from stablenorm.kernels._control import restore, set_default
from stablenorm.kernels._parameters import prepared
from stablenorm.kernels._sharing import named, sharing, take
from stablenorm.kernels._vector_memory import address, pointer, pointer_at

_SIZE, _FLAG, _CREW = types.int64, types.boolean, types.int64[::1]
_MATRIX, _SUMS = types.float64[:, :], types.float64[:, :, ::1]


# ---- float16, bfloat16, float32 ----


def _forward_sharing(kernel: Any) -> Any:
    def forward_tiles(
        crew, me, rows, tiles, tile_rows, x, x_stride, n, gamma, beta, eps, statistics, all_rows,
        y, y_stride, streaming,
    ):  # fmt: skip
        tile = take(crew, me, -1)
        while tile < tiles:
            kernel.forward_tile(
                x, x_stride, tile * tile_rows, min((tile + 1) * tile_rows, rows), n,
                gamma, beta, eps, statistics, all_rows, y, y_stride, streaming,
            )  # fmt: skip
            tile = take(crew, me, tile)

    return sharing(njit(error_model="numpy")(named(forward_tiles, kernel.__name__)))


share_tiny_forward, share_narrow_forward = map(_forward_sharing, (_tiny_forward, _narrow_forward))


@functools.cache
def forward_job(dtype: np.dtype[Any], parameter_dtype: np.dtype[Any], short: bool) -> Any:
    """Return the forward of float16, bfloat16 or float32, of short rows or of others."""
    element, parameter = ELEMENTS[dtype], ELEMENTS[parameter_dtype]
    stamp, widens = STAMP, parameter is not types.float32

    def forward(x, gamma, beta, eps, y, statistics, tile_rows, streaming, crew, helpers):
        if stamp == "":
            return
        rows, n = x.shape
        tiles = -(-rows // tile_rows)
        space = np.empty(2 * n if widens else 1, np.float32)
        scale, shift = prepared(gamma, space, 0), prepared(beta, space, n)
        arguments = (
            rows, tiles, tile_rows, pointer(x), x.strides[0], n,
            scale, shift, eps, pointer(statistics), statistics.strides[0] // 8,
            pointer(y), y.strides[0], streaming,
        )  # fmt: skip
        if short:
            share_tiny_forward(arguments, tiles, pointer(crew), helpers)
        else:
            share_narrow_forward(arguments, tiles, pointer(crew), helpers)
        # Numba frees it after the last use of its name.
        space[0] = 0

    forward.__name__ = "tiny_forward" if short else "narrow_forward"
    return compiled(
        forward,
        types.void(
            matrix(element),
            vector(parameter),
            vector(parameter),
            types.float64,
            matrix_out(element),
            _MATRIX,
            _SIZE,
            _FLAG,
            _CREW,
            _SIZE,
        ),
    )


def _backward_sharing(kernel: Any) -> Any:
    def backward_tiles(
        crew, me, rows, tiles, tile_rows, dy, dy_stride, x, x_stride, n, gamma,
        statistics, all_rows, dx, dx_stride, wanted, streaming, sums, sums_stride, summing,
    ):  # fmt: skip
        tile = take(crew, me, -1)
        while tile < tiles:
            kernel.backward_tile(
                dy, dy_stride, x, x_stride, tile * tile_rows, min((tile + 1) * tile_rows, rows), n,
                gamma, statistics, all_rows, dx, dx_stride, wanted, streaming,
                pointer_at(address(sums) + tile * sums_stride, sums), summing,
            )  # fmt: skip
            tile = take(crew, me, tile)

    return sharing(njit(error_model="numpy")(named(backward_tiles, kernel.__name__)))


share_tiny_backward, share_narrow_backward = map(
    _backward_sharing, (_tiny_backward, _narrow_backward)
)


@functools.cache
def backward_job(
    dy_dtype: np.dtype[Any], x_dtype: np.dtype[Any], gamma_dtype: np.dtype[Any], short: bool
) -> Any:
    """
    Return the backward of float16, bfloat16 or float32, of short rows or of others.

    It writes the totals of dgamma and dbeta, if they have the type of x, into arrays of n elements;
    those of size 0 are left to `total_job`.
    """
    dy_element, x_element, parameter = (ELEMENTS[each] for each in (dy_dtype, x_dtype, gamma_dtype))
    stamp, widens = STAMP, parameter is not types.float32

    def backward(
        dy, x, gamma, statistics, dx, sums, dgamma, dbeta,
        tile_rows, wanted, summing, streaming, crew, helpers,
    ):  # fmt: skip
        if stamp == "":
            return
        rows, n = x.shape
        tiles = -(-rows // tile_rows)
        space = np.empty(n if widens else 1, np.float32)
        scale = prepared(gamma, space, 0)
        arguments = (
            rows, tiles, tile_rows, pointer(dy), dy.strides[0], pointer(x), x.strides[0], n,
            scale, pointer(statistics), statistics.strides[0] // 8,
            pointer(dx), dx.strides[0],
            wanted, streaming, pointer(sums), sums.strides[0] if summing else 0, summing,
        )  # fmt: skip
        if short:
            share_tiny_backward(arguments, tiles, pointer(crew), helpers)
        else:
            share_narrow_backward(arguments, tiles, pointer(crew), helpers)
        space[0] = 0
        if dgamma.size > 0:
            _sums.total_of_tiles(pointer(sums), len(sums), n, 0, pointer(dgamma))
        if dbeta.size > 0:
            _sums.total_of_tiles(pointer(sums), len(sums), n, 1, pointer(dbeta))

    backward.__name__ = "tiny_backward" if short else "narrow_backward"
    return compiled(
        backward,
        types.void(
            matrix(dy_element),
            matrix(x_element),
            vector(parameter),
            _MATRIX,
            matrix_out(x_element),
            _SUMS,
            vector_out(x_element),
            vector_out(x_element),
            _SIZE,
            _FLAG,
            _FLAG,
            _FLAG,
            _CREW,
            _SIZE,
        ),
    )


# ---- float64 ----


@njit(error_model="numpy")
def _wide_forward_tiles(
    crew, me, rows, tiles, tile_rows, x, x_stride, n, gamma, beta, eps, numbers, all_rows, tails,
    y, y_stride, streaming, hard,
):  # fmt: skip
    tile = take(crew, me, -1)
    while tile < tiles:
        _wide_forward.forward_tile(
            x, x_stride, tile * tile_rows, min((tile + 1) * tile_rows, rows), n,
            gamma, beta, eps, numbers, all_rows, tails, y, y_stride, streaming, hard,
        )  # fmt: skip
        tile = take(crew, me, tile)


_share_wide_forward = sharing(_wide_forward_tiles)


@functools.cache
def wide_forward_job(gamma_dtype: np.dtype[Any], beta_dtype: np.dtype[Any]) -> Any:
    """Return the forward of float64, with parameters of any type."""
    stamp = STAMP

    def wide_forward(
        x, gamma, beta, eps, y, numbers, tails, hard, tile_rows, streaming, crew, helpers
    ):
        if stamp == "":
            return
        rows, n = x.shape
        tiles = -(-rows // tile_rows)
        arguments = (
            rows, tiles, tile_rows, pointer(x), x.strides[0], n, pointer(gamma), pointer(beta), eps,
            pointer(numbers), numbers.strides[0] // 8, pointer(tails),
            pointer(y), y.strides[0], streaming, pointer(hard),
        )  # fmt: skip
        _share_wide_forward(arguments, tiles, pointer(crew), helpers)

    return compiled(
        wide_forward,
        types.void(
            matrix(types.float64),
            vector(ELEMENTS[gamma_dtype]),
            vector(ELEMENTS[beta_dtype]),
            types.float64,
            matrix_out(types.float64),
            _MATRIX,
            types.float64[::1],
            types.uint8[::1],
            _SIZE,
            _FLAG,
            _CREW,
            _SIZE,
        ),
    )


@njit(error_model="numpy")
def _wide_backward_tiles(
    crew, me, rows, tiles, tile_rows, dy, dy_stride, x, x_stride, n, gamma, numbers, all_rows,
    tails, has_tails, dx, dx_stride, wanted, streaming, sums, sums_stride, sums_size, summing,
    known, has_known, hard_tiles,
):  # fmt: skip
    tile = take(crew, me, -1)
    while tile < tiles:
        hard_tiles[tile] = _wide_backward.backward_tile(
            dy, dy_stride, x, x_stride, tile * tile_rows, min((tile + 1) * tile_rows, rows), n,
            gamma, numbers, all_rows, tails, has_tails, dx, dx_stride, wanted, streaming,
            pointer_at(address(sums) + tile * sums_stride, sums), sums_size, summing,
            known, has_known,
        )  # fmt: skip
        tile = take(crew, me, tile)


_share_wide_backward = sharing(_wide_backward_tiles)


@functools.cache
def wide_backward_job(dy_dtype: np.dtype[Any], gamma_dtype: np.dtype[Any]) -> Any:
    """Return the backward of float64, with dy and gamma of any type."""
    stamp = STAMP

    def wide_backward(
        dy, x, gamma, numbers, tails, dx, sums, known, hard_tiles,
        tile_rows, wanted, summing, streaming, crew, helpers,
    ):  # fmt: skip
        if stamp == "":
            return
        rows, n = x.shape
        tiles = -(-rows // tile_rows)
        arguments = (
            rows, tiles, tile_rows, pointer(dy), dy.strides[0], pointer(x), x.strides[0], n,
            pointer(gamma), pointer(numbers), numbers.strides[0] // 8,
            pointer(tails), tails.size > 0, pointer(dx), dx.strides[0], wanted, streaming,
            pointer(sums), sums.strides[0] if summing else 0, sums.shape[2], summing,
            pointer(known), known.size > 0, pointer(hard_tiles),
        )  # fmt: skip
        _share_wide_backward(arguments, tiles, pointer(crew), helpers)

    return compiled(
        wide_backward,
        types.void(
            matrix(ELEMENTS[dy_dtype]),
            matrix(types.float64),
            vector(ELEMENTS[gamma_dtype]),
            _MATRIX,
            types.float64[::1],
            matrix_out(types.float64),
            _SUMS,
            types.uint8[::1],
            types.uint8[::1],
            _SIZE,
            _FLAG,
            _FLAG,
            _FLAG,
            _CREW,
            _SIZE,
        ),
    )


@functools.cache
def find_hard_job(dy_dtype: np.dtype[Any]) -> Any:
    """Return what marks the rows that the backward of float64 leaves alone."""
    stamp = STAMP

    def find_hard(dy, x, hard):
        if stamp == "":
            return
        rows, n = dy.shape
        word = set_default()
        _wide.find_hard(
            pointer(dy), dy.strides[0], pointer(x), x.strides[0], rows, n, pointer(hard)
        )
        restore(word)

    return compiled(
        find_hard,
        types.void(matrix(ELEMENTS[dy_dtype]), matrix(types.float64), types.uint8[::1]),
    )


@functools.cache
def moderate_job(dtype: np.dtype[Any]) -> Any:
    """Return what tells whether a parameter has no elements of extreme size."""
    stamp = STAMP

    def moderate(parameter, least):
        if stamp == "":
            return False
        word = set_default()
        found = _wide.all_moderate(pointer(parameter), parameter.size, least)
        restore(word)
        return found

    return compiled(moderate, types.boolean(vector(ELEMENTS[dtype]), types.float64))


@functools.cache
def total_job(dtype: np.dtype[Any]) -> Any:
    """Return what adds up the tiles, for dgamma or dbeta of `dtype`."""
    element = ELEMENTS[dtype]
    stamp = STAMP

    def total(sums, n, which, out):
        if stamp == "":
            return
        _sums.total_of_tiles(pointer(sums), len(sums), n, which, pointer(out))

    return compiled(total, types.void(_SUMS, _SIZE, _SIZE, vector_out(element)))
