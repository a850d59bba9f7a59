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
from stablenorm._bench import (
    DTYPES,
    Bench,
    count_bytes,
    count_steps,
    measure,
    physical_memory,
    usable_backends,
    use_threads,
)
from stablenorm._check_file import Request, check_file, check_request
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
from stablenorm.backends import BACKENDS, choose
from stablenorm.report import plot_findings, print_findings
from stablenorm.report_bench import plot_bench, print_bench, save_bench
from stablenorm.report_check import patient_bar, print_check, save_check

_EXIT_FAILED, _EXIT_BAD_INPUT, _EXIT_INCONCLUSIVE, _EXIT_INTERRUPTED = 1, 2, 3, 130

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

_BENCH_EXAMPLES = """\
examples:
  stablenorm bench                                          one common shape, float32
  stablenorm bench --shape 8 512 1024 --shape 4096 768      shapes of your own
  stablenorm bench --shape 8 512 1024 --dtype float16 --dtype float32
  stablenorm bench --threads 1 --json res.json --plot res.png

how to read it:
  fresh     a new array for every result, as a plain call has it; large ones cost page faults
  out=      results written into arrays that exist already
  GB/s      what must be read and written (forward x, y; backward dy, x, dx) over the time
  of copy   that over what a plain copy of 256 MiB moves, measured in the same run with as many
            threads; 1 is the speed of memory; arrays that stay in the caches may exceed it

exit status: 0 done, 1 two backends differ in a bit, 2 it cannot be run (one line says why).
"""


_CHECK_EXAMPLES = """\
examples:
  stablenorm check mine.py                            layer_norm_forward and layer_norm_backward in it
  stablenorm check mine.py --forward fwd --backward bwd
  stablenorm check mine.py --shape 32 768 --dtype float32 --seed 3
  stablenorm check mine.py --plot check.png --json check.json

what the file holds, in any usual form:
  def layer_norm_forward(x, gamma, beta, eps): ...    return y, cache
  def layer_norm_backward(dy, cache): ...             return dx, dgamma, dbeta
  Arguments are known by their names (gamma or weight, beta or bias, ln_param, ...) and otherwise
  by their order; cache is anything; gradients may come as a tuple or, by name, as a dict. An eps
  fixed inside is read off y. Prints are kept away, and said.

THE CODE OF THE FILE IS RUN, as Python would run it: check only files that you trust.

exit status: 0 no mistake found, 1 something is wrong, 2 it could not be run (one line says why),
3 inconclusive: too noisy, or too little compared, for a verdict.
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
        The exit status: 0, 1 if a check failed, 2 on bad input, 3 if a check of a file has no
        verdict, 130 if interrupted.

    Raises
    ------
    SystemExit
        With status 0, after ``--help`` or ``--version``.
    """
    try:
        arguments = _parser().parse_args(argv)
        return int(arguments.job(arguments))
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
    _add_run(commands)
    _add_check(commands)
    _add_bench(commands)
    return parser


def _add_run(commands: Any) -> None:
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
    run.set_defaults(job=_run)
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


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="check a layer norm that you have written: runs your file, names what is wrong",
        description=(
            "Run a Python file of yours, and check the layer norm in it: its gradients against "
            "finite differences that carry their own error bounds, its identities, its contract. "
            "It says what is wrong, and how small an error it would have seen."
        ),
        epilog=_CHECK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.set_defaults(job=_check)
    check.add_argument("file", type=Path, metavar="FILE.py", help="its code is run")
    check.add_argument("--forward", metavar="NAME", help="default: layer_norm_forward")
    check.add_argument("--backward", metavar="NAME", help="default: layer_norm_backward")
    check.add_argument(
        "--shape",
        nargs="+",
        type=int,
        metavar="N",
        help="of x, the last axis normalized; default: 2 3 8 or 6 8, what the code is made for",
    )
    check.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="of x, gamma, beta; default: float64, which sees most",
    )
    check.add_argument(
        "--eps", type=float, help="default: the forward's own, or 1e-5 where it has none"
    )
    check.add_argument("--seed", type=int, default=0, help="of the data; default: 0")
    check.add_argument("--plot", type=Path, metavar="FILE.png", help="draw what differs there")
    check.add_argument("--json", type=Path, metavar="FILE.json", help="write all figures there")


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time forward and backward on your shapes, beside a copy of memory",
        description=(
            "Time the forward and the backward of every backend on your shapes, in turn, and say "
            "what fraction of this machine's memory speed they reach. The last axis is normalized. "
            "Backends must agree on each shape before they are timed."
        ),
        epilog=_BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.set_defaults(job=_bench)
    bench.add_argument(
        "--shape",
        nargs="+",
        type=int,
        action="append",
        metavar="N",
        help="of x; may be given several times; default: 32 512 768",
    )
    bench.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="may be given several times; default: float32",
    )
    bench.add_argument(
        "--backend",
        action="append",
        choices=tuple(BACKENDS),
        help="may be given several times; default: all that can be loaded",
    )
    bench.add_argument("--threads", type=int, metavar="N", help="default: as in any call")
    bench.add_argument("--json", type=Path, metavar="FILE.json", help="write all figures there")
    bench.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the speeds there")


