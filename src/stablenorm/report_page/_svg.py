"""
Lines, dots and words as SVG, in the colors of the page.

Colors are classes that the style sheet fills in, so that one picture serves light, dark and print.
No element has an id: two pictures in a page can never collide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from stablenorm.report_page._html import MINUS, TIMES, Html, power, text

Anchor = Literal["start", "middle", "end"]
# Wide enough for a negative power of ten in letters of 11 pixels, and for the name of the axis beside it.
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 22.0, 38.0


class Scale(NamedTuple):
    """From values to pixels: "linear", "log", or "signed", logarithmic on both sides of zero."""

    low: float
    high: float
    start: float
    end: float
    kind: Literal["linear", "log", "signed"] = "linear"
    # Of a signed scale: below this magnitude it is nearly linear.
    unit: float = 1.0

    def at(self, value: float) -> float:
        """Return the pixel; what lies outside is put on the edge."""
        low, high = self._bend(self.low), self._bend(self.high)
        bent = self._bend(min(max(value, self.low), self.high))
        return self.start + (self.end - self.start) * (bent - low) / ((high - low) or 1.0)

    def ticks(self, most: int = 7) -> list[float]:
        """Return round values, about `most` at most."""
        if self.kind == "linear":
            return _round_values(self.low, self.high, most)
        if self.kind == "log":
            first, last = math.ceil(_log(self.low) - 1e-9), math.floor(_log(self.high) + 1e-9)
            if last - first < 2:
                return _round_decades(self.low, self.high)
            every = math.ceil((last - first + 1) / most)
            return [10.0**k for k in range(first, last + 1) if k % every == 0]
        largest = max(abs(self.low), abs(self.high))
        first, last = math.ceil(_log(self.unit)), math.floor(_log(largest))
        every = max(1, math.ceil(2 * (last - first + 1) / most))
        sizes = [10.0**k for k in range(last, first - 1, -every)]
        both = [-size for size in sizes] + [0.0] + sizes[::-1]
        return [value for value in both if self.low <= value <= self.high]

    def _bend(self, value: float) -> float:
        if self.kind == "linear":
            return value
        if self.kind == "log":
            return _log(value)
        return math.copysign(math.log1p(abs(value) / self.unit), value)


class Panel(NamedTuple):
    """Two axes."""

    x: Scale
    y: Scale


def drawing(width: float, height: float, label: str, parts: Iterable[str]) -> Html:
    """Return a whole picture; `label` says what it shows to who cannot see it."""
    return Html(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(label)}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def frame(panel: Panel, x_name: str, y_name: str, title: str = "", x_ticks: int = 7) -> str:
    """Draw the axes, light lines at round values, and the names; `y_name` stands above."""
    x, y = panel
    parts = []
    for value in x.ticks(x_ticks):
        at = x.at(value)
        parts.append(line(at, y.start, at, y.end, "grid"))
        parts.append(words(at, y.start + 15, tick(value, x), "middle"))
    for value in y.ticks(9 if y.kind == "signed" else 5):
        at = y.at(value)
        parts.append(line(x.start, at, x.end, at, "grid"))
        parts.append(words(x.start - 6, at + 4, tick(value, y), "end"))
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    parts.append(words((x.start + x.end) / 2, y.start + 31, x_name, "middle", "name"))
    parts.append(words(x.start, y.end - 8, y_name, "start", "name"))
    if title:
        parts.append(words(x.end, y.end - 8, title, "end", "title"))
    return "\n".join(parts)


def tick(value: float, scale: Scale) -> str:
    """Write a round value as its axis does."""
    if scale.kind == "linear" or value == 0:
        return f"{value:.6g}".replace("-", MINUS)
    exponent = math.floor(_log(abs(value)) + 1e-9)
    if -4 < exponent < 4:
        return f"{value:g}".replace("-", MINUS)
    factor = round(abs(value) / 10.0**exponent) if exponent > -300 else 1
    times = "" if factor == 1 else f"{factor}{TIMES}"
    return (MINUS if value < 0 else "") + times + power(exponent)


def line(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    """Draw a straight line."""
    return f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'


def curve(panel: Panel, points: Sequence[tuple[float, float]], kind: str) -> str:
    """Draw a line through points given in values."""
    at = " ".join(f"{panel.x.at(x):.1f},{panel.y.at(y):.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{at}"/>'


def dot(x: float, y: float, kind: str, radius: float = 2.5) -> str:
    """Draw a dot."""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>'


def bar(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    """Draw a filled rectangle between two corners."""
    left, top = min(x0, x1), min(y0, y1)
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{abs(x1 - x0):.1f}" '
        f'height="{abs(y1 - y0):.1f}"/>'
    )


def words(x: float, y: float, value: str, anchor: Anchor = "start", kind: str = "tick") -> str:
    """Write words; `y` is their base line."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(value)}</text>'
    )


def upright(panel: Panel, value: float, label: str, kind: str = "limit") -> str:
    """Draw a vertical line at a value, and say beside its foot what it is."""
    at = panel.x.at(value)
    # To the side where there is room.
    left = at > (panel.x.start + panel.x.end) / 2
    return line(at, panel.y.start, at, panel.y.end, kind) + words(
        at + (-4 if left else 4), panel.y.start - 6, label, "end" if left else "start", "note"
    )


def _log(value: float) -> float:
    return math.log10(max(value, 1e-320))


def _round_decades(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, where there are few of these."""
    powers = range(math.floor(_log(low)), math.ceil(_log(high)) + 1)
    values = [factor * 10.0**exponent for exponent in powers for factor in (1, 2, 5)]
    return [value for value in values if low <= value <= high]


def _round_values(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    rough = span / max(1, most - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [
        step * k for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
