"""
The curves of docs/explanation/stability.md: how each loss grows.

Ours and the common float32 ways of `stability_methods`, against the exact oracle or, over many
points, against our float64 path, which is correct to 2**-52 and thus exact beside float32. No peer
is needed; half a minute. The number lines are drawn by figures_stability_lines.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
from stability_methods import (
    KEPT,
    MOMENTS,
    backward_from,
    centered_form,
    corrected,
    expanded_form,
    normalize,
    plain_form,
    sum_rows_in_order,
    two_pass,
)

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm._types import Array

# Told apart by their dashes too, in print.
OURS = {"color": BLUE, "lw": 2.2, "label": "stablenorm"}
WAYS = {
    "E[x^2] - E[x]^2": {"color": RED, "ls": "-"},
    "two passes": {"color": GREEN, "ls": "--"},
    "Welford": {"color": "#cc79a7", "ls": ":"},
}
# What an error is drawn as when nothing finite is left.
NOTHING = 1e4
U = 2.0**-24
N, ROWS, EPS = 768, 8, 1e-5


def normal(rows: int = ROWS, n: int = N, seed: int = 0) -> Array:
    """Return the same N(0, 1) every time."""
    return np.random.default_rng(seed).standard_normal((rows, n))


def exact_y(x: Array, eps: float = EPS) -> Array:
    """Return y, correct to 2**-52."""
    return layer_norm(x.astype(np.float64), eps=eps)


def exact_dx(x: Array, g: Array, eps: float = EPS) -> Array:
    """Return dx, correct to 2**-52."""
    _, cache = layer_norm_forward(x.astype(np.float64), eps=eps)
    dx = layer_norm_backward(g.astype(np.float64), cache, wrt="x").dx
    assert dx is not None
    return dx


def ours_dx(x: Array, g: Array, eps: float = EPS) -> Array:
    """Return our dx in the dtype of x."""
    dx = layer_norm_backward(g, layer_norm_forward(x, eps=eps)[1], wrt="x").dx
    assert dx is not None
    return dx


def error(actual: Array, expected: Array, size: float | None = None) -> float:
    """Return max|error| over max|expected|, or over `size`; NaN counts as nothing left."""
    worst = float(np.abs(actual.astype(np.float64) - expected).max())
    scale = float(np.abs(expected).max()) if size is None else size
    return worst / scale if math.isfinite(worst) else NOTHING


def draw_offset(path: Path) -> None:
    """Error of y over the offset of the row."""
    offsets = np.logspace(0, 7, 43)
    rows = [(offset + normal()).astype(np.float32) for offset in offsets]
    exact = [exact_y(x) for x in rows]
    figure, axes = _axes()
    for name, moments in MOMENTS.items():
        values = [error(normalize(x, moments, EPS), y) for x, y in zip(rows, exact, strict=True)]
        axes.loglog(offsets, values, label=name, **WAYS[name])
    second = [error(corrected(x, EPS), y) for x, y in zip(rows, exact, strict=True)]
    axes.loglog(offsets, second, color=SKY, label="two passes, mean corrected")
    ours = [error(layer_norm(x), y) for x, y in zip(rows, exact, strict=True)]
    axes.loglog(offsets, ours, **OURS)
    axes.loglog(offsets, offsets * U, color=GRAY, lw=0.9, ls="-.", label="kappa u")
    axes.axhline(1, color=GRAY, lw=0.6)
    axes.text(1.1, 0.25, "nothing left", color=GRAY, fontsize=SMALL)
    axes.set(
        xlabel="|mean| / std", ylabel="max|error of y| / max|y|", ylim=(1e-8, 3e7),
        title=f"x = offset + N(0, 1), float32, n = {N}",
    )  # fmt: skip
    _finish(figure, axes, path)


def draw_saved(path: Path) -> None:
    """Error of dx over the offset, by what is kept of the mean."""
    offsets = np.logspace(0, 7, 29)
    g = normal(seed=1).astype(np.float32)
    figure, axes = _axes()
    styles = {"bfloat16": (RED, "-"), "float32": (GREEN, "--"), "float64": (SKY, ":")}
    for name, kept in KEPT.items():
        values = []
        for offset in offsets:
            x = (offset + normal()).astype(np.float32)
            dx = exact_dx(x, g)
            scale = float(np.abs(dx).max())
            values.append(error(backward_from(kept, x, g, EPS), dx, scale))
        color, dashes = styles[name]
        words = f"mean kept in {name}"
        axes.loglog(offsets, values, color=color, ls=dashes, label=words)
    ours = []
    for offset in offsets:
        x = (offset + normal()).astype(np.float32)
        ours.append(error(ours_dx(x, g), exact_dx(x, g)))
    axes.loglog(offsets, ours, **OURS)
    axes.set(
        xlabel="|mean| / std", ylabel="max|error of dx| / max|dx|", ylim=(1e-8, 1e2),
        title=f"x = offset + N(0, 1), dy = N(0, 1), n = {N}",
    )  # fmt: skip
    _finish(figure, axes, path)


def draw_range(path: Path) -> None:
    """Error of y over the scale of the row."""
    powers = np.arange(-44.0, 37.6, 0.5)
    rows = [(10.0**power * normal(2)).astype(np.float32) for power in powers]
    exact = [exact_y(x, eps=0.0) for x in rows]
    figure, axes = _axes()
    for name, moments in MOMENTS.items():
        values = [error(normalize(x, moments, 0.0), y) for x, y in zip(rows, exact, strict=True)]
        axes.semilogy(powers, values, label=name, **WAYS[name])
    ours = [error(layer_norm(x, eps=0.0), y) for x, y in zip(rows, exact, strict=True)]
    axes.semilogy(powers, ours, **OURS)
    axes.axvspan(-44.85, -37.93, color="0.92", zorder=0)
    axes.text(-44.6, 2e-7, "x itself\nsubnormal", color=GRAY, fontsize=SMALL)
    axes.text(-36.5, 3e-2, "squares\nunderflow", color=GRAY, fontsize=SMALL)
    axes.text(22, 3e-2, "squares\noverflow", color=GRAY, fontsize=SMALL)
    axes.text(-12, 4e3, "top: NaN or infinity", color=GRAY, fontsize=SMALL)
    axes.set(
        xlabel="log10 of the scale of x", ylabel="max|error of y| / max|y|", ylim=(1e-8, 3e4),
        title=f"x = scale * N(0, 1), float32, n = {N}, eps = 0",
    )  # fmt: skip
    _finish(figure, axes, path)


def draw_constant(path: Path) -> None:
    """What a constant row gives, over the constant: the exact answer is 0."""
    constants = np.exp(np.random.default_rng(5).uniform(np.log(1e-2), np.log(1e5), 400))
    constants.sort()
    figure, axes = _axes()
    for eps, color in ((1e-12, RED), (1e-5, GREEN)):
        x = np.repeat(constants[:, None], N, axis=1).astype(np.float32)
        y = np.abs(normalize(x, two_pass, eps)).max(axis=1)
        # Some are 0 by luck; they are not drawn.
        seen = y > 0
        axes.loglog(
            constants[seen], y[seen], ".", color=color, ms=4,
            label=f"two passes, eps = {eps:g}",
        )  # fmt: skip
        assert not layer_norm(x, eps=eps).any()
    limit = np.minimum(constants * U / np.sqrt(1e-5), 1)
    axes.loglog(constants, limit, color=GRAY, lw=0.9, ls="-.", label="|x| u / sqrt(1e-5)")
    axes.set(
        xlabel="the constant", ylabel="max|y|, exactly 0", ylim=(1e-8, 3),
        title=f"constant rows of {N}; stablenorm returns 0",
    )  # fmt: skip
    _finish(figure, axes, path)


def draw_outlier(path: Path) -> None:
    """Error of dx over the size of one outlier: of its own element, and of the row."""
    powers = np.arange(2, 31)
    g = normal(2, seed=1).astype(np.float32)
    figure, axes = _axes()
    lines: dict[str, list[float]] = {name: [] for name in ("alone", "row", "ours", "ours row")}
    for power in powers:
        x = normal(2)
        x[:, 5] = 2.0**power
        x = x.astype(np.float32)
        dx = exact_dx(x, g)
        mean, var = two_pass(x)
        rstd = 1 / np.sqrt(var + np.float32(EPS))
        plain, ours = plain_form(g, (x - mean) * rstd, rstd), ours_dx(x, g)
        size = float((rstd * np.abs(g).max()).max())
        for name, actual in (("alone", plain), ("ours", ours)):
            lines[name].append(error(actual[:, 5], dx[:, 5]))
        for name, actual in (("row", plain), ("ours row", ours)):
            lines[name].append(error(actual, dx, size))
    axes.semilogy(powers, lines["alone"], color=RED, label="plain: its own dx")
    axes.semilogy(powers, lines["row"], color=RED, ls=":", label="plain: the row")
    axes.semilogy(powers, lines["ours"], **OURS | {"label": "stablenorm: its own dx"})
    axes.semilogy(powers, lines["ours row"], color=BLUE, ls=":", label="stablenorm: the row")
    axes.set(
        xlabel="log2 of the outlier, among N(0, 1)", ylabel="relative error of dx",
        ylim=(1e-9, 1e8), title=f"one element is the outlier, float32, n = {N}",
    )  # fmt: skip
    _finish(figure, axes, path)


def draw_cotangent(path: Path) -> None:
    """Error of dx over how nearly dy is constant, for three ways to write the same dx."""
    sizes = np.logspace(0, -6, 25)
    x = (100 + normal()).astype(np.float32)
    mean, var = two_pass(x)
    rstd = 1 / np.sqrt(var + np.float32(EPS))
    xhat = (x - mean) * rstd
    ways: dict[str, tuple[Callable[[Array], Array], dict[str, Any]]] = {
        "a g + b x + c": (lambda g: expanded_form(g, x, mean, rstd), {"color": RED}),
        "g - mean(g) - xhat mean(g xhat)": (
            lambda g: plain_form(g, xhat, rstd), {"color": GREEN, "ls": "--"},
        ),
        "g centered first": (lambda g: centered_form(g, xhat, rstd), {"color": SKY, "ls": ":"}),
        "stablenorm": (lambda g: ours_dx(x, g), {"color": BLUE, "lw": 2.2}),
    }  # fmt: skip
    figure, axes = _axes()
    for name, (way, style) in ways.items():
        values = []
        for size in sizes:
            g = (1 + size * normal(seed=3)).astype(np.float32)
            values.append(error(way(g), exact_dx(x, g)))
        axes.loglog(sizes, values, label=name, **style)
    axes.invert_xaxis()
    axes.set(
        xlabel="t, with dy = 1 + t N(0, 1)", ylabel="max|error of dx| / max|dx|",
        ylim=(1e-8, 3), title=f"x = 100 + N(0, 1), gamma = 1, float32, n = {N}",
    )  # fmt: skip
    _finish(figure, axes, path)


def draw_rows(path: Path) -> None:
    """Error of dbeta over the number of rows."""
    counts = [2**power for power in range(4, 21)]
    dy = np.random.default_rng(2).random((counts[-1], 4)).astype(np.float32)
    figure, axes = _axes()
    lines: dict[str, list[float]] = {"in order": [], "stablenorm": []}
    for count in counts:
        part = dy[:count]
        exact = np.array([math.fsum(c) for c in part.astype(np.float64).T.tolist()])
        _, cache = layer_norm_forward(part, beta=np.zeros(4, np.float32))
        ours = layer_norm_backward(part, cache, wrt="beta").dbeta
        assert ours is not None
        lines["in order"].append(error(sum_rows_in_order(part), exact))
        lines["stablenorm"].append(error(ours, exact))
    axes.loglog(counts, lines["in order"], color=RED, label="row after row")
    axes.loglog(counts, lines["stablenorm"], **OURS)
    axes.loglog(counts, U * np.sqrt(counts), color=GRAY, lw=0.9, ls="-.", label="u sqrt(rows)")
    axes.set(
        xlabel="rows", ylabel="max|error of dbeta| / dbeta", ylim=(1e-9, 1e-3),
        title="float32, dy uniform in (0, 1)",
    )  # fmt: skip
    _finish(figure, axes, path)


def _axes() -> tuple[Any, Any]:
    return make_axes(4.2)


def _finish(figure: Any, axes: Any, path: Path, columns: int = 2) -> None:
    axes.grid(alpha=0.25)
    put_legend(figure, axes, columns)
    save(figure, path)


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "stability_offset.png": draw_offset,
    "stability_saved.png": draw_saved,
    "stability_range.png": draw_range,
    "stability_constant.png": draw_constant,
    "stability_outlier.png": draw_outlier,
    "stability_cotangent.png": draw_cotangent,
    "stability_rows.png": draw_rows,
}


def draw_all(names: Iterable[str] = DRAWINGS) -> None:
    """Draw some, or all."""
    for name in names:
        DRAWINGS[name](FIGURES / name)
        print(f"docs/figures/{name}")


if __name__ == "__main__":
    draw_all()
