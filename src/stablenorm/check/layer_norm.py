"""`check_layer_norm` and `check_rms_norm`: the closed form judges, finite differences confirm."""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.random import Generator

from stablenorm.check import closed_form
from stablenorm.check.causes import diagnose
from stablenorm.check.closed_form import Case, Expected, Judged
from stablenorm.check.differences import name_pattern, place_of
from stablenorm.check.gradients import Progress, check_args, compare, make_report
from stablenorm.check.operation import Backward, FaultError, Operation
from stablenorm.check.results import ArgumentResult, Finding, GradientReport, Verdict
from stablenorm.check.roles import ARGUMENTS, PARAMETERS, adapt
from stablenorm.formats import check_dtype
from stablenorm.text import shape_text
from stablenorm.types import check_eps


def check_layer_norm(
    forward: Callable[..., Any], backward: Backward, x: Any = None, gamma: Any = None,
    beta: Any = None, eps: float = 1e-5, *, gamma_offset: float = 0.0, rng: Any = None,
    probes: int = 3, max_elements: int = 64, progress: Progress | None = None,
) -> GradientReport:  # fmt: skip
    """
    Check a layer normalization over the last axis, and name what is wrong with it.

    The checker compares every element with its own closed form, to rounding; finite differences, as
    in `check_gradients`, confirm. Then it tests single rows and hard inputs. It names the wrong term
    of a wrong gradient, if the mistake is common.

    Parameters
    ----------
    forward : callable
        ``forward(x, gamma, beta, eps) -> (y, cache)``. Arguments are recognized by name (gamma or
        weight, beta or bias, ...), otherwise by order; gamma, beta and eps may be missing.
    backward : callable
        ``backward(dy, cache) -> (dx, dgamma, dbeta)``, or a dict; None for what is not to be checked.
        Without a cache, ``backward(dy, x, gamma, mean, rstd)`` gets what the forward got, by name,
        and what it returned after y.
    x, gamma, beta : array, optional
        Input, (..., n), and scale and shift, (n,). Not modified. Default: random float64, x of
        (4, 8), gamma of both signs, beta different from 0. If `x` is given, None stays None.
    eps : float, default: 1e-5
        Passed on, finite and >= 0.
    gamma_offset : float, default: 0
        What the forward itself adds to gamma: 1 if the array holds gamma - 1. It is not passed on.
    rng, probes, max_elements, progress : optional
        As for `check_gradients`; `rng` is for the default data as well.

    Returns
    -------
    GradientReport
        A finding that fails makes the verdict FAIL. `diagnosis` names common mistakes, if they
        explain every element to rounding and no simpler mistake does.

    Raises
    ------
    TypeError, ValueError
        As `check_gradients`, and if `eps` is negative or not finite.

    Notes
    -----
    Code that is right but less accurate than two passes in the given dtypes gets a NOTE: a variance
    from E[x^2] - E[x]^2 under an offset, for example. float64 results with the accuracy of
    float32 FAIL. Finite differences of float32 are too coarse for a verdict: the closed form decides
    alone, unless an offset leaves x too few digits (INCONCLUSIVE).

    Examples
    --------
    >>> from stablenorm.testing import plain_forward
    >>> def backward(dy, cache):
    ...     gamma, xhat, rstd = cache
    ...     g = gamma * dy
    ...     dx = rstd * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    ...     return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)
    >>> report = check_layer_norm(plain_forward, backward, rng=0)
    >>> report.verdict, report.diagnosis
    ('FAIL', ('the mean of g is missing from dx',))
    """
    arguments, options = (x, gamma, beta, eps, gamma_offset), (probes, max_elements, progress)
    return _check("layer", forward, backward, arguments, rng, options)


