"""
gamma and beta as the kernels take them: n contiguous float32, which hold the 16-bit types exactly.

Jobs take them in the type of x as well, and widen them there: NumPy takes 5 microseconds for 4096
float16, and most of one for as many bfloat16, or for few (2-core AMD EPYC 9005, November 2026).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from stablenorm.kernels._control import restore, set_default
from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._vector_memory import (
    address,
    itemsize,
    load_some,
    pointer,
    pointer_at,
    store_some,
)
from stablenorm.kernels._vectors import ZEROS
from stablenorm.types import Array

_FLOAT32 = np.dtype(np.float32)

# Up to this length, gammas of ones and betas of -0 are made once: 1 microsecond of a small call.
_KEPT = 1 << 12

_one = ZEROS[1]


def flat(parameter: Array | None, n: int, neutral: float, dtype: np.dtype[Any]) -> Array:
    """Return `parameter` as n contiguous elements; without one, what changes nothing, not -0."""
    if parameter is None:
        return _neutral(n, neutral, dtype) if n <= _KEPT else np.full(n, neutral, dtype)
    if parameter.ndim == 1 and parameter.flags.c_contiguous:
        return parameter
    return np.ascontiguousarray(parameter).reshape(-1)


@functools.lru_cache(16)
def _neutral(n: int, value: float, dtype: np.dtype[Any]) -> Array:
    return np.full(n, value, dtype)


def in_float32(parameter: Array) -> Array:
    """Return `parameter` itself, or a copy in float32."""
    return parameter if parameter.dtype is _FLOAT32 else parameter.astype(_FLOAT32)


@inner
def prepared(parameter, space, start):
    """
    Return a pointer to float32: into `parameter`, or, of 16-bit types, into `space`, from `start` on.

    The caller keeps both alive. (Two functions, of which a job is given one, would keep Numba from
    its cache on disk.)
    """
    narrow = pointer(parameter)
    if itemsize(narrow) == 4:  # float32
        return pointer_at(address(narrow), pointer(space))
    word = set_default()
    n, one = parameter.size, _one()
    wide = pointer_at(address(pointer(space)) + 4 * start, pointer(space))
    for col in range(0, n, WIDTH):
        count = min(n - col, WIDTH)
        store_some(wide, 4 * col, 0, count, load_some(narrow, 2 * col, 0, count, one))
    restore(word)
    return wide
