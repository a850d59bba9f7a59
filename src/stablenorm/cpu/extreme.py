"""
Rows that the kernels of float64 leave to the reference.

That is rows of extreme size, of zero variance with eps = 0, with NaN or infinity. The bits of a row do not
depend on its neighbours: only the extreme rows themselves go there. The sums over rows do so as a whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm import reference
from stablenorm.cpu.layout import blocks
from stablenorm.cpu.wide import LARGEST
from stablenorm.types import Array, Gradients, Statistics


def forward(
    x: Any, gamma: Array | None, beta: Array | None, eps: float, y: Any, kept: Any, marks: Array
) -> Any:
    """
    Write y of the marked rows; return the statistics of all.

    Each of these rows gets an exponent, by which the backward knows it.
    """
    exponent = np.zeros((x.shape[0], 2), np.int16)
    rows = np.flatnonzero(marks)
    for block in blocks(len(rows), x.shape[1], 1):
        part = rows[block]
        result: Any = np.empty((len(part), x.shape[1]), x.dtype)
        some = reference.forward(x[part], gamma, beta, eps, result)
        y[part] = result
        for row, word in zip(kept[:5], some[:5], strict=True):
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
    marks = ~((statistics.rstd <= LARGEST) & (np.abs(statistics.mean) < np.inf))
    if statistics.exponent is not None:
        marks |= statistics.exponent.any(axis=1)
    return marks.astype(np.uint8)


def write_dx(
    dy: Any, x: Any, gamma: Array | None, statistics: Statistics, dx: Any, marks: Array
) -> None:
    """Write dx of the marked rows."""
    rows = np.flatnonzero(marks)
    for block in blocks(len(rows), x.shape[1], 1):
        part = rows[block]
        words: Any = [None if word is None else word[part] for word in statistics]
        some = Statistics(*words)
        result = np.empty((len(part), x.shape[1]), x.dtype)
        out = Gradients(result, None, None)
        reference.backward(dy[part], x[part], gamma, some, out)
        dx[part] = result
