"""
Memory that is handed out again once the last array that refers to it is gone, and not before.

`Memory.lend` makes an array, and whoever keeps the memory hears of its end. Two keep some: each
`Workspace`, as its user asks, and `recycler`, for large results that nobody asked to keep.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stablenorm.types import Array

# Smaller arrays are left to malloc, which mostly recycles what fits into its heap: not where other
# allocations come in between, which cost (2, 128, 1024), 1 MiB, 15 microseconds of 60. Lending
# takes 2.
LEAST = 1 << 20

# Where arrays begin: at a cache line, so that the kernels can write whole ones, and successive
# pieces 25 lines apart within a page of 4 KiB. A processor takes a load to depend on a recent
# store that agrees with it in the last 12 bits of the address, so arrays that are read and
# written together should not begin at the same place of a page. 25 of 64 lines is the golden
# section: few or many, the places are spread evenly.
_PAGE, _APART = 4096, 25 * 64
_starts = itertools.count(0, _APART)

# Capacities are 4, 5, 6 and 7 times a power of two: at most a quarter more than was asked for, and
# that in pages that nobody touches.
_STEPS = 4

# How many asks for large arrays back is recent: a forward and a backward of 32 layers, so that a
# size that comes once a step is still recent when it comes again.
_RECENT = 64

# At most this is idle: as much as ten results of (16, 1024, 768) in float32. More than a sixteenth
# of the memory would be missed by others.
_MOST, _SHARE = 512 << 20, 16


class Keeper(Protocol):
    """Who gets memory back."""

    def _take_back(self, memory: Memory) -> None: ...


class Memory:
    """A piece of memory of its own, and who keeps it while nobody uses it."""

    __slots__ = ("keeper", "nbytes", "since", "struct")

    def __init__(self, nbytes: int, keeper: Keeper) -> None:
        whole = np.empty(nbytes + _PAGE, np.uint8)
        start = (next(_starts) - whole.__array_interface__["data"][0]) % _PAGE
        self.nbytes = nbytes
        self.keeper = weakref.ref(keeper)
        # NumPy's description of an array, for whoever asks for one; keeps `whole` alive.
        self.struct = whole[start : start + nbytes].__array_struct__
        # For the keeper: when it came back.
        self.since = 0

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array in this memory, which goes back when nothing refers to the array."""
        return np.ndarray(shape, dtype, np.asarray(_Lease(self)))


class _Lease:
    """
    What the array refers to, with all its views: its end is the end of the last of them.

    Following `base` as far as it goes ends here and not at the memory: a lease is no array, so
    NumPy does not shorten the chain beyond it, and what is made from a lease refers to it.
    """

    __slots__ = ("__array_struct__", "memory")

    def __init__(self, memory: Memory) -> None:
        self.__array_struct__ = memory.struct
        self.memory = memory

    def __del__(self) -> None:
        # No global names from here on: when the interpreter exits they may be gone.
        keeper = self.memory.keeper()
        if keeper is not None:
            keeper._take_back(self.memory)


def capacity(size: int) -> int:
    """Return the smallest capacity of at least `size` bytes."""
    step = (1 << (size - 1).bit_length()) // (2 * _STEPS)
    return -(-size // step) * step


class Recycler:
    """
    Keeps memory of the sizes that a process asks for again and again, up to a limit.

    Single operations on a dict are atomic, so that no lock is needed: one would have to be let go
    of in a child after a fork, and in a garbage collection that begins while it is held. What is
    looked through is always a copy, and what is popped has one taker.
    """

    def __init__(self) -> None:
        # Bytes that may be idle.
        self.limit = min(_MOST, _available() // _SHARE)
        # Asks so far, and by capacity, which was the latest.
        self._asks = itertools.count(1)
        self._now = 0
        self._asked: dict[int, int] = {}
        # By numbers of their own, so the first has been idle for longest.
        self._numbers = itertools.count()
        self._idle: dict[int, Memory] = {}

    def set_limit(self, nbytes: int) -> None:
        """Let at most `nbytes` be idle from now on."""
        self.limit = nbytes
        self._trim()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are idle now."""
        return sum(memory.nbytes for memory in self._idle.copy().values())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> Array:
        """Return an array of `size` bytes: an ordinary one, unless its like was asked for lately."""
        try:
            return self._empty(shape, dtype, capacity(size))
        except MemoryError:
            # What is idle may be what is missing.
            self._idle.clear()
        return np.empty(shape, dtype)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], room: int) -> Array:
        self._now = now = next(self._asks)
        latest = self._asked.get(room)
        self._asked[room] = now
        self._let_go(now - _RECENT)
        if latest is None or now - latest > _RECENT or room > self.limit:
            return np.empty(shape, dtype)
        memory = self._take(room)
        if memory is None:
            memory = Memory(room, self)
        return memory.lend(shape, dtype)

    def _let_go(self, before: int) -> None:
        """Let go of what came back before that ask."""
        for number, memory in self._idle.copy().items():
            if memory.since >= before:
                break
            self._idle.pop(number, None)

    def _take(self, room: int) -> Memory | None:
        """Return idle memory for `room` bytes, if there is any, which is then idle no more."""
        while True:
            # Up to twice as large is better than new, which the system would have to clear page
            # by page. The smallest, and of several the latest: the likeliest to be in the caches.
            least, best = 2 * room, None
            for number, memory in self._idle.copy().items():
                if room <= memory.nbytes <= least:
                    least, best = memory.nbytes, number
            if best is None:
                return None
            taken = self._idle.pop(best, None)
            # None if another thread was quicker.
            if taken is not None:
                return taken

    def _take_back(self, memory: Memory) -> None:
        # One that is too large by itself would drive out all the others first.
        if memory.nbytes <= self.limit:
            memory.since = self._now
            self._idle[next(self._numbers)] = memory
            self._trim()

    def _trim(self) -> None:
        """Let go of the longest idle until the rest is within the limit."""
        idle = self._idle.copy()
        excess = -self.limit
        for memory in idle.values():
            excess += memory.nbytes
        for number, memory in idle.items():
            if excess <= 0:
                break
            # Gone, whether by this thread or by another.
            self._idle.pop(number, None)
            excess -= memory.nbytes


def _available() -> int:
    """Return how much memory this process can have at most."""
    try:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        # A system that does not say: a small machine of today.
        sizes = [4 << 30]
    # A container may allow less than the machine has.
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):
            continue
    return min(sizes)


# The one of this process.
recycler = Recycler()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a C-contiguous array of arbitrary elements, in recycled memory where that pays."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return np.empty(shape, dtype)
    return recycler.empty(shape, dtype, size)