def _check_plot(path: Path | None) -> None:
    check_target("--plot", path, (".png", ".svg", ".pdf"))
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        msg = 'Matplotlib is needed for --plot: pip install "stablenorm[plot]"'
        raise InputError(msg)


def _run(arguments: argparse.Namespace) -> int:
    check_target("--out", arguments.out, (".npz",))
    _check_plot(arguments.plot)
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
    return 0 if findings.passed else _EXIT_FAILED


def _check(arguments: argparse.Namespace) -> int:
    check_target("--json", arguments.json, (".json",))
    _check_plot(arguments.plot)
    # The file's code may change the directory.
    plot, json = (None if p is None else p.absolute() for p in (arguments.plot, arguments.json))
    shape = None if arguments.shape is None else tuple(arguments.shape)
    if shape is not None:
        _check_shape(shape, [arguments.dtype])
    names = (arguments.file, arguments.forward, arguments.backward)
    request = Request(*names, shape, arguments.dtype, arguments.eps, arguments.seed)
    check_request(request)
    from rich.console import Console  # noqa: PLC0415

    print(f"stablenorm: running the code of {arguments.file}", file=sys.stderr)
    with patient_bar("comparing") as progress:
        check = check_file(request, progress)
    if json is not None:
        write_beside(json, lambda file: save_check(check, file))
    if plot is not None:
        kind = plot.suffix[1:].lower()
        write_beside(plot, lambda file: check.report.plot(file, format=kind))
    print_check(check, Console())
    return {"PASS": 0, "FAIL": _EXIT_FAILED}.get(check.report.verdict, _EXIT_INCONCLUSIVE)


def _bench(arguments: argparse.Namespace) -> int:
    check_target("--json", arguments.json, (".json",))
    _check_plot(arguments.plot)
    shapes = [tuple(shape) for shape in arguments.shape or [(32, 512, 768)]]
    dtypes = arguments.dtype or ["float32"]
    try:
        backends = [choose(name) for name in arguments.backend or usable_backends()]
    except ImportError as error:
        raise InputError(str(error)) from None
    for shape in shapes:
        _check_shape(shape, dtypes)
    if arguments.threads is not None and arguments.threads < 1:
        msg = f"--threads must be >= 1, got {arguments.threads}"
        raise InputError(msg)
    try:
        threads = use_threads(arguments.threads)
    except ValueError as error:
        raise InputError(str(error)) from None
    # Each once, in the order given: a backend that is named twice is one backend.
    shapes, dtypes, backends = (_unique(given) for given in (shapes, dtypes, backends))
    try:
        bench = _measure(shapes, dtypes, backends, threads)
    except ArithmeticError as error:
        print(f"stablenorm: {error}", file=sys.stderr)
        return _EXIT_FAILED
    if arguments.json is not None:
        write_beside(arguments.json, lambda file: save_bench(bench, file))
    if arguments.plot is not None:
        kind = arguments.plot.suffix[1:].lower()
        write_beside(arguments.plot, lambda file: plot_bench(bench, file, kind))
    from rich.console import Console  # noqa: PLC0415

    print_bench(bench, Console())
    return 0


def _unique(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _check_shape(shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    if min(shape) < 1:
        msg = f"--shape must be of lengths >= 1, got {' '.join(map(str, shape))}"
        raise InputError(msg)
    needed, there = max(count_bytes(shape, dtype) for dtype in dtypes), physical_memory()
    if needed > there:
        msg = (
            f"--shape must fit in memory, got {' '.join(map(str, shape))}, which takes "
            f"{needed / 1e9:.1f} GB to time, of {there / 1e9:.1f} GB"
        )
        raise InputError(msg)


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


def _measure(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    backends: Sequence[str],
    threads: int,
) -> Bench:
    """Time them, with a bar on a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    # Redrawn once a second, by a thread that would otherwise take its share of what is timed.
    with Progress(
        console=console, transient=True, disable=not console.is_terminal, refresh_per_second=1
    ) as progress:
        task: Any = progress.add_task("", total=count_steps(shapes, dtypes))

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        return measure(shapes, dtypes, backends, threads, step)
