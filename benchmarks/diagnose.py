"""
What `diagnose` is worth: how near its predictions are, how fast it reads, how much memory it takes.

Holds the bits that it predicts lost against those that the simulated methods lose, on every family,
dtype and two lengths, and against a two-pass in NumPy's own order of summation; times it beside a
copy of the same array by as many threads, and by one; diagnoses a file of 4 GB in a process of its
own and reads that one's peak memory; and writes docs/evidence/diagnose.md.

    python benchmarks/diagnose.py            all of it; needs 4 GB of disk
    python benchmarks/diagnose.py --gigabytes 0.3
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from machine import processor

import stablenorm
from stablenorm._diagnose import diagnose
from stablenorm.analysis._diagnose_methods import METHODS, title_of
from stablenorm.analysis._diagnose_simulate import measured_bits, simulate
from stablenorm.analysis.families import FAMILIES, make_case
from stablenorm.analysis.plain import plain_forward
from stablenorm.oracle import exact_layer_norm

PAGE = Path(__file__).parent.parent / "docs" / "evidence" / "diagnose.md"
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
LENGTHS = (127, 768)
# Of each family; more of those that need more. The oracle takes 11 ms for a row of 768.
ROWS = 4
# Bytes of an array that is timed: eight times a last-level cache of 32 MiB.
SIZE = 1 << 28
REPEATS = 15
# `diagnose` reads at least half as fast as memory is copied.
GATE = 0.5
SHAPES = tuple(itertools.product(DTYPES, (64, 256, 768, 4096)))

_PROGRAM = (
    "import sys, time; from stablenorm import cli; begin = time.perf_counter(); "
    "status = cli.main(sys.argv[1:]); seconds = time.perf_counter() - begin; "
    "held = dict(l.split(':') for l in open('/proc/self/status')); "
    "peak, mapped = (held[name].split()[0] for name in ('VmHWM', 'RssFile')); "
    "print(status, peak, mapped, seconds, file=sys.stderr)"
)


class Compared(NamedTuple):
    """Bits predicted and lost by one method on the rows of one family."""

    family: str
    dtype: str
    method: str
    predicted: Any
    measured: Any


def compare() -> list[Compared]:
    """Hold predictions against what the methods return; "NumPy" is a two-pass in NumPy's order."""
    found = []
    for dtype in DTYPES.values():
        for n in LENGTHS:
            for family in FAMILIES.values():
                if not (family.finite and family.applies(dtype, n)):
                    continue
                case = make_case(family.name, dtype, n, max(ROWS, family.smallest_rows), rng=3)
                x = case.x[:ROWS]
                exact = exact_layer_norm(x, eps=case.eps).rounded("y", np.float64)
                constant = (x == x[:, :1]).all(axis=1)
                per_row = diagnose(x, case.eps).per_row
                if per_row is None:
                    continue
                returned = {name: simulate(name, x, case.eps) for name in METHODS}
                returned["NumPy"] = plain_forward(x, eps=case.eps)[0]
                for place, (name, y) in enumerate(returned.items()):
                    predicted = per_row.lost[place % len(METHODS)]
                    bits = measured_bits(y, exact, constant)
                    found.append(Compared(family.name, x.dtype.name, name, predicted, bits))
    return found


