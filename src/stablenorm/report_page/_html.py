"""Words and tables as HTML. Every text is escaped here, so that nothing in a file is markup."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from typing import NewType

# What is ready to stand in the page; a str is not, until `text` has escaped it.
Html = NewType("Html", str)

# Widths of pictures in pixels, for a page and for a telephone.
WIDE, NARROW = 720, 344

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# What no page can show: control characters and lone halves of surrogate pairs, which may stand in
# the name of a file.
_UNSHOWN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def text(value: object) -> Html:
    """Escape a text; what has no picture becomes the replacement character."""
    return Html(html.escape(_UNSHOWN.sub("\ufffd", str(value))))


def prose(value: str) -> Html:
    """Escape a text, and set what stands between backticks as code."""
    return Html(re.sub(r"`([^`]+)`", r"<code>\1</code>", text(value)))


def paragraph(value: str, kind: str = "") -> Html:
    """Return one paragraph."""
    name = f' class="{kind}"' if kind else ""
    return Html(f"<p{name}>{prose(value)}</p>")


def method(value: str) -> Html:
    """Say how the numbers above were obtained."""
    return Html(f'<p class="method"><b>How obtained.</b> {prose(value)}</p>')


def absent(reason: str) -> Html:
    """Say in one line why something is not there."""
    return paragraph(f"Not computed: {reason.rstrip('.')}.", "absent")


def bullets(values: Sequence[str]) -> Html:
    """Return a list."""
    return Html("<ul>" + "".join(f"<li>{prose(value)}</li>" for value in values) + "</ul>")


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """Return a table that scrolls in a box of its own; the first cell of a row names it."""
    head = "".join(f'<th scope="col">{prose(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{prose(first)}</th>'
        + "".join(f"<td{_mood(cell)}>{prose(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for first, *cells in rows
    )
    # In the order of the keyboard, so that it can be scrolled without a mouse.
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">\n'
        f"<table><caption>{prose(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def _mood(cell: str) -> str:
    return ' class="fail"' if cell == "FAIL" else ""


def figure(wide: Html, narrow: Html, caption: str) -> Html:
    """Return a picture drawn twice, for a page and for a telephone, so that letters keep size."""
    return Html(
        f'<figure>\n<div class="wide">{wide}</div>\n<div class="narrow">{narrow}</div>\n'
        f"<figcaption>{prose(caption)}</figcaption></figure>"
    )


def both(draw: Callable[[int], Html], caption: str) -> Html:
    """Return a picture in both widths."""
    return figure(draw(WIDE), draw(NARROW), caption)


def section(number: int, name: str, title: str, parts: Sequence[Html]) -> Html:
    """Return a numbered section that can be linked to."""
    heading = f'<h2 id="{name}"><span class="number">{number}</span> {text(title)}</h2>'
    return Html(
        f'<section aria-labelledby="{name}">\n{heading}\n' + "\n".join(parts) + "\n</section>"
    )


def number(value: float, digits: int = 3) -> str:
    """Write a number with so many digits, a power of ten where it would be long."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    # Rounded first: 9.996 is 10.0 in three digits.
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if -4 < int(exponent) < 5:
        return f"{value:.{max(0, digits - 1 - int(exponent))}f}".replace("-", MINUS)
    return f"{mantissa.replace('-', MINUS)} {TIMES} {power(int(exponent))}"


def power(exponent: int) -> str:
    """Write a power of ten."""
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def count(value: int) -> str:
    """Write a count, its thousands apart."""
    # A narrow space that does not break.
    return f"{value:,}".replace(",", "\u202f")


def size(nbytes: float) -> str:
    """Write a number of bytes in the unit that fits."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= one:
            return f"{nbytes / one:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def seconds(value: float) -> str:
    """Three digits, in the unit that fits."""
    for unit, one in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= one:
            return f"{value / one:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def shape(lengths: Sequence[int]) -> str:
    """Write a shape as one says it."""
    return f" {TIMES} ".join(map(str, lengths))
