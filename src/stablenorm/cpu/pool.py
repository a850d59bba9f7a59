"""
Threads that share the tiles of one call: started when first needed, lent to one call at a time.

A call writes what is to be done into the pool's words, and adds one to a counter, GENERATION, which
is odd while there is work. Everyone who takes part, the caller included, takes tile after tile by
an atomic counter. So it does not matter how many helpers come, when, or whether at all; the caller
waits only for those that have begun. Helpers wait and compute without the GIL. One that has just worked
spins a while, since the next call of a loop comes soon. Then it naps and looks, for some milliseconds:
a nap ends on the processor on which it began, where a thread that another one wakes may be put beside
that one. At last it sleeps in a queue.

- Python threads that call at the same time: one has the helpers, the others work alone, so that a
  program with threads of its own is not oversubscribed.
- A child after a fork has no helpers, and starts its own when it first needs them.
- A helper that does not get to run costs nothing.

Numba's own threads are not used: with OpenMP a child after a fork is aborted, with workqueue the
process is, when two Python threads enter at once.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
from numba import types

from stablenorm.cpu.compiling import compiled
from stablenorm.cpu.memory import pasted, pointer_at
from stablenorm.cpu.processor import (
    atomic_add,
    atomic_load,
    call,
    exchange,
    pause,
    restore,
    set_default,
)
from stablenorm.cpu.record import PLACE, address_of
from stablenorm.threads import get_num_threads

# int64 between words that threads write: two cache lines, so that they do not disturb one another.
_APART = 16

# Taken by one call at a time; odd while there is work; how many helpers are at work; how many tiles
# are begun, and how many of them by helpers.
_TAKEN, _GENERATION, _WORKING, _BEGUN, _FROM_END = (i * _APART for i in range(5))
# What the work is, written before the generation changes.
_FUNCTION, _RECORD, _TILES, _HELPERS = (5 * _APART + i for i in range(4))
# Of each helper: whether it sleeps.
_ASLEEP = 6 * _APART

# More would find no tiles: the backward has at most 64.
MOST_HELPERS = 63

# Turns of some 40 cycles: about 100 microseconds. Waking a thread takes 50 and more.
_TURNS = 10_000

# Naps of so many microseconds, each 3 of work for the processor, together some milliseconds.
_NAP, _NAPS = 50, 100

_yield = types.ExternalFunction("sched_yield", types.intc())
_nap = types.ExternalFunction("usleep", types.intc(types.uintc))

# Linux lengthens naps by 50 microseconds, to wake several threads at a time, unless a thread asks it not to.
_LINUX = sys.platform == "linux"
_PR_SET_TIMERSLACK = 29
_set_slack = types.ExternalFunction("prctl", types.intc(types.intc, types.uint64))


@pasted
def _word(pool, index):
    return pointer_at(pool + 8 * index, np.int64)


@pasted
def _take_tiles(pool, me):
    """
    Do tile after tile until none is left: the caller from the first on, helpers from the last.

    So in the next call of a loop each processor has about the tiles that its own cache holds.
    """
    words, mine = _word(pool, 0), 0
    while atomic_add(_word(pool, _BEGUN), 1) < words[_TILES]:
        if me == 0:
            tile = mine
            mine += 1
        else:
            tile = words[_TILES] - 1 - atomic_add(_word(pool, _FROM_END), 1)
        call(words[_FUNCTION], words[_RECORD], tile, me)


@pasted
def run(function, record, tiles, pool, helpers):
    """Call ``function(record, tile, me)`` for each tile on this thread, 0, and helpers, if they are to be had."""
    if helpers == 0 or exchange(_word(pool, _TAKEN), 1) != 0:
        for tile in range(tiles):
            call(function, record, tile, 0)
        return
    words = _word(pool, 0)
    words[_FUNCTION], words[_RECORD], words[_TILES] = function, record, tiles
    words[_HELPERS], words[_BEGUN], words[_FROM_END] = helpers, 0, 0
    atomic_add(_word(pool, _GENERATION), 1)
    _take_tiles(pool, 0)
    # Nobody begins any more.
    atomic_add(_word(pool, _GENERATION), 1)
    turns = 0
    while atomic_load(_word(pool, _WORKING)) != 0:
        turns += 1
        # A helper may have lost its processor to another thread: to this one, on a single processor.
        if turns > _TURNS // 5:
            _yield()
        pause()
    exchange(_word(pool, _TAKEN), 0)


@functools.cache
def _helping() -> Any:
    """Return what helpers run, compiled when the first is started."""

    def help_out(words, me, seen):  # type: ignore[no-untyped-def]
        """Work on whatever comes; return the last generation seen when nothing has come for a while."""
        pool = address_of(words)
        generation, working = _word(pool, _GENERATION), _word(pool, _WORKING)
        asleep = _word(pool, _ASLEEP + me * _APART)
        turns, last = 0, _TURNS + _NAPS
        if _LINUX:
            _set_slack(_PR_SET_TIMERSLACK, 1)
        word = set_default()
        while turns <= last:
            # About to sleep: said first, so that whoever comes after the last look wakes this one.
            if turns == last:
                exchange(asleep, 1)
            now = atomic_load(generation)
            if now % 2 == 0 or now == seen:
                turns += 1
                if turns > _TURNS:
                    _nap(_NAP)
                else:
                    pause()
                continue
            exchange(asleep, 0)
            atomic_add(working, 1)
            # As long as this one works, the words stay what they are.
            if atomic_load(generation) == now and me <= _word(pool, _HELPERS)[0]:
                _take_tiles(pool, me)
            atomic_add(working, -1)
            seen, turns = now, 0
        restore(word)
        return seen

    return compiled(help_out, types.int64(PLACE, types.int64, types.int64))


class _Pool:
    """The helpers of this process."""

    def __init__(self) -> None:
        self.words = np.zeros(_ASLEEP + (1 + MOST_HELPERS) * _APART, np.int64)
        self.alarms: list[SimpleQueue[None]] = []
        self._starting = threading.Lock()

    def start(self, count: int) -> int:
        """Start helpers until there are `count`, if that is possible; return how many there are."""
        # Whoever comes while another thread is starting them goes on with those there are.
        if self._starting.acquire(blocking=False):
            try:
                while len(self.alarms) < count:
                    alarm: SimpleQueue[None] = SimpleQueue()
                    arguments = (_helping(), self.words, 1 + len(self.alarms), alarm)
                    thread = threading.Thread(
                        target=_serve, args=arguments, name="stablenorm", daemon=True
                    )
                    thread.start()
                    self.alarms.append(alarm)
            except RuntimeError:
                # No more threads to be had, here or at the end of the interpreter: those that
                # there are, or the caller alone, will do.
                pass
            finally:
                self._starting.release()
        return min(count, len(self.alarms))

    def wake(self, count: int) -> None:
        words = self.words
        for helper in range(1, count + 1):
            if words[_ASLEEP + helper * _APART]:
                words[_ASLEEP + helper * _APART] = 0
                self.alarms[helper - 1].put(None)


def _serve(help_out: Any, words: Any, me: int, alarm: SimpleQueue[None]) -> None:
    seen = 0
    while True:
        seen = help_out(words, me, seen)
        alarm.get()


_pool = _Pool()


def _forget() -> None:
    global _pool  # noqa: PLW0603  # threads do not survive a fork, and the pool may be taken for good
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)


def pool_for(most: int, small: bool, threads: int | None) -> tuple[Any, int]:
    """Return the words of the pool, and how many of its helpers, at most so many, are to be had."""
    count = min((threads or get_num_threads()) - 1, most)
    pool = _pool
    if small:
        # Not worth starting or waking anybody: shared with those that still spin.
        return pool.words, min(count, len(pool.alarms))
    if count > len(pool.alarms):
        count = pool.start(count)
    pool.wake(count)
    return pool.words, count
