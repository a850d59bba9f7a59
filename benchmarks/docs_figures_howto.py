"""
The picture of the landing page, and the loss curves of the how-to on training.

Writes docs/_static/offset-light.svg and -dark.svg, docs/figures/loss_digits.png and the table
between the markers of docs/how-to/train.md. Two minutes; `make docs-figures`.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from machine import processor
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stablenorm import exact_layer_norm, layer_norm
from stablenorm.testing.plain import plain_forward

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- train:begin -->", "<!-- train:end -->"

# Ink, grid, and the three lines; told apart without colour by their labels.
LIGHT = {"ink": "#222832", "bad": "#c0392b", "worse": "#b9770e", "good": "#1a6fb0"}
DARK = {"ink": "#ced6dd", "bad": "#ff8a7a", "worse": "#e8b04a", "good": "#6cb8f0"}

# Elements of a row, and rows for each offset: the worst of 3000 elements.
N, ROWS = 768, 4
# Of a float32.
BITS = 24


def _moments(x: Any) -> Any:
    """E[x^2] - E[x]^2 in float32: one pass over memory, as many kernels have it."""
    with np.errstate(all="ignore"):
        mean = x.mean(axis=-1, keepdims=True)
        var = (x * x).mean(axis=-1, keepdims=True) - mean * mean
        return (x - mean) / np.sqrt(var + np.float32(1e-5))


def measure_offsets() -> dict[str, list[tuple[float, float]]]:
    """Return for each method how many bits of y are right, over the offset of its input."""
    noise = np.random.default_rng(0).standard_normal((ROWS, N))
    curves: dict[str, list[tuple[float, float]]] = {"moments": [], "plain": [], "ours": []}
    for power in range(25):
        x = (2.0**power + noise).astype(np.float32)
        expected = exact_layer_norm(x).rounded("y", np.float64)
        results = {"moments": _moments(x), "plain": plain_forward(x)[0], "ours": layer_norm(x)}
        for name, y in results.items():
            # The worst error beside the largest y. NaN has no bit that is right.
            error = np.abs(y - expected).max() / np.abs(expected).max()
            bits = -np.log2(error) if np.isfinite(error) else 0.0
            curves[name].append((2.0**power, float(np.clip(bits, 0, BITS))))
    return curves


@contextmanager
def _canvas(path: Path, size: tuple[float, float], ink: str) -> Iterator[tuple[Figure, Any]]:
    # No date and a fixed salt: the same curves are the same file.
    settings: Any = {"svg.hashsalt": "stablenorm", "text.color": ink, "axes.edgecolor": ink}
    settings |= {"axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "font.size": 12}
    with rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots()
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=120, transparent=path.suffix == ".svg", metadata=metadata)


def draw_offsets(curves: dict[str, list[tuple[float, float]]], path: Path, colors: Any) -> None:
    """Draw the three lines, each with its name on it: a legend would be far from them."""
    # The point of the line at which its name stands, and how far off, in points.
    names = {
        "moments": ("E[x²] - E[x]²", colors["worse"], "-.", 6, (12, 0), "left"),
        "plain": ("two passes in float32", colors["bad"], "--", 12, (8, 8), "left"),
        "ours": ("stablenorm", colors["good"], "-", 12, (0, -20), "center"),
    }
    with _canvas(path, (6.4, 4.0), colors["ink"]) as (_, axes):
        for key, (name, color, line, at, off, side) in names.items():
            x, y = np.array(curves[key]).T
            axes.plot(x, y, line, color=color, lw=3.5 if key == "ours" else 2.2)
            place = {"xytext": off, "textcoords": "offset points", "ha": side, "weight": "bold"}
            axes.annotate(name, (x[at], y[at]), color=color, **place)
        axes.set_xscale("log", base=2)
        axes.set(
            xlabel="mean of the row, in standard deviations", ylabel="bits of y that are right"
        )
        axes.set(xlim=(1, 2**24), ylim=(-0.5, BITS + 1), yticks=range(0, BITS + 1, 4))
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)


def load_example() -> ModuleType:
    """Import examples/train_digits.py, which is no package."""
    path = ROOT / "examples" / "train_digits.py"
    spec = importlib.util.spec_from_file_location("train_digits", path)
    if spec is None or spec.loader is None:
        msg = f"{path} must be a file of Python, got none"
        raise FileNotFoundError(msg)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_all(example: ModuleType) -> dict[tuple[str, float], tuple[Any, float]]:
    """Return the losses and the part of digits found, for each number of norms and each rate."""
    results = {}
    for name, norms in example.NORMS.items():
        for rate in example.RATES:
            losses, parameters = example.train(rate, norms)
            results[name, rate] = (np.array(losses), example.measure_accuracy(parameters))
    return results


def draw_losses(results: dict[tuple[str, float], tuple[Any, float]], path: Path) -> None:
    """One curve for each run: colour says where the norms are, the dash which rate."""
    names = list(dict.fromkeys(name for name, _ in results))
    rates = list(dict.fromkeys(rate for _, rate in results))
    colors = dict(zip(names, ("#0072b2", "#009e73", "#d55e00"), strict=True))
    dashes = dict(zip(rates, (":", "-", "--"), strict=True))
    with _canvas(path, (7.2, 4.6), "#222832") as (figure, axes):
        for (name, rate), (losses, _) in results.items():
            # Means of 20 steps: a single batch says little.
            smooth = losses[: len(losses) // 20 * 20].reshape(-1, 20).mean(axis=1)
            axes.plot(np.arange(len(smooth)) * 20 + 10, smooth, dashes[rate], color=colors[name])
        for name, color in colors.items():
            axes.plot([], [], color=color, label=f"norm {name}")
        for rate, dash in dashes.items():
            axes.plot([], [], dash, color="0.4", label=f"rate {rate}")
        axes.axhline(np.log(10), color="0.7", lw=1)
        axes.annotate("guessing", (axes.get_xlim()[1] * 0.95, np.log(10)), ha="right", va="bottom")
        axes.set(xlabel="step", ylabel="loss", ylim=(0, 3.2))
        axes.grid(alpha=0.25)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)


def table(results: dict[tuple[str, float], tuple[Any, float]]) -> str:
    """Return what stands between the markers."""
    names = list(dict.fromkeys(name for name, _ in results))
    rates = list(dict.fromkeys(rate for _, rate in results))
    head = "| layer norm | " + " | ".join(f"rate {rate}" for rate in rates) + " |"
    lines = [head, "|---|" + "---|" * len(rates)]
    for name in names:
        cells = []
        for rate in rates:
            losses, found = results[name, rate]
            last = losses[-50:].mean()
            cells.append(f"{last:.2f}; {found:.0%}" if np.isfinite(last) else "NaN")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    stamp = (
        f"Generated by `benchmarks/docs_figures_howto.py` on {dt.datetime.now(dt.UTC):%Y-%m-%d}: "
        f"{processor()}, Python {sys.version.split()[0]}, NumPy {np.__version__}; seed 0."
    )
    legend = (
        "Each cell: the mean loss of the last 50 steps; the part of 2000 new digits that is found."
    )
    return "\n".join([BEGIN, *lines, "", legend, stamp, END])


def write_between(path: Path, text: str) -> None:
    """Replace what stands between the markers of a page, markers included."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        msg = f"{path.name} must hold {BEGIN} and below it {END}"
        raise ValueError(msg)
    path.write_text(before + text + after, encoding="utf-8")


def main() -> None:
    """Measure, train, draw, write."""
    curves = measure_offsets()
    for name, colors in (("light", LIGHT), ("dark", DARK)):
        draw_offsets(curves, ROOT / "docs" / "_static" / f"offset-{name}.svg", colors)
    for name, curve in curves.items():
        print(name, *(f"{bits:.0f}" for _, bits in curve))
    results = train_all(load_example())
    draw_losses(results, ROOT / "docs" / "figures" / "loss_digits.png")
    text = table(results)
    write_between(ROOT / "docs" / "how-to" / "train.md", text)
    print(text)


if __name__ == "__main__":
    main()
