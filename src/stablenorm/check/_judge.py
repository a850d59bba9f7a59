"""From comparisons to a verdict on one argument."""

from __future__ import annotations

import numpy as np

from stablenorm.check._compare import Comparison, Task
from stablenorm.check._loss import Loss, unit_roundoff
from stablenorm.check._report import ArgumentResult, Difference, Finding, ratio

# A bound coarser than this, relative to the RMS of the gradient, cannot judge: the usual mistakes
# (n - 1 for n, a missing eps) are of the order of 1/n, and rows of 1000 are usual.
_COARSEST = 1e-3


def judge(task: Task, loss: Loss, comparisons: list[Comparison], pattern: str) -> ArgumentResult:
    """Turn the comparisons of one argument into its result."""
    rms = _typical(task, loss, [c for c in comparisons if c.place is not None])
    smooth = [c for c in comparisons if c.judged or c.kink is None]
    resolution = max((_resolution(c, rms) for c in smooth), default=float("inf"))
    failing = sum(c.z > 1 for c in comparisons)
    # Among those that cannot be judged, the farthest apart.
    worst = max(comparisons, key=lambda c: (c.judged, c.z, c.difference))
    message = "" if failing else _doubt(task, comparisons, resolution)
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
        method=_method(comparisons),
        pattern=pattern,
        differences=tuple(
            Difference(c.place, c.derivative.actual, c.derivative.numeric, _believed(c))
            for c in comparisons
            if c.place is not None
        ),
        curve=worst.derivative.curve,
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


def _believed(c: Comparison) -> float:
    return c.bound if c.judged else float("inf")


def _method(comparisons: list[Comparison]) -> str:
    return "complex step" if any(c.method == "complex step" for c in comparisons) else "secants"


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
