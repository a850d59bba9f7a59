"""
The memory that a backward needs beside its arguments: partial sums, and the counter of its blocks.

The counter (zero at first, left fit for the next launch by each) belongs to one stream, on which
launches follow one another: shared between two, it would let blocks go on too early. So one is kept
per device and stream. It outlives every error of a launch: one that is refused has not touched it, and
one that stops in the middle ends the device's context, for this process, and all memory in it. Partial
sums come from CuPy's pool, which orders reuse by stream, or, for a CUDA graph, from a `CudaWorkspace`
that outlives it.
"""

import functools
import threading
from typing import Any, Self

import numpy as np

from stablenorm.cuda.arrays import capturing
from stablenorm.cuda.driver import import_cupy

# Streams whose counters are kept: more than a program has at once. The stream is kept with them,
# so that no other can be given its address while they are.
_STREAMS = 64

# The stream that is another one in each thread: cudaStreamPerThread.
_PER_THREAD = 2

_entered = threading.local()


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
    """

    def __init__(self) -> None:
        # All memory it ever had, the counter first: a graph captured with an earlier piece writes
        # there still.
        self._pieces: list[Any] = []
        self._before: list[CudaWorkspace | None] = []

    @property
    def nbytes(self) -> int:
        """Tell how many bytes are held on the device."""
        return sum(int(piece.nbytes) for piece in self._pieces)

    def __enter__(self) -> Self:
        """Let the calls of this thread use it."""
        self._before.append(getattr(_entered, "work", None))
        _entered.work = self
        return self

    def __exit__(self, *_: object) -> None:
        """Let them use what they used before."""
        _entered.work = self._before.pop()

    def _room(self, cupy: Any, device: int, nbytes: int) -> dict[str, Any]:
        if self._pieces and self._pieces[0].device.id != device:
            msg = (
                f"a CudaWorkspace must stay on one device: it is on {self._pieces[0].device.id}, "
                f"x is on {device}; make one for each"
            )
            raise ValueError(msg)
        if nbytes > _largest(self):
            if not self._pieces:
                self._pieces.append(cupy.zeros(1, np.uint32))
                # Zero before any stream uses it: a graph is replayed on one of its own.
                cupy.cuda.get_current_stream().synchronize()
            self._pieces.append(cupy.empty(nbytes, np.uint8))
        return {"partials": self._pieces[-1], "counter": self._pieces[0]}


def _largest(work: CudaWorkspace | None) -> int:
    return int(work._pieces[-1].nbytes) if work is not None and work._pieces else 0


def room(cupy: Any, device: int, nbytes: int) -> dict[str, Any]:
    """Return arrays for `nbytes` of partial sums and for the counter of a launch."""
    work: CudaWorkspace | None = getattr(_entered, "work", None)
    held = _largest(work)
    if nbytes > held and capturing(cupy):
        msg = (
            f"while a CUDA graph is captured, the partial sums need {nbytes} bytes that outlive the "
            f"call, and {'there is no workspace' if work is None else f'the workspace has {held}'}: "
            "call once before capturing, inside `with work:` of a stablenorm.cuda.CudaWorkspace, "
            "and capture inside it too"
        )
        raise RuntimeError(msg)
    if work is not None:
        return work._room(cupy, device, nbytes)
    stream = int(cupy.cuda.get_current_stream().ptr)
    thread = threading.get_ident() if stream == _PER_THREAD else 0
    counter, _ = _counter(device, stream, thread)
    return {"partials": cupy.empty(nbytes, np.uint8), "counter": counter}


@functools.lru_cache(_STREAMS)
def _counter(*_: int) -> tuple[Any, Any]:
    """Return a counter for the current stream, given its device, address and thread; and the stream."""
    cupy = import_cupy()
    # Zeroed on this stream, and so before the launch that follows on it.
    return cupy.zeros(1, np.uint32), cupy.cuda.get_current_stream()
