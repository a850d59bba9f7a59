"""Whether the forward is a layer normalization, with which eps, in which precision."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stablenorm.check._cases import few_rows, ordinary
from stablenorm.check._diagnosis import diagnose_y
from stablenorm.check._expected import Case
from stablenorm.check._program import Program
from stablenorm.check._report import Finding

_SINGLE = 2.0**-24
# Its square, 1e-12, is no more than any eps in use, so that the eps shows in full.
_SPREAD = 2.0**-20
_NAME = "y = gamma xhat + beta"


class Form(NamedTuple):
    """What the forward computes; `eps` is the one it uses."""

    normalizes: bool
    eps: float
    takes_eps: bool
    findings: tuple[Finding, ...]
    diagnosis: tuple[str, ...] = ()


def examine_forward(program: Program, given: Case, rng: np.random.Generator) -> Form:
    """Compare y with the definition, on data where every part of it shows."""
    case = ordinary(given, rng, few_rows(given)) if given.x.ndim > len(given.row_shape) else given
    eps, takes_eps = _eps_of(program, case)
    findings = []
    if eps != case.eps:
        message = f"the eps given, {case.eps:g}, is not used: it is {eps:g} inside"
        findings.append(Finding("identities", "the forward uses eps", "NOTE", message))
    case = case._replace(eps=eps)
    y, _, error = program.forward(case)
    if y is None:
        findings.append(Finding("identities", _NAME, "NOTE", error))
        return Form(False, eps, takes_eps, tuple(findings))
    judged = program.judge_one(case, "y", y)
    if judged.wrong and judged.u < _SINGLE:
        # Right as float32 goes? Then the cache is no better either.
        program.u = _SINGLE
        single = program.judge_one(case, "y", y)
        if single.right:
            message = "y is right to float32 only: something is kept in float32 inside"
            findings.append(Finding("identities", "y is as accurate as its dtype", "NOTE", message))
            judged = single
        else:
            program.u = 0.0
    if judged.wrong:
        message = (
            f"y is off by {judged.relative:.1e}: this is not the layer normalization asked for"
        )
        findings.append(Finding("identities", _NAME, "FAIL", message, judged.resolution))
        return Form(False, eps, takes_eps, tuple(findings), diagnose_y(case, judged))
    findings.append(Finding("identities", _NAME, "PASS", "", judged.resolution))
    return Form(True, eps, takes_eps, tuple(findings))


def _eps_of(program: Program, case: Case) -> tuple[float, bool]:
    """Return the eps that the forward uses, and whether that is the one it is given."""
    values = _SPREAD * np.resize([1.0, -1.0], case.n)
    x = np.broadcast_to(values, (case.x.size // case.n, case.n)).reshape(case.x.shape)
    probe = case._replace(x=x.astype(case.x.dtype))
    first, _, _ = program.forward(probe)
    second, _, _ = program.forward(probe._replace(eps=4 * case.eps + 1))
    if first is None or second is None or not np.array_equal(first, second) or case.n < 2:
        return case.eps, True
    beta, gamma = case.vector(case.beta, 0.0), case.vector(case.gamma, 1.0)
    row = case.rows(probe.x)[0]
    centered = row - row.mean()
    xhat = (case.rows(first)[0] - beta) / np.where(gamma == 0, 1.0, gamma)
    keep = gamma != 0
    slope = float(xhat[keep] @ centered[keep]) / float(centered[keep] @ centered[keep])
    if not (np.isfinite(slope) and slope > 0):
        return case.eps, False
    found = slope**-2 - float(np.mean(centered**2))
    # To the three digits in which such constants are written.
    written = float(f"{found:.3g}")
    same = abs(found - case.eps) <= 1e-3 * case.eps
    return (case.eps if same or written < 0 else written), False
