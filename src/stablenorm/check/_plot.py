"""
The picture of a gradient report: error against step, and where gradients differ.

Drawn at 9 inches by 100 to 150 dots, so that 900 pixels show letters of 10 points at their size.
"""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from stablenorm.check._tables import headline

if TYPE_CHECKING:
    from stablenorm.check._report import ArgumentResult, GradientReport

# Okabe and Ito's, told apart by everybody; a fourth argument and later ones begin again.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY = "#dcdcdc"
_WRONG = "#f4a582"
# Colour bar, in units of the bound: what is smaller or larger has the color of the end.
_LEAST_Z, _MOST_Z = 1e-3, 1e3
# Below, an error is drawn at the floor: a float64 says no more.
_FLOOR = 1e-17
# More cells than that along an axis are too narrow to be seen alone: few of them become dots.
_CELLS = 64


def plot_report(report: GradientReport, file: Any, format_: str | None) -> None:
    """Draw the report into a file, or an open one."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        msg = 'Matplotlib is needed to plot a report: pip install "stablenorm[plot]"'
        raise ImportError(msg) from error
    judged = [result for result in report.arguments if result.judged]
    mapped = [result for result in judged if result.differences]
    heights = [_height(result) for result in mapped]
    figure = Figure(figsize=(9, 4.3 + sum(heights) + 0.9 * bool(mapped)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(report), fontsize=12, fontweight="bold", parse_math=False)
    top, *below = figure.subplots(1 + len(mapped), 1, height_ratios=[3.6, *heights], squeeze=False)[
        :, 0
    ]
    _draw_curves(top, report, judged)
    drawn = None
    for axes, result in zip(below, mapped, strict=True):
        drawn = _draw_map(axes, result)
    if drawn is not None:
        below[-1].set_xlabel("place along the last axis")
        bar = figure.colorbar(
            drawn, ax=below, location="bottom", extend="both", aspect=50, fraction=0.08, pad=0.03
        )
        bar.set_label(
            "z = |backward - numeric| / bound; more than 1: wrong\n"
            "Grey: not compared one by one. Light red: wrong as well, found by probes"
        )
    figure.savefig(file, format=format_, dpi=150)


def _title(report: GradientReport) -> str:
    """Return the verdict, and what is wrong if that is known."""
    about = f"{report.verdict}: {report.diagnosis[0]}" if report.diagnosis else headline(report)
    # As many letters of 12 points as fit into 9 inches; the rest is in the text of the report.
    return "\n".join(textwrap.wrap(about, 90, max_lines=2, placeholder=" ..."))


def _draw_curves(axes: Any, report: GradientReport, judged: list[ArgumentResult]) -> None:
    """Draw, for each argument, the V: distance of each plain secant from the extrapolated value."""
    levels = []
    for place, result in enumerate(judged):
        color = _COLORS[place % len(_COLORS)]
        size = _size(result)
        points = [(s.step, abs(s.numeric - result.numeric) / size) for s in result.curve]
        points = [(step, max(error, _FLOOR)) for step, error in points if math.isfinite(error)]
        if points:
            steps, errors = zip(*sorted(points), strict=True)
            axes.plot(steps, errors, "o-", color=color, ms=4, lw=1.5)
            _continue_curve(axes, result, size, color)
        levels += _levels(result, size, color)
    levels += [
        (finding_resolution, "0.45", "-.", f"{layer} would have seen")
        for layer, finding_resolution in _resolutions(report)
    ]
    for level, color, style, _ in levels:
        axes.axhline(level, color=color, ls=style, lw=2 if style == ":" else 1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="step, in units of the argument's own scale",
        ylabel="relative error",
    )
    axes.set_title(
        "At the worst place. Dots: plain central differences; dashed: how they go on (step², "
        "\nnoise / step). Lines: how far backward may be off, and is; what other layers would see",
        fontsize=9,
        loc="left",
    )
    axes.grid(alpha=0.25)
    axes.margins(x=0.02, y=0.08)
    _label_levels(axes, levels)
    if not any(result.curve for result in judged):
        axes.set_xlim(1e-3, 1)
        text = "no steps were recorded" if judged else "nothing was compared"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="0.4")


def _continue_curve(axes: Any, result: ArgumentResult, size: float, color: str) -> None:
    """
    Draw what a plain difference would do at smaller steps: the other side of the V.

    Its error is C step^2 from the neglected terms, and noise / step from rounding, both known.
    """
    clear = [
        abs(s.numeric - result.numeric) / s.step**2
        for s in result.curve
        # Below ten times the noise, the error says little about C.
        if abs(s.numeric - result.numeric) > 10 * s.noise > 0
    ]
    noise = [s.noise * s.step for s in result.curve if 0 < s.noise < math.inf]
    if not clear or not noise:
        return
    steepness, level = clear[-1], float(np.median(noise))
    lowest = (level / steepness) ** (1 / 3)
    # A gradient near the largest or smallest float has no V that could be drawn.
    if not (math.isfinite(steepness) and lowest > 1e-100):
        return
    last = min(s.step for s in result.curve)
    steps = np.geomspace(min(lowest / 30, last), last, 100)
    errors = (steepness * steps**2 + level / steps) / size
    axes.plot(steps, errors, "--", color=color, lw=1, alpha=0.8)


def _levels(result: ArgumentResult, size: float, color: str) -> list[tuple[float, str, str, str]]:
    """Return (height, color, style, words) of the lines that belong to one argument."""
    levels = []
    bound = (result.bound_numeric + result.bound_actual) / size
    if math.isfinite(bound):
        levels.append((max(bound, _FLOOR), color, "-", f"d{result.name}: bound"))
    difference = abs(result.actual - result.numeric) / size
    if result.z > 1 and math.isfinite(difference):
        levels.append((max(difference, _FLOOR), color, ":", f"d{result.name}: backward is off"))
    return levels


def _resolutions(report: GradientReport) -> list[tuple[str, float]]:
    """Return for each other layer the coarsest relative error that it would have seen."""
    coarsest: dict[str, float] = {}
    for finding in report.findings:
        if finding.resolution is not None and 0 < finding.resolution < math.inf:
            known = coarsest.get(finding.layer, 0.0)
            coarsest[finding.layer] = max(known, finding.resolution)
    return list(coarsest.items())


def _label_levels(axes: Any, levels: list[tuple[float, str, str, str]]) -> None:
    """Write what each line is at its right end, the words moved apart where lines are close."""
    if not levels:
        return
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    # Of the height of the axes: a line of 8 points, of 3 inches.
    needed = 0.055
    at = -math.inf
    for level, color, _, words in sorted(levels):
        height = (math.log10(level) - low) / (high - low)
        at = max(height, at + needed)
        axes.annotate(
            words,
            (1, height),
            xycoords="axes fraction",
            xytext=(1.02, at),
            textcoords="axes fraction",
            color=color,
            fontsize=8,
            va="center",
            annotation_clip=False,
            # To the middle of the left end of the words, not across them.
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5, "relpos": (0, 0.5)},
        )


def _size(result: ArgumentResult) -> float:
    """Return what errors are relative to: the larger of the element and the RMS of all."""
    numeric = [d.numeric for d in result.differences if math.isfinite(d.numeric)]
    # hypot neither overflows nor vanishes.
    rms = math.hypot(*numeric) / math.sqrt(len(numeric)) if numeric else 0.0
    known = abs(result.numeric) if math.isfinite(result.numeric) else 0.0
    return max(known, rms if result.index is not None else 0.0) or 1.0


def _shape(result: ArgumentResult) -> tuple[int, ...]:
    """Return the argument's shape; if it is not known, that of the places that were compared."""
    places = [d.place for d in result.differences]
    return result.shape or tuple(max(axis) + 1 for axis in zip(*places, strict=True))


