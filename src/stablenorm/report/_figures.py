"""The pictures of the report: Matplotlib's, as SVG in the colors of the page, for two widths."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stablenorm.cost import STYLES, Measured, draw_roofline
from stablenorm.diagnosis import Diagnosis
from stablenorm.figures import COLORS
from stablenorm.report._findings import Output
from stablenorm.report._gather import Rows
from stablenorm.report._numbers import number, power
from stablenorm.types import Array

# Pixels of a page and of a telephone; a picture is drawn for each, so that letters keep their size.
WIDTHS = {"wide": 720, "narrow": 344}
# The style sheet says what each color is on light and on dark paper; "0.2" is how `draw_roofline`
# writes the dark gray.
OURS, PLAIN, THIRD = COLORS[:3]
INK, GRAY = "#333333", "#777777"
_COLORS = {OURS: "ours", PLAIN: "plain", THIRD: "third", INK: "ink", GRAY: "muted"}
_RC: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "stablenorm", "font.size": 11, "axes.labelsize": 11,
    "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "xtick.labelsize": 11, "ytick.labelsize": 11, "legend.fontsize": 11, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GRAY,
    "axes.labelcolor": GRAY, "xtick.color": GRAY, "ytick.color": GRAY, "text.color": INK,
    "axes.titlecolor": INK, "grid.color": GRAY, "grid.linewidth": 0.7,
}  # fmt: skip
# Groups of rows side by side: 3 pixels each on a telephone.
_COLUMNS = 96


def svg(
    draw: Callable[[Any, bool], None], height: int, label: str, *, stacked: int = 1
) -> dict[str, str]:
    """
    Return a picture as SVG in each of `WIDTHS`; `draw` is given a figure, and whether it is narrow.

    A narrow picture is `stacked` times as high: its panels stand one below the other.
    """
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    pictures = {}
    for name, width in WIDTHS.items():
        narrow = name == "narrow"
        with mpl.rc_context(_RC):
            # 72 units per inch: a unit of the picture is a pixel of the page.
            tall = height * (stacked if narrow else 1)
            figure = Figure(figsize=(width / 72, tall / 72), layout="constrained")
            draw(figure, narrow)
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True)
        pictures[name] = _inlined(file.getvalue(), width, tall, f"{name}-{label[:12]}", label)
    return pictures


def _inlined(text: str, width: int, height: int, name: str, label: str) -> str:
    """Cut an SVG file down to what may stand in a page beside others, in the page's colors."""
    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    # Only what is referred to keeps its id, made one that no other picture has.
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    prefix = re.sub(r"\W+", "-", name)
    text = re.sub(
        r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text
    )
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    for color, variable in _COLORS.items():
        text = text.replace(color, f"var(--{variable})")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
    )
    from markupsafe import escape  # noqa: PLC0415

    return f'{head}aria-label="{escape(label)}">{text}'


