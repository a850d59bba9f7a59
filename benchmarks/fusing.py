"""
The counts of docs/explanation/fusing.md: bytes moved by each way to organize the backward.

Nothing here is timed. The passes of the array-at-a-time form are counted by running it on arrays
that note what is read and written; chunks come from the launch plan of the kernel; times are bytes
over a stated bandwidth, the least that any kernel could take. `main` writes the tables of the page
between their markers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from page import DOCS, put, table

from stablenorm.cuda.plan import choose_kernel, cut
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.types import bfloat16

# The example of the page.
ROWS, N = 8192, 4096
# Bytes per second of the memory of an H100 SXM, from its data sheet.
BANDWIDTH = 3.35e12


class Pass(NamedTuple):
    """Arrays of the size of x that one operation reads and writes."""

    name: str
    reads: int
    writes: int


class Stage(NamedTuple):
    """One way to organize the backward; `partials`: whether it writes and reads partial sums."""

    name: str
    launches: int
    reads: int
    writes: int
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
        reads = sum(array.size == Counted.full for array in arrays)
        writes = int(np.size(result) == Counted.full)
        if reads or writes:
            Counted.passes.append(Pass(name, reads, writes))
        return np.asarray(result).view(Counted)


def count_passes() -> list[Pass]:
    """Run the plain backward on float32 and return its operations on whole arrays."""
    # Large enough that no vector of n or rows has as many elements; float32 is not converted.
    x = np.random.default_rng(0).standard_normal((6, 10), np.float32)
    _, cache = plain_forward(x, np.ones(10, np.float32))
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


def partial_bytes() -> int:
    """Return the bytes of the partial sums of bfloat16: a float64 per chunk, column and sum."""
    kernel = choose_kernel(N, bfloat16, bfloat16, bfloat16, bfloat16, False)
    return 2 * 8 * N * cut(ROWS, kernel.slots).number


def traffic_table() -> str:
    """The five stages, in units of x and for the example."""
    head = ("", "launches", "x-sized reads", "writes", "memory", "partial sums", "least time")
    lines = []
    for stage in count_stages():
        moved = (stage.reads + stage.writes) * ROWS * N * np.dtype(bfloat16).itemsize
        partials = f"{2 * partial_bytes() / 1e6:.1f} MB" if stage.partials else ""
        times = f"{moved / 1e6:.0f} MB", partials, f"{moved / BANDWIDTH * 1e6:.0f} us"
        lines.append((*stage[:4], *times))
    return table(head, lines)


def tables() -> dict[str, str]:
    """Return every generated part of the page."""
    return {
        "traffic": traffic_table(),
        "passes": table(("operation", "reads", "writes"), count_passes()),
    }


def main() -> None:
    """Write the tables."""
    put(DOCS / "explanation" / "fusing.md", tables(), __file__)


if __name__ == "__main__":
    main()
