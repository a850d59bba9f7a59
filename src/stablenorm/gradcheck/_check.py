"""`check_gradients`: any hand-written operation, argument by argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array, check_dtype
from stablenorm.gradcheck._arguments import check_args, check_finite, check_names, check_scales
from stablenorm.gradcheck._report import ArgumentResult, GradientReport, ratio
from stablenorm.gradcheck._secants import (
    Derivative,
    Forward,
    Loss,
    differentiate,
    measure_noise,
    unit_roundoff,
)

Backward = Callable[[Array, Any], Any]
Progress = Callable[[int, int], object]

# Elements compared one by one in an argument too large for all of them: the special places of
# `_sample` and about as many random ones; patterns are the business of the probes.
_SAMPLE = 12
# A bound coarser than this, relative to the RMS of the gradient, cannot judge: the usual mistakes
# (n - 1 for n, a missing eps) are of the order of 1/n, and rows of 1000 are usual.
_COARSEST = 1e-3


@dataclass(frozen=True)
class _Comparison:
    """One derivative, of an element (in units of the gradient) or along a probe."""

    place: tuple[int, ...] | None
    derivative: Derivative
    bound_actual: float
    # What an error is relative to: the derivative; for an element, at least the RMS of all.
    size: float

    @property
    def bound(self) -> float:
        return self.derivative.bound + self.bound_actual

    @property
    def z(self) -> float:
        difference = abs(self.derivative.actual - self.derivative.numeric)
        # An infinite bound comes with a numeric derivative of NaN: nothing is known.
        return 0.0 if np.isinf(self.bound) else ratio(difference, self.bound)


def check_gradients(
    forward: Forward,
    backward: Backward,
    args: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    scales: Sequence[Any] | None = None,
    rng: Any = None,
    probes: int = 3,
    max_elements: int = 64,
    progress: Progress | None = None,
) -> GradientReport:
    r"""
    Compare the gradients that `backward` returns with finite differences of `forward`.

    There is no tolerance to choose. Every numeric derivative comes with a bound on its own error,
    made of the disagreement within a Richardson tableau and of the measured rounding noise of
    the forward, and an element is accepted iff

        \|actual - numeric\| <= bound_numeric + bound_actual

    where `bound_actual` is what the dtype of the returned gradient explains (see Notes).

    Parameters
    ----------
    forward : callable
        ``forward(*args) -> (y, cache)``. Deterministic. `y` is one floating array (or scalar).
    backward : callable
        ``backward(dy, cache) -> gradients``, a tuple, NamedTuple or list in the order of `args`,
        each of the shape of its argument and of any floating dtype; None: not checked. `dy` has
        the shape and dtype of `y`.
    args : sequence of array or None
        Where to check: float16, bfloat16, float32 or float64, finite. None is passed on, and its
        gradient is not looked at. Not modified: `forward` gets copies. To check a float32
        backward finely, give float64 arrays here and let `backward` return float32 gradients.
    names : sequence of str, optional
        Names of the arguments in the report. Default: ``args[0]``, ``args[1]``, ...
    scales : sequence, optional
        For each argument the length over which the forward changes appreciably: a positive
        scalar or an array that broadcasts to the argument's shape, or None for the default, the
        standard deviation along the last axis. Never \|x\|: for a forward that ignores an
        offset (softmax, every normalization), such a step grows with the offset and soon
        leaves the neighbourhood.
    rng : int or numpy.random.Generator, optional
        For the cotangent, the probes and the sampled elements; see `numpy.random.default_rng`.
    probes : int, default: 3
        Random directions, through all elements at once, for arguments that are sampled. The
        chance that all of three see less than 1 % of an error of rank one is 5e-5.
    max_elements : int, default: 64
        An argument of at most so many elements is checked in all of them, a larger one in 12
        (first, last, ends of blocks, extremes, random) and by probes.
    progress : callable, optional
        Called as ``progress(done, total)``, in derivatives.

    Returns
    -------
    GradientReport
        `verdict` is FAIL if an element differs by more than both bounds, or a gradient is not
        there or has a wrong shape, is not floating or not finite; INCONCLUSIVE if a bound is
        coarser than 1e-3 of the element and of the RMS of the gradient (16 roundings of its
        dtype, where that is more), or nothing could be compared; else PASS.

    Raises
    ------
    TypeError
        If an argument, or the y of the forward, does not have one of the four floating dtypes.
    ValueError
        If `args` is empty or not finite, or `names` or `scales` do not match it.

    See Also
    --------
    assert_gradients : The same for a test suite.
    check_layer_norm : Knows more, for layer normalization.

    Notes
    -----
    `bound_actual` is half an ulp, plus 4 u (\|actual\| + RMS), where u is the unit roundoff of
    the gradient's dtype and RMS is taken along the last axis of the gradient (a handful of
    operations on terms of which the element may be the small difference), plus 4 sqrt(terms) u'
    RMS for sums (each of `terms` additions rounds, independently), where u' is u or float32's,
    whichever is less: a sum of float16 is expected to be kept in float32; plus the measured noise
    of the forward over the argument's scale, for the backward starts from what the forward has
    computed. A backward that is less accurate than that fails, though its formula be right.

    Each derivative takes at most 16 forward calls, usually 8 to 14, and each argument 25 more for
    the noise. About 16 times y is kept in float64 for each argument.

    Examples
    --------
    >>> import numpy as np
    >>> forward = lambda x: (np.sin(x), x)
    >>> x = np.linspace(-1.0, 2.0, 8)
    >>> check_gradients(forward, lambda dy, x: (dy * np.cos(x),), [x], rng=0).verdict
    'PASS'
    >>> check_gradients(forward, lambda dy, x: (dy * np.sin(x),), [x], rng=0).verdict
    'FAIL'
    """
    rng = np.random.default_rng(rng)
    arrays = check_args(args)
    labels = check_names(names, len(arrays))
    spans = check_scales(scales, arrays)
    for label, array in zip(labels, arrays, strict=True):
        check_finite(label, array)
    loss = Loss(forward, arrays, rng)
    # Finite differences first would do as well; but a backward that raises should do so at once.
    gradients = _gradients(backward(loss.cotangent(), loss.cache), len(arrays))
    results: list[ArgumentResult | None] = []
    tasks: list[_Task] = []
    for position, (label, array, span) in enumerate(zip(labels, arrays, spans, strict=True)):
        gradient = gradients if isinstance(gradients, str) else gradients[position]
        result = _refuse(label, array, gradient)
        results.append(result)
        if result is None and array is not None and span is not None:
            values = np.asarray(gradient)
            where = _sample(array, values, max_elements, rng)
            count = probes if len(where) < array.size else 0
            tasks.append(_Task(position, label, array, span, values, where, count))
    report = _count(progress, sum(len(task.where) + task.probes for task in tasks))
    for task in tasks:
        results[task.position] = _judge(task, loss, _compare(task, loss, rng, report))
    return GradientReport(tuple(r for r in results if r is not None), loss.calls)


def assert_gradients(
    forward: Forward, backward: Backward, args: Sequence[Any], **options: Any
) -> None:
    """
    Raise unless `check_gradients` says PASS.

    Parameters
    ----------
    forward, backward : callable
        As for `check_gradients`.
    args : sequence of array or None
        As for `check_gradients`.
    **options : Any
        The other arguments of `check_gradients`.

    Raises
    ------
    AssertionError
        With the text of the report, if the verdict is FAIL or INCONCLUSIVE.

    See Also
    --------
    check_gradients : Returns the report instead.

    Examples
    --------
    >>> import numpy as np
    >>> square = lambda x: (x * x, x)
    >>> assert_gradients(square, lambda dy, x: (2 * x * dy,), [np.array([1.0, -3.0])])
    """
    report = check_gradients(forward, backward, args, **options)
    if not report.passed:
        raise AssertionError(str(report))


class _Task(NamedTuple):
    """One argument to be compared, at the flat indices `where` and along `probes` directions."""

    position: int
    name: str
    array: Array
    span: Array
    gradient: Array
    where: list[int]
    probes: int


def _gradients(returned: Any, count: int) -> list[Any] | str:
    """Return the gradients as a list, or the sentence that says what came instead."""
    if not isinstance(returned, (tuple, list)):
        kind = type(returned).__name__
        return f"backward must return a tuple, NamedTuple or list of gradients, got {kind}"
    if len(returned) != count:
        return f"backward must return {count} gradients, one for each argument, got {len(returned)}"
    return list(returned)


def _refuse(name: str, array: Array | None, gradient: Any) -> ArgumentResult | None:
    """Return the result for an argument where there is nothing to compare, else None."""
    if array is None:
        return ArgumentResult(name, "NOT CHECKED", message="the argument is None")
    total = array.size
    if gradient is None:
        message = "backward returned None for it"
        return ArgumentResult(name, "NOT CHECKED", total=total, message=message)
    message = gradient if isinstance(gradient, str) else _fault(array, np.asarray(gradient))
    if message:
        return ArgumentResult(name, "FAIL", total=total, failing=total, message=message)
    if total == 0:
        return ArgumentResult(name, "NOT CHECKED", message="the argument is empty")
    return None


def _fault(array: Array, gradient: Array) -> str:
    """Say what is wrong with a gradient, without looking at its values; empty if nothing is."""
    if gradient.shape != array.shape:
        return f"the gradient must have shape {array.shape}, that of its argument, got " + str(
            gradient.shape
        )
    try:
        check_dtype("the gradient", gradient)
    except TypeError as error:
        return str(error)
    wrong = np.argwhere(~np.isfinite(gradient))
    if len(wrong):
        place = tuple(int(i) for i in wrong[0])
        return f"the gradient must be finite, got {gradient[place]} at {place} ({len(wrong)} such)"
    return ""


def _sample(
    array: Array, gradient: Array, max_elements: int, rng: np.random.Generator
) -> list[int]:
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


def _count(progress: Progress | None, total: int) -> Callable[[], None]:
    """Return a function to be called after each derivative."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return step


