"""
Where the time of the compiled kernels goes: each pass over a row alone, in cache, on one core.

Drives the passes of `stablenorm.kernels._narrow_forward` on 256 rows of 1024, which stay in the
second level cache, beside the whole kernels and a copy, interleaved; the kernels on rows of other
lengths, in cache and beyond; and one small call, with what it is made of. Writes docs/passes.md.
"""

# What Numba compiles has the types that Numba infers.
# mypy: ignore-errors

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numba
import numpy as np
from machine import processor
from numba import njit

from stablenorm import layer_norm_backward, layer_norm_forward, set_num_threads
from stablenorm.kernels import _narrow_forward
from stablenorm.kernels._plain_jobs import forward_plan
from stablenorm.kernels._sharing import NO_CREW
from stablenorm.kernels._vector_memory import pointer, store
from stablenorm.kernels._vectors import ZEROS

ROWS, N = 256, 1024
# Interleaved repetitions of some 0.1 ms each: the median of 101 moved by less than 3 %.
REPEATS = 101
# Far beyond the caches: 256 MiB of float32, a tenth of a second a run.
FAR_ELEMENTS, FAR_REPEATS = 1 << 26, 7
LENGTHS = (64, 128, 256, 768, 769, 1024, 4096, 16384)
FAR = (
    "forward, of copy",
    "backward, of copy",
    "forward, off the line",
    "backward, off the line",
)
PAGE = Path(__file__).parent.parent / "docs" / "passes.md"
DTYPES = {
    "float32": (np.dtype(np.float32), np.dtype(np.float32)),
    "float16": (np.dtype(np.float16), np.dtype(np.int16)),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)),
    "float64": (np.dtype(np.float64), np.dtype(np.float64)),
}
_four = ZEROS[4]


@njit(error_model="numpy", nogil=True)
def sum_x(x: Any, numbers: Any) -> None:
    """The first pass of the forward: sums of rows, four at a time."""
    rows, n = x.shape
    for row in range(0, rows, 4):
        total = _narrow_forward._sum(pointer(x), row * x.strides[0], x.strides[0], n, _four(), None)
        store(pointer(numbers), 0, 0, total)


@njit(error_model="numpy", nogil=True)
def sum_centered(x: Any, numbers: Any, sums: Any) -> None:
    """The second pass: sums of x - mean and of its square."""
    rows, n = x.shape
    for row in range(0, rows, 4):
        total, squares = _narrow_forward._sum_centered(
            pointer(x), row * x.strides[0], x.strides[0], n, pointer(numbers), _four(), None
        )
        store(pointer(sums), 0, 0, total)
        store(pointer(sums), 64, 0, squares)


@njit(error_model="numpy", nogil=True)
def normalize(x: Any, numbers: Any, gamma: Any, beta: Any, y: Any) -> None:
    """The third pass: y."""
    rows, n = x.shape
    for row in range(0, rows, 4):
        _narrow_forward._normalize(
            pointer(x), row * x.strides[0], x.strides[0], n, pointer(numbers), pointer(gamma),
            pointer(beta), _four(), pointer(y), row * y.strides[0], y.strides[0], False,
        )  # fmt: skip


def candidates(name: str) -> dict[str, Callable[[], Any]]:
    """Return what is timed for one dtype."""
    dtype, bits = DTYPES[name]
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((ROWS, N)).astype(dtype) for _ in range(2))
    y, dx = np.empty_like(x), np.empty_like(x)
    parameters = np.dtype(np.float64) if name == "float64" else np.dtype(np.float32)
    gamma, beta = np.ones(N, parameters), np.zeros(N, parameters)
    _, cache = layer_norm_forward(x, gamma, beta, out=y)
    numbers, sums = np.ones(24), np.ones(16)
    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: np.copyto(y, x),
        "forward": lambda: layer_norm_forward(x, gamma, beta, out=y),
        "backward": lambda: layer_norm_backward(dy, cache, out=(dx, None, None)),
        "backward, dx alone": lambda: layer_norm_backward(dy, cache, wrt="x", out=(dx, None, None)),
    }
    if name != "float64":
        seen, written = x.view(bits), y.view(bits)
        ways |= {
            "forward: sum of x": lambda: sum_x(seen, numbers),
            "forward: sums of x - mean, (x - mean)^2": lambda: sum_centered(seen, numbers, sums),
            "forward: y": lambda: normalize(seen, numbers, gamma, beta, written),
        }
    return ways


def at_line(shape: tuple[int, int], offset: int) -> Any:
    """Return a float32 array that begins so many bytes after the beginning of a line."""
    size = 4 * shape[0] * shape[1]
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + size].view(np.float32).reshape(shape)


