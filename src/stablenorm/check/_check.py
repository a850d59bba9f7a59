"""`check_gradients`: any hand-written operation, argument by argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stablenorm._types import Array, check_dtype
from stablenorm.check._arguments import check_args, check_finite, check_names, check_scales
from stablenorm.check._compare import Comparer, Task, compare, sample
from stablenorm.check._contract import check_contract
from stablenorm.check._judge import judge, kinks
from stablenorm.check._locate import find_pattern
from stablenorm.check._loss import Backward, FaultError, Forward, Loss, Operation
from stablenorm.check._report import ArgumentResult, Finding, GradientReport
from stablenorm.check._subject import Subject, as_list, measure_roundings

__all__ = ["Backward", "assert_gradients", "check_gradients"]

Progress = Callable[[int, int], object]


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
        ``forward(*args) -> (y, cache)``. `y` is one floating array (or scalar). It is called at
        and near `args`, and with complex arguments: what it raises or warns of there is not
        passed on.
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
        there or has a wrong shape, is not floating or not finite, or the contract is broken:
        inputs are modified, results are random, the backward is not linear in dy, or the layout
        of an input in memory matters. INCONCLUSIVE if a bound is coarser than 1e-3 of the
        element and of the RMS of the gradient (16 roundings of its dtype, where that is more),
        if secants have no limit, if half the elements or more lie at kinks, if the forward
        raises, or if nothing could be compared; else PASS. What the functions under test do
        wrong is in `findings` and never raised.

    Raises
    ------
    TypeError
        If an argument does not have one of the four floating dtypes.
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
    computed; plus 16 times the measured departure of the backward from being linear in dy, but at
    most 256 u RMS. A backward that is less accurate than that fails, though its formula be right.

    Secants are replaced by the complex step, in all elements of an argument, where the forward
    takes complex numbers, agrees with every secant within its bound, and the bound of the complex
    step is the smaller one; `method` says so. Probes keep their secants.

    Where left and right secants do not close up down to 2^-26 of the scale, there is no
    derivative: such elements are not judged, and a finding of the layer "smoothness" says where
    they are. Where secants do not settle, steps are shortened, three times by 2^-8. So they are
    where an element differs: if shorter steps, which reach fewer kinks, have another derivative,
    outside of both bounds, it replaces the first one, and is FAIL only if steps shorter still
    confirm it. In float32 short steps drown in rounding, and a kink nearby may be taken for a
    difference: check code with kinks in float64.

    Forward calls: 8 to 16 for each derivative and 13 for its complex step, 25 for the noise of
    each argument, 18 or so for the contract; 60 more for a derivative that differs, and 50 more
    for each time that steps are shortened. Where a sampled argument differs, halving rows, then
    columns, finds where: 8 to 16 calls a question, 2 log2(size) + 10 questions at most. The
    contract calls the backward 25 times. For a layer norm: (4, 8) takes 816 forward calls,
    (32, 768) 663, (64, 4096) 645. 25 times y is kept in float64.

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
    start = time.perf_counter()
    rng = np.random.default_rng(rng)
    arrays = check_args(args)
    labels = check_names(names, len(arrays))
    spans = check_scales(scales, arrays)
    for label, array in zip(labels, arrays, strict=True):
        check_finite(label, array)
    operation = Operation(forward, backward)
    # Near x, squares may overflow and roots have no value: that is looked at, not warned of.
    with np.errstate(all="ignore"):
        try:
            loss = Loss(operation, arrays, rng)
            results, findings = _check(loss, labels, spans, rng, probes, max_elements, progress)
        except FaultError as fault:
            findings = [
                Finding(
                    "contract",
                    "the forward returns (y, cache)",
                    "INCONCLUSIVE" if fault.raised else "FAIL",
                    str(fault),
                )
            ]
            message = "there is nothing to compare with"
            results = [ArgumentResult(name, "NOT CHECKED", message=message) for name in labels]
    return GradientReport(
        tuple(results),
        operation.forward_calls,
        findings=tuple(findings),
        backward_calls=operation.backward_calls,
        seconds=time.perf_counter() - start,
    )


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


def _check(
    loss: Loss,
    labels: list[str],
    spans: list[Array | None],
    rng: np.random.Generator,
    probes: int,
    max_elements: int,
    progress: Progress | None,
) -> tuple[list[ArgumentResult], list[Finding]]:
    """Check the contract, then every argument."""
    # Finite differences first would do as well; but a backward that raises should do so at once.
    gradients, form = _gradients(loss)
    results = [_refuse(*triple, form) for triple in zip(labels, loss.args, gradients, strict=True)]
    sound = [
        np.array(g) if result is None else None
        for g, result in zip(gradients, results, strict=True)
    ]
    subject = Subject(loss.operation, loss, labels, sound, rng)
    findings = check_contract(subject, backward=not form)
    if any(f.verdict == "FAIL" and f.name == "the forward is deterministic" for f in findings):
        message = "the forward is not deterministic"
        return [
            result or ArgumentResult(label, "NOT CHECKED", message=message)
            for label, result in zip(labels, results, strict=True)
        ], findings
    roundings = measure_roundings(subject)
    tasks = _tasks(loss, labels, sound, spans, roundings, rng, probes, max_elements)
    report = _count(progress, sum(len(task.where) + task.probes for task in tasks))
    for task in tasks:
        comparer = Comparer(task, loss, rng)
        comparisons = compare(comparer, report)
        pattern = find_pattern(comparer, comparisons)
        results[task.position] = judge(task, loss, comparisons, pattern)
        findings += kinks(task.name, comparisons)
        # Read once more below, for an overflow; the samples of the noise are large.
        loss.noise.pop(task.position)
    for position, (result, span) in enumerate(zip(results, spans, strict=True)):
        if result is not None and result.message.startswith(_NOT_FINITE):
            results[position] = _overflow(result, loss, position, gradients[position], span, rng)
    findings += _nearby(loss)
    return [result for result in results if result is not None], findings


def _nearby(loss: Loss) -> list[Finding]:
    """Say what the forward did wrong near the arguments, though not at them."""
    findings = []
    if loss.other_shape:
        name = "y always has one shape"
        findings.append(Finding("contract", name, "FAIL", f"y has shape {loss.other_shape}"))
    if loss.raised:
        name = "the forward can be called near the arguments"
        findings.append(Finding("contract", name, "NOTE", loss.raised))
    return findings


def _tasks(
    loss: Loss,
    labels: list[str],
    gradients: list[Array | None],
    spans: list[Array | None],
    roundings: list[Array | None],
    rng: np.random.Generator,
    probes: int,
    max_elements: int,
) -> list[Task]:
    """Choose where to compare, for every argument that has a gradient."""
    tasks = []
    for position, (values, span) in enumerate(zip(gradients, spans, strict=True)):
        array = loss.args[position]
        if values is not None and array is not None and span is not None:
            where = sample(array, values, max_elements, rng)
            count = probes if len(where) < array.size else 0
            task = Task(position, labels[position], array, span, values, where, count)
            tasks.append(task._replace(roundings=roundings[position]))
    return tasks


def _gradients(loss: Loss) -> tuple[list[Any], str]:
    """Return the gradients as a list, and the sentence that says what came instead, or ""."""
    try:
        returned = loss.operation.backward(loss.cotangent(), loss.cache)
        return as_list(returned, len(loss.args)), ""
    except FaultError as fault:
        return [np.empty(0)] * len(loss.args), str(fault)


def _overflow(
    result: ArgumentResult,
    loss: Loss,
    position: int,
    gradient: Any,
    span: Array | None,
    rng: np.random.Generator,
) -> ArgumentResult:
    """Return INCONCLUSIVE for a gradient that is infinite where the derivative is too large."""
    array = loss.args[position]
    if array is None or span is None:
        return result
    values = np.asarray(gradient)
    if np.isnan(values).any():
        return result
    # Three are enough to tell a division by zero from a gradient without room in its dtype.
    infinite = [int(i) for i in np.flatnonzero(np.isinf(values))[:3]]
    task = Task(position, result.name, array, span, np.zeros(array.shape), infinite, 0)
    comparer = Comparer(task, loss, rng)
    # The largest finite number, found without asking which dtype it is.
    largest = float(np.nextafter(values.dtype.type(np.inf), values.dtype.type(0)))
    for place in infinite:
        numeric = comparer.element(place).derivative.numeric
        if abs(numeric) < largest / 4:
            return result
    message = "the derivative is too large for the dtype of the gradient, or has no limit here"
    return replace(result, verdict="INCONCLUSIVE", failing=0, message=message)


_NOT_FINITE = "the gradient must be finite"


def _refuse(name: str, array: Array | None, gradient: Any, form: str) -> ArgumentResult | None:
    """
    Return the result for an argument where there is nothing to compare, else None.

    `form` says what is wrong with all that the backward returned, if something is.
    """
    if array is None:
        return ArgumentResult(name, "NOT CHECKED", message="the argument is None")
    total = array.size
    if gradient is None:
        message = "backward returned None for it"
        return ArgumentResult(name, "NOT CHECKED", total=total, message=message)
    message = form or _fault(array, gradient)
    if message:
        return ArgumentResult(name, "FAIL", total=total, failing=total, message=message)
    if total == 0:
        return ArgumentResult(name, "NOT CHECKED", message="the argument is empty")
    return None


def _fault(array: Array, gradient: Any) -> str:
    """Say what is wrong with a gradient, without comparing its values; empty if nothing is."""
    try:
        gradient = np.asarray(gradient)
    except ValueError as error:
        return f"the gradient must be an array, got {type(gradient).__name__}: {error}"
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


def _count(progress: Progress | None, total: int) -> Callable[[], None]:
    """Return a function to be called after each derivative."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return step