def _panels(figure: Any, narrow: bool, count: int) -> list[Any]:
    """Return axes side by side, or one below the other where the page is narrow."""
    columns = 1 if narrow else min(2, count)
    axes = figure.subplots(-(-count // columns), columns, squeeze=False)
    return list(axes.ravel()[:count])


def _finish(axes: Any, **settings: Any) -> None:
    """Set what `settings` says, with light lines, and powers of ten as the page writes them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415

    axes.set(**settings)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
            axis.set_minor_locator(NullLocator())


def _tick(value: float) -> str:
    exponent = round(math.log10(abs(value))) if value else 0
    if -4 < exponent < 4:
        return number(value, 1)
    return ("\N{MINUS SIGN}" if value < 0 else "") + power(exponent)


def draw_rows(rows: Rows) -> dict[str, str]:
    """Draw the range of each row, and its mean and std; of many rows, of groups of them."""
    every = -(-len(rows.mean) // _COLUMNS)
    groups = [slice(first, first + every) for first in range(0, len(rows.mean), every)]
    largest = float(np.nanmax([np.abs(rows.low), np.abs(rows.high)])) or 1.0
    # Nearly linear where most elements are, logarithmic beyond.
    unit = max(float(np.nanmedian(rows.std)), 1e-300 * largest) or largest

    def bent(values: Array | float) -> Array:
        return np.sign(values) * np.log1p(np.abs(values) / unit)

    def draw(figure: Any, narrow: bool) -> None:
        axes = figure.subplots()
        for group in groups:
            finite = rows.finite[group]
            at = (group.start + min(group.stop, len(rows.mean)) - 1) / 2
            if not finite.all():
                axes.text(at, 0, "\N{MULTIPLICATION SIGN}", color=PLAIN, ha="center")
            if not finite.any():
                continue
            mean, std = (float(np.median(v[group][finite])) for v in (rows.mean, rows.std))
            span = bent(np.array([rows.low[group][finite].min(), rows.high[group][finite].max()]))
            axes.plot([at, at], span, color=GRAY, lw=1)
            ends = bent(np.array([mean - std, mean + std]))
            axes.plot([at, at], ends, color=OURS, lw=2 if narrow else 4, solid_capstyle="butt")
        last = math.floor(math.log10(largest))
        first = max(math.ceil(math.log10(unit)), last - 300)
        powers = [10.0**k for k in range(last, first - 1, -max(1, (last - first + 1) // 3))]
        ticks = [-value for value in powers] + [0.0] + powers[::-1]
        axes.set_yticks([float(bent(tick)) for tick in ticks], [_tick(tick) for tick in ticks])
        low, high = (float(f(bent(v))) for f, v in ((np.nanmin, rows.low), (np.nanmax, rows.high)))
        room = 0.05 * (max(high, 0) - min(low, 0)) or 1.0
        axes.set_ylim(min(low, 0) - room, max(high, 0) + room)
        _finish(axes, xlabel="row", ylabel="elements of the row", xlim=(-0.5, len(rows.mean) - 0.5))
        axes.xaxis.get_major_locator().set_params(integer=True)

    return svg(draw, 250, f"Range, mean and standard deviation of {len(rows.mean)} rows")


def draw_errors(outputs: Mapping[str, Output]) -> dict[str, str]:
    """Draw, of each output, the share of elements with at least a given error."""
    finite = [
        float(errors[np.isfinite(errors)].max(initial=0.0))
        for output in outputs.values()
        for errors in (output.error, output.plain_error)
    ]
    # Room to the right of the largest, for what is NaN or infinite.
    top = 10.0 ** (math.ceil(math.log10(max(1.0, *finite))) + 1)

    def draw(figure: Any, narrow: bool) -> None:
        for axes, (name, output) in zip(
            _panels(figure, narrow, len(outputs)), outputs.items(), strict=True
        ):
            for errors, color, style, label in (
                (output.plain_error, PLAIN, "--", "plain formula"),
                (output.error, OURS, "-", "stablenorm"),
            ):
                at, share = _shares(errors, top)
                axes.plot(at, share, style, color=color, lw=2, label=label)
            axes.axvline(0.5, color=INK, lw=1, ls=":", label="0.5 ulp")
            _finish(
                axes, xscale="log", yscale="log", xlim=(1e-3, top), ylim=(1e-3, 150), title=name,
                xlabel="error, ulp", ylabel="elements, %",
            )  # fmt: skip
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=3)

    height = 230 * -(-len(outputs) // 2)
    return svg(draw, height, "Share of elements by error in ulp: " + "; ".join(
        f"{name}: stablenorm at most {number(float(output.error.max(initial=0)))}, plain formula "
        f"{number(float(output.plain_error.max(initial=0)))}"
        for name, output in outputs.items()
    ), stacked=2)  # fmt: skip


def _shares(errors: Array, top: float) -> tuple[Array, Array]:
    """Return errors, and the percentage of elements that reach each."""
    # Whatever is less stands at the left edge.
    ordered = np.sort(np.maximum(np.where(np.isfinite(errors), errors, top), 1e-3).ravel())
    # Enough for the eye; the largest itself is among them, so that the fall is where it is.
    at = np.unique(np.append(np.geomspace(1e-3, top, 160), ordered[-1]))
    share = 100 * (ordered.size - np.searchsorted(ordered, at, "left")) / ordered.size
    at, share = at[share > 0], share[share > 0]
    # Down to the foot of the picture.
    return np.append(at, at[-1:]), np.append(share, 1e-9)


def draw_losses(found: Diagnosis) -> dict[str, str]:
    """Draw a row of bars for each method: the share of rows by bits lost."""
    lost = list(found.summary.lost.items())

    def draw(figure: Any, _: bool) -> None:
        every = figure.subplots(len(lost), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, counts) in zip(every, lost, strict=True):
            # A single row among millions is still to be seen.
            share = np.where(counts > 0, np.maximum(counts / max(1, int(counts.sum())), 0.06), 0)
            colors = [OURS if bits < 1 else PLAIN for bits in range(len(counts))]
            axes.bar(range(len(counts)), share, color=colors, width=0.84)
            axes.set_title(found.methods[name], fontsize=11, fontweight="normal", pad=1, color=GRAY)
            axes.set(ylim=(0, 1), yticks=[], xlim=(-0.6, found.bits + 0.6))
            axes.spines["left"].set_visible(False)
            axes.grid(alpha=0.3, axis="x")
            axes.tick_params(bottom=False, labelbottom=axes is every[-1])
        every[-1].set(xlabel="bits lost", xticks=range(0, found.bits + 1, found.bits // 6))

    worst = (
        f"{found.methods[name]} up to {int(np.flatnonzero(counts).max(initial=0))}"
        for name, counts in lost
    )
    return svg(draw, 46 * len(lost) + 46, "Bits of y lost: " + "; ".join(worst))


def draw_gradients(arguments: list[Any]) -> dict[str, str]:
    """Draw error against step, and every compared element in units of its bound."""
    colors = (OURS, PLAIN, THIRD)

    def draw(figure: Any, narrow: bool) -> None:
        left, right = _panels(figure, narrow, 2)
        for color, style, result in zip(colors, ("o-", "s--", "^:"), arguments, strict=False):
            size = abs(result.numeric) or 1.0
            points = sorted((s.step, abs(s.numeric - result.numeric) / size) for s in result.curve)
            shown = [(s, max(e, 1e-17)) for s, e in points if math.isfinite(e) and s > 0]
            if shown:
                left.plot(
                    *zip(*shown, strict=True), style, ms=4, color=color, label=f"d{result.name}"
                )
        _finish(
            left, xscale="log", yscale="log", xlabel="step, in units of the row's spread",
            title="relative error",
        )  # fmt: skip
        for row, (color, result) in enumerate(zip(colors, arguments, strict=False)):
            z = [d.z for d in result.differences if 0 < d.z < math.inf]
            right.plot(z, [row] * len(z), "o", ms=5, color=color, alpha=0.8)
        right.axvline(1, color=INK, lw=1, ls=":")
        right.annotate("wrong beyond", (1, 0.02), xycoords=right.get_xaxis_transform(),
                       xytext=(-4, 0), textcoords="offset points", ha="right", color=GRAY)  # fmt: skip
        _finish(
            right, xscale="log", xlabel="difference / its bound", title="every compared element",
            ylim=(len(arguments) - 0.5, -0.5),
        )  # fmt: skip
        right.set_xlim(right=10)
        right.set_yticks(range(len(arguments)), [f"d{result.name}" for result in arguments])
        figure.legend(loc="outside upper center", ncols=3)

    worst = max((result.z for result in arguments), default=0.0)
    return svg(
        draw, 250, f"The gradient check: worst difference {number(worst)} of its bound", stacked=2
    )


def draw_costs(costs: tuple[Measured, ...]) -> dict[str, str]:
    """Draw the roofline of the largest size, and bars of bytes per second for each size."""

    def draw(figure: Any, narrow: bool) -> None:
        first, second = _panels(figure, narrow, 2)
        draw_roofline(costs[-1], first)
        _finish(first, title="roofline: operations per second")
        _draw_bars(second, costs)
        handles, labels = first.get_legend_handles_labels()
        shown = [
            (h, label.replace(", forward", ""))
            for h, label in zip(handles, labels, strict=True)
            if label.endswith("forward")
        ]
        figure.legend(
            *zip(*shown, strict=True), loc="outside upper center", ncols=3, handletextpad=0.1
        )

    roof = costs[-1].all_threads
    return svg(draw, 290, (
        f"Roofline: copy {roof.copy / 1e9:.3g} GB/s, arithmetic {roof.flops / 1e9:.3g} Gflop/s; and "
        "bytes per second of each program"
    ), stacked=2)  # fmt: skip


def _draw_bars(axes: Any, costs: tuple[Measured, ...]) -> None:
    """Draw how fast each program moves what must be moved, beside a copy."""
    place, names = 0.0, []
    for measured in costs:
        for direction in ("forward", "backward"):
            lines = [line for line in measured.lines if line.direction == direction]
            least = min(line.cost.moved for line in lines)
            for line in lines:
                rate = least / line.measured.median / measured.all_threads.copy
                axes.barh(place, rate, color=STYLES[line.program][0], height=0.85)
                place += 1
            names.append((place - 2, f"{measured.matrix[0]} rows\n{direction}"))
            place += 0.8
    axes.axvline(1, color=INK, lw=1, ls=":")
    _finish(axes, title="speed, of a copy", xlabel="bytes in and out per second / copy")
    axes.invert_yaxis()
    axes.set_yticks([at for at, _ in names], [name for _, name in names])
    axes.tick_params(left=False)
    axes.grid(visible=False, axis="y")
