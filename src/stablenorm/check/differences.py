"""
Derivatives of a program by differences of the program itself, each with its own error bound.

One argument is moved along D, to x+ = x + step D and x- = x - step D, both *formed in floating point*.
<u, y+ - y-> is compared with <gradient, x+ - x->: the differences are exact (Sterbenz). The secants go
through a Richardson tableau in step^2. An entry's bound is its disagreement with its two parents
+ sum |weight| * noise / step, with measured noise; the least bound wins. The page on gradient checking
has the reasons and the sources.
"""

import functools
import math
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from stablenorm.check.operation import FaultError, Loss, as_array, flat, rms, tiniest, unit_roundoff
from stablenorm.check.results import TINIEST, ArgumentResult, Finding, Verdict
from stablenorm.records import Array, Shape

# In units of the argument's scale. At a quarter, the series in step^2 of a normalization converges
# fast; at 2^-9 the plain secant has a truncation error of 4e-6.
_STEPS = tuple(2.0**-k for k in range(2, 10))
# Factors of shorter steps, for a kink nearby or a scale that misleads: at 2^-33 of the scale, the
# rounding of float64 leaves a derivative 6 digits.
_SHORTER = (2.0**-8, 2.0**-16, 2.0**-24)
# Largest bound that says something, relative to the magnitudes in a secant: bounds are 1e-6 of them
# and less, or about 1 where the steps do not suit the function.
_SETTLED = 2.0**-7
# Largest noise, relative to what carries it: 3 bits, and there is no dtype of so few.
_ROUNDING = 0.125
# The line on which noise is measured: 9 points leave 4 differences of order 5 and 3 of order 6. At
# this spacing, an ulp of a float16, the fifth difference of a smooth function is 2^-55 of it.
_POINTS, _ORDERS, _SPACING = 9, (5, 6), 2.0**-11
# Runs with tiny moves: of 8 moves, the rounding of a sum of two floats goes unseen once in 2^8 rows;
# 18 runs leave 9 degrees of freedom. Moves add their square, 2^-56, to a smooth function's noise.
_RUNS, _MOVES, _TINY = 18, 8, 2.0**-31
# From a standard deviation to a bound: that of a secant, whose ends are independent, 5.6 times.
_SIGMAS = 4.0

# Elements compared of an argument too large for all: special places and about as many random ones.
_SAMPLE = 12
# A bound coarser than this, relative to the RMS of the gradient, cannot judge: the usual mistakes
# (n - 1 for n, a missing eps) are of the order of 1/n, and rows of 1000 are usual.
COARSEST = 1e-3

# The best bound is small beside the secants; the derivative is 0 but for rounding; left and right
# slope keep their distance; nothing is known.
Status = Literal["smooth", "rounding", "kink", "no limit"]
# The bound of an entry of the tableau, and its actual and numeric derivative.
Best = tuple[float, float, float]


class Estimate(NamedTuple):
    """<gradient, D>, the same by secants, and how far off both may be; `place` is None for a probe."""

    actual: float
    numeric: float
    bound_numeric: float
    bound_actual: float
    status: Status
    # Whether secants change as past a kink, not as those of a smooth function, with step^2.
    wavers: bool
    place: int | None = None

    @property
    def bound(self) -> float:
        """Both bounds together."""
        return self.bound_numeric + self.bound_actual

    @property
    def judged(self) -> bool:
        """Whether the two sides can be compared."""
        return bool(np.isfinite(self.bound)) and self.status in ("smooth", "rounding")

    @property
    def z(self) -> float:
        """The difference in units of the bounds; 0 where nothing is known."""
        return abs(self.actual - self.numeric) / max(self.bound, TINIEST) if self.judged else 0.0


class _Row(NamedTuple):
    """One row of the tableau: what the secant at `step` says, and what disturbs it."""

    step: float
    numeric: float
    actual: float
    # Errors other than noise: of the sum, and of a centre that is not exactly x.
    error: float
    # Magnitudes in which nothing cancels: of the terms of `numeric`, of slope, of right minus left.
    size: float
    slope: float
    bend: float
    # The outputs at x+ and x-.
    ends: Array

    @property
    def moved(self) -> Array:
        """Which outputs differ at both ends."""
        return np.asarray(self.ends[0] != self.ends[1])


