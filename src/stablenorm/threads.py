"""How many threads a call may use: one number for the process."""

import os

from stablenorm.scalars import check_count

_chosen: int | None = None

# The most that a call may be asked to use, those of a C int; more than there are processors cost nothing.
_MOST = 2**31 - 1


def set_num_threads(count: int) -> None:
    """
    Set how many threads a call may use, the calling one included.

    Parameters
    ----------
    count : int
        From 1 to 2**31 - 1; more than there are processors cost nothing. With 1, every call stays on its own thread.

    Raises
    ------
    TypeError, ValueError
        If `count` is not an int, or is out of this range.

    Notes
    -----
    No bit of a result depends on it, nor on whether the calling thread is set to flush subnormals or
    to round upward. Small inputs, and a call that begins while another has the helper threads, stay
    on the calling thread.

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
    _chosen = check_count("count", count, least=1, most=_MOST)


def get_num_threads() -> int:
    """
    Return how many threads a call may use.

    The number that `set_num_threads` was given; before that STABLENORM_NUM_THREADS, if it is set, or
    else the number of processors that this process may run on.

    Raises
    ------
    ValueError
        If STABLENORM_NUM_THREADS is not an integer from 1 to 2**31 - 1.
    """
    global _chosen  # noqa: PLW0603  # the one setting of the process
    if _chosen is None:
        # A container or taskset may allow fewer processors than there are; macOS has no affinity.
        affinity = getattr(os, "sched_getaffinity", None)
        processors = len(affinity(0)) if affinity else os.cpu_count() or 1
        name = "STABLENORM_NUM_THREADS"
        asked = (os.environ.get(name) or str(processors)).strip()
        # Python reads no number of more than 4300 digits.
        count = int(asked) if asked.isdecimal() and len(asked) < 20 else 0
        if not 1 <= count <= _MOST:
            msg = f"{name} must be an integer from 1 to {_MOST}, got {asked!r:.60}; unset or correct it"
            raise ValueError(msg)
        _chosen = count
    return _chosen
