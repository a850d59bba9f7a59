"""`check_layer_norm`: the closed form judges, finite differences are the independent witness."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from stablenorm.check.cases import Trial, few_rows, hard_inputs, invariances, judge_trial, ordinary
from stablenorm.check.causes import diagnose
from stablenorm.check.closed_form import OUTPUTS, Candidate, Case, Judged, statistics, unit
from stablenorm.check.compare import name_pattern
from stablenorm.check.gradients import Progress, check_gradients
from stablenorm.check.identities import check_eps, row_identities
from stablenorm.check.operation import Backward, FaultError, Operation, norm
from stablenorm.check.report import (
    ArgumentResult,
    Finding,
    FindingVerdict,
    GradientReport,
    Identity,
)
from stablenorm.types import Array

# The noise in the error of a numeric derivative is estimated from some ten samples, and so itself
# off by a third or two now and then.
_MARGINAL = 3.0
_ARGUMENTS = {"x": "dx", "gamma": "dgamma", "beta": "dbeta"}
_SINGLE = 2.0**-24
# Digits that even single precision keeps of a well-conditioned problem; a formula that is wrong
# there in the fourth digit is wrong.
_FOUR_DIGITS = 1e-4


def check_layer_norm(
    forward: Callable[..., Any],
    backward: Backward,
    x: Any = None,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    *,
    rng: Any = None,
    probes: int = 3,
    max_elements: int = 64,
    progress: Progress | None = None,
) -> GradientReport:
    """
    Check a layer normalization over the last axis, and name what is wrong with it.

    Everything that `check_gradients` does, and more: every element is compared with the checker's
    own closed form, which decides at rounding level, with finite differences as the independent
    witness; identities; rows alone; hard inputs; and, where a gradient is wrong, which term of it,
    if the mistake is a common one.

    Parameters
    ----------
    forward : callable
        ``forward(x, gamma, beta, eps) -> (y, cache)``.
    backward : callable
        ``backward(dy, cache) -> (dx, dgamma, dbeta)``; None for what is not to be checked.
    x : array, optional
        Input, (..., n). Default: (4, 8), float64, random; then gamma and beta too, unless given:
        gamma of both signs and different from 1, beta different from 0. Not modified.
    gamma, beta : array, optional
        Scale and shift, (n,). With `x` given, None is passed on as None.
    eps : float, default: 1e-5
        Passed on, finite and >= 0.
    rng : int or numpy.random.Generator, optional
        For the default data and for everything random in the check.
    probes, max_elements : int, default: 3 and 64
        As for `check_gradients`.
    progress : callable, optional
        As for `check_gradients`.

    Returns
    -------
    GradientReport
        With `identities` and `findings`; one that fails makes the verdict FAIL. `diagnosis` names
        common mistakes, where they explain every element to rounding and nothing simpler does.

    Raises
    ------
    TypeError, ValueError
        As `check_gradients` and `row_identities`.

    See Also
    --------
    check_gradients : For any operation; explains the bounds.
    row_identities : The identities alone, without a forward.

    Notes
    -----
    Code that is right but less accurate than two passes in the given dtypes gets a NOTE, not a
    failure: a variance from E[x^2] - E[x]^2 under an offset, for example. float64 results that
    are right to float32 only are wrong. The additional tests (identities, rows alone, hard
    inputs) use at most 8 rows; gradients are compared in full, at `x` and at data that the
    checker generates.

    Finite differences of float32 are too coarse for a verdict. There the closed form decides
    alone; `method` says so. It cannot where an offset leaves x too few digits: INCONCLUSIVE.

    Examples
    --------
    >>> import numpy as np
    >>> def forward(x, gamma, beta, eps):
    ...     centered = x - x.mean(-1, keepdims=True)
    ...     rstd = 1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps)
    ...     return gamma * centered * rstd + beta, (centered * rstd, rstd, gamma)
    >>> def backward(dy, cache):
    ...     xhat, rstd, gamma = cache
    ...     g = gamma * dy
    ...     dx = g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True)
    ...     return rstd * dx, (dy * xhat).sum(0), dy.sum(0)
    >>> check_layer_norm(forward, backward, rng=0).verdict
    'PASS'
    """
    start = time.perf_counter()
    rng = np.random.default_rng(rng)
    if x is None:
        x = rng.standard_normal((4, 8))
        signs = rng.permutation([1.0, -1.0] * 4)
        gamma = signs * (1 + 0.5 * rng.random(8)) if gamma is None else gamma
        beta = 0.5 + rng.random(8) if beta is None else beta
    args = [None if a is None else np.array(a) for a in (x, gamma, beta)]
    check_eps(eps)
    report = check_gradients(
        lambda *args: forward(*args, eps),
        backward,
        args,
        names=tuple(_ARGUMENTS),
        scales=(_row_scale(args[0], eps), None, None),
        rng=rng,
        probes=probes,
        max_elements=max_elements,
        progress=progress,
    )
    operation = Operation(forward, backward)
    more = _Battery(Candidate(operation), rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more.run(args, float(eps))
    return replace(
        report,
        arguments=tuple(more.amended(result) for result in report.arguments),
        identities=more.identities,
        findings=(*report.findings, *more.findings),
        diagnosis=more.diagnosis,
        forward_calls=report.forward_calls + operation.forward_calls,
        backward_calls=report.backward_calls + operation.backward_calls,
        seconds=time.perf_counter() - start,
    )


def _row_scale(x: Array | None, eps: float) -> Array | None:
    """Return sqrt(var + eps), the distance over which a row's y changes; None if unusable."""
    if x is None or x.ndim == 0 or x.size == 0 or not np.isfinite(x.astype(np.float64)).all():
        return None
    scale = statistics(x.astype(np.float64), eps).s
    return np.where(scale > 0, scale, 1)


