"""`check_layer_norm` and `check_rms_norm`: the closed form judges, finite differences confirm."""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.random import Generator

from stablenorm.check import closed_form, formula
from stablenorm.check.closed_form import Case, Expected, Judged
from stablenorm.check.differences import name_pattern, place_of
from stablenorm.check.formula import Reading
from stablenorm.check.gradients import Progress, check_args, compare, make_report
from stablenorm.check.operation import Backward, FaultError, Operation
from stablenorm.check.results import ArgumentResult, Finding, GradientReport, Verdict
from stablenorm.check.roles import ARGUMENTS, PARAMETERS, adapt
from stablenorm.formats import check_dtype
from stablenorm.output import shape_text
from stablenorm.records import Array
from stablenorm.scalars import check_eps


def check_layer_norm(
    forward: Callable[..., Any], backward: Backward, x: Any = None, gamma: Any = None,
    beta: Any = None, eps: float = 1e-5, *, axis: int | tuple[int, ...] = -1,
    gamma_offset: float = 0.0, rng: Any = None,
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
    return _check("layer", forward, backward, arguments, axis, rng, options)


def check_rms_norm(
    forward: Callable[..., Any], backward: Backward, x: Any = None, gamma: Any = None,
    beta: Any = None, eps: float = 1e-5, *, axis: int | tuple[int, ...] = -1,
    gamma_offset: float = 0.0, rng: Any = None,
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
    return _check("rms", forward, backward, arguments, axis, rng, options)


@np.errstate(all="ignore")
def _check(
    kind: str, forward: Any, backward: Any, arguments: Any, axis: Any, rng: Any, options: tuple[Any, ...]
) -> GradientReport:  # fmt: skip
    """Check one norm of these arguments; `options` are the last of `check_gradients`."""
    seed, rng = rng, np.random.default_rng(rng)
    x, gamma, beta, eps, gamma_offset = arguments
    takes: tuple[str, ...] = PARAMETERS
    # A function without a signature or known names gets its arguments in order.
    with contextlib.suppress(TypeError, ValueError):
        forward, backward, pair = adapt(forward, backward)
        takes = pair.takes
    if x is None:
        x, *ours = closed_form.example((4, 8), rng)
        if normalize_axis_tuple(axis, 2) == (0,):
            x, ours = x.T, [a[:, None] for a in ours]
        gamma = ours[0] if gamma is None and "gamma" in takes else gamma
        beta = ours[1] if beta is None and "beta" in takes else beta
    x, (gamma, beta) = np.array(x), (None if a is None else np.array(a) for a in (gamma, beta))
    if not np.isfinite(gamma_offset) or (gamma_offset and gamma is None):
        msg = f"gamma_offset must be finite, and 0 without a gamma, got {gamma_offset}"
        raise ValueError(msg)
    check_dtype("x", x)
    axes = normalize_axis_tuple(axis, x.ndim) if x.ndim else ()
    about = f"x {shape_text(x.shape)} {x.dtype}, eps {eps:g}"
    names = [str(a) for a in range(x.ndim) if a not in axes] + [" and ".join(map(str, axes))]
    if axes != (x.ndim - 1,) or any(a is not None and a.ndim != 1 for a in (gamma, beta)):
        about += f", axis {names[-1]}"
        forward, backward, x, gamma, beta = _moved(forward, backward, x, gamma, beta, axes)
    norm = Case(x, gamma, beta, check_eps(eps), x, kind, gamma_offset)
    has_rows = x.ndim > 0 and x.size > 0
    # The distance over which a row's y changes: sqrt(var + eps).
    s = closed_form.statistics(x.astype(np.float64), eps, kind)[1] if has_rows else 1.0
    scales = np.where(s > 0, s, 1), None, None
    # The cases of the closed form have other eps.
    operation = Operation(lambda x, gamma, beta, eps=eps: forward(x, gamma, beta, eps), backward)
    # Skip the closed form if gamma or beta has another shape.
    fits = has_rows and all(a is None or a.shape == x.shape[-1:] for a in (gamma, beta))
    notes = list[Finding]()
    if fits and x.dtype == np.float64 and _is_narrow(operation, norm, rng):
        message = "the code computes in float32 inside: it is judged by the rounding of float32"
        notes = [Finding("precision", "float64 is kept", "NOTE", message)]
        x, (gamma, beta) = x.astype(np.float32), (_as(a, np.float32) for a in (gamma, beta))
        norm = norm._replace(x=x, gamma=gamma, beta=beta, dy=x)
    arrays, spans = check_args([x, gamma, beta], ARGUMENTS[:3], scales)
    results, findings = compare(operation, arrays, spans, rng, *options)
    found = _Found()
    if fits and any(result.judged for result in results):
        operation.left_out = {result.name for result in results if not result.judged}
        with warnings.catch_warnings(action="ignore"):
            try:
                found = _look(operation, norm, rng, findings, names)
            except FaultError as fault:
                findings.append(Finding("closed form", "both run", "FAIL", str(fault)))
    about += f", seed {seed}" * isinstance(seed, int)
    results = [_decided(result, found.judged.get(f"d{result.name}", [])) for result in results]
    return make_report(operation, (results, notes + findings), about, found.readings, found.causes)


def _moved(forward: Any, backward: Any, *arrays: Any) -> tuple[Any, ...]:
    """Return a pair over any axes as one over the last, with its x, gamma and beta."""
    x, *parameters, axes = arrays
    ends, dims = tuple(range(-len(axes), 0)), [x.shape[axis] for axis in axes]

    def there(a: Array) -> Array:
        moved = np.moveaxis(a, axes, ends)
        return np.asarray(moved.reshape(*moved.shape[: moved.ndim - len(axes)], -1))

    def back(a: Array) -> Array:
        own = dims if a.shape[-1] == math.prod(dims) else [1] * (len(axes) - 1) + [a.shape[-1]]
        if a.ndim + len(axes) != x.ndim + 1:
            msg = f"x must have {x.ndim} axes for axis {axes}"
            raise FaultError(msg)
        return np.moveaxis(a.reshape(*a.shape[:-1], *own), ends, axes)

    def shaped(parameter: Any, like: Any, x_shape: tuple[int, ...]) -> Any:
        """Give gamma or beta the lengths of this x where its own array had those of the caller's."""
        if parameter is None:
            return None
        own = like.shape
        fits = [d in (1, m) for d, m in zip(own[::-1], x.shape[::-1], strict=False)]
        if not all(fits) or len(own) > x.ndim:
            return parameter.reshape([-1 if d > 1 else 1 for d in own] if like.size > 1 else own)
        lengths = zip(own, x_shape[len(x_shape) - len(own) :], strict=True)
        return parameter.reshape([1 if d == 1 else m for d, m in lengths])

    def call(a: Array, *rest: Any) -> Any:
        moved = back(a)
        both = [shaped(p, like, moved.shape) for p, like in zip(rest, parameters, strict=False)]
        result = forward(moved, *both, rest[2])
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            return result
        y, cache = result
        return (there(y) if np.shape(y) == moved.shape else y), (cache, [np.shape(p) for p in both])

    def pull(dy: Array, cache: Any) -> Any:
        cache, shapes = cache
        returned = backward(back(dy), cache)
        if not isinstance(returned, (tuple, list)) or len(returned) != 3:
            return returned
        dx, *sums = returned
        dx = there(dx) if np.shape(dx) == back(dy).shape else dx
        flat = (
            a.reshape(-1) if np.shape(a) == s and np.size(a) > 1 else a
            for a, s in zip(sums, shapes, strict=True)
        )
        return [dx, *flat]

    return call, pull, there(x), *(None if p is None else p.reshape(-1) for p in parameters)


class _Found(NamedTuple):
    """What the closed form found: the judged gradients, formulas by name, causes."""

    judged: Mapping[str, list[Judged]] = MappingProxyType({})
    readings: Mapping[str, Reading] = MappingProxyType({})
    causes: tuple[str, ...] = ()


@np.errstate(all="ignore")
def axes_of(
    kind: str, forward: Any, backward: Any, data: Sequence[Any], eps: float, axis: Any = -1
) -> tuple[int, ...]:
    """Return the axes over which y of x, gamma and beta is normalized, `axis` moved last; empty if y shows none."""
    x, gamma, beta = data
    axes, rng = normalize_axis_tuple(axis, x.ndim), np.random.default_rng(0)
    if axes != (x.ndim - 1,):
        forward, backward, x, gamma, beta = _moved(forward, backward, x, gamma, beta, axes)
    with contextlib.suppress(FaultError):
        operation = Operation(
            lambda x, gamma, beta, eps=eps: forward(x, gamma, beta, eps), backward
        )
        case = Case(x, gamma, beta, eps, x, kind)
        case = case._replace(eps=closed_form.read_eps(operation, case)[0])
        if not closed_form.judge(operation, closed_form.ordinary(case, rng))["y"].wrong:
            return (x.ndim - 1,)
        found, _ = _read(operation, case, rng, ["y"], [str(a) for a in range(x.ndim)])
        return found["y"].axes if found else ()
    return ()


def _as(a: Any, dtype: Any) -> Any:
    return None if a is None else a.astype(dtype)


def _is_narrow(operation: Operation, case: Case, rng: Generator) -> bool:
    """Tell whether y of float64 data is right to the rounding of float32 alone."""
    with contextlib.suppress(FaultError):
        case = closed_form.ordinary(
            case._replace(eps=closed_form.read_eps(operation, case)[0]), rng
        )
        # Exact in float32, so that nothing but arithmetic rounds.
        x, gamma, beta = (_as(_as(a, np.float32), np.float64) for a in case[:3])
        case = case._replace(x=x, gamma=gamma, beta=beta)
        y = closed_form.run(operation, case)[0]
        fine, coarse = (Judged("y", y, Expected(case, u)) for u in (2.0**-53, 2.0**-24))
        return fine.wrong and not coarse.wrong and fine.error < closed_form.unit(case.n, 2.0**-24)
    return False


def _look(
    operation: Operation, case: Case, rng: Generator, findings: list[Finding], names: list[str]
) -> _Found:
    """Add the findings of the other layers to `findings`; return the judged gradients and the causes."""
    y = closed_form.run(operation, case)[0]
    # The caller's data with a random dy.
    case = case._replace(dy=rng.standard_normal(case.x.shape).astype(y.dtype))
    eps, takes_eps = closed_form.read_eps(operation, case)
    given, case = case.eps, case._replace(eps=eps)
    # Judge every element on the caller's data and on ours, y first.
    both = case, closed_form.ordinary(case, rng)
    outputs = [closed_form.judge(operation, data) for data in both]
    equation = "y = gamma xhat + beta"
    for by_name in outputs[::-1]:
        if by_name["y"].wrong:
            found, causes = _read(operation, case, rng, ["y"], names)
            said = by_name["y"].not_finite or f"y is off by {by_name['y'].error:.1e}"
            findings.append(Finding("the forward", equation, "FAIL", said))
            kind = {"layer": "layer", "rms": "RMS"}[case.kind]
            causes = causes or (f"this is not the {kind} normalization asked for: {said}",)
            return _Found({}, found, causes)
    if eps != given:
        message = f"the eps given, {given:g}, is not used: it is {eps:g} inside"
        findings.append(Finding("the forward", "it uses eps", "NOTE", message))
    judged = {name: [by_name[name] for by_name in outputs] for name in outputs[0] if name != "y"}
    right = [n for n, both in judged.items() if all(output.right for output in both)]
    for name in (equation, *(f"every element of {n} is right" for n in right)):
        findings.append(Finding("closed form", name, "PASS"))
    if wrong := [n for n, both in judged.items() if any(output.wrong for output in both)]:
        message = "not run: the gradients are wrong on ordinary inputs already"
        findings.append(Finding("hard inputs", "hard inputs", "NOTE", message))
        return _Found(judged, *_read(operation, case, rng, wrong, names))

    base = closed_form.ordinary(case, rng, closed_form.few(case))
    ours = closed_form.equivalent(case, base, rng, takes_eps=takes_eps)
    hard = closed_form.hard_inputs(base, rng)
    for layer, problems in (("closed form", ours), ("hard inputs", hard)):
        for problem in problems:
            findings.append(
                Finding(layer, problem.name, *closed_form.judge_case(operation, problem))
            )
    return _Found(judged)


def _read(
    operation: Operation, case: Case, rng: Generator, wrong: list[str], axes: list[str]
) -> tuple[dict[str, Reading], tuple[str, ...]]:
    """Read back the formulas of wrong outputs from draws of two shapes; return them, and the causes."""
    pair = (((), ()), ((20,), (26,)), ((4, 5), (5, 6)), ((2, 3, 4), (3, 4, 5)))[
        min(case.x.ndim, 4) - 1
    ]
    small, other = ((*lead, n) for lead, n in zip(pair, (8, 11), strict=True))
    # The code may want its own shape. Then no names of factors are certain.
    for shapes in ((small, small, other), (case.x.shape,) * 3):
        try:
            draws = [closed_form.ordinary(case, rng, shape) for shape in shapes]
            outputs = [closed_form.judge(operation, draw) for draw in draws]
            break
        except FaultError:
            continue
    else:
        return {}, ()
    readings, found = dict[str, Reading](), dict[str, list[str]]()
    # The error where the code is right: y is, or nothing is known but the rounding.
    ys = [o["y"] for o in outputs]
    noise = (
        max(y.expected.u for y in ys)
        if "y" in wrong
        else max(max(y.error, y.expected.u) for y in ys)
    )
    for name in wrong:
        own = [o[name] for o in outputs]
        if not any(one.wrong for one in own) or not all(np.isfinite(o.actual).all() for o in own):
            continue
        shown = "the forward" if name == "y" else name
        places = {formula.locate(o.actual, o.value, o.plain, o.shape) for o in own}
        if len(places) == 1 and (place := places.pop()):
            found.setdefault(place, []).append(shown)
            continue
        if case.n < 2:
            continue
        reading = formula.read(name, draws, [one.actual for one in own], noise, case.x.shape, axes)
        if reading:
            readings[name] = reading
            found.setdefault(reading.cause.replace(name, "{}" if name != "y" else name), []).append(
                shown
            )
        elif name == "dx":
            readings[name] = Reading(
                f"not read back: {_known(operation, draws[0], own[0], noise)}", ""
            )
    if [readings[n].formula for n in ("dgamma", "dbeta") if n in readings] == [
        "sum(dy xhat)",
        "sum(dy)",
    ][::-1]:
        found = {"dgamma and dbeta are exchanged": []}
    # Words that fit several outputs are said once: "... in dx and dgamma".
    return readings, tuple(
        words.replace("{}", " and ".join(names)) for words, names in found.items() if words
    )


def _known(operation: Operation, case: Case, dx: Judged, noise: float) -> str:
    """Say what is known of a dx that was not read back, by changing one thing at a time."""
    x = case.x.copy()
    x.reshape(-1, case.n)[:-1] *= 1.5
    changes: dict[str, dict[str, Any]] = {
        "x": {"x": 1.25 * case.x},
        "eps": {"eps": 4 * case.eps + 1e-3},
        "other rows": {"x": x},
    }
    if case.gamma is not None:
        changes["gamma"] = {"gamma": 1.25 * case.gamma}
    moved = {}
    for name, change in changes.items():
        rows = closed_form.judge(operation, case._replace(**change))["dx"].actual
        moved[name] = np.vstack([dx.actual[:-1], rows[-1:]]) if name == "other rows" else rows
    return formula.describe(dx.actual, dx.expected, moved, noise)


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
        checked, probes = (result.checked, result.probes) if wrong else (z.size, 0)
        return replace(result, pattern=pattern, resolution=seen, checked=checked, probes=probes)
    # The noise of differences contradicts a right gradient, or hides a wrong one.
    message = one.not_finite or "seen by the closed form, too small for finite differences"
    place = int(np.argmax(z))
    actual, value, bound = (float(a.flat[place]) for a in (one.actual, one.value, one.plain))
    counts = z.size, result.total, result.probes, int(np.sum(z > 1)), place_of(place, one.shape)
    rest = one.resolution, message * wrong, "closed form", pattern
    return ArgumentResult(result.name, verdict, *counts, actual, value, bound, 0.0, *rest)
