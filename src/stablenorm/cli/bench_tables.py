"""Table, file and picture of what `stablenorm bench` measured."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import numpy as np

import stablenorm
from stablenorm.cli.bench_measure import Bench, Row
from stablenorm.cli.tables import _NARROW, _table

# One colour a backend, light for fresh outputs; readable without colour vision.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def print_bench(bench: Bench, console: Any) -> None:
    """Print the table of one run to a rich console."""
    narrow = console.width < _NARROW
    which = ("x",) if narrow else ("shape", "dtype", "direction")
    figures = ("backend", "outputs", "time", "GB/s", "of copy")
    table = _table("Medians of interleaved calls", narrow, *which, *figures)
    before = None
    for row in bench.rows:
        problem = (_shape(row), row.dtype, row.direction)
        if before is not None and problem != before:
            table.add_section()
        # Three columns would leave no room for the last.
        once = (f"{problem[0]}\n{row.dtype} {row.direction}" if problem != before else "",)
        before = problem
        table.add_row(
            *(once if narrow else problem),
            row.backend,
            row.outputs,
            _seconds(row.timing.median),
            f"{row.bytes_a_second / 1e9:.2f}",
            f"{row.of_copy:.2f}",
        )
    console.print(table)
    console.print(_notes(bench), highlight=False)


def save_bench(bench: Bench, file: Any) -> None:
    """Write all figures as JSON into an open file, with what they were measured on."""
    content = {
        "stablenorm": stablenorm.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": bench.threads,
        "copy_bytes_a_second": bench.copy,
        "rows": [_record(row) for row in bench.rows],
    }
    file.write((json.dumps(content, indent=1) + "\n").encode())


def plot_bench(bench: Bench, file: Any, format_: str) -> None:
    """Draw GB/s of every backend and shape beside the copy, into an open file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    groups = list(dict.fromkeys((_shape(row), row.dtype) for row in bench.rows))
    kinds = list(dict.fromkeys((row.backend, row.outputs) for row in bench.rows))
    # Half an inch a group for up to four bars, and room for title, labels and legend.
    figure = Figure(figsize=(9, 2 + 0.55 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(kinds)
    for axes, direction in zip(every, ("forward", "backward"), strict=True):
        for i, (backend, outputs) in enumerate(kinds):
            rows = [
                row
                for row in bench.rows
                if (row.direction, row.backend, row.outputs) == (direction, backend, outputs)
            ]
            backends = list(dict.fromkeys(name for name, _ in kinds))
            axes.barh(
                [groups.index((_shape(row), row.dtype)) - 0.4 + (i + 0.5) * height for row in rows],
                [row.bytes_a_second / 1e9 for row in rows],
                height=0.9 * height,
                color=_COLORS[backends.index(backend) % len(_COLORS)],
                alpha=1 if outputs == "out=" else 0.45,
                label=f"{backend}, {outputs}",
            )
        axes.axvline(bench.copy / 1e9, color="0.2", lw=1, ls="--", label="copy of 256 MiB")
        axes.set(xlabel="GB/s", title=direction)
        axes.grid(alpha=0.25, axis="x")
        axes.set_axisbelow(True)
    every[0].set_yticks(range(len(groups)), [f"{shape}\n{dtype}" for shape, dtype in groups])
    # Once for both, which share the axis: the first group on top.
    every[0].set_ylim(len(groups) - 0.5, -0.5)
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, format=format_, dpi=120)


def _notes(bench: Bench) -> str:
    fewest = min(row.timing.rounds for row in bench.rows)
    copied = (
        f"{bench.threads} threads; a copy of 256 MiB moves {bench.copy / 1e9:.1f} GB/s here, "
        "measured before and after: of copy is relative to the faster."
    )
    counted = (
        "fresh: results in new arrays; out=: in arrays that exist already. GB/s counts x and y in "
        "the forward, dy, x and dx in the backward."
    )
    lines = [copied, counted]
    if fewest < 3:
        lines.append("Some calls are so long that they were timed once or twice only.")
    return "\n".join(lines)


def _record(row: Row) -> dict[str, Any]:
    return {
        "shape": row.shape,
        "dtype": row.dtype,
        "direction": row.direction,
        "backend": row.backend,
        "outputs": row.outputs,
        "seconds": row.timing.median,
        "quartiles": (row.timing.low, row.timing.high),
        "rounds": row.timing.rounds,
        "calls_a_round": row.timing.calls,
        "bytes_a_second": row.bytes_a_second,
        "of_copy": row.of_copy,
    }


def _shape(row: Row) -> str:
    return " x ".join(map(str, row.shape))


def _seconds(seconds: float) -> str:
    """Three digits, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
