"""
Pictures of the documentation: `make figures`.

docs/_static/offset-light.svg and -dark.svg, for the first page: the right bits of y over the mean of the row, for three
methods. docs/figures/gradient_steps.svg: the error of a finite difference over its step. `make bench` draws
docs/_static/speed-light.svg and -dark.svg with `draw_speed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from page import DOCS
from stability_methods import normalize, one_pass

from stablenorm import exact_layer_norm, layer_norm
from stablenorm.testing import plain_backward, plain_forward

# For each line: the method, its name, its dashes; the index of the offset at which the name stands, the distance
# of the name in points, and its alignment; the colors on a light and on a dark page.
LINES: tuple[tuple[Any, ...], ...] = (
    (
        lambda x: normalize(x, one_pass, 1e-5), "E[x²] - E[x]²", "-.", 6, (12, 0), "left",
        {"light": "#b9770e", "dark": "#e8b04a"},
    ),
    (
        lambda x: plain_forward(x)[0], "two passes in float32", "--", 12, (8, 8), "left",
        {"light": "#c0392b", "dark": "#ff8a7a"},
    ),
    (
        layer_norm, "stablenorm", "-", 12, (0, -20), "center",
        {"light": "#1a6fb0", "dark": "#6cb8f0"},
    ),
)  # fmt: skip
INKS = {"light": "#222832", "dark": "#ced6dd"}
# Elements of a row, and rows for each offset, 3000 elements together. Bits of a float32.
N, ROWS, BITS = 768, 4, 24
OFFSETS = 2.0 ** np.arange(BITS + 1)
STEPS = 10.0 ** np.arange(-11, -0.5, 0.25)


@contextmanager
def drawing(path: Path, size: tuple[float, float], ink: str) -> Iterator[Any]:
    """Yield axes to draw on, with text and frame of color `ink`, then write the file; equal curves give equal files."""
    keys = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: Any = {"svg.hashsalt": "stablenorm", "font.size": 12} | dict.fromkeys(keys, ink)
    with rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.subplots()
        axes.grid(alpha=0.2)
        yield axes
        figure.savefig(path, transparent=True, metadata={"Date": None})


def measure_offsets() -> list[list[float]]:
    """Return for each line the right bits of y at each offset."""
    noise = np.random.default_rng(0).standard_normal((ROWS, N))
    curves: list[list[float]] = [[] for _ in LINES]
    for offset in OFFSETS:
        x = (offset + noise).astype(np.float32)
        expected = exact_layer_norm(x).rounded("y", np.float64)
        for curve, (method, *_) in zip(curves, LINES, strict=True):
            # The largest error over the largest y. NaN counts as 0 bits.
            error = np.abs(method(x) - expected).max() / np.abs(expected).max()
            bits = -np.log2(error) if np.isfinite(error) else 0.0
            curve.append(float(np.clip(bits, 0, BITS)))
    return curves


def draw_offsets(curves: list[list[float]], theme: str) -> None:
    """Draw the three lines, with their names beside them: a legend would be far away."""
    path = DOCS / "_static" / f"offset-{theme}.svg"
    with drawing(path, (6.4, 4.0), INKS[theme]) as axes:
        for bits, (method, name, dash, at, off, side, colors) in zip(curves, LINES, strict=True):
            width = 3.5 if method is layer_norm else 2.2
            axes.plot(OFFSETS, bits, dash, color=colors[theme], lw=width)
            style = {"xytext": off, "textcoords": "offset points", "ha": side, "weight": "bold"}
            axes.annotate(name, (OFFSETS[at], bits[at]), color=colors[theme], **style)
        axes.set_xscale("log", base=2)
        axes.set(
            xlabel="mean of the row, in standard deviations", ylabel="bits of y that are right",
            xlim=OFFSETS[[0, -1]], ylim=(-0.5, BITS + 1), yticks=range(0, BITS + 1, 4),
        )  # fmt: skip
        axes.spines[["top", "right"]].set_visible(False)


def measure_steps(x: Any) -> list[float]:
    """Return for each step the largest error of central differences of a layer norm over the largest dx."""
    rng = np.random.default_rng(100)
    _, dy = rng.standard_normal((2, 4, 8))
    gamma, beta = 1 + 0.1 * rng.standard_normal(8), np.zeros(8)
    dx = plain_backward(dy, plain_forward(x, gamma, beta)[1])[0]
    errors, moves = [], np.eye(x.size).reshape(-1, *x.shape)
    for step in STEPS:
        plus, minus = (
            (dy * plain_forward(x + s * moves, gamma, beta)[0]).sum((1, 2)) for s in (step, -step)
        )
        numeric = ((plus - minus) / (2 * step)).reshape(x.shape)
        errors.append(float(np.abs(numeric - dx).max() / np.abs(dx).max()))
    return errors


def draw_steps() -> None:
    """Draw the V of two inputs, in colors for light and dark pages."""
    z = np.random.default_rng(100).standard_normal((2, 4, 8))[0]
    lines = {
        "mean 0, std 1": (z, "-", "#2f86c9"),
        "mean 1e4, std 1e-2": (1e4 + 1e-2 * z, "--", "#d5604f"),
    }
    with drawing(DOCS / "figures" / "gradient_steps.svg", (6.4, 3.6), "#808890") as axes:
        for name, (x, dash, color) in lines.items():
            axes.loglog(STEPS, measure_steps(x), dash, color=color, lw=2.2, label=name)
        axes.set(xlabel="step", ylabel="error beside the largest dx")
        axes.legend(frameon=False)


def draw_speed(lines: Mapping[tuple[str, str], list[tuple[int, float]]]) -> None:
    """Draw the time of each peer over ours, by direction, over the bytes of x, for light and for dark pages."""
    # The colors of the first picture.
    colors = {"PyTorch": LINES[1][-1], "plain NumPy": LINES[0][-1]}
    looks: Any = {"forward": ("o-", 2.6), "backward": ("s--", 1.8)}
    for theme, ink in INKS.items():
        with drawing(DOCS / "_static" / f"speed-{theme}.svg", (6.4, 4.0), ink) as axes:
            for (peer, direction), points in lines.items():
                dash, width = looks[direction]
                look = {"color": colors[peer][theme], "label": f"{peer}, {direction}", "lw": width}
                axes.loglog(*zip(*points, strict=True), dash, ms=5, **look)
            axes.axhline(1, color=ink, lw=1)
            axes.set(xlabel="bytes of x, float32", ylabel="their time over ours")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)


def main() -> None:
    """Measure and draw, the first picture for light and for dark pages."""
    curves = measure_offsets()
    for theme in INKS:
        draw_offsets(curves, theme)
    draw_steps()


if __name__ == "__main__":
    main()
