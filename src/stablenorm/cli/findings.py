"""The main job: check every number of a layer or RMS norm and of its gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cli.problem import NORMS, OUTPUTS, Problem, compute
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.types import Array

# About a second for the oracle, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 50_000
# The gradient check calls the forward 500 times, at 0.15 us an element.
_CHECK_ELEMENTS = 4_096


class Output(NamedTuple):
    """
    One output: errors in ulp of the rows looked at, and how many elements are not the nearest.

    It passes if it keeps what its rounding promises.
    """

    array: Array
    error: Array
    plain_error: Array
    misrounded: int
    passed: bool


class Findings(NamedTuple):
    """Everything known about the results of one norm."""

    problem: Problem
    outputs: dict[str, Output]
    oracle_rows: int
    rows: int
    # None if an output overflows: what could be compared is gone.
    gradients: Any

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        is_wrong = self.gradients is not None and self.gradients.verdict == "FAIL"
        return not is_wrong and all(output.passed for output in self.outputs.values())


def inspect(
    problem: Problem, results: dict[str, Array], progress: Callable[[int, int, str], None]
) -> Findings:
    """Check `results`; `progress` is told of the first two steps of three."""
    n = problem.x.shape[-1]
    matrix = problem._replace(x=problem.x.reshape(-1, n), dy=problem.dy.reshape(-1, n))
    rows, gradients = len(matrix.x), None
    progress(0, 3, "exact results")
    sample = _sample(rows, _ORACLE_ELEMENTS // n)
    outputs = _judge(matrix, sample, results)
    progress(1, 3, "gradient check")
    if all(np.isfinite(array.astype(np.float64)).all() for array in results.values()):
        # In float64, where finite differences see most.
        few = matrix.x[_sample(rows, _CHECK_ELEMENTS // n)], problem.gamma, problem.beta
        arrays = (None if each is None else each.astype(np.float64) for each in few)
        forward, backward, _, check = NORMS[problem.kind]
        forward = partial(forward, rounding=problem.rounding)
        gradients = check(forward, backward, *arrays, problem.eps, rng=0)
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
    outputs = {}
    for name, array in results.items():
        wrong = round(contract[name].misrounded * errors[name].size)
        passed = contract[name].passed and (part.rounding == "fast" or not wrong)
        outputs[name] = Output(array, errors[name], plain_errors[name], wrong, passed)
    return outputs
