"""What `stablenorm check` shows: what was run and assumed, then the report."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from stablenorm.cli.check_file import FileCheck

# A check that is over sooner needs no bar.
_PATIENCE_S = 1.0


def print_check(check: FileCheck, console: Any) -> None:
    """Print one check to a rich console."""
    from rich.text import Text  # noqa: PLC0415

    shape = " x ".join(map(str, check.shape))
    console.print(Text.assemble((check.source, "bold"), f": {check.functions}"))
    console.print(
        Text(f"x {shape} {check.dtype}, seed {check.seed}; eps {check.eps:g} ({check.eps_origin})")
    )
    for note in check.notes:
        console.print(Text(f"note: {note}"))
    console.print()
    console.print(check.report)


def save_check(check: FileCheck, file: Any) -> None:
    """Write all of it as JSON into an open binary file."""
    file.write((json.dumps(check.as_dict(), indent=1, allow_nan=False) + "\n").encode())


@contextlib.contextmanager
def patient_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function to be told (done, total); after a second a bar shows it, on a terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    # Bound to the real stream: the user's functions have theirs muted while they run.
    console = Console(file=sys.stderr)
    bar = Progress(
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task: Any = bar.add_task(what, total=None)
    begin, shown = time.monotonic(), False

    def told(done: int, total: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - begin > _PATIENCE_S:
            shown = True
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield told
    finally:
        if shown:
            bar.stop()
