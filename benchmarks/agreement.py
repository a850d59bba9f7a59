"""
Agree, then time: no candidate is timed on a problem where its results are not those of the others.

Ours must be, for types of up to 32 bits, the very bits of the NumPy reference; a peer must be as
near as its precision allows.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from peers import EPS, Calls, Peer

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm._bench import Problem
from stablenorm._types import Array, Gradients

# Up to here the reference computes all of it: half a second forward and backward. Beyond, and for
# float64, which takes it twenty times as long, only some rows: y and dx of a row depend on no other.
_ALL = 2**25
_ALL_WIDE = 2**20
_SOME_ROWS = 256
# Units of rounding: a two-pass formula makes about ten roundings on the way to an element, each
# up to the magnitude that `scales` says, and they do not all add up.
_ROUNDINGS = 16


class DisagreementError(Exception):
    """Ours are not the bits of the reference: nothing that is timed would mean anything."""


def compute(problem: Problem, eps: float = EPS, backend: str | None = None) -> dict[str, Array]:
    """Return our four results."""
    y, cache = layer_norm_forward(problem.x, problem.gamma, problem.beta, eps, backend=backend)
    return {"y": y, **layer_norm_backward(problem.dy, cache)._asdict()}


def check_ours(problem: Problem, ours: dict[str, Array], written: dict[str, Array]) -> None:
    """Hold ours, in fresh arrays and in `out=`, against the reference; raise if they differ."""
    for name, array in ours.items():
        if not _same_bits(array, written[name]):
            msg = f"{name} with out= must be the bits of a fresh one, {_where(problem)}"
            raise DisagreementError(msg)
    wide = problem.x.dtype.itemsize == 8
    if problem.x.size <= (_ALL_WIDE if wide else _ALL):
        part, names = problem, tuple(ours)
    else:
        # The sums over all rows are then held against the peers' alone.
        part, names = some_rows(problem), ("y", "dx")
    expected = compute(part, backend="numpy")
    for name in names:
        actual = ours[name] if part is problem else _rows_of(ours[name])
        same = (
            _same_bits(expected[name], actual)
            if name in ("y", "dx") and not wide
            # Each within an ulp, beside what the contract allows to sums that cancel.
            else _used(expected[name], actual, 2, 2.0**-20 * scales(problem)[name]) <= 1
        )
        if not same:
            msg = f"{name} must be that of the NumPy reference, {_where(problem)}"
            raise DisagreementError(msg)


def check_peer(
    peer: Peer, calls: Calls, problem: Problem, ours: dict[str, Array]
) -> dict[str, float]:
    """Return how much of its tolerance each result of a peer uses: up to 1 it agrees."""
    if peer.eps != EPS:
        ours = compute(problem, peer.eps)
    allowed = scales(problem)
    used = {}
    for name, actual in calls.results().items():
        pair = (ours[name], actual)
        if name in ("y", "dx") and problem.x.size > _ALL:
            pair = (_rows_of(ours[name]), _rows_of(actual))
        used[name] = _used(*pair, 0, _ROUNDINGS * allowed[name])
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


def _used(expected: Array, actual: Array, ulps: float, scale: float) -> float:
    """Return the largest difference, in units of what is allowed; NaN counts as all of it."""
    kind: Any = ml_dtypes.finfo(expected.dtype)  # type: ignore[no-untyped-call]
    eps = float(kind.eps)
    worst = 0.0
    # In parts: float64 copies of the largest arrays would take more than they do.
    one, other = expected.reshape(-1), actual.reshape(-1)
    for start in range(0, one.size, 2**22):
        held = one[start : start + 2**22].astype(np.float64)
        off = np.abs(held - other[start : start + 2**22].astype(np.float64))
        used = off / (ulps * eps * np.abs(held) + scale * eps / 2 + float(kind.smallest_subnormal))
        worst = max(worst, float(np.nan_to_num(used, nan=np.inf).max(initial=0)))
    return worst


def _same_bits(one: Array, other: Array) -> bool:
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def _where(problem: Problem) -> str:
    return f"got other ones for {problem.x.shape} {problem.x.dtype}"
