"""
The pictures that are made by running the package: `make figures`. One minute.

docs/_static/offset-light.svg and -dark.svg: how many bits of y are right, over the mean of the row.
docs/figures/derivation_projection.png: the projection for a row of three.
docs/figures/report_views.png: a report on the bundled data, as Chromium shows it on two screens.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from page import DOCS
from stability_methods import normalize, one_pass

from stablenorm import exact_layer_norm, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.testing import plain_forward
from stablenorm.types import Array

# Of the offsets.
# Of each line: the method, its name, its dashes, the point at which the name stands, how far off
# in points and on which side; then its color on a light page and on a dark one.
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
# Elements of a row, and rows for each offset: the worst of 3000 elements. Bits of a float32.
N, ROWS, BITS = 768, 4, 24
OFFSETS = 2.0 ** np.arange(BITS + 1)

# Of the projection: the row of the page, its gamma and dy.
X, GAMMA, DY = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0])
# Two unit vectors that span the plane across (1, 1, 1); the circle of every xhat with eps = 0.
PLANE = np.array([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]]) / np.sqrt([[2.0], [6.0]])
TURN = np.linspace(0, 2 * np.pi, 200)
CIRCLE = np.sqrt(3) * np.stack([np.cos(TURN), np.sin(TURN)])
# Okabe and Ito: told apart by the colour-blind.
BLUE, SKY, RED, GREEN, GRAY = "#0072b2", "#56b4e9", "#d55e00", "#009e73", "0.45"
# Inches. A page 390 pixels wide leaves 358 for a picture: letters of 9 points, an eighth of an
# inch, are then 8.6 pixels high. At 9 inches, which was tried, they are 5, and nobody reads them.
WIDTH, HEIGHT = 5.2, 7.6
# Points: of words within the picture, and of its titles.
SMALL, LARGE = 9, 10

# Of the report, in pixels: a telephone, its text with the margins, the top of both.
TELEPHONE, SCREEN, TOP, GAP = 390, 800, 1100, 16
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAIR = """<!doctype html><meta charset="utf-8"><title>Two screens</title>
<body style="margin:0;display:flex;gap:{gap}px;background:#d8d4cb">
<iframe style="border:0;width:{telephone}px;height:{height}px;color-scheme:dark" src="report.html"></iframe>
<iframe style="border:0;width:{screen}px;height:{height}px;color-scheme:light" src="report.html"></iframe>
"""


def measure_offsets() -> list[list[float]]:
    """Return for each line how many bits of y are right, over the offset."""
    noise = np.random.default_rng(0).standard_normal((ROWS, N))
    curves: list[list[float]] = [[] for _ in LINES]
    for offset in OFFSETS:
        x = (offset + noise).astype(np.float32)
        expected = exact_layer_norm(x).rounded("y", np.float64)
        for curve, (method, *_) in zip(curves, LINES, strict=True):
            # The worst error beside the largest y. NaN has no bit that is right.
            error = np.abs(method(x) - expected).max() / np.abs(expected).max()
            bits = -np.log2(error) if np.isfinite(error) else 0.0
            curve.append(float(np.clip(bits, 0, BITS)))
    return curves


def draw_offsets(curves: list[list[float]], theme: str) -> None:
    """Draw the three lines, each with its name on it: a legend would be far from them."""
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    # No date and a fixed salt: the same curves are the same file.
    settings: Any = {"svg.hashsalt": "stablenorm", "font.size": 12}
    with rc_context(settings | dict.fromkeys(inked, INKS[theme])):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.subplots()
        for y, (method, name, dash, at, off, side, colors) in zip(curves, LINES, strict=True):
            width = 3.5 if method is layer_norm else 2.2
            axes.plot(OFFSETS, y, dash, color=colors[theme], lw=width)
            place = {"xytext": off, "textcoords": "offset points", "ha": side, "weight": "bold"}
            axes.annotate(name, (OFFSETS[at], y[at]), color=colors[theme], **place)
        axes.set_xscale("log", base=2)
        axes.set(
            xlabel="mean of the row, in standard deviations", ylabel="bits of y that are right",
            xlim=OFFSETS[[0, -1]], ylim=(-0.5, BITS + 1), yticks=range(0, BITS + 1, 4),
        )  # fmt: skip
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        path = DOCS / "_static" / f"offset-{theme}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_projection() -> None:
    """Above: from x to xhat in three dimensions. Below: the plane across the ones, and dx."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    g = GAMMA * DY
    xhat, cache = layer_norm_forward(X[None], eps=0.0)
    dx: Any = layer_norm_backward(g[None], cache, wrt="x").dx
    _draw_space(figure.add_subplot(2, 1, 1, projection="3d"), xhat[0])
    _draw_plane(figure.add_subplot(2, 1, 2), xhat[0], g, dx[0])
    for axes in figure.axes:
        axes.title.set_fontsize(LARGE)
    # On white: legible on a dark page too. Three pixels to one of the page: sharp on a telephone.
    path = DOCS / "figures" / "derivation_projection.png"
    figure.savefig(path, dpi=200, facecolor="white")


