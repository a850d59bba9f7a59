"""
Rows that the kernels of float64 leave to the reference.

That is rows of extreme size, of zero variance with eps = 0, with NaN or infinity. The bits of a row do not
depend on its neighbours: only the extreme rows themselves go there. The sums over rows do so as a whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm import reference
from stablenorm.arrays import as_matrix
from stablenorm.cpu.layout import blocks
from stablenorm.cpu.wide import LARGEST, SMALLEST
from stablenorm.types import NOTHING_EXTRA, Array, Extra, Gradients, Norm, Statistics

# The mark of such a row; of one that is merely undecided, it is another.
EXTREME = 1


def forward(x: Any, norm: Norm, y: Any, kept: Any, marks: Array) -> Any:
    """
    Write y of the marked rows; return the statistics of all.

    Each of these rows gets an exponent, by which the backward knows it.
    """
    exponent = np.zeros((x.shape[0], 2), np.int16)
    rows = np.flatnonzero(marks)
    for block in blocks(len(rows), x.shape[1], 1):
        part = rows[block]
        result: Any = np.empty((len(part), x.shape[1]), x.dtype)
        some = reference.forward(x[part], norm, result)
        y[part] = result
        if kept.spread is not None:
            # Of rows that are merely undecided, the statistics are as good as these.
            here = marks[part] == EXTREME
            some, part = some.of_rows(here), part[here]
            kept.spread[part] = some.spread
        for row, word in zip(kept[:5], some[:5], strict=True):
            if row is not None:
                row[part] = 0.0 if word is None else word
        if some.exponent is not None:
            exponent[part] = some.exponent
        # With eps, rstd need not tell that x is tiny: twice as large, times 2**-1.
        plain = part[(kept.rstd[part] <= LARGEST) & ~exponent[part].any(axis=1)]
        exponent[plain, 1] = -1
        for word in (kept.rstd, kept.rstd_lo):
            word[plain] *= 2.0
    return kept._replace(exponent=exponent if exponent.any() else None)


def marks_of(statistics: Statistics) -> Array:
    """Return the marks of rows that are extreme by what the forward found."""
    marks: Array = ~(statistics.rstd <= LARGEST)
    if statistics.mean is not None:
        marks |= ~(np.abs(statistics.mean) < np.inf)
    if statistics.exponent is not None:
        marks |= statistics.exponent.any(axis=-1)
    if statistics.spread is not None:
        # Of a forward that was all the reference's: no kernel has seen that x is tiny under eps.
        marks |= (statistics.spread > 0.0) & (statistics.spread < SMALLEST)
    return marks.astype(np.uint8)


def any_of(parameters: Array) -> bool:
    """Tell whether an element of these is of extreme size; 0 is not."""
    size = np.abs(parameters[parameters != 0.0])
    return not ((size >= SMALLEST) & (size <= LARGEST)).all()


def write_dx(
    dy: Any, x: Any, norm: Norm, statistics: Statistics, dx: Any, marks: Array,
    extra: Extra = NOTHING_EXTRA,
) -> None:  # fmt: skip
    """Write dx of the marked rows."""
    dsum = None if extra.dsum is None else as_matrix(extra.dsum)

    def compute(rows: Array, dy: Any, x: Any, some: Statistics, result: Array) -> None:
        more = extra if dsum is None else extra._replace(dsum=dsum[rows])
        reference.backward(dy, x, norm, some, Gradients(result, None, None), more)

    _write(compute, dy, x, statistics, dx, marks)


def write_ty(
    tx: Any, x: Any, norm: Norm, statistics: Statistics, tangents: tuple[Any, Any], ty: Any,
    marks: Array,
) -> None:  # fmt: skip
    """Write ty of the marked rows; the tangents are those of gamma and beta."""

    def compute(_rows: Array, tx: Any, x: Any, some: Statistics, result: Any) -> None:
        reference.jvp(tx, x, norm, some, *tangents, result)

    _write(compute, tx, x, statistics, ty, marks)


def _write(compute: Any, dy: Any, x: Any, statistics: Statistics, out: Any, marks: Array) -> None:
    dy, x, out = map(as_matrix, (dy, x, out))
    rows = np.flatnonzero(marks)
    for block in blocks(len(rows), x.shape[1], 1):
        part = rows[block]
        result = np.empty((len(part), x.shape[1]), x.dtype)
        compute(part, dy[part], x[part], statistics.of_rows(part), result)
        out[part] = result


def decide(
    dy: Any, x: Any, norm: Norm, statistics: Statistics, out: Gradients, marks: Array,
    undecided: Array, extra: Extra,
) -> None:  # fmt: skip
    """Round correctly what the kernels have left: marked rows of dx, and columns of dgamma and dbeta."""
    dx, *totals = out
    if dx is not None:
        write_dx(dy, x, norm, statistics, dx, marks, extra)
    if (marks == EXTREME).any():
        reference.backward(dy, x, norm, statistics, Gradients(None, *totals), extra)
        return
    columns = np.flatnonzero(undecided.any(axis=0))
    if len(columns):
        dgamma, dbeta = (None if total is None else total.dtype for total in totals)
        found = reference.columns_of_sums(dy, x, norm, columns, dgamma, dbeta, extra.old)
        for total, values in zip(totals, found, strict=True):
            if total is not None:
                total.flat[columns] = values
