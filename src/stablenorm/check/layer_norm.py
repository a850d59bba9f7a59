"""`check_layer_norm`: the closed form judges, finite differences are the independent witness."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.cases import (
    Trial,
    few_rows,
    hard_inputs,
    invariances,
    judge_trial,
    ordinary,
)
from stablenorm.check.causes import diagnose, diagnose_y
from stablenorm.check.closed_form import (
    OUTPUTS,
    Candidate,
    Case,
    Expected,
    Judged,
    Outcome,
    narrowed,
    statistics,
)
from stablenorm.check.compare import name_pattern
from stablenorm.check.gradients import Progress, check_operation, with_shapes
from stablenorm.check.identities import check_eps, row_identities
from stablenorm.check.operation import Backward, FaultError, Operation
from stablenorm.check.report import (
    ArgumentResult,
    Finding,
    FindingVerdict,
    GradientReport,
    Identity,
)
from stablenorm.types import Array

Oracle = Callable[..., Any]

# The noise in the error of a numeric derivative is estimated from some ten samples, and so itself
# off by a third or two now and then.
_MARGINAL = 3.0
_ARGUMENTS = {"x": "dx", "gamma": "dgamma", "beta": "dbeta"}
_CLOSED_FORM, _HARD = "closed form", "hard inputs"
_SINGLE = 2.0**-24
# Digits that even single precision keeps of a well-conditioned problem; a formula that is wrong
# there in the fourth digit is wrong.
_FOUR_DIGITS = 1e-4
# Elements for the oracle: a second or so of integer arithmetic, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 2**14


def check_layer_norm(
    forward: Callable[..., Any],
    backward: Backward,
    x: Any = None,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    *,
    rng: Any = None,
    oracle: Oracle | None = None,
    probes: int = 3,
    max_elements: int = 64,
    progress: Progress | None = None,
) -> GradientReport:
    """
    Check a layer normalization over the last axis, and name what is wrong with it.

    Everything that `check_gradients` does, and more: every element is compared with the checker's
    own closed form, which decides at rounding level, with finite differences as the independent
    witness; identities; rows alone and in other orders; hard inputs; and, where a gradient is
    wrong, which term of it, if the mistake is a common one.

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
    oracle : callable, optional
        ``oracle(x, gamma, beta, eps, dy)`` returns exact results, as
        `stablenorm.exact_layer_norm` does: for the errors in ulp.
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
    failure: a variance from E[x^2] - E[x]^2 under an offset, for example. A float64 gradient
    that holds only float32 values is judged as float32. The additional tests (identities, rows in
    other orders, hard inputs) use at most 8 rows; gradients are compared in full, at `x` and at
    data that the checker generates.

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
    single: set[str] = set()

    def judged_backward(dy: Array, cache: Any) -> Any:
        """Call `backward`, and hand on as float32 what is float32 in float64."""
        gradients = backward(dy, cache)
        if not isinstance(gradients, (tuple, list)):
            return gradients
        narrow = [narrowed(gradient) for gradient in gradients]
        pairs = zip(OUTPUTS[1:], gradients, narrow, strict=False)
        single.update(name for name, wide, result in pairs if result is not wide)
        return narrow

    operation = Operation(forward, judged_backward, eps)
    scales = (_row_scale(args[0], eps), None, None)
    report = check_operation(
        operation, args, tuple(_ARGUMENTS), scales, rng, probes, max_elements, progress
    )
    more = _Battery(operation, args, eps, rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more.run(oracle)
    notes = [
        _accuracy_note(f"{name} holds nothing but float32 values in float64: judged as float32")
        for name in sorted(single)
    ]
    report = replace(
        report,
        arguments=tuple(more.amended(result) for result in report.arguments),
        identities=more.identities,
        findings=(*report.findings, *notes, *more.findings),
        diagnosis=(*report.diagnosis, *more.diagnosis),
        forward_calls=operation.forward_calls,
        backward_calls=operation.backward_calls,
        seconds=time.perf_counter() - start,
    )
    return with_shapes(report, operation)


def _row_scale(x: Array | None, eps: float) -> Array | None:
    """Return sqrt(var + eps), the distance over which a row's y changes; None if unusable."""
    if x is None or x.ndim == 0 or x.size == 0 or not np.isfinite(x.astype(np.float64)).all():
        return None
    scale = statistics(x.astype(np.float64), eps).s
    return np.where(scale > 0, scale, 1)


def _accuracy_note(message: str) -> Finding:
    return Finding(_CLOSED_FORM, "as accurate as its dtype", "NOTE", message)


class _Compared(NamedTuple):
    """An output beside its closed form, and where."""

    judged: Judged
    case: Case

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the argument."""
        return self.case.x.shape if self.judged.name == "dx" else self.case.row_shape

    def bound(self, index: tuple[int, ...] | None) -> float:
        """Return how far rounding may take the element at `index` off; along a probe, all of it."""
        plain = self.judged.bounds.plain
        if index is not None:
            return float(plain.reshape(self.shape)[index])
        # A probe moves each row of x by its own spread, gamma and beta by about 1.
        scale = Expected(self.case, self.judged.u).stats.s if self.judged.name == "dx" else 1.0
        return 2 * float(np.sqrt(np.sum(np.square(plain * scale))))

    def replaces(self, result: ArgumentResult, z: Array, **changes: Any) -> ArgumentResult:
        """Return the result with the element of largest z, beside the closed form."""
        flat, judged = int(np.argmax(z)), self.judged
        return replace(
            result,
            checked=z.size,
            failing=int(np.sum(z > 1)),
            index=tuple(int(i) for i in np.unravel_index(flat, self.shape)),
            actual=float(judged.actual.flat[flat]),
            numeric=float(judged.bounds.value.flat[flat]),
            bound_numeric=float(judged.bounds.plain.flat[flat]),
            bound_actual=0.0,
            resolution=judged.resolution,
            method="closed form",
            curve=(),
            **changes,
        )


class _Battery:
    """The layers beyond finite differences, and what they found."""

    def __init__(
        self,
        operation: Operation,
        args: Sequence[Array | None],
        eps: float,
        rng: np.random.Generator,
    ):
        self.candidate, self._args, self._eps = Candidate(operation), args, float(eps)
        self._rng = rng
        self._takes_eps = True
        self.identities: tuple[Identity, ...] = ()
        self.findings: list[Finding] = []
        self.diagnosis: tuple[str, ...] = ()
        # By output: beyond what even a careless program loses, and right to rounding everywhere.
        self.wrong: dict[str, _Compared] = {}
        self.right: dict[str, _Compared] = {}

    def run(self, oracle: Oracle | None) -> None:
        """Run all layers that make sense."""
        given = self._given()
        eps = None if given is None else self._examine_forward(given)
        if given is None or eps is None:
            return
        given = given._replace(eps=eps)
        outcome = self.candidate.run(given)
        own = ordinary(given, self._rng)
        compared = [(given, outcome), (own, self.candidate.run(own))]
        for _, found in compared:
            if found.error:
                self.findings.append(Finding(_CLOSED_FORM, "both run", "FAIL", found.error))
                return
        self._compare(compared)
        self._identify(given, outcome)
        if self.wrong:
            message = "not run: the gradients are wrong on ordinary inputs already"
            self.findings.append(Finding(_HARD, "right for hard inputs", "NOTE", message))
        else:
            few = self._few(own)
            same = invariances(few, self._rng, takes_eps=self._takes_eps)
            self._try(_CLOSED_FORM, same, 0.0)
            self._try(_HARD, hard_inputs(few, self._rng), _FOUR_DIGITS)
        if oracle is not None:
            self.findings += self._ask(oracle, given, outcome)

    def _given(self) -> Case | None:
        """Return the caller's data with a random dy; None where there is nothing to check."""
        x, gamma, beta = self._args
        if x is None or x.ndim == 0 or x.size == 0:
            return None
        case = Case(x, gamma, beta, self._eps, x)
        shape = case.row_shape
        shaped = x.shape[x.ndim - len(shape) :] == shape
        if not shaped or any(a is not None and a.shape != shape for a in (gamma, beta)):
            return None
        try:
            y, _ = self.candidate.forward(case)
        except FaultError:
            # `check_gradients` has told.
            return None
        return case._replace(dy=self._rng.standard_normal(x.shape).astype(y.dtype))

    def _few(self, case: Case) -> Case:
        """Return data of a few rows; the case itself if x has no axis of rows."""
        has_rows = case.x.ndim > len(case.row_shape)
        return ordinary(case, self._rng, few_rows(case)) if has_rows else case

    def _examine_forward(self, given: Case) -> float | None:
        """Compare y with the definition; return the eps that it uses, None if y is wrong."""
        candidate, name = self.candidate, "y = gamma xhat + beta"
        case = self._few(given)
        eps, self._takes_eps = candidate.read_eps(case)
        if eps != case.eps:
            message = f"the eps given, {case.eps:g}, is not used: it is {eps:g} inside"
            self.findings.append(Finding(_CLOSED_FORM, "the forward uses eps", "NOTE", message))
        case = case._replace(eps=eps)
        try:
            y, _ = candidate.forward(case)
        except FaultError as fault:
            self.findings.append(Finding(_CLOSED_FORM, name, "NOTE", str(fault)))
            return None
        judged = candidate.judge_one(case, "y", y)
        if judged.wrong and judged.u < _SINGLE:
            # Right as float32 goes? Then the cache is no better either.
            candidate.u = _SINGLE
            if candidate.judge_one(case, "y", y).right:
                judged = candidate.judge_one(case, "y", y)
                self.findings.append(
                    _accuracy_note(
                        "y is right to float32 only: something is kept in float32 inside"
                    )
                )
            else:
                candidate.u = 0.0
        message = ""
        if judged.wrong:
            off = f"{judged.relative:.1e}"
            message = f"y is off by {off}: this is not the layer normalization asked for"
            self.diagnosis = diagnose_y(case, judged)
        verdict: FindingVerdict = "FAIL" if judged.wrong else "PASS"
        self.findings.append(Finding(_CLOSED_FORM, name, verdict, message, judged.resolution))
        return None if judged.wrong else eps

    def _compare(self, compared: list[tuple[Case, Outcome]]) -> None:
        """Compare every element with the closed form, and diagnose what is wrong."""
        said: list[tuple[str, ...]] = []
        everything = [(case, self.candidate.judge(case, outcome)) for case, outcome in compared]
        first_case, first = everything[0]
        for name in first.keys() - {"y"}:
            if all(found[name].right for _, found in everything):
                self.right[name] = _Compared(first[name], first_case)
                resolution = max(found[name].resolution for _, found in everything)
                sentence = f"every element of {name} is right"
                self.findings.append(Finding(_CLOSED_FORM, sentence, "PASS", "", resolution))
        for case, found in everything:
            judged = {name: each for name, each in found.items() if each.wrong and name != "y"}
            for name, each in judged.items():
                self.wrong.setdefault(name, _Compared(each, case))
            if judged:
                said.append(diagnose(case, judged))
        # The two data sets must not contradict one another.
        if said:
            self.diagnosis += tuple(
                each for each in said[-1] if all(each in others for others in said)
            )

    def _identify(self, case: Case, outcome: Outcome) -> None:
        """Evaluate the identities of one call, at the caller's data."""
        self.identities = row_identities(*case, *(outcome.get(name) for name in OUTPUTS))
        if all(identity.passed for identity in self.identities):
            return
        # Not wrong where it is but inaccurate: then the layers beyond tell what it loses.
        judged = self.candidate.judge(case, outcome).values()
        if not any(each.wrong for each in judged):
            self.identities = tuple(
                identity._replace(bound=max(identity.bound, identity.error), passed=True)
                for identity in self.identities
            )
            for each in judged:
                if not each.right:
                    message = f"{each.name} is inaccurate here: off by {each.relative:.1e}"
                    self.findings.append(_accuracy_note(message))

    def _try(self, layer: str, trials: Iterable[Trial], tolerated: float) -> None:
        """Run trials; loss of digits is a note, a wrong result a failure."""
        for trial in trials:
            outcome = judge_trial(self.candidate, trial, tolerated)
            self.findings.append(Finding(layer, f"right for {trial.name}", *outcome))

    def _ask(self, oracle: Oracle, given: Case, outcome: Outcome) -> list[Finding]:
        """Report the worst error of every output in ulp; wrong is what rounding cannot explain."""
        rows, few = given.x.size // given.n, max(1, _ORACLE_ELEMENTS // given.n)
        if few < rows:
            # Sums over fewer rows are other sums: run anew.
            sample = np.unique(np.linspace(0, rows - 1, few).astype(np.intp))
            x, dy = (a.reshape(-1, *given.row_shape)[sample] for a in (given.x, given.dy))
            given = given._replace(x=x, dy=dy)
            outcome = self.candidate.run(given)
        flat = Case(
            given.x.reshape(-1, given.n),
            None if given.gamma is None else given.gamma.reshape(-1),
            None if given.beta is None else given.beta.reshape(-1),
            given.eps,
            given.dy.reshape(-1, given.n),
        )
        arrays = {
            name: found.reshape((-1, given.n) if name in ("y", "dx") else -1)
            for name in OUTPUTS
            if (found := outcome.get(name)) is not None
        }
        try:
            exact = oracle(*flat)
            errors = exact.ulp_errors(**arrays)
            values = {name: exact.rounded(name, a.dtype) for name, a in arrays.items()}
        except Exception as error:  # noqa: BLE001 - the oracle is the caller's: it may raise anything
            message = f"the oracle raises {type(error).__name__}: {error}"[:120]
            return [Finding("oracle", "errors in ulp", "INCONCLUSIVE", message)]
        findings = []
        for name, actual in arrays.items():
            judged = self.candidate.judge_one(flat, name, actual)
            value = np.asarray(values[name]).astype(np.float64).reshape(judged.actual.shape)
            with np.errstate(all="ignore"):
                away = np.abs(judged.actual - value)
            # NaN where it should be finite compares as wrong.
            wrong = bool(np.any(np.isfinite(value) & ~(away <= judged.bounds.careless)))
            worst, median = (float(f(errors[name])) for f in (np.max, np.median))
            message = f"{name}: worst error {worst:.3g} ulp, median {median:.3g}"
            about = f"{name} against exact results"
            verdict: FindingVerdict = "FAIL" if wrong else "NOTE"
            findings.append(Finding("oracle", about, verdict, message, judged.resolution))
        return findings

    def amended(self, result: ArgumentResult) -> ArgumentResult:
        """Let the closed form decide; finite differences are the independent witness."""
        name = _ARGUMENTS.get(result.name, "")
        if result.checked and name in self.right and result.verdict in ("INCONCLUSIVE", "FAIL"):
            return _cleared(result, self.right[name])
        if result.checked and name in self.wrong and result.verdict in ("INCONCLUSIVE", "PASS"):
            wrong = self.wrong[name]
            z = wrong.judged.careless.reshape(-1)
            pattern = name_pattern((z > 1).reshape(wrong.shape))
            message = "seen by the closed form, too small for finite differences"
            return wrong.replaces(result, z, verdict="FAIL", message=message, pattern=pattern)
        return result


def _cleared(result: ArgumentResult, compared: _Compared) -> ArgumentResult:
    """Pass a gradient that is right to rounding, and that differences were too coarse to judge."""
    judged = compared.judged
    # Under an offset that leaves x no digits, nothing is known of the right gradient either.
    if not np.isfinite(judged.resolution):
        return result
    if result.verdict == "FAIL":
        difference = abs(result.actual - result.numeric)
        bound = result.bound_numeric + result.bound_actual
        # What both sides may lose to an offset, the error of the differences does not know.
        if not difference <= _MARGINAL * bound + compared.bound(result.index):
            return result
    return compared.replaces(result, judged.plain, verdict="PASS", message="", pattern="")
