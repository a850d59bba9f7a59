"""
The rows and columns that float64 and pairs cannot certify, done with integers.

With ``rounding="nearest"``, kernels send rows and columns here whose bounds contain a midpoint, ties above all; the NumPy
backend sends all. With any rounding, both send the rows that are out of range.
"""

from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.reference.equations import BLOCK, FLOAT64
from stablenorm.reference.exact import Number, Row, nearest, numbers_of
from stablenorm.reference.sums import PARTIAL, as_partial, merged, rounded
from stablenorm.types import Array, Statistics


@np.errstate(all="ignore")
def finish_forward(call: Forward, rows: Array, stats: Statistics | None, lost: Any) -> None:
    """Write y of these rows, and the statistics of those that are `lost`."""
    gamma, beta = _vectors(call, 1.0, 0.0)
    for i in rows.tolist():
        x = call.x[i].astype(np.float64)
        row = Row(x, call.norm)
        shifts = numbers_of(beta)
        products = row.times_xhat(gamma, x)
        call.y[i] = nearest([a + b for a, b in zip(products, shifts, strict=True)], call.y.dtype)
        if stats is None or not lost[i]:
            continue
        mean, rest, stats.rstd[i] = row.statistics()
        for word, value in ((stats.mean, mean), (stats.mean_lo, rest), (stats.mean_tail, 0.0)):
            if word is not None:
                word[i] = value


@np.errstate(all="ignore")
def write_dx(call: Backward, rows: Array) -> None:
    """Write dx of some rows."""
    (gamma,) = _vectors(call, 1.0)
    for i in rows.tolist():
        x, dy = (v[i].astype(np.float64) for v in (call.x, call.dy))
        row = Row(x, call.norm)
        if not row.p or not (np.isfinite(gamma).all() and np.isfinite(dy).all()):
            call.dx[i] = np.nan
            continue
        dx = row.dx(dy, x, gamma)
        if call.dsum is not None:
            others = numbers_of(call.dsum[i].astype(np.float64))
            dx = [a + b for a, b in zip(dx, others, strict=True)]
        call.dx[i] = nearest(dx, call.dx.dtype)


@np.errstate(all="ignore")
def finish_sums(call: Backward, columns: Array, unsummed: Array, partial: Any) -> None:
    """
    Write the uncertified `columns` of dgamma and dbeta, two rows of bool.

    With `partial` sums, write all columns: these are over all rows but the `unsummed` ones.
    """
    for k, total in enumerate((call.dgamma, call.dbeta)):
        if total is None:
            continue
        uncertified = columns[k]
        if partial is not None:
            part = _with_rows(call, k, unsummed, partial[k])
            if total.dtype == PARTIAL:
                total[...] = part
                continue
            total[...], uncertified = rounded(part, total.dtype)
            # A sum of 0 may lack terms that underflowed.
            uncertified |= (part["high"] == 0) & (len(unsummed) > 0)
        if total.dtype == PARTIAL:
            # The caller merges these, finds them uncertified, and asks for exact sums.
            total["error"][uncertified] = np.inf
        else:
            some = np.flatnonzero(uncertified)
            total[some] = nearest(exact_sums(call, k, some), total.dtype)


def _with_rows(call: Backward, which: int, rows: Array, partial: Array) -> Array:
    """Add the terms of some rows to partial sums, dgamma (0) or dbeta (1)."""
    for i in rows.tolist():
        high = dy = call.dy[i].astype(np.float64)
        low: Any = 0.0
        error: Any = 0.0
        if which == 0:
            # dy xhat in two words: what rounding took from the first is the second.
            x = call.x[i].astype(np.float64)
            terms = Row(x, call.norm).times_xhat(dy, x)
            high = nearest(terms, FLOAT64)
            both = zip(terms, numbers_of(-high), strict=True)
            low = nearest([a + b for a, b in both], FLOAT64)
            error = np.abs(high) * 2.0**-104 + 2.0**-1070
        partial = merged(partial, as_partial(high, low, error))
    return partial


def exact_sums(call: Backward, which: int, columns: Array) -> list[Number]:
    """Return the exact sums, dgamma (0) or dbeta (1), of these columns."""
    sums = [Number() for _ in columns]
    of_gamma = which == 0 and len(columns) > 0
    rows = [Row(x.astype(np.float64), call.norm) for x in call.x] if of_gamma else []
    # Columns that are done together: their numbers have a term for each row.
    step = max(1, BLOCK // max(len(call.x), 1))
    for start in range(0, len(columns), step):
        some = columns[start : start + step]
        dy, x = (v[:, some].astype(np.float64) for v in (call.dy, call.x))
        for i in range(len(dy)):
            terms = rows[i].times_xhat(dy[i], x[i]) if rows else numbers_of(dy[i])
            for j, term in enumerate(terms):
                sums[start + j] += term
    return sums


def _vectors(call: Any, *defaults: float) -> list[Array]:
    """Return gamma and beta in float64."""
    n, given = call.x.shape[1], (call.norm.gamma, call.norm.beta)
    return [
        np.full(n, default) if value is None else value.reshape(n).astype(np.float64)
        for value, default in zip(given, defaults, strict=False)
    ]
