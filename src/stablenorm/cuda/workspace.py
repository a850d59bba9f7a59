"""
The memory that a launch needs beside its arguments: partial sums, and the counters of its barrier.

The counters (zero at first, left fit for the next launch by each) belong to one stream, on which
launches follow one another: shared between two, they would let a barrier open too early. So they
are kept per device and stream, and made anew after any error. Partial sums come from CuPy's pool,
which orders reuse by stream, or, for a CUDA graph, from a `CudaWorkspace` that outlives it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple, Self

import numpy as np

from stablenorm.cuda.errors import no_workspace, small_workspace
from stablenorm.cuda.plan import COUNTERS

# Streams whose counters are kept: more than a program has at once. The stream is kept with them,
# so that no other can be given its address while they are.
_STREAMS = 64

# The stream that is another one in each thread: cudaStreamPerThread.
_PER_THREAD = 2

_Key = tuple[int, int, int]
_kept: OrderedDict[_Key, tuple[Any, Any]] = OrderedDict()
_lock = threading.Lock()
_entered = threading.local()


class Room(NamedTuple):
    """Addresses of the partial sums and of the counters, and what holds them."""

    partials: int
    counters: int
    held: tuple[Any, ...]


class CudaWorkspace:
    """
    Memory for the partial sums of the backward, owned by the caller.

    Needed to capture a CUDA graph, which goes on writing to the memory that it was captured with:
    memory of CuPy's pool would be someone else's by then. Inside ``with work:``, all calls of
    this thread use it; it grows in a call that is not captured.

    Attributes
    ----------
    nbytes : int
        Bytes held on the device.

    Notes
    -----
    It must live as long as every graph captured with it, and belongs to one device. Calls and
    graphs that share one must not run at the same time on two streams: give each its own.

    Examples
    --------
    >>> from stablenorm.cuda import CudaWorkspace
    >>> work = CudaWorkspace()
    >>> work.nbytes
    0
    """

    def __init__(self) -> None:
        # All memory it ever had: a graph captured with an earlier piece writes there still.
        self._pieces: list[Any] = []
        self._counters: Any = None
        self._spoiled = False
        self._before: list[CudaWorkspace | None] = []

    def __repr__(self) -> str:
        """Return how much this workspace holds."""
        return f"<CudaWorkspace of {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Tell how many bytes are held on the device."""
        counters = 0 if self._counters is None else int(self._counters.nbytes)
        return counters + sum(int(piece.nbytes) for piece in self._pieces)

    def __enter__(self) -> Self:
        """Let the calls of this thread use it."""
        self._before.append(getattr(_entered, "work", None))
        _entered.work = self
        return self

    def __exit__(self, *_: object) -> None:
        """Let them use what they used before."""
        _entered.work = self._before.pop()

    def _room(self, cupy: Any, device: int, nbytes: int, capturing: bool) -> Room:
        if self._pieces and self._counters.device.id != device:
            msg = (
                f"a CudaWorkspace must stay on one device: it is on {self._counters.device.id}, "
                f"x is on {device}; make one for each"
            )
            raise ValueError(msg)
        held = int(self._pieces[-1].nbytes) if self._pieces else 0
        if nbytes > held:
            if capturing:
                raise small_workspace(nbytes, held)
            self._pieces.append(cupy.empty(nbytes, np.uint8))
            if self._counters is None:
                self._counters = cupy.zeros(COUNTERS, np.uint32)
                # Zero before any stream uses them: a graph is replayed on one of its own.
                cupy.cuda.get_current_stream().synchronize()
        if self._spoiled and not capturing:
            self._counters[...] = 0
            self._spoiled = False
        piece = self._pieces[-1]
        return Room(piece.data.ptr, self._counters.data.ptr, (piece, self._counters))

    def _forget(self) -> None:
        """Zero the counters before the next use; their memory stays, graphs refer to it."""
        self._spoiled = True


def room(cupy: Any, device: int, nbytes: int, capturing: bool) -> Room:
    """Return room for `nbytes` of partial sums, and counters, for a launch on the current stream."""
    work: CudaWorkspace | None = getattr(_entered, "work", None)
    if work is not None:
        return work._room(cupy, device, nbytes, capturing)
    if capturing:
        raise no_workspace()
    partials, counters = cupy.empty(nbytes, np.uint8), _counters(cupy, device)
    return Room(partials.data.ptr, counters.data.ptr, (partials, counters))


def forget(device: int) -> None:
    """Drop all counters of a device: after an error nobody knows what they hold."""
    with _lock:
        for key in [key for key in _kept if key[0] == device]:
            del _kept[key]
    work: CudaWorkspace | None = getattr(_entered, "work", None)
    if work is not None:
        work._forget()


def _counters(cupy: Any, device: int) -> Any:
    stream = cupy.cuda.get_current_stream()
    thread = threading.get_ident() if stream.ptr == _PER_THREAD else 0
    key = device, int(stream.ptr), thread
    with _lock:
        found = _kept.get(key)
        if found is None:
            # Zeroed on this stream, and so before the launch that follows on it.
            found = _kept[key] = cupy.zeros(COUNTERS, np.uint32), stream
            if len(_kept) > _STREAMS:
                _kept.popitem(last=False)
        else:
            _kept.move_to_end(key)
        return found[0]
