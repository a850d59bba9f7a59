"""
The pictures of docs/explanation/stability.md: how each loss grows, and the mechanisms behind them.

Ours and the common float32 ways of `stability_methods`, against our float64 path, which is correct to
2**-52 and thus exact beside float32. Every point is computed, none is placed by hand. No peer is
needed; half a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
    make_figure,
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
from stablenorm.types import Array, bfloat16

# Told apart by their dashes too, in print.
OURS: dict[str, Any] = {"color": BLUE, "lw": 2.2, "label": "stablenorm"}
WAYS: dict[str, dict[str, Any]] = {
    "E[x^2] - E[x]^2": {"color": RED, "ls": "-"},
    "two passes": {"color": GREEN, "ls": "--"},
    "Welford": {"color": "#cc79a7", "ls": ":"},
}
LIMIT: dict[str, Any] = {"color": GRAY, "lw": 0.9, "ls": "-."}
# What an error is drawn as when nothing finite is left.
NOTHING = 1e4
U = 2.0**-24
N, ROWS, EPS = 768, 8, 1e-5

# Label, values, style.
Line = tuple[str, Any, dict[str, Any]]


def normal(rows: int = ROWS, n: int = N, seed: int = 0) -> Array:
    """Return the same N(0, 1) every time."""
    return np.random.default_rng(seed).standard_normal((rows, n))


def exact_y(x: Array, eps: float = EPS) -> Array:
    """Return y, correct to 2**-52."""
    return layer_norm(x.astype(np.float64), eps=eps)


def dx_of(x: Array, g: Array, eps: float = EPS) -> Array:
    """Return our dx: correct to 2**-52 for float64."""
    dx = layer_norm_backward(g, layer_norm_forward(x, eps=eps)[1], wrt="x").dx
    assert dx is not None
    return dx


def exact_dx(x: Array, g: Array) -> Array:
    """Return dx, correct to 2**-52."""
    return dx_of(x.astype(np.float64), g.astype(np.float64))


def error(actual: Array, expected: Array, size: float | None = None) -> float:
    """Return max|error| over max|expected|, or over `size`; NaN counts as nothing left."""
    worst = float(np.abs(actual.astype(np.float64) - expected).max())
    scale = float(np.abs(expected).max()) if size is None else size
    return worst / scale if math.isfinite(worst) else NOTHING


def curves(path: Path, at: Any, lines: Iterable[Line], how: str = "loglog", **labels: Any) -> None:
    """Draw lines over the same points, with a legend below."""
    figure, axes = make_axes(4.2)
    for label, values, style in lines:
        getattr(axes, how)(at, values, **{"label": label, **style})
    axes.set(**labels)
    axes.grid(alpha=0.25)
    put_legend(figure, axes)
    save(figure, path)


def draw_offset(path: Path) -> None:
    """Error of y over the offset of the row."""
    offsets = np.logspace(0, 7, 43)
    rows = [(offset + normal()).astype(np.float32) for offset in offsets]
    ways: list[tuple[str, Callable[[Array], Array], dict[str, Any]]] = [
        *((name, lambda x, m=m: normalize(x, m, EPS), WAYS[name]) for name, m in MOMENTS.items()),
        ("two passes, mean corrected", lambda x: corrected(x, EPS), {"color": SKY}),
        ("stablenorm", layer_norm, OURS),
    ]
    lines = [(name, [error(way(x), exact_y(x)) for x in rows], s) for name, way, s in ways]
    curves(
        path, offsets, [*lines, ("kappa u", offsets * U, LIMIT)],
        xlabel="|mean| / std", ylabel="max|error of y| / max|y|; 1: nothing left",
        ylim=(1e-8, 3e7), title=f"x = offset + N(0, 1), float32, n = {N}",
    )  # fmt: skip


def draw_saved(path: Path) -> None:
    """Error of dx over the offset, by what is kept of the mean."""
    offsets = np.logspace(0, 7, 29)
    g = normal(seed=1).astype(np.float32)
    rows = [(offset + normal()).astype(np.float32) for offset in offsets]
    styles = {"bfloat16": (RED, "-"), "float32": (GREEN, "--"), "float64": (SKY, ":")}
    lines: list[Line] = [
        (
            f"mean kept in {name}",
            [error(backward_from(kept, x, g, EPS), exact_dx(x, g)) for x in rows],
            dict(zip(("color", "ls"), styles[name], strict=True)),
        )
        for name, kept in KEPT.items()
    ]
    ours = [error(dx_of(x, g), exact_dx(x, g)) for x in rows]
    curves(
        path, offsets, [*lines, ("stablenorm", ours, OURS)],
        xlabel="|mean| / std", ylabel="max|error of dx| / max|dx|", ylim=(1e-8, 1e2),
        title=f"x = offset + N(0, 1), dy = N(0, 1), n = {N}",
    )  # fmt: skip


def draw_range(path: Path) -> None:
    """Error of y over the scale of the row."""
    powers = np.arange(-44.0, 37.6, 0.5)
    rows = [(10.0**power * normal(2)).astype(np.float32) for power in powers]
    exact = [exact_y(x, eps=0.0) for x in rows]
    lines: list[Line] = [
        (
            name,
            [error(normalize(x, moments, 0.0), y) for x, y in zip(rows, exact, strict=True)],
            WAYS[name],
        )
        for name, moments in MOMENTS.items()
    ]
    ours = [error(layer_norm(x, eps=0.0), y) for x, y in zip(rows, exact, strict=True)]
    curves(
        path, powers, [*lines, ("stablenorm", ours, OURS)], "semilogy",
        xlabel="log10 of the scale of x\n(below -38 subnormal; squares underflow below -19, overflow above 19)",
        ylabel="max|error of y| / max|y|; top: NaN", ylim=(1e-8, 3e4),
        title=f"x = scale * N(0, 1), float32, n = {N}, eps = 0",
    )  # fmt: skip


def draw_constant(path: Path) -> None:
    """What a constant row gives, over the constant: the exact answer is 0."""
    at = np.exp(np.random.default_rng(5).uniform(np.log(1e-2), np.log(1e5), 400))
    at.sort()
    x = np.repeat(at[:, None], N, axis=1).astype(np.float32)
    lines: list[Line] = []
    for eps, color in ((1e-12, RED), (1e-5, GREEN)):
        assert not layer_norm(x, eps=eps).any()
        y = np.abs(normalize(x, two_pass, eps)).max(axis=1)
        style = {"color": color, "marker": ".", "ls": "", "ms": 4}
        # Some are 0 by luck; they are not drawn.
        lines.append((f"two passes, eps = {eps:g}", np.where(y > 0, y, np.nan), style))
    curves(
        path, at, [*lines, ("|x| u / sqrt(1e-5)", np.minimum(at * U / np.sqrt(1e-5), 1), LIMIT)],
        xlabel="the constant", ylabel="max|y|, exactly 0", ylim=(1e-8, 3),
        title=f"constant rows of {N}; stablenorm returns 0",
    )  # fmt: skip


def draw_outlier(path: Path) -> None:
    """Error of dx over the size of one outlier: of its own element, and of the row."""
    powers = np.arange(2, 31)
    g = normal(2, seed=1).astype(np.float32)
    found: dict[tuple[str, str], list[float]] = {}
    for power in powers:
        x = normal(2)
        x[:, 5] = 2.0**power
        x = x.astype(np.float32)
        dx = exact_dx(x, g)
        mean, var = two_pass(x)
        rstd = 1 / np.sqrt(var + np.float32(EPS))
        size = float((rstd * np.abs(g).max()).max())
        plain = plain_form(g, (x - mean) * rstd, rstd)
        for who, actual in (("plain", plain), ("stablenorm", dx_of(x, g))):
            found.setdefault((who, "its own dx"), []).append(error(actual[:, 5], dx[:, 5]))
            found.setdefault((who, "the row"), []).append(error(actual, dx, size))
    lines: list[Line] = [
        (
            f"{who}: {what}", values,
            {"color": RED if who == "plain" else BLUE, "ls": ":" if what == "the row" else "-"},
        )
        for (who, what), values in found.items()
    ]  # fmt: skip
    curves(
        path, powers, lines, "semilogy",
        xlabel="log2 of the outlier, among N(0, 1)", ylabel="relative error of dx",
        ylim=(1e-9, 1e8), title=f"one element is the outlier, float32, n = {N}",
    )  # fmt: skip


def draw_cotangent(path: Path) -> None:
    """Error of dx over how nearly dy is constant, for three ways to write the same dx."""
    sizes = np.logspace(0, -6, 25)
    x = (100 + normal()).astype(np.float32)
    mean, var = two_pass(x)
    rstd = 1 / np.sqrt(var + np.float32(EPS))
    xhat = (x - mean) * rstd
    ways: list[tuple[str, Callable[[Array], Array], dict[str, Any]]] = [
        ("a g + b x + c", lambda g: expanded_form(g, x, mean, rstd), {"color": RED}),
        (
            "g - mean(g) - xhat mean(g xhat)",
            lambda g: plain_form(g, xhat, rstd),
            {"color": GREEN, "ls": "--"},
        ),
        ("g centered first", lambda g: centered_form(g, xhat, rstd), {"color": SKY, "ls": ":"}),
        ("stablenorm", lambda g: dx_of(x, g), OURS),
    ]
    gs = [(1 + size * normal(seed=3)).astype(np.float32) for size in sizes]
    lines = [(name, [error(way(g), exact_dx(x, g)) for g in gs], s) for name, way, s in ways]
    curves(
        path, sizes, lines, xlim=(1.3, 7e-7),
        xlabel="t, with dy = 1 + t N(0, 1)", ylabel="max|error of dx| / max|dx|",
        ylim=(1e-8, 3), title=f"x = 100 + N(0, 1), gamma = 1, float32, n = {N}",
    )  # fmt: skip


def draw_rows(path: Path) -> None:
    """Error of dbeta over the number of rows."""
    counts = 2 ** np.arange(4, 21)
    dy = np.random.default_rng(2).random((counts[-1], 4)).astype(np.float32)
    ordered, ours = [], []
    for count in counts:
        part = dy[:count]
        exact = np.array([math.fsum(c) for c in part.astype(np.float64).T.tolist()])
        _, cache = layer_norm_forward(part, beta=np.zeros(4, np.float32))
        dbeta = layer_norm_backward(part, cache, wrt="beta").dbeta
        assert dbeta is not None
        ordered.append(error(sum_rows_in_order(part), exact))
        ours.append(error(dbeta, exact))
    lines: Sequence[Line] = (
        ("row after row", ordered, {"color": RED}),
        ("stablenorm", ours, OURS),
        ("u sqrt(rows)", U * np.sqrt(counts), LIMIT),
    )
    curves(
        path, counts, lines, xlabel="rows", ylabel="max|error of dbeta| / dbeta",
        ylim=(1e-9, 1e-3), title="float32, dy uniform in (0, 1)",
    )  # fmt: skip


def draw_spacing(path: Path) -> None:
    """Above: the floats near 10000 and the mean between them. Below: the error that all share."""
    x: Array = (1e4 + 0.01 * np.random.default_rng(0).standard_normal((1, N))).astype(np.float32)
    exact = float(x.astype(np.float64).mean()) - 1e4
    figure, (above, below) = make_axes(6.2, 2)
    distinct, counts = np.unique(x, return_counts=True)
    floats = distinct.astype(np.float64) - 1e4
    above.bar(floats, counts, width=3e-4, color=SKY, label="elements of x: the floats there are")
    above.axvline(exact, ymax=0.62, color=BLUE, lw=2, label="exact mean")
    rounded = float(two_pass(x)[0][0, 0]) - 1e4
    above.axvline(rounded, ymax=0.62, color=RED, lw=2, ls="--", label="its float32")
    above.set(
        xlim=(exact - 4.5e-3, exact + 4.5e-3), ylim=(0, counts.max() * 2.0),
        xlabel="x - 10000", ylabel="elements", title="10000 + 0.01 N(0, 1)",
    )  # fmt: skip
    above.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    y = exact_y(x)[0]
    for name, actual, color in (
        ("two passes, float32", normalize(x, two_pass, EPS)[0], RED),
        ("stablenorm", layer_norm(x, eps=EPS)[0], BLUE),
    ):
        below.plot(y, actual - y, ".", ms=3, color=color, label=name)
    below.set(xlabel="y", ylabel="error of y", title="one error, shared by the whole row")
    for axes, place in ((above, "upper left"), (below, "center right")):
        axes.legend(frameon=False, fontsize=SMALL, loc=place)
        axes.grid(alpha=0.25)
    save(figure, path)


def draw_rounding(path: Path) -> None:
    """A number just above a midpoint: once to bfloat16, and by way of float32."""
    step = 2.0**-7
    middle, value = 1 + step / 2, 1 + step / 2 + 2.0**-30
    # By the package: a row of one, beta = value.
    once = float(layer_norm(np.zeros((1, 1), bfloat16), beta=np.array([value]))[0, 0])
    twice = float(np.float32(value).astype(bfloat16))
    figure, axes = make_axes(2.1)
    axes.axhline(0, color=GRAY, lw=1)
    for tick, words in (
        (1.0, "1\na bfloat16"), (1 + step, "1 + 2$^{-7}$\na bfloat16"),
        (middle, "midpoint:\na float32,\nnot a bfloat16"),
    ):  # fmt: skip
        axes.plot([tick] * 2, [-0.1, 0.1], color=GRAY if tick == middle else "black", lw=2)
        axes.text(tick, -0.42, words, ha="center", fontsize=SMALL)
    axes.plot(value, 0, "o", color="black")
    axes.text(value, 0.62, "midpoint + 2$^{-30}$", ha="center", fontsize=SMALL)
    for end, color, bend, across, words in (
        (once, BLUE, 0.25, 0.8, "rounded once"),
        (twice, RED, -0.25, 0.2, "to float32, then to even"),
    ):
        style = {"arrowstyle": "-|>", "lw": 1.7, "color": color}
        style["connectionstyle"] = f"arc3,rad={bend}"
        axes.annotate("", (end, 0.1), (value, 0.06), arrowprops=style)
        axes.text(1 + across * step, 0.48, words, color=color, ha="center", fontsize=SMALL)
    axes.set(xlim=(1 - 0.12 * step, 1 + 1.12 * step), ylim=(-0.6, 0.85))
    axes.set_axis_off()
    save(figure, path)


def draw_subnormal(path: Path) -> None:
    """The small results of a layer norm with a tiny gamma, kept and flushed."""
    x = np.linspace(-3, 3, 601, dtype=np.float32)[None]
    y = layer_norm(x, np.full(601, 2e-38, np.float32))[0].astype(np.float64)
    smallest = float(np.finfo(np.float32).smallest_normal)
    flushed = np.where(np.abs(y) < smallest, 0, y)
    figure, axes = make_axes(3.4)
    axes.plot(x[0], y, **OURS)
    axes.plot(x[0], flushed, color=RED, lw=1.3, ls="--", label="what flushing leaves of it")
    axes.axhspan(-smallest, smallest, color="0.93", zorder=0)
    axes.text(1.2, -0.9e-38, "subnormal numbers", color=GRAY, fontsize=SMALL)
    axes.set(xlabel="x", ylabel="y", title="float32, gamma = 2e-38")
    axes.grid(alpha=0.25)
    put_legend(figure, axes)
    save(figure, path)


def draw_contained(path: Path) -> None:
    """Which elements one NaN reaches: its row of y and dx, all columns of dgamma, none of dbeta."""
    x = np.random.default_rng(0).standard_normal((8, 24)).astype(np.float32)
    x[3, 5] = np.nan
    y, cache = layer_norm_forward(x, *np.ones((2, 24), np.float32))
    parts = {"x": x, "y": y, **layer_norm_backward(np.ones_like(x), cache)._asdict()}
    figure = make_figure(1.9)
    every = figure.subplot_mosaic(
        [["x", "y", "dx"], ["dgamma", "dbeta", "."]], height_ratios=[3, 1]
    )
    for name, array in parts.items():
        axes, image = every[name], np.atleast_2d(array)
        axes.imshow(~np.isfinite(image), cmap="Blues", vmin=0, vmax=1.4, aspect="equal")
        axes.set(xticks=np.arange(-0.5, 24), yticks=np.arange(-0.5, len(image)), title=name)
        axes.tick_params(length=0, labelbottom=False, labelleft=False)
        axes.grid(color="0.8", lw=0.5)
    save(figure, path)


def main() -> None:
    """Draw all."""
    for name, draw in globals().copy().items():
        if name.startswith("draw_"):
            draw(FIGURES / f"stability_{name.removeprefix('draw_')}.png")


if __name__ == "__main__":
    main()
