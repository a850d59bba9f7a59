"""Sections and tables on a terminal, and figures as JSON, as every command writes them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

import stablenorm
from stablenorm import text
from stablenorm.report import Section, Table

# Terminals narrower than this get tables without rules between the columns.
_NARROW = 90


def print_sections(console: Console, sections: Iterable[Section]) -> None:
    """Print what sections say: their tables, and below all of them how the numbers were obtained."""
    lines: list[str] = []
    for section in sections:
        for table in section.tables:
            print_table(console, table)
        lines += [each for each in (section.absent, section.text, section.notes) if each]
    print_lines(console, lines)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print plain text, a paragraph per line, never as markup: a name may have brackets in it."""
    console.print(Text("\n".join(lines)))


def print_table(console: Console, table: Table) -> None:
    """Print rows of cells below their columns, the first one flush left."""
    narrow = console.width < _NARROW
    printed = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        # Rules between columns cost two of three characters of what is between the words.
        box=box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD,
        pad_edge=not narrow,
        padding=(0, 0) if narrow else (0, 1),
    )
    for i, column in enumerate(table.columns):
        printed.add_column(
            column,
            justify="left" if i == 0 else "right",
            overflow="fold",
            # No word is cut in two while there are spaces to break at.
            min_width=max((len(word) for word in column.split()), default=0),
        )
    for row in table.rows:
        if row is None:
            printed.add_section()
        else:
            printed.add_row(*map(Text, row))
    console.print(printed)


def to_json(content: dict[str, Any]) -> bytes:
    """Write figures as JSON, with what they were measured on."""
    origin = {
        "stablenorm": stablenorm.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    return text.to_json(text.plain(origin | content)).encode()
