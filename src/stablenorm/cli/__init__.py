"""The command `stablenorm`: arguments in, tables and pictures out."""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn, TextIO

import stablenorm
from stablenorm.cli.parts import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    TABLE,
    InputError,
    check_outputs,
)
from stablenorm.output import printable

# Modules of this folder, in the order of --help. Each has run() and OPTIONS, which maps an option to its
# help or to (help, changes of its row in `parts.TABLE`). The module's docstring is the command's help.
_COMMANDS = "run", "diagnose", "check", "judge", "bench"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the message that argparse would print under its usage: all errors here are one line."""
        msg = f"{message}; see {self.prog} --help"
        raise InputError(msg)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command with these arguments, by default those of the process.

    Returns the exit status: 0, 1 if a check failed, 2 on bad input or without a command, 3 if a check
    of a file has no verdict, 130 if interrupted, 141 if nobody reads what it prints.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    try:
        # Import only the command in use: all of them take as long as NumPy, a tenth of a second.
        parser = _parser([name for name in _COMMANDS if name in argv[:1]] or _COMMANDS)
        if not argv:
            parser.print_help()
            return EXIT_BAD_INPUT
        arguments = parser.parse_args(argv)
        check_outputs(vars(arguments))
        with warnings.catch_warnings():
            # A warning is one line without its place in our code, which helps nobody.
            warnings.showwarning = lambda message, *_, **__: _say(message)  # type: ignore[assignment]
            status = int(arguments.job(arguments))
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - raised if unknown
        status = _answer(error)
    try:
        print(end="", flush=True)
    except OSError as error:
        _silence(sys.stdout)
        return EXIT_PIPE if isinstance(error, BrokenPipeError) else status or _answer(error)
    return status


def _answer(error: BaseException) -> int:
    """Return the exit status of a command that the error ended; print the reason in a line."""
    match error:
        case SystemExit():
            # --help and --version have printed all there is.
            return 0
        case BrokenPipeError():
            return EXIT_PIPE
        case KeyboardInterrupt():
            return _say(str(error) or "interrupted", EXIT_INTERRUPTED)
        case MemoryError():
            return _say(str(error) or "memory is exhausted")
        case OSError():
            # A name too long, a full disk behind stdout: the system's reason says it all.
            where = f" ({error.filename})" if error.filename else ""
            return _say(f"{error.strerror or error}{where}")
        case InputError():
            return _say(error)
    # The kernels refuse a variable of the environment when they are loaded, by any command.
    if isinstance(error, ImportError) or str(error).startswith("STABLENORM_"):
        return _say(error)
    raise error


def _say(words: object, status: int = EXIT_BAD_INPUT) -> int:
    # The status counts, even if nobody reads why. One line: a file's name may have line breaks.
    try:
        print("stablenorm:", printable(str(words), ""), file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)
    return status


def _silence(stream: TextIO) -> None:
    """Redirect a stream that fails: Python flushes it once more at exit, and on /dev/null that cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser(names: Sequence[str] = _COMMANDS) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stablenorm",
        description="Layer normalization and its gradients, within 0.501 ulp of the exact result (float64 dx: 0.75).",
    )
    parser.add_argument("--version", action="version", version=stablenorm.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in names:
        module = importlib.import_module(f"stablenorm.cli.{name}")
        summary, about, examples = str(module.__doc__).strip().split("\n\n", 2)
        command = commands.add_parser(
            name,
            help=summary[:1].lower() + summary[1:-1],
            description=f"{summary}\n\n{about}",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(job=module.run)
        for option, row in module.OPTIONS.items():
            about, changes = (row, {}) if isinstance(row, str) else row
            command.add_argument(option, help=about, **TABLE.get(option, {}) | changes)
    return parser
