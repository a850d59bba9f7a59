"""
The picture of a gradient report: error against step, and where gradients differ.

Drawn at 9 inches by 150 dots, so that 900 pixels show letters of 10 points at their size.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any

import numpy as np

from stablenorm.check.report import ArgumentResult, GradientReport
from stablenorm.check.text import headline
from stablenorm.figures import COLORS, new_figure

# The color bar, in units of the bound: what is smaller or larger has the color of the end.
_LEAST_Z, _MOST_Z = 1e-3, 1e3
# Below, an error is drawn at the floor: a float64 says no more.
_FLOOR = 1e-17
# More cells than that along an axis are too narrow to be seen alone: few of them become dots.
_CELLS = 64


def plot_report(report: GradientReport, file: Any, format_: str | None) -> None:
    """Draw the report into a file, or an open one."""
    judged = [result for result in report.arguments if result.judged]
    mapped = [result for result in judged if result.differences]
    heights = [0.65 + min(0.17 * math.prod(r.shape[:-1]), 2.2) for r in mapped]
    figure = new_figure(9, 4.3 + sum(heights) + 0.9 * bool(mapped))
    about = f"{report.verdict}: {report.diagnosis[0]}" if report.diagnosis else headline(report)
    # As many letters of 12 points as fit into 9 inches; the rest is in the text of the report.
    title = "\n".join(textwrap.wrap(about, 90, max_lines=2, placeholder=" ..."))
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    rows = figure.subplots(1 + len(mapped), 1, height_ratios=[3.6, *heights], squeeze=False)
    top, *below = rows[:, 0]
    _draw_curves(top, report, judged)
    drawn = [_draw_map(axes, result) for axes, result in zip(below, mapped, strict=True)]
    if drawn:
        below[-1].set_xlabel("place along the last axis")
        place = {"location": "bottom", "extend": "both", "aspect": 50, "fraction": 0.08}
        words = "z = |backward - numeric| / bound; more than 1: wrong."
        words += " Grey: not compared one by one"
        figure.colorbar(drawn[-1], ax=below, label=words, **place)
    figure.savefig(file, format=format_, dpi=150)


def _draw_curves(axes: Any, report: GradientReport, judged: list[ArgumentResult]) -> None:
    """Draw for each argument how far each plain difference is from `numeric`, and the bounds."""

    def level(error: float, label: str, **style: Any) -> None:
        if math.isfinite(error) and error:
            axes.axhline(max(error, _FLOOR), label=label, **style)

    for place, result in enumerate(judged):
        color, name = COLORS[place % len(COLORS)], f"d{result.name}"
        # Relative to the larger of the element and the RMS of all; hypot does not overflow.
        known = [d.numeric for d in result.differences if math.isfinite(d.numeric)]
        sizes = [abs(result.numeric), math.hypot(*known) / math.sqrt(max(len(known), 1))]
        size = max(filter(math.isfinite, sizes), default=0.0) or 1.0
        errors = [(s.step, abs(s.numeric - result.numeric) / size) for s in result.curve]
        points = sorted((s, max(error, _FLOOR)) for s, error in errors if math.isfinite(error))
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, ms=4, lw=1.5)
        level((result.bound_numeric + result.bound_actual) / size, f"{name}: bound", color=color)
        if result.z > 1:
            difference = abs(result.actual - result.numeric) / size
            level(difference, f"{name}: backward is off", color=color, ls=":", lw=2)
    # The coarsest relative error that each other layer would have seen.
    for layer in dict.fromkeys(finding.layer for finding in report.findings):
        seen = [f.resolution for f in report.findings if f.layer == layer and f.resolution]
        level(max(seen, default=0.0), f"{layer} would have seen", color="0.45", ls="-.", lw=1)
    xlabel, ylabel = "step, in units of the argument's own scale", "relative error"
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    title = "Dots: plain central differences at the worst place. Lines: how far backward may be\n"
    title += "off, and is; what the other layers would have seen"
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    if not any(result.curve for result in judged):
        axes.set_xlim(1e-3, 1)
        text = "no steps were recorded" if judged else "nothing was compared"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="0.4")


def _draw_map(axes: Any, result: ArgumentResult) -> Any:
    """Place each compared element on (rows, n), its color that of z."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    rows, n = math.prod(result.shape[:-1]), result.shape[-1] if result.shape else 1
    places = [d.place for d in result.differences]
    flat = [int(np.ravel_multi_index(place, result.shape)) if place else 0 for place in places]
    row, column = np.divmod(np.array(flat), n)
    z = np.array([d.z for d in result.differences])
    z = np.clip(np.where(np.isnan(z), np.inf, z), _LEAST_Z, _MOST_Z)
    style = {"cmap": "RdYlBu_r", "norm": LogNorm(_LEAST_Z, _MOST_Z)}
    axes.set_facecolor("#dcdcdc")
    small = max(rows, n) <= _CELLS
    if small or 4 * len(flat) >= rows * n:
        cells = np.full((rows, n), np.nan)
        cells[row, column] = z
        masked = np.ma.masked_invalid(cells)
        # Rules between cells, while these are wider than the rules.
        drawn = axes.pcolormesh(masked, edgecolors="white", linewidth=0.6 if small else 0, **style)
    else:
        # The largest on top.
        order = np.argsort(z)
        style |= {"s": 34, "marker": "s", "edgecolors": "black", "linewidths": 0.5, "zorder": 3}
        at = column[order] + 0.5, row[order] + 0.5
        drawn = axes.scatter(*at, c=z[order], clip_on=False, **style)
    axes.set(xlim=(0, n), ylim=(rows, 0), ylabel="row" if rows > 1 else "")
    if rows == 1:
        axes.set_yticks([])
    probes = f" and {result.probes} probes" if result.probes else ""
    pattern = f" ({result.pattern})" if result.pattern else ""
    said = f"{result.failing} differ{pattern}" if result.verdict == "FAIL" else result.verdict
    title = f"d{result.name}: {said}; {result.checked} of {result.total} compared{probes}"
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    return drawn
