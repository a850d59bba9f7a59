"""`stablenorm bench`: the speed of our backends on the user's shapes, beside a copy of memory."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.text import Text

from stablenorm.backends import BACKENDS, choose
from stablenorm.cli.files import InputError
from stablenorm.cli.parts import (
    DTYPES,
    EXIT_FAILED,
    Help,
    add_outputs,
    check_at_least,
    check_outputs,
    check_shape,
    step_bar,
    use_threads,
    write_json,
    write_plot,
)
from stablenorm.cli.tables import as_json, is_narrow, print_table
from stablenorm.figures import COLORS, new_figure
from stablenorm.formats import parse
from stablenorm.functional import layer_norm_backward, layer_norm_forward
from stablenorm.report import Table, quantity, shape_text
from stablenorm.timing import Timing, measure_copy, measure_interleaved
from stablenorm.types import Array, Gradients

# Bytes moved, in arrays of x: forward reads x and writes y; backward reads dy and x, writes dx.
PASSES = {"forward": 2, "backward": 3}
# Seconds for one candidate, all its rounds together: a table of two backends is done in a minute.
_LIMIT = 2.0
_ROUNDS = 15


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
    add_outputs(parser, plot="draw the speeds")


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm bench` is asked."""
    check_outputs(arguments)
    # Each once, in the order given: a backend that is named twice is one backend.
    shapes = list(dict.fromkeys(map(tuple, arguments.shape or [(32, 512, 768)])))
    dtypes = list(dict.fromkeys(arguments.dtype or ["float32"]))
    for shape in shapes:
        check_shape(shape, max(map(bytes_per_element, dtypes)))
    check_at_least("--threads", arguments.threads, 1)
    try:
        named = [choose(name) for name in arguments.backend or usable_backends()]
        threads = use_threads(arguments.threads)
    except (ImportError, ValueError) as error:
        raise InputError(str(error)) from None
    backends = list(dict.fromkeys(named))
    try:
        # Redrawn once a second, by a thread that would otherwise take its share of what is timed.
        with step_bar(2 + len(shapes) * len(dtypes), per_second=1) as step:
            bench = measure(shapes, dtypes, backends, threads, step)
    except ArithmeticError as error:
        print(f"stablenorm: {error}", file=sys.stderr)
        return EXIT_FAILED
    write_json(arguments.json, _as_json(bench))
    write_plot(arguments.plot, lambda file, kind: _plot(bench, file, kind))
    _print(bench, Console())
    return 0


# ---- measurement ----


class Row(NamedTuple):
    """One line of the table."""

    shape: tuple[int, ...]
    dtype: str
    direction: str
    backend: str
    outputs: str
    timing: Timing
    bytes_a_second: float
    of_copy: float


class Bench(NamedTuple):
    """All that `stablenorm bench` has to tell; `copy` is in bytes a second."""

    rows: tuple[Row, ...]
    copy: float
    threads: int


class Problem(NamedTuple):
    """Arrays to normalize over the last axis, and arrays to write into."""

    x: Array
    gamma: Array
    beta: Array
    dy: Array
    y: Array
    gradients: Gradients


def make_problem(shape: Sequence[int], dtype: str) -> Problem:
    """Draw N(0, 1), gamma around 1; timings do not depend on the values."""
    rng = np.random.default_rng(0)
    kind = parse(dtype)
    # The same again beyond that: drawing fills memory ten times as slowly as what is timed.
    count = min(math.prod(shape), 2**22)
    x, dy = (np.resize(rng.standard_normal(count).astype(kind), shape) for _ in range(2))
    beta = rng.standard_normal(shape[-1]).astype(kind)
    gamma = rng.uniform(0.5, 1.5, shape[-1]).astype(kind)
    gradients = Gradients(np.zeros_like(x), np.zeros_like(gamma), np.zeros_like(beta))
    return Problem(x, gamma, beta, dy, np.zeros_like(x), gradients)


