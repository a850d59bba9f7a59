"""`check_gradients`: any hand-written operation, argument by argument."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from stablenorm.check.differences import Argument
from stablenorm.check.nested import flattened, is_nested
from stablenorm.check.operation import (
    Backward,
    FaultError,
    Given,
    Loss,
    Missing,
    Operation,
    Unknown,
    as_array,
)
from stablenorm.check.results import _NO_ARGUMENT, ArgumentResult, Finding, GradientReport, Verdict
from stablenorm.check.rules import check_rules, widen_bounds
from stablenorm.formats import check_dtype
from stablenorm.output import shape_text
from stablenorm.records import Array

Progress = Callable[[int, int], object]
Outcome = tuple[list[ArgumentResult], list[Finding]]


def check_gradients(
    forward: Callable[..., Any], backward: Backward, args: Sequence[Any],
    *, names: Sequence[str] | None = None, scales: Sequence[Any] | None = None, rng: Any = None,
    probes: int = 3, max_elements: int = 64, noise: float = 0.0, progress: Progress | None = None,
) -> GradientReport:  # fmt: skip
    """
    Compare the gradients that `backward` returns with finite differences of `forward`.

    There is no tolerance to choose: every numeric derivative comes with an estimate of its own
    error. An element is accepted if ``|actual - numeric| <= bound_numeric + bound_actual``.

    Parameters
    ----------
    forward : callable
        ``forward(*args) -> (y, cache)``, for `args` and points near them. `cache` may be anything.
        What it raises or warns of near them is not passed on.
    backward : callable
        ``backward(dy, cache) -> gradients``, a tuple, NamedTuple or list in the order of `args`,
        each of the shape of its argument and of any floating dtype; None: not checked. `dy` is as `y`.
    args : sequence of array or None
        Where to check: float16, bfloat16, float32 or float64, finite. Not modified. None is passed
        on, and its gradient not looked at. To check a float32 backward finely, give float64 arrays
        here and let `backward` return float32 gradients. A dict or a list of arrays is checked array by
        array; its gradient has its form.
    names : sequence of str, optional
        Names of the arguments in the report. Default: ``args[0]``, ``args[1]``, ...
    scales : sequence, optional
        For each argument the length over which the forward changes appreciably: positive, a scalar or
        an array that broadcasts to it. Default, and None: the standard deviation along the last axis.
        Do not pass ``|x|``: under a large offset such a step is far too long.
    rng : int or numpy.random.Generator, optional
        For the cotangent, the probes and the sampled elements; see `numpy.random.default_rng`.
    probes, max_elements : int, default: 3 and 64
        An argument of at most `max_elements` is checked in all its elements, a larger one in 12 (first,
        last, ends of blocks, extremes, random) and along `probes` random directions.
    noise : float, default: 0.0
        How far apart the gradients of two equal calls may be, relative to the largest element: for a
        backward that is known not to be deterministic, as one with atomic additions.
    progress : callable, optional
        Called as ``progress(done, total)``, which count derivatives.

    Returns
    -------
    GradientReport
        What the functions under test do wrong is in `findings` and never raised. `verdict` is

        - FAIL if an element differs by more than both bounds; if a gradient is missing, has a wrong
          shape, is not floating or not finite; or if the contract is broken: inputs are modified,
          results are random, or the backward is not linear in dy;
        - INCONCLUSIVE if both bounds together exceed 1e-3, or 16 roundings of the gradient's dtype
          if those are more, of the element and of the gradient's RMS; if the secants have no limit; if
          half the elements or more are at kinks; if the forward raises; or if nothing was compared;
        - PASS otherwise.

    Raises
    ------
    TypeError, ValueError
        If an argument does not have one of the four floating dtypes; if `args` is empty or not
        finite, or `names` or `scales` do not match it.

    Notes
    -----
    `bound_numeric` is an estimate of the error, not a proven bound. `bound_actual` is the sum of, with u the unit
    roundoff of the gradient's dtype and RMS along the last axis:

    - half an ulp, and ``4 u (|actual| + RMS)``;
    - for sums, ``4 sqrt(terms) RMS`` times u or that of float32, whichever is less;
    - the measured noise of the forward, divided by the argument's scale;
    - 16 times the measured departure of the backward from being linear in dy, at most ``256 u RMS``.

    Elements at a kink are not judged; a finding of the layer "smoothness" names them. Check code with
    kinks in float64: in float32 short steps drown in rounding.

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
    if any(map(is_nested, args)):
        forward, backward, args, names = flattened(forward, backward, args, names)
    operation, (arrays, spans) = Operation(forward, backward), check_args(args, names, scales)
    sound, refused, findings = begin(operation, arrays, spans, rng, noise)
    judged = _compare(sound, findings, probes, max_elements, progress) if sound else {}
    outcome = [refused[name] or judged[name] for name in arrays], findings
    about = [f"{n} {shape_text(a.shape)} {a.dtype}" for n, a in arrays.items() if a is not None]
    about += [f"seed {rng}"] * isinstance(rng, int)
    return make_report(operation, outcome, ", ".join(about))


