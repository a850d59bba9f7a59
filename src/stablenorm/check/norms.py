"""`check_layer_norm` and `check_rms_norm`: the closed form judges, and a wrong formula is read back."""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.random import Generator

from stablenorm.check import closed_form, formula
from stablenorm.check.closed_form import Case, Expected, Judged
from stablenorm.check.differences import COARSEST, name_pattern, place_of
from stablenorm.check.formula import Reading
from stablenorm.check.gradients import begin, check_args, make_report
from stablenorm.check.operation import Backward, FaultError, Operation
from stablenorm.check.results import ArgumentResult, Finding, GradientReport, Verdict
from stablenorm.check.roles import ARGUMENTS, PARAMETERS, adapt
from stablenorm.text import shape_text
from stablenorm.types import Array, check_eps


def check_layer_norm(
    forward: Callable[..., Any], backward: Backward, x: Any = None, gamma: Any = None,
    beta: Any = None, eps: float = 1e-5, *, axis: int | tuple[int, ...] = -1,
    gamma_offset: float = 0.0, rng: Any = None,
) -> GradientReport:  # fmt: skip
    """
    Check a layer normalization over the last axis, and name what is wrong with it.

    The checker compares every element with its own closed form, to rounding. Then it tests single rows
    and hard inputs. It reads back the formula of a wrong gradient.

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
    rng : optional
        As for `check_gradients`; for the default data as well.

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
    float32 FAIL. If an offset leaves x too few digits for three digits of a gradient, it is INCONCLUSIVE.

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
    return _check("layer", forward, backward, (x, gamma, beta, eps, gamma_offset), axis, rng)


def check_rms_norm(
    forward: Callable[..., Any], backward: Backward, x: Any = None, gamma: Any = None,
    beta: Any = None, eps: float = 1e-5, *, axis: int | tuple[int, ...] = -1,
    gamma_offset: float = 0.0, rng: Any = None,
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
    return _check("rms", forward, backward, (x, gamma, beta, eps, gamma_offset), axis, rng)


@np.errstate(all="ignore")
def _check(
    kind: str, forward: Any, backward: Any, arguments: Any, axis: Any, rng: Any
) -> GradientReport:
    """Check one norm of these arguments."""
    seed, rng = rng, np.random.default_rng(rng)
    x, gamma, beta, eps, offset = arguments
    takes: tuple[str, ...] = PARAMETERS
    # A function without a signature or known names gets its arguments in order.
    with contextlib.suppress(TypeError, ValueError):
        forward, backward, pair = adapt(forward, backward)
        takes = pair.takes
    if x is None:
        x, *ours = closed_form.example((4, 8), rng)
        if normalize_axis_tuple(axis, 2) == (0,):
            x, ours = x.T, [a[:, None] for a in ours]
        gamma, beta = (
            own if a is None and role in takes else a
            for a, own, role in zip((gamma, beta), ours, PARAMETERS, strict=True)
        )
    x, gamma, beta = check_args([x, gamma, beta], ARGUMENTS[:3], None)[0].values()
    if not np.isfinite(offset) or (offset and gamma is None):
        msg = f"gamma_offset must be finite, and 0 without a gamma, got {offset}"
        raise ValueError(msg)
    axes = normalize_axis_tuple(axis, x.ndim) if x.ndim else ()
    names = [str(a) for a in range(x.ndim) if a not in axes] + [" and ".join(map(str, axes))]
    about = f"x {shape_text(x.shape)} {x.dtype}, eps {eps:g}, axis {names[-1]}"
    about += f", seed {seed}" * isinstance(seed, int)
    moved = _Moved(x, gamma, beta, axes)
    operation = Operation(*moved.pair(forward, backward, check_eps(eps)))
    case = Case(moved.x, *moved.parameters, eps, moved.x, kind, offset)
    findings = list[Finding]()
    fits = x.size > 0 and all(a is None or a.shape == case.x.shape[-1:] for a in case[1:3])
    if fits and x.dtype == np.float64 and _is_narrow(operation, case, rng):
        message = "the code computes in float32 inside: it is judged by the rounding of float32"
        findings.append(Finding("precision", "float64 is kept", "NOTE", message))
        case = Case(*(None if a is None else a.astype(np.float32) for a in case[:3]), *case[3:])
    arrays, spans = check_args(case[:3], ARGUMENTS[:3], None)
    sound, refused, contract = begin(operation, arrays, spans, rng)
    findings += contract
    judged, readings, causes = _NOTHING
    why = "gamma and beta must have the length of a row"
    if fits and sound:
        operation.left_out = {name for name, result in refused.items() if result}
        why = "the forward is wrong"
        with warnings.catch_warnings(action="ignore"):
            try:
                judged, readings, causes = _look(operation, case, rng, findings, names)
            except FaultError as fault:
                findings.append(Finding("closed form", "both run", "FAIL", str(fault)))
                why = "the code does not run on other data"
    results = [
        result or _decided(name, judged.get(f"d{name}", []), why, moved)
        for name, result in refused.items()
    ]
    return make_report(operation, (results, findings), about, readings, causes)


class _Moved:
    """A norm over any axes of x seen as one over the last; `like` are the caller's arrays."""

    def __init__(self, x: Array, gamma: Any, beta: Any, axes: tuple[int, ...]):
        self.axes, self.like = axes, (x, gamma, beta)
        self.x, self.parameters = (
            self.there(x),
            [p if p is None else p.reshape(-1) for p in (gamma, beta)],
        )
        # The flat places in the caller's x.
        self.places = self.there(np.arange(x.size).reshape(x.shape))

    def there(self, a: Array) -> Array:
        """Move the normalized axes to the end, as one."""
        moved = np.moveaxis(a, self.axes, range(-len(self.axes), 0))
        return np.ascontiguousarray(moved.reshape(*moved.shape[: a.ndim - len(self.axes)], -1))

    def back(self, a: Array) -> Array:
        """Undo `there`; rows of another length vary along the last of the axes."""
        x, k = self.like[0], len(self.axes)
        if a.ndim + k != x.ndim + 1:
            msg = f"x must have {x.ndim} axes for axis {self.axes}"
            raise FaultError(msg)
        lengths = [x.shape[axis] for axis in self.axes]
        if a.shape[-1] != math.prod(lengths):
            lengths = [1] * (k - 1) + [a.shape[-1]]
        return np.moveaxis(a.reshape(*a.shape[:-1], *lengths), range(-k, 0), self.axes)

    def form(self, parameter: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of gamma or beta for an x of this shape: flat, the axes', or to be broadcast."""
        if parameter.ndim == 1:
            return (-1,)
        if parameter.ndim == len(self.axes):
            return tuple(shape[axis] for axis in self.axes)
        return tuple(m if k in self.axes else 1 for k, m in enumerate(shape))[-parameter.ndim :]

    def pair(self, forward: Any, backward: Any, eps: float) -> tuple[Any, Any]:
        """Return both functions for rows along the last axis; eps may be another."""
        if self.axes == (self.x.ndim - 1,) and all(p is None or p.ndim == 1 for p in self.like[1:]):
            return lambda *given: forward(*given, *[eps][len(given) - 3 :]), backward

        def call(a: Array, gamma: Any, beta: Any, eps: float = eps) -> Any:
            x = self.back(a)
            both = [
                p if p is None else p.reshape(self.form(like, x.shape))
                for p, like in zip((gamma, beta), self.like[1:], strict=True)
            ]
            result = forward(x, *both, eps)
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                return result
            y, cache = result
            y = self.there(y) if np.shape(y) == x.shape else y
            return y, (cache, [x.shape, *map(np.shape, both)])

        def pull(dy: Array, cache: Any) -> Any:
            returned = backward(self.back(dy), cache[0])
            if not isinstance(returned, (tuple, list)) or len(returned) != 3:
                return returned
            # Gradients of another shape stay, and are refused.
            fits = [np.shape(a) == shape for a, shape in zip(returned, cache[1], strict=True)]
            moves = self.there, np.ravel, np.ravel
            return [
                f(a) if fit and a is not None else a
                for f, a, fit in zip(moves, returned, fits, strict=True)
            ]

        return call, pull


def axes_of(
    kind: str, forward: Any, backward: Any, data: Sequence[Any], eps: float, axis: Any = -1
) -> tuple[int, ...]:
    """Return the axes over which y of x, gamma and beta is normalized, `axis` moved last; empty if y shows none."""
    moved, rng = _Moved(*data, normalize_axis_tuple(axis, data[0].ndim)), np.random.default_rng(0)
    with contextlib.suppress(FaultError), np.errstate(all="ignore"):
        operation = Operation(*moved.pair(forward, backward, eps))
        case = Case(moved.x, *moved.parameters, eps, moved.x, kind)
        case = case._replace(eps=closed_form.read_eps(operation, case)[0])
        last = case.x.ndim - 1
        if not closed_form.judge(operation, closed_form.ordinary(case, rng))["y"].wrong:
            return (last,)
        readings, _ = _read(operation, case, rng, ["y"], [*map(str, range(last + 1))])
        return readings["y"].axes if readings else ()
    return ()


def _is_narrow(operation: Operation, case: Case, rng: Generator) -> bool:
    """Tell whether y of float64 data is right to the rounding of float32 alone."""
    with contextlib.suppress(FaultError):
        case = case._replace(eps=closed_form.read_eps(operation, case)[0])
        case = closed_form.ordinary(case, rng)
        # Exact in float32, so that nothing but arithmetic rounds.
        case = case._replace(x=case.x.astype(np.float32).astype(np.float64))
        y = Judged("y", closed_form.run(operation, case)[0], Expected(case, 2.0**-53))
        return y.wrong and y.error < closed_form.unit(case.n, 2.0**-24)
    return False


# The judged gradients, formulas by name, causes.
_Found = tuple[Mapping[str, list[Judged]], dict[str, Reading], tuple[str, ...]]
_NOTHING: _Found = ({}, {}, ())


def _look(
    operation: Operation, case: Case, rng: Generator, findings: list[Finding], names: list[str]
) -> _Found:
    """Add the findings of the closed form to `findings`; return the judged gradients, formulas and causes."""
    y = closed_form.run(operation, case)[0]
    # The caller's data with a random dy.
    case = case._replace(dy=rng.standard_normal(case.x.shape).astype(y.dtype))
    eps, takes_eps = closed_form.read_eps(operation, case)
    given, case = case.eps, case._replace(eps=eps)
    # Judge every element on the caller's data and on ours, y first.
    outputs = [
        closed_form.judge(operation, data) for data in (case, closed_form.ordinary(case, rng))
    ]
    judged = {name: [by_name[name] for by_name in outputs] for name in outputs[0]}
    if wrong := [one for one in judged.pop("y")[::-1] if one.wrong]:
        found, causes = _read(operation, case, rng, ["y"], names)
        said = wrong[0].not_finite or f"y is off by {wrong[0].error:.1e}"
        findings.append(Finding("the forward", "y = gamma xhat + beta", "FAIL", said))
        kind = {"layer": "layer", "rms": "RMS"}[case.kind]
        return {}, found, causes or (f"this is not the {kind} normalization asked for: {said}",)
    if eps != given:
        message = f"the eps given, {given:g}, is not used: it is {eps:g} inside"
        findings.append(Finding("the forward", "it uses eps", "NOTE", message))
    findings.append(Finding("closed form", "y = gamma xhat + beta", "PASS"))
    for name, both in judged.items():
        if all(one.right for one in both):
            findings.append(Finding("closed form", f"every element of {name} is right", "PASS"))
    if wrong_names := [n for n, both in judged.items() if any(one.wrong for one in both)]:
        message = "not run: the gradients are wrong on ordinary inputs already"
        findings.append(Finding("hard inputs", "hard inputs", "NOTE", message))
        return judged, *_read(operation, case, rng, wrong_names, names)
    base = closed_form.ordinary(case, rng, closed_form.few(case))
    ours = closed_form.equivalent(case, base, rng, takes_eps=takes_eps)
    for layer, problems in (
        ("closed form", ours),
        ("hard inputs", closed_form.hard_inputs(base, rng)),
    ):
        for problem in problems:
            seen = closed_form.judge_case(operation, problem)
            findings.append(Finding(layer, problem.name, *seen))
    return judged, {}, ()


def _read(
    operation: Operation, case: Case, rng: Generator, wrong: list[str], axes: list[str]
) -> tuple[dict[str, Reading], tuple[str, ...]]:
    """Read back the formulas of wrong outputs from draws of two shapes; return them, and the causes."""
    leads = ((), ()), ((20,), (26,)), ((4, 5), (5, 6)), ((2, 3, 4), (3, 4, 5))
    small, other = (
        (*lead, n) for lead, n in zip(leads[min(case.x.ndim, 4) - 1], (8, 11), strict=True)
    )
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
    # The error where the code is right: y is, or nothing is known but the rounding.
    noise = max(max(o["y"].error * ("y" not in wrong), o["y"].expected.u) for o in outputs)
    readings, found = dict[str, Reading](), dict[str, list[str]]()
    for name in wrong:
        own = [o[name] for o in outputs]
        if not any(one.wrong for one in own) or not all(np.isfinite(o.actual).all() for o in own):
            continue
        places = {formula.locate(o.actual, o.value, o.plain, o.shape) for o in own}
        cause = places.pop() if len(places) == 1 else ""
        if not cause and case.n > 1:
            reading = formula.read(name, draws, [o.actual for o in own], noise, case.x.shape, axes)
            if not reading:
                reading = Reading(f"not read back{_known(operation, draws[0], own[0], noise)}", "")
            readings[name], cause = reading, reading.cause
        if cause:
            found.setdefault(cause, []).append("the forward" if name == "y" else name)
    sums = [readings[n].formula for n in ("dgamma", "dbeta") if n in readings]
    if sums == ["sum(dy)", "sum(dy xhat)"]:
        found = {"dgamma and dbeta are exchanged": []}
    # Words that fit several outputs are said once: "... in dx and dgamma".
    return readings, tuple(formula.agree(words, names) for words, names in found.items())


def _known(operation: Operation, case: Case, one: Judged, noise: float) -> str:
    """Say what is known of a dx that was not read back, by changing one thing at a time."""
    if one.name != "dx":
        return ""
    x = case.x.copy()
    x.reshape(-1, case.n)[:-1] *= 1.5
    changes: dict[str, dict[str, Any]] = {
        "x": {"x": 1.25 * case.x}, "eps": {"eps": 4 * case.eps + 1e-3}, "other rows": {"x": x},
    }  # fmt: skip
    if case.gamma is not None:
        changes["gamma"] = {"gamma": 1.25 * case.gamma}
    moved = {}
    for name, change in changes.items():
        rows = closed_form.judge(operation, case._replace(**change))["dx"].actual
        moved[name] = np.vstack([one.actual[:-1], rows[-1:]]) if name == "other rows" else rows
    return f": {formula.describe(one.actual, one.expected, moved, noise)}"


def _decided(name: str, judged: list[Judged], why: str, moved: _Moved) -> ArgumentResult:
    """Return the verdict of the closed form on one gradient; `why` if there is none."""
    if not judged:
        return ArgumentResult(name, "NOT CHECKED", message=why)
    one = next((one for one in judged if one.wrong), judged[0])
    is_right = all(one.right for one in judged)
    z, bound = (one.z_plain, one.plain) if is_right else (one.z, one.careless)
    verdict: Verdict = "FAIL" if one.wrong else "PASS"
    message = one.not_finite * one.wrong
    # If an offset leaves x no digits, the closed form does not know the right gradient either.
    if not one.wrong and one.resolution(bound) > (np.finfo(float).max if is_right else COARSEST):
        verdict, message = "INCONCLUSIVE", "the offset of x leaves too few digits"
    worst, wrong, places = int(np.argmax(z)), np.reshape(z > 1, -1), np.arange(z.size)
    shape: tuple[int, ...] = one.shape
    if name == "x":
        places, shape = moved.places.reshape(-1), moved.like[0].shape
    seen = np.zeros(z.size, bool)
    seen[places] = wrong
    numbers = (float(a.flat[worst]) for a in (one.actual, one.value, bound))
    return ArgumentResult(
        name, verdict, z.size, z.size, 0, int(wrong.sum()), place_of(int(places[worst]), shape),
        *numbers, 0.0, one.resolution(bound), message, "closed form",
        name_pattern(seen.reshape(shape)) if one.wrong else "",
    )  # fmt: skip
