"""One argument at a time: where to look, and the gradient beside the numeric derivative there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.check._complex import improve
from stablenorm.check._loss import Loss, norm, sum_rounding, unit_roundoff
from stablenorm.check._noise import measure_noise
from stablenorm.check._report import ratio
from stablenorm.check._secants import Derivative, differentiate
from stablenorm.check._smoothness import measure_bend

# Elements compared one by one in an argument too large for all of them: the special places of
# `sample` and about as many random ones; patterns are the business of the probes.
_SAMPLE = 12
# Where the steps are too long for the function (a kink nearby, a scale that misleads), they are
# divided by 2^8, the length of the tableau, up to three times: to 2^-33 of the scale, where the
# rounding of float64 leaves a derivative 6 digits.
_SHORTER, _ROUNDS = 2.0**-8, 4


class Task(NamedTuple):
    """One argument to be compared, at the flat indices `where` and along `probes` directions."""

    position: int
    name: str
    array: Array
    span: Array
    gradient: Array
    where: list[int]
    probes: int
    # Of the backward, measured, flat; None where nobody has.
    roundings: Array | None = None


@dataclass(frozen=True)
class Comparison:
    """One derivative, of an element (in units of the gradient) or along a probe."""

    # None: a probe.
    place: tuple[int, ...] | None
    where: Any
    # The direction, in entries that are signed powers of two.
    scale: Array
    derivative: Derivative
    bound_actual: float
    # What an error is relative to: the derivative; for an element, at least the RMS of all.
    size: float
    # How far apart left and right slopes are, all outputs added up; None if they are not.
    kink: float | None = None
    method: str = "secants"
    # Of a difference: shorter steps say the same; they contradict what longer ones said; nothing.
    confirmed: bool | None = None

    @property
    def bound(self) -> float:
        """Both bounds together."""
        return self.derivative.bound + self.bound_actual

    @property
    def difference(self) -> float:
        """How far the two sides are apart."""
        return abs(self.derivative.actual - self.derivative.numeric)

    @property
    def judged(self) -> bool:
        """Whether the two sides may be held against one another."""
        if not np.isfinite(self.bound):
            return False
        if self.kink is None:
            return self.derivative.settled
        # A few kinks do not excuse a whole probe: only what they can explain.
        explained = self.place is not None or self.difference <= self.kink + self.bound
        return self.derivative.converged and not explained

    @property
    def z(self) -> float:
        """The difference in units of the bounds; 0 where nothing is known."""
        return ratio(self.difference, self.bound) if self.judged else 0.0


def sample(array: Array, gradient: Array, max_elements: int, rng: np.random.Generator) -> list[int]:
    """Choose flat indices: all of few, else the places where bugs live, and random ones."""
    size = array.size
    if size <= max_elements:
        return list(range(size))
    n = array.shape[-1]
    x = array.astype(np.float64).reshape(-1, n)
    centered = np.abs(x - x.mean(axis=-1, keepdims=True))
    places = [
        *(0, n - 1, size - n, size - 1),
        # The last full block of 128 (NumPy's own, and a usual tile) and what follows it.
        *((n // 128) * 128 - 1, min((n // 128) * 128, n - 1)),
        *(np.abs(x).argmax(), centered.argmin(), np.abs(gradient).argmax()),
    ]
    chosen = dict.fromkeys(int(place) for place in places if place >= 0)
    for place in rng.permutation(size)[:_SAMPLE]:
        if len(chosen) >= min(_SAMPLE, max_elements):
            break
        chosen[int(place)] = None
    return list(chosen)[:max_elements]


def _row_rms(gradient: Array) -> Array:
    """Return the root mean square along the last axis, for every element."""
    values = np.atleast_1d(gradient.astype(np.float64))
    # Divided by the largest, lest squares overflow or vanish.
    largest = float(np.max(np.abs(values), initial=0.0)) or 1.0
    rms = largest * np.sqrt(np.mean(np.square(values / largest), axis=-1, keepdims=True))
    return np.broadcast_to(rms, values.shape)


def rounding_bound(gradient: Array, loss: Loss) -> Array:
    """Return, for each element of the gradient, how far its dtype's arithmetic may take it off."""
    values = np.atleast_1d(gradient.astype(np.float64))
    u, rms = unit_roundoff(gradient.dtype), _row_rms(gradient)
    shapes = [loss.shape, *(a.shape for a in loss.args if a is not None)]
    # The longest sum that can be in it: over an axis, or over all that a broadcast element meets.
    terms = max([length for shape in shapes for length in shape] + [loss.y.size / values.size, 1])
    tiniest = float(np.nextafter(gradient.dtype.type(0), gradient.dtype.type(1)))
    half_ulp = np.maximum(u * np.abs(values), tiniest / 2)
    sums = 4 * np.sqrt(terms) * min(u, 2.0**-24) * rms
    return (half_ulp + 4 * u * (np.abs(values) + rms) + sums).reshape(-1)


