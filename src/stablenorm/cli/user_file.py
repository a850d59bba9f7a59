"""A user's file: run once, its prints kept away, its errors told in one line with their place."""

import contextlib
import functools
import inspect
import os
import runpy
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


class UserFile:
    """A file that has been run: its functions and its classes."""

    def __init__(self, path: Path):
        if path.suffix.lower() != ".py" or not path.is_file():
            msg = f"FILE must be a Python file, named *.py, got {path}, {what_is(path)}"
            raise InputError(msg)
        self.path, self.name = path.resolve(), path.name
        print(f"stablenorm: running the code of {path}", file=sys.stderr)
        # The folder stays on the path: functions may import when they are called.
        sys.path.insert(0, str(self.path.parent))
        # Opened once: the checked code is called thousands of times.
        self._nothing = self._open_nothing()
        with self._inside():
            # A module would write __pycache__ beside the user's file.
            self._names = runpy.run_path(str(self.path), run_name=_MODULE)
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
            return name, self.guard(self._names[name])
        held = ", ".join(functions) or "no functions"
        if self.classes:
            held += f", and the classes {', '.join(self.classes)}: choose one with --class"
        wanted = given or f"{kind or 'layer'}_norm_{way}"
        msg = f"{self.name} must have {wanted}, or name one with --{way}; it has {held}"
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
        """Wrap a function: mute its prints, and add the line number to its exceptions."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with self._inside():
                return function(*args, **options)

        return call

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Give code of the file no input and no output, and tell what it raises in one line."""
        stdin = sys.stdin
        if self._nothing.closed:
            self._nothing = self._open_nothing()
        with contextlib.redirect_stdout(self._nothing), contextlib.redirect_stderr(self._nothing):
            # input() would wait for somebody who does not know that he is asked.
            sys.stdin = self._nothing
            try:
                yield
            except (KeyboardInterrupt, MemoryError):
                raise
            # SystemExit too: exit() in a function ends the function, not the check.
            except BaseException as error:  # noqa: BLE001 - whatever a user's code raises
                raise self._told(error) from None
            finally:
                sys.stdin = stdin

    def _open_nothing(self) -> Any:
        file = Path(os.devnull).open("r+", encoding="utf-8")  # noqa: SIM115
        weakref.finalize(self, file.close)
        return file

    def _told(self, error: BaseException) -> UserError:
        """Return an error of the same name that says where in the file it was raised."""
        place, text = self.name, " ".join(str(error).split())[:_LONGEST]
        if isinstance(error, SyntaxError):
            place, text = f"{Path(error.filename or self.name).name}:{error.lineno}", error.msg
        # The innermost line of the file itself: what it calls is seldom to blame.
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(self.path):
                place = f"{self.name}:{frame.lineno}"
        if isinstance(error, SystemExit):
            place += "; put what is not to be run under if __name__ == '__main__':"
        named: type[UserError] = type(type(error).__name__, (UserError,), {})
        return named(f"{text} at {place}".strip())


@contextlib.contextmanager
def kept_streams() -> Iterator[None]:
    """Give back standard input, output and error, whatever the code of a file closes."""
    kept = {}
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with contextlib.suppress(OSError):
            kept[name] = number, os.dup(number)
    try:
        yield
    finally:
        for name, (number, copy) in kept.items():
            os.dup2(copy, number)
            os.close(copy)
            if getattr(sys, name).closed:
                mode = "w" if number else "r"
                setattr(sys, name, open(number, mode, closefd=False, encoding="utf-8"))  # noqa: SIM115


def _is_layer(value: Any) -> bool:
    ways = (any(hasattr(value, name) for name in names) for names in _METHODS.values())
    return inspect.isclass(value) and all(ways)
