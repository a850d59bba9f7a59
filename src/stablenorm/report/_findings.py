"""The main job: compute a layer norm and its gradients, and check every one of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check import check_gradients, row_identities
from stablenorm.functional import layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.plain import plain_backward, plain_forward
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
    """All that `stablenorm run` has to tell."""

    problem: Problem
    outputs: dict[str, Output]
    oracle_rows: int
    rows: int
    # None, and no identities, if an output overflows: what they could compare is gone.
    gradients: Any
    gradient_rows: int
    identities: tuple[Any, ...]
    seconds: dict[str, float]
    bytes_moved: dict[str, int]

    @property
    def overflowing(self) -> tuple[str, ...]:
        """The outputs with infinities; whether they are right, their contract tells."""
        return tuple(name for name, output in self.outputs.items() if not _finite(output.array))

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
    """Check `results`; `step` is told what is going on."""
    n = problem.x.shape[-1]
    rows = problem.x.size // n
    sample = _sample(rows, max(1, _ORACLE_ELEMENTS // n))
    part = _of_rows(problem, sample)
    # dgamma and dbeta are sums over all rows, so a sample of rows has sums of its own.
    judged = results if len(sample) == rows else compute(part)
    judged = {
        name: (
            results[name].reshape(rows, n)[sample] if name in ("y", "dx") else judged[name].ravel()
        )
        for name in results
    }
    step("exact results")
    outputs = _judge(problem, part, results, judged)
    step("finite differences")
    few = _sample(rows, max(1, _DIFFERENCE_ELEMENTS // n))
    finite = all(_finite(array) for array in results.values())
    gradients = _check_gradients(_of_rows(problem, few)) if finite else None
    step("row identities")
    identities = row_identities(
        problem.x.reshape(rows, n),
        problem.gamma,
        problem.beta,
        problem.eps,
        problem.dy.reshape(rows, n),
        *(
            results[name].reshape(rows, n) if name in ("y", "dx") else results.get(name)
            for name in OUTPUTS
        ),
    )
    step("timing")
    seconds, moved = _measure_time(problem)
    return Findings(
        problem,
        outputs,
        len(sample),
        rows,
        gradients,
        len(few),
        tuple(identities) if finite else (),
        seconds,
        moved,
    )


def _finite(array: Array) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).all())


def _sample(rows: int, most: int) -> Array:
    """Evenly spaced rows, the first and the last among them."""
    return np.unique(np.linspace(0, rows - 1, min(rows, most)).astype(np.intp))


def _of_rows(problem: Problem, sample: Array) -> Problem:
    n = problem.x.shape[-1]
    x, dy = (array.reshape(-1, n)[sample] for array in (problem.x, problem.dy))
    return problem._replace(x=x, dy=dy)


def _judge(
    problem: Problem, part: Problem, results: dict[str, Array], judged: dict[str, Array]
) -> dict[str, Output]:
    exact = exact_layer_norm(part.x, part.gamma, part.beta, part.eps, part.dy)
    contract = exact.check_contract(**judged)
    errors = exact.ulp_errors(**judged)
    y, cache = plain_forward(part.x, part.gamma, part.beta, part.eps)
    plain = dict(zip(OUTPUTS, (y, *plain_backward(part.dy, cache)), strict=True))
    plain = {name: plain[name].astype(judged[name].dtype) for name in judged}
    plain_errors = exact.ulp_errors(**plain)
    agreement = _agreement(problem)
    return {
        name: Output(
            results[name], contract[name], errors[name], plain_errors[name], agreement.get(name)
        )
        for name in results
    }


def _agreement(problem: Problem) -> dict[str, float]:
    """Compare a float64 run with the results that the file holds: max|difference| / max|held|."""
    if not problem.expected:
        return {}
    wide = problem._replace(
        x=problem.x.astype(np.float64),
        gamma=_wide(problem.gamma),
        beta=_wide(problem.beta),
        dy=problem.dy.astype(np.float64),
    )
    ours = compute(wide)
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

    x = part.x.astype(np.float64)
    scales = [_row_spread(x, part.eps), None, None]
    return check_gradients(
        forward,
        backward,
        [x, _wide(part.gamma), _wide(part.beta)],
        names=("x", "gamma", "beta"),
        scales=scales,
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


def _measure_time(problem: Problem) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds of forward and backward, new outputs each time, and the bytes they move."""
    forward: list[float] = []
    backward: list[float] = []
    end = time.perf_counter() + 1.0
    while len(forward) < 3 or (time.perf_counter() < end and len(forward) < 50):
        start = time.perf_counter()
        y, cache = layer_norm_forward(problem.x, problem.gamma, problem.beta, problem.eps)
        middle = time.perf_counter()
        layer_norm_backward(problem.dy, cache)
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    return (
        {"forward": statistics.median(forward), "backward": statistics.median(backward)},
        {
            "forward": problem.x.nbytes + y.nbytes,
            "backward": problem.dy.nbytes + 2 * problem.x.nbytes,
        },
    )