def _rounding_bound(task: _Task, loss: Loss) -> Array:
    """Return, for each element of the gradient, how far its dtype's arithmetic may take it off."""
    values = np.atleast_1d(task.gradient.astype(np.float64))
    u = unit_roundoff(task.gradient.dtype)
    rms = np.sqrt(np.mean(np.square(values), axis=-1, keepdims=True))
    shapes = [loss.shape, *(a.shape for a in loss.args if a is not None)]
    # The longest sum that can be in it: over an axis, or over all that a broadcast element meets.
    terms = max([length for shape in shapes for length in shape] + [loss.y.size / values.size, 1])
    tiniest = float(np.nextafter(task.gradient.dtype.type(0), task.gradient.dtype.type(1)))
    half_ulp = np.maximum(u * np.abs(values), tiniest / 2)
    sums = 4 * np.sqrt(terms) * min(u, 2.0**-24) * rms
    return (half_ulp + 4 * u * (np.abs(values) + rms) + sums).reshape(-1)


def _compare(
    task: _Task, loss: Loss, rng: np.random.Generator, report: Callable[[], None]
) -> list[_Comparison]:
    """Differentiate along every chosen element and probe of one argument."""
    measure_noise(loss, task.position, task.span, rng)
    gradient = task.gradient.astype(np.float64).reshape(-1)
    bounds = _rounding_bound(task, loss)
    comparisons = []
    for place in task.where:
        scale = task.span[place]
        found = differentiate(
            loss, task.position, place, scale, gradient[place], scale * bounds[place], rng
        )
        # In units of the gradient: exact, since the scale is a power of two.
        found = Derivative(*(float(part / scale) for part in found))
        index = tuple(int(i) for i in np.unravel_index(place, task.array.shape))
        bound = float(bounds[place]) + found.noise
        comparisons.append(_Comparison(index, found, bound, abs(found.numeric)))
        report()
    for _ in range(task.probes):
        scale = task.span * rng.choice([-1.0, 1.0], size=task.span.size)
        # Independent roundings; what is common to a row is random again by the signs.
        bound = 2 * float(np.linalg.norm(bounds * scale))
        found = differentiate(loss, task.position, slice(None), scale, gradient, bound, rng)
        size = float(np.linalg.norm(gradient * scale))
        comparisons.append(_Comparison(None, found, bound + found.noise, size))
        report()
    return comparisons


