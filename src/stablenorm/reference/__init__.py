"""
The equations in NumPy on (rows, n), in float64 or double-double, rounded once; everything else copies them.

`blocks` does a call by `equations`, and `uncertified` does rows that are out of range, and with rounding="nearest" all,
with integers.
"""

from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward, of_rows
from stablenorm.reference import blocks, uncertified
from stablenorm.reference.blocks import double_backward, jvp
from stablenorm.reference.doubledouble import PARTIAL
from stablenorm.reference.equations import project
from stablenorm.types import Array, Statistics

__all__ = ["backward", "double_backward", "forward", "jvp", "lost", "project"]


def forward(call: Forward) -> Statistics:
    """Do a forward of one sample: write y, and return the statistics."""
    if call.residual is not None:
        blocks.add(call.x, call.residual, call.total)
        call = call._replace(x=call.total, residual=None, total=None)
    all_rows = blocks.needs_integers(call, call.norm.beta)
    statistics = blocks.forward(call._replace(y=None) if all_rows else call)
    again = statistics.out_of_range | all_rows
    if call.y is not None and not all_rows:
        again |= lost(call.y, *_counted(call.where, call.x))
    uncertified.finish_forward(call, np.flatnonzero(again), statistics)
    return statistics


def lost(result: Array, *inputs: Array) -> Array:
    """Tell which rows of finite inputs have no finite result: it may be the rounding errors of huge terms that cancel."""
    rows: Any = ~np.isfinite(result).all(axis=1)
    some = np.flatnonzero(rows)
    for array in inputs:
        rows[some] &= np.isfinite(array[some]).all(axis=1)
    return rows  # type: ignore[no-any-return]


def _counted(where: Array | None, *arrays: Array) -> list[Array]:
    return [array if where is None else np.where(where, array, 0) for array in arrays]


def backward(call: Backward) -> None:
    """Do a backward of one sample: write the gradients that are wanted."""
    sums, n = (call.dgamma, call.dbeta), call.x.shape[1]
    if call.sums == "exact":
        for k, result in enumerate(sums):
            columns = np.flatnonzero(() if result is None else result != 0)
            for j, total in uncertified.exact_sums(call, k, columns):
                result[j] += total
        return
    all_rows, rows = blocks.needs_integers(call), np.arange(len(call.x))
    partial: Any = sums
    if not all_rows:
        out = blocks.out_of_range(call)
        if not out.any():
            if call.dx is not None and np.may_share_memory(call.dx, call.dy):
                call = call._replace(dy=call.dy.copy())
            blocks.backward(call)
            if call.dx is not None:
                uncertified.write_dx(
                    call, np.flatnonzero(lost(call.dx, *_counted(call.where, call.x, call.dy)))
                )
            for k, total in enumerate(sums):
                if total is not None and call.sums == "rounded":
                    columns = np.flatnonzero(np.isinf(total))
                    total[...] = uncertified.decided(
                        total, uncertified.exact_sums(call, k, columns)
                    )
            return
        inside, rows = np.flatnonzero(~out), np.flatnonzero(out)
        of_inside = of_rows(call, inside)
        if call.sums == "rounded":
            partial = [None if total is None else np.zeros(n, PARTIAL) for total in sums]
        blocks.backward(of_inside._replace(dgamma=partial[0], dbeta=partial[1], sums="pairs"))
        if call.dx is not None:
            call.dx[inside] = of_inside.dx
    unsummed = rows[:0] if all_rows else rows
    uncertified.finish_sums(call, np.full((2, n), all_rows), unsummed, partial)
    if call.dx is not None:
        uncertified.write_dx(call, rows)


def tile_rows(rows: int, n: int, nearest: bool) -> int:  # noqa: ARG001
    """Return the unit of rows in which a call may be cut: all, which decide the order of the sums; exact sums have none."""
    return 1 if nearest else rows
