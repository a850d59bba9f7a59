"""
The functions that threads run: they take tiles until none is left. One for each set of types.

Their names and the digest of all sources are what the machine code on disk is found by, which is
why each is defined where it sees `stamp`, and refers to it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from stablenorm.kernels import _narrow, _tiny, _wide
from stablenorm.kernels._compiling import ELEMENTS, STAMP, compiled, matrix, matrix_out, vector
from stablenorm.kernels._helpers import finish, take
from stablenorm.kernels._vectors import pointer

_SIZE, _FLAG, _TICKETS = types.int64, types.boolean, types.int64[::1]
_MATRIX, _SUMS = types.float64[:, :], types.float64[:, :, ::1]


@functools.cache
def forward_job(dtype: np.dtype[Any], short: bool) -> Any:
    """Return the forward of float16, bfloat16 or float32, of short rows or of others."""
    element = ELEMENTS[dtype]
    stamp = STAMP
    kernel = _tiny if short else _narrow

    def forward(x, gamma, beta, eps, y, statistics, tile_rows, streaming, tickets, tiles):
        if stamp == "":
            return
        rows, n = x.shape
        tile = take(tickets, -1)
        while tile < tiles:
            kernel.forward_tile(
                pointer(x), x.strides[0], tile * tile_rows, min((tile + 1) * tile_rows, rows), n,
                pointer(gamma), pointer(beta), eps, pointer(statistics), statistics.strides[0] // 8,
                pointer(y), y.strides[0], streaming,
            )  # fmt: skip
            finish(tickets)
            tile = take(tickets, tile)

    forward.__name__ = "tiny_forward" if short else "narrow_forward"
    parameter = vector(types.float32)
    return compiled(
        forward,
        types.void(
            matrix(element),
            parameter,
            parameter,
            types.float64,
            matrix_out(element),
            _MATRIX,
            _SIZE,
            _FLAG,
            _TICKETS,
            _SIZE,
        ),
    )


@functools.cache
def backward_job(dy_dtype: np.dtype[Any], x_dtype: np.dtype[Any], short: bool) -> Any:
    """Return the backward of float16, bfloat16 or float32, of short rows or of others."""
    dy_element, x_element = ELEMENTS[dy_dtype], ELEMENTS[x_dtype]
    stamp = STAMP
    kernel = _tiny if short else _narrow

    def backward(
        dy, x, gamma, statistics, dx, sums, tile_rows, wanted, summing, streaming, tickets, tiles
    ):
        if stamp == "":
            return
        rows, n = x.shape
        tile = take(tickets, -1)
        while tile < tiles:
            kernel.backward_tile(
                pointer(dy), dy.strides[0], pointer(x), x.strides[0],
                tile * tile_rows, min((tile + 1) * tile_rows, rows), n,
                pointer(gamma), pointer(statistics), statistics.strides[0] // 8,
                pointer(dx), dx.strides[0], wanted, streaming,
                pointer(sums[tile if summing else 0]), summing,
            )  # fmt: skip
            finish(tickets)
            tile = take(tickets, tile)

    backward.__name__ = "tiny_backward" if short else "narrow_backward"
    return compiled(
        backward,
        types.void(
            matrix(dy_element),
            matrix(x_element),
            vector(types.float32),
            _MATRIX,
            matrix_out(x_element),
            _SUMS,
            _SIZE,
            _FLAG,
            _FLAG,
            _FLAG,
            _TICKETS,
            _SIZE,
        ),
    )


@functools.cache
def wide_forward_job(gamma_dtype: np.dtype[Any], beta_dtype: np.dtype[Any]) -> Any:
    """Return the forward of float64, with parameters of any type."""
    stamp = STAMP

    def wide_forward(
        x, gamma, beta, eps, y, numbers, tails, hard, tile_rows, streaming, tickets, tiles
    ):
        if stamp == "":
            return
        rows, n = x.shape
        tile = take(tickets, -1)
        while tile < tiles:
            _wide.forward_tile(
                pointer(x), x.strides[0], tile * tile_rows, min((tile + 1) * tile_rows, rows), n,
                pointer(gamma), pointer(beta), eps, pointer(numbers), numbers.strides[0] // 8,
                pointer(tails), pointer(y), y.strides[0], streaming, pointer(hard),
            )  # fmt: skip
            finish(tickets)
            tile = take(tickets, tile)

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
            _TICKETS,
            _SIZE,
        ),
    )


@functools.cache
def wide_backward_job(dy_dtype: np.dtype[Any], gamma_dtype: np.dtype[Any]) -> Any:
    """Return the backward of float64, with dy and gamma of any type."""
    stamp = STAMP

    def wide_backward(
        dy, x, gamma, numbers, tails, dx, sums, known, hard_tiles,
        tile_rows, wanted, summing, streaming, tickets, tiles,
    ):  # fmt: skip
        if stamp == "":
            return
        rows, n = x.shape
        tile = take(tickets, -1)
        while tile < tiles:
            hard_tiles[tile] = _wide.backward_tile(
                pointer(dy), dy.strides[0], pointer(x), x.strides[0],
                tile * tile_rows, min((tile + 1) * tile_rows, rows), n,
                pointer(gamma), pointer(numbers), numbers.strides[0] // 8,
                pointer(tails), tails.size > 0, pointer(dx), dx.strides[0], wanted, streaming,
                pointer(sums[tile if summing else 0]), sums.shape[2], summing,
                pointer(known), known.size > 0,
            )  # fmt: skip
            finish(tickets)
            tile = take(tickets, tile)

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
            _TICKETS,
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
        _wide.find_hard(
            pointer(dy), dy.strides[0], pointer(x), x.strides[0], rows, n, pointer(hard)
        )

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
        return _wide.all_moderate(pointer(parameter), parameter.size, least)

    return compiled(moderate, types.boolean(vector(ELEMENTS[dtype]), types.float64))


@functools.cache
def total_job(dtype: np.dtype[Any]) -> Any:
    """Return what adds up the tiles, for dgamma or dbeta of `dtype`."""
    element = ELEMENTS[dtype]
    stamp = STAMP

    def total(sums, n, which, out):
        if stamp == "":
            return
        _narrow.total_of_tiles(pointer(sums), len(sums), n, which, pointer(out))

    out = types.Array(element, 1, "A", aligned=False)
    return compiled(total, types.void(_SUMS, _SIZE, _SIZE, out))
