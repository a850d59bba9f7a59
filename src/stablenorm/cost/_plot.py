"""The roofline: flops per second over flops per byte, of what was measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm.cost._measure import Measured
from stablenorm.figures import COLORS

# A color and a marker for each program.
_STYLES = {
    "plain NumPy": (COLORS[1], "^"),
    "reference": (COLORS[2], "s"),
    "fused CPU kernel": (COLORS[0], "o"),
}


def draw_roofline(measured: Measured, axes: Any) -> None:
    """Draw the roof of all threads and of one, and each program below them, on Matplotlib axes."""
    lines, roof, one = measured.lines, measured.all_threads, measured.one_thread
    ridge = roof.flops / roof.copy
    grid = np.geomspace(
        min(line.cost.intensity for line in lines) / 2,
        4 * max(ridge, *(line.cost.intensity for line in lines)),
        200,
    )
    axes.plot(
        grid, np.minimum(grid * roof.copy, roof.flops) / 1e9, color="0.2", lw=1.5,
        label=f"copy {roof.copy / 1e9:.3g} GB/s, arithmetic {roof.flops / 1e9:.3g} Gflop/s",
    )  # fmt: skip
    if roof.threads > 1:
        axes.plot(
            grid, np.minimum(grid * one.copy, one.flops) / 1e9, color="0.2", lw=1, ls=":",
            label="the same, one thread",
        )  # fmt: skip
    for line in lines:
        color, marker = _STYLES[line.program]
        axes.plot(
            line.cost.intensity, line.cost.flops / line.measured.median / 1e9, marker, ms=7,
            color=color, mfc=color if line.direction == "forward" else "none", ls="none",
            label=f"{line.program}, {line.direction}",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="flops per byte moved", ylabel="Gflop/s")
    axes.grid(alpha=0.25, which="major")
