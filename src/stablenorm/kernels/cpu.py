"""
`reference.forward` and `reference.backward` for NumPy arrays, compiled by Numba.

Rows are dealt out in tiles whose number and bounds depend on the shape alone, so that no bit
depends on the number of threads. This module is about float16, bfloat16 and float32; `_float64`
is its other half.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm.kernels import _float64, _sums, _tiny
from stablenorm.kernels._compiling import bits
from stablenorm.kernels._helpers import crew_for
from stablenorm.kernels._jobs import backward_job, forward_job
from stablenorm.kernels._parameters import flat, in_float32
from stablenorm.kernels._plain_jobs import backward_plan, forward_plan
from stablenorm.kernels._sharing import NO_CREW
from stablenorm.kernels._tiles import (
    backward_rows,
    blocks,
    forward_rows,
    has_contiguous_rows,
    joined,
    past_caches,
)
from stablenorm.kernels._totals import write_total
from stablenorm.types import Array, Gradients, Statistics, any_float64

_ALONE = (NO_CREW, 0)

# The same for Python, which calls compiled functions much slower than its own.
_sums_size: Any = _sums.sums_size.py_func


def forward(x: Any, gamma: Array | None, beta: Array | None, eps: float, y: Any) -> Statistics:
    """Do what `reference.forward` does."""
    if any_float64(x, gamma, beta):
        return _float64.forward(x, gamma, beta, eps, y)
    rows, n = x.shape
    numbers = np.empty((3, rows))
    dtype = x.dtype
    scale, shift = flat(gamma, n, 1.0, dtype), flat(beta, n, -0.0, dtype)
    if not scale.dtype == shift.dtype == dtype:
        scale, shift = in_float32(scale), in_float32(shift)
    job = forward_job(dtype, scale.dtype, n <= _tiny.LONGEST_FORWARD)
    scale, shift = bits(scale), bits(shift)
    if has_contiguous_rows(x) and has_contiguous_rows(y):
        tile_rows = forward_rows(rows, n)
        crew = crew_for(rows * n, -(-rows // tile_rows))
        job(bits(x), scale, shift, eps, bits(y), numbers, tile_rows, past_caches(y, x), *crew)
    else:
        _forward_blocks(job, x, scale, shift, eps, y, numbers)
    return Statistics(numbers[0], numbers[1], numbers[2])


def forward_small(
    x: Array, gamma: Array, beta: Array, eps: float, y: Array, in_place: bool
) -> Array | None:
    """
    Do what `forward` does for few float32 of any shape; return the statistics as one array.

    None, and nothing done, if the arrays are not contiguous, their lengths differ, or y shares
    memory with another; if `in_place`, it may be x.
    """
    n = gamma.size
    if n == 0:
        return None
    rows = x.size // n
    job, tile_rows, tiles = forward_plan(rows, n, x.ndim)
    numbers = np.empty((3, rows))
    crew = crew_for(rows * n, tiles) if tiles > 1 else _ALONE
    return numbers if job(x, gamma, beta, eps, y, in_place, numbers, tile_rows, *crew) else None


def backward_small(
    dy: Array,
    x: Array,
    gamma: Array,
    statistics: Statistics,
    dx: Array,
    dgamma: Array,
    dbeta: Array,
) -> bool:
    """
    Do what `backward` does for few float32 of any shape.

    False, and nothing done, if the arrays are not contiguous, their lengths differ, or a result
    shares memory with another array; dx may be dy.
    """
    n = gamma.size
    rows = x.size // n
    job, tile_rows, shape = backward_plan(rows, n, x.ndim)
    sums = np.empty(shape)
    numbers = joined(statistics[:3])
    crew = crew_for(rows * n, shape[0]) if shape[0] > 1 else _ALONE
    return job(dy, x, gamma, numbers, dx, sums, dgamma, dbeta, tile_rows, *crew)


def _forward_blocks(
    job: Any, x: Any, gamma: Array, beta: Array, eps: float, y: Any, numbers: Array
) -> None:
    """Run `job` on contiguous copies of a few tiles at a time."""
    rows, n = x.shape
    tile_rows = forward_rows(rows, n)
    for block in blocks(rows, n, tile_rows):
        part = np.ascontiguousarray(x[block])
        result = np.empty_like(part)
        crew = crew_for(part.size, -(-len(part) // tile_rows))
        some = numbers[:, block]
        job(bits(part), gamma, beta, eps, bits(result), some, tile_rows, False, *crew)
        y[block] = result


def backward(dy: Any, x: Any, gamma: Array | None, statistics: Statistics, out: Gradients) -> None:
    """Do what `reference.backward` does."""
    if statistics.rstd_lo is not None or any_float64(dy, x, gamma, *out):
        _float64.backward(dy, x, gamma, statistics, out)
        return
    rows, n = x.shape
    dx, dgamma, dbeta = out
    wanted, summing = dx is not None, dgamma is not None or dbeta is not None
    target = np.empty((1, 1), x.dtype) if dx is None else dx
    tile_rows = backward_rows(rows, n)
    tiles = -(-rows // tile_rows)
    sums = np.empty((tiles, 2, _sums_size(n)) if summing else (1, 1, 1))
    scale = flat(gamma, n, 1.0, x.dtype)
    if scale.dtype != x.dtype:
        scale = in_float32(scale)
    numbers = joined(statistics[:3])
    job = backward_job(dy.dtype, x.dtype, scale.dtype, n <= _tiny.LONGEST_BACKWARD)
    scale = bits(scale)
    # What the job itself can write: the rest is added up behind it.
    nothing = np.empty(0, x.dtype)
    whole = has_contiguous_rows(dy) and has_contiguous_rows(x) and has_contiguous_rows(target)
    totals = [
        total if whole and total is not None and _is_flat(total, x.dtype) else nothing
        for total in (dgamma, dbeta)
    ]
    if whole:
        flags = (wanted, summing, wanted and past_caches(target, dy))
        arrays = (bits(dy), bits(x), scale, numbers, bits(target), sums, *map(bits, totals))
        job(*arrays, tile_rows, *flags, *crew_for(rows * n, tiles))
    else:
        for block in blocks(rows, n, tile_rows):
            parts = [np.ascontiguousarray(array[block]) for array in (dy, x)]
            result = np.empty_like(parts[1]) if wanted else target
            first, last = block.start // tile_rows, -(-block.stop // tile_rows)
            some = sums[first:last] if summing else sums
            arrays = (*map(bits, parts), scale, numbers[:, block], bits(result), some)
            flags = (wanted, summing, False)
            crew = crew_for(parts[0].size, last - first)
            job(*arrays, *map(bits, totals), tile_rows, *flags, *crew)
            if dx is not None:
                dx[block] = result
    for which, (given, written) in enumerate(zip((dgamma, dbeta), totals, strict=True)):
        if given is not None and given is not written:
            write_total(sums, which, given)


def _is_flat(total: Array, dtype: np.dtype[Any]) -> bool:
    return total.dtype == dtype and total.ndim == 1 and total.flags.c_contiguous