def _grid(result: ArgumentResult) -> tuple[int, int]:
    """Return (rows, n) of the argument."""
    shape = _shape(result)
    return max(1, math.prod(shape[:-1])), shape[-1] if shape else 1


def _height(result: ArgumentResult) -> float:
    """Return inches for a map of so many rows, words included."""
    return 0.65 + min(0.17 * _grid(result)[0], 2.2)


def _draw_map(axes: Any, result: ArgumentResult) -> Any:
    """Place each compared element on (rows, n), coloured by z."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    rows, n = _grid(result)
    flat = [
        int(np.ravel_multi_index(d.place, _shape(result))) if d.place else 0
        for d in result.differences
    ]
    row, column = np.divmod(np.array(flat), n)
    z = np.array([d.z for d in result.differences])
    z = np.clip(np.where(np.isnan(z), np.inf, z), _LEAST_Z, _MOST_Z)
    style = {"cmap": "RdYlBu_r", "norm": LogNorm(_LEAST_Z, _MOST_Z)}
    axes.set_facecolor(_GREY)
    _draw_pattern(axes, result)
    if max(rows, n) <= _CELLS or 4 * len(flat) >= rows * n:
        cells = np.full((rows, n), np.nan)
        cells[row, column] = z
        drawn = axes.pcolormesh(
            np.ma.masked_invalid(cells),
            edgecolors="white",
            # Rules between cells, while these are wider than the rules.
            linewidth=0.6 if max(rows, n) <= _CELLS else 0,
            **style,
        )
    else:
        # The largest on top.
        order = np.argsort(z)
        drawn = axes.scatter(
            column[order] + 0.5,
            row[order] + 0.5,
            c=z[order],
            s=34,
            marker="s",
            edgecolors="black",
            linewidths=0.5,
            clip_on=False,
            zorder=3,
            **style,
        )
    axes.set(xlim=(0, n), ylim=(rows, 0), ylabel="row")
    axes.set_title(_map_title(result), fontsize=10, loc="left", parse_math=False)
    _number_cells(axes, rows, n)
    return drawn


def _draw_pattern(axes: Any, result: ArgumentResult) -> None:
    """Shade the row or column that the pattern names, of which no element may be compared."""
    shape = _shape(result)
    found = re.fullmatch(r"(last row|row|column) ?(\(?[\d, ]*\)?)", result.pattern)
    if found is None:
        return
    kind, digits = found[1], tuple(int(part) for part in re.findall(r"\d+", found[2]))
    if kind == "column":
        axes.axvspan(digits[0], digits[0] + 1, color=_WRONG, lw=2)
        return
    row = math.prod(shape[:-1]) - 1
    if digits:
        row = digits[0] if len(digits) == 1 else int(np.ravel_multi_index(digits, shape[:-1]))
    axes.axhspan(row, row + 1, color=_WRONG, lw=2)


def _number_cells(axes: Any, rows: int, n: int) -> None:
    """Put whole numbers at the middle of their cells."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    for axis, count, most in ((axes.xaxis, n, 9), (axes.yaxis, rows, 5)):
        ticks = MaxNLocator(nbins=most, integer=True).tick_values(0, max(count - 1, 1))
        whole = [int(t) for t in ticks if 0 <= t < count and t == int(t)]
        axis.set_ticks([t + 0.5 for t in whole], [str(t) for t in whole])
    if rows == 1:
        axes.set_ylabel("")
        axes.set_yticks([])


def _map_title(result: ArgumentResult) -> str:
    compared = f"{result.checked} of {result.total} compared"
    if result.probes:
        compared += f" and {result.probes} probes"
    if result.verdict != "FAIL":
        return f"d{result.name}: {result.verdict}; {compared}"
    where = f" ({result.pattern})" if result.pattern else ""
    return f"d{result.name}: {result.failing} differ{where}; {compared}"
