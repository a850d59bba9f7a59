"""
The float64 half of `cpu`: double-double kernels, and the reference for what they do not take.

That is: a float64 gamma, beta or dy beside narrower x; eps, gamma or beta of extreme size; and
single rows of extreme size, zero variance with eps = 0, NaN or infinity. A row's bits do not
depend on its neighbours: only the hard rows themselves go to the reference. The sums over rows do
so as a whole, if one row is hard.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from stablenorm import reference
from stablenorm.kernels import _sums, _wide
from stablenorm.kernels._compiling import bits
from stablenorm.kernels._helpers import crew_for
from stablenorm.kernels._jobs import (
    find_hard_job,
    moderate_job,
    wide_backward_job,
    wide_forward_job,
)
from stablenorm.kernels._parameters import flat
from stablenorm.kernels._tiles import (
    backward_rows,
    blocks,
    forward_rows,
    has_contiguous_rows,
    joined,
    past_caches,
)
from stablenorm.kernels._totals import write_total
from stablenorm.types import Array, Gradients, Statistics

_FLOAT64 = np.dtype(np.float64)

_NONE: Array = np.empty(0, np.uint8)
_NO_TAILS: Array = np.empty(0)

# An element takes as long as so many of 32 bits or fewer.
_COST = 4

# Elements of hard rows gathered at a time for the reference.
_GATHERED = 1 << 18


def forward(x: Any, gamma: Array | None, beta: Array | None, eps: float, y: Any) -> Statistics:
    """Do what `reference.forward` does, where x, gamma or beta is float64."""
    rows, n = x.shape
    scale, shift = flat(gamma, n, 1.0, _FLOAT64), flat(beta, n, -0.0, _FLOAT64)
    if x.dtype != _FLOAT64 or not (_moderate(scale) and _moderate(shift, 0.0) and _sane(eps)):
        return reference.forward(x, gamma, beta, eps, y)
    numbers, tails, hard = np.empty((4, rows)), np.empty(rows), np.zeros(rows, np.uint8)
    tile_rows, job = forward_rows(rows, n), wide_forward_job(scale.dtype, shift.dtype)
    if has_contiguous_rows(x) and has_contiguous_rows(y):
        some = (numbers, tails, hard, tile_rows, past_caches(y, x))
        job(
            x,
            bits(scale),
            bits(shift),
            eps,
            y,
            *some,
            *crew_for(_COST * rows * n, -(-rows // tile_rows)),
        )
    else:
        for block in blocks(rows, n, tile_rows):
            part = np.ascontiguousarray(x[block])
            result = np.empty_like(part)
            some = (numbers[:, block], tails[block], hard[block], tile_rows, False)
            crew = crew_for(_COST * part.size, -(-len(part) // tile_rows))
            job(part, bits(scale), bits(shift), eps, result, *some, *crew)
            easy = ~hard[block].astype(bool)
            # Rows that are hard are still needed, if y is x.
            y[block] = np.where(easy[:, None], result, part)
    # Counting takes a quarter of the time of any(), which is 1.3 microseconds of a small call.
    if np.count_nonzero(hard):
        return _with_hard_rows(x, gamma, beta, eps, y, numbers, tails, np.flatnonzero(hard))
    return _statistics(numbers, tails, None)


def _with_hard_rows(
    x: Any,
    gamma: Array | None,
    beta: Array | None,
    eps: float,
    y: Any,
    numbers: Array,
    tails: Array,
    hard: Array,
) -> Statistics:
    """Let the reference compute the rows `hard`; return the statistics of all."""
    exponent = None
    for part in _chunks(hard, x.shape[1]):
        result: Any = np.empty((len(part), x.shape[1]))
        kept = reference.forward(_rows(x, part), gamma, beta, eps, result)
        _put(y, part, result)
        for row, words in zip((*numbers, tails), (*kept[:4], kept.mean_tail), strict=True):
            row[part] = 0.0 if words is None else words
        if kept.exponent is not None:
            if exponent is None:
                exponent = np.zeros((x.shape[0], 2), np.int16)
            exponent[part] = kept.exponent
    return _statistics(numbers, tails, exponent)


def _statistics(numbers: Array, tails: Array, exponent: Array | None) -> Statistics:
    # Dropped where no row needs it, as in the reference.
    needed = tails if np.count_nonzero(tails) else None
    return Statistics(numbers[0], numbers[1], numbers[2], numbers[3], needed, exponent)


def backward(dy: Any, x: Any, gamma: Array | None, statistics: Statistics, out: Gradients) -> None:
    """Do what `reference.backward` does, where something is float64."""
    rows, n = x.shape
    dx, dgamma, dbeta = out
    scale = flat(gamma, n, 1.0, _FLOAT64)
    if x.dtype != _FLOAT64 or statistics.rstd_lo is None or not _moderate(scale):
        reference.backward(dy, x, gamma, statistics, out)
        return
    wanted, summing = dx is not None, dgamma is not None or dbeta is not None
    target = np.empty((1, 1)) if dx is None else dx
    numbers, known = joined(statistics[:4]), _NONE
    tails = _NO_TAILS if statistics.mean_tail is None else statistics.mean_tail
    if statistics.exponent is not None:
        known = np.asarray(statistics.exponent.any(axis=1), np.uint8)
    tile_rows = backward_rows(rows, n)
    size = _sums.sums_size(n)
    tiles = -(-rows // tile_rows)
    sums = np.empty((tiles, 2, size) if summing else (1, 1, 1))
    hard_tiles = np.zeros(tiles, np.uint8)
    over = dx is not None and np.may_share_memory(dy, dx)
    if over and _hard_rows(dy, x, statistics).size:
        # Written over dy, which hard rows, and then all sums, would still need.
        dy = np.array(dy[:])
    job = wide_backward_job(dy.dtype, scale.dtype)
    flags = (wanted, summing)
    if has_contiguous_rows(dy) and has_contiguous_rows(x) and has_contiguous_rows(target):
        streaming = wanted and past_caches(target, dy)
        whole = (bits(dy), x, bits(scale), numbers, tails, target, sums, known, hard_tiles)
        job(*whole, tile_rows, *flags, streaming, *crew_for(_COST * rows * n, tiles))
    else:
        for block in blocks(rows, n, tile_rows):
            parts = [np.ascontiguousarray(array[block]) for array in (dy, x)]
            result = np.empty_like(parts[1]) if wanted else target
            first, last = block.start // tile_rows, -(-block.stop // tile_rows)
            some = sums[first:last] if summing else sums
            part = (
                bits(parts[0]),
                parts[1],
                bits(scale),
                numbers[:, block],
                tails[block],
                result,
                some,
            )
            marks = (known[block], hard_tiles[first:last])
            job(
                *part,
                *marks,
                tile_rows,
                *flags,
                False,
                *crew_for(_COST * parts[1].size, last - first),
            )
            if dx is not None:
                dx[block] = result
    if not np.count_nonzero(hard_tiles):
        for which, total in enumerate((dgamma, dbeta)):
            if total is not None:
                write_total(sums, which, total)
        return
    if summing:
        reference.backward(dy, x, gamma, statistics, Gradients(None, dgamma, dbeta))
    if dx is not None:
        _redo(dy, x, gamma, statistics, dx, _hard_rows(dy, x, statistics))


def _redo(dy: Any, x: Any, gamma: Array | None, statistics: Any, dx: Any, hard: Array) -> None:
    """Let the reference compute dx of the rows `hard`."""
    for part in _chunks(hard, x.shape[1]):
        words: Any = [None if one is None else one[part] for one in statistics]
        kept = Statistics(*words)
        result = np.empty((len(part), x.shape[1]))
        out = Gradients(result, None, None)
        reference.backward(_rows(dy, part), _rows(x, part), gamma, kept, out)
        _put(dx, part, result)


def _hard_rows(dy: Any, x: Any, statistics: Statistics) -> Array:
    """Return the rows that the compiled backward leaves alone."""
    rows, n = dy.shape
    job, hard = find_hard_job(dy.dtype), np.zeros(rows, np.uint8)
    for block in blocks(rows, n, 1):
        parts = [np.ascontiguousarray(array[block]) for array in (dy, x)]
        job(bits(parts[0]), parts[1], hard[block])
    mean, rstd = statistics.mean, statistics.rstd
    marked = hard.astype(bool) | ~((np.abs(mean) <= _wide.LARGEST) & (rstd <= _wide.LARGEST))
    if statistics.exponent is not None:
        marked |= statistics.exponent.any(axis=1)
    return np.flatnonzero(marked)


def _chunks(rows: Array, n: int) -> Any:
    step = max(_GATHERED // n, 1)
    return (rows[start : start + step] for start in range(0, len(rows), step))


def _rows(array: Any, rows: Array) -> Any:
    """Return a copy of some rows, of an array or of what can only be sliced."""
    if isinstance(array, np.ndarray):
        return array[rows]
    return np.concatenate([array[slice(row, row + 1)] for row in rows])


def _put(array: Any, rows: Array, values: Array) -> None:
    if isinstance(array, np.ndarray):
        array[rows] = values
        return
    for row, value in zip(rows, values, strict=True):
        array[slice(row, row + 1)] = value[None]


def _moderate(parameter: Array, least: float = _wide.SMALLEST) -> bool:
    """Tell whether all of it is 0 or between `least` and `_wide.LARGEST` in size."""
    return bool(moderate_job(parameter.dtype)(bits(parameter), least))


def _sane(eps: float) -> bool:
    # By its bits: to a thread that flushes subnormals, a tiny eps equals 0.
    return _wide.SMALLEST <= eps <= _wide.LARGEST or not any(struct.pack("d", eps))
