"""The pictures of the report, each drawn for the width that is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stablenorm._run import Output
from stablenorm._types import Array
from stablenorm.report_page._gather import Rows
from stablenorm.report_page._html import TIMES, Html, number
from stablenorm.report_page._speed import COPY, OURS, OURS_FRESH, PLAIN, Speed
from stablenorm.report_page._svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Panel,
    Scale,
    bar,
    curve,
    dot,
    drawing,
    frame,
    line,
    upright,
    words,
)

# Columns of the picture of the rows: on a telephone 3 pixels each.
_COLUMNS = 96


def draw_rows(rows: Rows, width: int) -> Html:
    """Draw the range of each row, and its mean and std; of many rows, of groups of them."""
    every = -(-len(rows.mean) // _COLUMNS)
    groups = [slice(first, first + every) for first in range(0, len(rows.mean), every)]
    shown = [(group, rows.finite[group]) for group in groups]
    low = float(np.nanmin([rows.low, rows.mean - rows.std]))
    high = float(np.nanmax([rows.high, rows.mean + rows.std]))
    # Nearly linear where most elements are.
    unit = float(np.nanmedian(rows.std)) or abs(high) or 1.0
    x = Scale(-0.5, len(groups) - 0.5, LEFT, width - RIGHT)
    y = Scale(min(low, 0.0), max(high, 0.0), 260 - BOTTOM, TOP, "signed", max(unit, 1e-300))
    numbered = Scale(-0.5, len(rows.mean) - 0.5, LEFT, width - RIGHT)
    thick = max(1.0, 0.5 * (x.end - x.start) / len(groups))
    parts = [frame(Panel(numbered, y), "row", "elements of the row")]
    for place, (group, finite) in enumerate(shown):
        at = x.at(place)
        if not finite.all():
            parts.append(words(at, y.end + 8, TIMES, "middle", "wrong"))
        if not finite.any():
            continue
        mean, std = (float(np.median(v[group][finite])) for v in (rows.mean, rows.std))
        lowest, highest = (
            float(rows.low[group][finite].min()),
            float(rows.high[group][finite].max()),
        )
        parts.append(line(at, y.at(lowest), at, y.at(highest), "range"))
        parts.append(
            bar(at - thick / 2, y.at(mean - std), at + thick / 2, y.at(mean + std), "ours")
        )
    label = (
        f"Range, mean and standard deviation of {len(rows.mean)} rows, from {low:.3g} to {high:.3g}"
    )
    return drawing(width, 260, label, parts)


def draw_errors(outputs: dict[str, Output], width: int) -> Html:
    """Draw, of each output, the share of elements with at least a given error."""
    columns = 2 if width > 500 else 1
    each, height = width / columns, 210.0
    finite = [
        float(errors[np.isfinite(errors)].max(initial=0.0))
        for output in outputs.values()
        for errors in (output.error, output.plain_error)
    ]
    # Room to the right of the largest, for what is NaN or infinite.
    top = 10.0 ** (math.ceil(math.log10(max(1.0, *finite))) + 1)
    parts = []
    for place, (name, output) in enumerate(outputs.items()):
        left, above = (place % columns) * each, (place // columns) * height
        x = Scale(1e-3, top, left + LEFT, left + each - RIGHT, "log")
        y = Scale(1e-3, 100, above + height - BOTTOM, above + TOP, "log")
        panel = Panel(x, y)
        parts.append(frame(panel, "error, ulp", "elements with at least this error, %", name, 6))
        parts.append(curve(panel, _shares(output.plain_error, top), "plain line"))
        parts.append(curve(panel, _shares(output.error, top), "ours line"))
        parts.append(upright(panel, 0.5, "0.5 ulp"))
        if place == 0:
            parts.append(words(x.at(0.4), y.at(3), "stablenorm", "end", "ours label"))
            parts.append(words(x.at(top / 3), y.at(3e-3), "plain", "end", "plain label"))
    label = "Errors in ulp, " + "; ".join(
        f"{name}: stablenorm at most {number(float(output.error.max()))}, plain formula "
        f"{number(float(output.plain_error.max()))}"
        for name, output in outputs.items()
    )
    return drawing(width, -(-len(outputs) // columns) * height, label, parts)


def _shares(errors: Array, top: float) -> list[tuple[float, float]]:
    """Return points of the curve: error, and the share that reach it, in percent."""
    ordered = np.sort(np.where(np.isfinite(errors), errors, top).ravel())
    # Enough for the eye; the largest itself is among them, so that the fall is where it is.
    at = np.unique(np.append(np.geomspace(1e-3, top, 160), ordered[-1]))
    counts = ordered.size - np.searchsorted(ordered, at, "left")
    points = [
        (float(error), 100 * float(count) / ordered.size)
        for error, count in zip(at, counts, strict=True)
        if count
    ]
    return [*points, (float(max(ordered[-1], 1e-3)), 0.0)]


_KINDS = ("ours", "plain", "third", "fourth")


def draw_gradients(arguments: Sequence[Any], width: int) -> Html:
    """Draw error against step, and every compared element in units of its bound."""
    columns = 2 if width > 500 else 1
    each, height = width / columns, 230.0
    parts = [
        *_draw_steps(arguments, Scale(0, 1, LEFT, each - RIGHT), height),
        *_draw_bounds(
            arguments,
            (width - each, 0.0) if columns == 2 else (0.0, height),
            each,
            height,
        ),
    ]
    worst = max((result.z for result in arguments), default=0.0)
    label = f"The gradient check: worst difference {number(worst)} of its bound"
    return drawing(width, height if columns == 2 else 2 * height, label, parts)


def _draw_steps(arguments: Sequence[Any], place: Scale, height: float) -> list[str]:
    """Draw how far plain secants are from the extrapolated value, by their step."""
    curves = []
    for result in arguments:
        size = abs(result.numeric) or 1.0
        points = [(s.step, abs(s.numeric - result.numeric) / size) for s in result.curve]
        curves.append(sorted((s, e) for s, e in points if math.isfinite(e) and s > 0))
    every = [point for points in curves for point in points]
    steps = [s for s, _ in every] or [0.1, 1.0]
    errors = [max(e, 1e-17) for _, e in every] or [1e-16, 1.0]
    x = Scale(min(steps) / 1.5, max(steps) * 1.5, place.start, place.end, "log")
    y = Scale(min(errors) / 3, max(errors) * 3, height - BOTTOM, TOP, "log")
    parts = [frame(Panel(x, y), "step, in units of the row's spread", "relative error")]
    at = x.end
    for kind, result, points in reversed(list(zip(_KINDS, arguments, curves, strict=False))):
        if not points:
            continue
        parts.append(words(at, y.end - 8, f"d{result.name}", "end", f"{kind} label"))
        # "dgamma" is 58 pixels wide in the widest of the fonts, bold DejaVu Sans; and a gap.
        at -= 10 * (1 + len(result.name)) + 8
        parts.append(curve(Panel(x, y), points, f"{kind} line"))
        parts += [dot(x.at(s), y.at(e), kind) for s, e in points]
    return parts


def _draw_bounds(
    arguments: Sequence[Any], corner: tuple[float, float], width: float, height: float
) -> list[str]:
    """Draw each compared element at its difference over its bound; beyond 1 it is wrong."""
    left, above = corner
    judged = [result for result in arguments if result.differences]
    z = [d.z for result in judged for d in result.differences if 0 < d.z < math.inf]
    # Room for "dgamma" in bold letters.
    x = Scale(min([1e-3, *z]) / 2, max([10.0, *z]) * 2, left + 68, left + width - RIGHT, "log")
    y = Scale(-0.5, max(len(judged), 1) - 0.5, above + TOP, above + height - BOTTOM)
    parts = [
        frame(
            Panel(x, Scale(0, 0, above + height - BOTTOM, above + TOP, "signed")),
            "difference / its bound",
            "",
        ).replace(">0<", "><")
    ]
    parts.append(
        upright(Panel(x, Scale(0, 1, above + height - BOTTOM, above + TOP)), 1.0, "wrong beyond")
    )
    for row, (kind, result) in enumerate(zip(_KINDS, judged, strict=False)):
        parts.append(words(x.start - 8, y.at(row) + 4, f"d{result.name}", "end", f"{kind} label"))
        parts += [
            dot(x.at(d.z), y.at(row), kind if d.z <= 1 else "wrong", 3) for d in result.differences
        ]
    return parts


def draw_speeds(speeds: Sequence[Speed], width: int) -> Html:
    """Draw bars of bytes a second beside the copy."""
    names = {OURS: "ours", OURS_FRESH: "faint", PLAIN: "plain"}
    parts: list[str] = []
    # A heading, four bars of 15 pixels and a gap for each direction and size.
    above, left = 0.0, 104.0
    for speed in speeds:
        # A scale for each size: what stays in the caches would dwarf what does not.
        rates = [speed.rate(d, name) / 1e9 for d in speed.timings for name in speed.timings[d]]
        # The longest bar may have the longest number beside it; a digit of 11 pixels is 7 wide.
        room = 18 + 7 * max(len(f"{rate:.3g}") for rate in rates)
        x = Scale(0.0, 1.02 * max(rates), left, width - room)
        for direction, timings in speed.timings.items():
            parts.append(words(0, above + 13, f"{direction}, {speed.words}", "start", "name"))
            copied = x.at(speed.rate(direction, COPY) / 1e9)
            parts.append(line(copied, above + 17, copied, above + 20 + 17 * len(timings), "limit"))
            for place, name in enumerate(timings):
                rate = speed.rate(direction, name) / 1e9
                at = above + 20 + 17 * place
                kind = names.get(name, "copy")
                parts.append(bar(x.start, at, x.at(rate), at + 13, kind))
                said = name.replace("`", "").replace("stablenorm, ", "")
                parts.append(
                    words(x.start - 6, at + 11, said if name != OURS else "with out=", "end")
                )
                parts.append(words(x.at(rate) + 5, at + 11, f"{rate:.3g}", "start"))
            above += 20 + 17 * len(timings) + 16
    label = "Bytes a second of stablenorm, the plain formula and a copy"
    return drawing(width, above, label, parts)
