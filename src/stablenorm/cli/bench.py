"""
Time forward and backward on your shapes, and a copy of memory.

The backends take turns. The last axis is normalized.

examples:
  stablenorm bench                                       one shape, float32
  stablenorm bench --shape 8 512 1024 --shape 4096 768   shapes of your own
  stablenorm bench --shape 8 512 1024 --dtype float16 --dtype float32
  stablenorm bench --rounding fast --rounding nearest --backend native
  stablenorm bench --kind rms
  stablenorm bench --threads 1 --json res.json

how to read it:
  time      median of calls, which take turns with those of the other lines
  fresh     without out=: large results reuse the memory of earlier ones
  out=      results written into arrays that exist already
  GB/s      bytes over time: forward x and y, backward dy, x and dx
  of copy   GB/s over those of a copy of 256 MiB with as many threads, measured
            in the same run; arrays that stay in the caches may exceed 1

exit status: 0 done, 2 the benchmark cannot be run (one line says why).
"""

import argparse
import itertools
import os
from typing import Any

import numpy as np

from stablenorm import timing
from stablenorm.backends import choose
from stablenorm.cli import parts
from stablenorm.formats import parse
from stablenorm.text import quantity, shape_text
from stablenorm.threads import get_num_threads, set_num_threads
from stablenorm.types import Array

# Seconds for all rounds of one candidate: a table of two backends then takes a minute.
_LIMIT = 2.0
_ROUNDS = 15
# Fields of a row in the JSON; `seconds` is the median, `quartiles` the two around it.
_ROW = "shape dtype direction backend rounding outputs seconds quartiles bytes_per_second of_copy"

_REPEATED = {"action": "append", "default": None}
_SEVERAL = "may be given several times; default: "
OPTIONS = {
    "--shape": (f"shape of x; {_SEVERAL}32 512 768", _REPEATED),
    "--dtype": (f"{_SEVERAL}float32", _REPEATED),
    "--backend": (f"{_SEVERAL}all that can be loaded", _REPEATED),
    "--rounding": (f"{_SEVERAL}fast; nearest by numpy takes much longer", _REPEATED),
    "--kind": "kind of the norm; default: layer",
    "--threads": "default: as many as any call uses",
    "--json": "write all figures to this file",
}


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm bench` is asked."""
    shapes, dtypes = arguments.shape or [[32, 512, 768]], arguments.dtype or ["float32"]
    cases = list(itertools.product(shapes, dtypes))
    for shape, dtype in cases:
        # NumPy refuses more than 64 axes, and 2^63 bytes.
        with parts.refusing(ValueError, prefix="--shape: "):
            like = np.broadcast_to(np.empty((), parse(dtype)), shape)
        # Seven arrays: x, dy, y, dx, a fresh y or dx, and two for drawing.
        parts.check_memory(7 * like.nbytes)
    backends = list(map(choose, arguments.backend or timing.usable_backends()))
    set_num_threads(arguments.threads or get_num_threads())
    threads, kind = get_num_threads(), arguments.kind
    # More threads than processors copy no faster, and 2^31 of them never begin.
    copy = timing.measure_copy(min(threads, os.cpu_count() or 1))
    note = f"{threads} threads; a copy of 256 MiB moves {copy / 1e9:.1f} GB/s here."
    parts.print_lines(f"{note} What the columns are: stablenorm bench --help.")
    rows = list[dict[str, Any]]()
    for shape, dtype in cases:
        problem = timing.make_problem(shape, dtype)
        candidates = {
            (backend, rounding): timing.make_candidates(problem, backend, rounding, kind)
            for backend in backends
            for rounding in arguments.rounding or ["fast"]
        }
        for direction in timing.PASSES:
            rows += _measure(problem.x, candidates, direction, copy)
    figures = {"kind": kind, "rows": rows, "copy_bytes_per_second": copy, "threads": threads}
    parts.write_json(arguments.json, figures)
    return 0


def _measure(x: Array, candidates: Any, direction: str, copy: float) -> list[dict[str, Any]]:
    """Time backends and roundings in one direction, interleaved; print a table, return its rows for JSON."""
    calls = {
        (*way, outputs): call
        for way, made in candidates.items()
        for outputs, call in made[direction].items()
    }
    timings = timing.measure_interleaved(calls, rounds=_ROUNDS, limit=_LIMIT * len(calls))
    rows, cells = [], []
    for (backend, rounding, outputs), t in timings.items():
        speed = timing.PASSES[direction] * x.nbytes / t.median
        ways = x.shape, str(x.dtype), direction, backend, rounding, outputs
        row = *ways, t.median, (t.low, t.high), speed, speed / copy
        rows.append(dict(zip(_ROW.split(), row, strict=True)))
        way = backend + ", nearest" * (rounding == "nearest")
        ratios = f"{speed / 1e9:.2f}", f"{speed / copy:.2f}"
        cells.append((way, outputs, quantity(t.median, "s"), *ratios))
    columns = ("backend", "outputs", "time", "GB/s", "of copy")
    parts.print_table(f"{shape_text(x.shape)} {x.dtype} {direction}", columns, cells)
    return rows
