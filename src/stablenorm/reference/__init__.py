"""
The equations in NumPy on (rows, n), in float64 or double-double, rounded once; everything else copies them.

Residuals are added here. `blocks` does the rest by `equations`, and `uncertified` does rows
that are out of range, and with rounding="nearest" all, with integers.
"""

from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward, change
from stablenorm.reference import blocks, uncertified
from stablenorm.reference.blocks import SMALLEST, double_backward, exceeds_range, jvp
from stablenorm.reference.doubledouble import PARTIAL
from stablenorm.reference.equations import project
from stablenorm.types import Array, Statistics

__all__ = ["backward", "double_backward", "forward", "jvp", "project"]


def forward(call: Forward) -> Statistics:
    """Do a forward of one sample: write y, and return the statistics."""
    if call.residual is not None:
        blocks.add(call.x, call.residual, call.total)
        call = call._replace(x=call.total, residual=None, total=None)
    every = _needs_integers(call, call.norm.beta)
    kept = blocks.forward(call._replace(y=None) if every else call)
    uncertified.finish_forward(call, np.flatnonzero(kept.out_of_range | every), kept)
    return kept


def backward(call: Backward) -> None:
    """Do a backward of one sample: write the gradients that are wanted."""
    sums, n = (call.dgamma, call.dbeta), call.x.shape[1]
    if call.sums == "exact":
        for k, result in enumerate(sums):
            columns = np.flatnonzero(() if result is None else result != 0)
            for j, total in uncertified.exact_sums(call, k, columns):
                result[j] += total
        return
    every, rows = _needs_integers(call), np.arange(len(call.x))
    partial: Any = sums
    if not every:
        out = blocks.out_of_range(call)
        if not out.any():
            blocks.backward(call)
            return
        inside, rows = np.flatnonzero(~out), np.flatnonzero(out)
        some = change(call, lambda array: array[inside], lambda array: array[inside], inside)
        if call.sums == "rounded":
            partial = [None if each is None else np.zeros(n, PARTIAL) for each in sums]
        blocks.backward(some._replace(dgamma=partial[0], dbeta=partial[1], sums="pairs"))
        if call.dx is not None:
            call.dx[inside] = some.dx
    unsummed = rows[:0] if every else rows
    uncertified.finish_sums(call, np.full((2, n), every), unsummed, partial)
    if call.dx is not None:
        uncertified.write_dx(call, rows)


def tile_rows(rows: int, n: int, nearest: bool) -> int:  # noqa: ARG001
    """Return the unit of rows in which a call may be cut into blocks: all, since the order of the sums depends on them."""
    return rows


def _needs_integers(call: Forward | Backward, beta: Array | None = None) -> bool:
    """Tell whether integers do all rows: with rounding="nearest", or if gamma or beta is out of range."""
    norm = call.norm
    if norm.rounding == "nearest":
        return True
    if call.x.dtype == np.float64:
        gamma = norm.gamma
        if gamma is not None and norm.gamma_offset:
            gamma = gamma.astype(np.float64) + norm.gamma_offset
        return exceeds_range(gamma, least=SMALLEST) or exceeds_range(beta)
    # float64 holds the products of narrower numbers, and leaves their infinities as they are.
    some = (each for each in (norm.gamma, beta) if each is not None and each.dtype == np.float64)
    return exceeds_range(*some)
