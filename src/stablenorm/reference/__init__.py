"""
The equations in NumPy on (rows, n), in float64 or double-double, rounded once: what all else copies.

Here a call is taken apart, into samples and rows that count, until `equations` or `nearest` can do it.
"""

from typing import Any

from stablenorm.arrays import as_matrix
from stablenorm.call import Backward, Forward
from stablenorm.reference import equations, nearest
from stablenorm.reference.counted import counted, fill_others, joined, spread
from stablenorm.reference.equations import project
from stablenorm.reference.tangents import double_backward, jvp
from stablenorm.types import Statistics

__all__ = ["backward", "double_backward", "forward", "jvp", "project"]


def forward(call: Forward) -> Statistics:
    """Do a forward: write y, and return the statistics."""
    if call.samples is not None:
        return joined([forward(call.sample(i)) for i in range(call.samples)])
    if call.residual is not None:
        total = equations.add(call.x, call.residual, call.total)
        call = call._replace(x=total, residual=None, total=None)
    norm: Any = _of(call)
    if call.where is None:
        statistics: Statistics = norm.forward(call)
        return statistics
    rows = counted(call.where)
    found = norm.forward(rows.forward(call))
    fill_others(call.y, [rows])
    return spread([found], [rows], as_matrix(call.where).shape[0])


def backward(call: Backward) -> None:
    """Do a backward: write the gradients that are wanted."""
    if call.samples is not None:
        for i in range(call.samples):
            backward(call.sample(i))
        return
    if call.where is None:
        _of(call).backward(call)
        return
    rows = counted(call.where)
    _of(call).backward(rows.backward(call))
    fill_others(call.out.dx, [rows], call.dsum)


def _of(call: Any) -> Any:
    return nearest if call.norm.rounding == "nearest" else equations
