"""Parts of all commands: options and their checks, errors in a line, files, tables, progress."""

import argparse
import importlib.util
import io
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

import stablenorm
from stablenorm import text
from stablenorm.backends import BACKENDS
from stablenorm.formats import DTYPES
from stablenorm.text import Table
from stablenorm.timing import ROUNDINGS
from stablenorm.types import check_count, check_eps

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INCONCLUSIVE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 3, 130, 141

# Modules that an option needs, of the extra `plot`.
_NEEDED = {"--plot": ("matplotlib",), "--html": ("jinja2", "matplotlib")}
# Columns of what no terminal shows: lines are left as they are.
_UNBROKEN = 10_000


class InputError(Exception):
    """Input that cannot be used; the text is the one line to show."""


@contextmanager
def refusing(*kinds: type[Exception], what: str = "", named: bool = False) -> Iterator[None]:
    """Raise errors of these kinds as bad input: `what`, their name if asked for, and their words."""
    try:
        yield
    except (InputError, OSError, MemoryError):
        raise
    except kinds as error:
        what += f"{type(error).__name__}: " * named
        raise InputError(what + " ".join(str(error).split())) from error


def check_file(path: Path, wanted: str, suffix: str = "") -> None:
    """Refuse what is no file (a pipe would never end), or is named otherwise."""
    if not path.is_file() or not path.name.lower().endswith(suffix):
        msg = f"FILE must be {wanted}, got {path}{', which is not there' * (not path.exists())}"
        raise InputError(msg)


def check_memory(needed: int) -> None:
    """Refuse so many bytes if they do not fit in memory: the system would end the process, not warn."""
    # Windows does not say how much there is.
    with suppress(AttributeError):
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > there:
            msg = f"{needed / 1e9:.1f} GB, of {there / 1e9:.1f} GB; take fewer rows"
            raise MemoryError(msg)


def _number(kind: type, check: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return the function that reads a number and has `check` refuse it in its own words."""

    def read(text: str) -> Any:
        value = kind(text)
        try:
            return check(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    # The name by which argparse calls it, if the text is no number.
    read.__name__ = kind.__name__
    return read


def axis(text: str) -> int | None:
    """Read an axis; None is all of them."""
    return None if text == "None" else int(text)


def _new_file(name: str, *suffixes: str) -> dict[str, Any]:
    """Return the row of an option that names a file to write."""

    def check(text: str) -> Path:
        """Refuse a file that could not be written or drawn, before any work is done for it."""
        # The user's code, if any is run, may change the directory.
        path = Path(text).absolute()
        missing = [each for each in _NEEDED.get(name, ()) if importlib.util.find_spec(each) is None]
        if path.suffix.lower() not in suffixes:
            msg = f"{name} must be a {' or '.join(suffixes)} file, got {text}"
        elif path.is_dir():
            msg = f"{name} must be a new name, got the directory {text}; remove it first"
        elif not os.access(path.parent, os.W_OK):
            msg = f"{name} must be a file in an existing, writable directory, got {text}"
        elif missing:
            msg = f'{name} needs {" and ".join(missing)}: pip install "stablenorm[plot]"'
        else:
            return path
        raise InputError(msg)

    return {"type": check, "metavar": f"FILE{suffixes[0]}"}


_COUNT, _SIZE = (_number(int, partial(check_count, "the number", least=n)) for n in (0, 1))
# Options by name, as argparse takes them; a command adds the help.
TABLE: dict[str, dict[str, Any]] = {
    "file": {"nargs": "?", "type": Path, "metavar": "FILE"},
    "--forward": {"metavar": "NAME"},
    "--backward": {"metavar": "NAME"},
    "--class": {"metavar": "NAME", "dest": "class_"},
    "--kind": {"choices": ("layer", "rms"), "default": "layer"},
    "--member": {"metavar": "NAME"},
    "--axis": {"nargs": "+", "type": axis, "default": [-1], "metavar": "K"},
    "--shape": {"nargs": "+", "type": _SIZE, "metavar": "N"},
    "--dtype": {"choices": DTYPES},
    "--eps": {"type": _number(float, check_eps)},
    "--gamma-offset": {"type": float, "default": 0.0},
    "--backend": {"choices": tuple(BACKENDS)},
    "--rounding": {"choices": ROUNDINGS, "default": "fast"},
    "--threads": {"type": _SIZE, "metavar": "N"},
    "--seed": {"type": _COUNT, "default": 0},
    "--top": {"type": _COUNT, "default": 10, "metavar": "K"},
    "--digests": {"action": "store_true"},
    "--out": _new_file("--out", ".npz"),
    "--html": _new_file("--html", ".html", ".htm"),
    "--json": _new_file("--json", ".json"),
    "--plot": _new_file("--plot", ".png", ".svg", ".pdf"),
}


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write figures as JSON, with what they were measured on, if they were asked for."""
    versions = {"stablenorm": stablenorm.__version__, "numpy": np.__version__}
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    origin = {**versions, **machine, "cpus": os.cpu_count()}
    text.to_json(text.plain(origin | content), path)


def columns() -> int:
    """Return the width of the terminal; very wide where the output goes to a file or a pipe."""
    return shutil.get_terminal_size((_UNBROKEN, 1)).columns


def _is_terminal(stream: Any) -> bool:
    # None where the stream was closed before Python began.
    return stream is not None and stream.isatty()


def print_lines(*lines: str, bold: str = "") -> None:
    """Print plain text, a paragraph per line; no word is broken: an address could not be clicked."""
    bold = text.printable(bold)
    paragraphs = (bold + text.printable("\n".join(lines))).split("\n")
    shown = "\n".join("\n".join(text.wrapped(each, columns())) for each in paragraphs)
    if bold and _is_terminal(sys.stdout) and "NO_COLOR" not in os.environ:
        shown = shown.replace(bold, f"\x1b[1m{bold}\x1b[0m", 1)
    print(shown)


def print_table(table: Table) -> None:
    """Print rows of cells below their columns, the first one flush left."""
    # No rules between columns, which cost two of three characters of what is between the words.
    look: Any = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    printed = RichTable(title=table.title, title_justify="left", title_style="bold", **look)
    for column in table.columns:
        # No word is cut in two while there are spaces to break at.
        longest = max(map(len, column.split()), default=0)
        printed.add_column(column, justify="right", overflow="fold", min_width=longest)
    printed.columns[0].justify = "left"
    for row in table.rows:
        printed.add_row(*(Text(text.printable(cell)) for cell in row))
    # Printed here: Rich itself ends the process with 1, a failed check's status, if a pipe is closed.
    shown = io.StringIO()
    Console(file=shown, width=columns(), force_terminal=_is_terminal(sys.stdout)).print(printed)
    print(shown.getvalue(), end="")


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """Give ``progress(done, total, what)``, which a line on a terminal shows until the end."""
    # Bound to the real stream: a user's functions have theirs muted while they run.
    stream = sys.stderr if _is_terminal(sys.stderr) else io.StringIO()
    show = partial(print, end="\x1b[K", file=stream, flush=True)
    try:
        yield lambda done, total, what=what: show(f"\r{what}: {done} of {total}")
    finally:
        show("\r")
