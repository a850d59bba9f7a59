"""What the pictures of the explanations have in common: a size at which a telephone shows letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
# Okabe and Ito: told apart by the colour-blind.
BLUE, SKY, RED, GREEN, GRAY = "#0072b2", "#56b4e9", "#d55e00", "#009e73", "0.45"
# Inches. A page 390 pixels wide leaves 358 for a picture: letters of 9 points, an eighth of an
# inch, are then 8.6 pixels high. At 9 inches, which was tried, they are 5, and nobody reads them.
WIDTH = 5.2
# Points: of words within a picture, and of its title and axes.
SMALL, LARGE = 9, 10
# Three pixels to one of the page: sharp on a telephone. The sheet keeps it from filling a screen.
DPI = 200


def make_figure(height: float) -> Any:
    """Return an empty figure of the common width."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def make_axes(height: float) -> tuple[Any, Any]:
    """Return a figure and its axes."""
    figure = make_figure(height)
    return figure, figure.subplots()


def put_legend(figure: Any, axes: Any) -> None:
    """Put the legend below, where it hides no curve."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL,
        columnspacing=1.2, handlelength=1.8,
    )  # fmt: skip


def save(figure: Any, name: str) -> None:
    """Write it into docs/figures, on white: legible on a dark page too."""
    for axes in figure.axes:
        axes.title.set_fontsize(LARGE)
        if axes.axison and axes.name == "rectilinear":
            axes.xaxis.label.set_fontsize(LARGE)
            axes.yaxis.label.set_fontsize(LARGE)
            axes.tick_params(labelsize=SMALL)
    figure.savefig(FIGURES / name, dpi=DPI, facecolor="white")
