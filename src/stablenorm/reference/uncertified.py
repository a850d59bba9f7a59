"""
The lowest rung: integers finish the rows and columns that float64 and pairs cannot certify.

With ``rounding="nearest"``, kernels send rows and columns here whose bounds contain a midpoint, ties above all; the NumPy
backend sends all. With any rounding, both send the rows that are out of the range of pairs.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.reference import exact
from stablenorm.reference.blocks import BLOCK, blocks
from stablenorm.reference.partial import (
    PARTIAL,
    ExactSum,
    as_partial,
    merged,
    round_sum,
    rounded,
)
from stablenorm.types import Array, Norm, Statistics

_FLOAT64 = np.dtype(np.float64)


@np.errstate(all="ignore")
def finish_forward(call: Forward, rows: Array, kept: Statistics | None) -> None:
    """Write y of these rows, and the statistics of rows that are out of range, whose rstd_lo is NaN."""
    norm, y = call.norm, call.y
    for i in rows.tolist():
        some, (x,) = _counted(call, i, call.x)
        row = _row_of(x, norm)
        if y is not None:
            gamma = _parameter(norm.gamma, 1, some, x)
            y[i] = 0
            y[i, some] = _affine(row, gamma, _parameter(norm.beta, 0, some, x), y.dtype)
        if kept is None or kept.rstd_lo is None:
            continue
        if np.isnan(kept.rstd[i]) or not np.isnan(kept.rstd_lo[i]):
            continue
        mean, kept.rstd[i] = (x[0], np.inf) if row is None else exact.statistics(row)
        for word, value in zip(
            (kept.mean, kept.mean_lo, kept.mean_tail), (mean, 0.0, 0.0), strict=True
        ):
            if word is not None:
                word[i] = value


@np.errstate(all="ignore")
def finish_backward(
    call: Backward, rows: Array, columns: Any, unsummed: Array | None = None, partial: Any = None
) -> None:
    """
    Write dx of some rows, and the uncertified `columns` of dgamma and dbeta, two rows of bool.

    `partial` are the sums over all rows but the `unsummed` ones; with these, all columns are written.
    """
    # The sums come first: dx may be written over dy.
    for k, total in enumerate((call.dgamma, call.dbeta)):
        if total is None:
            continue
        uncertified: Any = None if columns is None else columns[k]
        if unsummed is not None:
            part = _with_rows(call, k, unsummed, partial[k])
            if total.dtype == PARTIAL:
                total[...] = part
                continue
            total[...], uncertified = rounded(part, total.dtype)
            # A sum of 0 may lack terms that underflowed.
            uncertified = uncertified | (part["high"] == 0)
        elif total.dtype == PARTIAL:
            # The caller merges these, finds them uncertified, and asks for exact sums.
            total["error"][uncertified] = np.inf
            continue
        roots = dict[int, exact.Root]()
        for j, value in exact_sums(call, k, np.flatnonzero(uncertified)):
            total[j] = round_sum(value, total.dtype, roots)
    if call.dx is not None:
        for i in rows.tolist():
            _write_dx(call, i)


def _with_rows(call: Backward, which: int, rows: Array, partial: Array) -> Array:
    """Add the terms of some rows to partial sums, dgamma (0) or dbeta (1)."""
    norm = call.norm._replace(gamma_offset=0.0)
    for i in rows.tolist():
        some, (x, dy) = _counted(call, i, call.x, call.dy)
        high, low = np.zeros((2, call.x.shape[1]))
        if which == 1:
            high[some] = dy
        else:
            # dy xhat in two words: y with dy in the place of gamma, then what rounding took from it.
            row = _row_of(x, norm)
            high[some] = first = _affine(row, dy, np.zeros(len(x)), _FLOAT64)
            low[some] = _affine(row, dy, -first, _FLOAT64)
        error = np.abs(high) * 2.0**-104 + 2.0**-1070 if which == 0 else 0.0
        partial = merged(partial, as_partial(high, low, error))
    return partial


def _write_dx(call: Backward, i: int) -> None:
    norm = call.norm
    some, (x, dy) = _counted(call, i, call.x, call.dy)
    row, gamma = _row_of(x, norm), _parameter(norm.gamma, 1, some, x)
    dx = np.zeros(call.x.shape[1]) if call.dsum is None else call.dsum[i].astype(np.float64)
    extra = (0.0 if each is None else each[i] for each in (call.dmean, call.drstd))
    added = [_split(each) for each in (dx[some], *extra)]
    dx = dx.astype(call.dx.dtype)
    if row is not None and np.isfinite(gamma).all() and np.isfinite(dy).all():
        finite, infinite = zip(*added, strict=True)
        result = exact.dx_row(dy, row, gamma, dx.dtype, finite)
        extended = infinite[0] + infinite[1]
        if infinite[2]:
            extended = extended - infinite[2] * exact.signs(row)
        dx[some] = np.where(extended == 0, result, extended)
    else:
        dx[some] = np.nan
    call.dx[i] = dx


def exact_sums(call: Backward, which: int, columns: Array) -> Iterator[tuple[int, Any]]:
    """Yield columns of dgamma (0) or dbeta (1), and their exact sums; floats for infinity and NaN."""
    dy, x = call[:2]
    known: list[exact.Row] = []
    has_norm = _have_norms(call) if which == 0 and columns.size else np.ones(len(x), bool)
    step = max(1, BLOCK // max(len(x), 1))
    for some in (columns[start : start + step] for start in range(0, len(columns), step)):
        counted = True if call.where is None else call.where[:, some]
        values, extended = _split(np.where(counted, dy[:, some].astype(np.float64), 0.0))
        if which == 0:
            for i in np.flatnonzero((extended != 0).any(axis=1) & has_norm).tolist():
                own, (row,) = _counted(call, i, x)
                # 0 for elements that do not count.
                signs = np.zeros(x.shape[1])
                signs[own] = exact.signs(exact.Row(row, call.norm))
                extended[i] *= signs[some]
            extended[~has_norm] = np.nan
            extended = np.where(counted, extended, 0.0)
        total = extended.sum(axis=0)
        if which == 0 and not known and (total == 0).any():
            rows = (
                _counted(call, i, x)[1][0] if ok else np.zeros(1) for i, ok in enumerate(has_norm)
            )
            known = [exact.Row(row, call.norm, keep=False) for row in rows]
        others = np.where(counted, x[:, some].astype(np.float64), 0.0)
        for k, j in enumerate(some.tolist()):
            if total[k] != 0:
                yield j, float(total[k])
            elif which == 1:
                yield j, ExactSum.of_numbers(values[:, k])
            else:
                yield j, ExactSum.of_products(values[:, k], others[:, k], known)


# ---- one row ----


def _counted(call: Any, i: int, *arrays: Array) -> tuple[Any, list[Array]]:
    """Return the columns of a row that count, and the arrays there in float64."""
    some = slice(None) if call.where is None else call.where[i]
    return some, [each[i, some].astype(np.float64) for each in arrays]


def _parameter(parameter: Array | None, default: float, some: Any, row: Array) -> Array:
    if parameter is None:
        return np.full(len(row), float(default))
    values: Array = parameter.ravel()[some].astype(np.float64)
    return values


def _row_of(x: Array, norm: Norm) -> exact.Row | None:
    return exact.Row(x, norm) if _has_norm(x, norm) else None


def _has_norm(x: Array, norm: Norm) -> bool:
    """Tell whether a row is finite, and has a variance if eps is 0."""
    same = x[0] if norm.kind == "layer" else 0.0
    return bool(np.isfinite(x).all() and (norm.eps != 0 or (x != same).any()))


def _have_norms(call: Backward) -> Array:
    if call.where is None and call.norm.eps != 0:
        parts = [slice(0), *blocks(call.x.shape)]
        return np.concatenate([np.isfinite(call.x[rows]).all(axis=1) for rows in parts])
    every = (_counted(call, i, call.x)[1][0] for i in range(len(call.x)))
    return np.fromiter((_has_norm(row, call.norm) for row in every), bool, len(call.x))


def _affine(row: exact.Row | None, gamma: Array, beta: Array, dtype: np.dtype[Any]) -> Array:
    """Return y of a row; infinite gamma and beta, and NaN, follow the extended reals."""
    if row is None:
        return np.full(len(gamma), np.nan, dtype)
    (scale, far), (shift, away) = _split(gamma), _split(beta)
    result = exact.y_row(row, scale, shift, dtype)
    if far.any() or away.any():
        # The sign of xhat decides that of an infinite product; 0 * inf is NaN, of which there is one.
        extended = np.where(far == 0, 0.0, far * exact.signs(row)) + away
        odd = (far != 0) | (away != 0)
        result[odd] = np.where(np.isnan(extended), np.nan, extended)[odd]
    return result


def _split(values: Any) -> tuple[Array, Array]:
    """Return the finite values and the others, zeros in the places of each other."""
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0), np.where(finite, 0.0, values)
