"""
The equations in NumPy on (rows, n), in float64 or double-double, rounded once: what all else copies.

Samples are taken apart here, and residuals added; `equations` or `nearest` does the rest.
"""

from typing import Any

from stablenorm.call import Backward, Forward, sample
from stablenorm.reference import equations, nearest
from stablenorm.reference.equations import project
from stablenorm.reference.tangents import double_backward, jvp
from stablenorm.types import Statistics, joined

__all__ = ["backward", "double_backward", "forward", "jvp", "project"]


def forward(call: Forward) -> Statistics:
    """Do a forward: write y, and return the statistics."""
    if call.samples > 1:
        return joined([forward(sample(call, i)) for i in range(call.samples)])
    if call.residual is not None:
        equations.add(call.x, call.residual, call.total)
        call = call._replace(x=call.total, residual=None, total=None)
    statistics: Statistics = _of(call).forward(call)
    return statistics


def backward(call: Backward) -> None:
    """Do a backward: write the gradients that are wanted."""
    if call.samples == 1:
        _of(call).backward(call)
        return
    for i in range(call.samples):
        backward(sample(call, i))


def tile_rows(rows: int, n: int, nearest: bool) -> int:  # noqa: ARG001
    """Return of how many rows the blocks of a call may be multiples: any."""
    return 1


def _of(call: Any) -> Any:
    return nearest if call.norm.rounding == "nearest" else equations
