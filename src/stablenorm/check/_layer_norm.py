"""`check_layer_norm`: finite differences, and all that layer normalization allows besides."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.check._cases import few_rows, ordinary
from stablenorm.check._check import Backward, Progress, check_gradients
from stablenorm.check._diagnosis import diagnose
from stablenorm.check._expected import OUTPUTS, Case, Expected, statistics
from stablenorm.check._forward_form import Form, examine_forward
from stablenorm.check._hard_inputs import check_hard_inputs
from stablenorm.check._identities import check_eps, row_identities
from stablenorm.check._invariance import check_invariance
from stablenorm.check._oracle import check_oracle
from stablenorm.check._program import Judged, Outcome, Program, narrowed
from stablenorm.check._report import ArgumentResult, Finding, GradientReport, Identity
from stablenorm.check._structure import check_structure

# The noise in the bound of a numeric derivative is estimated from some ten samples, and so itself
# off by a third or two now and then. An element beyond it by no more than that, of a gradient
# that is right to rounding at the same x by an independent formula, is no evidence against it.
_MARGINAL = 3.0
_ARGUMENTS = {"x": "dx", "gamma": "dgamma", "beta": "dbeta"}


def check_layer_norm(
    forward: Callable[..., Any],
    backward: Backward,
    x: Any = None,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    *,
    rng: Any = None,
    oracle: Callable[..., Any] | None = None,
    probes: int = 3,
    max_elements: int = 64,
    progress: Progress | None = None,
) -> GradientReport:
    """
    Check a layer normalization over the last axis, and name what is wrong with it.

    Everything that `check_gradients` does; the equations that only layer normalization satisfies,
    which see at rounding level what finite differences do not; independence of batch and layout;
    hard inputs; and, where a gradient is wrong, which term of it.

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
        With `identities` and `findings`; a broken one makes the verdict FAIL. `diagnosis` names
        causes where they explain every element to rounding, and nothing simpler does.

    Raises
    ------
    TypeError, ValueError
        As `check_gradients` and `row_identities`.

    See Also
    --------
    check_gradients : For any operation; the bounds are explained there.
    row_identities : The identities alone, without a forward.

    Notes
    -----
    Right, but less accurate than a plain two-pass program in the dtypes given, is a NOTE, not a
    failure: a variance from E[x^2] - E[x]^2, say, under an offset. A float64 gradient
    that holds float32 values throughout is judged as float32. The batteries run on at most 8
    rows of the length given; gradients are compared in full, at `x` and at data of the
    checker's own.

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

    def call(*arrays: Array | None) -> Any:
        """Call `forward` with its fixed eps."""
        return forward(*arrays, eps)

    single: set[str] = set()

    def judged_backward(dy: Array, cache: Any) -> Any:
        """Call `backward`; single precision in double is told as what it is."""
        gradients = backward(dy, cache)
        if not isinstance(gradients, (tuple, list)):
            return gradients
        narrow = [narrowed(gradient) for gradient in gradients]
        pairs = zip(OUTPUTS[1:], gradients, narrow, strict=False)
        single.update(name for name, wide, result in pairs if result is not wide)
        return narrow

    report = check_gradients(
        call,
        judged_backward,
        args,
        names=tuple(_ARGUMENTS),
        scales=(_row_scale(args[0], eps), None, None),
        rng=rng,
        probes=probes,
        max_elements=max_elements,
        progress=progress,
    )
    more = _Battery(Program(forward, judged_backward), args, eps, rng).run(oracle)
    message = "holds nothing but float32 values in float64: judged as float32"
    notes = [
        Finding("identities", f"{name} is as accurate as its dtype", "NOTE", f"{name} {message}")
        for name in sorted(single)
    ]
    return dataclasses.replace(
        report,
        arguments=tuple(_amended(result, more.wrong, more.right) for result in report.arguments),
        identities=more.identities,
        findings=(*report.findings, *notes, *more.findings),
        diagnosis=(*report.diagnosis, *more.diagnosis),
        forward_calls=report.forward_calls + more.program.forward_calls,
        backward_calls=report.backward_calls + more.program.backward_calls,
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

    def __init__(
        self,
        program: Program,
        args: Sequence[Array | None],
        eps: float,
        rng: np.random.Generator,
    ):
        self.program, self._args, self._eps, self._rng = program, args, eps, rng
        self.identities: tuple[Identity, ...] = ()
        self.findings: list[Finding] = []
        self.diagnosis: tuple[str, ...] = ()
        # By output, what was compared and found wrong.
        self.wrong: dict[str, _Compared] = {}
        # The outputs that agree with the checker's own to rounding, wherever compared: at the
        # caller's data.
        self.right: dict[str, _Compared] = {}

    def run(self, oracle: Callable[..., Any] | None) -> _Battery:
        """Run all layers that make sense."""
        given = self._given()
        if given is None:
            return self
        form = examine_forward(self.program, given, self._rng)
        self.findings += form.findings
        self.diagnosis = form.diagnosis
        if not form.normalizes:
            return self
        given = given._replace(eps=form.eps)
        outcome = self.program.run(given)
        own = ordinary(given, self._rng)
        compared = [(given, outcome), (own, self.program.run(own))]
        for _, found in compared:
            if found.error:
                self.findings.append(Finding("identities", "both run", "FAIL", found.error))
                return self
        self._identify(given, outcome)
        self._compare(compared)
        self._batteries(own, form, oracle, given, outcome)
        return self

    def _given(self) -> Case | None:
        """Return the caller's data with a random dy; None where there is nothing to check."""
        x, gamma, beta = self._args
        if x is None or x.ndim == 0 or x.size == 0:
            return None
        case = Case(x, gamma, beta, float(self._eps), x)
        shape = case.row_shape
        shaped = x.shape[x.ndim - len(shape) :] == shape
        if not shaped or any(a is not None and a.shape != shape for a in (gamma, beta)):
            return None
        y, _, error = self.program.forward(case)
        # What is wrong with it, `check_gradients` has told.
        if y is None or error:
            return None
        return case._replace(dy=self._rng.standard_normal(x.shape).astype(y.dtype))

    def _identify(self, case: Case, outcome: Outcome) -> None:
        """Evaluate the identities of one call, at the caller's data."""
        results = [outcome.get(name) for name in OUTPUTS]
        self.identities = row_identities(*case, *results)
        if all(identity.passed for identity in self.identities):
            return
        # Not wrong where it is but inaccurate: then the layers beyond tell what it loses.
        judged = self.program.judge(case, outcome).values()
        if not any(each.wrong for each in judged):
            self.identities = tuple(
                identity._replace(bound=max(identity.bound, identity.error), passed=True)
                for identity in self.identities
            )
            lossy = [each for each in judged if not each.right]
            for each in lossy:
                message = f"{each.name} is inaccurate here: off by {each.relative:.1e}"
                self.findings.append(
                    Finding("identities", f"{each.name}: as accurate as plain", "NOTE", message)
                )

    def _compare(self, compared: list[tuple[Case, Outcome]]) -> None:
        """Compare every element with the checker's own, and diagnose what is wrong."""
        said: list[tuple[str, ...]] = []
        everything = [(case, self.program.judge(case, outcome)) for case, outcome in compared]
        self.right = {
            name: _Compared(everything[0][1][name], everything[0][0])
            for name in OUTPUTS[1:]
            if all(name in found and found[name].right for _, found in everything)
        }
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

    def _batteries(
        self,
        own: Case,
        form: Form,
        oracle: Callable[..., Any] | None,
        given: Case,
        outcome: Outcome,
    ) -> None:
        few = ordinary(own, self._rng, few_rows(own)) if own.x.ndim > len(own.row_shape) else own
        self.findings += check_structure(
            self.program, few, self._rng, takes_eps=form.takes_eps and own.eps > 0
        )
        self.findings += check_invariance(self.program, few)
        if self.wrong:
            message = "not run: the gradients are wrong on ordinary inputs already"
            self.findings.append(Finding("hard inputs", "right for hard inputs", "NOTE", message))
        else:
            self.findings += check_hard_inputs(self.program, few, self._rng)
        if oracle is not None:
            self.findings += check_oracle(self.program, oracle, given, outcome)


class _Compared(NamedTuple):
    """An output beside its closed form, and where."""

    judged: Judged
    case: Case

    def bound(self, index: tuple[int, ...] | None) -> float:
        """Return how far rounding may take the element at `index` off; along a probe, all of it."""
        plain = self.judged.bounds.plain
        if index is not None:
            shape = self.case.x.shape if self.judged.name == "dx" else self.case.row_shape
            return float(plain.reshape(shape)[index])
        # A probe moves each row of x by its own spread, gamma and beta by about 1.
        scale = Expected(self.case, self.judged.u).stats.s if self.judged.name == "dx" else 1.0
        return 2 * float(np.sqrt(np.sum(np.square(plain * scale))))

    def replaces(self, result: ArgumentResult, z: Array, **changes: Any) -> ArgumentResult:
        """Return the result with the element of largest z, beside the closed form."""
        flat, judged = int(np.argmax(z)), self.judged
        shape = self.case.x.shape if judged.name == "dx" else self.case.row_shape
        return dataclasses.replace(
            result,
            index=tuple(int(i) for i in np.unravel_index(flat, shape)),
            actual=float(judged.actual.flat[flat]),
            numeric=float(judged.bounds.value.flat[flat]),
            bound_numeric=float(judged.bounds.plain.flat[flat]),
            bound_actual=0.0,
            method="closed form",
            **changes,
        )


def _amended(
    result: ArgumentResult, wrong: dict[str, _Compared], right: dict[str, _Compared]
) -> ArgumentResult:
    """Let the closed form decide; finite differences are the independent witness."""
    name = _ARGUMENTS.get(result.name, "")
    if name in right and result.verdict in ("INCONCLUSIVE", "FAIL") and result.checked:
        return _cleared(result, right[name])
    if name not in wrong or result.verdict in ("FAIL", "NOT CHECKED"):
        return result
    z = wrong[name].judged.careless
    message = "seen by the closed form, too small for finite differences"
    failing = int(np.sum(z > 1))
    return wrong[name].replaces(result, z, verdict="FAIL", failing=failing, message=message)


def _cleared(result: ArgumentResult, compared: _Compared) -> ArgumentResult:
    """Pass a gradient that is right to rounding, and that differences were too coarse to judge."""
    judged = compared.judged
    # Under an offset that leaves x no digits, nothing is known of the right gradient either.
    if not np.isfinite(judged.resolution):
        return result
    if result.verdict == "FAIL":
        difference = abs(result.actual - result.numeric)
        bound = result.bound_numeric + result.bound_actual
        # What both sides may lose to an offset, the bound of the differences does not know.
        own = compared.bound(result.index)
        if not difference <= _MARGINAL * bound + own:
            return result
    return compared.replaces(
        result,
        judged.plain,
        verdict="PASS",
        checked=judged.actual.size,
        failing=0,
        resolution=judged.resolution,
        message="",
        pattern="",
        curve=(),
    )
