"""
Agree, then time: no candidate is timed on a problem where its results are not those of the others.

Ours must be within an ulp or two of the NumPy reference; a peer must be as near as its precision
allows.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from peers import EPS, Calls

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cli.bench import Problem
from stablenorm.types import Array, Gradients

# The reference computes this much of float32 in half a second; of float64 a twentieth. Beyond, some
# rows are compared: y and dx of a row depend on no other; the sums are then held against the peers'.
_ALL, _ALL_WIDE = 2**25, 2**20
_SOME_ROWS = 256
# Units of rounding: a two-pass formula makes about ten roundings on the way to an element, each
# up to the magnitude that `scales` says, and they do not all add up.
_ROUNDINGS = 16


class DisagreementError(Exception):
    """Ours are not the reference's: nothing that is timed would mean anything."""


def compute(problem: Problem, backend: str, out: bool = False) -> dict[str, Array]:
    """Return our four results, in new arrays or in those of the problem."""
    y, gradients = (problem.y, problem.gradients) if out else (None, None)
    arguments = problem.x, problem.gamma, problem.beta, EPS
    y, cache = layer_norm_forward(*arguments, out=y, backend=backend)
    return {"y": y, **layer_norm_backward(problem.dy, cache, out=gradients)._asdict()}


def check_ours(problem: Problem, backend: str) -> dict[str, Array]:
    """Return our results; raise if they are not the reference's, or not the same with `out=`."""
    ours, written = compute(problem, backend), compute(problem, backend, out=True)
    where = f"{problem.x.shape} {problem.x.dtype}"
    for name, array in ours.items():
        # Of y and dx some rows: copies of all take longer than all that is timed.
        if _rows_of(array).tobytes() != _rows_of(written[name]).tobytes():
            msg = f"{name} with out= must be the bits of a fresh one, got other ones for {where}"
            raise DisagreementError(msg)
    small = problem.x.size <= (_ALL_WIDE if problem.x.dtype.itemsize == 8 else _ALL)
    part = problem if small else some_rows(problem)
    actual = compute(part, backend)
    for name, expected in compute(part, "numpy").items():
        if not _close(expected, actual[name], part, name in ("dgamma", "dbeta")):
            msg = f"{name} must be that of the reference, got another one for {where}"
            raise DisagreementError(msg)
    return ours


def _close(expected: Array, actual: Array, problem: Problem, is_sum: bool) -> bool:
    """Tell whether both are as near to the exact values as the contract has it."""
    wide = problem.x.dtype.itemsize == 8
    # Each within 0.501 ulp of the exact value: an ulp apart at most, two where the limit is larger.
    ulps = 2 if wide or is_sum else 1
    # And an element that cancels may use c S. The magnitudes summed are those of gamma, beta, dy and
    # xhat: about 1, and none beyond 2**5.
    power = (-94 if wide else -44) if is_sum else (-98 if wide else -48)
    terms = problem.x.size // problem.x.shape[-1] if is_sum else 1
    kind: Any = ml_dtypes.finfo(expected.dtype)  # type: ignore[no-untyped-call]
    least = 2 * (float(kind.smallest_subnormal) + 2.0 ** (power + 10) * terms)
    one, other = expected.astype(np.float64), actual.astype(np.float64)
    return bool(np.all(np.abs(one - other) <= ulps * float(kind.eps) * np.abs(one) + least))


def check_peer(calls: Calls, problem: Problem, ours: dict[str, Array]) -> float:
    """Return the largest part of its tolerance that a peer uses: up to 1 it agrees."""
    allowed = scales(problem)
    used = 0.0
    for name, actual in calls.results().items():
        expected = ours[name]
        if name in ("y", "dx") and problem.x.size > _ALL:
            expected, actual = _rows_of(expected), _rows_of(actual)  # noqa: PLW2901
        used = max(used, _used(expected, actual, _ROUNDINGS * allowed[name]))
    return used


def scales(problem: Problem) -> dict[str, float]:
    """Return the magnitudes that the roundings of a formula without corrections are relative to."""
    n = problem.x.shape[-1]
    x, dy, gamma, beta = (
        array.astype(np.float32)
        for array in (_rows_of(problem.x), _rows_of(problem.dy), *problem[1:3])
    )
    # Rows of few elements may nearly coincide: rstd, up to 316, then multiplies every rounding.
    rstd = float((x.astype(np.float64).var(axis=-1).min(initial=np.inf) + EPS) ** -0.5)
    if n < 64:
        # Among all rows there are closer ones than among those looked at.
        rstd = EPS**-0.5
    xhat = rstd * float(np.abs(x).max())
    largest = float(np.abs(dy).max())
    rows = problem.x.size // n
    return {
        "y": float(np.abs(gamma).max()) * xhat + float(np.abs(beta).max()),
        # Twice: g and the two means taken from it; one of them is multiplied by xhat.
        "dx": rstd * float(np.abs(gamma).max()) * largest * 2 * min(xhat, n**0.5),
        # Terms of N(0, 1) x N(0, 1) added one by one: partial sums are below sqrt(rows), and so
        # many roundings of them add up to `rows`, give or take; a few rows may hold a large term.
        "dgamma": largest * (rows + min(xhat, 2 * n**0.5) * rows**0.5),
        "dbeta": largest * (rows + rows**0.5),
    }


def some_rows(problem: Problem) -> Problem:
    """Return a problem of some of the rows."""
    x, dy = _rows_of(problem.x), _rows_of(problem.dy)
    return problem._replace(x=x, dy=dy, y=x, gradients=Gradients(None, None, None))


def _rows_of(array: Array) -> Array:
    """Return rows of the last axis, evenly spaced, the first and the last among them."""
    rows = array.reshape(-1, array.shape[-1])
    return rows[np.unique(np.linspace(0, len(rows) - 1, _SOME_ROWS).astype(np.intp))]


def _used(expected: Array, actual: Array, scale: float) -> float:
    """Return the largest difference, in units of what is allowed; NaN counts as all of it."""
    kind: Any = ml_dtypes.finfo(expected.dtype)  # type: ignore[no-untyped-call]
    allowed = scale * float(kind.eps) / 2 + float(kind.smallest_subnormal)
    off = np.abs(np.subtract(expected, actual, dtype=np.float64, casting="unsafe"))
    return float(np.nan_to_num(off, nan=np.inf).max(initial=0)) / allowed
