"""Figures: colours that everybody tells apart, and a Matplotlib figure that needs no window."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

# The palette of Okabe and Ito.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of that many inches; nothing but `savefig` draws it."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        msg = 'Matplotlib is needed to plot: pip install "stablenorm[plot]"'
        raise ImportError(msg) from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_lines(title: str, lines: Mapping[str, tuple[Any, Any]], **settings: Any) -> Any:
    """Return a figure of named lines, each its x and y, which differ by dashes as well as by colors."""
    figure = new_figure(5, 3)
    axes, styles = figure.subplots(), ("-", "--", "-.", ":", (0, (6, 2, 1, 2, 1, 2)))
    for (name, both), color, style in zip(lines.items(), COLORS, styles, strict=False):
        axes.plot(*both, ls=style, color=color, lw=2, label=name)
    axes.set_title(title, parse_math=False)
    axes.set(**settings)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure


def draw_sizes(title: str, values: Any) -> Any:
    """Return a figure of the powers of ten of an array's magnitudes, all axes but the last as rows."""
    figure = new_figure(6, 3)
    axes = figure.subplots()
    with np.errstate(divide="ignore"):
        powers = np.log10(np.abs(values).reshape(-1, values.shape[-1] if values.ndim else 1))
    # Zeros are left blank.
    image = axes.imshow(np.ma.masked_invalid(powers), aspect="auto", interpolation="nearest")
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="column", ylabel="row")
    figure.colorbar(image, label="power of ten")
    return figure


def as_svg(figure: Any) -> str:
    """Return a figure as SVG for a page: its text stays text, its black is the color of the page's text."""
    import matplotlib as mpl  # noqa: PLC0415  # whoever has a figure has it

    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue().replace("#000000", "currentColor")
    return svg[svg.index("<svg") :]