def assert_gradients(
    forward: Callable[..., Any], backward: Backward, args: Sequence[Any], **options: Any
) -> None:
    """
    Raise AssertionError, with the report, unless `check_gradients`, of the same parameters, says PASS.

    Examples
    --------
    >>> import numpy as np
    >>> square = lambda x: (x * x, x)
    >>> assert_gradients(square, lambda dy, x: (2 * x * dy,), [np.array([1.0, -3.0])])
    """
    report = check_gradients(forward, backward, args, **options)
    if not report.passed:
        raise AssertionError(str(report))


def make_report(
    operation: Operation, outcome: Outcome, about: str,
    readings: Mapping[str, Any] = MappingProxyType({}), causes: Sequence[str] = (),
) -> GradientReport:  # fmt: skip
    """Return the report of results, findings, formulas and causes, with the cost of all calls."""
    results, findings = outcome
    # A modified array can spoil correct results, so the causes begin with it.
    modified = [f.message for f in findings if " modifies " in f.message]
    named, readings = [*modified, *causes], {} if modified else readings
    # One fault of all gradients, as an exception is, is said once.
    faults = {r.name: r.message for r in results if r.verdict == "FAIL" and not r.judged}
    is_one = len({*faults.values()}) == 1 and len(faults) == len(results)
    named += (
        list(faults.values())[:1] if is_one else [f"d{n}: {words}" for n, words in faults.items()]
    )
    # By the names of the arguments: "x" for dx.
    formula, right = (
        {n.removeprefix("d"): getattr(r, k) for n, r in readings.items()}
        for k in ("formula", "right")
    )
    return GradientReport(
        tuple(results), operation.forward_calls, tuple(findings), tuple(named), operation.backward_calls,
        time.perf_counter() - operation.start, about, formula, right, operation.trace,
    )  # fmt: skip


@np.errstate(all="ignore")
def begin(
    operation: Operation, args: Given, spans: dict[str, Array], rng: Any, noise: float = 0.0
) -> tuple[list[Argument], dict[str, ArgumentResult | None], list[Finding]]:
    """Check the rules of a call; return the gradients that can be judged, the results of others, findings."""

    def unchecked(why: str) -> dict[str, ArgumentResult | None]:
        """Return the results of arguments that cannot be judged."""
        return {name: ArgumentResult(name, "NOT CHECKED", message=why) for name in args}

    try:
        loss = Loss(operation, args, spans, np.random.default_rng(rng))
        loss.noise = noise
    except FaultError as fault:
        verdict: Verdict = "INCONCLUSIVE" if fault.raised else "FAIL"
        operation.trace = fault.trace
        findings = [Finding("contract", "the forward returns (y, cache)", verdict, str(fault))]
        return [], unchecked("there is nothing to compare with"), findings
    form, gradients = "", dict.fromkeys(args)
    # Call the backward first: it may raise.
    try:
        gradients = operation.gradients(loss.dy.copy(), loss.cache)
    except FaultError as fault:
        form, operation.trace = str(fault), fault.trace
    refused = {n: _refused(n, a, gradients[n], form) for n, a in args.items()}
    sound = [Argument(loss, name, gradients) for name, result in refused.items() if not result]
    findings = check_rules(loss, sound, backward=not form)
    if any(f.verdict == "FAIL" and f.name == "the forward is deterministic" for f in findings):
        return [], unchecked("the forward is not deterministic"), findings
    if message := operation.overwritten:
        findings.append(Finding("contract", "results last", "NOTE", message))
    return sound, refused, findings


