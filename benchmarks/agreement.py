"""
Agree, then time: a candidate is timed on a problem only if its results are right there.

The exact oracle checks that ours keep the accuracy contract. A peer must be as near as its precision allows.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from peers import EPS, Calls, ours

from stablenorm import exact_layer_norm
from stablenorm.records import Array
from stablenorm.timing import Problem

# Elements of ours that the oracle judges: a quarter of a second. Rows in which magnitudes are measured.
_JUDGED, _SAMPLED_ROWS = 2**13, 256
# Arrays y and dx of a peer with more elements are compared in the sampled rows alone.
_ALL = 2**25
# Units of rounding: a two-pass formula makes about ten roundings on the way to an element, each
# up to the magnitude that `scales` returns. They do not all add up.
_ROUNDINGS = 16


class DisagreementError(Exception):
    """Our results break the accuracy contract, so a time would mean nothing."""


def check_ours(problem: Problem) -> dict[str, Array]:
    """Return our results; DisagreementError if sampled rows, as a problem of their own, break the contract."""
    count = max(1, _JUDGED // problem.x.shape[-1])
    part = problem._replace(x=_rows_of(problem.x, count), dy=_rows_of(problem.dy, count))
    exact = exact_layer_norm(*part[:3], EPS, part.dy)
    for name, result in exact.check_contract(**ours().make(part, EPS).results()).items():
        if not result.passed:
            msg = f"{name} must keep the contract: {result}, {part.x.dtype} of {problem.x.shape}"
            raise DisagreementError(msg)
    return ours().make(problem, EPS).results()


def check_peer(calls: Calls, problem: Problem, right: dict[str, Array]) -> float:
    """Return the largest part of the tolerance that a peer uses; up to 1 the peer agrees."""
    allowed = scales(problem)
    used = 0.0
    for name, actual in calls.results().items():
        expected = right[name]
        if name in ("y", "dx") and problem.x.size > _ALL:
            expected, actual = _rows_of(expected), _rows_of(actual)  # noqa: PLW2901
        used = max(used, _used(expected, actual, _ROUNDINGS * allowed[name]))
    return used


def scales(problem: Problem) -> dict[str, float]:
    """Return the magnitude of the terms of each result; a plain formula rounds relative to it."""
    n = problem.x.shape[-1]
    x, dy, gamma, beta = (
        array.astype(np.float32)
        for array in (_rows_of(problem.x), _rows_of(problem.dy), *problem[1:3])
    )
    # The elements of a short row may nearly coincide: rstd, up to 316, then multiplies every rounding.
    rstd = float((x.astype(np.float64).var(axis=-1).min(initial=np.inf) + EPS) ** -0.5)
    if n < 64:
        # Rows outside the sample may be narrower still.
        rstd = EPS**-0.5
    xhat = rstd * float(np.abs(x).max())
    largest = float(np.abs(dy).max())
    rows = problem.x.size // n
    return {
        "y": float(np.abs(gamma).max()) * xhat + float(np.abs(beta).max()),
        # The factor 2 is for g and the two means subtracted from it; xhat multiplies one of them.
        "dx": rstd * float(np.abs(gamma).max()) * largest * 2 * min(xhat, n**0.5),
        # Terms of N(0, 1) x N(0, 1) are added one by one: partial sums are below sqrt(rows), and
        # their roundings add up to about `rows`. A few rows may have a large term.
        "dgamma": largest * (rows + min(xhat, 2 * n**0.5) * rows**0.5),
        "dbeta": largest * (rows + rows**0.5),
    }


def _rows_of(array: Array, count: int = _SAMPLED_ROWS) -> Array:
    """Return evenly spaced rows along the last axis, the first and the last included."""
    rows = array.reshape(-1, array.shape[-1])
    return rows[np.unique(np.linspace(0, len(rows) - 1, count).astype(np.intp))]


def _used(expected: Array, actual: Array, scale: float) -> float:
    """Return the largest difference, in units of the tolerance; NaN counts as infinite."""
    kind: Any = ml_dtypes.finfo(expected.dtype)  # type: ignore[no-untyped-call]
    allowed = scale * float(kind.eps) / 2 + float(kind.smallest_subnormal)
    off = np.abs(np.subtract(expected, actual, dtype=np.float64, casting="unsafe"))
    return float(np.nan_to_num(off, nan=np.inf).max(initial=0)) / allowed
