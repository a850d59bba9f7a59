"""Compare the gradient of one argument with numeric derivatives, and judge it."""

from itertools import pairwise

import numpy as np
from numpy.random import Generator

from stablenorm.check.differences import Estimate, Noise, differentiate, measure_noise
from stablenorm.check.operation import Loss, flat, norm, sum_rounding, tiniest, unit_roundoff
from stablenorm.check.results import TINIEST, ArgumentResult, Difference, Finding
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


def sample(array: Array, gradient: Array, max_elements: int, rng: Generator) -> list[int]:
    """Choose flat indices: all of few, else the places where bugs live, and random ones."""
    size = array.size
    if size <= max_elements:
        return list(range(size))
    n = array.shape[-1]
    # The last full block of 128 (NumPy's own, and a usual tile) ends before this.
    block = n // 128 * 128
    extremes = np.abs(array).argmax(), np.abs(gradient).argmax()
    places = [0, n - 1, size - n, size - 1, max(block - 1, 0), min(block, n - 1), *extremes]
    chosen = dict.fromkeys(map(int, [*places, *rng.permutation(size)[:_SAMPLE]]))
    return list(chosen)[: min(_SAMPLE, max_elements)]


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
    bound: Array = half_ulp + 4 * u * (np.abs(values) + row_rms) + sums
    return bound.reshape(-1)


def natural_size(loss: Loss, span: Array) -> float:
    """Return the size of a gradient that makes y change by its own size over a scale."""
    return float(rms(loss.u * loss.y)) / float(np.median(span))


class Comparer:
    """
    Compares the gradient of one argument along any direction.

    `span` is the argument's scale, flat; `more` comes on top of what rounding usually explains.
    """

    def __init__(
        self, loss: Loss, position: int, span: Array, gradient: Array, more: Array, rng: Generator
    ):
        self.loss, self.position, self.span, self.rng = loss, position, span, rng
        self.shape, self.dtype, self.gradient = gradient.shape, gradient.dtype, flat(gradient)
        self.bounds = rounding_bound(gradient, loss) + more
        # By length of the steps: the noise that long steps see is, in part, the function itself.
        self._noises: dict[float, Noise] = {}

    def compare(self, place: int | None) -> Estimate:
        """
        Compare one element, given by its flat index, or along random signs for all (None).

        With shorter steps, if need be. A wrong gradient differs at all steps from one and the same
        numeric derivative. Steps that reach a kink see a mean of slopes, and shorter ones, which
        do not reach it, another one, outside of both bounds. Then the shorter ones are right: a
        kink in their reach is in that of the longer ones too. But they may say FAIL only if steps
        shorter still agree. Short steps have wide bounds; so that they agree with the backward
        excuses nothing as long as they agree with the long steps as well.
        """
        where = slice(None) if place is None else place
        scale = self.span[where]
        if place is None:
            scale = scale * self.rng.choice([-1.0, 1.0], scale.size)
        found = self._compare(where, scale, 1.0)
        # Of a difference: shorter steps say the same (True), or have contradicted longer ones.
        confirmed: bool | None = None
        for factor in _SHORTER:
            if (found.judged and found.z <= 1) or np.min(self.span) * factor < 1e-290:
                break
            again = self._compare(where, scale, factor)
            # What only rounding explains is no answer here: short steps may not move a coarse
            # forward (float16 inside) at all.
            answer = again.status == "smooth"
            if found.z <= 1:
                if answer or again.status == "kink":
                    found, confirmed = again, None
            elif answer:
                apart = abs(again.numeric - found.numeric)
                if apart > again.bound_numeric + found.bound_numeric:
                    found, confirmed = again, False
                elif again.z > 1:
                    confirmed = True
        doubtful = confirmed is False or (confirmed is None and _wavers(found))
        status = "no limit" if found.z > 1 and doubtful else found.status
        return found._replace(status=status, place=place)

    def _compare(self, where: int | slice, scale: Array, factor: float) -> Estimate:
        gradient, unit = self.gradient[where], 1.0
        if isinstance(where, slice):
            # Independent roundings; what is common to a row is random again by the signs.
            rounding = 2 * norm(self.bounds * scale) + sum_rounding(gradient * scale)
        else:
            rounding, unit = float(self.bounds[where]), float(scale)
        if factor not in self._noises:
            moves = self.span * factor
            self._noises[factor] = measure_noise(self.loss, self.position, moves, self.rng)
        moved = self.loss, self.position, where, scale * factor, gradient
        return differentiate(*moved, rounding, self._noises[factor], self.rng, factor * unit)