def make_candidates(
    problem: Problem, backend: str | None
) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return, per direction, the calls with fresh outputs and with `out=`."""
    x, gamma, beta, dy, y, gradients = problem
    _, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    return {
        "forward": {
            "fresh": lambda: layer_norm_forward(x, gamma, beta, backend=backend),
            "out=": lambda: layer_norm_forward(x, gamma, beta, out=y, backend=backend),
        },
        "backward": {
            "fresh": lambda: layer_norm_backward(dy, cache),
            "out=": lambda: layer_norm_backward(dy, cache, out=gradients),
        },
    }


def bytes_per_element(dtype: str) -> int:
    """Bytes held at once while x is timed, roughly, per element of x."""
    # x, dy, y, dx; a fresh y or dx; the results of two backends.
    return 8 * parse(dtype).itemsize


def usable_backends() -> list[str]:
    """Return the names of those that can be loaded here."""
    return [name for name in BACKENDS if _loads(name)]


def _loads(name: str) -> bool:
    try:
        choose(name)
    except ImportError:
        return False
    return True


def differing(one: Problem, backends: Sequence[str]) -> str | None:
    """Name the first output in which a backend differs from the first one; None if none does."""
    first: dict[str, Any] = {}
    for backend in backends:
        y, cache = layer_norm_forward(one.x, one.gamma, one.beta, backend=backend)
        results = {"y": y, **layer_norm_backward(one.dy, cache)._asdict()}
        for name, expected in first.items():
            if not _close(expected, results[name], one, name):
                return f"{name} of {backend} and of {backends[0]}"
        first = first or results
    return None


def _close(expected: Array, actual: Array, problem: Problem, name: str) -> bool:
    """Tell whether both are as near to the exact values as the contract has it."""
    wide, sums = problem.x.dtype.itemsize == 8, name in ("dgamma", "dbeta")
    # Each within 0.501 ulp of the exact value: an ulp apart at most, two where the limit is larger.
    ulps = 2 if wide or sums else 1
    # And an element that cancels may use c S. The magnitudes summed are those of gamma, beta, dy and
    # xhat: about 1, and none beyond 2**5.
    power = (-94 if wide else -44) if sums else (-98 if wide else -48)
    terms = problem.x.size // max(problem.x.shape[-1], 1) if sums else 1
    kind: Any = ml_dtypes.finfo(expected.dtype)  # type: ignore[no-untyped-call]
    least = float(kind.smallest_subnormal) + 2.0**power * terms * 2**10
    one, other = expected.astype(np.float64), actual.astype(np.float64)
    return bool(np.all(np.abs(one - other) <= ulps * float(kind.eps) * np.abs(one) + 2 * least))


def measure(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    backends: Sequence[str],
    threads: int,
    step: Callable[[str], None],
) -> Bench:
    """Time every backend on every shape; `step` is told what is going on."""
    step("copy")
    before = measure_copy(threads)
    timed = []
    for shape in shapes:
        for dtype in dtypes:
            step(f"{'x'.join(map(str, shape))} {dtype}")
            problem = make_problem(shape, dtype)
            if where := differing(problem, backends):
                msg = f"backends must agree to be timed, got different {where} for {shape} {dtype}"
                raise ArithmeticError(msg)
            timed += [(shape, dtype, *row) for row in _measure_one(problem, backends)]
    # The memory of a shared machine is not as fast all the time: the larger of two.
    step("copy")
    copy = max(before, measure_copy(threads))
    rows = []
    for shape, dtype, direction, backend, outputs, timing in timed:
        nbytes = PASSES[direction] * math.prod(shape) * parse(dtype).itemsize
        speed = nbytes / timing.median
        rows.append(Row(shape, dtype, direction, backend, outputs, timing, speed, speed / copy))
    return Bench(tuple(rows), copy, threads)


def _measure_one(problem: Problem, backends: Sequence[str]) -> list[tuple[str, str, str, Timing]]:
    """Time all backends on one problem, interleaved: direction, backend, outputs, timing."""
    candidates = {backend: make_candidates(problem, backend) for backend in backends}
    found = []
    for direction in PASSES:
        calls = {
            f"{backend} {outputs}": call
            for backend in backends
            for outputs, call in candidates[backend][direction].items()
        }
        timings = measure_interleaved(calls, rounds=_ROUNDS, least=1, limit=_LIMIT * len(calls))
        for name, timing in timings.items():
            backend, outputs = name.rsplit(" ", 1)
            found.append((direction, backend, outputs, timing))
    return found


# ---- table, file and picture ----


def _print(bench: Bench, console: Console) -> None:
    # Three columns would leave no room for the last on a narrow terminal.
    narrow = is_narrow(console)
    which = ("x",) if narrow else ("shape", "dtype", "direction")
    columns = (*which, "backend", "outputs", "time", "GB/s", "of copy")
    rows = list(_table_rows(bench, narrow))
    print_table(console, Table("Medians of interleaved calls", columns, rows))
    console.print(Text("\n".join(_notes(bench))))


def _table_rows(bench: Bench, narrow: bool) -> Iterator[tuple[str, ...] | None]:
    before = None
    for row in bench.rows:
        problem: tuple[str, ...] = (shape_text(row.shape), row.dtype, row.direction)
        if narrow:
            problem = (f"{problem[0]}\n{row.dtype} {row.direction}",)
        # What is the same as in the line above is said once, on a narrow terminal.
        shown = ("",) if narrow and problem == before else problem
        if before is not None and problem != before:
            yield None
        before = problem
        speeds = (f"{row.bytes_a_second / 1e9:.2f}", f"{row.of_copy:.2f}")
        yield (*shown, row.backend, row.outputs, quantity(row.timing.median, "s"), *speeds)


def _notes(bench: Bench) -> Iterator[str]:
    yield (
        f"{bench.threads} threads; a copy of 256 MiB moves {bench.copy / 1e9:.1f} GB/s here, "
        "measured before and after: of copy is relative to the faster."
    )
    yield (
        "fresh: results in new arrays; out=: in arrays that exist already. GB/s counts x and y in "
        "the forward, dy, x and dx in the backward."
    )
    if min(row.timing.rounds for row in bench.rows) < 3:
        yield "Some calls are so long that they were timed once or twice only."


def _as_json(bench: Bench) -> bytes:
    rows = [
        {name: getattr(row, name) for name in Row._fields if name != "timing"}
        | {
            "seconds": row.timing.median,
            "quartiles": (row.timing.low, row.timing.high),
            "rounds": row.timing.rounds,
            "calls_a_round": row.timing.calls,
        }
        for row in bench.rows
    ]
    measured = {"threads": bench.threads, "copy_bytes_a_second": bench.copy}
    return as_json(measured | {"rows": rows})


def _plot(bench: Bench, file: Any, format_: str) -> None:
    """Draw GB/s of every backend and shape beside the copy, into an open file."""
    groups = list(dict.fromkeys((shape_text(row.shape), row.dtype) for row in bench.rows))
    kinds = list(dict.fromkeys((row.backend, row.outputs) for row in bench.rows))
    backends = list(dict.fromkeys(backend for backend, _ in kinds))
    # Half an inch a group for up to four bars, and room for title, labels and legend.
    figure = new_figure(9, 2 + 0.55 * len(groups))
    every = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(kinds)
    for axes, direction in zip(every, PASSES, strict=True):
        for i, kind in enumerate(kinds):
            rows = [
                r for r in bench.rows if (r.direction, r.backend, r.outputs) == (direction, *kind)
            ]
            axes.barh(
                [
                    groups.index((shape_text(r.shape), r.dtype)) - 0.4 + (i + 0.5) * height
                    for r in rows
                ],
                [row.bytes_a_second / 1e9 for row in rows],
                height=0.9 * height,
                color=COLORS[backends.index(kind[0])],
                # Light for fresh outputs.
                alpha=1 if kind[1] == "out=" else 0.45,
                label=", ".join(kind),
            )
        axes.axvline(bench.copy / 1e9, color="0.2", lw=1, ls="--", label="copy of 256 MiB")
        axes.set(xlabel="GB/s", title=direction, axisbelow=True)
        axes.grid(alpha=0.25, axis="x")
    every[0].set_yticks(range(len(groups)), ["\n".join(group) for group in groups])
    # Once for both, which share the axis: the first group on top.
    every[0].set_ylim(len(groups) - 0.5, -0.5)
    figure.legend(
        *every[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.savefig(file, format=format_, dpi=120)
