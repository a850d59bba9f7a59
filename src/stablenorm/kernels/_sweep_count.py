"""The rows of a block counted, and ranked: a fast copy of `stablenorm.analysis._diagnose_count`."""
# mypy: ignore-errors
# What Numba compiles has the types that Numba infers.

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import njit, types

from stablenorm.kernels._compiling import STAMP, compiled

# Bits of a row without a result, and its rank: before all others, not finite first.
_NOT_FINITE, _UNDEFINED = 1, 2
_RANKS = (4096.0, 2048.0)


@njit(error_model="numpy")
def _power(value, last):
    """Return the exponent of `value`, from 0 on, and beyond `last` that."""
    return min(max((np.float64(value).view(np.int64) >> 52) - 1023, 0), last)


@functools.cache
def _counting_job() -> Any:
    stamp = STAMP

    def count(condition_y, condition_dx, lost, marks, of_marks, of_bits, powers, largest, rank):
        if stamp == "":
            return
        methods, rows = lost.shape
        last = powers.shape[1] - 1
        for row in range(rows):
            mark, y, dx = np.int64(marks[row]), condition_y[row], condition_dx[row]
            if mark != 0:
                for place in range(of_marks.shape[0]):
                    of_marks[place] += (mark >> place) & 1
            if not math.isnan(lost[0, row]):
                for method in range(methods):
                    bits = np.float64(lost[method, row])
                    of_bits[method, np.uint64(bits + 0.5)] += 1
                    largest[2 + method] = max(largest[2 + method], bits)
            if y < math.inf:
                powers[0, _power(y, last)] += 1
                largest[0] = max(largest[0], y)
            if dx < math.inf:
                powers[1, _power(dx, last)] += 1
                largest[1] = max(largest[1], dx)
            if mark & _NOT_FINITE:
                rank[row] = _RANKS[0]
            elif mark & _UNDEFINED:
                rank[row] = _RANKS[1]
            else:
                rank[row] = np.rint(np.float64(lost[0, row])) + (1.0 - 1.0 / max(y, 1.0))

    def read(kind: Any, axes: int) -> Any:
        return types.Array(kind, axes, "A", readonly=True)

    whole, double = types.int64, types.float64
    return compiled(
        count,
        types.void(
            read(double, 1),
            read(double, 1),
            read(types.float32, 2),
            read(types.uint16, 1),
            whole[::1],
            whole[:, ::1],
            whole[:, ::1],
            double[::1],
            double[::1],
        ),
    )


def count_rows(found: Any, of_marks: Any, of_bits: Any, powers: Any, largest: Any) -> Any:
    """Add the rows to the counts; return their ranks."""
    rank = np.empty(len(found.marks))
    arrays = (found.condition_y, found.condition_dx, found.lost, found.marks)
    _counting_job()(*arrays, of_marks, of_bits, powers, largest, rank)
    return rank
