"""
Flops, bytes and times of three layer norms, into docs/explanation/complexity.md, and the roofline.

Measures as `stablenorm complexity` does, on arrays beyond the caches: `make complexity`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import figures
import numpy as np
from page import DOCS, origin, origin_line, put, table

from stablenorm import get_num_threads
from stablenorm.cost import (
    DIRECTIONS,
    Measured,
    count_cost,
    count_kept,
    draw_roofline,
    measure_costs,
)

# 64 MiB each: twice the largest last-level cache that this has run on.
MATRICES = {"float32": (16384, 1024), "bfloat16": (32768, 1024), "float64": (8192, 1024)}


def main() -> None:
    """Measure, and write the page."""
    found = []
    for dtype, matrix in MATRICES.items():
        print(f"{dtype} ...", file=sys.stderr, flush=True)
        found.append(measure_costs(matrix, dtype, get_num_threads()))
    first = found[0]
    figure, axes = figures.make_axes(4.6)
    draw_roofline(first, axes)
    figures.put_legend(figure, axes)
    figure.suptitle(shape(first), fontsize=figures.LARGE)
    figures.save(figure, "roofline.png")
    parts = {"times": times(found), "kept": kept(first), "rebuilt": rebuilt(first)}
    put(DOCS / "explanation" / "complexity.md", parts, __file__)


def shape(measured: Measured) -> str:
    """Say what was measured."""
    return f"{measured.matrix[0]} x {measured.matrix[1]} {measured.dtype}"


def times(found: Sequence[Measured]) -> str:
    """Say what each program takes, beside what the roofline allows."""
    head = ("x", "program", "flops per element", "bytes per element", "roofline", "measured",
            "measured / roofline")  # fmt: skip
    body, ratios, rates = [], [], []
    for each in found:
        size = each.matrix[0] * each.matrix[1]
        for line in each.lines:
            spent = line.measured.median
            counts = f"{line.cost.flops / size:.0f}", f"{line.cost.moved / size:.1f}"
            both = f"{1e3 * line.predicted:.1f} ms", f"{1e3 * spent:.1f} ms"
            name = f"{line.program}, {line.direction}"
            body.append((shape(each), name, *counts, *both, f"{spent / line.predicted:.1f}"))
        for direction in DIRECTIONS:
            medians = [o.measured.median for o in each.lines if o.direction == direction]
            ratios.append(max(medians) / min(medians))
        rate = [
            f"{roof.copy / 1e9:.1f} GB/s, {roof.flops / 1e9:.0f} Gflop/s with {count}"
            for roof, count in ((each.one_thread, "one thread"), (each.all_threads, "all"))
        ]
        rates.append(f"{each.dtype}, {' and '.join(rate)}")
    return "\n\n".join([
        origin_line("make complexity", origin()),
        f"The slowest takes {min(ratios):.0f} to {max(ratios):.0f} times as long as the fastest.",
        table(head, body),
        f"Copy and arithmetic: {'; '.join(rates)}.",
    ])  # fmt: skip


def kept(first: Measured) -> str:
    """List what a backward could be handed."""
    sizes = count_kept(first.matrix, first.dtype).items()
    body = [(what, f"{size / 1e6:.3g} MB") for what, size in sizes]
    return table(("kept, beside x and gamma", shape(first)), body)


def rebuilt(first: Measured) -> str:
    """Compare rebuilding xhat from x with writing it in the forward and reading it again."""
    size = first.matrix[0] * first.matrix[1]
    forward, backward = (
        count_cost("fused CPU kernel", direction, first.matrix, first.dtype).moved / size
        for direction in DIRECTIONS
    )
    # The forward writes xhat in float64 as well; the backward reads it in the place of x.
    keeping = (forward + 8, backward + 8 - np.dtype(first.dtype).itemsize)
    copied = 1e3 * size / first.all_threads.copy
    return (
        f"For {shape(first)} a fused kernel that rebuilds xhat moves {forward:.1f} + {backward:.1f} "
        f"bytes per element, {copied * (forward + backward):.1f} ms of the copy measured here; one "
        f"that keeps it in float64 moves {keeping[0]:.1f} + {keeping[1]:.1f}, "
        f"{copied * sum(keeping):.1f} ms: {sum(keeping) / (forward + backward):.2f} times as long."
    )


if __name__ == "__main__":
    main()
