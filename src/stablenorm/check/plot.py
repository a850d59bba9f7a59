"""
The picture of a gradient report: error against step.

Drawn at 9 inches by 150 dots, so that 900 pixels show letters of 10 points at their size.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any

from stablenorm.check.report import ArgumentResult, GradientReport
from stablenorm.check.text import headline
from stablenorm.figures import COLORS, new_figure

# Below, an error is drawn at the floor: a float64 says no more.
_FLOOR = 1e-17


def plot_report(report: GradientReport, file: Any, format_: str | None) -> None:
    """Draw the report into a file, or an open one."""
    judged = [result for result in report.arguments if result.judged]
    figure = new_figure(9, 4.3)
    about = f"{report.verdict}: {report.diagnosis[0]}" if report.diagnosis else headline(report)
    # As many letters of 12 points as fit into 9 inches; the rest is in the text of the report.
    title = "\n".join(textwrap.wrap(about, 90, max_lines=2, placeholder=" ..."))
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    _draw_curves(figure.subplots(), judged)
    figure.savefig(file, format=format_, dpi=150)


def _draw_curves(axes: Any, judged: list[ArgumentResult]) -> None:
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
    xlabel, ylabel = "step, in units of the argument's own scale", "relative error"
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    title = "Dots: plain central differences at the worst place. Lines: how far backward may be off"
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    if not any(result.curve for result in judged):
        axes.set_xlim(1e-3, 1)
        text = "no steps were recorded" if judged else "nothing was compared"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="0.4")
