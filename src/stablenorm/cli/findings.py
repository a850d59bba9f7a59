"""The main job: read a layer or RMS norm, compute it, and check every number and its gradients."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.api import FUNCTIONS
from stablenorm.check import check_layer_norm, check_rms_norm
from stablenorm.cli import parts
from stablenorm.cli.files import BUNDLED, list_members, read_eps
from stablenorm.cli.parts import InputError
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.text import printable, shape_text
from stablenorm.types import Array

# About a second for the oracle, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 50_000
# The gradient check calls the forward 500 times, at 0.15 us an element.
_CHECK_ELEMENTS = 4_096

OUTPUTS = ("y", "dx", "dgamma", "dbeta")
_INPUTS = ("x", "gamma", "beta", "dy")
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


def compute(problem: Problem) -> dict[str, Array]:
    """Return y, dx and, where there are parameters, dgamma and dbeta."""
    x, gamma, beta = problem.x, problem.gamma, problem.beta
    forward, backward, *_ = NORMS[problem.kind]
    y, cache = forward(x, gamma, beta, problem.eps, rounding=problem.rounding)
    results = (y, *backward(problem.dy, cache))
    return {name: array for name, array in zip(OUTPUTS, results, strict=True) if array is not None}


def compute_problem(arguments: argparse.Namespace) -> tuple[Problem, dict[str, Array]]:
    """Read what the arguments name, and compute it; InputError if that cannot be done or checked."""
    try:
        problem = _read(arguments.file, arguments.eps, arguments.seed)
        problem = problem._replace(rounding=arguments.rounding, kind=arguments.kind)
        results = compute(problem)
    except (TypeError, ValueError) as error:
        # The package refuses the user's input in its own words.
        raise InputError(str(error)) from None
    if msg := _objection(problem):
        raise InputError(msg)
    return problem, results


def _read(path: Path | None, eps: float | None, seed: int) -> Problem:
    """Read a file that holds x, or is x, or a directory of .npy files; None: the bundled data."""
    file = path or BUNDLED
    source = str(path) if path else f"bundled data ({file.name})"
    if file.is_dir():
        members = {
            each.stem: next(iter(list_members(each).values()))
            for each in sorted(file.glob("*.npy"))
        }
    else:
        members = list_members(file)
    if list(members) == [""]:
        members = {"x": members[""]}
    if "x" not in members:
        held = printable(", ".join(sorted(filter(None, members))), "") or "nothing of that kind"
        msg = f"{source} must hold an array named x, got {held}"
        raise InputError(msg)
    # x, dy, y and dx at least.
    what = "x must fit in memory, with y, dx and dy, to be checked"
    parts.check_memory(what, 4 * members["x"].nbytes, "save fewer rows")
    x = members["x"].load()
    arrays = {}
    for name, shape in (("gamma", x.shape[-1:]), ("beta", x.shape[-1:]), ("dy", x.shape)):
        if name in members:
            arrays[name] = members[name].load(shape)
    dy, origin = arrays.get("dy"), "dy of the file"
    if dy is None:
        origin = f"dy not given: random N(0, 1), seed {seed}"
        dy = np.random.default_rng(seed).standard_normal(x.shape).astype(x.dtype)
    if unknown := sorted(members.keys() - {*_INPUTS, "eps"}):
        origin += f"; not used: {', '.join(unknown)}"
    gamma, beta, eps = arrays.get("gamma"), arrays.get("beta"), read_eps(members, eps)
    return Problem(source, x, gamma, beta, eps, dy, origin)


def _objection(problem: Problem) -> str:
    """Say why there is no exact result: NaN, infinity, no rows, 0/0; empty if there is one."""
    x = problem.x
    for name in _INPUTS:
        array = getattr(problem, name)
        if array is not None and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0]
            value = f"{array[tuple(where)]} at {where.tolist()}"
            end = "stablenorm diagnose names such rows"
            return f"{name} must be finite to be checked, got {value}; {end}"
    if x.size == 0:
        return f"x must have at least one row, got {shape_text(x.shape)}"
    is_layer = problem.kind == "layer"
    undefined = np.flatnonzero((x == (x[..., :1] if is_layer else 0)).all(axis=-1))
    if problem.eps == 0 and undefined.size:
        what, row = "constant" if is_layer else "zero", undefined[0]
        return f"eps must be > 0 where a row of x is {what}, got 0 and row {row}; pass --eps"
    return ""


# ---- what is found ----


class Output(NamedTuple):
    """One output: errors in ulp of the rows looked at; it passes if it keeps what is promised."""

    array: Array
    error: Array
    plain_error: Array
    # Elements that are not the nearest float.
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
