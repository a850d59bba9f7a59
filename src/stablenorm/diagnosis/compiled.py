"""The sums over each row, compiled by Numba; `rows.sum_rows` is the same in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from stablenorm.cpu.compiling import compiled
from stablenorm.diagnosis.rows import PART
from stablenorm.types import Array


@functools.cache
def compiled_sums(dtype: np.dtype[Any]) -> Callable[[Array, Array, Array], None]:
    """Return `rows.sum_rows` compiled for C-ordered arrays of float32 or float64."""
    kind = from_dtype(dtype)
    x = types.Array(kind, 2, "C", readonly=True)
    working, wide = (types.Array(each, 2, "C") for each in (kind, types.float64))

    # Made anew for each dtype: machine code is kept under the name of its function.
    def sum_rows(x: Any, working: Any, wide: Any) -> None:
        _sum_rows(x, working, wide)

    return compiled(sum_rows, types.void(x, working, wide))


# "reassoc" lets LLVM keep a sum as several running ones, which vector instructions need; how many
# depends on the processor.
@njit(error_model="numpy", fastmath={"reassoc"})
def _sum_rows(x: Any, working: Any, wide: Any) -> None:
    rows, n = x.shape
    kind = working.dtype.type
    for i in range(rows):
        total, squares, wide_total = kind(0), kind(0), 0.0
        for j in range(n):
            v = x[i, j]
            total += v
            squares += v * v
            wide_total += np.float64(v)
        mean, wide_mean = total / kind(n), wide_total / n
        centered, wide_rest, wide_squares = kind(0), 0.0, 0.0
        for j in range(n):
            deviation, wide_deviation = x[i, j] - mean, np.float64(x[i, j]) - wide_mean
            centered += deviation * deviation
            wide_rest += wide_deviation
            wide_squares += wide_deviation * wide_deviation
        working[0, i], working[1, i], working[2, i] = total, squares, centered
        wide[0, i], wide[1, i], wide[2, i] = wide_mean, wide_rest / n, wide_squares / n
        # Welford's update for parts of a row (Chan, Golub, LeVeque 1979).
        count, center, spread = kind(0), kind(0), kind(0)
        for first in range(0, n, PART):
            # Unsigned: an index that might be negative keeps LLVM from using vectors.
            start, stop = np.uint64(first), np.uint64(min(first + PART, n))
            size, part_mean, part_squares = kind(stop - start), kind(0), kind(0)
            for j in range(start, stop):
                part_mean += x[i, j]
            part_mean /= size
            for j in range(start, stop):
                deviation = x[i, j] - part_mean
                part_squares += deviation * deviation
            if first == 0:
                center, spread, count = part_mean, part_squares, size
                continue
            apart, both = part_mean - center, count + size
            center += apart * (size / both)
            spread += part_squares + apart * apart * (count * size / both)
            count = both
        working[3, i], working[4, i] = center, spread
