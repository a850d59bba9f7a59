"""What the commands share: options and their checks, files written whole, tables, progress bars."""

import argparse
import errno
import importlib.util
import math
import os
import platform
import secrets
import stat
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable
from rich.text import Text

import stablenorm
from stablenorm import text
from stablenorm.text import Section, Table
from stablenorm.types import check_eps

KINDS = "layer", "rms"

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INCONCLUSIVE, EXIT_INTERRUPTED = 1, 2, 3, 130

# Seconds: what is over sooner needs no bar.
_PATIENCE_S = 1.0


class InputError(Exception):
    """What the user gave cannot be used; the text is the one line to show."""


# ---- options ----


class _Help(argparse.RawDescriptionHelpFormatter):
    def _fill_text(self, text: str, width: int, _indent: str) -> str:
        """Set paragraphs anew, and leave lists, whose lines are indented, as they are written."""
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in p else textwrap.fill(p, width) for p in paragraphs)


def add_command(
    commands: Any, job: Callable[[argparse.Namespace], int], summary: str, about: str, more: str
) -> argparse.ArgumentParser:
    """Add a command that does `job`, called like the module that `job` is in."""
    name = job.__module__.rpartition(".")[2]
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=about, epilog=more, formatter_class=_Help
    )
    parser.set_defaults(job=job)
    return parser


def add_shape(parser: argparse.ArgumentParser, about: str, **more: Any) -> None:
    """Add ``--shape`` to a command."""
    parser.add_argument("--shape", nargs="+", type=at_least(1), metavar="N", help=about, **more)


def add_kind(parser: argparse.ArgumentParser) -> None:
    """Add ``--kind`` to a command."""
    parser.add_argument(
        "--kind", choices=KINDS, default="layer", help="of the norm; default: layer"
    )


def add_axis(parser: argparse.ArgumentParser) -> None:
    """Add ``--axis`` to a command."""
    parser.add_argument(
        "--axis", nargs="+", type=int, default=[-1], metavar="K", help="normalized; default: -1"
    )


def add_member(parser: argparse.ArgumentParser) -> None:
    """Add ``--member`` to a command."""
    about = "which array of an .npz or .safetensors file; default: x, or the only one"
    parser.add_argument("--member", metavar="NAME", help=about)


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add ``--threads`` to a command."""
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="default: as in any call")


def add_output(
    parser: argparse.ArgumentParser, option: str, suffixes: Sequence[str], about: str, **more: Any
) -> None:
    """Add an option that names a file to write."""

    def check(text: str) -> Path:
        """Refuse a file that could not be written or drawn, before any work is done for it."""
        # The user's code, if any is run, may change the directory.
        path = Path(text).absolute()
        if path.suffix.lower() not in suffixes:
            msg = f"{option} must be a {' or '.join(suffixes)} file, got {text}"
            raise InputError(msg)
        if path.is_dir():
            msg = f"{option} must be a new name, got the directory {text}; remove it first"
            raise InputError(msg)
        if not os.access(path.parent, os.W_OK):
            msg = f"{option} must be a file in an existing, writable directory, got {text}"
            raise InputError(msg)
        for module in {"--plot": ["matplotlib"], "--html": ["jinja2", "matplotlib"]}.get(
            option, ()
        ):
            require(module, option)
        return path

    metavar = f"FILE{suffixes[0]}"
    parser.add_argument(option, type=check, metavar=metavar, help=about, **more)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a command."""
    add_output(parser, "--json", (".json",), "write all figures to this file")


def add_plot(parser: argparse.ArgumentParser, about: str) -> None:
    """Add ``--plot`` to a command."""
    add_output(parser, "--plot", (".png", ".svg", ".pdf"), f"{about} into this file")


def what_is(path: Path) -> str:
    """Say what stands in the place of a file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        # What leads to itself, a name too long, a folder that may not be read.
        known = {errno.ENOENT: "which is not there", errno.ELOOP: "a link that leads to itself"}
        return known.get(error.errno or 0, f"{error.strerror}".lower())
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device" if not stat.S_ISREG(mode) else "a file")


def require(module: str, what: str, cure: str = "stablenorm[plot]") -> None:
    """Refuse what needs a module that is not installed."""
    if importlib.util.find_spec(module) is None:
        msg = f'{module} is needed for {what}: pip install "{cure}"'
        raise InputError(msg)


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads an int and refuses one that is too small."""

    def read(text: str) -> int:
        if int(text) < least:
            msg = f"must be >= {least}, got {text}"
            raise argparse.ArgumentTypeError(msg)
        return int(text)

    # What argparse calls it, if it is no int.
    read.__name__ = "int"
    return read


def eps(text: str) -> float:
    """Read eps."""
    try:
        return check_eps(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_memory(shape: Sequence[int], bytes_per_element: int) -> None:
    """Refuse a shape that does not fit in memory: the system would end the process, not warn."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (needed := bytes_per_element * math.prod(shape)) > there:
        takes = f"takes {needed / 1e9:.1f} GB, of {there / 1e9:.1f} GB; take fewer rows"
        msg = f"--shape must fit in memory, got {' '.join(map(str, shape))}, which {takes}"
        raise InputError(msg)


# ---- files written ----


def write_whole(path: Path | None, write: Callable[[Any], object]) -> None:
    """Call ``write(file)`` on a new file beside `path`, if it was asked for, then rename it."""
    if path is None:
        return
    # A new name each time: what a link of this name leads to is never written.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with beside.open("xb") as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def write_plot(path: Path | None, plot: Callable[..., object]) -> None:
    """Call ``plot(file, format=...)`` for the file of ``--plot``, if it was asked for."""
    write_whole(path, lambda file: plot(file, format=str(path)[-3:].lower()))


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write figures as JSON, with what they were measured on, if they were asked for."""
    origin = {
        "stablenorm": stablenorm.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    written = text.to_json(text.plain(origin | content)).encode()
    write_whole(path, lambda file: file.write(written))


# ---- what is printed ----


def print_sections(*sections: Section) -> None:
    """Print what sections say: their tables, and below all of them how the numbers were obtained."""
    lines: list[str] = []
    for section in sections:
        for table in section.tables:
            print_table(table)
        lines += (f"{section.heading}. {section.text}", *filter(None, [section.notes]))
    print_lines(*lines)


def print_lines(*lines: str, bold: str = "", **options: Any) -> None:
    """Print plain text, a paragraph per line, never as markup: a name may have brackets in it."""
    shown = Text.assemble((text.printable(bold), "bold"), text.printable("\n".join(lines)))
    Console(**options).print(shown)


def print_table(table: Table) -> None:
    """Print rows of cells below their columns, the first one flush left."""
    # No rules between columns, which cost two of three characters of what is between the words.
    printed = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
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
            printed.add_row(*(Text(text.printable(cell)) for cell in row))
    Console().print(printed)


# ---- progress ----


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

    def progress(done: int, total: int, what: str | None = None) -> None:
        bar.update(task, completed=done, total=total, description=what)

    # Not by `progress`: before its first call, kernels may be compiled for some seconds.
    begin = threading.Timer(_PATIENCE_S, bar.start)
    begin.start()
    try:
        yield progress
    finally:
        begin.cancel()
        begin.join()
        bar.stop()


@contextmanager
def step_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Give the function that is told what each of so many steps does when it begins."""
    done = iter(range(total + 1))
    # Redrawn once a second, by a thread that would otherwise take its share of what is timed.
    with progress_bar("", per_second=1) as progress:
        yield lambda what: progress(next(done, total), total, what)
