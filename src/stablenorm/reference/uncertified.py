"""
The rows and columns that float64 and pairs cannot certify, done with integers.

With ``rounding="nearest"``, kernels send rows and columns here whose bounds contain a midpoint, ties above all; the NumPy
backend sends all. With any rounding, both send the rows that are out of range.
"""

from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.records import Array, Statistics
from stablenorm.reference.equations import BLOCK, FLOAT64, widened
from stablenorm.reference.exact import Number, Row, nearest, numbers_of, plus
from stablenorm.reference.sums import PARTIAL, as_partial, merged, rounded


@np.errstate(all="ignore")
def finish_forward(call: Forward, rows: Array, stats: Statistics | None, lost: Any) -> None:
    """Write y of these rows, and the statistics of those that are `lost`."""
    n, norm = call.x.shape[1], call.norm
    gamma, beta = widened(norm.gamma, np.ones(n)), widened(norm.beta, np.zeros(n))
    for i in rows.tolist():
        row = Row(call.x[i], norm)
        call.y[i] = nearest(plus(row.times_xhat(gamma), beta), call.y.dtype)
        if stats is None or not lost[i]:
            continue
        mean, rest, stats.rstd[i] = row.statistics()
        for word, value in ((stats.mean, mean), (stats.mean_lo, rest), (stats.mean_tail, 0.0)):
            if word is not None:
                word[i] = value


@np.errstate(all="ignore")
def write_dx(call: Backward, rows: Array) -> None:
    """Write dx of some rows."""
    gamma = widened(call.norm.gamma, np.ones(call.x.shape[1]))
    for i in rows.tolist():
        dx = Row(call.x[i], call.norm).dx(call.dy[i].astype(np.float64), gamma)
        if call.dsum is not None:
            dx = plus(dx, call.dsum[i].astype(np.float64))
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
            terms = Row(call.x[i], call.norm).times_xhat(dy)
            high = nearest(terms, FLOAT64)
            low = nearest(plus(terms, -high), FLOAT64)
            error = np.abs(high) * 2.0**-104 + 2.0**-1070
        partial = merged(partial, as_partial(high, low, error))
    return partial


def exact_sums(call: Backward, which: int, columns: Array) -> list[Number]:
    """Return the exact sums, dgamma (0) or dbeta (1), of these columns."""
    sums = [Number() for _ in columns]
    rows = [Row(x, call.norm) for x in call.x] if which == 0 and len(columns) else []
    # Columns that are done together: their numbers have a term for each row.
    step = max(1, BLOCK // max(len(call.x), 1))
    for start in range(0, len(columns), step):
        some = columns[start : start + step]
        for i, dy in enumerate(call.dy[:, some].astype(np.float64)):
            terms = rows[i].times_xhat(dy, some) if rows else numbers_of(dy)
            for j, term in enumerate(terms):
                sums[start + j] += term
    return sums
