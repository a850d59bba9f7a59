"""
Rows that the kernels of float64 leave to the reference.

That is rows of extreme size, of zero variance with eps = 0, with NaN or infinity. The bits of a row do not
depend on its neighbours: only the extreme rows themselves go there. The sums over rows do so as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm import reference
from stablenorm.arrays import as_matrix
from stablenorm.call import Backward, Forward, Jvp
from stablenorm.cpu.layout import blocks
from stablenorm.cpu.wide import LARGEST, SMALLEST
from stablenorm.reference.counted import Counted
from stablenorm.types import Array, Gradients, Statistics

# The mark of such a row; of one that is merely undecided, it is another.
EXTREME = 1


def forward(call: Forward, kept: Statistics, marks: Array) -> Statistics:
    """Write y of the marked rows; return the statistics of all, with the marks."""
    x, y = call.x, call.y
    exponent = np.zeros((x.shape[0], 2), np.int16)
    rows = np.flatnonzero(marks)
    for block in blocks(len(rows), x.shape[1], 1):
        part = rows[block]
        result: Any = np.empty((len(part), x.shape[1]), x.dtype)
        some = reference.forward(Forward(x[part], call.norm, result))
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
    exponents, extreme = exponent if exponent.any() else None, marks == EXTREME
    return kept._replace(
        exponent=exponents, extreme=extreme.view(np.uint8) if extreme.any() else None
    )


def marks_of(statistics: Statistics) -> Array:
    """Return the marks of rows that are extreme by what the forward found."""
    marks: Array = ~(statistics.rstd <= LARGEST)
    if statistics.extreme is not None:
        marks |= statistics.extreme != 0
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


def write_dx(call: Backward, marks: Array) -> None:
    """Write dx of the marked rows."""
    for part, result in _blocks(call.out.dx, marks):
        some = Counted(part, None).backward(call)
        reference.backward(some._replace(out=Gradients(result, None, None)))


def write_ty(call: Jvp, marks: Array) -> None:
    """Write ty of the marked rows."""
    tx, x = as_matrix(call.tx), as_matrix(call.x)
    for part, result in _blocks(call.ty, marks):
        some = call.statistics.of_rows(part)
        reference.jvp(call._replace(tx=tx[part], x=x[part], statistics=some, ty=result))


def _blocks(out: Any, marks: Array) -> Iterator[tuple[Array, Array]]:
    """Yield the numbers of some of the marked rows, and an array for their results, which are then written."""
    out = as_matrix(out)
    rows = np.flatnonzero(marks)
    for block in blocks(len(rows), out.shape[1], 1):
        part = rows[block]
        result = np.empty((len(part), out.shape[1]), out.dtype)
        yield part, result
        out[part] = result


def decide(call: Backward, marks: Array, undecided: Array) -> None:
    """Round correctly what the kernels have left: marked rows of dx, and columns of dgamma and dbeta."""
    dx, dgamma, dbeta = call.out
    if dx is not None:
        write_dx(call, marks)
    call = call._replace(out=Gradients(None, dgamma, dbeta))
    if (marks == EXTREME).any():
        reference.backward(call)
        return
    columns = np.flatnonzero(undecided.any(axis=0))
    if len(columns):
        for total, values in zip(
            (dgamma, dbeta), reference.nearest.columns_of_sums(call, columns), strict=True
        ):
            if total is not None:
                total.flat[columns] = values
