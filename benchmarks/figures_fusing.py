"""
The pictures of docs/explanation/fusing.md, from the counts of fusing_counts.py.

Stills with Matplotlib; and one drawing in four steps, as SVG, that moves unless the reader's system
asks for less motion: then, and wherever styles are not run, all of its steps are seen at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from figures_page import (
    BLUE,
    FIGURES,
    GRAY,
    GREEN,
    RED,
    SKY,
    SMALL,
    make_axes,
    put_legend,
    save,
)
from fusing_counts import ROWS, N, count_stages, count_tail, make_kernel
from matplotlib.colors import to_rgb

from stablenorm.types import bfloat16

WARPS = (BLUE, RED, GREEN, "#cc79a7", "#e69f00", SKY, "#666666", "#8c6d31")
OWNERS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7")


def draw_traffic(path: Path) -> None:
    """Arrays of the size of x that move, by stage."""
    stages = count_stages()[::-1]
    figure, axes = make_axes(2.9)
    places = np.arange(len(stages))
    reads, writes = [s.reads for s in stages], [s.writes for s in stages]
    axes.barh(places, reads, color=SKY, label="read")
    axes.barh(places, writes, left=reads, color=BLUE, label="written")
    for place, stage in zip(places, stages, strict=True):
        launches = "1 launch" if stage.launches == 1 else f"{stage.launches} launches"
        axes.text(stage.reads + stage.writes + 0.2, place, launches, va="center", fontsize=SMALL)
    axes.axvline(3, color=GRAY, lw=0.9, ls="--")
    axes.set_yticks(places, [s.name for s in stages])
    axes.set(xlabel="arrays of the size of x moved through memory", xlim=(0, 28))
    put_legend(figure, axes)
    save(figure, path)


def draw_map(path: Path) -> None:
    """Which thread has which elements of a row: three row lengths of bfloat16."""
    lengths = (64, 256, 1024)
    figure, every = make_axes(4.6, len(lengths))
    for axes, n in zip(every, lengths, strict=True):
        kernel = make_kernel(n, bfloat16)
        threads, in_hand = kernel.row_threads, kernel.slots
        columns = np.arange(n)
        # `column` of layer_norm.cu, inverted: vectors of 8 elements, a row of threads apart.
        owner = columns // 8 % threads
        shown = min(in_hand, 4)
        warps = (np.arange(shown)[:, None] * threads + owner) // 32
        lanes = (np.arange(shown)[:, None] * threads + owner) % 32
        # Colour: the warp; shade: even and odd lanes.
        paint = np.array([to_rgb(color) for color in WARPS])[warps % len(WARPS)]
        paint = np.where((lanes % 2 == 0)[..., None], paint, 0.45 + 0.55 * paint)
        axes.imshow(paint, aspect="auto", interpolation="nearest")
        rows = f"{in_hand} rows per block" if in_hand > 1 else "one row per block"
        per_row = "one warp" if threads == 32 else f"{threads} threads"
        axes.set_title(f"n = {n}: {per_row} per row, {rows} (the first {shown})")
        axes.set_yticks(range(shown), [f"row {r}" for r in range(shown)])
    axes.set_xlabel("column; a colour is a warp, a shade the 16 bytes of a thread")
    save(figure, path)


def draw_butterfly(path: Path) -> None:
    """A row sum in three exchanges of eight lanes."""
    figure, axes = make_axes(2.7)
    lanes, steps = 8, (4, 2, 1)
    values = np.array([3.0, 1, 4, 1, 5, 9, 2, 6])
    for level in range(len(steps) + 1):
        for lane in range(lanes):
            axes.text(
                lane, -level, f"{values[lane]:g}", ha="center", va="center", fontsize=SMALL, zorder=3,
                bbox={"boxstyle": "circle", "fc": "white", "ec": BLUE},
            )  # fmt: skip
        if level < len(steps):
            partner = np.arange(lanes) ^ steps[level]
            for lane in range(lanes):
                style = {"color": SKY if lane < partner[lane] else RED, "lw": 1.2, "zorder": 1}
                axes.plot([partner[lane], lane], [-level, -level - 1], **style)
                axes.plot([lane, lane], [-level, -level - 1], color=GRAY, lw=0.9, zorder=1)
            axes.text(
                7.6, -level - 0.5, f"with\nlane ^ {steps[level]}", va="center", fontsize=SMALL
            )
            values = values + values[partner]
    axes.set(xlim=(-0.5, 8.9), ylim=(-3.4, 0.4))
    axes.set_axis_off()
    save(figure, path)


def draw_tail(path: Path) -> None:
    """How long the final sum takes beside the body, by one block and by all."""
    figure, axes = make_axes(2.2)
    counted = count_tail(ROWS, N, bfloat16)
    body = counted["body"] * 1e6
    for place, (words, key, color) in enumerate(
        (
            ("all blocks,\nafter a barrier", "all blocks", GREEN),
            ("the last\nblock", "one block", RED),
        )
    ):
        tail = counted[key] * 1e6
        axes.barh(place, body, color=SKY)
        axes.barh(place, tail, left=body, color=color)
        axes.text(body + tail + 2, place, f"+ {tail:.0f} us", va="center", fontsize=SMALL)
        words_of_body = "rows: dx,\npartial sums"
        axes.text(body / 2, place, words_of_body, ha="center", va="center", fontsize=SMALL)
        axes.text(-3, place, f"sum by\n{words}", ha="right", va="center", fontsize=SMALL)
    axes.set(
        xlabel=f"us, at least: ({ROWS}, {N}) bfloat16, H100, calculated", xlim=(0, 255), yticks=[]
    )
    save(figure, path)


# ---- the drawing that moves ----

CELL, COLUMNS, CHUNKS, CHUNK_ROWS = 22, 12, 4, 2
# Parts of a turn of the animation at which each step begins, in percent; a turn is 12 seconds.
ROWS_BEGIN, PARTIALS_BEGIN, BARRIER_BEGINS = (4, 12, 20, 28), (10, 18, 26, 34), 46
SUMS_BEGIN = (54, 60, 66, 72)
STYLE = """
 text { font: 13px sans-serif; fill: #222 }
 .small { font-size: 11px; fill: #555 }
 @media (prefers-reduced-motion: no-preference) {
  .step { animation-duration: 12s; animation-iteration-count: infinite; animation-timing-function: steps(1, end) }
%s
 }
"""


def draw_steps(path: Path) -> None:
    """Chunks of rows, their partial sums, the barrier, and the columns shared by all blocks."""
    begins = sorted({*ROWS_BEGIN, *PARTIALS_BEGIN, BARRIER_BEGINS, *SUMS_BEGIN})
    frames = "\n".join(
        f"  @keyframes at{b} {{ 0% {{ opacity: 0.1 }} {b}% {{ opacity: 1 }} 100% {{ opacity: 1 }} }}\n"
        f"  .at{b} {{ animation-name: at{b} }}"
        for b in begins
    )
    width, height = 640, 410
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-labelledby="title">'
        ),
        (
            '<title id="title">The backward in one launch: each block goes through its chunks of rows, '
            "stores a partial sum, waits at the barrier, then adds up a share of the columns</title>"
        ),
        f"<style>{STYLE % frames}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_chunks(),
        *_partials(),
        *_barrier(),
        *_sums(),
        "</svg>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf8")


LEFT = 150


def _group(begin: int, *content: str) -> str:
    return f'<g class="step at{begin}">' + "".join(content) + "</g>"


def _cell(column: int, top: float, color: str) -> str:
    return (
        f'<rect x="{LEFT + column * CELL}" y="{top}" width="{CELL - 2}" height="{CELL - 2}" '
        f'fill="{color}"/>'
    )


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}"{style}>{words}</text>'


def _chunks() -> list[str]:
    small = ' class="small"'
    parts = [_text(10, 22, "1. each block takes its chunks of rows")]
    for chunk, begin in enumerate(ROWS_BEGIN):
        top = 34 + chunk * CHUNK_ROWS * CELL
        cells = "".join(
            _cell(c, top + r * CELL, OWNERS[chunk])
            for r in range(CHUNK_ROWS)
            for c in range(COLUMNS)
        )
        words = _text(30, top + CELL + 3, f"chunk {chunk}", small)
        aside = _text(
            LEFT + COLUMNS * CELL + 12, top + CELL + 3, "x and dy read once, dx written", small
        )
        parts.append(_group(begin, cells, words, aside))
    return parts


def _partials() -> list[str]:
    top = 34 + CHUNKS * CHUNK_ROWS * CELL + 30
    parts = [_text(10, top - 10, "2. and stores one row of partial sums for each chunk")]
    for chunk, begin in enumerate(PARTIALS_BEGIN):
        cells = "".join(_cell(c, top + chunk * CELL, OWNERS[chunk]) for c in range(COLUMNS))
        parts.append(
            _group(
                begin,
                cells,
                _text(30, top + chunk * CELL + 15, f"partial {chunk}", ' class="small"'),
            )
        )
    return parts


def _barrier() -> list[str]:
    top = 34 + CHUNKS * CHUNK_ROWS * CELL + 30 + CHUNKS * CELL + 14
    line = (
        f'<line x1="{LEFT - 8}" y1="{top}" x2="{LEFT + COLUMNS * CELL + 8}" y2="{top}" '
        'stroke="#d55e00" stroke-width="3"/>'
    )
    return [_group(BARRIER_BEGINS, line, _text(10, top + 5, "3. all blocks meet"))]


def _sums() -> list[str]:
    top = 34 + CHUNKS * CHUNK_ROWS * CELL + 30 + CHUNKS * CELL + 50
    share = COLUMNS // CHUNKS
    parts = [
        _text(
            10, top - 8, "4. every block adds up a share of the columns, in the order of the chunks"
        )
    ]
    for block, begin in enumerate(SUMS_BEGIN):
        cells = "".join(
            _cell(c, top, OWNERS[block]) for c in range(block * share, (block + 1) * share)
        )
        parts.append(_group(begin, cells))
    parts.append(_text(30, top + 15, "dgamma, dbeta", ' class="small"'))
    return parts


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "fusing_traffic.png": draw_traffic,
    "fusing_map.png": draw_map,
    "fusing_butterfly.png": draw_butterfly,
    "fusing_tail.png": draw_tail,
    "fusing_steps.svg": draw_steps,
}


def main() -> None:
    """Draw all."""
    for name, draw in DRAWINGS.items():
        draw(FIGURES / name)
        print(f"docs/figures/{name}")


if __name__ == "__main__":
    main()
