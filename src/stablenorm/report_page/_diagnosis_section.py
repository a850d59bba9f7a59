"""The section on what other methods would lose on these data."""

from __future__ import annotations

from collections.abc import Sequence

from stablenorm._types import Array
from stablenorm.analysis._diagnose_text import method_rows, sentences
from stablenorm.analysis.diagnosis import Diagnosis
from stablenorm.report_page._gather import Facts
from stablenorm.report_page._html import (
    Html,
    absent,
    both,
    bullets,
    count,
    method,
    paragraph,
    table,
)
from stablenorm.report_page._svg import (
    LEFT,
    RIGHT,
    Scale,
    bar,
    drawing,
    line,
    tick,
    words,
)

# As many of the worst rows as one reads.
_WORST = 6


def diagnosis_section(facts: Facts) -> list[Html]:
    """Say which methods lose how much, and on which rows."""
    found = facts.diagnosis
    if isinstance(found, str):
        return [absent(found)]
    said = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences(found)]
    parts = [paragraph(" ".join(said))]
    lost = found.summary.lost
    if any(counts.any() for counts in lost.values()):
        caption = (
            f"How many rows lose how many of the {found.bits} bits of `y`, by method; the height "
            "of a bar is the share of rows. At 0 nothing is lost beyond one rounding."
        )
        histograms = [(found.methods[name], counts) for name, counts in lost.items()]
        parts += [
            both(lambda width: draw_losses(histograms, found.bits, width), caption),
            table(
                f"Bits of y lost, of {found.bits}",
                ("method", "median row", "worst row", "rows losing 4 or more"),
                method_rows(found),
            ),
        ]
    if found.worst:
        parts.append(paragraph("The rows that are hardest, the hardest first:"))
        parts.append(bullets([f"{row.advice}." for row in found.worst[:_WORST]]))
    parts.append(method(_method(found)))
    return parts


def _method(found: Diagnosis) -> str:
    return (
        f"Predicted from one sweep over all {count(found.summary.rows)} rows: the sums that each "
        "method forms are formed as it forms them, in its precision; with its mean and `rstd` the "
        "error of the row follows in closed form. Bits lost: log2 of the RMS error of `y` over "
        "the row, in units of 2^-p of its RMS, between 0 and p, the precision of the dtype. "
        "`gamma` and `beta` are left out. The condition number of `y` is the RMS of the row over "
        "its standard deviation: how many times larger a relative error of `x` is in `y`. "
        "That stablenorm loses none is not predicted but measured, under Accuracy."
    )


def draw_losses(histograms: Sequence[tuple[str, Array]], bits: int, width: int) -> Html:
    """Draw a row of bars for each method: the share of rows by bits lost."""
    each, tall = 46.0, 24.0
    height = len(histograms) * each + 40
    x = Scale(-0.5, bits + 0.5, LEFT, width - RIGHT)
    foot = height - 34
    parts = []
    # Room for two digits, and round where p is 53.
    every = 4 if bits <= 24 else 8
    for value in range(0, bits + 1, every):
        parts.append(line(x.at(value), 16, x.at(value), foot, "grid"))
        parts.append(words(x.at(value), foot + 15, tick(value, x), "middle"))
    parts.append(words((x.start + x.end) / 2, foot + 30, "bits lost", "middle", "name"))
    half = 0.42 * (x.end - x.start) / (bits + 1)
    for place, (title, counts) in enumerate(histograms):
        base = 42 + place * each
        total = max(1, int(counts.sum()))
        # Words first, so that bars stand before them and never under their margin.
        parts.append(words(x.start, base - tall - 4, title, "start", "name"))
        for lost, rows in enumerate(counts):
            if rows:
                # A single row among millions is still to be seen.
                top = base - max(1.5, tall * int(rows) / total)
                kind = "ours" if lost < 1 else "plain"
                parts.append(bar(x.at(lost) - half, base, x.at(lost) + half, top, kind))
        parts.append(line(x.start, base, x.end, base, "axis"))
    label = "Bits of y lost: " + "; ".join(
        f"{title} up to {max((k for k, rows in enumerate(counts) if rows), default=0)}"
        for title, counts in histograms
    )
    return drawing(width, height, label, parts)
