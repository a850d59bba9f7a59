"""Parts that the commands share: options and their checks, errors in a line, files, tables."""

import argparse
import importlib.util
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

import stablenorm
from stablenorm import memory
from stablenorm.backends import BACKENDS
from stablenorm.formats import DTYPES
from stablenorm.output import plain, printable, to_json, wrapped
from stablenorm.timing import ROUNDINGS

# The bundled data: the input of a layer norm of a real model.
BUNDLED = Path(__file__).parent.parent / "data" / "minilm_layer0_output.npz"
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INCONCLUSIVE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 3, 130, 141


class InputError(Exception):
    """Input that cannot be used; the text is the one line to show."""


@contextmanager
def refusing(*kinds: type[Exception], prefix: str = "", named: bool = False) -> Iterator[None]:
    """Raise errors of these kinds as bad input: `prefix`, the error's name if `named`, its words."""
    try:
        yield
    except (InputError, OSError, MemoryError):
        raise
    except kinds as error:
        prefix += f"{type(error).__name__}: " * named
        raise InputError(prefix + " ".join(str(error).split() or [type(error).__name__])) from error


def check_file(path: Path, wanted: str, suffix: str = "") -> None:
    """Refuse a path that is no file (a pipe would never end), or has another suffix."""
    if not path.is_file() or not path.name.lower().endswith(suffix):
        kind = "a directory" if path.is_dir() else "a device or a pipe"
        kind = kind if path.exists() else "which is not there"
        msg = f"FILE must be {wanted}, got {path}{f', {kind}' * (not path.is_file())}"
        raise InputError(msg)


def check_outputs(options: dict[str, Any]) -> None:
    """Refuse to write over a file that is read, whatever its name there."""
    path = options.get("file", BUNDLED)
    inputs = [file for file in (path, *path.glob("*.npy")) if file.exists()]
    for name in ("out", "html", "json"):
        file = options.get(name)
        if file and file.exists() and any(map(file.samefile, inputs)):
            msg = f"--{name} must not be the file that is read, got {file}"
            raise InputError(msg)


def check_memory(needed: int) -> None:
    """Refuse bytes that do not fit in memory: the system would end the process, not warn."""
    there = memory.most(unknown=needed)
    if needed > there:
        came = f"{-(-needed >> 30)} GiB, of {there >> 30} GiB"
        msg = f"x and all results must fit in memory, got {came}; take less of x"
        raise InputError(msg)


def _number(kind: type, least: float, limit: float = math.inf) -> Callable[[str], Any]:
    """Return the function that reads a number, ``least <= number < limit``."""

    # wraps: argparse names the function in its message if the text is no number.
    @wraps(kind)
    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value < limit:
            msg = f"the number must be at least {least} and less than {limit}, got {value}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return read


def axis(text: str) -> int | None:
    """Read an axis, NumPy's arrays have at most 64; None is all of them."""
    return None if text == "None" else _number(int, -64, 64)(text)


def _new_file(name: str, *suffixes: str) -> dict[str, Any]:
    """Return the row of an option that names a file to write."""

    def check(text: str) -> Path:
        """Refuse a file that could not be written or drawn, before any work is done for it."""
        # Absolute now: the user's code may change the directory.
        path = Path(text).absolute()
        needed = ("matplotlib", "jinja2") if name == "--html" else ()
        missing = [module for module in needed if importlib.util.find_spec(module) is None]
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


# Options by name, as argparse takes them; a command adds the help.
TABLE: dict[str, dict[str, Any]] = {
    "file": {"nargs": "?", "type": Path, "metavar": "FILE", "default": BUNDLED},
    "--class": {"metavar": "NAME", "dest": "class_"},
    "--kind": {"choices": ("layer", "rms"), "default": "layer"},
    "--axis": {"nargs": "+", "type": axis, "default": [-1], "metavar": "K"},
    "--shape": {"nargs": "+", "type": _number(int, 1), "metavar": "N"},
    "--dtype": {"choices": DTYPES},
    "--eps": {"type": _number(float, 0)},
    "--gamma-offset": {"type": float, "default": 0.0},
    "--backend": {"choices": tuple(BACKENDS)},
    "--rounding": {"choices": ROUNDINGS, "default": "fast"},
    "--threads": {"type": _number(int, 1, 2**31), "metavar": "N"},
    "--seed": {"type": _number(int, 0), "default": 0},
    "--top": {"type": _number(int, 0), "default": 10, "metavar": "K"},
    "--digests": {"action": "store_true"},
    "--verbose": {"action": "store_true"},
    "--out": _new_file("--out", ".npz"),
    "--html": _new_file("--html", ".html", ".htm"),
    "--json": _new_file("--json", ".json"),
}


def progress(what: str) -> Callable[[int, int], None]:
    """Return a function that draws a bar on a terminal, from the second second on, and clears it at the end."""
    begin = time.perf_counter()

    def show(done: int, total: int) -> None:
        if time.perf_counter() > begin + 1 and sys.stderr and sys.stderr.isatty():
            bar = f"{what} [{30 * done // total * '#':30}]" * (done < total)
            print(bar, end="\x1b[K\r", file=sys.stderr, flush=True)

    return show


def origin() -> dict[str, Any]:
    """Return the versions and the machine behind the figures."""
    versions = {"stablenorm": stablenorm.__version__, "numpy": np.__version__}
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    return {**versions, **machine, "cpus": os.cpu_count()}


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write figures as JSON, with their origin, if `path` names a file."""
    to_json(plain(origin() | content), path)


def page_width() -> int:
    """Return the columns of the terminal, as many as a reader's eye takes; without one, of a log."""
    return min(shutil.get_terminal_size((100, 1)).columns, 100)


def print_lines(*lines: str, bold: str = "") -> None:
    """Print plain text, a paragraph per line; no word is broken, so addresses can be clicked."""
    text, length = printable(bold + "\n".join(lines)), len(printable(bold).rstrip())
    shown = "\n".join(
        part for line in text.split("\n") for part in wrapped(line, page_width()) or [""]
    )
    if sys.stdout and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        # Bold on and off; green and red, then the terminal's own colour.
        shown = f"\x1b[1m{shown[:length]}\x1b[22m{shown[length:]}"
        for word, color in {"PASS": 32, "FAIL": 31}.items():
            shown = shown.replace(word, f"\x1b[{color}m{word}\x1b[39m")
    print(shown)
