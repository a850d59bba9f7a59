"""
A user's file: run once, its prints kept away, its errors told in one line with their place.

Nothing here knows what the functions in it are for; `user_functions` and `user_class` do.
"""

from __future__ import annotations

import contextlib
import functools
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

# Of a message of the user's code, and of what it prints: enough to recognize it by.
_LONGEST = 200
# The name that the file runs under: not "__main__", and nobody's module.
_MODULE = "_checked_by_stablenorm"


class UserFileError(Exception):
    """
    The user's code cannot be run, or has raised something.

    `line` says it to the user; the text, to the check, which puts the type before it: so what a
    function raises is given a type of the same name.
    """

    def __init__(self, line: str, text: str | None = None):
        super().__init__(line if text is None else text)
        self.line = line


class _Muted(io.StringIO):
    """A stream that keeps the beginning of what is written to it and drops the rest."""

    def reconfigure(self, **_: Any) -> None:
        """Accept what programs ask of a terminal: an encoding, usually."""

    def write(self, text: str) -> int:
        if self.tell() < _LONGEST:
            super().write(text[:_LONGEST])
        return len(text)


class UserFile:
    """A file that has been run: its functions, its classes, the first line that it printed."""

    def __init__(self, path: Path):
        self.path = path.resolve()
        self.name = path.name
        self._printed = _Muted()
        self._names: dict[str, Any] = {}
        self._run()
        own = {n: v for n, v in self._names.items() if getattr(v, "__module__", "") == _MODULE}
        self.functions = _functions(own) or _functions(self._names)
        self.classes = [
            name
            for name, value in own.items()
            if inspect.isclass(value) and hasattr(value, "backward") and hasattr(value, "forward")
        ]

    @property
    def prints(self) -> list[str]:
        """Return what to say of the file's prints, if there are any."""
        lines = self._printed.getvalue().strip().splitlines()
        said = f"{self.name} prints, which is not shown; the first line: "
        return [f'{said}"{" ".join(lines[0].split())}"'] if lines else []

    def find(self, given: str | None, usual: tuple[str, ...], option: str) -> Callable[..., Any]:
        """Return the function of the name given, or of one of the usual names."""
        wanted = given
        if given is None:
            spelled = {key_of(name): name for name in reversed(self.functions)}
            wanted = next((spelled[name] for name in map(key_of, usual) if name in spelled), None)
        value = self._names.get(wanted or "")
        if callable(value):
            return self.guard(value)
        held = ", ".join(self.functions) or "no functions"
        if self.classes:
            held += f", and the classes {', '.join(self.classes)}: choose one with --class"
        msg = f"{self.name} must have {given or usual[0]}, or name one with {option}; it has {held}"
        if wanted in self._names:
            msg = f"{option} must be a function, got {wanted}, a {type(value).__name__}"
        raise UserFileError(msg)

    def find_class(self, name: str) -> type:
        """Return the class of that name."""
        value = self._names.get(name)
        if inspect.isclass(value) and hasattr(value, "backward") and hasattr(value, "forward"):
            return value
        held = ", ".join(self.classes) or "none"
        msg = f"--class must be a class with forward(x) and backward(dy), got {name}; it has {held}"
        raise UserFileError(msg)

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function: mute its prints, and add the line number to its exceptions."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with self._inside():
                return function(*args, **options)

        return call

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self._printed), contextlib.redirect_stderr(self._printed):
            try:
                yield
            except (KeyboardInterrupt, MemoryError, UserFileError):
                raise
            # SystemExit too: exit() in a function ends the function, not the check.
            except BaseException as error:
                raise self._told(error) from error

    def _told(self, error: BaseException) -> UserFileError:
        """Return the one line that says what the user's code raised, and where."""
        place, kind = self.name, type(error).__name__
        text = " ".join(str(error).split())[:_LONGEST]
        if isinstance(error, SyntaxError):
            place, text = f"{Path(error.filename or self.name).name}:{error.lineno}", error.msg
        # The innermost line of the file itself: what it calls is seldom to blame.
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(self.path):
                place = f"{self.name}:{frame.lineno}"
        line = f"{place}: {kind}: {text}" if text else f"{place}: {kind}"
        if isinstance(error, SystemExit):
            line += " (exit in the file; put it under if __name__ == '__main__':)"
        return type(kind, (UserFileError,), {})(line, f"{text} ({place})".lstrip())

    def _run(self) -> None:
        """Run the file as an import would, and keep the names in it."""
        if self.path.is_dir() or not self.path.exists():
            what = "a directory" if self.path.is_dir() else "which is not there"
            msg = f"FILE must be a Python file, got {self.path}, {what}"
            raise UserFileError(msg)
        if self.path.suffix.lower() in (".ipynb", ".npz", ".npy"):
            msg = f"FILE must be a Python file, got {self.name}; save the functions as a .py file"
            raise UserFileError(msg)
        with quiet(), self._inside(), _as_a_program(self.path):
            # It writes nothing beside the user's file.
            self._names = runpy.run_path(str(self.path), run_name=_MODULE)


def _functions(names: dict[str, Any]) -> list[str]:
    """Return the names of what can be called and is no class, in order."""
    return [
        name
        for name, value in names.items()
        if not name.startswith("_") and callable(value) and not inspect.isclass(value)
    ]


def key_of(name: str) -> str:
    """Return the name as it is compared: underscores and capitals are a matter of taste."""
    return name.replace("_", "").lower()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Reset, for a while, the warnings and NumPy error state that a file may have changed."""
    # A file that calls np.seterr(all="raise"), or makes warnings errors, means its own code.
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _as_a_program(path: Path) -> Iterator[None]:
    """Give the file what ``python FILE`` would give it: its directory, its name, no input."""
    argv, where, stdin = sys.argv, Path.cwd(), sys.stdin
    # It stays: functions may import when they are called.
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        # input() would wait for somebody who does not know that he is asked.
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.argv, sys.stdin = argv, stdin
            with contextlib.suppress(OSError):
                os.chdir(where)
