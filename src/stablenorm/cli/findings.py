"""The main job: compute a layer or RMS norm and its gradients, and check every one of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stablenorm.api import FUNCTIONS
from stablenorm.check import check_layer_norm, check_rms_norm
from stablenorm.oracle import ContractResult, exact_layer_norm, exact_rms_norm
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.types import Array

OUTPUTS = ("y", "dx", "dgamma", "dbeta")

# About a second for the oracle, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 50_000
# The gradient check calls the forward 500 times, at 0.15 us an element.
_CHECK_ELEMENTS = 4_096


# By the kind of the norm: forward, backward, oracle, check.
NORMS: dict[str, Any] = {
    "layer": (*FUNCTIONS["layer"], exact_layer_norm, check_layer_norm),
    "rms": (*FUNCTIONS["rms"], exact_rms_norm, check_rms_norm),
}


class Problem(NamedTuple):
    """One norm to compute, and where it comes from."""

    source: str
    x: Array
    gamma: Array | None
    beta: Array | None
    eps: float
    dy: Array
    dy_origin: str
    rounding: str = "fast"
    kind: str = "layer"


class Output(NamedTuple):
    """What is known of one output; `error` are the ulp errors of the rows looked at."""

    array: Array
    contract: ContractResult
    error: Array
    plain_error: Array

    @property
    def misrounded(self) -> int:
        """How many elements of the rows looked at are not the exact ones rounded to nearest."""
        return round(self.contract.misrounded * self.error.size)


class Findings(NamedTuple):
    """What was found about the results of one layer norm."""

    problem: Problem
    outputs: dict[str, Output]
    oracle_rows: int
    rows: int
    # None if an output overflows: what could be compared is gone.
    gradients: Any

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(map(self.keeps, self.outputs.values())) and (
            self.gradients is None or self.gradients.verdict != "FAIL"
        )

    def keeps(self, output: Output) -> bool:
        """Whether an output keeps what its rounding promises."""
        return output.contract.passed and (self.problem.rounding == "fast" or not output.misrounded)


def compute(problem: Problem) -> dict[str, Array]:
    """Return y, dx and, where there are parameters, dgamma and dbeta."""
    x, gamma, beta = problem.x, problem.gamma, problem.beta
    forward, backward, *_ = NORMS[problem.kind]
    y, cache = forward(x, gamma, beta, problem.eps, rounding=problem.rounding)
    results = (y, *backward(problem.dy, cache))
    return {name: array for name, array in zip(OUTPUTS, results, strict=True) if array is not None}


def inspect(problem: Problem, results: dict[str, Array], step: Callable[[str], None]) -> Findings:
    """Check `results`; `step` is told what each of the two steps does."""
    n = problem.x.shape[-1]
    matrix = problem._replace(x=problem.x.reshape(-1, n), dy=problem.dy.reshape(-1, n))
    rows, parameters = len(matrix.x), (problem.gamma, problem.beta)
    step("exact results")
    sample = _sample(rows, _ORACLE_ELEMENTS // n)
    outputs = _judge(matrix, sample, results)
    step("gradient check")
    gradients = None
    if all(np.isfinite(array.astype(np.float64)).all() for array in results.values()):
        # In float64, where finite differences see most.
        few = (matrix.x[_sample(rows, _CHECK_ELEMENTS // n)], *parameters)
        x, gamma, beta = (None if each is None else each.astype(np.float64) for each in few)
        forward, backward, _, check = NORMS[problem.kind]
        forward = partial(forward, rounding=problem.rounding)
        gradients = check(forward, backward, x, gamma, beta, problem.eps, rng=0)
    return Findings(problem, outputs, len(sample), rows, gradients)


def _sample(rows: int, most: int) -> Array:
    """Evenly spaced rows, the first and the last among them."""
    return np.unique(np.linspace(0, rows - 1, min(rows, max(1, most))).astype(np.intp))


def _judge(matrix: Problem, sample: Array, results: dict[str, Array]) -> dict[str, Output]:
    """Compare the rows of `sample`, and sums over them, with the exact result."""
    part, whole = matrix._replace(x=matrix.x[sample], dy=matrix.dy[sample]), len(matrix.x)
    # dgamma and dbeta are sums over all rows, so a sample of rows has sums of its own.
    sums = results if len(sample) == whole else compute(part)
    judged = {
        name: array.reshape(matrix.x.shape)[sample] if name in ("y", "dx") else sums[name]
        for name, array in results.items()
    }
    exact = NORMS[part.kind][2](part.x, part.gamma, part.beta, part.eps, part.dy)
    contract, errors = exact.check_contract(**judged), exact.ulp_errors(**judged)
    y, cache = plain_forward(part.x, part.gamma, part.beta, part.eps, part.kind)
    plain = dict(zip(OUTPUTS, (y, *plain_backward(part.dy, cache, part.kind)), strict=True))
    plain_errors = exact.ulp_errors(**{k: plain[k].astype(a.dtype) for k, a in judged.items()})
    return {
        name: Output(array, contract[name], errors[name], plain_errors[name])
        for name, array in results.items()
    }
