"""`stablenorm complexity`: what a layer norm costs, counted, predicted and measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stablenorm._bench import DTYPES, physical_memory, use_threads
from stablenorm._command_parts import Help, check_plot, step_bar
from stablenorm._complexity import Complexity, count_bytes, count_steps, inspect
from stablenorm._files import InputError, check_target, write_beside
from stablenorm.backends import choose
from stablenorm.report_complexity import plot_complexity, print_complexity, save_complexity

_EXAMPLES = """\
examples:
  stablenorm complexity                                     one common shape, float32
  stablenorm complexity --shape 8 2048 1024 --dtype bfloat16
  stablenorm complexity --shape 32 512 768 --terms          every step, with its formula
  stablenorm complexity --threads 1 --json cost.json --plot cost.png

how to read it:
  flops      additions, subtractions, multiplications, divisions, square roots; a fused
             multiply-add is two
  moved      bytes that all its operations read and write, in the caches or not
  memory     bytes that memory must move where arrays are larger than the caches
  predicted  from these counts and the ceilings of this machine, measured in the same run
  formulas   rows, n, s: bytes of an element; m: n in whole vectors; groups: fours of rows;
             GPU: filled: rows in whole turns of a block; columns: n in whole lanes; threads: of
             a row; halvings: additions of a sum over these; docs/complexity.md has the others
  off by     the prediction against the measured time; it is made for arrays beyond the caches

exit status: 0 done, 2 it cannot be run (one line says why).
"""


def add(commands: Any) -> None:
    """Add `complexity` to the commands."""
    parser = commands.add_parser(
        "complexity",
        help="count flops and bytes, measure this machine's ceilings, predict and measure times",
        description=(
            "Count what forward and backward do and move, step by step, in plain NumPy, in the "
            "reference, in the fused CPU kernel and in the fused GPU kernel; measure what this "
            "machine can do; and hold the times that follow against measured ones. The last axis "
            "is normalized."
        ),
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.set_defaults(job=run)
    parser.add_argument(
        "--shape", nargs="+", type=int, metavar="N", help="of x; default: 32 512 768"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as in any call")
    parser.add_argument("--terms", action="store_true", help="print every step and its formulas")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw roofline and growth")


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm complexity` is asked."""
    check_target("--json", arguments.json, (".json",))
    check_plot(arguments.plot)
    shape = tuple(arguments.shape or (32, 512, 768))
    _check_shape(shape, arguments.dtype)
    if arguments.threads is not None and arguments.threads < 1:
        msg = f"--threads must be >= 1, got {arguments.threads}"
        raise InputError(msg)
    try:
        choose("numba")
        threads = use_threads(arguments.threads)
    except (ImportError, ValueError) as error:
        raise InputError(str(error)) from None
    found = _inspect(shape, arguments.dtype, threads)
    if arguments.json is not None:
        write_beside(arguments.json, lambda file: save_complexity(found, file))
    if arguments.plot is not None:
        kind = arguments.plot.suffix[1:].lower()
        write_beside(arguments.plot, lambda file: plot_complexity(found, file, kind))
    from rich.console import Console  # noqa: PLC0415

    print_complexity(found, Console(), terms=arguments.terms)
    return 0


def _check_shape(shape: tuple[int, ...], dtype: str) -> None:
    given = " ".join(map(str, shape))
    if min(shape) < 1:
        msg = f"--shape must be of lengths >= 1, got {given}"
        raise InputError(msg)
    needed, there = count_bytes(shape, dtype), physical_memory()
    if needed > there:
        msg = (
            f"--shape must fit in memory, got {given}, which takes {needed / 1e9:.1f} GB to count "
            f"and time, of {there / 1e9:.1f} GB; take fewer rows: the counts grow as these do"
        )
        raise InputError(msg)


def _inspect(shape: tuple[int, ...], dtype: str, threads: int) -> Complexity:
    """Measure, with a bar on a terminal."""
    # Redrawn once a second, by a thread that would otherwise take its share of what is timed.
    with step_bar(count_steps(), per_second=1) as step:
        return inspect(shape, dtype, threads, step)