class _Battery:
    """The layers beyond finite differences, and what they found."""

    def __init__(self, candidate: Candidate, rng: np.random.Generator):
        self._candidate, self._rng = candidate, rng
        self.identities: tuple[Identity, ...] = ()
        self.findings: list[Finding] = []
        self.diagnosis: tuple[str, ...] = ()
        # By output: beyond what even a careless program loses, and right to rounding everywhere.
        self._wrong: dict[str, Judged] = {}
        self._right: dict[str, Judged] = {}

    def add(self, name: str, verdict: FindingVerdict, message: str, seen: Any = None) -> None:
        """Add a finding of the closed form."""
        self.findings.append(Finding("closed form", name, verdict, message, seen))

    def run(self, args: list[Array | None], eps: float) -> None:
        """Run all layers that make sense."""
        try:
            self._run(args, eps)
        except FaultError as fault:
            self.add("both run", "FAIL", str(fault))

    def _run(self, args: list[Array | None], eps: float) -> None:
        case = self._given(args, eps)
        read = None if case is None else self._examine_forward(case)
        if case is None or read is None:
            return
        case = case._replace(eps=read[0])
        own = ordinary(case, self._rng)
        outputs = [self._candidate.run(each) for each in (case, own)]
        self._compare([case, own], outputs)
        results = (outputs[0].get(name) for name in OUTPUTS)
        self.identities = row_identities(*case, *results)
        if self._wrong:
            message = "not run: the gradients are wrong on ordinary inputs already"
            self.findings.append(Finding("hard inputs", "right for hard inputs", "NOTE", message))
        else:
            few = self._few(own)
            same = invariances(few, self._rng, takes_eps=read[1])
            self._try("closed form", same, 0.0)
            self._try("hard inputs", hard_inputs(few, self._rng), _FOUR_DIGITS)

    def _given(self, args: list[Array | None], eps: float) -> Case | None:
        """Return the caller's data with a random dy; None where there is nothing to check."""
        x, gamma, beta = args
        if x is None or x.ndim == 0 or x.size == 0:
            return None
        case = Case(x, gamma, beta, eps, x)
        shape = case.row_shape
        shaped = x.shape[x.ndim - len(shape) :] == shape
        if not shaped or any(a is not None and a.shape != shape for a in (gamma, beta)):
            return None
        try:
            y, _ = self._candidate.forward(case)
        except FaultError:
            # `check_gradients` has told.
            return None
        return case._replace(dy=self._rng.standard_normal(x.shape).astype(y.dtype))

    def _few(self, case: Case) -> Case:
        """Return data of a few rows; the case itself if x has no axis of rows."""
        has_rows = case.x.ndim > len(case.row_shape)
        return ordinary(case, self._rng, few_rows(case)) if has_rows else case

    def _examine_forward(self, given: Case) -> tuple[float, bool] | None:
        """Compare y with the definition; return the eps in use, and whether it is the one given."""
        candidate, name = self._candidate, "y = gamma xhat + beta"
        case = self._few(given)
        eps, takes_eps = candidate.read_eps(case)
        if eps != case.eps:
            message = f"the eps given, {case.eps:g}, is not used: it is {eps:g} inside"
            self.add("the forward uses eps", "NOTE", message)
        case = case._replace(eps=eps)
        try:
            y, _ = candidate.forward(case)
        except FaultError as fault:
            self.add(name, "NOTE", str(fault))
            return None
        judged = candidate.judge(case, {"y": y})["y"]
        if not judged.wrong:
            self.add(name, "PASS", "", judged.resolution)
            return eps, takes_eps
        message = (
            f"y is off by {judged.relative:.1e}: this is not the layer normalization asked for"
        )
        if judged.relative < unit(case.n, _SINGLE):
            message = f"y is off by {judged.relative:.1e}, as if something were kept in float32"
        self.add(name, "FAIL", message, judged.resolution)
        self.diagnosis = diagnose(case, {"y": judged})
        return None

    def _compare(self, cases: list[Case], outputs: list[dict[str, Array]]) -> None:
        """Compare every element with the closed form, and diagnose what is wrong."""
        pairs = zip(cases, outputs, strict=True)
        everything = [(case, self._candidate.judge(case, found)) for case, found in pairs]
        said = []
        for name in everything[0][1].keys() - {"y"}:
            if all(found[name].right for _, found in everything):
                self._right[name] = everything[0][1][name]
                resolution = max(found[name].resolution for _, found in everything)
                self.add(f"every element of {name} is right", "PASS", "", resolution)
        for case, found in everything:
            judged = {name: each for name, each in found.items() if each.wrong and name != "y"}
            for name, each in judged.items():
                self._wrong.setdefault(name, each)
            if judged:
                said.append(diagnose(case, judged))
        # The two data sets must not contradict one another.
        if said:
            self.diagnosis = tuple(s for s in said[-1] if all(s in others for others in said))

    def _try(self, layer: str, trials: Iterable[Trial], tolerated: float) -> None:
        """Run trials; loss of digits is a note, a wrong result a failure."""
        for trial in trials:
            outcome = judge_trial(self._candidate, trial, tolerated)
            self.findings.append(Finding(layer, f"right for {trial.name}", *outcome))

    def amended(self, result: ArgumentResult) -> ArgumentResult:
        """Let the closed form decide; finite differences are the independent witness."""
        name = _ARGUMENTS.get(result.name, "")
        if not result.checked:
            return result
        if name in self._wrong:
            wrong = self._wrong[name]
            pattern = name_pattern((wrong.careless > 1).reshape(wrong.shape))
            if result.verdict == "FAIL":
                return replace(result, pattern=pattern)
            message = "seen by the closed form, too small for finite differences"
            changes: dict[str, Any] = {"message": message, "pattern": pattern, "verdict": "FAIL"}
            return replace(result, **_worst(wrong, wrong.careless), **changes)
        if name not in self._right:
            return result
        right = self._right[name]
        if result.verdict == "PASS":
            return replace(result, resolution=min(result.resolution, right.resolution))
        return cleared(result, right)


