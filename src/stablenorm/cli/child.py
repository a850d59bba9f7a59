"""Work on a user's code in a process of its own, whatever that code does to it."""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from stablenorm.cli.parts import InputError


def run_apart(work: Callable[[Any], Any], argument: Any, timeout: float | None) -> Any:
    """
    Return ``work(argument)`` of a new process; InputError says how it ended without a result.

    The process has no input; its errors are not shown. It is ended as soon as its result is here, so
    that no thread of it goes on.
    """
    spawn = multiprocessing.get_context("spawn")
    # The result has a pipe of its own: the code may print, or close its streams.
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_child, args=(work, argument, sender), daemon=True)
    # One thread of BLAS: the arrays are small, and its threads would only wait for one another.
    own = {"OPENBLAS_NUM_THREADS": "1"} | os.environ
    before = os.environ.copy()
    os.environ.update(own)
    process.start()
    sender.close()
    os.environ.clear()
    os.environ.update(before)
    try:
        if not wait([receiver, process.sentinel], timeout):
            msg = f"no verdict within {timeout:g} s, see --timeout"
            raise InputError(msg)
        # A result may arrive together with the end of the process.
        with contextlib.suppress(EOFError, OSError):
            if receiver.poll():
                error, result = receiver.recv()
                if error:
                    raise error
                return result
        process.join()
        code = process.exitcode or 0
        how = f"with status {code}" if code >= 0 else f"by the signal {signal.Signals(-code).name}"
        msg = f"no verdict: the process that ran the code ended {how}"
        raise InputError(msg)
    finally:
        process.kill()
        process.join()


def silence() -> None:
    """Let nothing more come through stdout."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _child(work: Callable[[Any], Any], argument: Any, sender: Any) -> None:
    try:
        # The parent answers an interrupt.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sender.send(_done(work, argument))
    finally:
        # At once: threads of the code, and what it left to do at exit, do not count.
        os._exit(1)


def _done(work: Callable[[Any], Any], argument: Any) -> tuple[InputError | None, Any]:
    """Return the error of the work, or None, and its result."""
    try:
        # Threads of the code may fail, and print a traceback.
        with contextlib.redirect_stderr(io.StringIO()):
            return None, work(argument)
    except MemoryError:
        return InputError("the code of the file needs more memory than there is"), None
    except (InputError, OSError) as refused:
        return InputError(" ".join(str(refused).split())), None
    except Exception as raised:  # noqa: BLE001 - what follows from results that nobody foresaw
        text = " ".join(str(raised).split())
        return InputError(f"the check cannot go on: {type(raised).__name__}: {text}"), None
    finally:
        silence()
