"""The last step of the sums over rows: add up the tiles, round once."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from stablenorm._types import Array
from stablenorm.kernels import _narrow
from stablenorm.kernels._compiling import ELEMENTS, STAMP, bits, compiled
from stablenorm.kernels._vectors import pointer


def write_total(sums: Array, which: int, out: Array) -> None:
    """Write the sum of dgamma, 0, or dbeta, 1, over the tiles of `sums` into `out`."""
    flat = out if out.ndim == 1 and out.flags.c_contiguous else np.empty(out.size, out.dtype)
    _total_job(out.dtype)(sums, out.size, which, bits(flat))
    if flat is not out:
        out[...] = flat.reshape(out.shape)


@functools.cache
def _total_job(dtype: np.dtype[Any]) -> Any:
    element = ELEMENTS[dtype]
    stamp = STAMP

    def total_job(sums, n, which, out):  # type: ignore[no-untyped-def]
        if stamp == "":
            return
        _narrow.total_of_tiles(pointer(sums), len(sums), n, which, pointer(out))

    size = types.int64
    out = types.Array(element, 1, "A", aligned=False)
    return compiled(total_job, types.void(types.float64[:, :, ::1], size, size, out))
