"""
The pictures of docs/explanation/derivation.md, and its numbers: no peer, a few seconds.

The paths from x to the loss; the projection for a row of three; the spectrum of the Jacobian, whose
columns are what `layer_norm_backward` returns for one-hot cotangents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from figures_page import (
    BLUE,
    FIGURES,
    GRAY,
    GREEN,
    LARGE,
    RED,
    SKY,
    SMALL,
    make_axes,
    make_figure,
    save,
)
from matplotlib.patches import FancyBboxPatch

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.types import Array

# The row of the page, its gamma and dy.
X, GAMMA, DY = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0])
# eps against the variance of the row, from "no eps" to "all eps".
RATIOS = (0.0, 0.1, 1.0)
N = 12


def jacobian(x: Array, eps: float) -> Array:
    """Return d xhat / d x of one row: row i is the backward of a one-hot cotangent at i."""
    n = len(x)
    _, cache = layer_norm_forward(np.tile(x, (n, 1)), eps=eps)
    dx = layer_norm_backward(np.eye(n), cache, wrt="x").dx
    assert dx is not None
    return dx


def draw_paths(path: Path) -> None:
    """From x to the loss, with the step that carries the gradient back over each arrow."""
    figure, axes = make_axes(2.3)
    axes.set_axis_off()
    at = {
        "x": (0, 1),
        "mean": (1.0, 2),
        "centered": (2.1, 1),
        "var": (3.1, 2),
        "rstd": (4.5, 2),
        "xhat": (5.4, 1),
        "y": (6.7, 1),
        "L": (7.9, 1),
    }
    for name, (across, up) in at.items():
        axes.text(across, up, name, ha="center", va="center", fontsize=LARGE, zorder=3)
        half = _half_width(name)
        style: dict[str, Any] = {"fc": "white", "ec": BLUE, "lw": 1.4, "zorder": 2}
        corner = (across - half, up - 0.15)
        axes.add_patch(FancyBboxPatch(corner, 2 * half, 0.3, boxstyle="round,pad=0.04", **style))
    for start, end, step in (
        ("x", "mean", "D9, D10"),
        ("x", "centered", "D9"),
        ("mean", "centered", "D9"),
        ("centered", "var", "D7"),
        ("var", "rstd", "D6"),
        ("rstd", "xhat", "D8"),
        ("centered", "xhat", "D8"),
        ("xhat", "y", "D5"),
        ("y", "L", "dy"),
    ):
        if at[start][1] == at[end][1]:
            # From edge to edge: boxes differ in width.
            (left, up), (right, _) = at[start], at[end]
            ends = (left + _half_width(start) + 0.05, up), (right - _half_width(end) - 0.05, up)
            _arrow(axes, *ends, step, gap=0)
        else:
            _arrow(axes, at[start], at[end], step)
    for name, across, step in (("gamma", 6.0, "D3"), ("beta", 7.4, "D4")):
        axes.text(across, 0.02, name, ha="center", va="center", fontsize=LARGE)
        _arrow(axes, (across, 0.0), (6.7, 1), step, color=RED)
    axes.set(xlim=(-0.45, 8.35), ylim=(-0.2, 2.3))
    save(figure, path)


def _half_width(name: str) -> float:
    return 0.56 if name == "centered" else 0.36


def _arrow(axes: Any, start: Any, end: Any, step: str, color: str = GRAY, gap: int = 15) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "->", "color": color, "lw": 1.3,
                                    "shrinkA": gap, "shrinkB": gap},
    )  # fmt: skip
    middle = (np.array(start) + np.array(end)) / 2
    slope = np.sign((end[1] - start[1]) * (end[0] - start[0]))
    side = np.array([0.0, 0.08]) if slope == 0 else np.array([-0.12 * slope, 0.02])
    align = "center" if slope == 0 else "right" if slope > 0 else "left"
    axes.text(*(middle + side), step, ha=align, color=color, fontsize=SMALL)


def draw_projection(path: Path) -> None:
    """Above: from x to xhat in three dimensions. Below: the plane across the ones, and dx."""
    figure = make_figure(7.6)
    y, cache = layer_norm_forward(X[None], eps=0.0)
    g = GAMMA * DY
    dx = layer_norm_backward(g[None], cache, wrt="x").dx
    assert dx is not None
    _draw_space(figure.add_subplot(2, 1, 1, projection="3d"), y[0])
    _draw_plane(figure.add_subplot(2, 1, 2), y[0], g, dx[0])
    save(figure, path)


def basis() -> Array:
    """Return two unit vectors that span the plane across (1, 1, 1), as rows."""
    across = np.array([1.0, -1.0, 0.0]) / np.sqrt(2)
    up = np.array([-1.0, -1.0, 2.0]) / np.sqrt(6)
    return np.stack([across, up])


def circle() -> Array:
    """Return points of the circle on which every xhat of three lies when eps = 0: (2, points)."""
    turn = np.linspace(0, 2 * np.pi, 200)
    return np.sqrt(3) * np.stack([np.cos(turn), np.sin(turn)])


def _draw_space(axes: Any, xhat: Array) -> None:
    centered = X - X.mean()
    ring = basis().T @ circle()
    axes.plot_trisurf(*ring, color=SKY, alpha=0.25, linewidth=0)
    axes.plot(*ring, color=BLUE, lw=1.5)
    line = np.outer(np.ones(3), [-1.4, 2.9])
    axes.plot(*line, color=GRAY, lw=1, ls="--")
    axes.text(*line[:, 1], " t 1", color=GRAY)
    for start, end, color in (
        (np.zeros(3), X, "black"),
        (X, centered, GRAY),
        (np.zeros(3), centered, GREEN),
        (np.zeros(3), xhat, RED),
    ):
        step = end - start
        axes.quiver(*start, *step, color=color, arrow_length_ratio=0.4 / np.linalg.norm(step))
    axes.text(*X, "  x = (1, 2, 4)")
    axes.text(*(centered + np.array([0.0, -1.2, 0.1])), "centered", color=GREEN)
    axes.text(*(xhat + np.array([0.0, 0.12, 0.1])), "xhat", color=RED)
    axes.set(
        title="subtracting the mean: along the line of ones, onto the plane;\n"
        "dividing by the root of var: onto the circle of radius sqrt(3)",
        xticks=[], yticks=[], zticks=[], xlim=(-1.6, 2.6), ylim=(-1.6, 2.6), zlim=(-1.6, 4),
    )  # fmt: skip
    axes.set_box_aspect((1, 1, 1.25), zoom=1.35)
    axes.view_init(elev=22, azim=-12)
    axes.set_axis_off()


def _draw_plane(axes: Any, xhat: Array, g: Array, dx: Array) -> None:
    plane = basis()
    rstd = 1 / np.sqrt(np.var(X))
    q = plane @ (g - g.mean())
    at, tangent = plane @ xhat, plane @ dx / rstd
    axes.plot(*circle(), color=BLUE, lw=1.5)
    axes.plot(0, 0, "+", color=GRAY)
    _vector(axes, (0, 0), at, RED, "xhat", (-0.2, 0.12))
    _vector(axes, at, q, GREEN, "g - mean(g)", (-0.4, -0.26))
    _vector(axes, at, tangent, "black", "dx / rstd", (-0.62, 0.14))
    axes.plot(*np.stack([at + q, at + tangent], axis=1), ":", color=GRAY, lw=1.3)
    axes.annotate(
        "xhat mean(g xhat),\nremoved", (at + q / 2 + tangent / 2), xytext=(-10, 6),
        textcoords="offset points", color=GRAY, fontsize=SMALL, ha="right",
    )  # fmt: skip
    axes.set(title="in the plane: dx is what is left of g along the circle", aspect="equal")
    axes.set(xlim=(-2.3, 2.0), ylim=(-1.85, 2.2))
    axes.set_axis_off()


def _vector(axes: Any, start: Any, step: Any, color: str, words: str, offset: Any) -> None:
    end = np.asarray(start) + step
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.8})
    axes.text(*(end + offset), words, color=color)


def draw_spectrum(path: Path) -> None:
    """Eigenvalues of the measured Jacobian beside the three of the formula."""
    figure, (above, below) = make_axes(6.2, 2)
    x = np.random.default_rng(0).standard_normal(N)
    var = float(np.var(x))
    for ratio, color, marker in zip(RATIOS, (BLUE, GREEN, RED), "os^", strict=True):
        eps = ratio * var
        rstd = (var + eps) ** -0.5
        values = np.sort(np.linalg.eigvalsh(jacobian(x, eps))) / rstd
        above.plot(range(1, N + 1), values, marker, color=color, ms=6, label=f"eps = {ratio:g} var")
    above.axhline(1, color=GRAY, lw=0.8, zorder=0)
    above.set(
        xlabel="eigenvalue, in order", ylabel="eigenvalue / rstd", ylim=(-0.08, 1.15),
        title=f"n = {N}: one 0, one eps rstd$^2$, ten of 1",
    )  # fmt: skip
    above.legend(frameon=False, fontsize=SMALL, loc="lower right")
    _draw_along_xhat(below, x)
    for axes in (above, below):
        axes.grid(alpha=0.25)
    save(figure, path)


def _draw_along_xhat(axes: Any, x: Array) -> None:
    """What is let through along xhat: the formula as a line, the measured quotient as points."""
    var = float(np.var(x))
    ratios = np.logspace(-6, 3, 100)
    axes.loglog(ratios, ratios / (1 + ratios), color=GRAY, lw=1.3, label="eps / (var + eps)")
    points = np.logspace(-6, 3, 10)
    axes.loglog(
        points, [_along_xhat(x, r * var) for r in points], "o", color=BLUE, label="measured"
    )
    axes.set(xlabel="eps / var", ylabel="eigenvalue along xhat / rstd", title="along xhat")
    axes.legend(frameon=False, fontsize=SMALL)


def _along_xhat(x: Array, eps: float) -> float:
    """Measure xhat' J xhat / (xhat' xhat rstd)."""
    xhat, cache = layer_norm_forward(x[None], eps=eps)
    dx = layer_norm_backward(xhat, cache, wrt="x").dx
    assert dx is not None
    rstd = (float(np.var(x)) + eps) ** -0.5
    return float((dx * xhat).sum() / (xhat * xhat).sum() / rstd)


def main() -> None:
    """Draw all."""
    draw_paths(FIGURES / "derivation_paths.png")
    draw_projection(FIGURES / "derivation_projection.png")
    draw_spectrum(FIGURES / "derivation_spectrum.png")


if __name__ == "__main__":
    main()