def agreement_table(found: list[Compared]) -> list[str]:
    """Return, for each method, how many rows are predicted within 2 bits and within 1."""
    lines = [
        "| method | rows | lost 8 bits or more | within 1 bit | within 2 bits | families with a row further off |",
        "|---|---|---|---|---|---|",
    ]
    for name in [*METHODS, "NumPy"]:
        mine = [each for each in found if each.method == name]
        predicted, measured = (
            np.concatenate([getattr(each, part) for each in mine])
            for part in ("predicted", "measured")
        )
        off = np.abs(predicted - measured)
        far = {each.family for each in mine if (np.abs(each.predicted - each.measured) > 2).any()}
        title = (
            "float32 two-pass, summed as NumPy does" if name == "NumPy" else title_of(name, "f4")
        )
        cells = (
            title,
            len(off),
            int((measured >= 8).sum()),
            f"{(off <= 1).mean():.1%}",
            f"{(off <= 2).mean():.1%}",
            ", ".join(sorted(far)) or "none",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def family_table(found: list[Compared]) -> list[str]:
    """Return, for each family, the bits that a float32 two-pass and others lose: the worst row."""
    lines = [
        f"| family | {' | '.join(title_of(name, 'f4') for name in METHODS)} |",
        "|---" * (len(METHODS) + 1) + "|",
    ]
    for family in FAMILIES.values():
        mine = [each for each in found if (each.family, each.dtype) == (family.name, "float32")]
        if not mine:
            continue
        cells = []
        for name in METHODS:
            pairs = [
                (each.predicted.max(), each.measured.max()) for each in mine if each.method == name
            ]
            predicted, measured = max(pairs, key=lambda pair: pair[1])
            cells.append(f"{predicted:.0f} / {measured:.0f}")
        lines.append(f"| {family.name} {family.title} | {' | '.join(cells)} |")
    return lines


def median_times(cases: list[Callable[[], Any]]) -> list[float]:
    """Run all in turn, again and again; return the median time of each."""
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(REPEATS + 1):
        for case, held in zip(cases, times, strict=True):
            begin = time.perf_counter()
            case()
            held.append(time.perf_counter() - begin)
    return [statistics.median(held[1:]) for held in times]


def _against_gate(ratio: float) -> str:
    """Return a ratio, in bold if it misses the gate."""
    return f"{ratio:.2f}" if ratio >= GATE else f"**{ratio:.2f}**"


def speed_table() -> list[str]:
    """Return how fast arrays are read, beside a copy by one thread and by as many."""
    threads = stablenorm.get_num_threads()
    lines = [
        f"| dtype | n | GB/s | of a copy, 1 thread | of a copy, {threads} threads |",
        "|---|---|---|---|---|",
    ]
    with ThreadPoolExecutor(threads) as pool:
        for name, n in SHAPES:
            dtype = np.dtype(DTYPES[name])
            x = np.empty((SIZE // dtype.itemsize // n, n), dtype)
            x[:] = (
                np.random.default_rng(0)
                .standard_normal((1024, n))
                .astype(dtype)[np.arange(len(x)) % 1024]
            )
            y = np.empty_like(x)
            bounds = [len(x) * k // threads for k in range(threads + 1)]
            parts = [slice(*pair) for pair in itertools.pairwise(bounds)]

            def copy(x: Any = x, y: Any = y) -> None:
                np.copyto(y, x)

            def copy_shared(x: Any = x, y: Any = y, parts: Any = parts) -> None:
                list(pool.map(lambda part: np.copyto(y[part], x[part]), parts))

            mine, one, shared = median_times([lambda x=x: diagnose(x), copy, copy_shared])  # type: ignore[misc]
            cells = (
                name,
                n,
                f"{x.nbytes / mine / 1e9:.1f}",
                _against_gate(one / mine),
                _against_gate(shared / mine),
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def measure_file(gigabytes: float) -> tuple[float, float, float, float]:
    """Diagnose a file of that size; return its bytes, peak memory, that of libraries, seconds."""
    n, block = 1024, 4096
    rows = round(gigabytes * 1e9 / 4 / n)
    values = np.random.default_rng(0).standard_normal((block, n), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.npy"
        with path.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (rows, n)}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, rows, block):
                file.write(values[: min(block, rows - start)].tobytes())
        command = [sys.executable, "-c", _PROGRAM, "diagnose", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        status, peak, mapped, seconds = done.stderr.split()[-4:]
        if status != "0":
            raise RuntimeError(done.stderr)
        return path.stat().st_size, 1024 * float(peak), 1024 * float(mapped), float(seconds)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the file; default: 4")
    arguments = parser.parse_args()
    found = compare()
    agreement, families = agreement_table(found), family_table(found)
    speed = speed_table()
    size, peak, mapped, seconds = measure_file(arguments.gigabytes)
    line = "\n"
    PAGE.write_text(
        f"""# What `diagnose` predicts, measured

Generated by `benchmarks/diagnose.py` on {dt.datetime.now(dt.UTC):%Y-%m-%d}: {processor()},
{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, NumPy {np.__version__}, stablenorm
{stablenorm.__version__}. How to use it: [find out what a layer norm would lose](diagnosing.md).

## Predicted against lost

Every family of hard inputs, in float16, bfloat16, float32 and float64 as far as it exists there,
n = {" and ".join(map(str, LENGTHS))}, {ROWS} rows each. Lost: log2 of the RMS error of y over a row, against the
exact y, in units of 2^-p max(rms(y), smallest normal); 0 to p. The methods are computed step by
step in NumPy, each operation rounded as it is there. float64 data is computed in float64 where the
name says float32.

{line.join(agreement)}

Sums are formed in the order that compiled code prefers, sixteen running sums, and the prediction is
about that order. The last line holds the same prediction against a two-pass that sums in NumPy's
order: an implementation with an order of its own loses as much, give or take. F17 in float64 is a
limit: mean and std of rows of subnormals are themselves subnormal, and described as coarsely.

## By family

Bits of float32 lost on the worst row of both lengths: predicted / measured.

{line.join(families)}

## Speed

Arrays of {SIZE >> 20} MiB, {stablenorm.get_num_threads()} threads, medians of {REPEATS} interleaved runs. GB/s counts what is read; the copy
that it is compared with, `numpy.copyto` of the same array, reads and writes as much. Short rows take
longer: each costs its predictions, whatever its length. Rows that are constant, not finite or of
extreme size are predicted in NumPy, and take longer too. The gate is {GATE} of a copy; what misses it is
in bold.

{line.join(speed)}

A file of {size / 1e9:.1f} GB (float32, n = 1024) took {seconds:.1f} s and {peak / 1e6:.0f} MB at its peak, Python, NumPy and Numba
included: {mapped / 1e6:.0f} MB of that are pages of libraries, of which the system maps as many as it has at hand
and which processes share, {(peak - mapped) / 1e6:.0f} MB its own. The first ever call, which compiles, takes more.
Nothing in it grows with the size of the file.
"""
    )
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
