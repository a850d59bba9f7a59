"""
The equations in NumPy on (rows, n), in float64 or double-double, rounded once: what all else copies.
"""

from typing import Any

from stablenorm.reference import equations, nearest
from stablenorm.reference.equations import RowsLike, add, project
from stablenorm.reference.nearest import columns_of_sums
from stablenorm.reference.tangents import double_backward, jvp
from stablenorm.types import NOTHING_EXTRA, Extra, Gradients, Norm, Residual, Statistics

__all__ = [
    "add",
    "backward",
    "columns_of_sums",
    "double_backward",
    "forward",
    "forward_where",
    "jvp",
    "normalize",
    "project",
]


def forward(x: RowsLike, norm: Norm, y: RowsLike, residual: Residual | None = None) -> Statistics:
    """
    Normalize the rows of `x` into `y` (which may be `x` itself); return the statistics.

    With a residual, x + residual is normalized, rounded to x's dtype and written to ``residual.sum``.
    """
    if residual is not None:
        x = equations.add(x, *residual)
    statistics: Statistics = _of(norm).forward(x, norm, y)
    return statistics


# Here the statistics cost nothing beside the rest.
normalize = forward

# With a mask of elements as the last argument.
forward_where = equations.forward


def backward(
    dy: RowsLike,
    x: RowsLike,
    norm: Norm,
    statistics: Statistics,
    out: Gradients,
    extra: Extra = NOTHING_EXTRA,
) -> None:
    """Pull `dy` back through `forward`, into those arrays of `out` that are not None."""
    _of(norm).backward(dy, x, norm, statistics, out, extra)


def _of(norm: Norm) -> Any:
    return nearest if norm.rounding == "nearest" else equations
