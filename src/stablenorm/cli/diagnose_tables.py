"""What `stablenorm diagnose` shows: where the data came from, then the diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stablenorm.analysis.diagnosis import Diagnosis
from stablenorm.cli.stream import Member
from stablenorm.cli.tables import _NARROW, _table


def print_diagnosis(member: Member, diagnosis: Diagnosis, console: Any) -> None:
    """Print one diagnosis to a rich console."""
    from rich.text import Text  # noqa: PLC0415

    # Not as markup: a file may have brackets in its name.
    console.print(Text(f"{member.label}: {member.dtype}, axis {list(diagnosis.axis)}"))
    console.print(diagnosis)


def print_members(members: Sequence[Member], console: Any) -> None:
    """Print what a file holds."""
    from rich.text import Text  # noqa: PLC0415

    table = _table("Arrays", console.width < _NARROW, "member", "shape", "dtype", "MB")
    for member in members:
        cells = (member.name, _shape(member), str(member.dtype), f"{member.nbytes / 1e6:.1f}")
        table.add_row(*map(Text, cells))
    console.print(table)


def _shape(member: Member) -> str:
    return " x ".join(map(str, member.shape)) or "one number"
