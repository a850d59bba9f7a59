"""The section on what it costs: counts, the roofline, predicted and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stablenorm.report_complexity import short_rows
from stablenorm.report_page._gather import COST_BYTES, Facts
from stablenorm.report_page._html import (
    MINUS,
    TIMES,
    Html,
    absent,
    both,
    method,
    number,
    paragraph,
    seconds,
    shape,
    size,
    table,
)
from stablenorm.report_page._svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Panel,
    Scale,
    curve,
    dot,
    drawing,
    frame,
    words,
)

_KINDS = {"plain NumPy": "plain", "reference": "third", "fused CPU": "ours"}


def cost_section(facts: Facts) -> list[Html]:
    """Count, predict, compare."""
    cost = facts.cost
    if isinstance(cost, str):
        return [absent(cost)]
    rows, n = cost.matrix
    elements = rows * n
    fused = [line for line in cost.lines if line.implementation == "fused CPU"]
    opening = f"For {shape(cost.matrix)} elements of {cost.dtype}: " + "; ".join(
        f"the fused {line.direction} needs {number(line.cost.flops / elements)} floating-point "
        f"operations an element and moves {number(_moved(line.cost) / elements)} bytes"
        for line in fused
    )
    return [
        paragraph(f"{opening}."),
        both(
            lambda width: draw_cost(cost, width),
            "The roofline: operations a second that the memory (the slope) and the arithmetic "
            "(the flat part) of this machine allow, and where each implementation is; filled: "
            "forward, hollow: backward. Then: time of the fused kernel by the number of rows, "
            "measured (dots) and predicted (lines).",
        ),
        table(
            "Counted, predicted, measured",
            (
                "what",
                "operations an element",
                "bytes an element",
                "bytes held besides",
                "predicted",
                "measured",
                "deviation",
            ),
            [_line(line, elements) for line in cost.lines],
        ),
        table(
            "What a forward keeps for the backward",
            ("kept", "formula", "bytes"),
            [(words_, formula, size(nbytes)) for words_, formula, nbytes in cost.saved],
        ),
        table(
            "Growth: time is in proportion to size to the power",
            ("of the fused kernel", "measured", "predicted"),
            [
                (f"{one.direction}, in {one.along}", _known(one.measured), _known(one.predicted))
                for one in cost.growth
            ],
        ),
        method(_method(facts, cost)),
    ]


def _line(line: Any, elements: int) -> tuple[str, ...]:
    deviation = line.deviation
    sign = "+" if deviation is not None and deviation >= 0 else MINUS
    return (
        f"{line.implementation}, {line.direction}",
        number(line.cost.flops / elements),
        number(_moved(line.cost) / elements),
        size(line.held[1]),
        "" if line.predicted is None else seconds(line.predicted.seconds),
        "" if line.measured is None else seconds(line.measured.median),
        "" if deviation is None else f"{sign}{100 * abs(deviation):.0f} %",
    )


def _moved(cost: Any) -> int:
    """Return what memory must move; where arrays stay in the caches by design, what is moved."""
    return int(cost.memory or cost.moved)


def _known(value: float | None) -> str:
    return "" if value is None else number(value)


def _method(facts: Facts, cost: Any) -> str:
    measured = [line.measured for line in cost.lines if line.measured is not None]
    rounds = min((timing.rounds for timing in measured), default=0)
    where = (
        "larger than the caches of this machine"
        if cost.beyond_caches
        else "small enough for the caches of this machine"
    )
    return (
        "Operations and bytes are counted by formulas in rows, n and the size of an element, "
        "which the tests hold against instrumented runs. The times are of random numbers of the "
        f"data's n and dtype, as many rows as make {size(COST_BYTES)} of `x` ({where}): medians of "
        f"{rounds} or more interleaved calls with {cost.threads} threads and `out=`. The ceilings "
        f"were measured in the same run: memory {cost.fused.memory / 1e9:.3g} GB/s by a copy of "
        f"the same size, arithmetic {cost.fused.flops / 1e9:.3g} Gflop/s in float64 by compiled "
        "loops. Deviation: predicted over measured time, less one. Exponents: straight lines "
        f"through logarithms of the medians at {_points(cost)} sizes. "
        f"{facts.origin.machine}, {facts.origin.date}. The GPU kernel is counted, not timed."
        + "".join(f" {words}" for words in short_rows(cost))
    )


def _points(cost: Any) -> int:
    return len({point.rows for point in cost.points if point.along == "rows"})


def draw_cost(cost: Any, width: int) -> Html:
    """Draw the roofline, and the time by the number of rows."""
    columns = 2 if width > 500 else 1
    each, height = width / columns, 240.0
    parts = _draw_roofline(cost, each, height)
    corner = (width - each, 0.0) if columns == 2 else (0.0, height)
    parts += _draw_growth(cost.points, corner, each, height)
    label = (
        f"Roofline: memory {cost.fused.memory / 1e9:.3g} GB/s, arithmetic "
        f"{cost.fused.flops / 1e9:.3g} Gflop/s; and time by rows"
    )
    return drawing(width, height if columns == 2 else 2 * height, label, parts)


def _draw_roofline(cost: Any, width: float, height: float) -> list[str]:
    dots = [
        (line, line.cost.flops / _moved(line.cost), line.cost.flops / line.measured.median)
        for line in cost.lines
        if line.measured is not None
    ]
    memory, flops = cost.fused.memory, cost.fused.flops
    across = [intensity for _, intensity, _ in dots] + [flops / memory]
    upward = [rate for *_, rate in dots] + [flops]
    x = Scale(min(across) / 3, max(across) * 6, LEFT, width - RIGHT, "log")
    y = Scale(min(upward) / 3, max(upward) * 2, height - BOTTOM, TOP, "log")
    panel = Panel(x, y)
    parts = [frame(panel, "operations a byte", "operations a second", "", 5)]
    # From where the slope enters the picture.
    start = max(x.low, y.low / memory)
    roof = [(start, memory * start), (flops / memory, flops), (x.high, flops)]
    parts.append(curve(panel, roof, "roof line"))
    for line, intensity, rate in dots:
        kind = _KINDS[line.implementation]
        hollow = " hollow" if line.direction == "backward" else ""
        parts.append(dot(x.at(intensity), y.at(rate), kind + hollow, 4))
    return parts + _legend(
        x.end, y.end - 8, [("fused", "ours"), ("ref.", "third"), ("plain", "plain")]
    )


def _draw_growth(
    points: Sequence[Any], corner: tuple[float, float], width: float, height: float
) -> list[str]:
    left, above = corner
    shown = sorted((point for point in points if point.along == "rows"), key=lambda p: p.rows)
    if not shown:
        return []
    times = [time for point in shown for time in (point.measured, point.predicted)]
    x = Scale(shown[0].rows / 1.3, shown[-1].rows * 1.3, left + LEFT, left + width - RIGHT, "log")
    y = Scale(min(times) / 2, max(times) * 2, above + height - BOTTOM, above + TOP, "log")
    panel = Panel(x, y)
    parts = [frame(panel, f"rows, {TIMES} {shown[0].n}", "seconds", "", 5)]
    for direction, kind in (("forward", "ours"), ("backward", "plain")):
        here = [point for point in shown if point.direction == direction]
        parts.append(curve(panel, [(p.rows, p.predicted) for p in here], f"{kind} line"))
        parts += [dot(x.at(p.rows), y.at(p.measured), kind, 3.5) for p in here]
    return parts + _legend(x.end, y.end - 8, [("forward", "ours"), ("backward", "plain")])


def _legend(right: float, base: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    """Write names in their colors, from the right."""
    parts = []
    for name, kind in reversed(entries):
        parts.append(words(right, base, name, "end", f"{kind} label"))
        # No bold letter of 12 pixels is wider than 9 on average, and a gap.
        right -= 9 * len(name) + 6
    return parts
