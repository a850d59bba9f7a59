"""
The picture of the first page, and the loss curves of the how-to on training.

Writes docs/_static/offset-light.svg and -dark.svg, docs/figures/loss_digits.png and the table
of docs/how-to/train.md. Two minutes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from figures_page import FIGURES, make_axes, put_legend, save
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from page import DOCS, ROOT, origin, origin_line, put, table
from stability_methods import normalize, one_pass

from stablenorm import exact_layer_norm, layer_norm
from stablenorm.testing import plain_forward

# Ink, and the three lines; told apart without colour by their labels.
INKS = {
    "light": {"ink": "#222832", "plain": "#c0392b", "moments": "#b9770e", "ours": "#1a6fb0"},
    "dark": {"ink": "#ced6dd", "plain": "#ff8a7a", "moments": "#e8b04a", "ours": "#6cb8f0"},
}
# Elements of a row, and rows for each offset: the worst of 3000 elements.
N, ROWS = 768, 4
# Of a float32.
BITS = 24
WAYS: dict[str, Callable[[Any], Any]] = {
    "moments": lambda x: normalize(x, one_pass, 1e-5),
    "plain": lambda x: plain_forward(x)[0],
    "ours": layer_norm,
}
# Of each line its name, dashes, the point at which the name stands, and how far off, in points.
NAMES: dict[str, tuple[Any, ...]] = {
    "moments": ("E[x²] - E[x]²", "-.", 6, (12, 0), "left"),
    "plain": ("two passes in float32", "--", 12, (8, 8), "left"),
    "ours": ("stablenorm", "-", 12, (0, -20), "center"),
}
# Where the norms are, and which rate.
COLORS, DASHES = ("#0072b2", "#009e73", "#d55e00"), (":", "-", "--")
Runs = dict[tuple[str, float], tuple[Any, float]]


def measure_offsets() -> dict[str, list[float]]:
    """Return for each method how many bits of y are right, over the powers of two of the offset."""
    noise = np.random.default_rng(0).standard_normal((ROWS, N))
    curves: dict[str, list[float]] = {name: [] for name in WAYS}
    for power in range(25):
        x = (2.0**power + noise).astype(np.float32)
        expected = exact_layer_norm(x).rounded("y", np.float64)
        for name, way in WAYS.items():
            # The worst error beside the largest y. NaN has no bit that is right.
            error = np.abs(way(x) - expected).max() / np.abs(expected).max()
            bits = -np.log2(error) if np.isfinite(error) else 0.0
            curves[name].append(float(np.clip(bits, 0, BITS)))
    return curves


def draw_offsets(curves: dict[str, list[float]], path: Path, colors: dict[str, str]) -> None:
    """Draw the three lines, each with its name on it: a legend would be far from them."""
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    # No date and a fixed salt: the same curves are the same file.
    settings: Any = {"svg.hashsalt": "stablenorm", "font.size": 12}
    with rc_context(settings | dict.fromkeys(inked, colors["ink"])):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.subplots()
        for key, (name, line, at, off, side) in NAMES.items():
            x, y = 2.0 ** np.arange(25), curves[key]
            axes.plot(x, y, line, color=colors[key], lw=3.5 if key == "ours" else 2.2)
            place = {"xytext": off, "textcoords": "offset points", "ha": side, "weight": "bold"}
            axes.annotate(name, (x[at], y[at]), color=colors[key], **place)
        axes.set_xscale("log", base=2)
        axes.set(
            xlabel="mean of the row, in standard deviations", ylabel="bits of y that are right",
            xlim=(1, 2**24), ylim=(-0.5, BITS + 1), yticks=range(0, BITS + 1, 4),
        )  # fmt: skip
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def load_example() -> ModuleType:
    """Import examples/train_digits.py, which is no package."""
    spec = importlib.util.spec_from_file_location("_", ROOT / "examples" / "train_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_all(example: ModuleType) -> Runs:
    """Return the losses and the part of digits found, for each number of norms and each rate."""
    results = {}
    for name, norms in example.NORMS.items():
        for rate in example.RATES:
            losses, parameters = example.train(rate, norms)
            results[name, rate] = (np.array(losses), example.measure_accuracy(parameters))
    return results


def draw_losses(results: Runs, path: Path) -> None:
    """One curve for each run: colour says where the norms are, the dash which rate."""
    names = list(dict.fromkeys(name for name, _ in results))
    rates = list(dict.fromkeys(rate for _, rate in results))
    figure, axes = make_axes(4.4)
    for (name, rate), (losses, _) in results.items():
        # Means of 20 steps: a single batch says little.
        smooth = losses[: len(losses) // 20 * 20].reshape(-1, 20).mean(axis=1)
        style = {"color": COLORS[names.index(name)], "ls": DASHES[rates.index(rate)]}
        axes.plot(np.arange(len(smooth)) * 20 + 10, smooth, **style)
    for name, color in zip(names, COLORS, strict=True):
        axes.plot([], [], color=color, label=f"norm {name}")
    for rate, dash in zip(rates, DASHES, strict=True):
        axes.plot([], [], dash, color="0.4", label=f"rate {rate}")
    axes.axhline(np.log(10), color="0.7", lw=1)
    axes.annotate("guessing", (axes.get_xlim()[1] * 0.95, np.log(10)), ha="right", va="bottom")
    axes.set(xlabel="step", ylabel="loss", ylim=(0, 3.2))
    axes.grid(alpha=0.25)
    put_legend(figure, axes, 3)
    save(figure, path)


def train_table(results: Runs) -> str:
    """Return the table of the page."""
    names = list(dict.fromkeys(name for name, _ in results))
    rates = list(dict.fromkeys(rate for _, rate in results))
    lines = []
    for name in names:
        runs = [results[name, rate] for rate in rates]
        last = [(losses[-50:].mean(), found) for losses, found in runs]
        lines.append([name, *(f"{t:.2f}; {f:.0%}" if np.isfinite(t) else "NaN" for t, f in last)])
    return (
        table(["layer norm", *(f"rate {rate}" for rate in rates)], lines)
        + "\n\nEach cell: the mean loss of the last 50 steps; the part of 2000 new digits that is found. "
        + origin_line("make figures", origin())
    )


def main() -> None:
    """Measure, train, draw, write."""
    curves = measure_offsets()
    for name, colors in INKS.items():
        draw_offsets(curves, DOCS / "_static" / f"offset-{name}.svg", colors)
    results = train_all(load_example())
    draw_losses(results, FIGURES / "loss_digits.png")
    put(DOCS / "how-to" / "train.md", {"train": train_table(results)}, __file__)


if __name__ == "__main__":
    main()
