"""Judge the gradient of one argument by its comparisons with numeric derivatives."""

import numpy as np
from numpy.random import Generator

from stablenorm.check.arithmetic import TINIEST, flat, norm, rms, unit_roundoff
from stablenorm.check.differences import Comparer, Estimate
from stablenorm.check.operation import Argument
from stablenorm.check.results import ArgumentResult, ArgumentVerdict, Finding
from stablenorm.types import Array

# Elements compared one by one in an argument too large for all of them: the special places of
# `places` and about as many random ones; patterns are the business of the probes.
_SAMPLE = 12
# A bound coarser than this, relative to the RMS of the gradient, cannot judge: the usual mistakes
# (n - 1 for n, a missing eps) are of the order of 1/n, and rows of 1000 are usual.
_COARSEST = 1e-3


def places(argument: Argument, max_elements: int, probes: int, rng: Generator) -> list[int | None]:
    """Choose flat indices: all of few, else the places where bugs live, random ones, and probes."""
    x, size = argument.x, argument.x.size
    if size <= max_elements:
        return list(range(size))
    n = x.shape[-1]
    # The last full block of 128 (NumPy's own, and a usual tile) ends before this.
    block = n // 128 * 128
    extremes = np.abs(x).argmax(), np.abs(argument.gradient).argmax()
    special = [0, n - 1, size - n, size - 1, max(block - 1, 0), min(block, n - 1), *extremes]
    chosen = dict.fromkeys(map(int, [*special, *rng.permutation(size)[:_SAMPLE]]))
    return [*list(chosen)[: min(_SAMPLE, max_elements)], *[None] * probes]


def judge(comparer: Comparer, found: list[Estimate]) -> ArgumentResult:
    """Turn the comparisons of one argument into its result."""
    name, _, x, span, gradient = comparer.argument
    elements = [each for each in found if each.place is not None]
    # The size of errors is relative to the RMS of the numeric gradient. One that cannot be told from
    # zero (n = 1, a masked input) has no size of its own.
    known = [each for each in elements if each.judged]
    typical = float(rms(np.array([each.numeric for each in known]))) if known else 0.0
    if all(abs(each.numeric) <= each.bound for each in known):
        typical = max(typical, comparer.loss.natural_size(span))
    probed = norm(flat(gradient) * span)

    def coarseness(each: Estimate) -> float:
        size = probed if each.place is None else max(typical, abs(each.numeric))
        return float(each.bound / max(size, TINIEST)) if each.judged else np.inf

    # The coarsest comparison, those at kinks left out, relative to the size of both sides.
    resolution = max((coarseness(e) for e in found if e.status != "kink"), default=np.inf)
    wrong = np.array([each.z > 1 for each in elements])
    failing, pattern = sum(each.z > 1 for each in found), ""
    if failing:
        pattern = f"{wrong.sum()} of the {len(elements)} elements compared"
        if len(elements) == x.size:
            pattern = name_pattern(wrong.reshape(x.shape))
    worst = max(found, key=lambda each: (each.judged, each.z))
    index = None if worst.place is None else place_of(worst.place, x.shape)
    message = "" if failing else _doubt(gradient, found, resolution)
    verdict: ArgumentVerdict = "FAIL" if failing else "INCONCLUSIVE" if message else "PASS"
    counts = len(elements), x.size, len(found) - len(elements), failing
    numbers = worst.actual, worst.numeric, worst.bound_numeric, worst.bound_actual, resolution
    return ArgumentResult(name, verdict, *counts, index, *numbers, message, pattern=pattern)


def kinks(argument: Argument, found: list[Estimate]) -> list[Finding]:
    """Say where the forward is not differentiable, if it is not."""
    bent = [each.place for each in found if each.status == "kink"]
    places = ["a probe" if p is None else str(place_of(p, argument.x.shape)) for p in bent]
    # Three are enough to see which.
    seen = ", ".join(places[:3]) + f" and {len(bent) - 3} more" * (len(bent) > 3)
    message = f"not differentiable at {seen}: not judged there"
    name = f"{argument.name}: the forward is differentiable"
    return [Finding("smoothness", name, "NOTE", message)] if bent else []


def _doubt(gradient: Array, found: list[Estimate], resolution: float) -> str:
    """Say why there can be no PASS; empty if there can."""
    elements = [each.status for each in found if each.place is not None]
    bent = elements.count("kink")
    if 2 * bent >= max(len(elements), 1):
        return f"not differentiable at {bent} of {len(elements)} elements"
    coarsest = max(_COARSEST, 16 * unit_roundoff(gradient.dtype))
    if np.isinf(resolution):
        loose = sum(not each.judged and each.status != "kink" for each in found)
        return f"no limit of the secants at {loose} places: steps too long, or not finite nearby"
    if not resolution <= coarsest:
        return f"coarser than {coarsest:.0e}: the forward is too noisy, too curved or not smooth"
    return ""


def place_of(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
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
