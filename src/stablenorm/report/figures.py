"""The picture of the report, on a Matplotlib figure; and as SVG."""

import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stablenorm.figures import COLORS, new_figure
from stablenorm.report.findings import Output
from stablenorm.text import prose

_INK, _GRAY = "#333333", "#777777"
# The style sheet says what each color is on light and on dark paper.
_VARIABLES = {
    "ours": COLORS[0], "plain": COLORS[1], "third": COLORS[2], "ink": _INK, "muted": _GRAY,
}  # fmt: skip
_STYLE: Any = {
    "svg.fonttype": "none", "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlecolor": _INK, "text.color": _INK, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": _GRAY, "grid.alpha": 0.3, "axes.edgecolor": _GRAY,
    "axes.labelcolor": _GRAY, "xtick.color": _GRAY, "ytick.color": _GRAY, "xtick.minor.size": 0,
    "ytick.minor.size": 0, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
# Below this, in ulp, an element counts as exact; a logarithmic axis must start somewhere.
_LEAST = 1e-3


def as_svg(draw: Callable[[Any], None], label: str) -> str:
    """Return what `draw` draws on a figure as SVG, in the page's colors."""
    import matplotlib as mpl  # noqa: PLC0415

    # What is referred to has an id made from the salt, so that no two pictures share one.
    with mpl.rc_context(_STYLE | {"svg.hashsalt": label}):
        # Of 720 units by 360, which the page makes pixels; where there are fewer, it scrolls.
        figure = new_figure(10, 5)
        draw(figure)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r'<g id="[^"]*"', "<g", file.getvalue())
    for variable, color in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return f'<svg role="img" aria-label="{label}" ' + text.partition("<svg ")[2]


def _finish(figure: Any, columns: int) -> None:
    """Write numbers as the page does, and put one legend below all axes."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda v, _: prose(f"{v:g}" if v < 1e4 else f"{v:.0e}"))
    entries = figure.axes[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=columns, frameon=False)


def draw_errors(figure: Any, outputs: Mapping[str, Output]) -> None:
    """Draw, of each output, the share of elements with at least a given error."""
    # Where NaN and inf are drawn: beyond all numbers.
    errors = [each for one in outputs.values() for each in (one.error, one.plain_error)]
    beyond = 100 * max(float(e.max(initial=1.0, where=np.isfinite(e))) for e in errors)
    at = np.geomspace(_LEAST, beyond, 400)
    lines = -(-len(outputs) // 2)
    figure.set_figheight(3.2 * lines)
    for place, (name, output) in enumerate(outputs.items(), 1):
        axes = figure.add_subplot(lines, 2, place)
        for array, color, style, label in (
            (output.error, COLORS[0], "-", "stablenorm"),
            (output.plain_error, COLORS[1], "--", "plain formula"),
        ):
            ordered = np.sort(np.where(np.isfinite(array), array, beyond), axis=None)
            share = 100 * (1 - np.searchsorted(ordered, at) / ordered.size)
            axes.loglog(at, np.maximum(share, 1e-9), style, color=color, lw=2, label=label)
        axes.axvline(0.5, color=_INK, lw=1, ls=":", label="0.5 ulp")
        axes.set(xlim=(_LEAST, beyond), ylim=(1e-3, 150), title=name)
        axes.set(xlabel="error, ulp", ylabel="elements, %")
    _finish(figure, 3)
