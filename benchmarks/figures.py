"""The two pictures: throughput over n, and throughput over size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cases import OURS, OURS_OUT, Record
from figures_page import LARGE, make_axes, put_legend, save

from stablenorm._bench import PASSES, type_of

# Told apart without colour too, by their markers.
STYLES = {
    OURS_OUT: ("#0072b2", "o", "-"),
    OURS: ("#56b4e9", "s", "-"),
    "PyTorch": ("#d55e00", "^", "-"),
}


def draw_length(records: Sequence[Record], path: Path, words: str) -> None:
    """GB/s over n, at constant size."""
    shown = [record for record in records if record.suite == "n"]
    _draw(shown, path, "n, elements per row", lambda r: r.shape[-1], f"256 MiB of float32; {words}")


def draw_size(records: Sequence[Record], path: Path, words: str) -> None:
    """GB/s over the size of x, at n = 1024."""
    shown = [record for record in records if record.suite == "rows"]
    _draw(
        shown,
        path,
        "size of x",
        lambda r: math.prod(r.shape) * type_of(r.dtype).itemsize,
        f"n = 1024, float32; {words}",
        bytes_below=True,
    )


def _draw(
    records: list[Record],
    path: Path,
    label: str,
    where: Callable[[Record], int],
    title: str,
    bytes_below: bool = False,
) -> None:
    figure, every = make_axes(6.6, 2)
    every[1].sharey(every[0])
    for axes, direction in zip(every, PASSES, strict=True):
        here = [record for record in records if record.direction == direction]
        for candidate, (color, marker, line) in STYLES.items():
            points = sorted((where(r), r.speed / 1e9, r) for r in here if r.candidate == candidate)
            axes.plot(
                [x for x, *_ in points],
                [y for _, y, _ in points],
                line,
                color=color,
                marker=marker,
                ms=4,
                lw=1.5,
                label=candidate if candidate != OURS else f"{OURS}, fresh outputs",
            )
        _copy_line(axes, here, where)
        axes.set_xscale("log", base=2)
        _name_powers(axes, {where(record) for record in here}, bytes_below)
        axes.set(ylabel="GB/s", ylim=(0, None))
        axes.grid(alpha=0.25)
        moved = "x, y" if direction == "forward" else "dy, x, dx"
        axes.set_title(f"{direction}; counted: {moved}")
    every[-1].set_xlabel(label)
    put_legend(figure, every[0])
    figure.suptitle(title, fontsize=LARGE)
    save(figure, path)


def _copy_line(axes: Any, here: Iterable[Record], where: Callable[[Record], int]) -> None:
    """Draw what each fraction is relative to: a line, since the machine is not always as fast."""
    copies = sorted({where(record): record.copy for record in here}.items())
    axes.plot(
        [x for x, _ in copies],
        [copy / 1e9 for _, copy in copies],
        "--",
        color="0.25",
        lw=1.2,
        label="plain copy of memory",
    )


def _name_powers(axes: Any, values: set[int], bytes_below: bool) -> None:
    """Mark every second or fourth power of two, as numbers that a person reads."""
    powers = [value for value in sorted(values) if value & (value - 1) == 0]
    shown = powers[:: 1 if len(powers) < 8 else 3 if bytes_below else 2]
    axes.set_xticks(shown, [size_words(v) if bytes_below else str(v) for v in shown])
    axes.tick_params(axis="x", rotation=0 if bytes_below else 45)
    axes.minorticks_off()


def size_words(nbytes: float) -> str:
    """Bytes in binary units, three digits."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.3g} {unit}"
    return f"{nbytes:.0f} B"
