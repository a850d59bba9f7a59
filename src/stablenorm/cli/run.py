"""`stablenorm run`: compute, and check every number."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from stablenorm._types import Array
from stablenorm.cli.files import (
    InputError,
    check_finite,
    check_target,
    read_problem,
    write_beside,
)
from stablenorm.cli.parts import EXIT_FAILED, Help, check_plot, step_bar
from stablenorm.cli.tables import plot_findings, print_findings
from stablenorm.report._findings import Findings, Problem, compute, inspect

_EXAMPLES = """\
examples:
  stablenorm run                          the bundled data: a real layer norm of a language model
  stablenorm run mine.npz                 x and, if held, gamma, beta, dy, eps from a file
  stablenorm run arrays/                  the same from x.npy, gamma.npy, ... in a directory
  stablenorm run mine.npz --out res.npz --plot res.png

to make such a file:
  np.savez("mine.npz", x=x, gamma=gamma, beta=beta, dy=dy, eps=1e-5)

exit status: 0 no check failed; 1 a check failed; 2 the input cannot be used, one line says why.
"""


def add(commands: Any) -> None:
    """Add `run` to the commands."""
    parser = commands.add_parser(
        "run",
        help="compute y, dx, dgamma and dbeta of the arrays in a file, and check them",
        description=(
            "Compute y, dx, dgamma and dbeta, and check them against the exact result, against "
            "finite differences and against identities. The error of the usual two-pass formula "
            "on the same data is shown beside ours. x is normalized over its last axis."
        ),
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.set_defaults(job=run)
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="an .npz file, or a directory of .npy files, that holds x and, optionally, gamma, "
        "beta, dy, eps; default: the bundled data",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.npz", help="write y, dx, dgamma and dbeta to this file"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the errors into this file"
    )
    parser.add_argument("--eps", type=float, help="default: eps of the file, or 1e-5")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of a random dy, if the file has none; default: 0"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm run` is asked."""
    check_target("--out", arguments.out, (".npz",))
    check_plot(arguments.plot)
    if _same_file(arguments.out, arguments.file):
        msg = f"--out must not be the file that is read, got {arguments.out}"
        raise InputError(msg)
    if arguments.seed < 0:
        msg = f"--seed must be >= 0, got {arguments.seed}"
        raise InputError(msg)
    problem = read_problem(arguments.file, arguments.eps, arguments.seed)
    results = _compute(problem)
    check_finite(problem)
    if arguments.out is not None:
        write_beside(arguments.out, lambda file: _save(file, results))
    findings = _inspect(problem, results)
    if arguments.plot is not None:
        kind = arguments.plot.suffix[1:].lower()
        write_beside(arguments.plot, lambda file: plot_findings(findings, file, kind))
    from rich.console import Console  # noqa: PLC0415

    print_findings(findings, Console())
    return 0 if findings.passed else EXIT_FAILED


def _same_file(one: Path | None, other: Path | None) -> bool:
    """Tell whether both name one file, by whatever links."""
    return (
        one is not None
        and other is not None
        and other.exists()
        and one.exists()
        and (one.samefile(other))
    )


def _save(file: Any, results: dict[str, Any]) -> None:
    np.savez(file, **results)


def _compute(problem: Problem) -> dict[str, Array]:
    """Compute; what the package refuses is the user's input, said in the package's words."""
    try:
        return compute(problem)
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from None


def _inspect(problem: Problem, results: dict[str, Array]) -> Findings:
    """Check the results, with a bar on a terminal."""
    # The four steps of `inspect`.
    with step_bar(4) as step:
        return inspect(problem, results, step)
