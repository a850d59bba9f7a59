"""`stablenorm bench`: the speed of our backends on the user's shapes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stablenorm.backends import BACKENDS, choose
from stablenorm.cli.bench_measure import (
    DTYPES,
    Bench,
    count_steps,
    measure,
    usable_backends,
    use_threads,
)
from stablenorm.cli.bench_tables import plot_bench, print_bench, save_bench
from stablenorm.cli.files import InputError, check_target, write_beside
from stablenorm.cli.parts import EXIT_FAILED, Help, check_plot, check_shape, step_bar, unique

_EXAMPLES = """\
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
            threads; arrays that stay in the caches may exceed 1

exit status: 0 done, 1 two backends disagree beyond rounding, 2 it cannot be run (one line says why).
"""


def add(commands: Any) -> None:
    """Add `bench` to the commands."""
    parser = commands.add_parser(
        "bench",
        help="time forward and backward on your shapes, beside a copy of memory",
        description=(
            "Time the forward and the backward of every backend on your shapes, in turn, and say "
            "what fraction of this machine's memory speed they reach. The last axis is normalized. "
            "Backends must agree on each shape before they are timed."
        ),
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.set_defaults(job=run)
    parser.add_argument(
        "--shape",
        nargs="+",
        type=int,
        action="append",
        metavar="N",
        help="of x; may be given several times; default: 32 512 768",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="may be given several times; default: float32",
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=tuple(BACKENDS),
        help="may be given several times; default: all that can be loaded",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: as in any call")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the speeds there")


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm bench` is asked."""
    check_target("--json", arguments.json, (".json",))
    check_plot(arguments.plot)
    shapes = [tuple(shape) for shape in arguments.shape or [(32, 512, 768)]]
    dtypes = arguments.dtype or ["float32"]
    try:
        backends = [choose(name) for name in arguments.backend or usable_backends()]
    except ImportError as error:
        raise InputError(str(error)) from None
    for shape in shapes:
        check_shape(shape, dtypes)
    if arguments.threads is not None and arguments.threads < 1:
        msg = f"--threads must be >= 1, got {arguments.threads}"
        raise InputError(msg)
    try:
        threads = use_threads(arguments.threads)
    except ValueError as error:
        raise InputError(str(error)) from None
    # Each once, in the order given: a backend that is named twice is one backend.
    shapes, dtypes, backends = (unique(given) for given in (shapes, dtypes, backends))
    try:
        bench = _measure(shapes, dtypes, backends, threads)
    except ArithmeticError as error:
        print(f"stablenorm: {error}", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json is not None:
        write_beside(arguments.json, lambda file: save_bench(bench, file))
    if arguments.plot is not None:
        kind = arguments.plot.suffix[1:].lower()
        write_beside(arguments.plot, lambda file: plot_bench(bench, file, kind))
    from rich.console import Console  # noqa: PLC0415

    print_bench(bench, Console())
    return 0


def _measure(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    backends: Sequence[str],
    threads: int,
) -> Bench:
    """Time them, with a bar on a terminal."""
    # Redrawn once a second, by a thread that would otherwise take its share of what is timed.
    with step_bar(count_steps(shapes, dtypes), per_second=1) as step:
        return measure(shapes, dtypes, backends, threads, step)
