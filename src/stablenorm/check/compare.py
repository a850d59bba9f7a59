"""Compare the gradient of one argument with numeric derivatives, and judge it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from stablenorm.check.differences import Direction, Estimate, Noise, differentiate, measure_noise
from stablenorm.check.operation import Loss, flat, norm, sum_rounding, tiniest, unit_roundoff
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


@dataclass(frozen=True)
class Comparison:
    """One derivative, of an element (in units of the gradient) or along a probe."""

    # None: a probe.
    place: tuple[int, ...] | None
    direction: Direction
    derivative: Estimate
    bound_actual: float
    # What an error is relative to: the derivative; for an element, at least the RMS of all.
    size: float

    @property
    def bound(self) -> float:
        """Both bounds together."""
        return self.derivative.bound + self.bound_actual

    @property
    def kink(self) -> bool:
        """Whether left and right slopes keep their distance: there is no derivative."""
        return self.derivative.status == "kink"

    @property
    def judged(self) -> bool:
        """Whether the two sides can be compared."""
        return bool(np.isfinite(self.bound)) and self.derivative.status in ("smooth", "rounding")

    @property
    def z(self) -> float:
        """The difference in units of the bounds; 0 where nothing is known."""
        difference = abs(self.derivative.actual - self.derivative.numeric)
        return ratio(difference, self.bound) if self.judged else 0.0

    @property
    def differs(self) -> bool:
        """Whether the two sides are farther apart than both bounds explain."""
        return self.z > 1


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


def rms(values: Array, axis: int | None = None) -> Array:
    """Return the root mean square along an axis, kept, or of all, whose squares may overflow."""
    largest = float(np.max(np.abs(values), initial=0.0)) or 1.0
    squares = np.mean(np.square(values / largest), axis=axis, keepdims=axis is not None)
    return np.asarray(largest * np.sqrt(squares))


def rounding_bound(gradient: Array, loss: Loss) -> Array:
    """Bound, for each element of the gradient, the error of arithmetic in its dtype; flat."""
    values = np.atleast_1d(gradient.astype(np.float64))
    u, row_rms = unit_roundoff(gradient.dtype), rms(values, -1)
    shapes = [loss.shape, *(a.shape for a in loss.args if a is not None)]
    # The longest sum that can be in it: over an axis, or over all that a broadcast element meets.
    terms = max([length for shape in shapes for length in shape] + [loss.y.size / values.size, 1])
    half_ulp = np.maximum(u * np.abs(values), tiniest(gradient.dtype) / 2)
    sums = 4 * np.sqrt(terms) * min(u, 2.0**-24) * row_rms
    return (half_ulp + 4 * u * (np.abs(values) + row_rms) + sums).reshape(-1)


def natural_size(loss: Loss, span: Array) -> float:
    """Return the size of a gradient that makes y change by its own size over a scale."""
    return float(rms(loss.u * loss.y)) / float(np.median(span))


class Comparer:
    """
    Compares the gradient of one argument along any direction.

    `span` is the argument's scale, flat; `allowance` comes on top of what rounding explains.
    """

    def __init__(
        self,
        loss: Loss,
        position: int,
        name: str,
        span: Array,
        gradient: Array,
        allowance: Array | float,
        rng: np.random.Generator,
    ):
        self.loss, self.position, self.name, self.span = loss, position, name, span
        self.shape, self.dtype, self.rng = gradient.shape, gradient.dtype, rng
        self.gradient = flat(gradient)
        self.bounds = rounding_bound(gradient, loss) + allowance
        # By length of the steps: the noise that long steps see is, in part, the function itself.
        self._noises: dict[float, Noise] = {}

    def noise(self, factor: float) -> Noise:
        """Return the noise near x, measured by moves of `factor` times the usual length."""
        if factor not in self._noises:
            scale = self.span * factor
            self._noises[factor] = measure_noise(self.loss, self.position, scale, self.rng)
        return self._noises[factor]

    def compare(self, place: int | None) -> Comparison:
        """Compare one element, given by its flat index, or along random signs for all (None)."""
        if place is None:
            scale = self.span * self.rng.choice([-1.0, 1.0], size=self.span.size)
            return self._shortened(None, Direction(self.position, slice(None), scale))
        index = tuple(int(i) for i in np.unravel_index(place, self.shape))
        return self._shortened(index, Direction(self.position, place, self.span[place]))

    def _shortened(self, place: tuple[int, ...] | None, direction: Direction) -> Comparison:
        """
        Return a comparison that can be believed: with shorter steps, if need be.

        A wrong gradient differs at all steps from one and the same numeric derivative. Steps that
        reach a kink see a mean of slopes, and shorter ones, which do not reach it, another one,
        outside of both bounds. Then the shorter ones are right: a kink in their reach is in that
        of the longer ones too. But they may say FAIL only if steps shorter still agree. Short
        steps have wide bounds; so that they agree with the backward excuses nothing as long as
        they agree with the long steps as well.
        """
        found = self._compare(place, direction)
        # Of a difference: shorter steps say the same (True), or have contradicted longer ones.
        confirmed: bool | None = None
        for factor in _SHORTER:
            decided = found.judged and not found.differs
            if decided or np.min(self.span) * factor < 1e-290:
                break
            again = self._compare(place, direction, factor)
            # What only rounding explains is no answer here: short steps may not move a coarse
            # forward (float16 inside) at all.
            answer = again.derivative.status == "smooth"
            if not found.differs:
                if answer or again.kink:
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
        self, place: tuple[int, ...] | None, direction: Direction, factor: float = 1.0
    ) -> Comparison:
        scale, gradient = direction.scale, self.gradient[direction.where]
        # In units of the gradient for an element.
        unit = 1.0 if place is None else float(scale)
        if place is None:
            # Independent roundings; what is common to a row is random again by the signs.
            rounding = 2 * norm(self.bounds * scale) + sum_rounding(gradient * scale)
        else:
            rounding = float(self.bounds[direction.where])
        found = differentiate(
            self.loss,
            direction._replace(scale=scale * factor),
            gradient,
            rounding,
            self.noise(factor),
            self.rng,
            factor * unit,
        )
        size = norm(gradient * scale) if place is None else abs(found.numeric)
        return Comparison(place, direction, found, rounding + found.noise, size)


def _wavers(derivative: Estimate) -> bool:
    """
    Tell whether secants change more, by more than their noise, though steps have become shorter.

    A smooth function's change with step^2, to less than 0.4 from one step to the next. Past a kink
    at the distance d they go with 1 - d / step: the nearer the step comes to d, the more. This is
    asked where shorter steps have no answer: they drown in rounding (float32), or move nothing.
    """
    steps = list(pairwise(derivative.curve))
    changes = [abs(b.numeric - a.numeric) for a, b in steps]
    noises = [float(np.hypot(a.noise, b.noise)) for a, b in steps]
    later = zip(pairwise(changes), noises[1:], strict=True)
    return any(after > max(before, noise) for (before, after), noise in later)


def judge(comparer: Comparer, comparisons: list[Comparison]) -> ArgumentResult:
    """Turn the comparisons of one argument into its result."""
    elements = [c for c in comparisons if c.place is not None]
    typical = _typical(comparer, elements)
    seen = [
        ratio(c.bound, c.size if c.place is None else max(typical, c.size)) if c.judged else np.inf
        for c in comparisons
        if not c.kink
    ]
    resolution = max(seen, default=np.inf)
    failing = sum(c.differs for c in comparisons)
    worst = max(comparisons, key=lambda c: (c.judged, c.z))
    message = "" if failing else _doubt(comparer, comparisons, resolution)
    return ArgumentResult(
        name=comparer.name,
        verdict="FAIL" if failing else "INCONCLUSIVE" if message else "PASS",
        checked=len(elements),
        total=comparer.gradient.size,
        probes=len(comparisons) - len(elements),
        failing=failing,
        index=worst.place,
        actual=worst.derivative.actual,
        numeric=worst.derivative.numeric,
        bound_numeric=worst.derivative.bound,
        bound_actual=worst.bound_actual,
        resolution=float(resolution),
        message=message,
        pattern=_pattern(comparer, elements) if failing else "",
        differences=tuple(
            Difference(c.place, *c.derivative[:2], c.bound if c.judged else float("inf"))
            for c in elements
            if c.place is not None
        ),
        curve=worst.derivative.curve,
        shape=comparer.shape,
    )


def kinks(name: str, comparisons: list[Comparison]) -> list[Finding]:
    """Say where the forward is not differentiable, if it is not."""
    places = [c.place for c in comparisons if c.place is not None and c.kink]
    probes = sum(c.place is None and c.kink for c in comparisons)
    # Three are enough to see which.
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    seen = [f"not differentiable at {', '.join(map(str, places[:3]))}{more}"] if places else []
    seen += [f"{probes} probes cross kinks"] if probes else []
    message = "; ".join(seen) + ": not judged there"
    name = f"{name}: the forward is differentiable"
    return [Finding("smoothness", name, "NOTE", message)] if seen else []


def _doubt(comparer: Comparer, comparisons: list[Comparison], resolution: float) -> str:
    """Say why there can be no PASS; empty if there can."""
    elements = [c for c in comparisons if c.place is not None]
    bent = sum(c.kink for c in elements)
    if 2 * bent >= max(len(elements), 1):
        return f"not differentiable at {bent} of {len(elements)} elements"
    coarsest = max(_COARSEST, 16 * unit_roundoff(comparer.dtype))
    if not any(np.isfinite(c.derivative.bound) for c in comparisons):
        return "no differences: the forward is not finite nearby, or steps drown in the dtype"
    if np.isinf(resolution):
        loose = sum(not c.judged and not c.kink for c in comparisons)
        return f"no limit of the secants at {loose} places: steps too long, or not finite nearby"
    if not resolution <= coarsest:
        return f"coarser than {coarsest:.0e}: the forward is too noisy, too curved or not smooth"
    return ""


def _typical(comparer: Comparer, elements: list[Comparison]) -> float:
    """Return what errors are relative to: the RMS of the numeric gradient."""
    known = [c for c in elements if c.judged]
    numeric = np.array([c.derivative.numeric for c in known])
    size = float(rms(numeric)) if known else 0.0
    if any(abs(c.derivative.numeric) > c.bound for c in known):
        return size
    # A gradient that cannot be told from zero (n = 1, a masked input) has no size of its own.
    return max(size, natural_size(comparer.loss, comparer.span))


def _pattern(comparer: Comparer, elements: list[Comparison]) -> str:
    """Say where one argument differs."""
    if len(elements) == comparer.gradient.size:
        return name_pattern(np.array([c.differs for c in elements]).reshape(comparer.shape))
    failing = sum(c.differs for c in elements)
    if failing >= 0.9 * len(elements):
        return "everywhere"
    return f"{failing} of the {len(elements)} elements compared"


def name_pattern(wrong: Array) -> str:
    """Say which elements are wrong: one, a row, a column, all, or how many."""
    count, shape = int(np.sum(wrong)), wrong.shape
    # Nine in ten: a wrong factor leaves the few elements that are zero as they are.
    if count >= 0.9 * wrong.size:
        return "everywhere"
    if count == 1:
        return f"element {tuple(int(i) for i in np.argwhere(wrong)[0])}"
    matrix = wrong.reshape(-1, shape[-1])
    rows, columns = (np.flatnonzero(matrix.any(axis=axis)) for axis in (1, 0))
    if len(rows) == 1 and len(matrix) > 1:
        if rows[0] == len(matrix) - 1:
            return "last row"
        place = tuple(int(i) for i in np.unravel_index(rows[0], shape[:-1]))
        return f"row {place if len(place) > 1 else place[0]}"
    return f"column {columns[0]}" if len(columns) == 1 else f"{count} of {wrong.size} elements"
