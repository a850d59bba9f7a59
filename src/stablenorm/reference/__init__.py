"""
The backend "numpy": the equations in NumPy on (rows, n), in float64, rounded once; everything else copies them.

`equations` has them; `uncertified` does rows that are out of range, and with rounding="nearest" all, with integers.
"""

from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.reference import equations, uncertified
from stablenorm.reference.equations import project, round_to, sum_rows
from stablenorm.reference.sums import PARTIAL, as_partial, merged, rounded
from stablenorm.types import Array, Norm, Statistics

__all__ = ["add", "backward", "forward", "lost", "project"]

# Products of three numbers within these, and sums of their squares, stay in the range of float64.
LARGEST, SMALLEST = 2.0**300, 2.0**-300


@np.errstate(all="ignore")
def forward(call: Forward) -> Statistics:
    """Write y, and return the statistics."""
    if call.residual is not None:
        add(call.x, call.residual, call.total)
        call = call._replace(x=call.total)
    norm, rare, words = _widened(call.norm), np.ones(len(call.x), bool), []
    for rows in equations.blocks(call.x.shape):
        x = call.x[rows].astype(np.float64, order="C")
        y, statistics = equations.forward(x, norm)
        call.y[rows] = round_to(y, call.y.dtype)
        rare[rows] = _out_of_range(statistics.rstd, x)
        words.append(statistics)
    whole = Statistics._make(
        None if parts[0] is None else np.concatenate(parts).ravel()
        for parts in zip(*words, strict=True)
    )
    again = rare | _needs_integers(norm)
    if all(v is None or np.isfinite(v).all() for v in (norm.gamma, norm.beta)):
        again |= lost(call.y, call.x)
    uncertified.finish_forward(call, np.flatnonzero(again), whole, rare)
    return whole


@np.errstate(all="ignore")
def backward(call: Backward) -> None:
    """Write the gradients that are wanted."""
    norm, rare = _widened(call.norm), np.ones(len(call.x), bool)
    totals = [np.zeros(call.x.shape[1], PARTIAL) for _ in range(2)]
    for rows in () if norm.rounding == "nearest" else equations.blocks(call.x.shape):
        x, dy = (v[rows].astype(np.float64, order="C") for v in (call.x, call.dy))
        statistics = call.statistics.of_rows((rows, None))
        xhat = equations.restore(x, statistics)
        rare[rows] = out = _out_of_range(statistics.rstd, x, dy)
        for i in np.flatnonzero(out).tolist():
            xhat[i] = uncertified.xhat_row(x[i], norm)
        for k, terms in enumerate((dy * xhat, dy)):
            totals[k] = merged(totals[k], as_partial(sum_rows(terms), 0.0, np.nan))
        if call.dx is not None:
            dx = equations.backward(dy, xhat, statistics.rstd, norm)
            if call.dsum is not None:
                dx += call.dsum[rows]
            call.dx[rows] = round_to(dx, call.dx.dtype)
    columns = np.ones((2, call.x.shape[1]), bool)
    for k, result in enumerate((call.dgamma, call.dbeta)):
        if result is not None and norm.rounding != "nearest":
            # A sum that is not finite may have left the range of float64 in between.
            columns[k] = ~np.isfinite(totals[k]["high"])
            result[...] = totals[k] if call.partial else rounded(totals[k], result.dtype)[0]
    uncertified.finish_sums(call, columns, columns[:0], None)
    if call.dx is not None:
        rare |= lost(call.dx, call.x, call.dy) | _needs_integers(norm)
        uncertified.write_dx(call, np.flatnonzero(rare))


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
    gamma, beta = (
        v if v is None else v.ravel().astype(np.float64) for v in (norm.gamma, norm.beta)
    )
    return norm._replace(gamma=gamma, beta=beta)


def _needs_integers(norm: Norm) -> bool:
    """Tell whether integers do all rows: with rounding="nearest", or if gamma or beta is out of range."""
    rare = (_outside(v).any() for v in (norm.gamma, norm.beta) if v is not None)
    return norm.rounding == "nearest" or any(rare)


def _out_of_range(*arrays: Array) -> Array:
    """Tell which rows have a number that is out of range."""
    rows: Array = np.logical_or.reduce([_outside(array).any(axis=1) for array in arrays])
    return rows


def _outside(values: Array) -> Array:
    """Tell which numbers are out of range. Infinity and NaN are not: they spoil their row in float64 as they should."""
    size = np.abs(values)
    outside: Array = ((size > LARGEST) & (size < np.inf)) | ((size < SMALLEST) & (size > 0))
    return outside
