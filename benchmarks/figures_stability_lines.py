"""
The mechanisms of docs/explanation/stability.md, drawn from real floats.

The mean between two floats; two roundings in a row; the gap that flushing tears around zero; what
one NaN reaches. Every point is computed, none is placed by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from figures_page import (
    BLUE,
    FIGURES,
    GRAY,
    RED,
    SKY,
    SMALL,
    make_axes,
    make_figure,
    put_legend,
    save,
)
from figures_stability import EPS, N, exact_y
from stability_methods import normalize, two_pass

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm._types import Array, bfloat16


def draw_spacing(path: Path) -> None:
    """Above: the floats near 10000 and the mean between them. Below: the error that all share."""
    x: Array = (1e4 + 0.01 * np.random.default_rng(0).standard_normal((1, N))).astype(np.float32)
    exact = float(x.astype(np.float64).mean())
    rounded = float(two_pass(x)[0][0, 0])
    figure, (above, below) = make_axes(6.2, 2)
    distinct, counts = np.unique(x, return_counts=True)
    floats = distinct.astype(np.float64) - 1e4
    above.bar(floats, counts, width=3e-4, color=SKY, label="elements of x: the floats there are")
    above.axvline(exact - 1e4, ymax=0.62, color=BLUE, lw=2, label="exact mean")
    above.axvline(rounded - 1e4, ymax=0.62, color=RED, lw=2, ls="--", label="its float32")
    above.set(
        xlim=(exact - 1e4 - 4.5e-3, exact - 1e4 + 4.5e-3), ylim=(0, counts.max() * 2.0),
        xlabel="x - 10000", ylabel="elements", title="10000 + 0.01 N(0, 1)",
    )  # fmt: skip
    above.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    above.legend(frameon=False, fontsize=SMALL, loc="upper left")
    y = exact_y(x)[0]
    for name, actual, color in (
        ("two passes, float32", normalize(x, two_pass, EPS)[0], RED),
        ("stablenorm", layer_norm(x, eps=EPS)[0], BLUE),
    ):
        below.plot(y, actual - y, ".", ms=3, color=color, label=name)
    below.set(xlabel="y", ylabel="error of y", title="one error, shared by the whole row")
    below.legend(frameon=False, fontsize=SMALL, loc="center right")
    _save(figure, path)


def draw_rounding(path: Path) -> None:
    """A number just above a midpoint: once to bfloat16, and by way of float32."""
    step = 2.0**-7
    value = 1 + step / 2 + 2.0**-30
    by_float32 = np.float32(value)
    once = float(layer_norm_once(value))
    twice = float(by_float32.astype(bfloat16))
    figure, axes = make_axes(2.1)
    axes.axhline(0, color=GRAY, lw=1)
    for tick, name in ((1.0, "1"), (1 + step, "1 + 2$^{-7}$")):
        axes.plot([tick] * 2, [-0.12, 0.12], color="black", lw=2)
        axes.text(tick, -0.42, f"{name}\na bfloat16", ha="center", fontsize=SMALL)
    axes.plot([1 + step / 2] * 2, [-0.08, 0.08], color=GRAY)
    axes.text(
        1 + step / 2, -0.42, "midpoint:\na float32,\nnot a bfloat16", ha="center", fontsize=SMALL
    )
    axes.plot(value, 0, "o", color="black")
    axes.text(value, 0.62, "midpoint + 2$^{-30}$", ha="center", fontsize=SMALL)
    style = {"arrowstyle": "-|>", "lw": 1.7}
    axes.annotate(
        "", (once, 0.1), (value, 0.06),
        arrowprops=style | {"color": BLUE, "connectionstyle": "arc3,rad=0.25"},
    )  # fmt: skip
    axes.annotate(
        "", (twice, 0.1), (value, 0.06),
        arrowprops=style | {"color": RED, "connectionstyle": "arc3,rad=-0.25"},
    )  # fmt: skip
    axes.text(1 + 0.8 * step, 0.48, "rounded once", color=BLUE, ha="center", fontsize=SMALL)
    axes.text(
        1 + 0.2 * step, 0.48, "to float32, then to even", color=RED, ha="center", fontsize=SMALL
    )
    axes.set(xlim=(1 - 0.12 * step, 1 + 1.12 * step), ylim=(-0.6, 0.85))
    axes.set_axis_off()
    _save(figure, path)


def layer_norm_once(value: float) -> Any:
    """Return `value` rounded once to bfloat16, by the package: a row of one, beta = value."""
    beta = np.array([value])
    return layer_norm(np.zeros((1, 1), bfloat16), beta=beta)[0, 0]


def draw_subnormal(path: Path) -> None:
    """The small results of a layer norm with a tiny gamma, kept and flushed."""
    x = np.linspace(-3, 3, 601, dtype=np.float32)[None]
    gamma = np.full(601, 2e-38, np.float32)
    y = layer_norm(x, gamma)[0].astype(np.float64)
    smallest = float(np.finfo(np.float32).smallest_normal)
    flushed = np.where(np.abs(y) < smallest, 0, y)
    figure, axes = make_axes(3.4)
    axes.plot(x[0], y, color=BLUE, lw=2.2, label="stablenorm")
    axes.plot(x[0], flushed, color=RED, lw=1.3, ls="--", label="what flushing leaves of it")
    axes.axhspan(-smallest, smallest, color="0.93", zorder=0)
    axes.text(1.2, -0.9e-38, "subnormal numbers", color=GRAY, fontsize=SMALL)
    axes.set(xlabel="x", ylabel="y", title="float32, gamma = 2e-38")
    put_legend(figure, axes)
    _save(figure, path)


def draw_contained(path: Path) -> None:
    """Which elements one NaN reaches: its row of y and dx, all columns of dgamma, none of dbeta."""
    rows, n = 8, 24
    x = np.random.default_rng(0).standard_normal((rows, n)).astype(np.float32)
    x[3, 5] = np.nan
    gamma, beta = np.ones((2, n), np.float32)
    y, cache = layer_norm_forward(x, gamma, beta)
    dx, dgamma, dbeta = layer_norm_backward(np.ones_like(x), cache)
    assert dx is not None
    assert dgamma is not None
    assert dbeta is not None
    figure = make_figure(1.9)
    every = figure.subplot_mosaic(
        [["x", "y", "dx"], ["dgamma", "dbeta", "."]], height_ratios=[3, 1]
    )
    parts = {"x": x, "y": y, "dx": dx, "dgamma": dgamma[None], "dbeta": dbeta[None]}
    for name, array in parts.items():
        axes = every[name]
        axes.imshow(~np.isfinite(array), cmap="Blues", vmin=0, vmax=1.4, aspect="equal")
        axes.set(xticks=np.arange(-0.5, n), yticks=np.arange(-0.5, len(array)), title=name)
        axes.tick_params(length=0, labelbottom=False, labelleft=False)
        axes.grid(color="0.8", lw=0.5)
    save(figure, path)


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    save(figure, path)


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "stability_spacing.png": draw_spacing,
    "stability_rounding.png": draw_rounding,
    "stability_subnormal.png": draw_subnormal,
    "stability_contained.png": draw_contained,
}


def draw_all(names: Iterable[str] = DRAWINGS) -> None:
    """Draw some, or all."""
    for name in names:
        DRAWINGS[name](FIGURES / name)
        print(f"docs/figures/{name}")


if __name__ == "__main__":
    draw_all()
