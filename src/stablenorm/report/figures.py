"""The pictures of `run`, `complexity` and the report, each on a Matplotlib figure; and as SVG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stablenorm.cost import STYLES, Measured, draw_roofline
from stablenorm.diagnosis import Diagnosis
from stablenorm.figures import COLORS
from stablenorm.report.findings import Output
from stablenorm.types import Array

# Pixels of a page and of a telephone, and panels side by side; a picture is drawn for each, so that
# letters keep their size.
_WIDTHS = {"wide": (720, 2), "narrow": (344, 1)}
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
# Groups of rows side by side: 3 pixels each on a telephone.
COLUMNS = 96
# Below this, in ulp, an element counts as exact; a logarithmic axis must start somewhere.
_LEAST = 1e-3
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def as_svg(
    draw: Callable[[Any, int], None], height: int, label: str, *, stacked: int = 1
) -> dict[str, str]:
    """
    Return a picture as SVG for each width; `draw` is given a figure, and how many panels fit beside.

    A narrow picture is `stacked` times as high: its panels stand one below the other.
    """
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    pictures = {}
    for name, (width, columns) in _WIDTHS.items():
        tall = height * (stacked if columns == 1 else 1)
        with mpl.rc_context(_STYLE):
            # 72 units per inch: a unit of the picture is a pixel of the page.
            figure = Figure(figsize=(width / 72, tall / 72), layout="constrained")
            draw(figure, columns)
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True)
        pictures[name] = _inlined(file.getvalue(), (width, tall), f"{name}-{label[:12]}", label)
    return pictures


def _inlined(text: str, size: tuple[int, int], name: str, label: str) -> str:
    """Cut an SVG file down to what may stand in a page beside others, in the page's colors."""
    from markupsafe import escape  # noqa: PLC0415

    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    # Only what is referred to keeps its id, made one that no other picture has.
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    prefix = re.sub(r"\W+", "-", name)
    text = re.sub(
        r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text
    )
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    width, height = size
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}">{text}'
    )


