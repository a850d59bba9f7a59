"""
The measured picture of docs/explanation/derivation.md: the projection for a row of three.
"""

from __future__ import annotations

from typing import Any

import figures
import numpy as np

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.types import Array

# The row of the page, its gamma and dy.
X, GAMMA, DY = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0])
# Two unit vectors that span the plane across (1, 1, 1); the circle of every xhat with eps = 0.
PLANE = np.array([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]]) / np.sqrt([[2.0], [6.0]])
TURN = np.linspace(0, 2 * np.pi, 200)
CIRCLE = np.sqrt(3) * np.stack([np.cos(TURN), np.sin(TURN)])


def draw_projection() -> Any:
    """Above: from x to xhat in three dimensions. Below: the plane across the ones, and dx."""
    figure = figures.make_figure(7.6)
    g = GAMMA * DY
    xhat, cache = layer_norm_forward(X[None], eps=0.0)
    dx = layer_norm_backward(g[None], cache, wrt="x").dx
    assert dx is not None
    _draw_space(figure.add_subplot(2, 1, 1, projection="3d"), xhat[0])
    _draw_plane(figure.add_subplot(2, 1, 2), xhat[0], g, dx[0])
    return figure


def _draw_space(axes: Any, xhat: Array) -> None:
    centered, zero = X - X.mean(), np.zeros(3)
    ring = PLANE.T @ CIRCLE
    axes.plot_trisurf(*ring, color=figures.SKY, alpha=0.25, linewidth=0)
    axes.plot(*ring, color=figures.BLUE, lw=1.5)
    line = np.outer(np.ones(3), [-1.4, 2.9])
    axes.plot(*line, color=figures.GRAY, lw=1, ls="--")
    axes.text(*line[:, 1], " t 1", color=figures.GRAY)
    arrows = (
        (zero, X, "black"),
        (X, centered, figures.GRAY),
        (zero, centered, figures.GREEN),
        (zero, xhat, figures.RED),
    )
    for start, end, color in arrows:
        step = end - start
        axes.quiver(*start, *step, color=color, arrow_length_ratio=0.4 / np.linalg.norm(step))
    axes.text(*X, "  x = (1, 2, 4)")
    axes.text(*(centered + np.array([0.0, -1.2, 0.1])), "centered", color=figures.GREEN)
    axes.text(*(xhat + np.array([0.0, 0.12, 0.1])), "xhat", color=figures.RED)
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
    axes.plot(*CIRCLE, color=figures.BLUE, lw=1.5)
    axes.plot(0, 0, "+", color=figures.GRAY)
    for start, end, color, words, offset in (
        (np.zeros(2), at, figures.RED, "xhat", (-0.2, 0.12)),
        (at, at + q, figures.GREEN, "g - mean(g)", (-0.4, -0.26)),
        (at, at + tangent, "black", "dx / rstd", (-0.62, 0.14)),
    ):
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.8})
        axes.text(*(end + offset), words, color=color)
    axes.plot(*np.stack([at + q, at + tangent], axis=1), ":", color=figures.GRAY, lw=1.3)
    axes.annotate(
        "xhat mean(g xhat),\nremoved", (at + q / 2 + tangent / 2), xytext=(-10, 6),
        textcoords="offset points", color=figures.GRAY, fontsize=figures.SMALL, ha="right",
    )  # fmt: skip
    axes.set(title="in the plane: dx is what is left of g along the circle", aspect="equal")
    axes.set(xlim=(-2.3, 2.0), ylim=(-1.85, 2.2))
    axes.set_axis_off()


if __name__ == "__main__":
    figures.save(draw_projection(), "derivation_projection.png")
