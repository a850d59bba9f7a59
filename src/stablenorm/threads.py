"""How many threads a call may use: one number for the process; and what a fork waits for."""

import logging  # noqa: F401  # for the order of fork hooks, see below
import os
import threading

from stablenorm.types import check_count

# No thread is started or woken for fewer elements than this: about 15 microseconds of work, where
# waking another thread can take 20.
SMALL = 1 << 16

_chosen: int | None = None

# Held while Numba is imported or compiles. A child forked in the middle of that, by another
# thread, would wait for Numba's own locks for ever; so the fork waits.
starting = threading.RLock()

# Hooks run in reverse order, so this one comes before that of `logging`, which takes a lock that
# the import of Numba needs as well: which is why `logging` is imported above.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=starting.acquire,
        after_in_parent=starting.release,
        after_in_child=starting.release,
    )


def set_num_threads(count: int) -> None:
    """
    Set how many threads a call may use, the calling one included.

    Parameters
    ----------
    count : int
        At least 1. With 1, every call stays on its own thread.

    Raises
    ------
    TypeError, ValueError
        If `count` is not an int, or is less than 1.

    Notes
    -----
    Results do not depend on it: not a bit, nor on whether the calling thread is set to flush
    subnormals or to round upward. No thread is started or woken for small inputs, and a
    call that begins while another has the helper threads stays on its own.

    Examples
    --------
    >>> import stablenorm
    >>> before = stablenorm.get_num_threads()
    >>> stablenorm.set_num_threads(1)
    >>> stablenorm.get_num_threads()
    1
    >>> stablenorm.set_num_threads(before)
    """
    global _chosen  # noqa: PLW0603  # the one setting of the process
    _chosen = check_count("count", count, least=1)


def get_num_threads() -> int:
    """
    Return how many threads a call may use.

    Returns
    -------
    int
        What `set_num_threads` was given; before that NUMBA_NUM_THREADS, if it is set, or else
        the number of processors that this process may run on.

    Raises
    ------
    ValueError
        If NUMBA_NUM_THREADS is not a positive integer.
    """
    if _chosen is None:
        set_num_threads(_default())
    return _chosen or 1


def _default() -> int:
    asked = os.environ.get("NUMBA_NUM_THREADS")
    if not asked:
        # Not all of the machine's: a container or taskset may allow fewer. (macOS has no affinity.)
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    if not asked.strip().isdecimal() or int(asked) < 1:
        msg = f"NUMBA_NUM_THREADS must be a positive integer, got {asked!r}; unset or correct it"
        raise ValueError(msg)
    return int(asked)
