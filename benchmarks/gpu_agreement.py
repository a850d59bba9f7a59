"""
Agree, then time, on a GPU: what a candidate returned against float64. Knows nothing of a GPU.

The reference is the textbook formula in float64, of NumPy alone and not of this package: wrong by
2**-29 of a float32 ulp where nothing cancels. y and dx are looked at in some rows, since none
depends on another; dgamma and dbeta in all columns, over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from agreement import scales

from stablenorm._types import Array
from stablenorm.cli.bench_measure import Problem

EPS = 1e-5
NAMES = {"forward": ("y",), "backward": ("dx", "dgamma", "dbeta")}
# Of y and dx: enough for every slot of a block, few enough for a tenth of a second.
_SOME_ROWS = 64
# In parts: float64 copies of the largest arrays would take more than they do.
_PART = 2**22
# Units of rounding, as in `agreement`: a peer calculates in float32 and makes about ten of them.
_ROUNDINGS = 16
# Ours: one ulp, and beside it what the contract allows to sums that cancel, generously.
_OUR_ULPS, _OUR_SCALE = 1.0, 2.0**-20


class Exact(NamedTuple):
    """The float64 results of one direction, the rows that y and dx are of, and their magnitudes."""

    values: dict[str, Array]
    rows: Array
    scales: dict[str, float]


class Verdict(NamedTuple):
    """Which of the candidates may be timed, and how far off each is."""

    # Largest error of all results, in ulp of its dtype at the exact value; finite ones only.
    ulps: dict[str, float]
    # Why the others may not.
    refused: dict[str, str]


def solve(problem: Problem, direction: str) -> Exact:
    """Return what a forward or a backward should give."""
    x, gamma, beta, dy = problem.x, problem.gamma, problem.beta, problem.dy
    rows = np.unique(np.linspace(0, len(x) - 1, _SOME_ROWS).astype(np.intp))
    scale, shift = gamma.astype(np.float64), beta.astype(np.float64)
    xhat, rstd = _xhat(x[rows])
    if direction == "forward":
        return Exact({"y": xhat * scale + shift}, rows, scales(problem))
    g = dy[rows].astype(np.float64) * scale
    g -= g.mean(axis=1, keepdims=True)
    values = {"dx": rstd * (g - xhat * (g * xhat).mean(axis=1, keepdims=True))}
    values["dgamma"], values["dbeta"] = (np.zeros(x.shape[1]) for _ in range(2))
    step = max(1, _PART // x.shape[1])
    for start in range(0, len(x), step):
        part = dy[start : start + step].astype(np.float64)
        values["dbeta"] += part.sum(axis=0)
        values["dgamma"] += (part * _xhat(x[start : start + step])[0]).sum(axis=0)
    return Exact(values, rows, scales(problem))


def _xhat(x: Array) -> tuple[Array, Array]:
    """Return the normalized rows and the reciprocal standard deviations, a column."""
    wide = x.astype(np.float64)
    wide -= wide.mean(axis=1, keepdims=True)
    wide -= wide.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + EPS)
    return wide * rstd, rstd


def admit(exact: Exact, found: Mapping[str, Callable[[], dict[str, Array]]], ours: str) -> Verdict:
    """
    Say which candidates agree with `exact`; each is called for its results, on the host.

    Those whose names begin with `ours` are held to what this package promises.
    """
    verdict = Verdict({}, {})
    for name, call in found.items():
        try:
            ulp, why = compare(exact, call(), strict=name.startswith(ours))
        except Exception as error:  # noqa: BLE001  # they raise whatever they like
            verdict.refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        if np.isfinite(ulp):
            verdict.ulps[name] = ulp
        if why:
            verdict.refused[name] = f"does not agree with float64: {why}"
    return verdict


def compare(exact: Exact, actual: Mapping[str, Array], *, strict: bool) -> tuple[float, str]:
    """Return the largest error in ulp, and what is off by more than allowed, or ""."""
    worst, wrong = 0.0, []
    for name, expected in exact.values.items():
        array = actual[name]
        array = array[exact.rows] if name in ("y", "dx") else array
        if array.shape != expected.shape:
            msg = f"{name} must have shape {expected.shape}, got {array.shape}"
            raise ValueError(msg)
        kind: Any = ml_dtypes.finfo(array.dtype)  # type: ignore[no-untyped-call]
        off = np.abs(array.astype(np.float64) - expected)
        ulp = ulp_of(expected, array.dtype)
        of_scale = _OUR_SCALE if strict else _ROUNDINGS
        allowed = (_OUR_ULPS if strict else 0.0) * ulp + float(kind.smallest_subnormal)
        allowed += of_scale * exact.scales[name] * float(kind.eps) / 2
        used = float(np.nan_to_num(off / allowed, nan=np.inf).max(initial=0.0))
        worst = max(worst, float(np.nan_to_num(off / ulp, nan=np.inf).max(initial=0.0)))
        if not used <= 1:
            wrong.append(f"{name} by {used:.3g} times what is allowed")
    return worst, ", ".join(wrong)


def named(returned: Any, direction: str) -> dict[str, Any]:
    """Return the results in what a candidate returned: y or a tuple with it; the gradients."""
    if direction == "forward":
        return {"y": returned[0] if isinstance(returned, tuple) else returned}
    return dict(zip(NAMES["backward"], returned[:3], strict=True))


def ulp_of(exact: Array, dtype: np.dtype[Any]) -> Array:
    """Return the distance of the neighbours in `dtype` at `exact`."""
    kind: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    _, exponents = np.frexp(exact)
    # Of 0, frexp says the exponent of 1/2.
    ulps = np.where(exact == 0, 0.0, np.ldexp(float(kind.eps), exponents - 1))
    return np.maximum(ulps, float(kind.smallest_subnormal))
