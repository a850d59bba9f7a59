"""A user's file: run once, apart from the terminal, its errors told in one line with their place."""

import contextlib
import inspect
import io
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stablenorm.check.roles import key_of, usual_names
from stablenorm.cli.parts import InputError, what_is

# Characters of a message of the user's code: enough to recognize it, with its place, in two lines.
_LONGEST = 120
# The methods of a class that is a layer.
_METHODS = {way: (way, f"{way}_pass") for way in ("forward", "backward")}
# The name that the file runs under: not "__main__", and nobody's module.
_MODULE = "_checked_by_stablenorm"


class UserError(Exception):
    """Something is wrong with the user's code; an error that it raised gives its name to the type."""


def line_of(error: UserError) -> str:
    """Return the line to show."""
    return f"{error}" if type(error) is UserError else f"{type(error).__name__}: {error}"


class _Nothing(io.TextIOWrapper):
    """A stream without input and output."""

    def close(self) -> None:
        """Stay open: code of the file may print after it has closed its streams."""


@contextlib.contextmanager
def running(path: Path) -> Iterator["UserFile"]:
    """
    Run a file, and give its names.

    Meanwhile its code has no input and no output. What it closes or sets for the process is restored.
    """
    if path.suffix.lower() != ".py" or not path.is_file():
        msg = f"FILE must be a Python file, named *.py, got {path}, {what_is(path)}"
        raise InputError(msg)
    print(f"stablenorm: running the code of {path}", file=sys.stderr)
    kept: list[tuple[int, str, Any, int | None]] = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        copy = None
        with contextlib.suppress(OSError):
            copy = os.dup(number)
        kept.append((number, name, getattr(sys, name), copy))
    try:
        with np.errstate(), warnings.catch_warnings(), Path(os.devnull).open("r+b") as file:
            # input() would wait for somebody who does not know that he is asked.
            sys.stdin = sys.stdout = sys.stderr = _Nothing(file, encoding="utf-8")
            yield UserFile(path)
    finally:
        for number, name, stream, copy in kept:
            setattr(sys, name, stream)
            if copy is not None:
                os.dup2(copy, number)
                os.close(copy)
                if getattr(stream, "closed", False):
                    mode = "w" if number else "r"
                    setattr(sys, name, open(number, mode, closefd=False, encoding="utf-8"))  # noqa: SIM115


class UserFile:
    """A file that has been run: its functions and its classes."""

    def __init__(self, path: Path):
        self._path, self._name = path.resolve(), path.name
        # The folder stays on the path: functions may import when they are called.
        sys.path.insert(0, str(self._path.parent))
        # A module would write __pycache__ beside the user's file.
        self._names = self.guard(runpy.run_path)(str(self._path), run_name=_MODULE)
        # A file that calls np.seterr(all="raise"), or makes warnings errors, means its own code.
        np.seterr(all="ignore")
        warnings.simplefilter("ignore")
        own = (n for n, v in self._names.items() if getattr(v, "__module__", "") == _MODULE)
        self.classes = [name for name in own if _is_layer(self._names[name])]

    def find(self, given: str | None, way: str, kind: str | None) -> tuple[str, Callable[..., Any]]:
        """Return the function of the name given, or the forward or backward of a usual name."""
        functions = [
            name
            for name, value in self._names.items()
            if not name.startswith("_") and callable(value) and not inspect.isclass(value)
        ]
        spelled = {key_of(name): name for name in functions}
        usual = (spelled[key] for key in usual_names(way, kind) if key in spelled)
        name = given or next(usual, "")
        if callable(self._names.get(name)):
            function = self.guard(self._names[name])
            # An object with __call__ has no name of its own.
            function.__name__ = name
            return name, function
        held = ", ".join(functions) or "no functions"
        if self.classes:
            held += f", and the classes {', '.join(self.classes)}: choose one with --class"
        wanted = given or f"{kind or 'layer'}_norm_{way}"
        msg = f"{self._name} must have {wanted}, or name one with --{way}; it has {held}"
        raise InputError(msg)

    def find_class(self, name: str) -> type:
        """Return the class of that name."""
        value = self._names.get(name)
        if inspect.isclass(value) and _is_layer(value):
            return value
        held = ", ".join(self.classes) or "none"
        msg = f"--class must be a class with forward(x) and backward(dy), got {name}; it has {held}"
        raise InputError(msg)

    def method(self, instance: Any, way: str) -> Callable[..., Any]:
        """Return the forward or backward of an instance, guarded."""
        return self.guard(next(getattr(instance, n) for n in _METHODS[way] if hasattr(instance, n)))

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function: its exceptions become errors of the same name that say where."""
        return self._told()(function)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, MemoryError):
            raise
        # SystemExit too: exit() in a function ends the function, not the check.
        except BaseException as error:  # noqa: BLE001 - whatever a user's code raises
            place, text = self._name, " ".join(str(error).split())[:_LONGEST]
            if isinstance(error, SyntaxError):
                place, text = f"{Path(error.filename or place).name}:{error.lineno}", error.msg
            # The innermost line of the file itself: what it calls is seldom to blame.
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == str(self._path):
                    place = f"{self._name}:{frame.lineno}"
            if isinstance(error, SystemExit):
                place += "; put what is not to be run under if __name__ == '__main__':"
            named: type[UserError] = type(type(error).__name__, (UserError,), {})
            raise named(f"{text} at {place}".strip()) from None


def _is_layer(value: Any) -> bool:
    ways = (any(hasattr(value, name) for name in names) for names in _METHODS.values())
    return inspect.isclass(value) and all(ways)
