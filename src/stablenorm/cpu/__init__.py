"""
The CPU kernels: `reference.forward` and `reference.backward`, compiled by Numba.

They check nothing: that is done above. Rows are dealt out in tiles whose number and bounds depend on the
shape alone, so that no bit depends on the number of threads. `rows` has the equations of float16,
bfloat16 and float32, `wide` those of calls of which something is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm import reference
from stablenorm.cpu import extreme
from stablenorm.cpu.jobs import (
    COPY,
    REFERENCE,
    backward_plan,
    forward_plan,
    sums_from,
    sums_of,
    total_job,
)
from stablenorm.cpu.layout import blocks, flat, joined
from stablenorm.cpu.pool import pool_for
from stablenorm.types import Array, Gradients, Statistics

# An element in double-double takes as long as so many others.
_COST = 4

_new: Any = tuple.__new__

_NO_NUMBERS, _NO_MARKS = np.empty(0), np.empty(0, np.uint8)


def forward(x: Any, gamma: Array | None, beta: Array | None, eps: float, y: Any) -> Statistics:
    """Do what `reference.forward` does."""
    rows, n = shape = x.shape
    scale, shift = flat(gamma, n, 1.0, x.dtype), flat(beta, n, -0.0, x.dtype)
    plan = forward_plan(x.dtype, scale.dtype, shift.dtype, shape)
    parameters = scale, shift, eps
    numbers, tails, marks = np.empty((3, rows)), _NO_NUMBERS, _NO_MARKS
    if plan.wide:
        numbers, tails, marks = np.empty((4, rows)), np.empty(rows), np.empty(rows, np.uint8)
    words, helpers = pool_for(_COST * rows * n if plan.wide else rows * n, plan.tiles)
    rest = plan.scratch(1 + helpers), plan.words, words, helpers
    state = COPY
    if type(x) is type(y) is np.ndarray:
        state = plan.job(x, *parameters, y, numbers, tails, marks, *rest)
    if state == COPY:
        for block in blocks(rows, n, plan.tile_rows):
            part = np.ascontiguousarray(x[block])
            # Rows that are extreme are still needed, if y is x.
            result = part.copy()
            kept = numbers[:, block], tails[block], marks[block]
            state = plan.job(part, *parameters, result, *kept, *rest)
            if state == REFERENCE:
                break
            y[block] = result
    if state == REFERENCE:
        return reference.forward(x, gamma, beta, eps, y)
    if not plan.wide:
        # As NamedTuples make themselves, without the keyword handling, which takes twice as long.
        return _new(Statistics, (numbers[0], numbers[1], numbers[2], None, None, None))
    found = Statistics(numbers[0], numbers[1], numbers[2], numbers[3], tails)
    # Counting takes a quarter of the time of any(), which is 1.3 microseconds of a small call.
    if np.count_nonzero(marks):
        found = extreme.forward(x, gamma, beta, eps, y, found, marks)
    # Dropped where no row needs it, as in the reference.
    return found if np.count_nonzero(tails) else found._replace(mean_tail=None)


def backward(dy: Any, x: Any, gamma: Array | None, statistics: Statistics, out: Gradients) -> None:
    """Do what `reference.backward` does."""
    dx, dgamma, dbeta = out
    summing = dgamma is not None or dbeta is not None
    if statistics.rstd_lo is None:
        if dy.dtype.type is np.float64:
            # What the forward kept, as nothing of it was float64, is too little for double-double.
            reference.backward(dy, x, gamma, statistics, out)
        else:
            _run(dy, x, gamma, statistics, out, _NO_MARKS)
        return
    if dx is not None and summing and np.may_share_memory(dy, dx):
        # Extreme rows need all of dy for the sums. So these first: then dx may overwrite it.
        backward(dy, x, gamma, statistics, Gradients(None, dgamma, dbeta))
        backward(dy, x, gamma, statistics, Gradients(dx, None, None))
        return
    marks = extreme.marks_of(statistics)
    if not _run(dy, x, gamma, statistics, out, marks):
        reference.backward(dy, x, gamma, statistics, out)
        return
    if summing and np.count_nonzero(marks):
        reference.backward(dy, x, gamma, statistics, Gradients(None, dgamma, dbeta))
    if dx is not None:
        extreme.write_dx(dy, x, gamma, statistics, dx, marks)


def _run(
    dy: Any, x: Any, gamma: Array | None, statistics: Statistics, out: Gradients, marks: Array
) -> bool:
    """Compute what is wanted, but for rows that are marked; False, and nothing done, if it cannot be."""
    rows, n = shape = x.shape
    dx, dgamma, dbeta = out
    wanted, summing = dx is not None, dgamma is not None or dbeta is not None
    wide = statistics.rstd_lo is not None
    scale = flat(gamma, n, 1.0, x.dtype)
    plan = backward_plan(dy.dtype, x.dtype, scale.dtype, wide, summing, shape)
    target = np.empty((1, 1), x.dtype) if dx is None else dx
    sums = sums_of(plan.tiles if summing else 0, n)
    numbers = joined(statistics[: 4 if wide else 3])
    tails = _NO_NUMBERS if statistics.mean_tail is None else statistics.mean_tail
    words, helpers = pool_for(_COST * rows * n if wide else rows * n, plan.tiles)
    rest = plan.scratch(1 + helpers), plan.words, words, helpers
    state = COPY
    if type(dy) is type(x) is type(target) is np.ndarray:
        state = plan.job(dy, x, scale, numbers, tails, marks, target, wanted, sums, *rest)
    if state == COPY:
        for block in blocks(rows, n, plan.tile_rows):
            parts = np.ascontiguousarray(dy[block]), np.ascontiguousarray(x[block])
            # Rows that are marked are still needed, if dx is dy.
            result = np.array(dx[block], order="C") if dx is not None else target
            kept = numbers[:, block], tails[block], marks[block]
            here = sums_from(sums, block.start // plan.tile_rows, n) if summing else sums
            state = plan.job(*parts, scale, *kept, result, wanted, here, *rest)
            if state == REFERENCE:
                break
            if dx is not None:
                dx[block] = result
    if state == REFERENCE:
        return False
    if summing:
        _write_totals(sums, plan.tiles, n, dgamma, dbeta)
    return True


def _write_totals(sums: Array, tiles: int, n: int, dgamma: Any, dbeta: Any) -> None:
    """Add up the sums of all tiles."""
    if _is_flat(dgamma) and _is_flat(dbeta) and dgamma.dtype == dbeta.dtype:
        total_job(dgamma.dtype)(sums, n, tiles, dgamma, dbeta)
        return
    for which, total in enumerate((dgamma, dbeta)):
        if total is not None:
            pair = [np.empty(0, total.dtype)] * 2
            pair[which] = np.empty(n, total.dtype)
            total_job(total.dtype)(sums, n, tiles, *pair)
            total[...] = pair[which].reshape(total.shape)


def _is_flat(total: Any) -> bool:
    return total is not None and total.ndim == 1 and total.flags.c_contiguous
