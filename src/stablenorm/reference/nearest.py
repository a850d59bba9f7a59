"""
``rounding="nearest"``: every element is the exact one rounded to nearest, ties to even.

Here integers compute every element (`exact`), about a microsecond each. They see ties, and have no range: so kernels
hand over what they cannot certify, or have no range for.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.reference import equations, exact
from stablenorm.reference.equations import _BLOCK, _blocks
from stablenorm.reference.partial import PARTIAL, merged
from stablenorm.types import Array, Norm, Statistics


def forward(call: Forward) -> Statistics:
    """Do what `equations.forward` does, rounded to nearest."""
    x, norm, y = call[:3]
    statistics = equations.forward(call._replace(y=None))
    if y is None:
        return statistics
    gamma, beta = _parameter(norm.gamma, x.shape[1], 1.0), _parameter(norm.beta, x.shape[1], 0.0)
    finite = np.isfinite(gamma) & np.isfinite(beta)
    scale, shift = np.where(finite, gamma, 0.0), np.where(finite, beta, 0.0)
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            result = np.full(x[rows].shape, np.nan, x.dtype)
            for i, row in _defined(x[rows], norm):
                result[i] = exact.y_row(row, scale, shift, norm, x.dtype)
                if not finite.all():
                    # The sign of xhat decides that of an infinite product.
                    sign = np.where(np.isinf(gamma), exact.signs(row, norm), 0.0)
                    extended = np.where(np.isfinite(gamma), 0.0, gamma) * sign + beta
                    result[i, ~finite] = np.where(np.isnan(extended), np.nan, extended)[~finite]
            y[rows] = result
    return statistics


def backward(call: Backward) -> None:
    """
    Do what `equations.backward` does, every element rounded to nearest, from x and eps.

    dx may be dy itself: the sums over rows come first.
    """
    sums, columns = (call.dgamma, call.dbeta), np.arange(call.x.shape[-1])
    if call.sums == "exact":
        for i, result in enumerate(sums):
            for j, total in _exact(
                call, i, columns, None if result is None else result.ravel() != 0
            ):
                result.flat[j] = total
    else:
        for total, values in zip(sums, columns_of_sums(call, columns), strict=True):
            if total is not None and values is not None:
                total[...] = merged(total, values) if call.sums == "pairs" else values
    if call.dx is not None:
        with np.errstate(all="ignore"):
            _write_dx(call)


def _write_dx(call: Backward) -> None:
    dy, x, norm, _, dx, _, _, dsum = call[:8]
    gamma = _parameter(norm.gamma, x.shape[1], 1.0)
    for rows in _blocks(x.shape):
        cotangent = dy[rows].astype(np.float64)
        addend, infinite = _split(np.zeros(cotangent.shape) if dsum is None else dsum[rows])
        result = np.full(cotangent.shape, np.nan, x.dtype)
        for i, row in _defined(x[rows], norm):
            if np.isfinite(gamma).all() and np.isfinite(cotangent[i]).all():
                result[i] = exact.dx_row(cotangent[i], row, gamma, norm, x.dtype, addend[i])
                result[i] = np.where(infinite[i] == 0, result[i], infinite[i])
        dx[rows] = result


def columns_of_sums(call: Backward, columns: Array) -> tuple[Array | None, Array | None]:
    """Return some columns of dgamma and dbeta, as far as they are wanted: rounded to nearest, or as partial sums."""
    found: list[Array | None] = [None, None]
    for i, result in enumerate((call.dgamma, call.dbeta)):
        if result is None:
            continue
        dtype = PARTIAL if call.sums == "pairs" else result.dtype
        values, roots = np.zeros(len(columns), dtype), dict[int, exact.Root]()
        infinite = _infinite(call, i, columns)
        for j, total in _exact(call, i, columns, infinite == 0):
            values[j] = total.partial() if dtype == PARTIAL else total.rounded(dtype, roots)
        (values["high"] if dtype == PARTIAL else values)[infinite != 0] = infinite[infinite != 0]
        found[i] = values
    return found[0], found[1]


def _infinite(call: Backward, i: int, columns: Array) -> Array:
    """Return what is not finite in the terms of each column of dgamma (0) or dbeta (1), added up; else 0."""
    dy, x, norm = call[:3]
    total = np.zeros(len(columns))
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            _, infinite = _split(dy[rows][:, columns])
            if i == 0:
                defined = dict(_defined(x[rows], norm))
                if len(defined) < len(infinite):
                    return np.full(len(columns), np.nan)
                # The sign of xhat decides that of an infinite product.
                for k in np.flatnonzero((infinite != 0).any(axis=1)).tolist():
                    infinite[k] *= np.array(exact.signs(defined[k], norm))[columns]
            total += infinite.sum(axis=0)
    # There is one NaN.
    return np.where(np.isnan(total), np.nan, total)


def _exact(
    call: Backward, i: int, columns: Array, wanted: Any
) -> Iterator[tuple[int, exact.ExactSum]]:
    """Yield the places that are `wanted`, and the exact dgamma (0) or dbeta (1) of these columns."""
    dy, x, norm = call[:3]
    if wanted is None or not wanted.any():
        return
    if i == 1:
        for j, (values,) in _columns(columns, wanted, dy):
            yield j, exact.ExactSum.of_numbers(values)
        return
    blocks = (x[rows].astype(np.float64) for rows in _blocks(x.shape))
    known = [exact.Row(row, norm, keep=False) for block in blocks for row in block]
    for j, (values, others) in _columns(columns, wanted, dy, x):
        yield j, exact.ExactSum.of_products(values, others, known)


def _columns(columns: Array, wanted: Array, *matrices: Array) -> Iterator[tuple[int, Any]]:
    """Yield the places that are `wanted`, and those columns of the matrices in float64."""
    places, shape = np.flatnonzero(wanted), matrices[0].shape
    # As many as a block holds.
    step = max(1, _BLOCK // max(shape[0], 1))
    for some in (places[start : start + step] for start in range(0, len(places), step)):
        # With no rows only the empty first slice remains.
        blocks = [slice(0), *_blocks(shape)]
        parts = [[m[rows][:, columns[some]] for rows in blocks] for m in matrices]
        whole = (np.concatenate(part).astype(np.float64).T for part in parts)
        yield from zip(some.tolist(), zip(*whole, strict=True), strict=True)


def _defined(x: Array, norm: Norm) -> Iterator[tuple[int, Array]]:
    """Yield the rows that have a norm, in float64: all is finite, and not of zero variance with eps = 0."""
    x = x.astype(np.float64)
    same = x[:, :1] if norm.kind == "layer" else np.zeros((1, 1))
    defined = np.isfinite(x).all(axis=1)
    if norm.eps == 0:
        defined &= (x != same).any(axis=1)
    return ((i, x[i]) for i in np.flatnonzero(defined).tolist())


def _split(values: Array) -> tuple[Array, Array]:
    """Return in float64 what is finite and what is not, zeros between."""
    values = values.astype(np.float64)
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0), np.where(finite, 0.0, values)


def _parameter(parameter: Array | None, n: int, default: float) -> Array:
    return np.full(n, default) if parameter is None else parameter.reshape(-1).astype(np.float64)
