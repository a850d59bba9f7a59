"""The rows of a block counted, and ranked: a fast copy of `stablenorm.analysis._diagnose_count`."""
# mypy: ignore-errors
# What Numba compiles has the types that Numba infers.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types

from stablenorm.kernels._compiling import STAMP, compiled
from stablenorm.kernels._inner import inner
from stablenorm.kernels._sweep_predict import LOSSES

# Bits of a row without a result, and its rank: before all others, not finite first.
_NOT_FINITE, _UNDEFINED = 1, 2
_RANKS = (4096.0, 2048.0)


# The bits of infinity: as unsigned integers, those of finite numbers, none of which is negative
# here, are smaller, and those of NaN, whatever its sign, are larger.
_INFINITY, _SINGLE_INFINITY = np.uint64(0x7FF << 52), np.uint32(0x7F800000)

# Rows counted at a time: what is read of them stays in the nearest cache.
_TOGETHER = 256


@inner
def _largest(bits, infinity, before):
    """Return the largest of `before` and of finite numbers >= 0, all given as their bits."""
    largest = before
    for row in range(bits.size):
        # Integers, whose largest LLVM finds eight at a time; that of floats is a matter of order.
        largest = max(largest, bits[row] if bits[row] < infinity else before)
    return largest


@inner
def _to_nearest(lost, bins, none):
    """Write where rows are counted, of NaN `none`."""
    for row in range(lost.size):
        bits = lost[row]
        bins[row] = np.int32((bits if bits >= 0 else none) + np.float32(0.5))


@inner
def _count_powers(bits, powers):
    """Count finite numbers by exponent: from 0 on, and beyond the last with the last."""
    last = np.int64(powers.size - 1)
    for row in range(bits.size):
        if bits[row] < _INFINITY:
            powers[np.uint64(min(max(np.int64(bits[row] >> np.uint64(52)) - 1023, 0), last))] += 1


@inner
def _rank(marks, lost, condition_y, rank):
    """Write the ranks of rows, all at a time: no branch."""
    for row in range(marks.size):
        whole = np.rint(np.float64(lost[row])) + (1.0 - 1.0 / max(condition_y[row], 1.0))
        undefined = _RANKS[1] if marks[row] & _UNDEFINED else whole
        rank[row] = _RANKS[0] if marks[row] & _NOT_FINITE else undefined


@functools.cache
def _counting_job() -> Any:
    stamp = STAMP

    def count(condition_y, condition_dx, lost, marks, of_marks, of_bits, powers, largest, rank):
        if stamp == "":
            return
        y, dx = condition_y.view(np.uint64), condition_dx.view(np.uint64)
        ends, singles = largest.view(np.uint64), np.zeros(LOSSES, np.uint32)
        # The last place is for rows without a result, of which nothing is counted.
        none = of_bits.shape[1]
        counts, bins = (
            np.zeros((LOSSES, none + 1), np.int64),
            np.empty((LOSSES, _TOGETHER), np.uint32),
        )
        for start in range(0, marks.size, _TOGETHER):
            rows = slice(start, min(start + _TOGETHER, marks.size))
            for row in range(rows.start, rows.stop):
                if marks[row] != 0:
                    for place in range(of_marks.shape[0]):
                        of_marks[place] += (marks[row] >> place) & 1
            for method in range(LOSSES):
                bits = lost[method][rows]
                _to_nearest(bits, bins[method], np.float32(none))
                singles[method] = _largest(bits.view(np.uint32), _SINGLE_INFINITY, singles[method])
            for row in range(rows.stop - rows.start):
                for method in range(LOSSES):
                    counts[method, bins[method, row]] += 1
            _count_powers(y[rows], powers[0])
            _count_powers(dx[rows], powers[1])
            ends[0] = _largest(y[rows], _INFINITY, ends[0])
            ends[1] = _largest(dx[rows], _INFINITY, ends[1])
            _rank(marks[rows], lost[0][rows], condition_y[rows], rank[rows])
        of_bits += counts[:, :none]
        for method in range(LOSSES):
            largest[2 + method] = max(largest[2 + method], singles.view(np.float32)[method])

    def read(kind: Any) -> Any:
        return types.Array(kind, 1, "C", readonly=True)

    whole, double = types.int64, types.float64
    return compiled(
        count,
        types.void(
            read(double),
            read(double),
            types.UniTuple(read(types.float32), LOSSES),
            read(types.uint16),
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
    arrays = (found.condition_y, found.condition_dx, tuple(found.lost), found.marks)
    _counting_job()(*arrays, of_marks, of_bits, powers, largest, rank)
    return rank
