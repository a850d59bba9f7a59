"""The command `stablenorm`: arguments in, tables and pictures out."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import stablenorm
from stablenorm._files import (
    InputError,
    Problem,
    check_finite,
    check_target,
    read_problem,
    write_beside,
)
from stablenorm._run import Findings, compute, inspect
from stablenorm._types import Array
from stablenorm.report import plot_findings, print_findings

_EXIT_FAILED, _EXIT_BAD_INPUT, _EXIT_INTERRUPTED = 1, 2, 130

_EXAMPLES = """\
examples:
  stablenorm run                          the bundled data: a real layer norm of a language model
  stablenorm run mine.npz                 x and, if held, gamma, beta, dy, eps from a file
  stablenorm run arrays/                  the same from x.npy, gamma.npy, ... in a directory
  stablenorm run mine.npz --out res.npz --plot res.png

make such a file:
  np.savez("mine.npz", x=x, gamma=gamma, beta=beta, dy=dy, eps=1e-5)

exit status: 0 all checks passed, 1 a check failed, 2 the input cannot be used (one line says why).
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, like every other one of this command."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print under its usage."""
        msg = f"{message}; see {self.prog} --help"
        raise InputError(msg)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments. Default: those of the process.

    Returns
    -------
    int
        The exit status: 0, 1 if a check failed, 2 on bad input, 130 if interrupted.

    Raises
    ------
    SystemExit
        With status 0, after ``--help`` or ``--version``.
    """
    try:
        return _run(_parser().parse_args(argv))
    except InputError as error:
        print(f"stablenorm: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except MemoryError as error:
        print(f"stablenorm: x must fit in memory, got: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except OSError as error:
        # A name too long, a full disk behind stdout: the system's reason says it all.
        where = f" ({error.filename})" if error.filename else ""
        print(f"stablenorm: {error.strerror or error}{where}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("stablenorm: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stablenorm",
        description="Layer normalization and its gradients, correctly rounded.",
    )
    parser.add_argument("--version", action="version", version=stablenorm.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="compute y, dx, dgamma, dbeta of a file, and check every one of them",
        description=(
            "Compute y, dx, dgamma and dbeta, and check them: against the exact result in "
            "integers, against finite differences, against identities; and say what the formula "
            "that everybody writes would have returned. x is normalized over its last axis."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="an .npz file, or a directory of .npy files, with x and, optionally, gamma, beta, "
        "dy, eps; default: the bundled data",
    )
    run.add_argument(
        "--out", type=Path, metavar="FILE.npz", help="write y, dx, dgamma, dbeta there"
    )
    run.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the errors there")
    run.add_argument("--eps", type=float, help="instead of the file's; default: 1e-5")
    run.add_argument("--seed", type=int, default=0, help="of a random dy; default: 0")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    check_target("--out", arguments.out, (".npz",))
    check_target("--plot", arguments.plot, (".png", ".svg", ".pdf"))
    if _same_file(arguments.out, arguments.file):
        msg = f"--out must not be the file that is read, got {arguments.out}"
        raise InputError(msg)
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        msg = 'Matplotlib is needed for --plot: pip install "stablenorm[plot]"'
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
    return 0 if findings.passed else _EXIT_FAILED


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
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        # The four steps of `inspect`.
        task: Any = progress.add_task("reading", total=4)

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        return inspect(problem, results, step)