def _draw_space(axes: Any, xhat: Array) -> None:
    centered, zero = X - X.mean(), np.zeros(3)
    ring = PLANE.T @ CIRCLE
    axes.plot_trisurf(*ring, color=SKY, alpha=0.25, linewidth=0)
    axes.plot(*ring, color=BLUE, lw=1.5)
    line = np.outer(np.ones(3), [-1.4, 2.9])
    axes.plot(*line, color=GRAY, lw=1, ls="--")
    axes.text(*line[:, 1], " t 1", color=GRAY)
    arrows = (
        (zero, X, "black"),
        (X, centered, GRAY),
        (zero, centered, GREEN),
        (zero, xhat, RED),
    )
    for start, end, color in arrows:
        step = end - start
        axes.quiver(*start, *step, color=color, arrow_length_ratio=0.4 / np.linalg.norm(step))
    axes.text(*X, "  x = (1, 2, 4)")
    axes.text(*(centered + np.array([0.0, -1.2, 0.1])), "centered", color=GREEN)
    axes.text(*(xhat + np.array([0.0, 0.12, 0.1])), "xhat", color=RED)
    axes.set(
        title="subtracting the mean: along the line of ones, onto the plane;\n"
        "dividing by the root of var: onto the circle of radius sqrt(3)",
        xlim=(-1.6, 2.6), ylim=(-1.6, 2.6), zlim=(-1.6, 4),
    )  # fmt: skip
    axes.set_box_aspect((1, 1, 1.25), zoom=1.35)
    axes.view_init(elev=22, azim=-12)
    axes.set_axis_off()


def _draw_plane(axes: Any, xhat: Array, g: Array, dx: Array) -> None:
    at, q = PLANE @ xhat, PLANE @ (g - g.mean())
    tangent = PLANE @ dx * np.sqrt(np.var(X))
    axes.plot(*CIRCLE, color=BLUE, lw=1.5)
    axes.plot(0, 0, "+", color=GRAY)
    for start, end, color, words, offset in (
        (np.zeros(2), at, RED, "xhat", (-0.2, 0.12)),
        (at, at + q, GREEN, "g - mean(g)", (-0.4, -0.26)),
        (at, at + tangent, "black", "dx / rstd", (-0.62, 0.14)),
    ):
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.8})
        axes.text(*(end + offset), words, color=color)
    axes.plot(*np.stack([at + q, at + tangent], axis=1), ":", color=GRAY, lw=1.3)
    axes.annotate(
        "xhat mean(g xhat),\nremoved", (at + q / 2 + tangent / 2), xytext=(-10, 6),
        textcoords="offset points", color=GRAY, fontsize=SMALL, ha="right",
    )  # fmt: skip
    axes.set(title="in the plane: dx is what is left of g along the circle", aspect="equal")
    axes.set(xlim=(-2.3, 2.0), ylim=(-1.85, 2.2))
    axes.set_axis_off()


def show_report() -> None:
    """Write a report, and take its picture: dark at the width of a telephone, and light beside it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"figures: one of {', '.join(BROWSERS)} is needed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = ["-m", "stablenorm", "report", "--out", str(folder / "report.html")]
        subprocess.run([sys.executable, *report], check=True)
        pair = folder / "pair.html"
        pair.write_text(
            PAIR.format(gap=GAP, telephone=TELEPHONE, screen=SCREEN, height=TOP), encoding="utf8"
        )
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            f"--user-data-dir={folder / 'browser'}",
            f"--screenshot={DOCS / 'figures' / 'report_views.png'}",
            f"--window-size={TELEPHONE + GAP + SCREEN},{TOP}", pair.as_uri(),
        ]  # fmt: skip
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=120)


def main() -> None:
    """Draw all."""
    curves = measure_offsets()
    for theme in INKS:
        draw_offsets(curves, theme)
    draw_projection()
    show_report()


if __name__ == "__main__":
    main()
