"""The command `stablenorm`: arguments in, tables and pictures out."""

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import stablenorm
from stablenorm.cli.parts import EXIT_BAD_INPUT, EXIT_INTERRUPTED, InputError
from stablenorm.text import printable

# Modules of this folder, in the order of --help.
_COMMANDS = "run", "diagnose", "check", "bench"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print under its usage: one line, as all errors here."""
        msg = f"{message}; see {self.prog} --help"
        raise InputError(msg)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command with these arguments, by default those of the process.

    Returns the exit status: 0, 1 if a check failed, 2 on bad input or without a command, 3 if a check
    of a file has no verdict, 130 if interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    # The other commands are not imported: all of them take as long as NumPy, a tenth of a second.
    parser = _parser([name for name in _COMMANDS if name in argv[:1]] or _COMMANDS)
    try:
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return EXIT_BAD_INPUT
        with warnings.catch_warnings():
            # In a line, as everything else that is not a result; the place in our code helps nobody.
            warnings.showwarning = lambda message, *_, **__: _say(message)
            return int(arguments.job(arguments))
    except (InputError, ImportError) as error:
        _say(error)
        return EXIT_BAD_INPUT
    except ValueError as error:
        # Of the environment: said by the kernels as they are loaded, whichever command does so.
        if not str(error).startswith("STABLENORM_"):
            raise
        _say(error)
        return EXIT_BAD_INPUT
    except MemoryError as error:
        _say(f"x must fit in memory, got: {error}")
        return EXIT_BAD_INPUT
    except OSError as error:
        # A name too long, a full disk behind stdout: the system's reason says it all.
        where = f" ({error.filename})" if error.filename else ""
        _say(f"{error.strerror or error}{where}")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as interrupt:
        _say(interrupt if interrupt.args else "interrupted")
        return EXIT_INTERRUPTED


def _say(words: object) -> None:
    print(f"stablenorm: {printable(str(words))}", file=sys.stderr)


def _parser(names: Sequence[str] = _COMMANDS) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stablenorm",
        description="Layer normalization and its gradients, within 0.501 ulp of the exact result: "
        "compute them, check them, and see what they cost.",
    )
    parser.add_argument("--version", action="version", version=stablenorm.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in names:
        importlib.import_module(f"stablenorm.cli.{name}").add(commands)
    return parser
