"""
The counts of docs/explanation/fusing.md: bytes moved by each way to organize the backward.

Nothing here is timed. The passes of the array-at-a-time form are counted by running it on arrays
that note what is read and written; threads, chunks and workspace come from the launch plan of the
kernel; times are bytes over a stated bandwidth, the least that any kernel could take. `main` writes
the tables of the page between their markers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from page import DOCS, put

from stablenorm.cuda.plan import Kernel, choose_kernel, cut
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.types import Array, bfloat16

# The example of the page.
ROWS, N = 8192, 4096
# Of an H100 SXM, from its data sheet: bytes a second of memory, multiprocessors, boost clock.
BANDWIDTH, PROCESSORS, CLOCK = 3.35e12, 132, 1.755e9
# Bytes that one multiprocessor takes from the second-level cache in a clock, at most.
CACHE_BYTES = 64
# Rows of x, and of n, that the tables go through.
LENGTHS = (1, 8, 64, 256, 768, 1024, 2048, 4096, 16_384, 65_536)
TAILS = (256, 1024, 2048, 4096)


class Pass(NamedTuple):
    """Arrays of the size of x that one operation reads and writes."""

    name: str
    reads: int
    writes: int


class Stage(NamedTuple):
    """One way to organize the backward."""

    name: str
    launches: int
    reads: int
    writes: int
    # Whether partial sums of dgamma and dbeta are written and read again.
    partials: bool = False


class Counted(np.ndarray[Any, np.dtype[Any]]):
    """An array that notes every operation on arrays of its size, in `passes`."""

    passes: list[Pass] = []  # noqa: RUF012
    full = 0

    def __array_ufunc__(
        self, ufunc: Any, method: Any, *inputs: Any, out: Any = None, **options: Any
    ) -> Any:
        """Do it on plain arrays, note it, and return the like of oneself."""
        arrays = [np.asarray(a) for a in inputs]
        targets = {} if out is None else {"out": tuple(np.asarray(a) for a in out)}
        result = getattr(ufunc, method)(*arrays, **targets, **options)
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        _note(name, arrays, result)
        return np.asarray(result).view(Counted)


def _note(name: str, inputs: Iterable[Array], result: Array) -> None:
    reads = sum(array.size == Counted.full for array in inputs)
    writes = int(np.size(result) == Counted.full)
    if reads or writes:
        Counted.passes.append(Pass(name, reads, writes))


def count_passes() -> list[Pass]:
    """Run the plain backward on float32 and return its operations on whole arrays."""
    # Large enough that no vector of n or rows has as many elements; float32 is not converted.
    x = np.random.default_rng(0).standard_normal((6, 10), np.float32)
    gamma = np.ones(10, np.float32)
    _, cache = plain_forward(x, gamma)
    Counted.passes, Counted.full = [], x.size
    kept = tuple(None if part is None else part.view(Counted) for part in cache)
    plain_backward(x.view(Counted), kept)  # type: ignore[arg-type]
    return Counted.passes


def count_stages() -> list[Stage]:
    """From an array at a time to one launch."""
    passes = count_passes()
    reads, writes = sum(p.reads for p in passes), sum(p.writes for p in passes)
    return [
        Stage("an array at a time", len(passes), reads, writes),
        # Sums of the rows: x, dy. dx: x, dy again. dgamma, dbeta: x, dy again.
        Stage("three kernels", 3, 6, 1),
        # A row stays in registers between its sums and its dx.
        Stage("rows held in registers", 2, 4, 1),
        # And adds to the sums over rows while it is there.
        Stage("partial sums on the way", 2, 2, 1, partials=True),
        Stage("one launch", 1, 2, 1, partials=True),
    ]


def count_bytes(stage: Stage, rows: int, n: int, dtype: Any) -> tuple[int, int]:
    """Return the bytes of memory that must move, and of partial sums written and read."""
    moved = (stage.reads + stage.writes) * rows * n * np.dtype(dtype).itemsize
    return moved, 2 * partial_bytes(rows, n, dtype) if stage.partials else 0


def make_kernel(n: int, dtype: Any) -> Kernel:
    """Return the kernel of the backward."""
    kind = np.dtype(dtype)
    return choose_kernel(False, n, kind, kind, kind.itemsize == 8)


def count_chunks(rows: int, n: int, dtype: Any) -> int:
    """Return how many rows of partial sums there are."""
    return cut(rows, make_kernel(n, dtype).slots).number


def partial_bytes(rows: int, n: int, dtype: Any) -> int:
    """Return the bytes of the partial sums: a float64 for each chunk, column and sum."""
    return 2 * 8 * n * count_chunks(rows, n, dtype)


def count_tail(rows: int, n: int, dtype: Any) -> dict[str, float]:
    """Return the least seconds of the body, and of the final sum by one block and by all."""
    partials = partial_bytes(rows, n, dtype)
    one = CACHE_BYTES * CLOCK
    return {
        "partials": float(partials),
        "body": 3 * rows * n * np.dtype(dtype).itemsize / BANDWIDTH,
        "one block": partials / one,
        "all blocks": partials / (one * PROCESSORS),
    }


def count_orders(orders: int = 1000, chunks: int = 256) -> tuple[int, float]:
    """Add the same float32 partial sums in random orders; return how many results, and the spread."""
    rng = np.random.default_rng(0)
    partials = rng.standard_normal(chunks).astype(np.float32)
    totals = np.array([_in_order(rng.permutation(partials)) for _ in range(orders)])
    spread = float(totals.max() - totals.min()) / float(np.abs(partials).sum())
    return len(np.unique(totals)), spread


def _in_order(values: Array) -> np.float32:
    # The last of the running sums: one addition after another, as atomic additions arrive.
    return np.add.accumulate(values, dtype=np.float32)[-1]


def traffic_table() -> list[str]:
    """The five stages, in units of x and for the example."""
    lines = [
        "| | launches | x-sized arrays read | written | memory | partial sums | least time |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in count_stages():
        moved, partials = count_bytes(stage, ROWS, N, bfloat16)
        cells = (
            stage.name,
            stage.launches,
            stage.reads,
            stage.writes,
            f"{moved / 1e6:.0f} MB",
            f"{partials / 1e6:.1f} MB" if partials else "",
            f"{moved / BANDWIDTH * 1e6:.0f} us",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def passes_table() -> list[str]:
    """The operations of the plain backward."""
    lines = ["| operation | reads | writes |", "|---|---|---|"]
    return lines + [f"| {p.name} | {p.reads} | {p.writes} |" for p in count_passes()]


def map_table() -> list[str]:
    """Threads of a row, by n and dtype, as the plan says."""
    head = "threads per row | vectors per thread | rows per block"
    lines = [f"| n | bfloat16: {head} | float32: {head} |", "|---" * 7 + "|"]
    for n in LENGTHS:
        cells: list[str] = [f"{n}"]
        for dtype in (bfloat16, np.float32):
            kernel = make_kernel(n, dtype)
            cells += [
                str(kernel.row_threads),
                str(kernel.vectors) if kernel.vectors else "a loop",
                str(kernel.slots),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def tail_table() -> list[str]:
    """The final sum, by one block and by all."""
    lines = [
        "| n | chunks | partial sums | body, at least | sum by one block | sum by all blocks |",
        "|---|---|---|---|---|---|",
    ]
    for n in TAILS:
        counted = count_tail(ROWS, n, bfloat16)
        times = [f"{counted[k] * 1e6:.1f} us" for k in ("body", "one block", "all blocks")]
        size = f"{counted['partials'] / 1e6:.1f} MB"
        chunks = count_chunks(ROWS, n, bfloat16)
        lines.append("| " + " | ".join([str(n), str(chunks), size, *times]) + " |")
    return lines


def orders_line() -> list[str]:
    """What becomes of one sum of float32 numbers in different orders."""
    distinct, spread = count_orders()
    return [
        (
            f"256 float32 numbers, N(0, 1), added in 1000 random orders: **{distinct} different sums**, "
            f"up to {spread:.0e} of the sum of magnitudes apart. In one fixed order: one."
        )
    ]


def limits_line() -> list[str]:
    """Say what a thread holds and how long rows may be for that, as the plan has it."""
    words = []
    for dtype in (bfloat16, np.float32, np.float64):
        kind = np.dtype(dtype)
        kernels = {n: make_kernel(n, kind) for n in range(256, 65_537, 256)}
        held = {n: kernel.vectors * 16 // kind.itemsize for n, kernel in kernels.items()}
        longest = max(n for n, elements in held.items() if elements)
        words.append(f"{max(held.values())} elements of {kind.name}, for rows up to {longest}")
    text = "; ".join(words)
    return [f"A thread holds at most this at a time, of x and of dy each: {text}."]


def tables() -> dict[str, str]:
    """Return every generated part of the page."""
    parts = {
        "traffic": traffic_table(),
        "passes": passes_table(),
        "map": map_table(),
        "tail": tail_table(),
        "orders": orders_line(),
        "limits": limits_line(),
    }
    return {name: "\n".join(lines) for name, lines in parts.items()}


if __name__ == "__main__":
    put(DOCS / "explanation" / "fusing.md", tables(), __file__)
