"""The pictures of the report and of `complexity`, each on a Matplotlib figure; and as SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stablenorm.cost import Measured, draw_roofline
from stablenorm.figures import COLORS
from stablenorm.report.findings import Output

# Pixels of a page; where there are fewer the picture scrolls, so that letters keep their size.
_WIDTH = 720
# The style sheet says what each color is on light and on dark paper; "0.2" is how `draw_roofline`
# writes the dark gray.
_OURS, _PLAIN, _THIRD = COLORS[:3]
_INK, _GRAY = "#333333", "#777777"
_VARIABLES = {_OURS: "ours", _PLAIN: "plain", _THIRD: "third", _INK: "ink", _GRAY: "muted"}
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "stablenorm", "font.size": 11, "axes.labelsize": 11,
    "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "xtick.labelsize": 11, "ytick.labelsize": 11, "legend.fontsize": 11, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _GRAY,
    "axes.labelcolor": _GRAY, "xtick.color": _GRAY, "ytick.color": _GRAY, "text.color": _INK,
    "axes.titlecolor": _INK, "grid.color": _GRAY, "grid.linewidth": 0.7,
}  # fmt: skip
# Below this, in ulp, an element counts as exact; a logarithmic axis must start somewhere.
_LEAST = 1e-3
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def as_svg(draw: Callable[[Any], None], height: int, label: str) -> str:
    """Return what `draw` draws on the figure that it is given, so many pixels high, as SVG."""
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(_STYLE):
        # 72 units per inch: a unit of the picture is a pixel of the page.
        figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    return _inlined(file.getvalue(), height, label)


def _inlined(text: str, height: int, label: str) -> str:
    """Cut an SVG file down to what may stand in a page beside others, in the page's colors."""
    from markupsafe import escape  # noqa: PLC0415

    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    # Only what is referred to keeps its id, made one that no other picture has.
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    prefix = re.sub(r"\W+", "-", label)
    text = re.sub(
        r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text
    )
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}">{text}'
    )


def _finish(axes: Any, **settings: Any) -> None:
    """Set what `settings` says, with light lines, and powers of ten where numbers would be long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415

    axes.set(**settings)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_minor_locator(NullLocator())
        if axis.get_scale() != "linear":
            axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _tick(value: float) -> str:
    exponent = round(math.log10(abs(value))) if value else 0
    if -4 < exponent < 4:
        return f"{value:g}"
    return ("-" if value < 0 else "") + "10" + str(exponent).translate(_SUPERSCRIPTS)


def draw_errors(figure: Any, outputs: Mapping[str, Output]) -> None:
    """Draw, of each output, the share of elements with at least a given error."""
    errors = [each for o in outputs.values() for each in (o.error, o.plain_error)]
    largest = max(float(e.max(initial=1.0, where=np.isfinite(e))) for e in errors)
    # Where NaN and inf are drawn: beyond all numbers, and said to be so.
    beyond = 10.0 ** (math.ceil(math.log10(largest)) + 1)
    every = figure.subplots(-(-len(outputs) // 2), 2).ravel()
    for axes in every[len(outputs) :]:
        axes.remove()
    for axes, (name, output) in zip(every, outputs.items(), strict=False):
        for array, color, style, label in (
            (output.error, _OURS, "-", "stablenorm"),
            (output.plain_error, _PLAIN, "--", "plain formula"),
        ):
            ordered = np.sort(np.clip(np.where(np.isfinite(array), array, beyond), _LEAST, beyond))
            # Enough for the eye; the largest itself is among them, so that the fall is where it is.
            at = np.unique(np.append(np.geomspace(_LEAST, beyond, 160), ordered.max()))
            share = 100 * (1 - np.searchsorted(np.sort(ordered, axis=None), at) / ordered.size)
            axes.plot(at, np.maximum(share, 1e-9), style, color=color, lw=2, label=label)
        axes.axvline(0.5, color=_INK, lw=1, ls=":", label="0.5 ulp")
        if not all(np.isfinite(array).all() for array in errors):
            place = {"xycoords": axes.get_xaxis_transform(), "ha": "right", "va": "bottom"}
            axes.annotate("NaN or inf", (beyond, 0.03), rotation=90, color=_GRAY, **place)
        _finish(
            axes, xscale="log", yscale="log", xlim=(_LEAST, beyond), ylim=(1e-3, 150), title=name,
            xlabel="error, ulp", ylabel="elements, %",
        )  # fmt: skip
    figure.legend(
        *every[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )


def draw_costs(figure: Any, measured: Measured) -> None:
    """Draw the roofline, and each program below it."""
    axes = figure.subplots()
    draw_roofline(measured, axes)
    _finish(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