def _measured(task: Task, loss: Loss) -> Array | float:
    """Return what the backward's roundings, as measured, allow its gradient besides."""
    if task.roundings is None:
        return 0.0
    # Less the rounding of the gradient itself, twice drawn, which is in the bound already.
    u = unit_roundoff(task.gradient.dtype)
    own = 1.5 * u * _row_rms(task.gradient).reshape(-1)
    # Of few samples, so many times their size; as for the additivity in dy.
    bound = 16 * np.maximum(task.roundings - own, 0.0)
    # Never more than rounding what the gradient is made of can explain: the gradient itself, or y
    # changing by its own size over the argument's scale. A backward that keeps float32 inside,
    # 2^29 of these roundings, must not excuse itself.
    values = task.gradient.astype(np.float64)
    natural = norm(loss.u * loss.y) / np.sqrt(loss.y.size) / float(np.median(task.span))
    typical = max(norm(values.reshape(-1)) / np.sqrt(values.size), natural)
    return np.minimum(bound, 2.0**8 * u * typical)


class Comparer:
    """Compares along any direction of one argument; holds what all of them have in common."""

    def __init__(self, task: Task, loss: Loss, rng: np.random.Generator):
        self.task, self.loss, self.rng = task, loss, rng
        self.gradient = task.gradient.astype(np.float64).reshape(-1)
        self.bounds = rounding_bound(task.gradient, loss) + _measured(task, loss)
        measure_noise(loss, task.position, task.span, rng)

    def element(self, place: int) -> Comparison:
        """Compare one element, given by its flat index."""
        index = tuple(int(i) for i in np.unravel_index(place, self.task.array.shape))
        return self._again(index, place, self.task.span[place], 1.0)

    def probe(self, where: Any, *, kinks: bool = True) -> Comparison:
        """Compare along random signs for the elements `where`, a slice or flat indices."""
        span = self.task.span[where]
        return self._again(
            None, where, span * self.rng.choice([-1.0, 1.0], size=span.size), 1.0, kinks
        )

    def shorter(self, comparison: Comparison, factor: float) -> Comparison:
        """
        Compare once more, with steps of `factor` times the length.

        What differs is replaced only by what contradicts it. A wrong gradient differs at all
        steps from one and the same numeric derivative; that of steps which reach a kink is a mean
        of slopes, and shorter steps, which do not reach it, have another one, outside of both
        bounds. Then the shorter ones are right: a kink in their reach is in that of the longer
        ones too. Short steps have wide bounds; so that they agree with the backward excuses
        nothing as long as they agree with the long steps as well.
        """
        place, where, scale = comparison.place, comparison.where, comparison.scale
        found = self._again(place, where, scale, factor)
        # What only rounding explains is no answer here: short steps may not move a coarse
        # forward (float16 inside) at all.
        settled = found.derivative.settled and found.derivative.converged
        if comparison.z <= 1:
            return found if settled or found.kink is not None else comparison
        if not settled:
            return comparison
        before, after = comparison.derivative, found.derivative
        contradicted = abs(after.numeric - before.numeric) > after.bound + before.bound
        if contradicted:
            return replace(found, confirmed=False)
        return replace(comparison, confirmed=True) if found.z > 1 else comparison

    def _again(
        self, place: Any, where: Any, scale: Array, factor: float, kinks: bool = True
    ) -> Comparison:
        loss, position, gradient = self.loss, self.task.position, self.gradient[where]
        if place is None:
            # Independent roundings; what is common to a row is random again by the signs.
            rounding = 2 * norm(self.bounds[where] * scale) + sum_rounding(gradient * scale)
            size = norm(gradient * scale)
        else:
            rounding, size = float(scale * self.bounds[where]), 0.0
        short = scale * factor
        found = differentiate(
            loss, position, where, short, gradient, factor * rounding, self.rng
        ).divided(factor)
        if place is not None:
            found, rounding = found.divided(float(scale)), float(self.bounds[where])
            size = abs(found.numeric)
        bound = rounding + found.noise
        comparison = Comparison(place, where, scale, found, bound, size)
        if not kinks or (found.settled and comparison.z <= 1):
            return comparison
        bend = measure_bend(loss, position, where, short)
        if bend is not None:
            bend /= factor * (1.0 if place is None else float(scale))
        return replace(comparison, kink=bend)


