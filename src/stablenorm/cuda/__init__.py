"""
The backend "cuda": layer norm on a CUDA device, one launch forward and one backward.

`layer_norm.cu` does the work, `plan` says how it is compiled and launched; here arguments become
addresses. Everything happens on the device of x and its current stream, without waiting for it.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stablenorm.arrays import Arrays
from stablenorm.call import Backward, Forward
from stablenorm.cuda import arrays, driver
from stablenorm.cuda.compile import first_line
from stablenorm.cuda.driver import check_usable
from stablenorm.cuda.plan import PARAMETERS, Kernel, choose_kernel, cut
from stablenorm.types import Statistics

__all__ = ["check_usable"]

# The driver refuses a launch whose blocks wait for one another if they would not all fit, whatever it
# said before: another process, or a share of the device, may have taken multiprocessors away.
_TOO_MANY = "COOPERATIVE_LAUNCH_TOO_LARGE"

# The names of the runtime and of the driver for it.
_NO_MEMORY = ("MemoryAllocation", "OUT_OF_MEMORY")


@functools.lru_cache(1024)
def find_plan(
    device: int, n: int, aligned: bool, x: Any, dy: Any, gamma: Any, beta: Any
) -> tuple[Kernel, Any, int]:
    """Return a kernel, given n and dtypes; its loaded function; and how many blocks of it the device holds at once."""
    facts = driver.read_facts(device)
    kernel = choose_kernel(n, x, dy, gamma, beta, facts.shared, aligned)
    function, fitting = driver.load(device, kernel)
    return kernel, function, fitting * facts.multiprocessors


def forward(call: Forward) -> Statistics:
    """Do what `reference.forward` does."""
    (x, axes), (gamma, beta, eps, *_), (y, _) = call[:3]
    with _on_device(x=x, gamma=gamma, beta=beta, out=y) as (cupy, device):
        n, pairs = _length(x, axes), x.dtype.itemsize == 8
        rows = x.size // n
        # Pairs keep five words and an exponent of each row; no kernel keeps a spread.
        words = cupy.empty((5 if pairs else 3, rows), np.float64)
        kept = Statistics(*words)
        if pairs:
            kept = kept._replace(exponent=cupy.empty((rows, 2), np.int16))
        if rows:
            inputs, outputs = (x, None, gamma, beta), (y, None, None)
            _launch(cupy, device, axes, n, inputs, outputs, kept, eps)
        return kept


def backward(call: Backward) -> None:
    """Do what `reference.backward` does."""
    (dy, _), (x, axes), norm, kept, dx, dgamma, dbeta = call[:7]
    dx = dx and dx[0]
    outs = {"out.dx": dx, "out.dgamma": dgamma, "out.dbeta": dbeta}
    with _on_device(x=x, dy=dy, gamma=norm.gamma, **outs) as (cupy, device):
        if x.size:
            inputs, outputs = (x, dy, norm.gamma, None), (dx, dgamma, dbeta)
            _launch(cupy, device, axes, _length(x, axes), inputs, outputs, kept, 0.0)
            return
        for total in (dgamma, dbeta):
            if total is not None:
                total[...] = 0


def _launch(
    cupy: Any, device: int, axes: tuple[int, ...], n: int, inputs: tuple[Any, ...],
    outputs: tuple[Any, ...], kept: Statistics, eps: float,
) -> None:  # fmt: skip
    """Launch a forward or, if there is a dy, a backward: from x, dy, gamma, beta to y or dx, dgamma, dbeta."""
    x, dy, gamma, beta = inputs
    rows = x.size // n
    read = [arrays.as_rows(cupy, each, axes, n, True) for each in inputs]
    written = [arrays.as_rows(cupy, each, axes, n, False) for each in outputs]
    matrices = read[0], read[1], written[0]
    strides = [0 if each is None else arrays.stride_of(each, n) for each in matrices]
    # Copies of 16 bytes need rows that begin at multiples of so many.
    begins = 0
    for number in (*_places(matrices), *[stride * x.itemsize for stride in strides]):
        begins |= number
    aligned = begins % 16 == 0
    # The backward has no beta: the dtype is that of dbeta.
    typed = x, dy, gamma, beta if dy is None else outputs[2]
    dtypes = [None if each is None else each.dtype for each in typed]
    kernel, function, resident = find_plan(device, n, aligned, *dtypes)
    chunks, chunk_rows = cut(rows, kernel)
    room: tuple[Any, ...] = (None, None)
    has_sums = outputs[1] is not None or outputs[2] is not None
    if has_sums:
        room = driver.room(cupy, device, 2 * n * chunks * kernel.number_bytes)
    places = _places((*read, *written, *kept[:5], kept.exponent, *room))
    values = *places, rows, n, *strides, chunk_rows, chunks, eps
    parameters = np.array([values], PARAMETERS)
    grid = min(chunks, resident)
    while True:
        try:
            # With sums over rows, blocks wait for one another.
            driver.launch(function, kernel, grid, parameters, has_sums)
            break
        except RuntimeError as error:
            if _TOO_MANY not in str(error) or grid == 1:
                raise
            # Refused before anything ran. Fewer blocks give the same bits.
            grid //= 2
    for array, seen in zip(outputs, written, strict=True):
        arrays.put_back(cupy, array, axes, seen)


def _length(x: Any, axes: tuple[int, ...]) -> int:
    shape = x.shape
    # The usual axis takes a third of the time.
    return shape[axes[0]] if len(axes) == 1 else math.prod(shape[axis] for axis in axes)


def _places(given: Iterable[Any]) -> list[int]:
    """Return the addresses of arrays; 0 for None."""
    return [0 if array is None else array.data.ptr for array in given]


@contextlib.contextmanager
def _on_device(**places: Any) -> Iterator[tuple[Any, int]]:
    """Make the one device of all arrays current, lend CuPy; if its memory is not enough, say the cure."""
    device = places["x"].device
    number = int(device.id)
    for name, array in places.items():
        if array is not None and array.device.id != number:
            msg = (
                f"{name} must be on device {number}, like x, got device {array.device.id}; "
                f"copy it there: with cupy.cuda.Device({number}): {name} = cupy.array({name})"
            )
            raise ValueError(msg)
    try:
        with device:
            yield driver.import_cupy(), number
    except (RuntimeError, MemoryError) as error:
        line = first_line(error)
        if not isinstance(error, MemoryError) and not any(word in line for word in _NO_MEMORY):
            raise
        msg = (
            f"too little memory on CUDA device {number} ({line}); let go of arrays and call "
            "cupy.get_default_memory_pool().free_all_blocks(), or pass fewer rows at a time"
        )
        raise MemoryError(msg) from error


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
    with _on_device(x=like) as (cupy, _):
        return cupy.empty(shape, dtype)


# How the public functions handle these arrays; those of the shape of x are handed over with their axes.
ARRAYS = Arrays(
    arrays.convert, arrays.target, _empty, arrays.overlap, arrays.same_elements,
    lambda array, axes: (array, axes),
)  # fmt: skip
