"""Compare the gradient of one argument with numeric derivatives, and judge it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.complex_step import ComplexStep
from stablenorm.check.differences import (
    Estimate,
    Noise,
    differentiate,
    measure_kink,
    measure_noise,
)
from stablenorm.check.operation import Loss, norm, sum_rounding, unit_roundoff
from stablenorm.check.pattern import name_pattern
from stablenorm.check.report import ArgumentResult, Difference, Finding, ratio
from stablenorm.types import Array

# Elements compared one by one in an argument too large for all of them: the special places of
# `sample` and about as many random ones; patterns are the business of the probes.
_SAMPLE = 12
# Where the steps are too long for the function (a kink nearby, a scale that misleads), they are
# divided by 2^8, the length of the tableau, up to three times: to 2^-33 of the scale, where the
# rounding of float64 leaves a derivative 6 digits.
_SHORTER = (2.0**-8, 2.0**-16, 2.0**-24)
# A bound coarser than this, relative to the RMS of the gradient, cannot judge: the usual mistakes
# (n - 1 for n, a missing eps) are of the order of 1/n, and rows of 1000 are usual.
_COARSEST = 1e-3


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
    derivative: Estimate
    bound_actual: float
    # What an error is relative to: the derivative; for an element, at least the RMS of all.
    size: float
    # How far apart left and right slopes are, all outputs added up; None if they are not.
    kink: float | None = None
    method: str = "secants"

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
        """Whether the two sides can be compared."""
        if not np.isfinite(self.bound):
            return False
        if self.kink is None:
            return self.derivative.settled
        # A few kinks do not excuse a whole probe: only what they can explain.
        explained = self.place is not None or self.difference <= self.kink + self.bound
        return self.derivative.status in ("smooth", "kink") and not explained

    @property
    def differs(self) -> bool:
        """Whether the two sides are farther apart than both bounds explain."""
        return self.z > 1

    @property
    def open(self) -> bool:
        """Whether shorter steps may give what these have not."""
        if self.place is None and self.kink is not None:
            return not self.judged
        return not self.derivative.settled and self.kink is None

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
    """Bound, for each element of the gradient, the error of arithmetic in its dtype."""
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
    """Return the allowance for the rounding errors that were measured in the backward."""
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
        # By length of the steps: the noise that long steps see is, in part, the function itself.
        self._noises: dict[float, Noise] = {}

    def noise(self, factor: float) -> Noise:
        """Return the noise near x, measured by moves of `factor` times the usual length."""
        if factor not in self._noises:
            scale = self.task.span * factor
            self._noises[factor] = measure_noise(self.loss, self.task.position, scale, self.rng)
        return self._noises[factor]

    def element(self, place: int) -> Comparison:
        """Compare one element, given by its flat index."""
        index = tuple(int(i) for i in np.unravel_index(place, self.task.array.shape))
        return self._shortened(self._compare(index, place, self.task.span[place]))

    def probe(self) -> Comparison:
        """Compare along random signs for all elements."""
        return self._shortened(self._compare(None, slice(None), self._signed(slice(None))))

    def differs(self, where: Array) -> bool:
        """Tell whether the elements at these flat indices differ, along random signs."""
        return self._compare(None, where, self._signed(where), kinks=False).differs

    def _signed(self, where: Any) -> Array:
        span = self.task.span[where]
        return np.asarray(span * self.rng.choice([-1.0, 1.0], size=span.size))

    def _shortened(self, first: Comparison) -> Comparison:
        """
        Return a comparison that can be believed: with shorter steps, if need be.

        A wrong gradient differs at all steps from one and the same numeric derivative. Steps that
        reach a kink see a mean of slopes, and shorter ones, which do not reach it, another one,
        outside of both bounds. Then the shorter ones are right: a kink in their reach is in that
        of the longer ones too. But they may say FAIL only if steps shorter still agree. Short
        steps have wide bounds; so that they agree with the backward excuses nothing as long as
        they agree with the long steps as well.
        """
        found = first
        # Of a difference: shorter steps say the same (True), or have contradicted longer ones.
        confirmed: bool | None = None
        for factor in _SHORTER:
            if not (found.open or found.differs) or np.min(self.task.span) * factor < 1e-290:
                break
            again = self._compare(found.place, found.where, found.scale, factor)
            # What only rounding explains is no answer here: short steps may not move a coarse
            # forward (float16 inside) at all.
            answer = again.derivative.status == "smooth"
            if not found.differs:
                if answer or again.kink is not None:
                    found, confirmed = again, None
            elif answer:
                before, after = found.derivative, again.derivative
                if abs(after.numeric - before.numeric) > after.bound + before.bound:
                    found, confirmed = again, False
                elif again.differs:
                    confirmed = True
        doubtful = confirmed is False or (confirmed is None and _wavers(found.derivative))
        if found.differs and doubtful:
            return replace(found, derivative=found.derivative._replace(status="no limit"))
        return found

    def _compare(
        self, place: Any, where: Any, scale: Array, factor: float = 1.0, *, kinks: bool = True
    ) -> Comparison:
        loss, position, gradient = self.loss, self.task.position, self.gradient[where]
        if place is None:
            # Independent roundings; what is common to a row is random again by the signs.
            rounding = 2 * norm(self.bounds[where] * scale) + sum_rounding(gradient * scale)
            size = norm(gradient * scale)
        else:
            rounding, size = float(scale * self.bounds[where]), 0.0
        short, noise = scale * factor, self.noise(factor)
        found = differentiate(
            loss, position, where, short, gradient, factor * rounding, noise, self.rng
        ).divided(factor)
        if place is not None:
            found, rounding = found.divided(float(scale)), float(self.bounds[where])
            size = abs(found.numeric)
        comparison = Comparison(place, where, scale, found, rounding + found.noise, size)
        if not kinks or (found.settled and not comparison.differs):
            return comparison
        bend = measure_kink(loss, position, where, short)
        if bend is not None:
            bend /= factor * (1.0 if place is None else float(scale))
        return replace(comparison, kink=bend)


def compare(comparer: Comparer, report: Callable[[], None]) -> list[Comparison]:
    """Differentiate along every chosen element and probe of one argument."""
    task = comparer.task
    found = []
    for place in task.where:
        found.append(comparer.element(place))
        report()
    for _ in range(task.probes):
        found.append(comparer.probe())
        report()
    return _with_complex_steps(comparer, found) if task.array.dtype == np.float64 else found


def _with_complex_steps(comparer: Comparer, found: list[Comparison]) -> list[Comparison]:
    """Return the comparisons with complex-step derivatives where those are to be had and finer."""
    useful = [c for c in found if c.judged and c.kink is None and not c.differs]
    # Where the gradient's own rounding is the coarser bound, nothing is to be gained.
    if not any(c.derivative.bound > c.bound_actual for c in useful):
        return found
    step = ComplexStep(comparer.loss, comparer.task.position, comparer.noise(1.0).level)
    usable = [c for c in found if c.judged and c.kink is None]
    slopes = step.slopes([(c.where, c.scale, c.place is not None) for c in usable])
    if slopes is None:
        return found
    for c, (numeric, _) in zip(usable, slopes, strict=True):
        # It is believed only where it agrees with the secants along every direction.
        if not abs(numeric - c.derivative.numeric) <= c.derivative.bound:
            return found
    known = {id(c): slope for c, slope in zip(usable, slopes, strict=True)}
    return [_finer(c, *known[id(c)]) if id(c) in known else c for c in found]


def _finer(c: Comparison, numeric: float, bound: float) -> Comparison:
    # A probe keeps its secants: what a backward loses to an offset adds up in ways that its own
    # bound does not know (the expanded form at 1e4, 26 000 elements: 1.6 times the bound).
    if c.place is None or not bound < c.derivative.bound:
        return c
    derivative = c.derivative._replace(numeric=numeric, bound=bound)
    return replace(c, derivative=derivative, method="complex step")


def _wavers(derivative: Estimate) -> bool:
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


def judge(comparer: Comparer, comparisons: list[Comparison]) -> ArgumentResult:
    """Turn the comparisons of one argument into its result."""
    task, loss = comparer.task, comparer.loss
    rms = _typical(task, loss, [c for c in comparisons if c.place is not None])
    smooth = [c for c in comparisons if c.judged or c.kink is None]
    resolution = max((_resolution(c, rms) for c in smooth), default=float("inf"))
    failing = sum(c.differs for c in comparisons)
    # Among those that cannot be judged, the farthest apart.
    worst = max(comparisons, key=lambda c: (c.judged, c.z, c.difference))
    message = "" if failing else _doubt(task, comparisons, resolution)
    complex_step = any(c.method == "complex step" for c in comparisons)
    return ArgumentResult(
        name=task.name,
        verdict="FAIL" if failing else "INCONCLUSIVE" if message else "PASS",
        checked=len(task.where),
        total=task.array.size,
        probes=task.probes,
        failing=failing,
        index=worst.place,
        actual=worst.derivative.actual,
        numeric=worst.derivative.numeric,
        bound_numeric=worst.derivative.bound,
        bound_actual=worst.bound_actual,
        resolution=resolution,
        message=message,
        method="complex step" if complex_step else "secants",
        pattern=find_pattern(comparer, comparisons),
        differences=tuple(
            Difference(
                c.place,
                c.derivative.actual,
                c.derivative.numeric,
                c.bound if c.judged else float("inf"),
            )
            for c in comparisons
            if c.place is not None
        ),
        curve=worst.derivative.curve,
        shape=task.array.shape,
    )


def kinks(name: str, comparisons: list[Comparison]) -> list[Finding]:
    """Say where the forward is not differentiable, if it is not."""
    places = [c.place for c in comparisons if c.place is not None and c.kink is not None]
    probes = sum(c.place is None and c.kink is not None for c in comparisons)
    if not places and not probes:
        return []
    seen = []
    if places:
        # Three are enough to see which.
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        seen.append("not differentiable at " + ", ".join(map(str, places[:3])) + more)
    if probes:
        seen.append(f"{probes} probes cross kinks")
    message = "; ".join(seen) + ": not judged there"
    return [Finding("smoothness", f"{name}: the forward is differentiable", "NOTE", message)]


def _resolution(c: Comparison, rms: float) -> float:
    if not c.judged:
        return float("inf")
    return ratio(c.bound, c.size if c.place is None else max(rms, c.size))


def _doubt(task: Task, comparisons: list[Comparison], resolution: float) -> str:
    """Say why there can be no PASS; empty if there can."""
    elements = [c for c in comparisons if c.place is not None]
    bent = sum(c.kink is not None for c in elements)
    if 2 * bent >= max(len(elements), 1):
        return f"not differentiable at {bent} of {len(elements)} elements"
    coarsest = max(_COARSEST, 16 * unit_roundoff(task.gradient.dtype))
    if not any(np.isfinite(c.derivative.bound) for c in comparisons):
        return "no differences: the forward is not finite nearby, or steps drown in the dtype"
    if np.isinf(resolution):
        loose = sum(not c.judged and c.kink is None for c in comparisons)
        return f"no limit of the secants at {loose} places: steps too long, or not finite nearby"
    if not resolution <= coarsest:
        return f"coarser than {coarsest:.0e}: the forward is too noisy, too curved or not smooth"
    return ""


def _typical(task: Task, loss: Loss, comparisons: list[Comparison]) -> float:
    """Return what errors are relative to: the RMS of the numeric gradient."""
    known = [c for c in comparisons if c.judged]
    numeric = np.array([c.derivative.numeric for c in known])
    largest = float(np.max(np.abs(numeric), initial=0.0)) or 1.0
    # Divided by the largest, lest squares overflow or vanish.
    rms = largest * float(np.sqrt(np.mean(np.square(numeric / largest)))) if known else 0.0
    bounds = np.array([c.bound for c in known])
    if (np.abs(numeric) > bounds).any():
        return rms
    # A gradient that cannot be told from zero (n = 1, a masked input) has no size of its own:
    # then, y changing by its own size over the argument's scale.
    natural = np.sqrt(np.mean(np.square(loss.u * loss.y))) / np.median(task.span)
    return max(rms, float(natural))


def find_pattern(comparer: Comparer, comparisons: list[Comparison]) -> str:
    """Say where one argument differs: an element, a row, a column, everywhere; "" for nowhere."""
    if not any(c.differs for c in comparisons):
        return ""
    shape, task = comparer.task.array.shape, comparer.task
    failing = [c.where for c in comparisons if c.place is not None and c.differs]
    # Nine in ten: a wrong factor leaves the few elements that are zero as they are.
    if len(failing) >= 0.9 * len(task.where):
        return "everywhere"
    if len(task.where) < task.array.size:
        return name_pattern(comparer.differs, shape)
    wrong = np.zeros(task.array.size, dtype=bool)
    wrong[failing] = True
    found = name_pattern(lambda where: bool(wrong[where].any()), shape)
    return f"{len(failing)} of {wrong.size} elements" if found == "several places" else found
