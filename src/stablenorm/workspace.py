"""`Workspace`: memory for results, handed out again once nobody holds the array any more."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike

from stablenorm import _recycling
from stablenorm._recycling import Memory, capacity
from stablenorm.types import Array

# Less than this, malloc keeps in the process by itself, whoever frees it (128 KiB in glibc).
_SMALLEST = 1 << 16

# A kept piece of up to twice the size is taken before a new one is made: a new one would have to
# be cleared by the system, page by page, and kept as well. That is four capacities up.
_LARGER_TRIED = 4


def set_idle_limit(nbytes: int) -> None:
    """
    Set how much memory of large results may be kept while nobody uses it.

    Parameters
    ----------
    nbytes : int
        At least 0. With 0, nothing is kept, and what is idle is let go at once.

    Raises
    ------
    TypeError
        If `nbytes` is not an int.
    ValueError
        If `nbytes` is negative.

    See Also
    --------
    get_idle_limit : The number in force.
    Workspace : Memory that one loop keeps for itself; this limit does not count it.

    Notes
    -----
    Large are results of 1 MiB or more of `layer_norm`, `layer_norm_forward` and
    `layer_norm_backward`, where no `out` was given. If another of about the same size was among
    the last 64 of them, a result takes memory that is no longer in use: the last array that
    refers to it is gone. A size that comes once is an ordinary array, and keeps nothing. Beyond
    the limit the longest idle is let go, and so is what has been idle for 64 large results.
    Memory in use is never handed out and counts for nothing here.

    An array in such memory is like any other, but does not own it: ``flags.owndata`` is False
    and ``base`` is not None. As with a `Workspace`, a bare address does not keep it in use.

    Examples
    --------
    >>> from stablenorm.workspace import get_idle_limit, set_idle_limit
    >>> before = get_idle_limit()
    >>> set_idle_limit(0)
    >>> get_idle_limit()
    0
    >>> set_idle_limit(before)
    """
    try:
        number = operator.index(nbytes)
    except TypeError:
        msg = f"nbytes must be an int, got {nbytes!r}; for 1 GiB give 2**30"
        raise TypeError(msg) from None
    if number < 0:
        msg = f"nbytes must be at least 0, got {number}; 0 keeps nothing"
        raise ValueError(msg)
    _recycling.recycler.set_limit(number)


def get_idle_limit() -> int:
    """
    Return how much memory of large results may be kept while nobody uses it.

    Returns
    -------
    int
        What `set_idle_limit` was given; before that 512 MiB, or a sixteenth of the memory of
        the machine or the container if that is less.

    See Also
    --------
    get_idle_bytes : How much it is now.

    Examples
    --------
    >>> from stablenorm.workspace import get_idle_limit
    >>> 0 <= get_idle_limit() <= 2**29
    True
    """
    return _recycling.recycler.limit


def get_idle_bytes() -> int:
    """
    Return how much memory of large results is kept now while nobody uses it.

    Returns
    -------
    int
        Bytes, without those of arrays in use and those of a `Workspace`.

    See Also
    --------
    set_idle_limit : Sets how much it may be.

    Examples
    --------
    >>> from stablenorm.workspace import get_idle_bytes, get_idle_limit
    >>> 0 <= get_idle_bytes() <= get_idle_limit()
    True
    """
    return _recycling.recycler.idle_bytes


class Workspace:
    """
    Memory for the results of a loop, handed out again once nobody holds the array any more.

    A large array is new to the process each time it is allocated: the system hands over zeroed
    pages, one fault each, and takes them back when the array goes. In a training loop that costs
    about as much as the layer norm itself. A workspace keeps the memory instead, and hands it
    out again as soon as the last array that refers to it is gone: not before, so nothing that is
    still in use is ever overwritten.

    Attributes
    ----------
    nbytes : int
        Bytes held, whether in use or kept for the next array.

    See Also
    --------
    LayerNorm : Takes its results from a workspace, if it is given one.

    Notes
    -----
    In use means: held by an array, a view or slice of it, a memoryview, or whatever else keeps a
    reference to one of them, as ``torch.from_numpy`` and DLPack do. A bare address does not:
    memory whose ``array.ctypes.data`` was given to C must be kept in use by keeping the array.

    It holds as much as was in use at once, for each size (those within a quarter of one another
    count as one), until `clear`. A loop that binds ``y`` anew while the last ``y`` is still bound
    has two in use. Arrays of less than 64 KiB are ordinary ones. The memory is not cleared: like
    those of ``numpy.empty``, the elements are arbitrary.

    Any thread may ask and any may let go, with no lock to wait for. A child after a fork has its
    own copy, like all its memory. A copy or a pickle of a workspace is a new, empty one.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import layer_norm_backward, layer_norm_forward
    >>> from stablenorm.workspace import Workspace
    >>> work = Workspace()
    >>> x = np.ones((32, 1024), np.float32)
    >>> for step in range(100):
    ...     y, cache = layer_norm_forward(x, out=work.empty_like(x))
    ...     gradients = layer_norm_backward(y, cache, out=(work.empty_like(x), None, None))
    ...     del y, cache, gradients
    >>> work.nbytes == 2 * x.nbytes
    True
    """

    def __init__(self) -> None:
        # By capacity. Pop and append of a deque are atomic, so that no lock is needed: one would
        # have to be let go of in a child after a fork, and in a garbage collection that begins
        # while it is held.
        self._kept: dict[int, deque[Memory]] = {}
        # What is in use: the capacity of each, by the identity of the memory.
        self._lent: dict[int, int] = {}

    def __repr__(self) -> str:
        """Return how much this workspace holds."""
        return f"<Workspace of {self.nbytes} bytes>"

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        """Copy and pickle as an empty one: what is in memory is nobody's state."""
        return type(self), ()

    @property
    def nbytes(self) -> int:
        """Tell how many bytes are held, in use or kept for the next array."""
        kept = sum(room * len(pieces) for room, pieces in self._kept.copy().items())
        return kept + sum(self._lent.copy().values())

    def empty(self, shape: int | Iterable[int], dtype: DTypeLike = np.float64) -> Array:
        """
        Return an array of arbitrary elements, as `numpy.empty` does.

        Parameters
        ----------
        shape : int or sequence of int
            Its shape.
        dtype : dtype, default: float64
            Its dtype; not one that holds Python objects.

        Returns
        -------
        array
            C-contiguous and, from 64 KiB on, beginning at a multiple of 64 bytes.

        Raises
        ------
        TypeError
            If `dtype` holds Python objects.
        """
        element = np.dtype(dtype)
        if element.hasobject:
            msg = f"dtype must not hold Python objects, got {element}"
            raise TypeError(msg)
        given = shape if isinstance(shape, Iterable) else (shape,)
        lengths = tuple(map(operator.index, given))
        size = math.prod(lengths) * element.itemsize
        if size < _SMALLEST or min(lengths) < 0:
            return np.empty(lengths, element)
        memory = self._take(size)
        array = memory.lend(lengths, element)
        self._lent[id(memory)] = memory.nbytes
        return array

    def empty_like(self, array: Array) -> Array:
        """
        Return an array of arbitrary elements with the shape and dtype of another.

        Parameters
        ----------
        array : array
            The other one, of any layout.

        Returns
        -------
        array
            C-contiguous, as of `empty`.
        """
        return self.empty(array.shape, array.dtype)

    def clear(self) -> None:
        """Let go of all memory that is not in use; what is in use still comes back later."""
        for pieces in self._kept.copy().values():
            pieces.clear()

    def _take(self, size: int) -> Memory:
        room = larger = capacity(size)
        for _ in range(_LARGER_TRIED + 1):
            try:
                # The latest: the likeliest to be in the caches still.
                return self._kept[larger].pop()
            except (KeyError, IndexError):
                larger = capacity(larger + 1)
        self._kept.setdefault(room, deque())
        return Memory(room, self)

    def _take_back(self, memory: Memory) -> None:
        # No global names: when the interpreter exits they may be gone.
        self._lent.pop(id(memory), None)
        self._kept[memory.nbytes].append(memory)
