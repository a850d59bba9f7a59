"""
The backend "numpy": the equations in NumPy on (rows, n), in float64, rounded once; everything else copies them.

`equations` has them; `uncertified` does rows that leave the range of float64, and with rounding="nearest" all, with integers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.records import Array, Norm, Statistics
from stablenorm.reference import equations, uncertified
from stablenorm.reference.equations import project, round_to, sum_rows, widened
from stablenorm.reference.sums import PARTIAL, as_partial, merged

__all__ = ["add", "backward", "forward", "lost", "project"]


@np.errstate(all="ignore")
def forward(call: Forward) -> Statistics:
    """Write y, and return the statistics."""
    if call.residual is not None:
        add(call.x, call.residual, call.total)
        call = call._replace(x=call.total)
    norm, rows_of_x = _widened(call.norm), len(call.x)
    mean, rest = (np.zeros((rows_of_x, 1)) if norm.kind == "layer" else None for _ in range(2))
    whole = Statistics(mean, rest, np.zeros((rows_of_x, 1)))

    def do(rows: slice) -> None:
        y, statistics = equations.forward(call.x[rows].astype(np.float64, order="C"), norm)
        call.y[rows] = round_to(y, call.y.dtype)
        for word, value in zip(whole, statistics, strict=True):
            if word is not None:
                word[rows] = value

    rare = _by_blocks(call.x.shape, do)
    again = rare | (norm.rounding == "nearest")
    if all(v is None or np.isfinite(v).all() for v in (norm.gamma, norm.beta)):
        again |= lost(call.y, call.x)
    whole = whole.of_rows((slice(None), 0))
    uncertified.finish_forward(call, np.flatnonzero(again), whole, rare)
    return whole


@np.errstate(all="ignore")
def backward(call: Backward) -> None:
    """Write the gradients that are wanted."""
    norm, (count, n), is_nearest = (
        _widened(call.norm),
        call.x.shape,
        call.norm.rounding == "nearest",
    )
    totals = [np.zeros(n, PARTIAL) for _ in range(2)]

    def do(rows: slice) -> None:
        x, dy = (v[rows].astype(np.float64, order="C") for v in (call.x, call.dy))
        statistics = call.statistics.of_rows((rows, None))
        xhat = equations.restore(x, statistics)
        of_rows = sum_rows(dy * xhat), sum_rows(dy)
        if call.dx is not None:
            dx = equations.backward(dy, xhat, statistics.rstd, norm)
            if call.dsum is not None:
                dx += call.dsum[rows]
            call.dx[rows] = round_to(dx, call.dx.dtype)
        for k, total in enumerate(of_rows):
            totals[k] = merged(totals[k], as_partial(total, 0.0, np.nan))

    rare = np.ones(count, bool) if is_nearest else _by_blocks(call.x.shape, do)
    columns, unsummed = np.full((2, n), is_nearest), np.flatnonzero(rare)
    uncertified.finish_sums(call, columns, unsummed, None if is_nearest else totals)
    if call.dx is not None:
        uncertified.write_dx(call, np.flatnonzero(rare | lost(call.dx, call.x, call.dy)))


def _by_blocks(shape: tuple[int, ...], do: Callable[[slice], None]) -> Array:
    """
    Do blocks of rows; return which rows leave the range of float64, and are not done.

    The flags of the processor tell it. WebAssembly has none: there such rows are what float64 makes of them.
    """
    rare, todo = np.zeros(shape[0], bool), [*equations.blocks(shape)]
    for rows in todo:
        try:
            with np.errstate(over="raise", under="raise"):
                do(rows)
        except FloatingPointError:
            first, last, _ = rows.indices(shape[0])
            rare[rows] = last - first == 1
            todo += [slice(i, i + 1) for i in range(first, last) if last - first > 1]
    return rare


@np.errstate(all="ignore")
def add(x: Array, residual: Array, total: Array) -> None:
    """Write ``x + residual``, rounded once, into `total`; arrays of one shape, of any layout."""
    # One rounding, for 16 bits by way of float32: 24 bits are 2 * 11 + 2.
    np.add(x, residual, out=total, dtype=total.dtype)


def lost(result: Array, *inputs: Array) -> Array:
    """Tell which rows of finite inputs have no finite result: it may be the rounding errors of huge terms that cancel."""
    rows: Any = ~np.isfinite(result).all(axis=1)
    some = np.flatnonzero(rows)
    for array in inputs:
        rows[some] &= np.isfinite(array[some]).all(axis=1)
    return rows  # type: ignore[no-any-return]


def _widened(norm: Norm) -> Norm:
    """Return `norm` with gamma and beta in float64."""
    return norm._replace(gamma=widened(norm.gamma), beta=widened(norm.beta))
