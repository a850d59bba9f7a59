"""
The counts and pictures of docs/explanation/fusing.md: bytes moved by each way to organize the backward.

Nothing here is timed. The passes of the array-at-a-time form are counted by running it on arrays
that note what is read and written; threads, chunks and workspace come from the launch plan of the
kernel; times are bytes over a stated bandwidth, the least that any kernel could take. `main` writes
the tables of the page between their markers, and draws.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import figures
import numpy as np
from matplotlib.colors import to_rgb
from page import DOCS, put, table

from stablenorm.cuda.plan import Kernel, choose_kernel, cut
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.types import bfloat16

# The example of the page.
ROWS, N = 8192, 4096
# Of an H100 SXM, from its data sheet: bytes per second of memory, multiprocessors, boost clock.
BANDWIDTH, PROCESSORS, CLOCK = 3.35e12, 132, 1.755e9
# Bytes that one multiprocessor takes from the second-level cache per clock, at most.
CACHE_BYTES = 64
# n in the tables.
LENGTHS = (1, 8, 64, 256, 768, 1024, 2048, 4096, 16_384, 65_536)
TAILS = (256, 1024, 2048, 4096)


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


def make_kernel(n: int, dtype: Any) -> Kernel:
    """Return the kernel of the backward."""
    kind = np.dtype(dtype)
    return choose_kernel(n, kind, kind, kind, kind, kind.itemsize == 8)


def count_chunks(n: int, dtype: Any) -> int:
    """Return how many rows of partial sums there are."""
    return cut(ROWS, make_kernel(n, dtype).slots).number


def partial_bytes(n: int) -> int:
    """Return the bytes of the partial sums of bfloat16: a float64 per chunk, column and sum."""
    return 2 * 8 * n * count_chunks(n, bfloat16)


def traffic_table() -> str:
    """The five stages, in units of x and for the example."""
    head = (
        "",
        "launches",
        "x-sized arrays read",
        "written",
        "memory",
        "partial sums",
        "least time",
    )
    lines = []
    for stage in count_stages():
        moved = (stage.reads + stage.writes) * ROWS * N * np.dtype(bfloat16).itemsize
        partials = f"{2 * partial_bytes(N) / 1e6:.1f} MB" if stage.partials else ""
        times = f"{moved / 1e6:.0f} MB", partials, f"{moved / BANDWIDTH * 1e6:.0f} us"
        lines.append((*stage[:4], *times))
    return table(head, lines)


def map_table() -> str:
    """Threads of a row, by n and dtype, as the plan says."""
    words = ("threads per row", "vectors per thread", "rows per block")
    head = ["n"]
    for kind in ("bfloat16", "float32"):
        head += [f"{kind}: {words[0]}", *words[1:]]
    lines = []
    for n in LENGTHS:
        kernels = [make_kernel(n, dtype) for dtype in (bfloat16, np.float32)]
        cells = [(k.row_threads, k.vectors or "a loop", k.slots) for k in kernels]
        lines.append((n, *cells[0], *cells[1]))
    return table(head, lines)


def tail_table() -> str:
    """The least times of the body, and of the final sum by one block and by all."""
    head = (
        "n",
        "chunks",
        "partial sums",
        "body, at least",
        "sum by one block",
        "sum by all blocks",
    )
    lines = []
    for n in TAILS:
        partials, one = partial_bytes(n), CACHE_BYTES * CLOCK
        body = 3 * ROWS * n * np.dtype(bfloat16).itemsize / BANDWIDTH
        times = body, partials / one, partials / (one * PROCESSORS)
        words = [f"{1e6 * t:.1f} us" for t in times]
        lines.append((n, count_chunks(n, bfloat16), f"{partials / 1e6:.1f} MB", *words))
    return table(head, lines)


def limits_line() -> str:
    """Say what a thread holds and how long rows may be for that, as the plan has it."""
    words = []
    for kind in (np.dtype(d) for d in (bfloat16, np.float32, np.float64)):
        kernels = {n: make_kernel(n, kind) for n in range(256, 65_537, 256)}
        held = {n: kernel.vectors * 16 // kind.itemsize for n, kernel in kernels.items()}
        longest = max(n for n, elements in held.items() if elements)
        words.append(f"{max(held.values())} elements of {kind.name}, for rows up to {longest}")
    return f"A thread holds at most this at a time, of x and of dy each: {'; '.join(words)}."


def tables() -> dict[str, str]:
    """Return every generated part of the page."""
    return {
        "traffic": traffic_table(),
        "passes": table(("operation", "reads", "writes"), count_passes()),
        "map": map_table(),
        "tail": tail_table(),
        "limits": limits_line(),
    }


def draw_traffic() -> Any:
    """Arrays of the size of x that move, by stage."""
    stages = count_stages()[::-1]
    figure, axes = figures.make_axes(2.9)
    places = np.arange(len(stages))
    reads = [s.reads for s in stages]
    axes.barh(places, reads, color=figures.SKY, label="read")
    axes.barh(places, [s.writes for s in stages], left=reads, color=figures.BLUE, label="written")
    for place, stage in zip(places, stages, strict=True):
        launches = "1 launch" if stage.launches == 1 else f"{stage.launches} launches"
        axes.text(
            stage.reads + stage.writes + 0.2, place, launches, va="center", fontsize=figures.SMALL
        )
    axes.axvline(3, color=figures.GRAY, lw=0.9, ls="--")
    axes.set_yticks(places, [s.name for s in stages])
    axes.set(xlabel="arrays of the size of x moved through memory", xlim=(0, 28))
    figures.put_legend(figure, axes)
    return figure


def draw_map() -> Any:
    """Which thread has which elements of a row: three row lengths of bfloat16."""
    lengths = (64, 256, 1024)
    figure, every = figures.make_axes(4.6, len(lengths))
    colors = (
        figures.BLUE,
        figures.RED,
        figures.GREEN,
        "#cc79a7",
        "#e69f00",
        figures.SKY,
        "#666666",
        "#8c6d31",
    )
    for axes, n in zip(every, lengths, strict=True):
        threads, in_hand = make_kernel(n, bfloat16).row_threads, make_kernel(n, bfloat16).slots
        shown = min(in_hand, 4)
        # `column` of layer_norm.cu, inverted: vectors of 8 elements, a row of threads apart.
        thread = np.arange(shown)[:, None] * threads + np.arange(n) // 8 % threads
        # Colour: the warp; shade: even and odd lanes.
        paint = np.array([to_rgb(color) for color in colors])[thread // 32 % len(colors)]
        paint = np.where((thread % 2 == 0)[..., None], paint, 0.45 + 0.55 * paint)
        axes.imshow(paint, aspect="auto", interpolation="nearest")
        rows = f"{in_hand} rows per block" if in_hand > 1 else "one row per block"
        per_row = "one warp" if threads == 32 else f"{threads} threads"
        axes.set_title(f"n = {n}: {per_row} per row, {rows} (the first {shown})")
        axes.set_yticks(range(shown), [f"row {r}" for r in range(shown)])
    axes.set_xlabel("column; a colour is a warp, a shade the 16 bytes of a thread")
    return figure


def draw_butterfly() -> Any:
    """A row sum in three exchanges of eight lanes."""
    figure, axes = figures.make_axes(2.7)
    values = np.array([3.0, 1, 4, 1, 5, 9, 2, 6])
    for level, step in enumerate((4, 2, 1, 0)):
        partner = np.arange(8) ^ step
        for lane, value in enumerate(values):
            circle = {"boxstyle": "circle", "fc": "white", "ec": figures.BLUE}
            place = {"ha": "center", "va": "center", "fontsize": figures.SMALL, "zorder": 3}
            axes.text(lane, -level, f"{value:g}", bbox=circle, **place)
            if step:
                color = figures.SKY if lane < partner[lane] else figures.RED
                down = [-level, -level - 1]
                axes.plot([partner[lane], lane], down, color=color, lw=1.2, zorder=1)
                axes.plot([lane, lane], down, color=figures.GRAY, lw=0.9, zorder=1)
        if step:
            axes.text(
                7.6, -level - 0.5, f"with\nlane ^ {step}", va="center", fontsize=figures.SMALL
            )
            values = values + values[partner]
    axes.set(xlim=(-0.5, 8.9), ylim=(-3.4, 0.4))
    axes.set_axis_off()
    return figure


def main() -> None:
    """Write the tables, and draw."""
    put(DOCS / "explanation" / "fusing.md", tables(), __file__)
    for draw in (draw_traffic, draw_map, draw_butterfly):
        figures.save(draw(), f"fusing_{draw.__name__.removeprefix('draw_')}.png")


if __name__ == "__main__":
    main()
