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
from stablenorm.output import shape_text
from stablenorm.records import Array, Shape
from stablenorm.scalars import check_eps


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
    Code that is right but less accurate than two passes, as a variance from E[x^2] - E[x]^2 under an
    offset, does not fail. float64 gradients with the accuracy of float32 FAIL beside a y of float64; if y
    has it too, the code is judged by the rounding of float32, and the report says so first. If an offset
    leaves x too few digits for three digits of a gradient, it is INCONCLUSIVE.

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
    arrays: Any = check_args([x, gamma, beta], ARGUMENTS[:3], None)[0].values()
    x, gamma, beta = arrays
    if not np.isfinite(offset) or (offset and gamma is None):
        msg = f"gamma_offset must be finite, and 0 without a gamma, got {offset}"
        raise ValueError(msg)
    axes = normalize_axis_tuple(axis, x.ndim) if x.ndim else ()
    names = [str(a) for a in range(x.ndim) if a not in axes] + [" and ".join(map(str, axes))]
    about = f"x {shape_text(x.shape)} {x.dtype}, eps {eps:g}"
    about += f", axis {names[-1]}" * (axes != (x.ndim - 1,))
    about += f", seed {seed}" * isinstance(seed, int)
    check_eps(eps)
    operation, case, view = _seen(kind, forward, backward, (x, gamma, beta), eps, axes, offset)
    findings = list[Finding]()
    fits = x.size > 0 and all(a is None or a.shape == case.x.shape[-1:] for a in case[1:3])
    if fits and x.dtype == np.float64 and _is_narrow(operation, case, rng):
        message = "the code computes in float32 inside: it is judged by the rounding of float32"
        findings.append(Finding("precision", "float64 is kept", "NOTE", message))
        narrow: Any = (None if a is None else a.astype(np.float32) for a in case[:3])
        case = case._replace(**dict[str, Any](zip(ARGUMENTS, narrow, strict=False)))
    own, spans = check_args(case[:3], ARGUMENTS[:3], None)
    sound, refused, contract = begin(operation, own, spans, rng)
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
        result or _decided(name, judged.get(f"d{name}", []), why, view)
        for name, result in refused.items()
    ]
    return make_report(operation, (results, findings), about, readings, causes)


