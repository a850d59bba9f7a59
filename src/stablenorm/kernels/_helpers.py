"""
Helper threads that share the tiles of one call, safe under whatever the caller does.

A job is a compiled function whose last arguments are `tickets` and a number of tiles. Whoever
runs it takes tile after tile until none is left, so it does not matter how many helpers come,
when, or whether at all: the caller takes tiles itself and waits only for those that were taken.
Hence

- Python threads that call at the same time: one has the helpers, the others work alone, and a
  program with threads of its own is not oversubscribed;
- a child after a fork has no helpers, and starts its own when it first needs them;
- a helper that does not get to run (no processor, no GIL) costs nothing.

A helper that has just worked spins for some 20 microseconds, without the GIL, before it sleeps:
the next call of a loop finds it awake within 2 microseconds, which waking it would exceed ten
times. Numba's own threads are not used: with OpenMP a child after a fork is aborted, with
workqueue the process is, when two Python threads enter at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from stablenorm._threads import get_num_threads
from stablenorm.kernels._compiling import STAMP, compiled
from stablenorm.kernels._memory import add_atomically, pause, read_atomically
from stablenorm.kernels._vectors import address, pointer, pointer_at

# Turns of a spinning helper: 20 microseconds at some 40 cycles each.
_TURNS = 2000

# int64 from one counter to the next: two cache lines, so that their writers do not disturb
# one another.
_APART = 16

# Tickets of a job that nobody shares.
ALONE = np.zeros(1, np.int64)


@njit(error_model="numpy")
def take(tickets, previous):
    """Return the next tile; `previous` is the one taken before, or -1."""
    if tickets.size == 1:
        return previous + 1
    return add_atomically(pointer(tickets), 1)


@njit(error_model="numpy")
def finish(tickets):
    """Count one tile as done."""
    if tickets.size > 1:
        counter = pointer(tickets)
        add_atomically(pointer_at(address(counter) + 8 * _APART, counter), 1)


def _settling() -> Callable[..., Any]:
    stamp = STAMP

    def settle(tickets, tiles):  # type: ignore[no-untyped-def]
        """Let no more tiles be taken; return how many of those taken are not done after a while."""
        if stamp == "":
            return 0
        counter = pointer(tickets)
        done = pointer_at(address(counter) + 8 * _APART, counter)
        # May be called again: only the first time, this is the number taken.
        if tickets[2 * _APART] == 0:
            tickets[2 * _APART] = 1 + min(add_atomically(counter, tiles), tiles)
        taken = tickets[2 * _APART] - 1
        for _ in range(_TURNS):
            if read_atomically(done) == taken:
                break
            pause()
        return taken - read_atomically(done)

    return compiled(settle, types.int64(types.int64[::1], types.int64))


def _spinning() -> Callable[..., Any]:
    stamp = STAMP

    def spin(bell, heard):  # type: ignore[no-untyped-def]
        """Wait a little for `bell` to exceed `heard`."""
        if stamp == "":
            return
        counter = pointer(bell)
        for _ in range(_TURNS):
            if read_atomically(counter) > heard:
                return
            pause()

    return compiled(spin, types.void(types.int64[::1], types.int64))


_settle, _spin = _settling(), _spinning()


def _find_current_cpu() -> Callable[[], int]:
    try:
        return ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        # macOS has neither this nor affinities.
        return lambda: -1


_current_cpu = _find_current_cpu()


def _leave(cpu: int) -> None:
    """
    Move this thread off `cpu`, where the caller is working, if it has been woken there.

    Linux wakes a thread where it last ran, and where two virtual processors do not look as if
    they shared a cache, it leaves it there for milliseconds: after a pause of 5 ms, two threads
    on one of two processors took the time of one (586 us for (4, 512, 1024), against 287).
    """
    if cpu < 0 or _current_cpu() != cpu:
        return
    # An affinity that may have been taken back meanwhile: then it stays.
    with contextlib.suppress(OSError):
        allowed = os.sched_getaffinity(0)
        if others := allowed - {cpu}:
            # The first moves it at once, the second leaves it free to be moved again.
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, allowed)


class _Helper:
    """A daemon thread, and where it finds its jobs."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._bell = np.zeros(1, np.int64)
        self.thread = threading.Thread(target=self._serve, name="stablenorm", daemon=True)
        self.thread.start()

    def post(self, job: Any) -> None:
        # One that has not come for its last job, which is over, has this one instead, and does not
        # hold on to the arrays of that.
        if self._jobs.empty() or not self._withdraw():
            self._jobs.put(job)
            self._bell[0] += 1
        else:
            self._jobs.put(job)

    def _withdraw(self) -> bool:
        try:
            self._jobs.get_nowait()
        except queue.Empty:
            return False
        return True

    def _serve(self) -> None:
        heard = 0
        while True:
            _spin(self._bell, heard)
            function, arguments, failures, cpu = self._jobs.get()
            heard += 1
            try:
                _leave(cpu)
                function(*arguments)
            except Exception as error:  # noqa: BLE001  # no memory, say; the caller raises it
                failures.append(error)
            # Arrays of the caller must not live until the next job.
            del function, arguments, failures


class _Crew:
    """The helpers of this process, lent to one call at a time."""

    def __init__(self) -> None:
        # Under the one key "call", the tickets of the call that has the helpers. Unlike a lock, it
        # says who that is: a KeyboardInterrupt right after cannot leave them lent for good.
        self.lent: dict[str, Any] = {}
        self._helpers: list[_Helper] = []

    def post(self, job: Any, count: int) -> None:
        try:
            while len(self._helpers) < count:
                self._helpers.append(_Helper())
        except RuntimeError:
            # No more threads can be started, here or at the end of the interpreter: those that
            # there are, or the caller alone, will do.
            pass
        for helper in self._helpers[:count]:
            helper.post(job)


_crew = _Crew()


def _forget() -> None:
    global _crew  # noqa: PLW0603  # threads do not survive a fork, and locks may be held for good
    _crew = _Crew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def run(function: Callable[..., None], arguments: tuple[Any, ...], tiles: int) -> None:
    """Run ``function(*arguments, tickets, tiles)`` on this thread and, with tiles to share, more."""
    helpers = min(get_num_threads(), tiles) - 1
    if helpers < 1:
        function(*arguments, ALONE, tiles)
        return
    crew, tickets = _crew, np.zeros(3 * _APART, np.int64)
    lent = crew.lent
    failures: list[Exception] = []
    interrupt: BaseException | None = None
    try:
        if lent.setdefault("call", tickets) is not tickets:
            function(*arguments, ALONE, tiles)
            return
        shared = (*arguments, tickets, tiles)
        try:
            crew.post((function, shared, failures, _current_cpu()), helpers)
            function(*shared)
        except Exception as error:
            failures.append(error)
            raise
        finally:
            # Nobody may still be writing when this ends: a KeyboardInterrupt has to wait, too. Not
            # in a function of its own, which would begin by letting it through.
            while True:
                try:
                    # Who failed has left a tile undone: that many are not waited for.
                    while _settle(tickets, tiles) > len(failures):
                        time.sleep(0)
                    break
                except BaseException as error:  # noqa: BLE001  # whatever a signal handler raises
                    interrupt = error
        if interrupt is not None:
            raise interrupt
        if failures:
            raise failures[0]
    finally:
        # Nothing is called here: CPython lets a KeyboardInterrupt through at calls alone.
        if "call" in lent and lent["call"] is tickets:
            del lent["call"]
        # An error that this frame holds would hold the frame, and the arrays.
        interrupt = None
        failures.clear()
