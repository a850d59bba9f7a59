"""
Memory for results that is handed out again once the last array that refers to it is gone.

The system clears the pages of a large new array one by one, as they are first written, which can
take as long as the layer norm. native/memory.cpp keeps the memory of large results.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from stablenorm.records import Array
from stablenorm.scalars import check_count

# The compiled module, once it is loaded; until then, and without it, results are NumPy's own.
_core: Any = None

# The most that is idle: ten results of (16, 1024, 768) in float32, or a sixteenth of the memory.
_MOST, _SHARE = 512 << 20, 16
_limit: int | None = None


def default_limit() -> int:
    """Return how much may be idle: a share of what this process can have at most."""
    # A system that does not say is taken for a small machine.
    return min(_MOST, most(unknown=4 << 30) // _SHARE)


def most(unknown: int) -> int:
    """Return how much memory this process can have at most; `unknown` if the system does not say."""
    limits = []
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # A container may allow less than the machine has.
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup", "memory.max").read_text()))
    # Dask restarts a worker that goes beyond its limit, perhaps this process; None is no limit.
    with contextlib.suppress(KeyError, AttributeError):
        workers = list(sys.modules["distributed.worker"].Worker._instances)
        limits += filter(None, [worker.memory_manager.memory_limit for worker in workers])
    return min(limits, default=unknown)


def use(core: Any) -> None:
    """Take the memory of large results from the compiled module, which asks for the limit at the first."""
    global _core  # noqa: PLW0603  # there is one of the process
    _core = core
    if _limit is not None:
        core.set_idle_limit(_limit)


# Bytes from which memory is handed out again, as in native/arrays.h.
LARGE = 1 << 20


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of arbitrary elements, a large one in memory that is handed out again."""
    return np.empty(shape, dtype) if _core is None else _core.empty(shape, dtype)


def set_idle_limit(nbytes: int) -> int:
    """
    Set how much memory of large results may be kept while nobody uses it, and return the old limit.

    Parameters
    ----------
    nbytes : int
        From 0 to `sys.maxsize`. With 0, nothing is kept, and what is idle is released at once.

    Returns
    -------
    int
        The limit before: at first 512 MiB, or if less a sixteenth of the memory of the machine, of the
        container, or of the limit of the Dask worker that this process is.

    Raises
    ------
    TypeError, ValueError
        If `nbytes` is not an int, or is out of this range.

    Notes
    -----
    A result of 1 MiB or more for which no `out` was given takes memory whose last array is gone. Beyond
    the limit the longest idle is released. Memory in use does not count.

    Examples
    --------
    >>> from stablenorm.memory import set_idle_limit
    >>> before = set_idle_limit(0)
    >>> set_idle_limit(before)
    0
    """
    global _limit  # noqa: PLW0603  # the one setting of the process
    cure = "for 1 GiB give 2**30, to keep nothing 0"
    new, old = check_count("nbytes", nbytes, least=0, cure=cure), _limit
    _limit = new
    if _core is not None:
        _core.set_idle_limit(new)
    return default_limit() if old is None else old
