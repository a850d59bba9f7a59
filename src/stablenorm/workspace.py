"""`Workspace`: memory for results, handed out again once nobody holds the array any more."""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from stablenorm._types import Array

# Where arrays begin: at a cache line, so that the kernels can write whole ones.
_LINE = 64

# Less than this, malloc keeps in the process by itself, whoever frees it (128 KiB in glibc).
_SMALLEST = 1 << 16

# Capacities are 4, 5, 6 and 7 times a power of two: at most a quarter more than was asked for, and
# that in pages that nobody touches. A kept piece of up to twice the size is taken before a new
# one is made: a new one would have to be cleared by the system, page by page, and kept as well.
_STEPS, _LARGER_TRIED = 4, 4


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
        self._kept: dict[int, deque[Array]] = {}
        # By a number of its own: what is in use, and the reference that tells when it no longer is.
        self._lent: dict[int, tuple[Array, weakref.ref[Array]]] = {}

    def __repr__(self) -> str:
        """Return how much this workspace holds."""
        return f"<Workspace of {self.nbytes} bytes>"

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        """Copy and pickle as an empty one: what is in memory is nobody's state."""
        return type(self), ()

    @property
    def nbytes(self) -> int:
        """Tell how many bytes are held, in use or kept for the next array."""
        kept = sum(capacity * len(pieces) for capacity, pieces in self._kept.copy().items())
        return kept + sum(_capacity_of(memory) for memory, _ in self._lent.copy().values())

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
        # Every view of it, and every view of a view, refers to this one object: NumPy shortens
        # the chain no further, since what this is a view of is no array.
        lease = np.frombuffer(memory.data, np.uint8)
        number = id(memory)
        returned = functools.partial(_give_back, weakref.ref(self), number)
        self._lent[number] = memory, weakref.ref(lease, returned)
        return np.ndarray(lengths, element, lease, offset=-lease.ctypes.data % _LINE)

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
        self._kept.clear()

    def _take(self, size: int) -> Array:
        capacity = _capacity(size)
        larger = capacity
        for _ in range(_LARGER_TRIED + 1):
            try:
                # The latest: the likeliest to be in the caches still.
                return self._kept[larger].pop()
            except (KeyError, IndexError):
                larger = _capacity(larger + 1)
        return np.empty(capacity + _LINE, np.uint8)


def _capacity(size: int) -> int:
    """Return the smallest capacity of at least `size`."""
    step = (1 << (size - 1).bit_length()) // (2 * _STEPS)
    return -(-size // step) * step


def _capacity_of(memory: Array) -> int:
    return memory.size - _LINE


def _give_back(where: Any, number: int, _gone: Any) -> None:
    """Keep the memory whose last array is gone, unless the workspace itself is."""
    workspace = where()
    if workspace is not None:
        memory, _ = workspace._lent.pop(number)
        workspace._kept.setdefault(_capacity_of(memory), deque()).append(memory)