def of_length(n: int, elements: int, offset: int) -> dict[str, Callable[[], Any]]:
    """Return forward and backward of float32 rows of n, results `offset` bytes into a line."""
    rows = elements // n
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((rows, n), np.float32) for _ in range(2))
    gamma, beta = np.ones((2, n), np.float32)
    y, dx = at_line((rows, n), offset), at_line((rows, n), offset)
    _, cache = layer_norm_forward(x, gamma, beta, out=y)
    return {
        "copy": lambda: np.copyto(y, x),
        "forward": lambda: layer_norm_forward(x, gamma, beta, out=y),
        "backward": lambda: layer_norm_backward(dy, cache, out=(dx, None, None)),
    }


def of_call() -> dict[str, Callable[[], Any]]:
    """Return a call on (1, 1, 64), float32, and what it cannot do without."""
    x = np.random.default_rng(0).standard_normal((1, 1, 64), np.float32)
    gamma, beta = np.ones((2, 64), np.float32)
    y, numbers, dtype = np.empty_like(x), np.empty((3, 1)), np.dtype(np.float32)
    _, cache = layer_norm_forward(x, gamma, beta)
    job, tile_rows, _ = forward_plan(1, 64, 3)
    return {
        "layer_norm_forward": lambda: layer_norm_forward(x, gamma, beta),
        "layer_norm_backward": lambda: layer_norm_backward(x, cache),
        "the compiled forward, called from Python": lambda: job(
            x, gamma, beta, 1e-5, y, False, numbers, tile_rows, NO_CREW, 0
        ),
        "two arrays made: y and the statistics": lambda: (
            np.empty((1, 1, 64), dtype),
            np.empty((3, 1)),
        ),
        "mean, mean_lo and rstd as arrays": lambda: (numbers[0], numbers[1], numbers[2]),
        "calling a Python function that does nothing": lambda: None,
    }


def measure(ways: dict[str, Callable[[], Any]], repeats: int, calls: int = 1) -> dict[str, float]:
    """Return the median seconds of each, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            way()
            times[name].append(timeit.timeit(way, number=calls) / calls)
    return {name: statistics.median(taken) for name, taken in times.items()}


def speeds(ways: dict[str, Callable[[], Any]], elements: int, repeats: int) -> dict[str, float]:
    """Return the median elements per nanosecond of each."""
    return {name: elements / s / 1e9 for name, s in measure(ways, repeats).items()}


def length_lines() -> list[str]:
    """Return the table of rows of other lengths."""
    lines = ["| n | forward | backward | " + " | ".join(FAR) + " |", "|---|" + "---|" * 6]
    for n in LENGTHS:
        near = ROWS * N // n * n
        figures = [speeds(of_length(n, near, 0), near, REPEATS)]
        far = FAR_ELEMENTS // n * n
        figures += [speeds(of_length(n, far, offset), far, FAR_REPEATS) for offset in (0, 16)]
        cells = [f"{figures[0][way]:.2f}" for way in ("forward", "backward")]
        for figure in figures[1:]:
            # The bytes a copy of one array moves, 2 N; the backward moves 3 N.
            cells += [
                f"{figure[way] / figure['copy'] * share:.2f}"
                for way, share in (("forward", 1.0), ("backward", 1.5))
            ]
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Time everything and write the page."""
    set_num_threads(1)
    figures = {name: speeds(candidates(name), ROWS * N, REPEATS) for name in DTYPES}
    lines = [
        "# Where the time of the kernels goes",
        "",
        f"Generated by `benchmarks/passes.py` on {dt.datetime.now(dt.UTC):%Y-%m-%d}: {processor()},",
        f"{os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}, Numba",
        f"{numba.__version__}. One thread, medians of interleaved runs.",
        "",
        f"## The passes, ({ROWS}, {N}), in cache",
        "",
        "Thousand million elements a second.",
        "",
        "| | " + " | ".join(figures) + " |",
        "|---|" + "---|" * len(figures),
    ]
    for way in figures["float32"]:
        cells = [f"{figure[way]:.2f}" if way in figure else "" for figure in figures.values()]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    lines += ["", TEXT, "## Rows of other lengths, float32", "", LENGTH_TEXT, ""]
    lines += [*length_lines(), "", LENGTH_REMARKS]
    lines += ["## One call on (1, 1, 64), float32", "", "| | us |", "|---|---|"]
    lines += [f"| {way} | {s * 1e6:.2f} |" for way, s in measure(of_call(), 51, 2000).items()]
    PAGE.write_text("\n".join([*lines, "", CALL_TEXT]), encoding="utf8")
    print(PAGE.read_text("utf8"))


