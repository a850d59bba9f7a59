r"""
The complex step: Im forward(x + i step D) / step, without a difference and so without cancellation.

It needs a forward that takes complex numbers and is analytic: `abs`, `var`, `conj`, `.real` and
comparisons make it wrong or raise. So it is believed only where it agrees with the secants, along
every direction of an argument that could be judged; a warning from the forward counts as a no. (W. Squire
and G. Trapp, SIAM Review 40 (1998) 110.)

Its error has a bound of its own, four times the noise: every element of the argument moves by a few
ulps, there and back, which draws the roundings anew; half the second difference of the derivative is
then noise, the move's own effect is gone. Six such moves: with a single one, of one or two ulps, the
rounding of a mean under an offset often stayed as it was, and in 7 of 100 elements the error exceeded
the bound, up to 50 times. And no less than the rounding of the sum <u, Im y>.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.check._loss import FaultError, Loss, copies, flat, norm, sum_rounding

if TYPE_CHECKING:
    from stablenorm.check._compare import Comparison

# Its square is 0 beside 1 by far, and its product with anything usual is no subnormal.
_STEP = 2.0**-200
# From noise to bound, as for the secants; half a second difference is 1.2 standard deviations.
_FACTOR = 4.0
# Pairs of moves, and the most ulps of one: chosen on 4944 elements of layer norms, offsets 0 to 1e6, of
# which 5 were beyond the bound with four pairs of up to 64 ulps, and none, at worst at 0.66 of it,
# with these. docs/checker.md has others. The square of such a move, 2^-86 of x, is no curvature.
_MOVES, _ULPS = 6, 1024


class _Slope(NamedTuple):
    """A derivative along one direction, its noise, its terms' root square sum and sum's error."""

    numeric: float
    spread: float
    size: float
    rounding: float


def improve(loss: Loss, position: int, found: list[Comparison]) -> list[Comparison]:
    """Return the comparisons with complex-step derivatives where those are to be had and finer."""
    useful = [c for c in found if c.judged and c.kink is None and c.z <= 1]
    # Where the gradient's own rounding is the coarser bound, nothing is to be gained.
    if not any(c.derivative.bound > c.bound_actual for c in useful):
        return found
    offsets = _offsets(loss, position)
    slopes: dict[int, _Slope] = {}
    # Around them all, not around each call: Python forgets what it knows of warnings every time.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for c in (c for c in found if c.judged and c.kink is None):
            # A probe is only asked whether it agrees.
            slope = _slope(loss, position, c, offsets if c.place is not None else offsets[:1])
            if slope is None or not abs(slope.numeric - c.derivative.numeric) <= c.derivative.bound:
                return found
            slopes[id(c)] = slope
    elements = (slopes[id(c)] for c in found if id(c) in slopes and c.place is not None)
    shares = [_relative(slope) ** 2 for slope in elements]
    pooled = float(np.sqrt(np.mean(shares))) if shares else 0.0
    return [_finer(c, slopes.get(id(c)), pooled) for c in found]


def _relative(slope: _Slope) -> float:
    return slope.spread / slope.size if slope.size else 0.0


def _finer(c: Comparison, slope: _Slope | None, pooled: float) -> Comparison:
    # A probe keeps its secants: what a backward loses to an offset adds up in ways that its own
    # bound does not know (the expanded form at 1e4, 26 000 elements: 1.6 times the bound).
    if slope is None or c.place is None:
        return c
    bound = max(_FACTOR * slope.spread, _FACTOR * pooled * slope.size) + slope.rounding
    if not bound < c.derivative.bound:
        return c
    derivative = c.derivative._replace(numeric=slope.numeric, bound=bound)
    return replace(c, derivative=derivative, method="complex step")


def _offsets(loss: Loss, position: int) -> list[Array]:
    """Return moves of the argument: none, then pairs, there and back, of a few ulps an element."""
    x = flat(np.asarray(loss.args[position]))
    # Of a generator of its own: whether this is tried must not change what is drawn elsewhere.
    rng = np.random.default_rng(x.size)
    offsets = [np.zeros(x.size)]
    for _ in range(_MOVES):
        ulps = rng.integers(1, _ULPS + 1, size=x.size) * rng.choice([-1.0, 1.0], size=x.size)
        move = ulps * np.spacing(np.abs(x))
        offsets += [move, -move]
    return offsets


def _slope(loss: Loss, position: int, c: Comparison, offsets: list[Array]) -> _Slope | None:
    """Take complex steps along the direction of `c`; None where the forward will not have it."""
    # In units of the gradient for an element, as everywhere.
    unit = 1.0 if c.place is None else float(c.scale)
    numeric, sizes, rounding = [], [], []
    for offset in offsets:
        y = _output(loss, position, c.where, c.scale, offset)
        if y is None:
            return None
        terms = loss.u * (y.imag / _STEP / unit)
        numeric.append(float(np.sum(terms)))
        sizes.append(norm(terms))
        rounding.append(sum_rounding(terms))
    if not np.isfinite(numeric).all():
        return None
    here, pairs = numeric[0], np.reshape(numeric[1:], (-1, 2))
    apart = np.sum(pairs, axis=1) / 2 - here
    spread = float(np.sqrt(np.mean(np.square(apart)))) if apart.size else 0.0
    return _Slope(here, spread, sizes[0], rounding[0])


def _output(loss: Loss, position: int, where: Any, scale: Array, offset: Array) -> Array | None:
    args = copies(loss.args)
    x = np.asarray(args[position])
    moved = (x.reshape(-1) + offset).astype(np.complex128)
    moved[where] += 1j * _STEP * scale
    args[position] = moved.reshape(x.shape)
    try:
        y = loss.operation.complex_forward(args)
    except (FaultError, Warning):
        return None
    if y.shape != loss.shape or y.dtype != np.complex128:
        return None
    y = y.reshape(-1)
    same = offset.any() or _close(y.real, loss, position)
    return y if same else None


def _close(real: Array, loss: Loss, position: int) -> bool:
    """Tell whether the forward takes complex numbers the way that it takes real ones."""
    # Another, coarser way through (plain sums instead of compensated ones) would bring an error
    # that nobody has measured.
    size = norm(loss.u * loss.y)
    return bool(norm(loss.u * (real - loss.y)) <= 4 * loss.level[position] * size)
