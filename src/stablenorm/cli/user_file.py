"""
A user's file: run once, its prints kept away, its errors told in one line with their place.

Nothing here knows what the functions in it are for; `_user_layer_norm` does.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import inspect
import io
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

# Of a message of the user's code, and of a line that it prints: enough to recognise it by.
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


class _Muted(io.TextIOBase):
    """A stream that keeps the first line written to it and drops the rest."""

    def __init__(self) -> None:
        self.first = ""
        self._open = True

    def writable(self) -> bool:
        return True

    def reconfigure(self, **_: Any) -> None:
        """Accept what programs ask of a terminal: an encoding, usually."""

    def write(self, text: str) -> int:
        if self._open and text:
            line, newline, _ = (self.first + text).lstrip("\n").partition("\n")
            self.first = line[:_LONGEST]
            self._open = not newline
        return len(text)


class UserFile:
    """A file that has been run: its functions, its classes, the first line that it printed."""

    def __init__(self, path: Path):
        self.path = path.resolve()
        self.name = path.name
        self.printed = _Muted()
        self._names: dict[str, Any] = {}
        self._run()

    @property
    def prints(self) -> str:
        """Return what to say of the file's prints; empty if there are none."""
        if not self.printed.first:
            return ""
        first = " ".join(self.printed.first.split())
        return f'{self.name} prints, which is not shown; the first line: "{first}"'

    @property
    def functions(self) -> list[str]:
        """Return the names of the callables in the file, its own if it has some, in order."""
        callables = [
            (name, value)
            for name, value in self._names.items()
            if not name.startswith("_") and callable(value) and not inspect.isclass(value)
        ]
        own = [name for name, value in callables if getattr(value, "__module__", "") == _MODULE]
        return own or [name for name, _ in callables]

    def find(self, given: str | None, usual: tuple[str, ...], option: str) -> Callable[..., Any]:
        """Return the function of the name given, or of one of the usual names."""
        if given is None:
            # Underscores and capitals are a matter of taste.
            spelled = {name.replace("_", "").lower(): name for name in reversed(self.functions)}
            wanted = next((spelled[name] for name in usual_keys(usual) if name in spelled), None)
        else:
            wanted = given
        value = None if wanted is None else self._names.get(wanted)
        if callable(value):
            return self.guard(value)
        held = ", ".join(self.functions) or "no functions"
        if self.classes:
            held += f", and the classes {', '.join(self.classes)}: choose one with --class"
        if wanted is not None and wanted in self._names:
            msg = f"{option} must be a function, got {wanted}, a {type(value).__name__}"
        else:
            msg = f"{self.name} must have {given or usual[0]}, or name one with {option}; it has {held}"
        raise UserFileError(msg)

    @property
    def classes(self) -> list[str]:
        """Return the names of the file's own classes that have forward and backward."""
        return [
            name
            for name, value in self._names.items()
            if inspect.isclass(value)
            and value.__module__ == _MODULE
            and callable(getattr(value, "backward", None))
            and ("forward" in dir(value) or "__call__" in vars(value))
        ]

    def find_class(self, name: str) -> type:
        """Return the class of that name."""
        value = self._names.get(name)
        if inspect.isclass(value) and callable(getattr(value, "backward", None)):
            return value
        held = ", ".join(self.classes) or "none"
        msg = f"--class must be a class with forward(x) and backward(dy), got {name}; it has {held}"
        raise UserFileError(msg)

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function: mute its prints, and add the line number to its exceptions."""

        def call(*args: Any, **options: Any) -> Any:
            with self._inside():
                return function(*args, **options)

        call.__name__ = getattr(function, "__name__", type(function).__name__)
        with contextlib.suppress(TypeError, ValueError):
            call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Reset, for a while, the warnings and NumPy error state that the file may have changed."""
        # A file that calls np.seterr(all="raise"), or makes warnings errors, means its own code.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with (
            contextlib.redirect_stdout(self.printed),
            contextlib.redirect_stderr(self.printed),
        ):
            try:
                yield
            except (KeyboardInterrupt, MemoryError, UserFileError):
                raise
            # SystemExit too: exit() in a function ends the function, not the check.
            except BaseException as error:  # noqa: BLE001
                self._told(error)

    def _told(self, error: BaseException) -> NoReturn:
        """Raise the one line that says what the user's code raised, and where."""
        place = self.name
        if isinstance(error, SyntaxError):
            place = f"{Path(error.filename or self.name).name}:{error.lineno}"
            text = error.msg
        else:
            text = " ".join(str(error).split())
            # The innermost line of the file itself: what it calls is seldom to blame.
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == str(self.path):
                    place = f"{self.name}:{frame.lineno}"
        said = f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__
        if isinstance(error, SystemExit):
            said += " (exit in the file; put it under if __name__ == '__main__':)"
        kind = type(type(error).__name__, (UserFileError,), {})
        line, brief = f"{place}: {said}", f"{text[:_LONGEST]} ({place})".lstrip()
        raise kind(line, brief) from error

    def _run(self) -> None:
        """Run the file as an import would."""
        if self.path.is_dir() or not self.path.exists():
            what = "a directory" if self.path.is_dir() else "which is not there"
            msg = f"FILE must be a Python file, got {self.path}, {what}"
            raise UserFileError(msg)
        if self.path.suffix.lower() in (".ipynb", ".npz", ".npy"):
            msg = f"FILE must be a Python file, got {self.name}; save the functions as a .py file"
            raise UserFileError(msg)
        loader = importlib.machinery.SourceFileLoader(_MODULE, str(self.path))
        spec = importlib.util.spec_from_file_location(_MODULE, self.path, loader=loader)
        # There is one where there is a loader.
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        with self.quiet(), self._inside(), _as_a_program(self.path, module):
            try:
                source = self.path.read_bytes()
            except OSError as error:
                msg = f"FILE must be readable, got {self.name}: {error.strerror or error}"
                raise UserFileError(msg) from None
            # Compiled here, so that nothing is written beside the user's file.
            exec(compile(source, str(self.path), "exec"), module.__dict__)  # noqa: S102
        self._names = dict(module.__dict__)


@contextlib.contextmanager
def _as_a_program(path: Path, module: types.ModuleType) -> Iterator[None]:
    """Give the file what ``python FILE`` would give it: its directory, its name, no input."""
    argv, where, stdin = sys.argv, Path.cwd(), sys.stdin
    # Data classes and pickle look a module up by its name.
    sys.modules[module.__name__] = module
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


def usual_keys(usual: tuple[str, ...]) -> list[str]:
    """Return the names as they are compared: without underscores and capitals."""
    return [name.replace("_", "").lower() for name in usual]
