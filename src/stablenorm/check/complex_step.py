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
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.operation import FaultError, Loss, copies, flat, norm, sum_rounding
from stablenorm.types import Array

# Its square is 0 beside 1 by far, and its product with anything usual is no subnormal.
_STEP = 2.0**-200
# From noise to bound, as for the secants; half a second difference is 1.2 standard deviations.
_FACTOR = 4.0
# Pairs of moves, and the most ulps of one: chosen on 4944 elements of layer norms, offsets 0 to 1e6, of
# which 5 were beyond the bound with four pairs of up to 64 ulps, and none, at worst at 0.66 of it,
# with these. docs/evidence/gradient-checkers.md has others. The square of such a move, 2^-86 of x, is no curvature.
_MOVES, _ULPS = 6, 1024


class _Slope(NamedTuple):
    """A derivative, its noise, the norm of its terms, and the rounding error of their sum."""

    numeric: float
    spread: float
    size: float
    rounding: float


class ComplexStep:
    """Derivatives by one argument; `level` is the usual noise of y, relative to it."""

    def __init__(self, loss: Loss, position: int, level: float):
        self._loss, self._position, self._level = loss, position, level
        self._offsets = _offsets(flat(np.asarray(loss.args[position])))

    def slopes(
        self, directions: Sequence[tuple[Any, Array, bool]]
    ) -> list[tuple[float, float]] | None:
        """
        Return derivative and bound along each (where, scale, element or probe).

        None where the forward will not have complex numbers. A probe has no bound.
        """
        found = []
        # Around them all, not around each call: Python forgets what it knows of warnings every time.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for where, scale, element in directions:
                slope = self._slope(where, scale, element=element)
                if slope is None:
                    return None
                found.append(slope)
        elements = zip(found, directions, strict=True)
        shares = [(s.spread / s.size if s.size else 0.0) ** 2 for s, d in elements if d[2]]
        pooled = float(np.sqrt(np.mean(shares))) if shares else 0.0
        return [(s.numeric, _FACTOR * max(s.spread, pooled * s.size) + s.rounding) for s in found]

    def _slope(self, where: Any, scale: Array, *, element: bool) -> _Slope | None:
        # In units of the gradient for an element, as everywhere; a probe is only asked whether it
        # agrees with the secants.
        unit, offsets = (float(scale), self._offsets) if element else (1.0, self._offsets[:1])
        numeric, sizes, rounding = [], [], []
        for offset in offsets:
            y = self._output(where, scale, offset)
            if y is None:
                return None
            terms = self._loss.u * (y.imag / _STEP / unit)
            numeric.append(float(np.sum(terms)))
            sizes.append(norm(terms))
            rounding.append(sum_rounding(terms))
        if not np.isfinite(numeric).all():
            return None
        here, pairs = numeric[0], np.reshape(numeric[1:], (-1, 2))
        apart = np.sum(pairs, axis=1) / 2 - here
        spread = float(np.sqrt(np.mean(np.square(apart)))) if apart.size else 0.0
        return _Slope(here, spread, sizes[0], rounding[0])

    def _output(self, where: Any, scale: Array, offset: Array) -> Array | None:
        loss = self._loss
        args = copies(loss.args)
        x = np.asarray(args[self._position])
        moved = (x.reshape(-1) + offset).astype(np.complex128)
        moved[where] += 1j * _STEP * scale
        args[self._position] = moved.reshape(x.shape)
        try:
            y = loss.operation.complex_forward(args)
        except (FaultError, Warning):
            return None
        if y.shape != loss.shape or y.dtype != np.complex128:
            return None
        y = y.reshape(-1)
        # Another, coarser way through (plain sums instead of compensated ones) would bring an
        # error that nobody has measured.
        allowed = 4 * self._level * norm(loss.u * loss.y)
        same = offset.any() or norm(loss.u * (y.real - loss.y)) <= allowed
        return y if same else None


def _offsets(x: Array) -> list[Array]:
    """Return moves of the argument: none, then pairs, there and back, of a few ulps an element."""
    # Of a generator of its own: whether this is tried must not change what is drawn elsewhere.
    rng = np.random.default_rng(x.size)
    offsets = [np.zeros(x.size)]
    for _ in range(_MOVES):
        ulps = rng.integers(1, _ULPS + 1, size=x.size) * rng.choice([-1.0, 1.0], size=x.size)
        move = ulps * np.spacing(np.abs(x))
        offsets += [move, -move]
    return offsets