def _judge(task: _Task, loss: Loss, comparisons: list[_Comparison]) -> ArgumentResult:
    """Turn the comparisons of one argument into its result."""
    rms = _typical(task, loss, [c for c in comparisons if c.place is not None])
    resolution = max(
        ratio(c.bound, c.size if c.place is None else max(rms, c.size)) for c in comparisons
    )
    failing = sum(c.z > 1 for c in comparisons)
    worst = max(comparisons, key=lambda c: c.z)
    coarsest = max(_COARSEST, 16 * unit_roundoff(task.gradient.dtype))
    message = ""
    if np.isinf(resolution):
        message = "no differences: the forward is not finite nearby, or steps drown in the dtype"
    elif resolution > coarsest:
        message = f"coarser than {coarsest:.0e}: the forward is too noisy, too curved or not smooth"
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
        message="" if failing else message,
    )


def _typical(task: _Task, loss: Loss, comparisons: list[_Comparison]) -> float:
    """Return what errors are relative to: the RMS of the numeric gradient."""
    numeric = np.array([c.derivative.numeric for c in comparisons])
    known = np.isfinite(numeric)
    rms = float(np.sqrt(np.mean(np.square(numeric[known])))) if known.any() else 0.0
    bounds = np.array([c.bound for c in comparisons])
    if (np.abs(numeric[known]) > bounds[known]).any():
        return rms
    # A gradient that cannot be told from zero (n = 1, a masked input) has no size of its own:
    # then, y changing by its own size over the argument's scale.
    natural = np.sqrt(np.mean(np.square(loss.u * loss.y))) / np.median(task.span)
    return max(rms, float(natural))