def _wavers(found: Estimate) -> bool:
    """
    Tell whether secants change more, by more than their noise, though steps have become shorter.

    A smooth function's change with step^2, to less than 0.4 from one step to the next. Past a kink
    at the distance d they go with 1 - d / step: the nearer the step comes to d, the more. This is
    asked where shorter steps have no answer: they drown in rounding (float32), or move nothing.
    """
    steps = list(pairwise(found.curve))
    changes = [abs(b.numeric - a.numeric) for a, b in steps]
    noises = [float(np.hypot(a.noise, b.noise)) for a, b in steps]
    later = zip(pairwise(changes), noises[1:], strict=True)
    return any(after > max(before, noise) for (before, after), noise in later)


def judge(name: str, comparer: Comparer, found: list[Estimate]) -> ArgumentResult:
    """Turn the comparisons of one argument into its result."""
    shape, gradient = comparer.shape, comparer.gradient
    elements = {each.place: each for each in found if each.place is not None}
    index = {place: tuple(map(int, np.unravel_index(place, shape))) for place in elements}
    # What errors are relative to: the RMS of the numeric gradient. One that cannot be told from
    # zero (n = 1, a masked input) has no size of its own.
    known = [each for each in elements.values() if each.judged]
    typical = float(rms(np.array([each.numeric for each in known]))) if known else 0.0
    if all(abs(each.numeric) <= each.bound for each in known):
        typical = max(typical, natural_size(comparer.loss, comparer.span))
    probed = norm(gradient * comparer.span)
    sizes = [probed if e.place is None else max(typical, abs(e.numeric)) for e in found]
    # Of every comparison but those at kinks, relative to the size of what is compared.
    seen = [
        each.bound / max(size, TINIEST) if each.judged else np.inf
        for each, size in zip(found, sizes, strict=True)
        if each.status != "kink"
    ]
    resolution = float(max(seen, default=np.inf))
    wrong = [each.place for each in found if each.z > 1]
    pattern = f"{len(elements.keys() & wrong)} of the {len(elements)} elements compared"
    if wrong and len(elements) == gradient.size:
        pattern = name_pattern(np.array([e.z > 1 for e in elements.values()]).reshape(shape))
    worst = max(found, key=lambda each: (each.judged, each.z))
    message = "" if wrong else _doubt(comparer, found, resolution)
    return ArgumentResult(
        name=name,
        verdict="FAIL" if wrong else "INCONCLUSIVE" if message else "PASS",
        checked=len(elements),
        total=gradient.size,
        probes=len(found) - len(elements),
        failing=len(wrong),
        index=None if worst.place is None else index[worst.place],
        actual=worst.actual,
        numeric=worst.numeric,
        bound_numeric=worst.bound_numeric,
        bound_actual=worst.bound_actual,
        resolution=resolution,
        message=message,
        pattern=pattern if wrong else "",
        differences=tuple(
            Difference(index[place], e.actual, e.numeric, e.bound if e.judged else float("inf"))
            for place, e in elements.items()
        ),
        curve=worst.curve,
    )


def kinks(name: str, found: list[Estimate], shape: tuple[int, ...]) -> list[Finding]:
    """Say where the forward is not differentiable, if it is not."""
    bent = [each.place for each in found if each.status == "kink"]
    places = [None if p is None else np.unravel_index(p, shape) for p in bent]
    seen = ["a probe" if p is None else str(tuple(map(int, p))) for p in places]
    # Three are enough to see which.
    more = f" and {len(seen) - 3} more" if len(seen) > 3 else ""
    message = f"not differentiable at {', '.join(seen[:3])}{more}: not judged there"
    name = f"{name}: the forward is differentiable"
    return [Finding("smoothness", name, "NOTE", message)] if seen else []


def _doubt(comparer: Comparer, found: list[Estimate], resolution: float) -> str:
    """Say why there can be no PASS; empty if there can."""
    elements = [each for each in found if each.place is not None]
    bent = sum(each.status == "kink" for each in elements)
    if 2 * bent >= max(len(elements), 1):
        return f"not differentiable at {bent} of {len(elements)} elements"
    coarsest = max(_COARSEST, 16 * unit_roundoff(comparer.dtype))
    if np.isinf(resolution):
        loose = sum(not each.judged and each.status != "kink" for each in found)
        return f"no limit of the secants at {loose} places: steps too long, or not finite nearby"
    if not resolution <= coarsest:
        return f"coarser than {coarsest:.0e}: the forward is too noisy, too curved or not smooth"
    return ""


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
