"""Whether there is a derivative at all: at a kink, left and right secants never close up."""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm._types import Array
from stablenorm.check._loss import Loss, flat, norm, unit_roundoff

# In units of the argument's scale: each a sixteenth of the one before, from the last step of the
# tableau to 2^-26, below which the rounding of float64 hides a kink of 1 %.
_STEPS = tuple(2.0 ** -(10 + 4 * j) for j in range(5))
# From step to step the difference of right and left slope stays, at a kink; it falls to a
# sixteenth where the function is smooth, and grows sixteenfold where it is rounding.
_STAYS = 2.0


def measure_bend(loss: Loss, position: int, where: Any, scale: Array) -> float | None:
    r"""
    Return sum \|right - left slope\| over the outputs if there is a kink, else None.

    A kink within 2^-18 of the scale counts: the last three steps of `_STEPS` are longer.
    """
    base = np.asarray(loss.args[position])
    x = flat(base)[where]
    sizes: list[float] = []
    for step in _STEPS:
        plus = (x + step * scale).astype(base.dtype).astype(np.float64)
        minus = x - (plus - x)
        taken = norm((plus - x) / np.max(np.abs(scale)))
        if taken == 0:
            break
        taken /= norm(scale / np.max(np.abs(scale)))
        ends = [loss.output(position, where, end) for end in (plus, minus)]
        terms = loss.u * (ends[0] + ends[1] - 2 * loss.y)
        largest = np.max(np.abs(loss.u * np.array([*ends, loss.y])), axis=0)
        bend = float(np.sum(np.abs(terms))) / taken
        slope = float(np.sum(np.abs(loss.u * (ends[0] - ends[1])))) / (2 * taken)
        moved = terms != 0
        # Four roundings of the outputs that moved, and 0.4 % of the slope.
        rounding = 4 * unit_roundoff(loss.dtype) * float(np.sum(largest[moved])) / taken
        if not np.isfinite(bend) or bend <= rounding or bend <= 2.0**-8 * slope:
            sizes.clear()
            continue
        sizes.append(bend)
        if len(sizes) >= 3:
            recent = sizes[-3:]
            if max(recent) <= _STAYS * min(recent):
                return max(recent)
    return None
