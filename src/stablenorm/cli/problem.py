"""The layer norm that `run` and `report` are asked about, read and computed."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from stablenorm.cli.files import bundled_file, list_members, load, load_number
from stablenorm.cli.parts import InputError
from stablenorm.report import Problem, compute
from stablenorm.types import Array


def compute_problem(arguments: argparse.Namespace) -> tuple[Problem, dict[str, Array]]:
    """Read what the arguments name, and compute it; InputError if that cannot be done or checked."""
    problem = read_problem(arguments.file, arguments.eps, arguments.seed)
    try:
        results = compute(problem)
    except (TypeError, ValueError) as error:
        # What the package refuses is the user's input, said in the package's words.
        raise InputError(str(error)) from None
    _check_finite(problem)
    return problem, results


def read_problem(path: Path | None, eps: float | None, seed: int) -> Problem:
    """Read an .npz file or a directory of .npy files; None reads the bundled data."""
    with bundled_file() if path is None else nullcontext(path) as file:
        source = f"bundled data ({file.name})" if path is None else str(path)
        names = ("x", "gamma", "beta", "dy")
        if file.is_dir():
            there = [name for name in (*names, "eps") if (file / f"{name}.npy").exists()]
            members = {name: list_members(file / f"{name}.npy")[""] for name in there}
        else:
            members = list_members(file)
        if "x" not in members:
            held = ", ".join(sorted(filter(None, members))) or "nothing of that kind"
            msg = f"{source} must hold an array named x, got {held}"
            raise InputError(msg)
        arrays = {name: load(members[name]) for name in names if name in members}
        if eps is None:
            eps = load_number(members["eps"]) if "eps" in members else 1e-5
    x, dy, origin = arrays["x"], arrays.get("dy"), "dy of the file"
    if dy is None:
        origin = f"dy not given: random N(0, 1), seed {seed}"
        dy = np.random.default_rng(seed).standard_normal(x.shape).astype(x.dtype)
    parameters = arrays.get("gamma"), arrays.get("beta")
    return Problem(source, x, *parameters, eps, dy, origin)


def _check_finite(problem: Problem) -> None:
    """Refuse what has no exact result: NaN, infinity, no rows, 0/0."""
    for name in ("x", "gamma", "beta", "dy"):
        array = getattr(problem, name)
        if array is not None and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0]
            msg = (
                f"{name} must be finite to be checked, got {array[tuple(where)]} at "
                f"{where.tolist()}; stablenorm diagnose names such rows"
            )
            raise InputError(msg)
    if problem.x.size == 0:
        msg = f"x must have at least one row, got shape {problem.x.shape}"
        raise InputError(msg)
    rows = problem.x.reshape(-1, problem.x.shape[-1])
    constant = np.flatnonzero((rows == rows[:, :1]).all(axis=-1))
    if problem.eps == 0 and constant.size:
        where = constant[0]
        msg = f"eps must be > 0 where a row of x is constant, got 0 and row {where}; pass --eps"
        raise InputError(msg)
