"""
The pictures of docs/explanation/stability.md: how each loss grows, and the mechanisms behind them.

Ours and the common float32 ways of `stability_methods`, against our float64 path, which is correct to
2**-52 and thus exact beside float32. Every point is computed, none is placed by hand. No peer is
needed; half a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import figures
import numpy as np
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
from stablenorm.types import Array

OURS: dict[str, Any] = {"color": figures.BLUE, "lw": 2.2}
# The others, in the order of a picture. Told apart by their dashes too, in print.
OTHERS = (figures.RED, "-"), (figures.GREEN, "--"), ("#cc79a7", ":"), (figures.SKY, "-")
LIMIT: dict[str, Any] = {"color": figures.GRAY, "lw": 0.9, "ls": "-."}
# What an error is drawn as when nothing finite is left.
NOTHING = 1e4
U = 2.0**-24
N, ROWS, EPS = 768, 8, 1e-5

# Label, values, style.
Line = tuple[str, Any, dict[str, Any]]


def normal(rows: int = ROWS, seed: int = 0) -> Array:
    """Return the same N(0, 1) every time."""
    return np.random.default_rng(seed).standard_normal((rows, N))


def dx_of(x: Array, g: Array, eps: float = EPS) -> Array:
    """Return our dx: correct to 2**-52 for float64."""
    dx = layer_norm_backward(g, layer_norm_forward(x, eps=eps)[1], wrt="x").dx
    assert dx is not None
    return dx


def exact_dx(x: Array, g: Array) -> Array:
    """Return dx, correct to 2**-52."""
    return dx_of(x.astype(np.float64), g.astype(np.float64))


def error(actual: Array, expected: Array) -> float:
    """Return max|error| over max|expected|; NaN counts as nothing left."""
    worst = float(np.abs(actual.astype(np.float64) - expected).max())
    return worst / float(np.abs(expected).max()) if math.isfinite(worst) else NOTHING


def errors(
    inputs: Sequence[Array],
    exact: Callable[[Array], Array],
    ours: Callable[[Array], Array],
    others: dict[str, Callable[[Array], Array]],
) -> list[Line]:
    """Return a line of errors for each way, ours last."""
    expected = [exact(v) for v in inputs]

    def line(way: Callable[[Array], Array]) -> list[float]:
        return [error(way(v), e) for v, e in zip(inputs, expected, strict=True)]

    styles = [{"color": color, "ls": dash} for color, dash in OTHERS]
    found = [(name, line(way), s) for (name, way), s in zip(others.items(), styles, strict=False)]
    return [*found, ("stablenorm", line(ours), OURS)]


def curves(at: Any, lines: Sequence[Line], how: str = "loglog", **labels: Any) -> Any:
    """Draw lines over the same points, with a legend below."""
    figure, axes = figures.make_axes(4.2)
    for label, values, style in lines:
        getattr(axes, how)(at, values, **{"label": label, **style})
    axes.set(**labels)
    axes.grid(alpha=0.25)
    figures.put_legend(figure, axes)
    return figure


def draw_offset() -> Any:
    """Error of y over the offset of the row."""
    offsets = np.logspace(0, 7, 43)
    lines = errors(
        [(offset + normal()).astype(np.float32) for offset in offsets],
        lambda x: layer_norm(x.astype(np.float64)),
        layer_norm,
        {name: lambda x, m=m: normalize(x, m, EPS) for name, m in MOMENTS.items()}
        | {"two passes, mean corrected": lambda x: corrected(x, EPS)},
    )
    return curves(
        offsets, [*lines, ("kappa u", offsets * U, LIMIT)],
        xlabel="|mean| / std", ylabel="max|error of y| / max|y|; 1: nothing left",
        ylim=(1e-8, 3e7), title=f"x = offset + N(0, 1), float32, n = {N}",
    )  # fmt: skip


def draw_saved() -> Any:
    """Error of dx over the offset, by what is kept of the mean."""
    offsets = np.logspace(0, 7, 29)
    g = normal(seed=1).astype(np.float32)
    lines = errors(
        [(offset + normal()).astype(np.float32) for offset in offsets],
        lambda x: exact_dx(x, g),
        lambda x: dx_of(x, g),
        {f"mean kept in {k}": lambda x, m=m: backward_from(m, x, g, EPS) for k, m in KEPT.items()},  # type: ignore[misc]
    )
    return curves(
        offsets, lines,
        xlabel="|mean| / std", ylabel="max|error of dx| / max|dx|", ylim=(1e-8, 1e2),
        title=f"x = offset + N(0, 1), dy = N(0, 1), n = {N}",
    )  # fmt: skip


def draw_range() -> Any:
    """Error of y over the scale of the row."""
    powers = np.arange(-44.0, 37.6, 0.5)
    lines = errors(
        [(10.0**power * normal(2)).astype(np.float32) for power in powers],
        lambda x: layer_norm(x.astype(np.float64), eps=0.0),
        lambda x: layer_norm(x, eps=0.0),
        {name: lambda x, m=m: normalize(x, m, 0.0) for name, m in MOMENTS.items()},  # type: ignore[misc]
    )
    return curves(
        powers, lines, "semilogy",
        xlabel="log10 of the scale of x (subnormal below -38;\n"
        "squares underflow below -19 and overflow above 19)",
        ylabel="max|error of y| / max|y|; top: NaN", ylim=(1e-8, 3e4),
        title=f"x = scale * N(0, 1), float32, n = {N}, eps = 0",
    )  # fmt: skip


def draw_constant() -> Any:
    """What a constant row gives, over the constant: the exact answer is 0."""
    at = np.exp(np.random.default_rng(5).uniform(np.log(1e-2), np.log(1e5), 400))
    at.sort()
    x = np.repeat(at[:, None], N, axis=1).astype(np.float32)
    lines: list[Line] = []
    for eps, color in ((1e-12, figures.RED), (1e-5, figures.GREEN)):
        assert not layer_norm(x, eps=eps).any()
        y = np.abs(normalize(x, two_pass, eps)).max(axis=1)
        style = {"color": color, "marker": ".", "ls": "", "ms": 4}
        # Some are 0 by luck; they are not drawn.
        lines.append((f"two passes, eps = {eps:g}", np.where(y > 0, y, np.nan), style))
    return curves(
        at, [*lines, ("|x| u / sqrt(1e-5)", np.minimum(at * U / np.sqrt(1e-5), 1), LIMIT)],
        xlabel="the constant", ylabel="max|y|, exactly 0", ylim=(1e-8, 3),
        title=f"constant rows of {N}; stablenorm returns 0",
    )  # fmt: skip


def draw_cotangent() -> Any:
    """Error of dx over how nearly dy is constant, for three ways to write the same dx."""
    sizes = np.logspace(0, -6, 25)
    x = (100 + normal()).astype(np.float32)
    mean, var = two_pass(x)
    rstd = 1 / np.sqrt(var + np.float32(EPS))
    xhat = (x - mean) * rstd
    lines = errors(
        [(1 + size * normal(seed=3)).astype(np.float32) for size in sizes],
        lambda g: exact_dx(x, g),
        lambda g: dx_of(x, g),
        {
            "a g + b x + c": lambda g: expanded_form(g, x, mean, rstd),
            "g - mean(g) - xhat mean(g xhat)": lambda g: plain_form(g, xhat, rstd),
            "g centered first": lambda g: centered_form(g, xhat, rstd),
        },
    )
    return curves(
        sizes, lines, xlim=(1.3, 7e-7),
        xlabel="t, with dy = 1 + t N(0, 1)", ylabel="max|error of dx| / max|dx|",
        ylim=(1e-8, 3), title=f"x = 100 + N(0, 1), gamma = 1, float32, n = {N}",
    )  # fmt: skip


def draw_rows() -> Any:
    """Error of dbeta over the number of rows."""
    counts = 2 ** np.arange(4, 21)
    dy = np.random.default_rng(2).random((counts[-1], 4)).astype(np.float32)

    def dbeta(part: Array) -> Array:
        _, cache = layer_norm_forward(part, beta=np.zeros(4, np.float32))
        found = layer_norm_backward(part, cache, wrt="beta").dbeta
        assert found is not None
        return found

    lines = errors(
        [dy[:count] for count in counts],
        lambda part: np.array([math.fsum(c) for c in part.astype(np.float64).T.tolist()]),
        dbeta,
        {"row after row": sum_rows_in_order},
    )
    return curves(
        counts, [*lines, ("u sqrt(rows)", U * np.sqrt(counts), LIMIT)], xlabel="rows",
        ylabel="max|error of dbeta| / dbeta", ylim=(1e-9, 1e-3),
        title="float32, dy uniform in (0, 1)",
    )  # fmt: skip


def draw_spacing() -> Any:
    """Above: the floats near 10000 and the mean between them. Below: the error that all share."""
    x: Array = (1e4 + 0.01 * np.random.default_rng(0).standard_normal((1, N))).astype(np.float32)
    exact = float(x.astype(np.float64).mean()) - 1e4
    figure, (above, below) = figures.make_axes(6.2, 2)
    distinct, counts = np.unique(x, return_counts=True)
    floats = distinct.astype(np.float64) - 1e4
    above.bar(
        floats, counts, width=3e-4, color=figures.SKY, label="elements of x: the floats there are"
    )
    rounded = float(two_pass(x)[0][0, 0]) - 1e4
    above.axvline(exact, ymax=0.62, color=figures.BLUE, lw=2, label="exact mean")
    above.axvline(rounded, ymax=0.62, color=figures.RED, lw=2, ls="--", label="its float32")
    above.set(
        xlim=(exact - 4.5e-3, exact + 4.5e-3), ylim=(0, counts.max() * 2.0),
        xlabel="x - 10000", ylabel="elements", title="10000 + 0.01 N(0, 1)",
    )  # fmt: skip
    above.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    y = layer_norm(x.astype(np.float64))[0]
    for name, actual, color in (
        ("two passes, float32", normalize(x, two_pass, EPS)[0], figures.RED),
        ("stablenorm", layer_norm(x)[0], figures.BLUE),
    ):
        below.plot(y, actual - y, ".", ms=3, color=color, label=name)
    below.set(xlabel="y", ylabel="error of y", title="one error, shared by the whole row")
    for axes, place in ((above, "upper left"), (below, "center right")):
        axes.legend(frameon=False, fontsize=figures.SMALL, loc=place)
        axes.grid(alpha=0.25)
    return figure


if __name__ == "__main__":
    for name, draw in [pair for pair in globals().items() if pair[0].startswith("draw_")]:
        figures.save(draw(), f"stability_{name.removeprefix('draw_')}.png")