TEXT = """\
A pass is bound by the conversions between the type in memory and float64: of four rows, a vector
of eight columns takes one each in the sums, and ten in the pass that writes y (four of x, four
of y, two of gamma and beta, which the rows share). To 16 bits it rounds by way of float32, and once
more, exactly, those vectors in which that ends on a midpoint. The units that add convert as well:
differences from the mean are made by those that multiply, as fma(x, 1, -mean), where that pays. The
sums over rows cost the backward what lies between its two lines. float64 is computed in
double-double, some 60 operations an element forward and 90 backward.

Tried, and left: eight rows at a time (the same, and more registers than AVX2 has); rounding
bfloat16 row by row instead of four rows at once (a tenth slower); reading x again for dx in
float64 instead of keeping xhat and g - mean(g) in the cache (1.9 times the time,
with pairs renormalized at every step); all results through
a buffer in the first-level cache (a tenth slower where rows begin at lines); gamma and beta
widened once for all rows (0.91 to 1.02 times as fast, n = 64 to 1024); rows kept in float64 by the
forward, so that each element is widened once instead of three times (written in C for the
trial: 1.05 to 1.1 times as fast up to n = 512, 0.75 to 0.95 from 1024 on, where what is kept is no
longer in the first-level cache); the compensated sums with half of their additions as multiply-adds
(a fifth slower at n = 64). With no compensation at all the backward would be 1.07 times as fast.
"""

LENGTH_TEXT = """\
In cache (1 MiB): thousand million elements a second. Of 256 MiB, results past the caches: the
bandwidth as a part of that of a copy by one thread, where results begin at a line of the cache,
and 16 bytes after one, as large arrays of NumPy do."""

LENGTH_REMARKS = """\
Of short rows, what each row costs besides its elements shows: sums over eight lanes, a division and
a square root, each waiting for the one before. The forward of rows up to 512 measures the next four
rows before it normalizes these, so that there is other work meanwhile: 1.08 times as fast at n = 64,
1.06 at 128, the same from 512 on. Off the line, rows of less than 4096 bytes and all whose stride is
no multiple of 64 bytes go through a stage in the first-level cache.
"""

CALL_TEXT = """\
What is left is Python itself: names looked up, compared and called to find out that the arguments
are the plain ones. Whether they are contiguous, and of lengths that match, the compiled function
finds out; a quarter of the call went with that. PyTorch does all of it in C++. Other types go the
same way as far as the backend, which looks at each argument once more.

## Which gate fails for what

The gates of [Performance](performance.md) that are not met, and what stands in the way:

- **No shape slower than PyTorch; plain NumPy ten times slower, backward.** (1, 1, 64) and (1, 1, 4096):
  the call, above. (2, 128, 1024), backward: arithmetic in float64, rounded once, and sums over rows
  that keep what rounding takes from them; two cores then do what PyTorch's do in float32, seven
  to eight tenths as fast. Tried: sharing small inputs between threads (twice as fast in a loop, in); four
  spans of a single row at once (1.6 times, in); for a single row, no sums but products (2 us of 7 at
  n = 4096, in); arrays of any shape handed to compiled code as they are (0.5 to 0.8 us a call, in);
  dx written from the end of the row, which is still in the first-level cache (the same); other
  places of x, y and dx within a page (the same); a helper thread kept off the caller's processor by
  the caller instead of by itself (the same).
- **Nine tenths of the copy, and a cost that is flat in n.** n of 64 to 256: what each row costs besides
  its elements, above; two cores at 2.5 thousand million elements a second are what memory could take
  twice. Tried: eight rows a vector (in, below 64; slower above), a stage (in), the next rows measured
  ahead (1.08 times, in), the same with eight rows in flight (another 1.03, for twice the machine
  code and registers that only AVX-512 has; left), one division and root for all rows of a group (the
  same, in, since it is shorter). n from 32768 on,
  backward: the compensated sums for dgamma and dbeta are 32 bytes a column, 1 MiB at n = 32768, past
  the second-level cache; four rows go over them at a time, and are themselves read three times, from
  the third level (one row at a time took 1.5 times as long at 32768).
- **float16 and bfloat16 as fast as float32.** Half the bytes, the same arithmetic, and conversions that
  cost more: beyond the caches float32 waits for memory, they do not. Tried: rounding row by row;
  rounding to odd only where float32 ends on a midpoint (in: with the two below, bfloat16 1.5 times as
  fast forward and 1.27 backward in cache, float16 1.2 and 1.09); one byte shuffle instead of two
  operations to widen bfloat16 (in); differences from the mean as multiply-adds (in). The
  instruction that rounds to bfloat16 alone takes the time of the integer
  operations and their test together, and subnormals for zero: left.
"""


if __name__ == "__main__":
    main()
