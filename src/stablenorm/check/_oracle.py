"""Errors in ulp against exact results, computed by a function that is handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stablenorm._types import Array
from stablenorm.check._expected import OUTPUTS, Case
from stablenorm.check._program import Outcome, Program
from stablenorm.check._report import Finding

LAYER = "oracle"
# A second or so for integer arithmetic, at 5 to 15 us an element and output.
_ELEMENTS = 2**14


def check_oracle(
    program: Program, oracle: Callable[..., Any], given: Case, outcome: Outcome
) -> list[Finding]:
    """Report the worst error of every output in ulp; wrong is what arithmetic cannot explain."""
    rows = given.x.size // given.n
    few = max(1, _ELEMENTS // given.n)
    if few < rows:
        # Sums over fewer rows are other sums: run anew.
        sample = np.unique(np.linspace(0, rows - 1, few).astype(np.intp))
        x, dy = (a.reshape(-1, *given.row_shape)[sample] for a in (given.x, given.dy))
        given = given._replace(x=x, dy=dy)
        outcome = program.run(given)
    if outcome.error:
        return [Finding(LAYER, "errors in ulp", "INCONCLUSIVE", outcome.error)]
    flat = given._replace(
        x=given.x.reshape(-1, given.n),
        gamma=None if given.gamma is None else given.gamma.reshape(-1),
        beta=None if given.beta is None else given.beta.reshape(-1),
        dy=given.dy.reshape(-1, given.n),
    )
    arrays = {
        name: found.reshape((-1, given.n) if name in ("y", "dx") else -1)
        for name in OUTPUTS
        if (found := outcome.get(name)) is not None
    }
    try:
        exact = oracle(*flat)
        errors = exact.ulp_errors(**arrays)
        return [_finding(program, flat, name, arrays[name], exact, errors[name]) for name in arrays]
    except Exception as error:  # noqa: BLE001 - the oracle is the caller's: it may raise anything
        message = f"the oracle raises {type(error).__name__}: {error}"[:120]
        return [Finding(LAYER, "errors in ulp", "INCONCLUSIVE", message)]


def _finding(
    program: Program, case: Case, name: str, actual: Array, exact: Any, errors: Array
) -> Finding:
    judged = program.judge_one(case, name, actual)
    value = np.asarray(exact.rounded(name, actual.dtype)).astype(np.float64)
    with np.errstate(all="ignore"):
        away = np.abs(judged.actual - value.reshape(judged.actual.shape))
    known = np.isfinite(value.reshape(judged.actual.shape))
    worst = float(np.max(errors, initial=0.0))
    median = float(np.median(errors)) if errors.size else 0.0
    message = f"{name}: worst error {worst:.3g} ulp, median {median:.3g}"
    # NaN where it should be finite compares as wrong.
    wrong = bool(np.any(known & ~(away <= judged.bounds.careless)))
    verdict = "FAIL" if wrong else "NOTE"
    return Finding(LAYER, f"{name} against exact results", verdict, message, judged.resolution)  # type: ignore[arg-type]
