"""The two pictures of docs/evidence/performance.md: throughput over n, and throughput over size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cases import OURS, OURS_OUT, Record
from figures_page import LARGE, make_axes, put_legend, save
from page import byte_words

from stablenorm.cli.bench import PASSES

# Told apart without colour too, by their markers.
STYLES = {
    OURS_OUT: ("stablenorm, out=", "#0072b2", "o"),
    OURS: ("stablenorm", "#56b4e9", "s"),
    "PyTorch": ("PyTorch", "#d55e00", "^"),
}


def draw_length(records: Sequence[Record], path: Path, words: str) -> None:
    """GB/s over n, at constant size."""
    here = [record for record in records if record.suite == "n"]
    _draw(here, path, "n, elements per row", lambda r: r.shape[-1], str, f"256 MiB; {words}")


def draw_size(records: Sequence[Record], path: Path, words: str) -> None:
    """GB/s over the size of x, at n = 1024."""
    here = [record for record in records if record.suite == "rows"]
    _draw(here, path, "size of x", lambda r: r.nbytes, byte_words, f"n = 1024; {words}")


def _draw(
    records: list[Record],
    path: Path,
    label: str,
    where: Callable[[Record], int],
    name: Callable[[int], str],
    title: str,
) -> None:
    figure, every = make_axes(6.6, 2)
    every[1].sharey(every[0])
    for axes, direction in zip(every, PASSES, strict=True):
        here = sorted((r for r in records if r.direction == direction), key=where)
        for candidate, (words, color, marker) in STYLES.items():
            line = [(where(r), r.speed / 1e9) for r in here if r.candidate == candidate]
            axes.plot(*zip(*line, strict=True), color=color, marker=marker, ms=4, label=words)
        # A line, since the machine is not always as fast.
        copies = sorted({where(r): r.copy / 1e9 for r in here}.items())
        axes.plot(*zip(*copies, strict=True), "--", color="0.25", lw=1.2, label="copy of memory")
        axes.set_xscale("log", base=2)
        powers = [v for v in sorted({where(r) for r in here}) if v & (v - 1) == 0]
        axes.set_xticks(powers[::2], [name(v) for v in powers[::2]])
        axes.minorticks_off()
        axes.set(ylabel="GB/s", ylim=(0, None))
        axes.grid(alpha=0.25)
        moved = "x, y" if direction == "forward" else "dy, x, dx"
        axes.set_title(f"{direction}; counted: {moved}")
    every[-1].set_xlabel(label)
    put_legend(figure, every[0])
    figure.suptitle(f"float32, {title}", fontsize=LARGE)
    save(figure, path)
