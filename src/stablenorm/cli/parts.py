"""What the commands share: help, checks of options, exit statuses, progress bars, files written."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from stablenorm.cli.files import InputError, check_target, write_beside
from stablenorm.threads import get_num_threads, set_num_threads

DTYPES = ("float32", "float16", "bfloat16", "float64")

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INCONCLUSIVE, EXIT_INTERRUPTED = 1, 2, 3, 130

# Seconds: what is over sooner needs no bar.
_PATIENCE_S = 1.0


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


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that reads one layer norm: file, eps, seed."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="an .npz file, or a directory of .npy files, that holds x and, optionally, gamma, "
        "beta, dy, eps; default: the bundled data",
    )
    parser.add_argument("--eps", type=float, help="default: eps of the file, or 1e-5")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of a random dy, if the file has none; default: 0"
    )


def add_outputs(parser: argparse.ArgumentParser, *, plot: str) -> None:
    """Add ``--json`` and ``--plot`` to a command."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE.json", help="write all figures to this file"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help=f"{plot} into this file")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse files of ``--json`` and ``--plot`` that could not be written or drawn."""
    check_target("--json", arguments.json, (".json",))
    check_plot(arguments.plot)


def check_plot(path: Path | None) -> None:
    """Refuse a picture that could not be written or drawn."""
    check_target("--plot", path, (".png", ".svg", ".pdf"))
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        msg = 'Matplotlib is needed for --plot: pip install "stablenorm[plot]"'
        raise InputError(msg)


def write_json(path: Path | None, content: bytes) -> None:
    """Write the file of ``--json``, if it was asked for."""
    if path is not None:
        write_beside(path, lambda file: file.write(content))


def write_plot(path: Path | None, plot: Callable[[Any, str], object]) -> None:
    """Call ``plot(file, format)`` for the file of ``--plot``, if it was asked for."""
    if path is not None:
        kind = path.suffix[1:].lower()
        write_beside(path, lambda file: plot(file, kind))


def check_shape(shape: Sequence[int], bytes_per_element: int) -> None:
    """Refuse a shape without elements, or one that does not fit in memory."""
    given = " ".join(map(str, shape))
    if min(shape) < 1:
        msg = f"--shape must be of lengths >= 1, got {given}"
        raise InputError(msg)
    needed, there = bytes_per_element * math.prod(shape), _physical_memory()
    if needed > there:
        msg = (
            f"--shape must fit in memory, got {given}, which takes {needed / 1e9:.1f} GB, of "
            f"{there / 1e9:.1f} GB; take fewer rows"
        )
        raise InputError(msg)


def _physical_memory() -> float:
    """Bytes of memory in this machine; infinity where the system does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def check_at_least(option: str, value: int | None, least: int) -> None:
    """Refuse a number that is too small."""
    if value is not None and value < least:
        msg = f"{option} must be >= {least}, got {value}"
        raise InputError(msg)


def use_threads(threads: int | None) -> int:
    """Set how many threads a call may use, if asked to; return how many it may."""
    if threads is not None:
        set_num_threads(threads)
    return get_num_threads()


@contextmanager
def progress_bar(what: str, per_second: float = 10) -> Iterator[Callable[..., None]]:
    """Give ``progress(done, total, what)``: a bar shows it on a terminal, after a second."""
    # Bound to the real stream: a user's functions have theirs muted while they run.
    console = Console(file=sys.stderr)
    bar = Progress(
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=per_second,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(what, total=None)
    begin, shown = time.monotonic(), False

    def progress(done: int, total: int, what: str | None = None) -> None:
        nonlocal shown
        if not shown and time.monotonic() - begin > _PATIENCE_S:
            shown = True
            bar.start()
        bar.update(task, completed=done, total=total, description=what)

    try:
        yield progress
    finally:
        if shown:
            bar.stop()


@contextmanager
def step_bar(total: int, per_second: float = 10) -> Iterator[Callable[[str], None]]:
    """Give the function that is told what each of so many steps does when it begins."""
    with progress_bar("", per_second) as progress:
        done = 0

        def step(what: str) -> None:
            nonlocal done
            progress(done, total, what)
            done += 1

        yield step
