"""
Memory for results that is handed out again once the last array that refers to it is gone.

The system clears the pages of a large new array one by one, as they are first written, which can
take as long as the layer norm. The `Pool` of the process keeps the memory of large results for which
none was given.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from stablenorm.types import Array, check_count

# Smaller results are mostly recycled by malloc; where they are not, (2, 128, 1024) took 15 us of 60
# longer. Lending takes 2.
LEAST = 1 << 20

# Arrays begin at a cache line, so that the kernels can write whole ones, and successive ones begin
# 25 lines apart within a page of 4 KiB: a processor takes a load to depend on a recent store whose
# address agrees in the last 12 bits. 25 of 64 lines is the golden section, so few or many, the
# places are spread evenly.
_PAGE, _APART = 4096, 25 * 64
_starts = itertools.count(0, _APART)

# The most that is idle: ten results of (16, 1024, 768) in float32, or a sixteenth of the memory.
_MOST, _SHARE = 512 << 20, 16


def capacity(size: int) -> int:
    """Return the least 4, 5, 6 or 7 times a power of two that is `size` or more."""
    # At most a quarter more than was asked for, and that in pages that nobody touches.
    step = (1 << (size - 1).bit_length()) // 8
    return -(-size // step) * step


def _new_memory(nbytes: int) -> Any:
    """Return NumPy's description of new memory, which keeps that alive and is read by `asarray`."""
    whole = np.empty(nbytes + _PAGE, np.uint8)
    start = (next(_starts) - whole.__array_interface__["data"][0]) % _PAGE
    return whole[start : start + nbytes].__array_struct__


class _Lease:
    """
    What a lent array and all its views refer to: it ends with the last of them.

    Following `base` as far as it goes ends here and not at the memory: a lease is no array, so
    NumPy does not shorten the chain beyond it, and what is made from a lease refers to it.
    """

    __slots__ = ("__array_struct__", "nbytes", "pool")

    def __init__(self, memory: Any, nbytes: int, pool: Pool) -> None:
        self.__array_struct__ = memory
        self.nbytes = nbytes
        # Weak, so that a pool that nobody refers to goes at once, with all that it keeps.
        self.pool = weakref.ref(pool)

    def __del__(self) -> None:
        # No global names from here on: when the interpreter exits they may be gone.
        pool = self.pool()
        if pool is not None:
            pool.take_back(self.__array_struct__, self.nbytes)


class Pool:
    """
    Memory that nobody uses now, for the next array of its capacity, up to a limit in bytes.

    Single operations on a dict are atomic, so there is no lock. A lock could stay locked in a
    forked child, and would deadlock if garbage collection began while it is held. Loops run over
    copies, and what is popped has one taker.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit = limit
        # Memory and its bytes, in the order in which it came back: the first is idle for longest.
        self._idle: dict[int, tuple[Any, int]] = {}
        self._numbers = itertools.count()

    @property
    def limit(self) -> float:
        """The limit in bytes, computed on first use: after a worker of Dask has set its own."""
        # Not a cached_property, which has a lock in Python 3.11.
        if self._limit is None:
            self._limit = default_limit()
        return self._limit

    @limit.setter
    def limit(self, limit: float) -> None:
        """Set what the user chose; a worker of Dask does not change it."""
        self._limit = limit

    @property
    def idle_bytes(self) -> int:
        """Count the bytes that are idle now."""
        return sum(nbytes for _, nbytes in self._idle.copy().values())

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any], room: int) -> Array:
        """Return an array in memory of `room` bytes, which comes back when nothing refers to it."""
        memory = self._take(room) or _new_memory(room)
        return np.ndarray(shape, dtype, np.asarray(_Lease(memory, room, self)))

    def _take(self, room: int) -> Any:
        """Return idle memory of `room` bytes if there is any, which is then idle no more."""
        # The latest: the likeliest to be in the caches.
        for number, (_, nbytes) in reversed(self._idle.copy().items()):
            # None if another thread was quicker.
            if nbytes == room and (taken := self._idle.pop(number, None)):
                return taken[0]
        return None

    def take_back(self, memory: Any, nbytes: int) -> None:
        """Keep memory that nobody uses any more."""
        # One that is too large by itself would drive out all the others first.
        if nbytes <= self.limit:
            self._idle[next(self._numbers)] = memory, nbytes
            self.release()

    def release(self) -> None:
        """Release the longest idle beyond the limit."""
        excess = self.idle_bytes - self.limit
        for number, (_, nbytes) in self._idle.copy().items():
            if excess <= 0:
                break
            # Gone, whether by this thread or by another.
            self._idle.pop(number, None)
            excess -= nbytes

    def clear(self) -> None:
        """Release all that is idle."""
        self._idle.clear()


# ---- large results of the process ----


def default_limit() -> int:
    """Return how much may be idle: a share of what this process can have at most."""
    found = []
    with contextlib.suppress(AttributeError, ValueError, OSError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # A container may allow less than the machine has.
    with contextlib.suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup", "memory.max").read_text()))
    # Dask restarts a worker, as which this process runs, that goes beyond its limit; None is no limit.
    with contextlib.suppress(KeyError, AttributeError):
        workers = list(sys.modules["distributed.worker"].Worker._instances)
        found += filter(None, [each.memory_manager.memory_limit for each in workers])
    # A system that does not say is taken for a small machine.
    return min(_MOST, min(found, default=4 << 30) // _SHARE)


pool = Pool()
# The capacities asked for: some four for each power of two.
_asked: set[int] = set()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of arbitrary elements, a large one in memory of the pool where that pays."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return np.empty(shape, dtype)
    room = capacity(size)
    if room in _asked and room <= pool.limit:
        try:
            return pool.lend(shape, dtype, room)
        except MemoryError:
            # What is idle may be what is missing.
            pool.clear()
    _asked.add(room)
    return np.empty(shape, dtype)


def set_idle_limit(nbytes: int) -> None:
    """
    Set how much memory of large results may be kept while nobody uses it.

    Parameters
    ----------
    nbytes : int
        At least 0. With 0, nothing is kept, and what is idle is released at once.

    Raises
    ------
    TypeError, ValueError
        If `nbytes` is not an int, or is negative.

    Notes
    -----
    Large are results of 1 MiB or more for which no `out` was given. From the second of about the
    same size on, a result takes memory that is no longer in use: the last array that refers to it
    is gone. A size that comes once keeps nothing. Beyond the limit the longest idle is released.
    Memory in use does not count.

    An array in such memory is like any other, but does not own it: ``flags.owndata`` is False
    and ``base`` is not None.

    Examples
    --------
    >>> from stablenorm.memory import get_idle_bytes, get_idle_limit, set_idle_limit
    >>> before = get_idle_limit()
    >>> set_idle_limit(0)
    >>> get_idle_limit(), get_idle_bytes()
    (0, 0)
    >>> set_idle_limit(before)
    """
    cure = "for 1 GiB give 2**30, to keep nothing 0"
    pool.limit = check_count("nbytes", nbytes, least=0, cure=cure)
    pool.release()


def get_idle_limit() -> int:
    """
    Return how many bytes of large results may be kept while nobody uses them.

    What `set_idle_limit` was given; before that 512 MiB, or if that is less a sixteenth of the memory
    of the machine, of the container, or of the limit of the Dask worker that this process is.
    """
    return int(pool.limit)


def get_idle_bytes() -> int:
    """Return how many bytes are kept for large results now: those in use are not counted."""
    return pool.idle_bytes
