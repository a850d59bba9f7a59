"""Condition numbers of a row's y and dx, and what about the row calls for attention."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_methods import root_of
from stablenorm.analysis._diagnose_sweep import Sweep, working_dtype
from stablenorm.analysis.families import Format, format_of


class Conditions(NamedTuple):
    """
    Condition numbers of y and of dx in x, and the share that eps has of ``var + eps``.

    How many times the relative error of y (of dx) is that of x, by norms of the row. For y it is
    ``rms(x) / std`` whatever eps, for dx ``rms(x) std / (var + eps)`` if g is orthogonal to 1 and
    xhat, as a random one is nearly; the angle between centered g and xhat, t, adds a factor of up
    to ``1 + 2 / sin t``. Rows of one or two elements have no such g: their own formulas are used.
    """

    y: Array
    dx: Array
    eps_share: Array


class Mark(NamedTuple):
    """Something that a row can be: a name, and what it means for so many rows."""

    name: str
    meaning: str


# In the order of the bits of a row's marks; "{working}" stands for float32 or float64.
MARKS = (
    Mark("not finite", "they hold NaN or infinity: y is NaN"),
    Mark("undefined", "constant, and eps is 0: y is 0/0, NaN"),
    Mark("constant", "all elements equal: y is beta"),
    Mark("var below eps", "eps decides the scale of y"),
    Mark("dominating outlier", "one element has more than half of the variance"),
    Mark("sum overflows", "the sum of x overflows {working}"),
    Mark("squares overflow", "the sum of x^2 overflows {working}"),
    Mark("deviations overflow", "the sum of (x - mean)^2 overflows {working}"),
    Mark("squares underflow", "var is below the normal numbers of {working}"),
    Mark("float16 overflows", "mean or var is beyond the range of float16"),
)
BIT = {mark.name: 1 << place for place, mark in enumerate(MARKS)}

# Of few elements, one has most of the variance for no special reason.
_FEW = 8


@functools.cache
def _format(dtype: Any) -> Format:
    return format_of(dtype)


def conditions(sweep: Sweep, n: int, eps: float) -> Conditions:
    """Return the condition numbers of each row."""
    with np.errstate(all="ignore"):
        root = root_of(sweep, eps)
        ratio = sweep.std / root
        offset = sweep.mean / sweep.std
        in_y = np.sqrt(1 + offset * offset)
        # std / root twice, not var / (var + eps): squares of float64 may overflow.
        in_dx = in_y * ratio * ratio
        in_dx[sweep.std == 0] = 0.0
        share = np.square(np.sqrt(eps) / root)
    if n == 1:
        # y is beta and dx is 0, whatever x.
        return Conditions(np.zeros_like(in_y), np.zeros_like(in_y), share)
    if n == 2:
        # y is +-d / sqrt(d^2 + eps), a sign but for eps; dx is in proportion to (d^2 + eps)**-1.5.
        with np.errstate(all="ignore"):
            return Conditions(np.where(sweep.std == 0, 1.0, in_y) * share, 3 * in_dx, share)
    return Conditions(in_y, in_dx, share)


def marks(sweep: Sweep, n: int, dtype: Any, eps: float) -> Array:
    """Return the marks of each row as bits of one uint16."""
    smallest, half = 2.0 ** _format(working_dtype(dtype)).emin, _format(np.float16).largest
    with np.errstate(all="ignore"):
        std, mean = sweep.std, sweep.mean
        spoilt = np.isnan(std)
        # Where NaN or infinity has spoilt a row, nothing else can be said of it.
        constant = std == 0
        farthest = np.maximum(sweep.highest - mean, mean - sweep.lowest)
        found = {
            "not finite": spoilt,
            "undefined": constant & (eps == 0),
            "constant": constant,
            "var below eps": (std < np.sqrt(eps)) & ~constant,
            "dominating outlier": (farthest > std * np.sqrt(n / 2)) & (n >= _FEW) & ~constant,
            "sum overflows": ~np.isfinite(sweep.total) & ~spoilt,
            "squares overflow": ~np.isfinite(sweep.squares) & ~spoilt,
            "deviations overflow": ~np.isfinite(sweep.centered_squares) & ~spoilt,
            "squares underflow": (std < np.sqrt(smallest)) & ~constant,
            "float16 overflows": (np.abs(mean) > half) | (std > np.sqrt(half)),
        }
        out = np.zeros(len(std), np.uint16)
        for name, where in found.items():
            if where.any():
                out |= where.astype(np.uint16) * np.uint16(BIT[name])
    return out


def names_of(bits: int) -> tuple[str, ...]:
    """Return the names of a row's marks."""
    return tuple(mark.name for mark in MARKS if bits & BIT[mark.name])
