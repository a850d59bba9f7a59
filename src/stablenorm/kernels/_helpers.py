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

import os
import threading
from time import perf_counter
from typing import Any

from stablenorm.kernels._sharing import MOST_HELPERS, NO_CREW, asleep, enlist, help_out, words
from stablenorm.threads import SMALL, get_num_threads

# Fewer elements than this, 2 microseconds of work, are shared with nobody. From SMALL on, helpers
# are woken, or started. In between, only by a call that comes within so many seconds of another
# one, since whoever is woken then stays awake for those to come.
LEAST_SHARED, DENSE = 1 << 13, 1e-4


class _Helper:
    """A daemon thread, and the pipe on which it waits."""

    def __init__(self, crew: Any, me: int) -> None:
        # Not to be inherited by other programs; a child after a fork closes its copies.
        self.pipe = os.pipe()
        # Left full, it must not stop the caller: who is not awake yet will be.
        os.set_blocking(self.pipe[1], False)
        enlist(crew, me, self.pipe[1])
        self.thread = threading.Thread(
            target=help_out,
            args=(crew, me, self.pipe[0], os.getpid()),
            name="stablenorm",
            daemon=True,
        )
        try:
            self.thread.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for end in self.pipe:
            os.close(end)


class _Crew:
    """The helpers of this process."""

    def __init__(self) -> None:
        self.words = words()
        self.helpers: list[_Helper] = []
        # When a small call came last.
        self.latest = 0.0
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

    def awake(self, count: int) -> int:
        """Return how many of the first `count` helpers do not sleep, up to the first that does."""
        count = min(count, len(self.helpers))
        for helper in range(1, count + 1):
            if asleep(self.words, helper):
                return helper - 1
        return count


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
    if elements < SMALL:
        now = perf_counter()
        latest, crew.latest = crew.latest, now
        if now - latest > DENSE:
            # Not worth waking anybody, let alone starting.
            return crew.words, crew.awake(count)
    if count > len(crew.helpers):
        count = crew.hire(count)
    return crew.words, count
