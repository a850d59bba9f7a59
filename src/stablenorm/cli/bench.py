"""`stablenorm bench`: the speed of our backends on the user's shapes, beside a copy of memory."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from rich.console import Console

from stablenorm.backends import BACKENDS, choose
from stablenorm.cli import parts
from stablenorm.cli.tables import print_lines, print_table, to_json
from stablenorm.formats import parse
from stablenorm.functional import layer_norm_backward, layer_norm_forward
from stablenorm.report import Table, quantity, shape_text
from stablenorm.timing import measure_copy, measure_interleaved
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
  stablenorm bench --threads 1 --json res.json

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
    parser = parts.add_command(
        commands,
        run,
        "time forward and backward on your shapes, beside a copy of memory",
        "Time the forward and the backward of every backend on your shapes, in turn, and say what "
        "fraction of the speed of a copy they reach. The last axis is normalized. Backends must "
        "agree on each shape before they are timed.",
        _EXAMPLES,
    )
    several = "may be given several times; default: "
    about = f"of x; {several}32 512 768"
    parser.add_argument(
        "--shape", nargs="+", type=parts.at_least(1), action="append", metavar="N", help=about
    )
    parser.add_argument("--dtype", action="append", choices=parts.DTYPES, help=f"{several}float32")
    about = f"{several}all that can be loaded"
    parser.add_argument("--backend", action="append", choices=tuple(BACKENDS), help=about)
    about = "default: as in any call"
    parser.add_argument("--threads", type=parts.at_least(1), metavar="N", help=about)
    parts.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm bench` is asked."""
    # Each once, in the order given: a backend that is named twice is one backend.
    shapes = list(dict.fromkeys(map(tuple, arguments.shape or [(32, 512, 768)])))
    dtypes = list(dict.fromkeys(arguments.dtype or ["float32"]))
    for shape in shapes:
        # x, dy, y, dx; a fresh y or dx; the results of two backends.
        parts.check_memory(shape, 8 * max(parse(dtype).itemsize for dtype in dtypes))
    try:
        named = [choose(name) for name in arguments.backend or usable_backends()]
        threads = parts.use_threads(arguments.threads)
    except (ImportError, ValueError) as error:
        raise parts.InputError(str(error)) from None
    try:
        with parts.step_bar(2 + len(shapes) * len(dtypes)) as step:
            bench = measure(shapes, dtypes, list(dict.fromkeys(named)), threads, step)
    except ArithmeticError as error:
        print(f"stablenorm: {error}", file=sys.stderr)
        return parts.EXIT_FAILED
    parts.write_whole(arguments.json, lambda file: file.write(to_json(bench._asdict())))
    _print(bench, Console())
    return 0


# ---- measurement ----


class Row(NamedTuple):
    """One line of the table: medians, and the quartiles of seconds."""

    shape: tuple[int, ...]
    dtype: str
    direction: str
    backend: str
    outputs: str
    seconds: float
    quartiles: tuple[float, float]
    rounds: int
    bytes_per_second: float
    of_copy: float


class Bench(NamedTuple):
    """All that `stablenorm bench` has to tell."""

    rows: tuple[Row, ...]
    copy_bytes_per_second: float
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


def usable_backends() -> list[str]:
    """Return the names of those that can be loaded here."""
    found = []
    for name in BACKENDS:
        with contextlib.suppress(ImportError):
            found.append(choose(name))
    return found


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
    copy = measure_copy(threads)
    rows: list[Row] = []
    for shape in shapes:
        for dtype in dtypes:
            step(f"{shape_text(shape)} {dtype}")
            problem = make_problem(shape, dtype)
            if where := differing(problem, backends):
                msg = f"backends must agree to be timed, got different {where} for {shape} {dtype}"
                raise ArithmeticError(msg)
            rows += _measure_one(problem, backends)
    # The memory of a shared machine is not as fast all the time: the larger of two.
    step("copy")
    copy = max(copy, measure_copy(threads))
    rows = [row._replace(of_copy=row.bytes_per_second / copy) for row in rows]
    return Bench(tuple(rows), copy, threads)


def _measure_one(problem: Problem, backends: Sequence[str]) -> Iterator[Row]:
    """Time all backends on one problem, interleaved."""
    candidates = {backend: make_candidates(problem, backend) for backend in backends}
    x = problem.x
    for direction, arrays in PASSES.items():
        calls = {
            f"{backend} {outputs}": call
            for backend in backends
            for outputs, call in candidates[backend][direction].items()
        }
        timings = measure_interleaved(calls, rounds=_ROUNDS, least=1, limit=_LIMIT * len(calls))
        for name, t in timings.items():
            backend, outputs = name.rsplit(" ", 1)
            what = x.shape, str(x.dtype), direction, backend, outputs
            yield Row(*what, t.median, (t.low, t.high), t.rounds, arrays * x.nbytes / t.median, 0)


# ---- table ----


def _print(bench: Bench, console: Console) -> None:
    columns = ("x", "backend", "outputs", "time", "GB/s", "of copy")
    rows: list[tuple[str, ...] | None] = []
    before = ""
    for row in bench.rows:
        problem = f"{shape_text(row.shape)}\n{row.dtype} {row.direction}"
        if before not in ("", problem):
            rows.append(None)
        speeds = f"{row.bytes_per_second / 1e9:.2f}", f"{row.of_copy:.2f}"
        # What is the same as in the line above is said once.
        shown = "" if problem == before else problem
        rows.append((shown, row.backend, row.outputs, quantity(row.seconds, "s"), *speeds))
        before = problem
    print_table(console, Table("Medians of interleaved calls", columns, rows))
    notes = (
        f"{bench.threads} threads; a copy of 256 MiB moves "
        f"{bench.copy_bytes_per_second / 1e9:.1f} GB/s here, measured before and after: of copy is "
        "relative to the faster. fresh: results in new arrays; out=: in arrays that exist already. "
        "GB/s counts x and y in the forward, dy, x and dx in the backward."
    )
    if min(row.rounds for row in bench.rows) < 3:
        notes += " Some calls are so long that they were timed once or twice only."
    print_lines(console, (notes,))
