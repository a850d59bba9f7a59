"""Tables and numbers, as every command writes them."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import stablenorm

# Terminals narrower than this get tables without rules between the columns.
_NARROW = 90


def is_narrow(console: Console) -> bool:
    """Whether there is little room for columns."""
    return console.width < _NARROW


def print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str] | None],
) -> None:
    """Print rows of cells below their columns, the first one flush left; None draws a rule."""
    narrow = is_narrow(console)
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        # Rules between columns cost two of three characters of what is between the words.
        box=box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD,
        pad_edge=not narrow,
        padding=(0, 0) if narrow else (0, 1),
    )
    for i, column in enumerate(columns):
        table.add_column(
            column,
            justify="left" if i == 0 else "right",
            overflow="fold",
            # No word is cut in two while there are spaces to break at.
            min_width=max((len(word) for word in column.split()), default=0),
        )
    for row in rows:
        if row is None:
            table.add_section()
        else:
            # Not as markup: a file may have brackets in its name.
            table.add_row(*map(Text, row))
    console.print(table)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print plain text, a paragraph a line."""
    console.print(Text("\n".join(lines)))


def number(value: float) -> str:
    """Write three digits."""
    return f"{value:.3g}" if math.isfinite(value) else "NaN or inf"


def quantity(value: float, unit: str = "") -> str:
    """Write three digits and the unit, with the prefix that fits."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}".rstrip()
    prefix, size = ("u", 1e-6) if value >= 1e-6 else ("n", 1e-9)
    return f"{value / size:.3g} {prefix}{unit}" if value else f"0 {unit}".rstrip()


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape as a product."""
    return " x ".join(map(str, shape))


def as_json(content: dict[str, Any]) -> bytes:
    """Write figures as JSON, with what they were measured on."""
    origin = {
        "stablenorm": stablenorm.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    return (json.dumps(origin | content, indent=1) + "\n").encode()