def cleared(result: ArgumentResult, right: Judged) -> ArgumentResult:
    """Pass a gradient that is right to rounding, and that differences were too coarse to judge."""
    # Under an offset that leaves x no digits, nothing is known of the right gradient either.
    if not np.isfinite(right.resolution):
        return result
    if result.index is None:
        own = 2 * norm(right.bounds.plain * right.scale)
    else:
        own = float(right.bounds.plain.reshape(right.shape)[result.index])
    # What both sides may lose to an offset, the error of the differences does not know.
    bound = _MARGINAL * (result.bound_numeric + result.bound_actual) + own
    if result.verdict == "FAIL" and not abs(result.actual - result.numeric) <= bound:
        return result
    worst = _worst(right, right.plain)
    return replace(result, **worst, verdict="PASS", message="", pattern="")


def _worst(judged: Judged, z: Array) -> dict[str, Any]:
    """Return what a result says of the element of largest z, beside the closed form."""
    place = int(np.argmax(z))
    return {
        "checked": z.size,
        "failing": int(np.sum(z > 1)),
        "index": tuple(int(i) for i in np.unravel_index(place, judged.shape)),
        "actual": float(judged.actual.flat[place]),
        "numeric": float(judged.bounds.value.flat[place]),
        "bound_numeric": float(judged.bounds.plain.flat[place]),
        "bound_actual": 0.0,
        "resolution": judged.resolution,
        "method": "closed form",
        "curve": (),
    }
