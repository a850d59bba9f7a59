"""How many threads a call may use: one number for the process."""

import os

from stablenorm.types import check_count

_chosen: int | None = None


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
        What `set_num_threads` was given; before that STABLENORM_NUM_THREADS, if it is set, or else
        the number of processors that this process may run on.

    Raises
    ------
    ValueError
        If STABLENORM_NUM_THREADS is not a positive integer.
    """
    if _chosen is None:
        set_num_threads(_default())
    return _chosen or 1


def _default() -> int:
    name = "STABLENORM_NUM_THREADS"
    asked = os.environ.get(name)
    if not asked:
        # A container or taskset may allow fewer processors than there are; macOS has no affinity.
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    if not asked.strip().isdecimal() or int(asked) < 1:
        msg = f"{name} must be a positive integer, got {asked!r}; unset or correct it"
        raise ValueError(msg)
    return int(asked)
