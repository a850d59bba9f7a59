"""Tables, file and pictures of what `stablenorm complexity` found."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import numpy as np

import stablenorm
from stablenorm._complexity import Complexity, Line, is_a_row_a_lane
from stablenorm.analysis._counts import bytes_formula, flops_formula
from stablenorm.analysis.complexity import DIRECTIONS
from stablenorm.report import _NARROW, _table

# One colour an implementation, told apart by their markers as well.
_STYLES = {
    "plain NumPy": ("#d55e00", "^"),
    "reference": ("#009e73", "s"),
    "fused CPU": ("#0072b2", "o"),
}
_DIRECTION_LINES = {"forward": "-", "backward": "--"}


def print_complexity(found: Complexity, console: Any, *, terms: bool = False) -> None:
    """Print the tables to a rich console; with `terms` also every step of each implementation."""
    narrow = console.width < _NARROW
    rows, n = found.matrix
    console.print(
        f"[bold]x {found.shape} {found.dtype}[/bold]: rows {rows}, n {n}, {found.threads} threads",
        highlight=False,
    )
    tables = [_counts_table(found, narrow), _times_table(found, narrow)]
    tables += [_saved_table(found, narrow), _growth_table(found, narrow)]
    if terms:
        tables += [_terms_table(line, narrow) for line in found.lines]
    for table in tables:
        console.print(table)
    console.print(_notes(found), highlight=False)


def save_complexity(found: Complexity, file: Any) -> None:
    """Write all figures as JSON into an open file."""
    content = {
        "stablenorm": stablenorm.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": found.threads,
        "shape": found.shape,
        "dtype": found.dtype,
        "beyond_caches": found.beyond_caches,
        "ceilings": {
            "threads": found.fused._asdict(),
            "one_thread": found.one_thread._asdict(),
            "flops_float32": found.flops_float32,
        },
        "implementations": [
            _record(line, is_a_row_a_lane(line.direction, found.matrix[1], found.dtype))
            for line in found.lines
        ],
        "saved": [
            {"what": what, "formula": formula, "bytes": size} for what, formula, size in found.saved
        ],
        "sweep": [point._asdict() for point in found.points],
        "exponents": [growth._asdict() for growth in found.growth],
    }
    file.write((json.dumps(content, indent=1) + "\n").encode())


def plot_complexity(found: Complexity, file: Any, format_: str) -> None:
    """Draw the roofline and the growth side by side, into an open file."""
    figure = _figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    draw_roofline(found, left)
    draw_growth(found, right)
    figure.suptitle(_title(found), fontsize=11)
    figure.savefig(file, format=format_, dpi=120)


def plot_one(found: Complexity, draw: Any, file: Any, format_: str) -> None:
    """Draw one of the two alone, into an open file."""
    figure = _figure(7, 4.6)
    draw(found, figure.subplots())
    figure.suptitle(_title(found), fontsize=10)
    figure.savefig(file, format=format_, dpi=120)


def draw_roofline(found: Complexity, axes: Any) -> None:
    """Flops a second over flops a byte, below the ceilings of this machine."""
    measured = [(line, line.measured) for line in found.lines if line.measured is not None]
    memory, flops = found.fused.memory, found.fused.flops
    least = min(line.intensity for line, _ in measured) / 2
    most = max(*(line.intensity for line, _ in measured), flops / memory) * 4
    grid = np.geomspace(least, most, 200)
    roof = f"copy {memory / 1e9:.3g} GB/s, multiply-adds {flops / 1e9:.3g} Gflop/s"
    axes.plot(grid, np.minimum(grid * memory, flops) / 1e9, color="0.2", lw=1.5, label=roof)
    if found.flops_float32 > flops:
        far = np.geomspace(flops / memory, most, 50)
        label = f"multiply-adds in float32: {found.flops_float32 / 1e9:.3g} Gflop/s"
        roof32 = np.minimum(far * memory, found.flops_float32) / 1e9
        axes.plot(far, roof32, ":", color="0.5", lw=1, label=label)
    for line, timing in measured:
        color, marker = _STYLES[line.implementation]
        speed = line.cost.flops / timing.median / 1e9
        filled = color if line.direction == "forward" else "none"
        axes.plot(
            line.intensity, speed, marker, ms=8, color=color, mfc=filled, ls="none",
            label=f"{line.implementation}, {line.direction}",
        )  # fmt: skip
        if line.predicted is not None:
            predicted = line.cost.flops / line.predicted.seconds / 1e9
            axes.plot(line.intensity, predicted, "_", ms=14, mew=2, color=color)
    axes.set(
        xscale="log", yscale="log", xlabel="flops a byte that memory must move", ylabel="Gflop/s",
        title="Roofline; a bar is what is predicted",
    )  # fmt: skip
    axes.grid(alpha=0.25, which="major")
    axes.legend(fontsize=7, loc="lower right")


def draw_growth(found: Complexity, axes: Any) -> None:
    """Time of the fused CPU kernel over the elements, as rows or as n grow."""
    for along, color in (("rows", "#0072b2"), ("n", "#d55e00")):
        for direction, style in _DIRECTION_LINES.items():
            here = [p for p in found.points if (p.along, p.direction) == (along, direction)]
            sizes = [p.rows * p.n for p in here]
            exponent = next(
                g.measured for g in found.growth if (g.along, g.direction) == (along, direction)
            )
            fitted = "" if exponent is None else f": {along}^{exponent:.2f}"
            axes.plot(
                sizes, [p.measured * 1e3 for p in here], "o", ls=style, color=color, ms=4,
                label=f"{direction}{fitted}",
            )  # fmt: skip
            axes.plot(sizes, [p.predicted * 1e3 for p in here], "_", ms=12, mew=1.5, color=color)
    axes.set(
        xscale="log", yscale="log", xlabel="elements of x", ylabel="milliseconds",
        title="Growth of the fused CPU kernel with rows (blue) and n",
    )  # fmt: skip
    shown = sorted({p.rows * p.n for p in found.points})
    axes.set_xticks(shown, [count_words(size) for size in shown])
    axes.minorticks_off()
    axes.grid(alpha=0.25, which="major")
    axes.legend(fontsize=8)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _title(found: Complexity) -> str:
    shape = " x ".join(map(str, found.shape))
    where = "beyond the caches" if found.beyond_caches else "within the caches"
    return f"{shape} {found.dtype}, {found.threads} threads, {where}"


# ---- tables ----


def _counts_table(found: Complexity, narrow: bool) -> Any:
    columns = ["", "flops", "an element", "memory", "flops a byte", "held"]
    if not narrow:
        columns[4:4] = ["moved"]
    table = _table("What it does and moves: counted", narrow, *columns)
    size = found.matrix[0] * found.matrix[1]
    for line in found.lines:
        cells = [
            _name(line, narrow),
            count_words(line.cost.flops),
            f"{line.cost.flops / size:.1f}",
            byte_words(line.cost.memory),
            f"{line.intensity:.2f}",
            byte_words(line.held[1]),
        ]
        if not narrow:
            cells[4:4] = [byte_words(line.cost.moved) if line.cost.moved else "not counted"]
        table.add_row(*cells)
    return table


def _times_table(found: Complexity, narrow: bool) -> Any:
    columns = ["", "predicted", "measured", "off by"]
    if not narrow:
        columns[1:1] = ["memory", "arithmetic"]
    table = _table("How long: predicted from that, and measured", narrow, *columns)
    for line in found.lines:
        if line.predicted is None or line.measured is None:
            continue
        cells = [
            _name(line, narrow),
            time_words(line.predicted.seconds),
            time_words(line.measured.median),
            f"{line.deviation:+.0%}",
        ]
        if not narrow:
            cells[1:1] = [time_words(line.predicted.memory), time_words(line.predicted.arithmetic)]
        table.add_row(*cells)
    return table


def _saved_table(found: Complexity, narrow: bool) -> Any:
    table = _table("Kept from forward to backward, beside x", narrow, "what", "formula", "bytes")
    for what, formula, size in found.saved:
        table.add_row(what, formula, byte_words(size))
    return table


def _growth_table(found: Complexity, narrow: bool) -> Any:
    table = _table(
        "Growth: exponents",
        narrow,
        "with",
        "direction",
        "measured",
        "predicted",
    )
    for growth in found.growth:
        cells = (
            "-" if value is None else f"{value:.2f}"
            for value in (growth.measured, growth.predicted)
        )
        table.add_row(growth.along, growth.direction, *cells)
    return table


def _terms_table(line: Line, narrow: bool) -> Any:
    columns = ["step", "flops"] if narrow else ["step", "flops", "=", "bytes", "="]
    table = _table(f"{line.implementation}, {line.direction}: every step", narrow, *columns)
    for term, cost in line.terms:
        cells = [term.name, flops_formula(term)]
        if not narrow:
            cells += [count_words(cost.flops), bytes_formula(term), byte_words(cost.moved)]
        table.add_row(*cells)
    return table


_GPU = (
    "The GPU column is counted, as launched on an H100 in float64 arithmetic, and not measured here; "
    "its kernel for float64, in pairs, is not counted."
)


def _notes(found: Complexity) -> str:
    fused = found.fused
    ceilings = (
        f"Ceilings, measured in turn with the implementations, {found.threads} threads: copy "
        f"{fused.memory / 1e9:.1f} GB/s; multiply-adds {fused.flops / 1e9:.0f} Gflop/s in float64, "
        f"{found.flops_float32 / 1e9:.0f} in float32; {found.dtype} read {fused.loads / 1e9:.1f} "
        f"and written {fused.stores / 1e9:.1f} thousand million elements a second in the first cache."
    )
    words = (
        "memory: bytes that memory must move if arrays are larger than the caches; held: new bytes "
        "at the worst moment. The fused kernel: the longer of memory and arithmetic, which go on "
        "at once. The others: pass after pass in one thread, page faults of new arrays not predicted."
    )
    lines = [ceilings, words, _GPU]
    if not found.beyond_caches:
        lines.append(
            "x fits the last-level cache: copies of it do as well, and the prediction is rougher."
        )
    return "\n".join([*lines, *short_rows(found)])


def short_rows(found: Complexity) -> list[str]:
    """Say, if so, that the fused CPU kernel is not the one that the model counts."""
    n, dtype = found.matrix[1], found.dtype
    short = [way for way in DIRECTIONS if is_a_row_a_lane(way, n, dtype)]
    if not short:
        return []
    words = (
        f"Rows as short as {n} go through another kernel, a row a lane ({' and '.join(short)}): "
        "what is counted and predicted for the fused CPU kernel is that for longer rows, what is "
        "measured is not."
    )
    return [words]


def _name(line: Line, narrow: bool) -> str:
    return f"{line.implementation}, {line.direction[:4] if narrow else line.direction}"


def _record(line: Line, short: bool) -> dict[str, Any]:
    measured = line.measured
    return {
        "implementation": line.implementation,
        "direction": line.direction,
        "cost": line.cost._asdict() | {"flops": line.cost.flops, "moved": line.cost.moved},
        "held": {"formula": line.held[0], "bytes": line.held[1]},
        "intensity": line.intensity,
        "predicted": None if line.predicted is None else line.predicted._asdict(),
        "measured": None if measured is None else measured._asdict(),
        "deviation": line.deviation,
        # False where the kernel that was measured is not the one that was counted.
        "counted_is_measured": line.implementation != "fused CPU" or not short,
        "terms": [
            {"formulas": term._asdict(), "values": cost._asdict()} for term, cost in line.terms
        ],
    }


def count_words(count: float) -> str:
    """Three digits, in thousands of thousands."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def byte_words(size: float) -> str:
    """Three digits, in the unit that fits."""
    return f"{count_words(size)}B" if size >= 1e3 else f"{size:.0f} B"


def time_words(seconds: float) -> str:
    """Three digits, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
