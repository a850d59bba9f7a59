"""
Time forward and backward on your shapes: plain NumPy, stablenorm, a copy.

Plain NumPy is the norm as one writes it: a mean, a variance, a few lines more.
The last axis is normalized.

examples:
  stablenorm bench                                       one shape, float32
  stablenorm bench --shape 8 512 1024 --shape 4096 768   shapes of your own
  stablenorm bench --shape 8 512 1024 --dtype float16 --dtype float32
  stablenorm bench --rounding fast --rounding nearest --backend native
  stablenorm bench --kind rms
  stablenorm bench --threads 1 --json res.json

how to read it:
  time      median of calls, which take turns with those of the other lines
  of NumPy  time over that of plain NumPy: lower is faster
  of copy   time a byte over that of a copy of x by as many threads
  GB/s      bytes over time: forward x and y, backward dy, x and dx
  fresh     without out=: large results reuse the memory of earlier ones
  out=      results written into arrays that exist already

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
from stablenorm.output import columns, quantity, shape_text
from stablenorm.records import Array
from stablenorm.threads import get_num_threads, set_num_threads

# Seconds for all rounds of one candidate: a table of two backends then takes a minute.
_LIMIT = 2.0
_ROUNDS = 15
# Fields of a row in the JSON; `seconds` is the median, `quartiles` the two around it.
_ROW = "shape dtype direction call seconds quartiles bytes_per_second of_numpy of_copy"
_PLAIN, _COPY = "plain NumPy", "a copy of x"

_REPEATED = {"action": "append", "default": None}
_SEVERAL = "may be given several times; default: "
OPTIONS = {
    "--shape": (f"shape of x; {_SEVERAL}32 512 768", _REPEATED),
    "--dtype": (f"{_SEVERAL}float32", _REPEATED),
    "--backend": (f"{_SEVERAL}the one of any call", _REPEATED),
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
        # x, dy, y, dx, a fresh y or dx, two for drawing, and four of float32 of plain NumPy.
        parts.check_memory(7 * like.nbytes + 16 * like.size)
    backends = list(map(choose, arguments.backend or [None]))
    set_num_threads(arguments.threads or get_num_threads())
    threads, kind, rows = get_num_threads(), arguments.kind, list[dict[str, Any]]()
    parts.print_lines(
        f"{threads} thread{'s' * (threads != 1)}; of NumPy: time over plain NumPy's; of copy: time a "
        "byte over a copy's; lower is faster",
        "out= may be slower: only arrays that begin at multiples of 64 bytes are written past caches",
    )
    for shape, dtype in cases:
        problem = timing.make_problem(shape, dtype)
        made = {
            f"{backend}{', nearest' * (rounding == 'nearest')}": timing.make_candidates(
                problem, backend, rounding, kind
            )
            for backend in backends
            for rounding in arguments.rounding or ["fast"]
        }
        # More threads than processors copy no faster, and 2^31 of them never begin.
        copy = timing.make_copy(problem.x, problem.y, min(threads, os.cpu_count() or 1))
        for direction, plain in timing.make_plain(problem, kind).items():
            calls = {
                f"{way}, {outputs}": call
                for way, candidates in made.items()
                for outputs, call in candidates[direction].items()
            }
            rows += _measure(problem.x, direction, {_PLAIN: plain, **calls, _COPY: copy})
    parts.write_json(arguments.json, {"kind": kind, "rows": rows, "threads": threads})
    return 0


def _measure(x: Array, direction: str, calls: dict[str, Any]) -> list[dict[str, Any]]:
    """Time calls in turns; print a table, return its rows for JSON."""
    timings = timing.measure_interleaved(calls, rounds=_ROUNDS, limit=_LIMIT * len(calls))
    rows, cells, most = [], [], 2 * x.nbytes / timings[_COPY].median
    for name, t in timings.items():
        speed = (2 if name == _COPY else timing.PASSES[direction]) * x.nbytes / t.median
        of = t.median / timings[_PLAIN].median, most / speed
        values = x.shape, str(x.dtype), direction, name, t.median, (t.low, t.high), speed, *of
        rows.append(dict(zip(_ROW.split(), values, strict=True)))
        cells.append((name, quantity(t.median, "s"), *(f"{v:.2f}" for v in (*of, speed / 1e9))))
    heads = (f"{shape_text(x.shape)} {x.dtype} {direction}", "time", "of NumPy", "of copy", "GB/s")
    parts.print_lines("", *columns([heads, *cells]))
    return rows
