"""
The lowest rung: integers do the rows and columns that float64 and pairs cannot certify.

With ``rounding="nearest"``, kernels send rows and columns here whose bounds contain a midpoint, ties above all; the NumPy
backend sends all. With any rounding, both send the rows that are out of range.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.reference import exact
from stablenorm.reference.equations import BLOCK, FLOAT64
from stablenorm.reference.sums import ExactSum, as_partial, decide, merged, rounded, split
from stablenorm.types import Array, Norm, Statistics


@np.errstate(all="ignore")
def finish_forward(call: Forward, rows: Array, stats: Statistics | None, lost: Any) -> None:
    """Write y of these rows, and the statistics of those that are `lost`."""
    for i in rows.tolist():
        row, x = _row_of(call.x[i], call.norm)
        gamma, beta = _parameters(call)
        call.y[i] = _affine(row, gamma, beta, call.y.dtype)
        if stats is None or not lost[i]:
            continue
        mean, stats.rstd[i] = (x[0], np.inf) if row is None else exact.statistics(row)
        if not np.isfinite(x).all():
            mean = stats.rstd[i] = np.nan
        for word, value in ((stats.mean, mean), (stats.mean_lo, 0.0), (stats.mean_tail, 0.0)):
            if word is not None:
                word[i] = value


@np.errstate(all="ignore")
def finish_sums(call: Backward, columns: Array, unsummed: Array, partial: Any) -> None:
    """
    Write the uncertified `columns` of dgamma and dbeta, two rows of bool.

    With `unsummed` rows, write all columns: `partial` are the sums over all rows but these.
    """
    for k, total in enumerate((call.dgamma, call.dbeta)):
        if total is None:
            continue
        uncertified = columns[k]
        if unsummed.size:
            part = _with_rows(call, k, unsummed, partial[k])
            if call.partial:
                total[...] = part
                continue
            total[...], uncertified = rounded(part, total.dtype)
            # A sum of 0 may lack terms that underflowed.
            uncertified |= part["high"] == 0
        if call.partial:
            # The caller merges these, finds them uncertified, and asks for exact sums.
            total["error"][uncertified] = np.inf
        else:
            decide(total, exact_sums(call, k, np.flatnonzero(uncertified)))


def _with_rows(call: Backward, which: int, rows: Array, partial: Array) -> Array:
    """Add the terms of some rows to partial sums, dgamma (0) or dbeta (1)."""
    for i in rows.tolist():
        high = dy = call.dy[i].astype(np.float64)
        low: Any = 0.0
        error: Any = 0.0
        if which == 0:
            # dy xhat in two words: y with dy in the place of gamma, then what rounding took from it.
            row = _row_of(call.x[i], call.norm)[0]
            high = _affine(row, dy, np.zeros_like(dy), FLOAT64)
            low = _affine(row, dy, -high, FLOAT64)
            error = np.abs(high) * 2.0**-104 + 2.0**-1070
        partial = merged(partial, as_partial(high, low, error))
    return partial


@np.errstate(all="ignore")
def write_dx(call: Backward, rows: Array) -> None:
    """Write dx of some rows."""
    gamma, _ = _parameters(call)
    for i in rows.tolist():
        row, _ = _row_of(call.x[i], call.norm)
        dy = call.dy[i].astype(np.float64)
        if row is None or not (np.isfinite(gamma).all() and np.isfinite(dy).all()):
            call.dx[i] = np.nan
            continue
        dsum = np.zeros_like(dy) if call.dsum is None else call.dsum[i].astype(np.float64)
        finite, infinite = split(dsum)
        result = exact.dx_row(dy, row, gamma, call.dx.dtype, finite)
        call.dx[i] = np.where(infinite == 0, result, infinite)


def xhat_row(x: Array, norm: Norm) -> Array:
    """Return xhat of a row in float64."""
    return _affine(_row_of(x, norm)[0], np.ones(len(x)), np.zeros(len(x)), FLOAT64)


def exact_sums(call: Backward, which: int, columns: Array) -> Iterator[tuple[int, ExactSum]]:
    """Yield columns of dgamma (0) or dbeta (1), and their exact sums."""
    dy, x = call.dy, call.x
    known: dict[int, Any] = {}
    # An infinite rstd does not tell that a row has no norm: it may have left the range of float64.
    lost = ~np.isfinite(call.statistics.rstd)
    for i in np.flatnonzero(lost).tolist() if which == 0 and columns.size else ():
        lost[i] = _row_of(x[i], call.norm)[0] is None
    step = max(1, BLOCK // max(len(x), 1))
    for block in (columns[start : start + step] for start in range(0, len(columns), step)):
        values = dy[:, block].astype(np.float64)
        if which == 0:
            values[lost] = np.nan
        are_nan: Any = np.isnan(values).any(axis=0).tolist()
        pairs = zip(block.tolist(), values.T, x[:, block].T, are_nan, strict=True)
        for j, column, other, is_nan in pairs:
            if is_nan:
                yield j, ExactSum(0, {}, np.nan)
                continue
            if which == 1:
                yield j, ExactSum.of_numbers(column)
                continue
            # Rows with infinity decide alone.
            infinite = np.isinf(column)
            rows = np.flatnonzero(infinite if infinite.any() else column).tolist()
            for i in rows:
                if i not in known:
                    # Without the integers, which would fill the memory for many rows.
                    known[i] = _row_of(x[i], call.norm, keep=False)[0]
            others = other[rows].astype(np.float64)
            yield j, ExactSum.of_products(column[rows], others, [known[i] for i in rows])


# ---- one row ----


def _row_of(x: Array, norm: Norm, keep: bool = True) -> tuple[exact.Row | None, Array]:
    """Return a row, None if it has no norm, and its elements in float64."""
    x = x.astype(np.float64)
    row = exact.Row(x, norm, keep) if np.isfinite(x).all() else None
    # A row without variance has no norm if eps is 0.
    return row if row and row.radicand else None, x


def _parameters(call: Any) -> list[Array]:
    """Return gamma and beta in float64."""
    n, given = call.x.shape[1], (call.norm.gamma, call.norm.beta)
    return [
        np.full(n, default) if value is None else value.reshape(n).astype(np.float64)
        for value, default in zip(given, (1.0, 0.0), strict=True)
    ]


def _affine(row: exact.Row | None, gamma: Array, beta: Array, dtype: np.dtype[Any]) -> Array:
    """Return y of a row; infinite gamma and beta, and NaN, follow the extended reals."""
    if row is None:
        return np.full(len(gamma), np.nan, dtype)
    (scale, far), (shift, away) = split(gamma), split(beta)
    result = exact.y_row(row, scale, shift, dtype)
    if far.any() or away.any():
        # The sign of xhat decides that of an infinite product; 0 * inf is NaN, of which there is one.
        extended = np.where(far == 0, 0.0, far * exact.signs(row)) + away
        odd = (far != 0) | (away != 0)
        result[odd] = np.where(np.isnan(extended), np.nan, extended)[odd]
    return result