class Argument:
    """An argument whose gradient is compared along any direction; `span` is its scale, flat."""

    def __init__(self, loss: Loss, name: str, gradients: dict[str, Any]):
        self.name, self.label, self.span = name, f"the gradient of {name}", loss.spans[name]
        self.loss, self.x, self._rng = loss, np.asarray(loss.args[name]), loss.rng
        self.gradient = self.settled(gradients)
        self._x, self._gradient = flat(self.x), flat(self.gradient)
        values = np.atleast_1d(self.gradient.astype(np.float64))
        u, row_rms = unit_roundoff(self.gradient.dtype), rms(values, -1)
        # Sizes: of a gradient that changes y by its own over a scale, of 256 roundings of the larger.
        self.natural_size = float(rms(loss.u * loss.y)) / float(np.median(self.span))
        self.explained = 2.0**8 * u * max(float(rms(self._gradient)), self.natural_size)
        shapes = [loss.dy.shape, *(a.shape for a in loss.args.values() if a is not None)]
        # The longest sum that can be in it: over an axis, or over all that a broadcast element meets.
        terms = max([length for s in shapes for length in s] + [loss.y.size / values.size, 1])
        half_ulp = np.maximum(u * np.abs(values), tiniest(self.gradient.dtype) / 2)
        sums = 4 * np.sqrt(terms) * min(u, 2.0**-24) * row_rms
        # How far arithmetic in its dtype may take each element off, flat.
        self.bounds = np.reshape(half_ulp + 4 * u * (np.abs(values) + row_rms) + sums, -1)
        # By length of the steps: long steps see, in part, the function itself.
        self._noise = functools.cache(self._measure_noise)
        self.found: list[Estimate] = []

    def settled(self, gradients: dict[str, Any]) -> Array:
        """Copy its own of all gradients, rounded to the coarsest dtype of it, of x and of dy."""
        gradient = as_array(self.label, gradients[self.name], self.x.shape)
        # A float64 scalar of NumPy makes float64 of all that it meets, and adds no digit to it.
        dtypes = gradient.dtype, self.x.dtype, self.loss.dy.dtype
        rounded: Array = gradient.astype(max(dtypes, key=unit_roundoff))
        return rounded if np.isfinite(rounded).all() else gradient.copy()

    def compare(self, place: int | None) -> None:
        """Compare one element, given by its flat index, or along random signs for all (None)."""
        # A wrong gradient differs from the same derivative at all steps. If shorter steps find another
        # derivative, longer ones reach past a kink: then FAIL needs still shorter steps that agree.
        where = slice(None) if place is None else place
        scale = self.span[where]
        if place is None:
            scale = scale * self._rng.choice([-1.0, 1.0], scale.size)
        estimate = self._compare(where, scale, 1.0)
        # True: shorter steps confirm a difference. False: they contradicted longer steps.
        confirmed: bool | None = None
        for factor in _SHORTER:
            if (estimate.judged and estimate.z <= 1) or np.min(self.span) * factor < 1e-290:
                break
            again = self._compare(where, scale, factor)
            # The status "rounding" is no answer: short steps may not move a coarse forward at all.
            answer = again.status == "smooth"
            if estimate.z <= 1:
                if answer or again.status == "kink":
                    estimate, confirmed = again, None
            elif answer:
                apart = abs(again.numeric - estimate.numeric)
                if apart > again.bound_numeric + estimate.bound_numeric:
                    estimate, confirmed = again, False
                elif again.z > 1:
                    confirmed = True
        # Short steps without an answer drown in rounding (float32), or move nothing.
        doubtful = confirmed is False or (confirmed is None and estimate.wavers)
        status = "no limit" if estimate.z > 1 and doubtful else estimate.status
        self.found.append(estimate._replace(status=status, place=place))

    def _compare(self, where: Any, scale: Array, factor: float) -> Estimate:
        """Compare along D, which moves the entries `where` by `scale`, with steps `factor` as long."""
        gradient, unit = self._gradient[where], factor
        if isinstance(where, slice):
            # Roundings are independent; random signs make an error common to a row random again.
            rounding = 2 * _norm(self.bounds * scale) + _sum_rounding(gradient * scale)
        else:
            rounding, unit = float(self.bounds[where]), float(scale) * factor
        scale, (samples, level) = scale * factor, self._noise(factor)
        rows = list[_Row]()
        for power in _STEPS:
            # Steps are not exactly halved, so the last bits of x change: a forward with the same rounding
            # errors at all steps would hide them from the tableau.
            row = self._secant(where, scale, gradient, power * (1 + self._rng.random() / 4))
            # Outputs that moved now stand still: a step below the resolution of the forward.
            if row and rows and rows[0].moved.any() and not row.moved.any():
                break
            if row:
                rows.append(row)
        if not rows:
            return Estimate(
                float(np.sum(gradient * scale)) / unit,
                math.nan,
                math.inf,
                math.inf,
                "no limit",
                False,
            )
        # The first step goes farthest: later ones seldom move an output that it did not.
        reach = np.where(rows[0].moved, np.max(np.abs([self.loss.y, *rows[0].ends]), axis=0), 0.0)
        noise, usual = self._bound_noise(samples, level, reach)
        best = _extrapolate(rows, noise)
        status = _status(best, rows, noise, usual, level)
        # Past a kink at d, secants change as 1 - d / step: more at shorter steps.
        changes = [abs(b.numeric - a.numeric) for a, b in pairwise(rows)]
        noises = [noise * math.hypot(1 / a.step, 1 / b.step) for a, b in pairwise(rows)]
        wavers = any(np.greater(changes[1:], np.maximum(changes[:-1], noises[1:])))
        bound, actual, numeric = (part / unit for part in best)
        return Estimate(actual, numeric, bound, noise / unit + rounding, status, wavers)

    def _secant(self, where: Any, scale: Array, gradient: Array, step: float) -> _Row | None:
        """Form x+ and x-, and compare; None where the dtype cannot make this step."""
        loss, x = self.loss, self._x[where]

        def rounded(values: Array) -> Array:
            return values.astype(self.x.dtype).astype(np.float64)

        # Exactly symmetric about x: each side takes a step that the other can represent.
        minus = rounded(x - (rounded(x + step * scale) - x))
        plus = rounded(x + (x - minus))
        taken = plus - minus
        # The tableau assumes one direction; rounding x may change it by a sixteenth.
        if not _norm(taken / (2 * step * scale) - 1) <= np.sqrt(np.size(x)) / 16:
            return None
        ends = np.array([self._output(where, end) for end in (plus, minus)])
        if not np.isfinite(ends).all():
            return None
        # The step that was taken; for a single element, this makes `actual` the gradient itself.
        step = float(np.mean(taken / scale)) / 2
        terms = loss.u * (ends[0] - ends[1])
        numeric, actual = (float(np.sum(a)) / (2 * step) for a in (terms, gradient * taken))
        size = float(np.sum(np.abs(terms))) / (2 * step)
        off_centre = float(np.max(np.abs((plus - x) - (x - minus)) / (2 * np.abs(scale))))
        bends = loss.u * (ends[0] + ends[1] - 2 * loss.y) / step
        # 8 roundings: the few operations on `actual` and on the tableau.
        error = _sum_rounding(terms) / (2 * step) + 2.0**-50 * abs(actual)
        error += abs(float(np.sum(bends))) / step * off_centre
        slope = _norm(terms) / (2 * step)
        return _Row(step, numeric, actual, error, size, slope, _norm(bends), ends)

    def _output(self, where: Any, values: Array) -> Array:
        """Return y, flat, with the entries `where` of x replaced; NaN if there is none."""
        loss, moved = self.loss, np.array(self.x, order="C")
        moved.reshape(-1)[where] = values.astype(moved.dtype)
        try:
            y, _ = loss.operation.forward(loss.args | {self.name: moved})
            return flat(as_array("y", y, loss.dy.shape))
        except FaultError as fault:
            loss.faults.setdefault(fault.raised, str(fault))
        return np.full(loss.y.size, np.nan)

    def _measure_noise(self, factor: float) -> tuple[list[Array], float]:
        """Return samples of the rounding noise of every element of u y, and its usual relative size."""
        # All elements move by random multiples of their ulp, so that every rounding is drawn anew:
        # along a line, where high differences leave noise of a known multiple (More and Wild) and
        # float16 inside is seen, and by random combinations of tiny moves, where all that is
        # orthogonal to linear effects is noise, that of a sum over equal moves too.
        loss, rng, x, scale = self.loss, self._rng, self._x, self.span * factor
        # An ulp of x: the moved x needs no rounding, and has new last bits.
        smallest = np.frexp(np.maximum(np.abs(x), _TINY * scale))[1]
        quantum = np.maximum(np.ldexp(2 * unit_roundoff(self.x.dtype), smallest - 1), TINIEST)

        def moves(size: float, count: int) -> Array:
            ulps = np.maximum(size * scale / quantum, 1)
            # No factor is near 0, so that every element gets a new rounding.
            factors = rng.uniform(1, 2, (count, x.size)) * rng.choice([-1, 1], (count, x.size))
            return np.asarray(np.round(factors * ulps) * quantum)

        def outputs(offsets: Array) -> Array:
            values = [self._output(slice(None), x + move) for move in offsets[1:]]
            table = np.array([loss.y, *values]) * loss.u
            # An output that is not finite near x has no noise: its bound will be infinite.
            return np.where(np.isfinite(table), table, 0.0)

        table = outputs(np.arange(_POINTS)[:, None] * moves(_SPACING, 1))
        # The k-th difference of noise of variance 1 has variance (2k)! / (k!)^2.
        samples = [np.diff(table, k, axis=0) / math.sqrt(math.comb(2 * k, k)) for k in _ORDERS]
        # The first run is x itself.
        design = rng.integers(-3, 4, size=(_RUNS, _MOVES)) * (np.arange(_RUNS) > 0)[:, None]
        linear = np.column_stack([np.ones(_RUNS), design])
        noise_only = np.linalg.qr(linear, mode="complete").Q[:, linear.shape[1] :]
        samples.append(noise_only.T @ outputs(design @ moves(_TINY, _MOVES)))
        # The median of all outputs: one ill-conditioned row must not speak for the others.
        sigma = np.sqrt(np.max([np.mean(np.square(sample), axis=0) for sample in samples], axis=0))
        size = np.abs(loss.u * loss.y)
        relative = float(np.median(sigma[size > 0] / size[size > 0])) if (size > 0).any() else 0.0
        # At least half an ulp: every output was rounded to its dtype.
        return samples, max(_SIGMAS * relative, 2 * unit_roundoff(loss.dy.dtype))

    def _bound_noise(self, samples: list[Array], level: float, reach: Array) -> tuple[float, float]:
        """Bound the noise of <u, y> where `reach` is not 0; second, the size of u y."""
        loss = self.loss
        usual = _norm(loss.u * np.where(reach > 0, reach, np.abs(loss.y)))
        reach = reach if reach.any() else np.abs(loss.y) + TINIEST
        places = np.flatnonzero(reach)
        summed = max(float(np.mean(sample[:, places].sum(axis=1) ** 2)) for sample in samples)
        # At least the usual noise of all outputs, in unrelated directions.
        return max(_SIGMAS * math.sqrt(summed), level * _norm((loss.u * reach)[places])), usual

    def places(self, max_elements: int, probes: int) -> list[int | None]:
        """Choose flat indices: all of few, else the places where bugs live, random ones, and probes."""
        if (size := self.x.size) <= max_elements:
            return list(range(size))
        n = self.x.shape[-1]
        # The last full block of 128 (NumPy's own, and a usual tile) ends before this.
        block = min(n // 128 * 128, n - 1)
        special = 0, n - 1, size - n, size - 1, max(block - 1, 0), block, abs(self._x).argmax()
        chosen = dict.fromkeys(map(int, [*special, *self._rng.permutation(size)[:_SAMPLE]]))
        return [*list(chosen)[: min(_SAMPLE, max_elements)], *[None] * probes]

    def judge(self) -> tuple[ArgumentResult, Finding | None]:
        """Turn the comparisons into a result, and say where there is no derivative."""
        shape, estimates = self.x.shape, self.found
        elements = [e for e in estimates if e.place is not None]
        # Errors are relative to the RMS of the numeric gradient. One that cannot be told from zero
        # (n = 1, a masked input) has no size of its own.
        known = [e for e in elements if e.judged]
        typical = float(rms(np.array([e.numeric for e in known]))) if known else 0.0
        if all(abs(e.numeric) <= e.bound for e in known):
            typical = max(typical, self.natural_size)
        probed = _norm(self._gradient * self.span)

        def coarseness(e: Estimate) -> float:
            size = probed if e.place is None else max(typical, abs(e.numeric))
            return float(e.bound / max(size, TINIEST)) if e.judged else np.inf

        # The coarsest comparison, those at kinks left out, relative to the size of both sides.
        resolution = max((coarseness(e) for e in estimates if e.status != "kink"), default=np.inf)
        coarsest = max(COARSEST, 16 * unit_roundoff(self.gradient.dtype))
        bent = [e.place for e in estimates if e.status == "kink"]
        at_kinks = sum(place is not None for place in bent)
        wrong = np.array([e.z > 1 for e in elements])
        verdict: Verdict = "INCONCLUSIVE"
        pattern = why = ""
        if failing := sum(e.z > 1 for e in estimates):
            verdict, pattern = "FAIL", f"{wrong.sum()} of the {len(elements)} elements compared"
            if len(elements) == self.x.size:
                pattern = name_pattern(wrong.reshape(shape))
        elif 2 * at_kinks >= max(len(elements), 1):
            why = f"not differentiable at {at_kinks} of {len(elements)} elements"
        elif np.isinf(resolution):
            loose = sum(not e.judged for e in estimates) - len(bent)
            why = f"no limit of the secants at {loose} places: steps too long, or not finite nearby"
        elif resolution <= coarsest:
            verdict = "PASS"
        else:
            why = f"coarser than {coarsest:.0e}: the forward is too noisy, too curved or not smooth"
        worst = max(estimates, key=lambda e: (e.judged, e.z))
        index = None if worst.place is None else place_of(worst.place, shape)
        counts = len(elements), self.x.size, len(estimates) - len(elements), failing
        rest: tuple[Any, ...] = (resolution, why, "secants", pattern)
        errors = np.full(self.x.size, np.nan)
        for e in known:
            errors[e.place] = e.actual - e.numeric
        rest += (errors.reshape(shape),)
        result = ArgumentResult(self.name, verdict, *counts, index, *worst[:4], *rest)
        # Name three places at most.
        seen = ", ".join("a probe" if p is None else f"{place_of(p, shape)}" for p in bent[:3])
        seen += f" and {len(bent) - 3} more" * (len(bent) > 3)
        name = f"{self.name}: the forward is differentiable"
        said = f"not differentiable at {seen}: not judged there"
        return result, Finding("smoothness", name, "NOTE", said) if bent else None


def _norm(a: Array) -> float:
    """Return the root of the sum of squares."""
    # np.linalg.norm starts threads of its BLAS, 30 times as slow for 10 000 numbers while others are
    # busy (3 ms on two cores, 2026-11), and its bits depend on their number.
    return float(np.sqrt(np.sum(np.square(a))))


def _sum_rounding(terms: Array) -> float:
    """Bound the error of NumPy's pairwise sum of float64 terms that were computed just before."""
    return (math.log2(terms.size + 1) + 8) * 2.0**-53 * float(np.sum(np.abs(terms)))


def _status(best: Best, rows: list[_Row], noise: float, usual: float, level: float) -> Status:
    """Tell whether the bound of the best entry can be believed."""
    bound, actual, numeric = best
    if len(rows) < 2 or not np.isfinite(bound):
        return "no limit"
    last = rows[-1]
    # Right and left slope keep their distance. Steps shrink to 0.4 .. 0.63 times the one before, and
    # with them the bend of a smooth function; a kink of 0.4 % would be taken for a wrong gradient.
    bent = len(rows) > 2 and all(b.bend > 0.8 * a.bend for a, b in pairwise(rows[-3:]))
    bent = bent and last.bend > max(2.0**-8 * last.slope, 4 * level * usual / last.step)
    # Entries of the first steps may agree by chance, and the last steps contradict them.
    newest, previous = (row.numeric - row.actual for row in rows[:-3:-1])
    strayed = abs(numeric - actual - newest)
    # An error in step^2 is 0.2 to 0.7 times the last change; one in 1 / step, 1.6 times and more.
    reach = bound + abs(newest - previous)
    # At a kink the slopes may cancel (|x| at 0), but not their difference.
    small = bound <= _SETTLED * (max(last.size, last.bend) if bent else last.size)
    # A step function's slopes grow as steps shrink; those of others change by a hundredth.
    before, after = rows[-2].slope, last.slope
    small = small and abs(after - before) <= 0.25 * max(after, before)
    if small and strayed <= reach:
        return "kink" if bent else "smooth"
    # Only rounding remains. Steps too long for the function would "measure" a noise as large as y.
    little = noise <= _ROUNDING * usual and bound <= 8 * noise / last.step
    near = not bent and strayed <= reach + 2 * noise / last.step
    return "rounding" if (small or little) and near else "no limit"


def _extrapolate(rows: list[_Row], noise: float) -> Best:
    """Return the entry of the tableau in step^2 with the least bound."""
    actual, numeric, disturbance = np.transpose(
        [(row.actual, row.numeric, noise / row.step + row.error) for row in rows]
    )
    apart, line, best = numeric - actual, list[Array](), (math.inf, float(actual[-1]), math.nan)
    # Entries are weights of the secants.
    for k, secant in enumerate(np.eye(len(rows))):
        previous, line = line, [secant]
        for j, above in enumerate(previous, 1):
            # Eliminates the term in step^(2j): neighbours weighted by their squared steps.
            q = (rows[k - j].step / rows[k].step) ** 2
            left, entry = line[-1], (q * line[-1] - above) / (q - 1)
            disagreement = max(abs(float(apart @ (entry - parent))) for parent in (left, above))
            bound = disagreement + float(np.abs(entry) @ disturbance)
            best = min(best, (bound, float(actual @ entry), float(numeric @ entry)))
            line.append(entry)
    return best


def place_of(place: int, shape: Shape) -> Shape:
    """Return the index of an element given by its flat index."""
    return tuple(map(int, np.unravel_index(place, shape)))


def name_pattern(wrong: Array) -> str:
    """Say which elements are wrong: one, a row, a column, all, or how many."""
    count, shape = int(np.sum(wrong)), wrong.shape
    # Nine in ten: a wrong factor leaves the few elements that are zero as they are.
    if count >= 0.9 * wrong.size:
        return "everywhere"
    if count == 1:
        return f"element {place_of(int(wrong.argmax()), shape)}"
    matrix = wrong.reshape(-1, shape[-1])
    rows, columns = (np.flatnonzero(matrix.any(axis=axis)) for axis in (1, 0))
    if len(rows) == 1 and len(matrix) > 1:
        place = place_of(int(rows[0]), shape[:-1])
        is_last = rows[0] == len(matrix) - 1
        return "last row" if is_last else f"row {place if len(place) > 1 else place[0]}"
    return f"column {columns[0]}" if len(columns) == 1 else f"{count} of {wrong.size} elements"
