"""
The helper threads of this process: started when first needed, then lent to one call at a time.

They are safe under whatever the caller does:

- Python threads that call at the same time: one has the helpers, the others work alone, and a
  program with threads of its own is not oversubscribed;
- a child after a fork has no helpers, and starts its own when it first needs them;
- a helper that does not get to run costs nothing, and none of them needs the GIL for its work.

Numba's own threads are not used: with OpenMP a child after a fork is aborted, with workqueue the
process is, when two Python threads enter at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from stablenorm._threads import SMALL, get_num_threads
from stablenorm.kernels._sharing import MOST_HELPERS, NO_CREW, asleep, enlist, help_out, words

# Fewer elements than this, 2 microseconds of work, are shared with nobody; fewer than the second
# only with who is awake.
LEAST_SHARED, WORTH_WAKING = 1 << 13, int(os.environ.get("WW", SMALL))


def _leave(cpu: int) -> None:
    """
    Move this thread off `cpu`, where the caller is working, and where it has been woken.

    Linux wakes a thread where it last ran, and where two virtual processors do not look as if
    they shared a cache, it leaves it there for milliseconds: after a pause of 5 ms, two threads
    on one of two processors took the time of one (586 us for (4, 512, 1024), against 287).
    """
    # An affinity that may have been taken back meanwhile: then it stays.
    with contextlib.suppress(OSError):
        allowed = os.sched_getaffinity(0)
        if others := allowed - {cpu}:
            # The first moves it at once, the second leaves it free to be moved again.
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, allowed)


class _Helper:
    """A daemon thread, and the pipe on which it waits."""

    def __init__(self, crew: Any, me: int) -> None:
        # Not to be inherited by other programs; a child after a fork closes its copies.
        self.pipe = os.pipe()
        # Left full, it must not stop the caller: who is not awake yet will be.
        os.set_blocking(self.pipe[1], False)
        enlist(crew, me, self.pipe[1])
        self.thread = threading.Thread(
            target=_serve, args=(crew, me, self.pipe[0]), name="stablenorm", daemon=True
        )
        try:
            self.thread.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for end in self.pipe:
            os.close(end)


def _serve(crew: Any, me: int, pipe: int) -> None:
    while True:
        _leave(help_out(crew, me, pipe))


class _Crew:
    """The helpers of this process."""

    def __init__(self) -> None:
        self.words = words()
        self.helpers: list[_Helper] = []
        self._hiring = threading.Lock()

    def hire(self, count: int) -> int:
        """Start helpers until there are `count`, if that is possible; return how many there are."""
        # Whoever comes while another thread is starting them goes on with those there are.
        if self._hiring.acquire(blocking=False):
            try:
                while len(self.helpers) < count:
                    self.helpers.append(_Helper(self.words, 1 + len(self.helpers)))
            except (RuntimeError, OSError):
                # No more threads or pipes to be had, here or at the end of the interpreter: those
                # that there are, or the caller alone, will do.
                pass
            finally:
                self._hiring.release()
        return min(count, len(self.helpers))


_crew = _Crew()


def _forget() -> None:
    global _crew  # noqa: PLW0603  # threads do not survive a fork, and the crew may be lent for good
    for helper in _crew.helpers:
        helper.close()
    _crew = _Crew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def crew_for(elements: int, tiles: int) -> tuple[Any, int]:
    """Return the words of the crew, and how many of its helpers so much work is worth."""
    if elements < LEAST_SHARED or tiles < 2:
        return NO_CREW, 0
    count = min(get_num_threads() - 1, tiles - 1, MOST_HELPERS)
    crew = _crew
    there = len(crew.helpers)
    if elements < WORTH_WAKING:
        for helper in range(1, min(count, there) + 1):
            if asleep(crew.words, helper):
                return crew.words, helper - 1
        return crew.words, min(count, there)
    if count > there:
        count = crew.hire(count)
    return crew.words, count
