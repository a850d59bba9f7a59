"""How many threads a call may use: one number for the process; and what a fork waits for."""

import operator
import os
import threading

# Fewer elements than this stay on the calling thread: about 15 microseconds of work, where waking
# another thread can take 20.
SMALL = 1 << 16

_chosen: int | None = None

# Held while Numba is imported or compiles. A child forked in the middle of that, by another
# thread, would wait for Numba's own locks for ever; so the fork waits.
starting = threading.RLock()

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
    TypeError
        If `count` is not an int.
    ValueError
        If `count` is less than 1.

    Notes
    -----
    Results do not depend on it: not a bit. Small inputs stay on the calling thread, and so does
    a call that begins while another has the helper threads.

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
    try:
        number = operator.index(count)
    except TypeError:
        msg = f"count must be an int, got {count!r}"
        raise TypeError(msg) from None
    if number < 1:
        msg = f"count must be at least 1, got {number}"
        raise ValueError(msg)
    _chosen = number


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

    Examples
    --------
    >>> import stablenorm
    >>> stablenorm.get_num_threads() >= 1
    True
    """
    if _chosen is None:
        set_num_threads(_from_environment())
    return _chosen or 1


def _from_environment() -> int:
    asked = os.environ.get("NUMBA_NUM_THREADS")
    if not asked:
        return _processors()
    if not asked.strip().isdecimal() or int(asked) < 1:
        msg = f"NUMBA_NUM_THREADS must be a positive integer, got {asked!r}; unset or correct it"
        raise ValueError(msg)
    return int(asked)


def _processors() -> int:
    # Not all of the machine's: a container or taskset may allow fewer. (macOS has no affinity.)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
