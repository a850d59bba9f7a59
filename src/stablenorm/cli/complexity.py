"""`stablenorm complexity`: flops and bytes of a layer norm, and the times that they allow."""

from __future__ import annotations

import argparse
import json
import os
import platform
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import stablenorm
from stablenorm.backends import choose
from stablenorm.cli.bench_measure import DTYPES, physical_memory, type_of, use_threads
from stablenorm.cli.files import InputError, check_target, write_beside
from stablenorm.cli.parts import Help, check_plot, step_bar
from stablenorm.cli.tables import _NARROW, _table
from stablenorm.cost import Measured, Roofline, count_kept, draw_roofline, measure_costs

_ROUNDS = 11
_EXAMPLES = """\
examples:
  stablenorm complexity                                     one common shape, float32
  stablenorm complexity --shape 8 2048 1024 --dtype bfloat16
  stablenorm complexity --threads 1 --json cost.json --plot cost.png

how to read it:
  flops      additions, subtractions, multiplications, divisions, square roots; a fused
             multiply-add is two
  moved      bytes that memory must move where arrays are larger than the caches
  held       new bytes at the worst moment, results included
  roofline   the longer of moved / copy and flops / arithmetic: no run can be shorter
  measured   median time; last column: measured / roofline

exit status: 0 done, 2 it cannot be run (one line says why).
"""


def add(commands: Any) -> None:
    """Add `complexity` to the commands."""
    parser = commands.add_parser(
        "complexity",
        help="count flops and bytes, and measure times beside the roofline of this machine",
        description=(
            "Count the flops and bytes of three layer norms, forward and backward: the plain "
            "formula in NumPy, the reference, and the fused CPU kernel. Measure how fast this "
            "machine copies and calculates, and how long the three take. The last axis is "
            "normalized."
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
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the roofline")


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
    # Redrawn once a second, by a thread that would otherwise take its share of what is timed.
    with step_bar(_ROUNDS * (6 + 2 * len({1, threads})), per_second=1) as step:
        measured = measure_costs(
            (prod(shape[:-1]), shape[-1]),
            arguments.dtype,
            threads,
            rounds=_ROUNDS,
            step=lambda: step("programs, copies and arithmetic"),
        )
    if arguments.json is not None:
        write_beside(arguments.json, lambda file: _save(measured, file))
    if arguments.plot is not None:
        kind = arguments.plot.suffix[1:].lower()
        write_beside(arguments.plot, lambda file: _plot(measured, file, kind))
    from rich.console import Console  # noqa: PLC0415

    _print(measured, Console())
    return 0


def _check_shape(shape: tuple[int, ...], dtype: str) -> None:
    given = " ".join(map(str, shape))
    if min(shape) < 1:
        msg = f"--shape must be of lengths >= 1, got {given}"
        raise InputError(msg)
    # x, dy, y, dx and the numbers as drawn; what plain NumPy keeps, and its temporaries.
    s = type_of(dtype).itemsize
    needed, there = prod(shape) * (5 * s + 4 + 6 * max(s, 4)), physical_memory()
    if needed > there:
        msg = (
            f"--shape must fit in memory, got {given}, which takes {needed / 1e9:.1f} GB to time, "
            f"of {there / 1e9:.1f} GB; take fewer rows: flops and bytes grow as these do"
        )
        raise InputError(msg)


def _print(measured: Measured, console: Any) -> None:
    """Print what was counted, what was measured, and what a forward keeps."""
    (rows, n), narrow = measured.matrix, console.width < _NARROW
    columns = ["", "flops", "per element", "moved", "flops per byte", "held"]
    if narrow:
        columns.remove("flops per byte")
    counted = _table(f"Counted: {rows} rows of {n}, {measured.dtype}", narrow, *columns)
    timed = _table("Measured", narrow, "", "roofline", "measured", "ratio")
    for line in measured.lines:
        name = f"{line.program}, {line.direction}"
        cost, median = line.cost, line.measured.median
        per_element, moved = f"{cost.flops / (rows * n):.3g}", f"{_short(cost.moved)}B"
        per_byte = [] if narrow else [f"{cost.intensity:.2f}"]
        counted.add_row(
            name, _short(cost.flops), per_element, moved, *per_byte, f"{_short(cost.held)}B"
        )
        timed.add_row(
            name, _seconds(line.predicted), _seconds(median), f"{median / line.predicted:.2f}"
        )
    kept = _table("Kept from forward to backward, beside x", narrow, "what", "bytes")
    for what, size in count_kept(measured.matrix, measured.dtype).items():
        kept.add_row(what, f"{_short(size)}B")
    for table in (counted, timed, kept):
        console.print(table)
    words = f"Roofline of the fused kernel: {_rates(measured.all_threads)}"
    if measured.all_threads.threads > 1:
        words += f" Of the other two: {_rates(measured.one_thread)}"
    console.print(words, highlight=False)


def _rates(roofline: Roofline) -> str:
    threads = "1 thread" if roofline.threads == 1 else f"{roofline.threads} threads"
    return (
        f"{threads}, copy {roofline.copy / 1e9:.3g} GB/s, arithmetic "
        f"{roofline.flops / 1e9:.3g} Gflop/s in float64."
    )


def _save(measured: Measured, file: Any) -> None:
    """Write all figures as JSON into an open file."""
    content = {
        "stablenorm": stablenorm.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "matrix": measured.matrix,
        "dtype": measured.dtype,
        "one_thread": measured.one_thread._asdict(),
        "all_threads": measured.all_threads._asdict(),
        "lines": [
            line._asdict() | {"cost": line.cost._asdict(), "measured": line.measured._asdict()}
            for line in measured.lines
        ],
        "kept": count_kept(measured.matrix, measured.dtype),
    }
    file.write((json.dumps(content, indent=1) + "\n").encode())


def _plot(measured: Measured, file: Any, format_: str) -> None:
    """Draw the roofline into an open file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw_roofline(measured, axes)
    rows, n = measured.matrix
    axes.set_title(f"{rows} rows of {n}, {measured.dtype}", fontsize=10)
    axes.legend(fontsize=7, loc="lower right")
    figure.savefig(file, format=format_, dpi=120)


def _short(count: float) -> str:
    """Write three digits, in the unit that fits."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} "


def _seconds(seconds: float) -> str:
    """Write three digits, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