def compare(comparer: Comparer, report: Callable[[], None]) -> list[Comparison]:
    """Differentiate along every chosen element and probe of one argument."""
    task, loss = comparer.task, comparer.loss
    found = []
    for place in task.where:
        found.append(comparer.element(place))
        report()
    for _ in range(task.probes):
        found.append(comparer.probe(slice(None)))
        report()
    _shorten(comparer, found)
    return improve(loss, task.position, found) if task.array.dtype == np.float64 else found


def _shorten(comparer: Comparer, found: list[Comparison]) -> None:
    """Repeat, in place and with shorter steps, what has not settled and what differs."""
    task, loss = comparer.task, comparer.loss
    noise, level = loss.noise[task.position], loss.level[task.position]
    factor = 1.0
    for _ in range(1, _ROUNDS):
        todo = [i for i, c in enumerate(found) if _open(c) or c.z > 1]
        factor *= _SHORTER
        if not todo or np.min(task.span) * factor < 1e-290:
            break
        # The noise that long steps see is, in part, the function itself.
        measure_noise(loss, task.position, task.span * factor, comparer.rng)
        for i in todo:
            found[i] = comparer.shorter(found[i], factor)
    for i, c in enumerate(found):
        # One word against another is no difference; nor is one word that wavers.
        doubtful = c.confirmed is False or (c.confirmed is None and _wavers(c.derivative))
        if c.z > 1 and doubtful:
            found[i] = replace(c, derivative=c.derivative._replace(settled=False))
    loss.noise[task.position], loss.level[task.position] = noise, level


def _wavers(derivative: Derivative) -> bool:
    """
    Tell whether secants change more, by more than their noise, though steps have become shorter.

    A smooth function's change with step^2, to less than 0.4 from one step to the next. Past a kink
    at the distance d they go with 1 - d / step: the nearer the step comes to d, the more. This is
    asked where shorter steps have no answer: they drown in rounding (float32), or move nothing.
    """
    curve = derivative.curve
    changes = [abs(b.numeric - a.numeric) for a, b in pairwise(curve)]
    noises = [float(np.hypot(a.noise, b.noise)) for a, b in pairwise(curve)]
    later = zip(pairwise(changes), noises[1:], strict=True)
    return any(after > max(before, noise) for (before, after), noise in later)


def _open(c: Comparison) -> bool:
    """Tell whether shorter steps may give what these have not."""
    if c.place is None:
        return not c.derivative.settled or (c.kink is not None and not c.judged)
    return not c.derivative.settled and c.kink is None