class _View:
    """The arrays of a norm over any axes of x, seen as those of one over the last axis."""

    def __init__(self, x: Array, gamma: Any, beta: Any, axes: Shape):
        self._given, self.shape = {"x": x, "gamma": gamma, "beta": beta}, x.shape
        # The last axis is that of any x; others are those of as many axes as the caller's.
        self._axes = (-1,) if axes == (x.ndim - 1,) else axes
        # By the name of an array, the shape that the code takes and returns; of the latest call.
        self._shapes: dict[str, Any] = {"y": x.shape}
        self.x = self.there("y", x)
        self.gamma, self.beta = (None if p is None else p.reshape(-1) for p in (gamma, beta))
        # The flat places in the caller's x.
        self.places = self.there("y", np.arange(x.size).reshape(x.shape))

    def there(self, name: str, a: Array) -> Array:
        """See an array of the code as rows; one of a wrong shape stays, and is refused."""
        if a.shape != self._shapes[name] or name not in ("y", "dx"):
            return a.reshape(-1) if a.shape == self._shapes[name] else a
        moved = np.moveaxis(a, self._axes, range(-len(self._axes), 0))
        return np.ascontiguousarray(moved.reshape(*moved.shape[: a.ndim - len(self._axes)], -1))

    def back(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return arrays as the code takes them; rows of another length vary along the last of the axes."""
        (a, *parameters), given, axes = arrays.values(), self._given["x"], self._axes
        if axes != (-1,) and a.ndim + len(axes) != given.ndim + 1:
            msg = f"x must have {given.ndim} axes for axis {axes}"
            raise FaultError(msg)
        lengths = [given.shape[axis] for axis in axes]
        if a.shape[-1] != math.prod(lengths):
            lengths = [1] * (len(axes) - 1) + [a.shape[-1]]
        x = np.moveaxis(a.reshape(*a.shape[:-1], *lengths), range(-len(axes), 0), axes)
        named = {"x": x} | {
            name: p if p is None else p.reshape(self._form(name, x.shape))
            for name, p in zip(PARAMETERS, parameters, strict=False)
        }
        self._shapes |= {f"d{name}": np.shape(part) for name, part in named.items()}
        self._shapes["y"] = x.shape
        return named

    def _form(self, name: str, shape: Shape) -> Any:
        """Return the shape of gamma or beta for an x of this shape: flat, the axes', or to be broadcast."""
        ndim = self._given[name].ndim
        if ndim in (1, len(self._axes)):
            return -1 if ndim == 1 else [shape[axis] for axis in self._axes]
        own = {axis % len(shape) for axis in self._axes}
        return [m if k in own else 1 for k, m in enumerate(shape)][-ndim:]


def _seen(
    kind: str,
    forward: Any,
    backward: Any,
    arrays: Sequence[Any],
    eps: float,
    axes: Any,
    offset: float = 0,
) -> tuple[Operation, Case, _View]:
    """Return the operation on rows, its case, and how the caller's arrays are seen."""
    x, gamma, beta = arrays
    view = _View(x, gamma, beta, axes)
    # The cases of the closed form have other eps.
    call = lambda x, gamma, beta, eps=eps: forward(x, gamma, beta, eps)
    case = Case(view.x, view.gamma, view.beta, eps, view.x, kind, offset)
    return Operation(call, backward, view), case, view


def axes_of(
    kind: str, forward: Any, backward: Any, data: Sequence[Any], eps: float, axis: Any = -1
) -> Shape:
    """Return the axes over which y of x, gamma and beta is normalized, `axis` moved last; empty if y shows none."""
    axes, rng = normalize_axis_tuple(axis, data[0].ndim), np.random.default_rng(0)
    with contextlib.suppress(FaultError), np.errstate(all="ignore"):
        operation, case, _ = _seen(kind, forward, backward, data, eps, axes)
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


# The search takes a second for an x of so many elements.
_LARGE = 2**10
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
        # The eps of what is no norm is not known.
        found, causes = _read(operation, case._replace(eps=given), rng, ["y"], names)
        said = wrong[0].not_finite or f"y is off by {wrong[0].error:.1e}"
        findings.append(Finding("the forward", "y = gamma xhat + beta", "FAIL", said))
        kind = {"layer": "layer", "rms": "RMS"}[case.kind]
        return {}, found, causes or (f"this is not the {kind} normalization asked for: {said}",)
    if eps != given:
        message = f"the eps given, {given:g}, is not used: it is {eps:g} inside"
        message += ", and constant rows are NaN" * (eps == 0)
        findings.append(Finding("the forward", "it uses eps", "NOTE", message))
    findings.append(Finding("closed form", "y = gamma xhat + beta", "PASS"))
    for name, both in judged.items():
        if not any(one.wrong for one in both):
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
    for shapes in ((small, small, other), *[(case.x.shape,) * 3] * (case.x.size <= _LARGE)):
        try:
            draws = [closed_form.ordinary(case, rng, shape) for shape in shapes]
            outputs = [closed_form.judge(operation, draw) for draw in draws]
            break
        except FaultError:
            continue
    else:
        text = f"not read back: the code takes no x but of shape {shape_text(case.x.shape)}"
        return dict.fromkeys(wrong, Reading(text, "")), ()
    # The error where the code is right: y is, or nothing is known but the rounding.
    noise = max(max(o["y"].error * ("y" not in wrong), o["y"].expected.u) for o in outputs)
    readings, found = dict[str, Reading](), dict[str, list[str]]()
    for name in wrong:
        own = [o[name] for o in outputs]
        if not any(one.wrong for one in own) or not all(np.isfinite(o.actual).all() for o in own):
            continue
        places = {formula.locate(o.actual, o.value, o.bound, o.shape) for o in own}
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
        return f": it is of {one.dtype}, x of {case.x.dtype}" * (one.dtype != case.x.dtype)
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


def _decided(name: str, judged: list[Judged], why: str, view: _View) -> ArgumentResult:
    """Return the verdict of the closed form on one gradient; `why` if there is none."""
    if not judged:
        return ArgumentResult(name, "NOT CHECKED", message=why)
    one = next((one for one in judged if one.wrong), judged[0])
    verdict: Verdict = "FAIL" if one.wrong else "PASS"
    message = one.not_finite * one.wrong
    # If an offset leaves x no digits, the closed form does not know the right gradient either.
    coarsest = np.finfo(float).max if all(one.right for one in judged) else COARSEST
    if not one.wrong and one.resolution > coarsest:
        verdict, message = "INCONCLUSIVE", "the offset of x leaves too few digits"
    z, worst = one.z, int(np.argmax(one.z))
    wrong, places = np.reshape(z > 1, -1), np.arange(z.size)
    shape: Shape = one.shape
    if name == "x":
        places, shape = view.places.reshape(-1), view.shape
    seen = np.zeros(z.size, bool)
    seen[places] = wrong
    errors = np.zeros(z.size)
    errors[places] = np.reshape(one.actual - one.value, -1)
    actual, value, bound = (float(a.flat[worst]) for a in (one.actual, one.value, one.bound))
    index, pattern = place_of(int(places[worst]), shape), name_pattern(seen.reshape(shape))
    counts = z.size, z.size, 0, int(wrong.sum())
    return ArgumentResult(
        name, verdict, *counts, index, actual, value, bound, 0.0, one.resolution, message,
        "closed form", pattern * one.wrong, errors.reshape(shape),
    )  # fmt: skip
