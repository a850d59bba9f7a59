"""The section on what it costs: counts, the roofline, predicted and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stablenorm.cost import count_kept
from stablenorm.report_page._gather import COST_BYTES, Facts
from stablenorm.report_page._html import (
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

_KINDS = {"plain NumPy": "plain", "reference": "third", "fused CPU kernel": "ours"}


def cost_section(facts: Facts) -> list[Html]:
    """Count, predict, compare."""
    cost = facts.cost
    if isinstance(cost, str):
        return [absent(cost)]
    rows, n = cost.matrix
    elements = rows * n
    fused = [line for line in cost.lines if line.program == "fused CPU kernel"]
    opening = f"For {shape(cost.matrix)} elements of {cost.dtype}: " + "; ".join(
        f"the fused {line.direction} needs {number(line.cost.flops / elements)} floating-point "
        f"operations per element and moves {number(line.cost.moved / elements)} bytes"
        for line in fused
    )
    return [
        paragraph(f"{opening}."),
        both(
            lambda width: draw_cost(cost, width),
            "The roofline: operations per second that the memory (the slope) and the arithmetic "
            "(the flat part) of this machine allow, and where each program is; filled: forward, "
            "hollow: backward.",
        ),
        table(
            "Counted, predicted, measured",
            (
                "what",
                "operations per element",
                "bytes per element",
                "bytes held",
                "roofline",
                "measured",
                "measured / roofline",
            ),
            [_line(line, elements) for line in cost.lines],
        ),
        table(
            "What a forward keeps for the backward, beside `x`",
            ("kept", "bytes"),
            [(what, size(nbytes)) for what, nbytes in count_kept(cost.matrix, cost.dtype).items()],
        ),
        method(_method(facts, cost)),
    ]


def _line(line: Any, elements: int) -> tuple[str, ...]:
    return (
        f"{line.program}, {line.direction}",
        number(line.cost.flops / elements),
        number(line.cost.moved / elements),
        size(line.cost.held),
        seconds(line.predicted),
        seconds(line.measured.median),
        number(line.measured.median / line.predicted),
    )


def _method(facts: Facts, cost: Any) -> str:
    rounds = min(line.measured.rounds for line in cost.lines)
    roof = cost.all_threads
    return (
        "Operations and bytes are counted by formulas in rows, n and the size of an element. The "
        "times are of random numbers of the data's n and dtype, as many rows as make "
        f"{size(COST_BYTES)} of `x`: medians of {rounds} or more interleaved calls with "
        f"{roof.threads} threads and `out=`. Roofline: the longer of bytes over "
        f"{roof.copy / 1e9:.3g} GB/s, a copy of the same size, and operations over "
        f"{roof.flops / 1e9:.3g} Gflop/s, multiply-adds in float64, both measured in the same run; "
        "plain NumPy and the reference are held to those of one thread. "
        f"{facts.origin.machine}, {facts.origin.date}."
    )


def draw_cost(cost: Any, width: int) -> Html:
    """Draw the roofline."""
    roof, height = cost.all_threads, 260.0
    label = (
        f"Roofline: memory {roof.copy / 1e9:.3g} GB/s, arithmetic {roof.flops / 1e9:.3g} Gflop/s"
    )
    return drawing(width, height, label, _draw_roofline(cost, width, height))


def _draw_roofline(cost: Any, width: float, height: float) -> list[str]:
    dots = [
        (line, line.cost.intensity, line.cost.flops / line.measured.median) for line in cost.lines
    ]
    memory, flops = cost.all_threads.copy, cost.all_threads.flops
    across = [intensity for _, intensity, _ in dots] + [flops / memory]
    upward = [rate for *_, rate in dots] + [flops]
    x = Scale(min(across) / 3, max(across) * 6, LEFT, width - RIGHT, "log")
    y = Scale(min(upward) / 3, max(upward) * 2, height - BOTTOM, TOP, "log")
    panel = Panel(x, y)
    parts = [frame(panel, "operations per byte", "operations per second", "", 5)]
    # From where the slope enters the picture.
    start = max(x.low, y.low / memory)
    roof = [(start, memory * start), (flops / memory, flops), (x.high, flops)]
    parts.append(curve(panel, roof, "roof line"))
    for line, intensity, rate in dots:
        kind = _KINDS[line.program]
        hollow = " hollow" if line.direction == "backward" else ""
        parts.append(dot(x.at(intensity), y.at(rate), kind + hollow, 4))
    return parts + _legend(
        x.end, y.end - 8, [("fused", "ours"), ("ref.", "third"), ("plain", "plain")]
    )


def _legend(right: float, base: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    """Write names in their colors, from the right."""
    parts = []
    for name, kind in reversed(entries):
        parts.append(words(right, base, name, "end", f"{kind} label"))
        # No bold letter of 12 pixels is wider than 9 on average, and a gap.
        right -= 9 * len(name) + 6
    return parts
