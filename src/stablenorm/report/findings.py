"""The main job: compute a layer norm and its gradients, and check every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check import check_gradients, row_identities
from stablenorm.functional import layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.timing import measure_interleaved
from stablenorm.types import Array, Gradients

OUTPUTS = ("y", "dx", "dgamma", "dbeta")

# About a second for the oracle, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 50_000
# Some thousand calls of the float64 forward, at 0.15 us an element.
_DIFFERENCE_ELEMENTS = 4_096
_DIFFERENCE_SAMPLE = 96


class Problem(NamedTuple):
    """One layer norm to compute, and what the file says its results are."""

    source: str
    x: Array
    gamma: Array | None
    beta: Array | None
    eps: float
    dy: Array
    dy_origin: str
    expected: dict[str, Array]


class Output(NamedTuple):
    """What is known of one output; `error` are the ulp errors of the rows looked at."""

    array: Array
    contract: Any
    error: Array
    plain_error: Array
    agreement: float | None


class Findings(NamedTuple):
    """What was found about the results of one layer norm."""

    problem: Problem
    outputs: dict[str, Output]
    oracle_rows: int
    rows: int
    # None, and no identities, if an output overflows: what they could compare is gone.
    gradients: Any
    gradient_rows: int
    identities: tuple[Any, ...]
    # Seconds of forward and backward.
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return (
            all(output.contract.passed for output in self.outputs.values())
            and (self.gradients is None or self.gradients.verdict != "FAIL")
            and all(identity.passed for identity in self.identities)
        )


def compute(problem: Problem) -> dict[str, Array]:
    """Return y, dx and, where there are parameters, dgamma and dbeta."""
    y, cache = layer_norm_forward(problem.x, problem.gamma, problem.beta, problem.eps)
    results = (y, *layer_norm_backward(problem.dy, cache))
    return {name: array for name, array in zip(OUTPUTS, results, strict=True) if array is not None}


def inspect(problem: Problem, results: dict[str, Array], step: Callable[[str], None]) -> Findings:
    """Check `results`; `step` is told what each of the four steps does."""
    n = problem.x.shape[-1]
    matrix = problem._replace(x=problem.x.reshape(-1, n), dy=problem.dy.reshape(-1, n))
    rows = len(matrix.x)
    flat = {k: a.reshape(-1, n) if k in ("y", "dx") else a.ravel() for k, a in results.items()}
    step("exact results")
    sample = _sample(rows, _ORACLE_ELEMENTS // n)
    part = _of_rows(matrix, sample)
    # dgamma and dbeta are sums over all rows, so a sample of rows has sums of its own.
    sums = flat if len(sample) == rows else compute(part)
    judged = {k: a[sample] if k in ("y", "dx") else sums[k] for k, a in flat.items()}
    outputs = _judge(problem, part, results, judged)
    step("finite differences")
    few = _sample(rows, _DIFFERENCE_ELEMENTS // n)
    finite = all(is_finite(array) for array in results.values())
    gradients = _check_gradients(_of_rows(matrix, few)) if finite else None
    step("row identities")
    parameters = problem.gamma, problem.beta, problem.eps
    all_rows = (flat.get(name) for name in OUTPUTS)
    identities = row_identities(matrix.x, *parameters, matrix.dy, *all_rows) if finite else ()
    step("timing")
    _, cache = layer_norm_forward(problem.x, *parameters)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: layer_norm_forward(problem.x, *parameters),
        "backward": lambda: layer_norm_backward(problem.dy, cache),
    }
    # No pauses: both use our own threads, which do not spin.
    timings = measure_interleaved(calls, rounds=7, limit=1.0, settle=0)
    seconds = {direction: timing.median for direction, timing in timings.items()}
    found = gradients, len(few), tuple(identities), seconds
    return Findings(problem, outputs, len(sample), rows, *found)


def is_finite(array: Array) -> bool:
    """Tell whether no element is NaN or infinite."""
    return bool(np.isfinite(array.astype(np.float64)).all())


def _sample(rows: int, most: int) -> Array:
    """Evenly spaced rows, the first and the last among them."""
    return np.unique(np.linspace(0, rows - 1, min(rows, max(1, most))).astype(np.intp))


def _of_rows(matrix: Problem, sample: Array) -> Problem:
    return matrix._replace(x=matrix.x[sample], dy=matrix.dy[sample])


def _judge(
    problem: Problem, part: Problem, results: dict[str, Array], judged: dict[str, Array]
) -> dict[str, Output]:
    exact = exact_layer_norm(part.x, part.gamma, part.beta, part.eps, part.dy)
    contract = exact.check_contract(**judged)
    errors = exact.ulp_errors(**judged)
    y, cache = plain_forward(part.x, part.gamma, part.beta, part.eps)
    plain = dict(zip(OUTPUTS, (y, *plain_backward(part.dy, cache)), strict=True))
    plain_errors = exact.ulp_errors(**{k: plain[k].astype(a.dtype) for k, a in judged.items()})
    agreement = _agreement(problem) if problem.expected else {}
    return {
        k: Output(array, contract[k], errors[k], plain_errors[k], agreement.get(k))
        for k, array in results.items()
    }


def _agreement(problem: Problem) -> dict[str, float]:
    """Compare a float64 run with the results that the file holds: max|difference| / max|held|."""
    wide: dict[str, Any] = {
        name: _wide(getattr(problem, name)) for name in ("x", "gamma", "beta", "dy")
    }
    ours = compute(problem._replace(**wide))
    return {
        name: float(np.abs(ours[name] - held.astype(np.float64)).max() / np.abs(held).max())
        for name, held in problem.expected.items()
        if name in ours and held.shape == ours[name].shape and np.any(held)
    }


def _wide(array: Array | None) -> Array | None:
    return None if array is None else array.astype(np.float64)


def _check_gradients(part: Problem) -> Any:
    """
    Check the backward in the user's dtypes against differences of the forward in float64.

    The cotangents of the checker have so few bits that every dtype holds them exactly.
    """

    def forward(x: Array, gamma: Array | None, beta: Array | None) -> tuple[Array, None]:
        return layer_norm_forward(x, gamma, beta, part.eps)[0], None

    def backward(dy: Array, _: None) -> Gradients:
        cache = layer_norm_forward(part.x, part.gamma, part.beta, part.eps)[1]
        return layer_norm_backward(dy.astype(part.dy.dtype), cache)

    args = [part.x.astype(np.float64), _wide(part.gamma), _wide(part.beta)]
    return check_gradients(
        forward,
        backward,
        args,
        names=("x", "gamma", "beta"),
        scales=[_row_spread(part.x.astype(np.float64), part.eps), None, None],
        rng=0,
        max_elements=_DIFFERENCE_SAMPLE,
    )


def _row_spread(x: Array, eps: float) -> Array:
    """Return how far each row is to move: sqrt(var + eps)."""
    # Divided by the largest magnitude first, lest the squares of float64 overflow or vanish.
    largest = np.abs(x).max(axis=-1, keepdims=True)
    largest = np.where(largest > 0, largest, 1.0)
    spread = np.hypot(largest * (x / largest).std(axis=-1, keepdims=True), np.sqrt(eps))
    return np.where(spread > 0, spread, 1.0)