@np.errstate(all="ignore")
def _compare(
    sound: list[Argument], findings: list[Finding], probes: int, most: int, progress: Any
) -> dict[str, ArgumentResult]:
    """Compare gradients with finite differences; return the results by name, and add to `findings`."""
    loss = sound[0].loss
    widen_bounds(loss, sound)
    work = [(argument, place) for argument in sound for place in argument.places(most, probes)]
    for done, (argument, place) in enumerate(work, 1):
        argument.compare(place)
        if progress is not None:
            progress(done, len(work))
    judged = {argument.name: argument.judge() for argument in sound}
    findings += [bent for _, bent in judged.values() if bent]
    for raised, message in loss.faults.items():
        name = ("y always has one shape", "the forward can be called near the arguments")[raised]
        findings.append(Finding("contract", name, "NOTE" if raised else "FAIL", message))
    return {name: result for name, (result, _) in judged.items()}


def _refused(name: str, array: Array | None, gradient: Any, fault: str) -> ArgumentResult | None:
    """Return the result of an argument that cannot be compared, or None; `fault` is the backward's."""
    if array is None or (not fault and (gradient is None or isinstance(gradient, Unknown))):
        why = _NO_ARGUMENT if array is None else gradient or "backward returned None for it"
        return ArgumentResult(name, "NOT CHECKED", message=why)
    try:
        fault = fault or (gradient if isinstance(gradient, Missing) else "")
        gradient = array if fault else as_array("the gradient", gradient, array.shape)
        if places := [*map(tuple, np.argwhere(~np.isfinite(gradient)).tolist())]:
            first = f"{gradient[places[0]]} at {places[0]}"
            fault = f"the gradient must be finite, got {first} ({len(places)} such)"
    except FaultError as error:
        fault = str(error)
        if getattr(gradient, "ndim", 0) > array.ndim:
            fault += "; sum over the other axes"
    if fault:
        return ArgumentResult(name, "FAIL", total=array.size, failing=array.size, message=fault)
    if not array.size:
        return ArgumentResult(name, "NOT CHECKED", message="the argument is empty")
    return None


def check_args(
    args: Sequence[Any], names: Sequence[str] | None, scales: Sequence[Any] | None
) -> tuple[dict[str, Array | None], dict[str, Array]]:
    """Return by name the arguments, as C-contiguous copies, and their scales, flat powers of two."""
    if not isinstance(args, (tuple, list)) or len(args) == 0:
        msg = f"args must be a tuple or list of at least one array, got {args!r:.60}"
        raise ValueError(msg)
    labels = [f"args[{i}]" for i in range(len(args))] if names is None else list(names)
    if len(labels) != len(args) or len(set(labels)) != len(args):
        msg = f"names must be one name for each of {len(args)} args, all different, got {labels}"
        raise ValueError(msg)
    scales = [None] * len(args) if scales is None else scales
    if len(scales) != len(args):
        msg = f"scales must have one entry for each of {len(args)} args, got {len(scales)}"
        raise ValueError(msg)
    arrays, spans = dict[str, Array | None](), dict[str, Array]()
    for label, value, scale in zip(labels, args, scales, strict=True):
        if value is None:
            arrays[label], spans[label] = None, np.zeros(0)
            continue
        # A copy, so that nothing that forward or backward does can reach the caller's array.
        array = arrays[label] = np.array(value, order="C")
        check_dtype(label, array)
        if not np.isfinite(array).all():
            msg = f"{label} must be finite to be differentiated, got NaN or infinity"
            raise ValueError(msg)
        span = np.ones(1) if scale is None else np.asarray(scale, dtype=np.float64)
        if scale is None and array.size:
            # Divide by the largest magnitude, lest squares overflow or vanish.
            largest = float(np.max(np.abs(array))) or 1.0
            values = np.atleast_1d(array.astype(np.float64)) / largest
            # The spread along the last axis; if that is only rounding, of the whole array; else 1.
            span = values.std(axis=-1, keepdims=array.ndim > 0)
            for fallback in (float(values.std()), 1.0):
                span = np.where(span > 2.0**-50, span, fallback)
            span = span * largest
        if not (np.isfinite(span).all() and (span > 0).all()):
            msg = f"scales must be finite and > 0, got {scale!r:.60} for {label}"
            raise ValueError(msg)
        # Dividing by a power of two is exact.
        powers = np.ldexp(0.5, np.frexp(span)[1])
        spans[label] = np.broadcast_to(powers, array.shape).reshape(-1)
    return arrays, spans
