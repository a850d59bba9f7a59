"""The norm that `run` is asked about: read, computed, and refused where nothing can be compared."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.api import FUNCTIONS
from stablenorm.check import check_layer_norm, check_rms_norm
from stablenorm.cli import parts
from stablenorm.cli.files import BUNDLED, list_members, read_eps
from stablenorm.cli.parts import InputError
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.text import printable, shape_text
from stablenorm.types import Array

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
        members = {each.stem: list_members(each)[""] for each in sorted(file.glob("*.npy"))}
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