def _panels(figure: Any, columns: int, count: int) -> list[Any]:
    """Return so many axes, side by side or one below the other."""
    columns = min(columns, count)
    axes = figure.subplots(-(-count // columns), columns, squeeze=False)
    return list(axes.ravel()[:count])


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


def draw_rows(figure: Any, columns: int, low: Array, high: Array, mean: Array, std: Array) -> None:
    """Draw the range of each row, and its mean and std; of many rows, of groups of them."""
    axes = figure.subplots()
    every = -(-len(std) // COLUMNS)
    for first in range(0, len(std), every):
        here = slice(first, first + every)
        at = (first + min(first + every, len(std)) - 1) / 2
        axes.vlines(at, low[here].min(), high[here].max(), color=_GRAY, lw=1)
        middle, half = (float(np.median(each[here])) for each in (mean, std))
        axes.vlines(at, middle - half, middle + half, color=_OURS, lw=2 * columns)
    # Linear where most elements are, logarithmic beyond; 1 if all rows are zeros.
    unit = float(np.median(std)) or float(np.abs(high).max()) or 1.0
    axes.set_yscale("symlog", linthresh=10.0 ** round(math.log10(unit)))
    _finish(axes, xlabel="row", ylabel="elements of the row", xlim=(-0.5, len(std) - 0.5))
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_errors(figure: Any, columns: int, outputs: Mapping[str, Output]) -> None:
    """Draw, of each output, the share of elements with at least a given error."""
    errors = [each for o in outputs.values() for each in (o.error, o.plain_error)]
    largest = max(float(e.max(initial=1.0, where=np.isfinite(e))) for e in errors)
    # Where NaN and inf are drawn: beyond all numbers, and said to be so.
    beyond = 10.0 ** (math.ceil(math.log10(largest)) + 1)
    every = _panels(figure, columns, len(outputs))
    for axes, (name, output) in zip(every, outputs.items(), strict=True):
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


def draw_losses(figure: Any, _: int, found: Diagnosis) -> None:
    """Draw a row of bars for each method: the share of rows by bits lost."""
    lost = found.summary.lost
    every = figure.subplots(len(lost), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, counts) in zip(every, lost.items(), strict=True):
        # A single row among millions is still to be seen.
        share = np.where(counts > 0, np.maximum(counts / max(1, counts.sum()), 0.06), 0)
        colors = [_OURS if bits < 1 else _PLAIN for bits in range(len(counts))]
        axes.bar(range(len(counts)), share, color=colors, width=0.84)
        axes.set_title(found.methods[name], fontsize=11, fontweight="normal", pad=1, color=_GRAY)
        axes.set(ylim=(0, 1), yticks=[], xlim=(-0.6, found.bits + 0.6))
        axes.spines["left"].set_visible(False)
        axes.grid(alpha=0.3, axis="x")
        axes.tick_params(bottom=False, labelbottom=axes is every[-1])
    every[-1].set(xlabel="bits lost", xticks=range(0, found.bits + 1, found.bits // 6))


def draw_gradients(figure: Any, columns: int, results: Sequence[Any]) -> None:
    """Draw error against step, and every compared element in units of its bound."""
    left, right = _panels(figure, columns, 2)
    marks = zip((_OURS, _PLAIN, _THIRD), ("o-", "s--", "^:"), results, strict=False)
    for row, (color, style, result) in enumerate(marks):
        size = abs(result.numeric) or 1.0
        points = sorted((s.step, abs(s.numeric - result.numeric) / size) for s in result.curve)
        # A float64 says no more than 1e-17.
        errors = [max(e, 1e-17) if math.isfinite(e) else math.nan for _, e in points]
        name = f"d{result.name}"
        left.plot([step for step, _ in points], errors, style, ms=4, color=color, label=name)
        z = [d.z for d in result.differences if 0 < d.z < math.inf]
        right.plot(z, [row] * len(z), "o", ms=5, color=color, alpha=0.8)
    right.axvline(1, color=_INK, lw=1, ls=":")
    place = {"xycoords": right.get_xaxis_transform(), "textcoords": "offset points", "ha": "right"}
    right.annotate("wrong beyond", (1, 0.02), xytext=(-4, 0), color=_GRAY, **place)
    scales, step = {"xscale": "log", "yscale": "log"}, "step, in units of the row's spread"
    _finish(left, **scales, xlabel=step, title="relative error")
    bottom, title = (len(results) - 0.5, -0.5), "every compared element"
    _finish(right, xscale="log", xlabel="difference / its bound", title=title, ylim=bottom)
    right.set_xlim(right=10)
    right.set_yticks(range(len(results)), [f"d{result.name}" for result in results])
    figure.legend(loc="outside lower center", ncols=3)


def draw_costs(figure: Any, columns: int, costs: Sequence[Measured]) -> None:
    """Draw the roofline of the largest size, and bars of bytes per second for each size."""
    first, second = _panels(figure, columns, 2)
    draw_roofline(costs[-1], first)
    _finish(first, title="roofline: operations per second")
    place, names = 0.0, []
    for measured in costs:
        for direction in ("forward", "backward"):
            lines = [line for line in measured.lines if line.direction == direction]
            least = min(line.cost.moved for line in lines)
            for line in lines:
                rate = least / line.measured.median / measured.all_threads.copy
                second.barh(place, rate, color=STYLES[line.program][0], height=0.85)
                place += 1
            names.append((place - 2, f"{measured.matrix[0]} rows\n{direction}"))
            place += 0.8
    second.axvline(1, color=_INK, lw=1, ls=":")
    _finish(second, title="speed, of a copy", xlabel="bytes in and out per second / copy")
    second.invert_yaxis()
    second.set_yticks([at for at, _ in names], [name for _, name in names])
    second.tick_params(left=False)
    second.grid(visible=False, axis="y")
    shown = zip(*first.get_legend_handles_labels(), strict=True)
    handles = {name.removesuffix(", forward"): h for h, name in shown if name.endswith("forward")}
    where = {"loc": "outside lower center", "ncols": 3, "handletextpad": 0.1, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **where)