def check_rms_norm(
    forward: Callable[..., Any], backward: Backward, x: Any = None, gamma: Any = None,
    beta: Any = None, eps: float = 1e-5, *, gamma_offset: float = 0.0, rng: Any = None,
    probes: int = 3, max_elements: int = 64, progress: Progress | None = None,
) -> GradientReport:  # fmt: skip
    """
    Check an RMS normalization over the last axis, and name what is wrong with it.

    The parameters are those of `check_layer_norm`.

    Examples
    --------
    >>> from stablenorm import rms_norm_backward, rms_norm_forward
    >>> check_rms_norm(rms_norm_forward, rms_norm_backward, rng=0).verdict
    'PASS'
    """
    arguments, options = (x, gamma, beta, eps, gamma_offset), (probes, max_elements, progress)
    return _check("rms", forward, backward, arguments, rng, options)


@np.errstate(all="ignore")
def _check(
    kind: str, forward: Any, backward: Any, arguments: Any, rng: Any, options: tuple[Any, ...]
) -> GradientReport:
    """Check one norm of these arguments; `options` are the last of `check_gradients`."""
    seed, rng = rng, np.random.default_rng(rng)
    x, gamma, beta, eps, gamma_offset = arguments
    takes: tuple[str, ...] = PARAMETERS
    # A function without a signature or known names gets its arguments in order.
    with contextlib.suppress(TypeError, ValueError):
        forward, backward, takes = adapt(forward, backward)
    if x is None:
        x, *ours = closed_form.example((4, 8), rng)
        gamma = ours[0] if gamma is None and "gamma" in takes else gamma
        beta = ours[1] if beta is None and "beta" in takes else beta
    x, (gamma, beta) = np.array(x), (None if a is None else np.array(a) for a in (gamma, beta))
    norm = Case(x, gamma, beta, check_eps(eps), x, kind, gamma_offset)
    if not np.isfinite(gamma_offset) or (gamma_offset and gamma is None):
        msg = f"gamma_offset must be finite, and 0 without a gamma, got {gamma_offset}"
        raise ValueError(msg)
    check_dtype("x", x)
    has_rows = x.ndim > 0 and x.size > 0
    # The distance over which a row's y changes: sqrt(var + eps).
    s = closed_form.statistics(x.astype(np.float64), eps, kind)[1] if has_rows else 1.0
    scales = np.where(s > 0, s, 1), None, None
    arrays, spans = check_args([x, gamma, beta], ARGUMENTS[:3], scales)
    # The cases of the closed form have other eps.
    operation = Operation(lambda x, gamma, beta, eps=eps: forward(x, gamma, beta, eps), backward)
    results, findings = compare(operation, arrays, spans, rng, *options)
    judged, named = dict[str, list[Judged]](), tuple[str, ...]()
    # Skip the closed form if nothing was compared, or gamma or beta has another shape.
    fits = all(a is None or a.shape == x.shape[-1:] for a in (gamma, beta))
    if has_rows and fits and any(result.verdict != "NOT CHECKED" for result in results):
        with warnings.catch_warnings(action="ignore"):
            try:
                judged, named = _look(operation, norm, rng, findings)
            except FaultError as fault:
                findings.append(Finding("closed form", "both run", "FAIL", str(fault)))
    about = f"x {shape_text(x.shape)} {x.dtype}, eps {eps:g}"
    about += f", seed {seed}" * isinstance(seed, int)
    # A diagnosis may name the terms.
    if any(word in f" {said}" for said in named for word in (" g ", "term ")):
        mean = " - mean(g)" * (kind == "layer")
        about += f"\ndx = rstd (g{mean} - xhat mean(g xhat)), where g = gamma dy"
    results = [_decided(result, judged.get(f"d{result.name}", [])) for result in results]
    return make_report(operation, (results, findings), about, *named)


