"""What the commands share: checks of options, exit statuses, a progress bar."""

from __future__ import annotations

import argparse
import importlib.util
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stablenorm.cli.bench_measure import count_bytes, physical_memory
from stablenorm.cli.files import InputError, check_target

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INCONCLUSIVE, EXIT_INTERRUPTED = 1, 2, 3, 130


class Help(argparse.RawDescriptionHelpFormatter):
    """Lines as they are written, but for those that the terminal is too narrow for."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Prose, which is not indented, is set anew; lists and tables line by line.
        lines = re.sub(r"(?<=\S)\n(?=\S)", " ", super()._fill_text(text, width, indent))
        return "\n".join(_wrapped(line, width) for line in lines.splitlines())


def _wrapped(line: str, width: int) -> str:
    """Go on below where the line began, or what is explained beside it, if there is room."""
    if len(line) <= width:
        return line
    beside = re.search(r"\S {2,}(?=\S)", line)
    start = len(line) - len(line.lstrip())
    if beside is not None and beside.end() < 3 * width // 4:
        start = beside.end()
    return textwrap.fill(line, width, subsequent_indent=" " * start, break_on_hyphens=False)


def check_plot(path: Path | None) -> None:
    """Refuse a picture that could not be written or drawn."""
    check_target("--plot", path, (".png", ".svg", ".pdf"))
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        msg = 'Matplotlib is needed for --plot: pip install "stablenorm[plot]"'
        raise InputError(msg)


def check_shape(shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    """Refuse a shape without elements, or one that does not fit in memory."""
    if min(shape) < 1:
        msg = f"--shape must be of lengths >= 1, got {' '.join(map(str, shape))}"
        raise InputError(msg)
    needed, there = max(count_bytes(shape, dtype) for dtype in dtypes), physical_memory()
    if needed > there:
        msg = (
            f"--shape must fit in memory, got {' '.join(map(str, shape))}, which takes "
            f"{needed / 1e9:.1f} GB to time, of {there / 1e9:.1f} GB"
        )
        raise InputError(msg)


def unique(values: Sequence[Any]) -> list[Any]:
    """Return each value once, in the order given."""
    return list(dict.fromkeys(values))


@contextmanager
def step_bar(total: int, per_second: float = 10) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal, and give the function that moves it on by one step."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    with Progress(
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=per_second,
    ) as progress:
        task: Any = progress.add_task("", total=total)

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        yield step
