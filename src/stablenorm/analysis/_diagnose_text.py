"""A diagnosis as text, as rich tables, and as plain data."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_conditions import MARKS
from stablenorm.analysis._diagnose_sweep import working_dtype

if TYPE_CHECKING:
    from stablenorm.analysis.diagnosis import Diagnosis

_WIDTH = 100


def as_text(diagnosis: Diagnosis) -> str:
    """Return the diagnosis in lines of at most 100 columns."""
    lines = _wrapped(headline(diagnosis), "  ")
    for sentence in sentences(diagnosis):
        lines += _wrapped(f"  {sentence}", "    ")
    rows = method_rows(diagnosis)
    if diagnosis.summary.rows:
        lines.append(f"  bits of y lost, of {diagnosis.bits}: median row, worst row, rows losing 4")
        width = max(len(title) for title, *_ in rows)
        for title, median, worst, several in rows:
            lines.append(f"    {title:{width}} {median:>4} {worst:>4} {several:>9}")
        lines.append("  worst rows:")
        for row in diagnosis.worst:
            lines += _wrapped(f"    {row.advice}", "        ")
    return "\n".join(lines)


def headline(diagnosis: Diagnosis) -> str:
    """Return what was looked at."""
    shape = " x ".join(map(str, diagnosis.shape))
    return (
        f"{shape} as {diagnosis.dtype}: {count_rows(diagnosis.summary.rows)} of {diagnosis.n}, "
        f"eps {diagnosis.eps:g}"
    )


def count_rows(count: int) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{count} row" + "s" * (count != 1)


def sentences(diagnosis: Diagnosis) -> list[str]:
    """Return one sentence for each thing worth knowing about all rows together."""
    summary = diagnosis.summary
    if not summary.rows:
        return ["no rows: nothing to say"]
    said = []
    if summary.condition_y.any():
        said.append(
            "condition number of y: "
            f"{median_power(summary.condition_y, summary.largest_condition_y)} in the median row, "
            f"{summary.largest_condition_y:.2g} in the worst; of dx: "
            f"{median_power(summary.condition_dx, summary.largest_condition_dx)}, "
            f"{summary.largest_condition_dx:.2g}"
        )
    working = np.dtype(working_dtype(diagnosis.dtype)).name
    for mark in MARKS:
        if count := summary.marks[mark.name]:
            meaning = mark.meaning.format(working=working)
            said.append(f"{mark.name}: {count_rows(count)} ({meaning})")
    return said


def median_power(counts: Array, largest: float) -> str:
    """Return the median of condition numbers counted by powers of two: at most the largest."""
    power = _median(counts)
    if power == len(counts) - 1:
        return f"2^{power} or more"
    if power == 0:
        return f"at most {min(2.0, largest):.2g}"
    return f"about {min(2.0 ** (power + 0.5), largest):.2g}"


def _median(counts: Array) -> int:
    """Return the middle of what was counted by whole numbers."""
    return int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2))


def method_rows(diagnosis: Diagnosis) -> list[tuple[str, str, str, str]]:
    """Return, for each method, its title, the median and the worst loss, and rows losing 4 bits."""
    summary = diagnosis.summary
    rows = []
    for name, title in diagnosis.methods.items():
        counts = summary.lost[name]
        if not counts.any():
            rows.append((title, "-", "-", "-"))
            continue
        several = f"{counts[4:].sum() / counts.sum():.1%}"
        rows.append((title, str(_median(counts)), f"{summary.largest_lost[name]:.0f}", several))
    return rows


def as_rich(diagnosis: Diagnosis) -> Any:
    """Return the diagnosis as tables that a rich console prints."""
    from rich import box  # noqa: PLC0415
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[Any] = [Text(headline(diagnosis), style="bold")]
    parts += [Text(sentence) for sentence in sentences(diagnosis)]
    if not diagnosis.summary.rows:
        return Group(*parts)
    table = Table(
        title=f"bits of y lost, of {diagnosis.bits}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("method", overflow="fold")
    for column in ("median row", "worst row", "rows losing 4"):
        table.add_column(column, justify="right", min_width=6, max_width=7)
    for cells in method_rows(diagnosis):
        # As they are: brackets in a title are no markup.
        table.add_row(*map(Text, cells))
    parts += [Text(), table]
    if diagnosis.worst:
        parts += [Text("worst rows", style="bold")]
        parts += [Text(f"  {row.advice}") for row in diagnosis.worst]
    return Group(*parts)


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return all but the numbers of every row as plain data."""
    held = {
        "shape": diagnosis.shape,
        "dtype": diagnosis.dtype,
        "axis": diagnosis.axis,
        "n": diagnosis.n,
        "eps": diagnosis.eps,
        "bits": diagnosis.bits,
        "methods": diagnosis.methods,
        "summary": diagnosis.summary._asdict(),
        "worst": [asdict(row) for row in diagnosis.worst],
    }
    return {key: _plain(value) for key, value in held.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, drop_whitespace=True
    ) or [""]