def _look(
    operation: Operation, case: Case, rng: Generator, findings: list[Finding]
) -> tuple[dict[str, list[Judged]], tuple[str, ...]]:
    """Add the findings of the other layers to `findings`; return the judged gradients and the diagnosis."""
    y = closed_form.run(operation, case)[0]
    # The caller's data with a random dy.
    case = case._replace(dy=rng.standard_normal(case.x.shape).astype(y.dtype))
    eps, takes_eps = closed_form.read_eps(operation, case)
    if eps != case.eps:
        message = f"the eps given, {case.eps:g}, is not used: it is {eps:g} inside"
        findings.append(Finding("closed form", "the forward uses eps", "NOTE", message))
    case = case._replace(eps=eps)
    # Judge every element on the caller's data and on ours, y first.
    both = case, closed_form.ordinary(case, rng)
    outputs = [closed_form.judge(operation, data) for data in both]
    equation = "y = gamma xhat + beta"
    for by_name in outputs[::-1]:
        if by_name["y"].wrong:
            findings.append(Finding("closed form", equation, "FAIL", _about_y(by_name["y"])))
            return {}, diagnose([by_name["y"]])
    judged = {name: [by_name[name] for by_name in outputs] for name in outputs[0] if name != "y"}
    right = [n for n, both in judged.items() if all(output.right for output in both)]
    for name in (equation, *(f"every element of {n} is right" for n in right)):
        findings.append(Finding("closed form", name, "PASS"))
    wrong = [[one for one in by_name.values() if one.wrong] for by_name in outputs]
    if said := [diagnose(together) for together in wrong if together]:
        message = "not run: the gradients are wrong on ordinary inputs already"
        findings.append(Finding("hard inputs", "hard inputs", "NOTE", message))
        # The two data sets must not contradict one another.
        return judged, tuple(s for s in said[-1] if all(s in causes for causes in said))

    base = closed_form.ordinary(case, rng, closed_form.few(case))
    ours = closed_form.equivalent(case, base, rng, takes_eps=takes_eps)
    hard = closed_form.hard_inputs(base, rng)
    for layer, problems in (("closed form", ours), ("hard inputs", hard)):
        for case in problems:
            findings.append(Finding(layer, case.name, *closed_form.judge_case(operation, case)))
    return judged, ()


def _about_y(y: Judged) -> str:
    """Describe a wrong y: not finite, rounded to float32, or of the other norm."""
    case, error = y.expected.case, f"y is off by {y.error:.1e}: "
    if y.not_finite:
        return y.not_finite
    if y.error < closed_form.unit(case.n, 2.0**-24):
        return error + "as if something were kept in float32"
    kind, name = {"layer": ("rms", "an RMS norm"), "rms": ("layer", "a layer norm")}[case.kind]
    other = Judged("y", y.actual, Expected(case._replace(kind=kind), y.expected.u))
    if np.isfinite(other.careless).all() and not other.wrong:
        return error + f"it is that of {name}: say --kind {kind}, or check_{kind}_norm"
    asked = {"layer": "layer", "rms": "RMS"}[case.kind]
    return error + f"this is not the {asked} normalization asked for"


def _decided(result: ArgumentResult, judged: list[Judged]) -> ArgumentResult:
    """Return the verdict of the closed form; if it has none, that of finite differences."""
    if not result.checked or not judged:
        return result
    one = next((one for one in judged if one.wrong), judged[0])
    # If an offset leaves x no digits, the closed form does not know the right gradient either.
    if not one.wrong and not (all(e.right for e in judged) and np.isfinite(one.resolution)):
        return result
    wrong, z = one.wrong, one.z if one.wrong else one.z_plain
    pattern = name_pattern((z > 1).reshape(one.shape)) if wrong else ""
    verdict: Verdict = "FAIL" if wrong else "PASS"
    if result.verdict == verdict:
        seen = result.resolution if wrong else min(result.resolution, one.resolution)
        return replace(result, pattern=pattern, resolution=seen)
    # The noise of differences contradicts a right gradient, or hides a wrong one.
    message = one.not_finite or "seen by the closed form, too small for finite differences"
    place = int(np.argmax(z))
    actual, value, bound = (float(a.flat[place]) for a in (one.actual, one.value, one.plain))
    counts = z.size, result.total, result.probes, int(np.sum(z > 1)), place_of(place, one.shape)
    rest = one.resolution, message * wrong, "closed form", pattern
    return ArgumentResult(result.name, verdict, *counts, actual, value, bound, 0.0, *rest)
