"""What `stablenorm diagnose` shows: where the data came from, then the diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stablenorm.analysis.diagnosis import Diagnosis
from stablenorm.cli.stream import Member
from stablenorm.cli.tables import print_table, shape_text


def print_diagnosis(member: Member, diagnosis: Diagnosis, console: Any) -> None:
    """Print one diagnosis to a rich console."""
    from rich.text import Text  # noqa: PLC0415

    # Not as markup: a file may have brackets in its name.
    console.print(Text(f"{member.label}: {member.dtype}, axis {list(diagnosis.axis)}"))
    console.print(diagnosis)


def print_members(members: Sequence[Member], console: Any) -> None:
    """Print what a file holds."""
    rows = [
        (
            member.name,
            shape_text(member.shape) or "one number",
            str(member.dtype),
            f"{member.nbytes / 1e6:.1f}",
        )
        for member in members
    ]
    print_table(console, "Arrays", ("member", "shape", "dtype", "MB"), rows)
