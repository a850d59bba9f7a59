"""
The backend "cuda": layer norm on a CUDA device, one launch forward and one backward.

`layer_norm.cu` does the work, `plan` says how it is compiled and launched; here arguments become
addresses. Everything happens on the device of x and its current stream, without waiting for it.
"""

import functools
from typing import Any

import numpy as np

from stablenorm.arrays import Arrays
from stablenorm.call import Backward, Forward
from stablenorm.cuda import arrays, driver
from stablenorm.cuda.arrays import Folded, Matrix, matrix
from stablenorm.cuda.compile import first_line
from stablenorm.cuda.driver import check_usable
from stablenorm.cuda.plan import Kernel, choose_kernel, cut, pack_parameters
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
) -> tuple[Kernel, Any, int, bool]:
    """
    Return a kernel for rows of `n`, given the dtypes of the arrays; and its loaded function.

    After them come the blocks of it that the device holds at once, and whether it can promise to run all of them
    at once.
    """
    facts = driver.read_facts(device)
    kernel = choose_kernel(n, x, dy, gamma, beta, facts.shared, aligned)
    function, fitting = driver.load(device, kernel)
    return kernel, function, fitting * facts.multiprocessors, facts.cooperative


def forward(call: Forward) -> Statistics:
    """Do what `reference.forward` does."""
    x, (gamma, beta, eps, *_), y = call[:3]
    with _OnDevice(x=x.array, gamma=gamma, beta=beta, out=y.array) as (cupy, device):
        shape, pairs = x.shape, x.array.dtype.itemsize == 8
        # Pairs keep five words and an exponent of each row; no kernel keeps a spread.
        words = cupy.empty((5 if pairs else 3, shape[0]), np.float64)
        kept = Statistics(words[0], words[1], words[2])
        if pairs:
            exponent = cupy.empty((shape[0], 2), np.int16)
            kept = Statistics(*kept[:3], words[3], words[4], exponent=exponent)
        if shape[0]:
            _launch(cupy, device, shape, x, None, gamma, beta, y, None, None, kept, eps)
        return kept


def backward(call: Backward) -> None:
    """Do what `reference.backward` does."""
    dy, x, norm, kept, dx, dgamma, dbeta = call[:7]
    outs = {"out.dx": dx and dx.array, "out.dgamma": dgamma, "out.dbeta": dbeta}
    with _OnDevice(x=x.array, dy=dy.array, gamma=norm.gamma, **outs) as (cupy, device):
        totals = [each for each in (dgamma, dbeta) if each is not None]
        if x.array.size == 0:
            for total in totals:
                total[...] = 0
        elif dx is not None or totals:
            _launch(cupy, device, x.shape, x, dy, norm.gamma, None, dx, dgamma, dbeta, kept, 0.0)


def _launch(
    cupy: Any, device: int, shape: tuple[int, int], x: Folded, dy: Folded | None, gamma: Any,
    beta: Any, out: Folded | None, dgamma: Any, dbeta: Any, kept: Statistics, eps: float,
) -> None:  # fmt: skip
    """Launch a forward or, with `dy`, a backward."""
    rows, n = shape
    source, cotangent = matrix(cupy, x, shape, True), matrix(cupy, dy, shape, True)
    scale, shift = _row(cupy, gamma, n, True), _row(cupy, beta, n, True)
    target = matrix(cupy, out, shape, False)
    totals = _row(cupy, dgamma, n, False), _row(cupy, dbeta, n, False)
    aligned = _aligned(x.array.dtype.itemsize, source, cotangent, target)
    # The backward has no beta: the dtype is that of dbeta.
    dtypes = x.array.dtype, dy and dy.array.dtype, _dtype(gamma), _dtype(dbeta if dy else beta)
    kernel, function, resident, cooperative = find_plan(device, n, aligned, *dtypes)
    number, size = cut(rows, kernel) if dy else (-(-rows // kernel.slots), 0)
    room, barrier = (None, None), False
    if dgamma is not None or dbeta is not None:
        # Blocks wait for one another only where all are promised to run at once.
        barrier = cooperative
        room = driver.room(cupy, device, 2 * n * number * kernel.number_bytes)
    values = (
        source.pointer, cotangent.pointer, scale.pointer, shift.pointer, target.pointer,
        totals[0].pointer, totals[1].pointer, *_places(*kept[:5], kept.exponent, *room), rows, n,
        source.stride, cotangent.stride, target.stride, size, number, eps,
    )  # fmt: skip
    grid = min(number, resident)
    try:
        driver.launch(function, kernel, grid, pack_parameters(*values, barrier), barrier)
    except RuntimeError as error:
        if not barrier or _TOO_MANY not in str(error):
            raise
        # Refused before anything ran. The last block gives the same bits and needs no company.
        driver.launch(function, kernel, grid, pack_parameters(*values, 0), False)
    for each in (target, *totals):
        each.put_back()


class _OnDevice:
    """Make the one device of all arrays current; if its memory is not enough, say the cure."""

    def __init__(self, **places: Any) -> None:
        self._device = places["x"].device
        self._number = int(self._device.id)
        for name, array in places.items():
            if array is not None and array.device.id != self._number:
                msg = (
                    f"{name} must be on device {self._number}, like x, got device {array.device.id}; "
                    f"copy it there: with cupy.cuda.Device({self._number}): {name} = cupy.array({name})"
                )
                raise ValueError(msg)

    def __enter__(self) -> tuple[Any, int]:
        self._device.__enter__()
        return driver.import_cupy(), self._number

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._device.__exit__(kind, error, trace)
        if not isinstance(error, (RuntimeError, MemoryError)):
            return
        line = first_line(error)
        if isinstance(error, MemoryError) or any(word in line for word in _NO_MEMORY):
            msg = (
                f"too little memory on CUDA device {self._number} ({line}); let go of arrays and call "
                "cupy.get_default_memory_pool().free_all_blocks(), or pass fewer rows at a time"
            )
            raise MemoryError(msg) from error


# ---- arguments as parameters of a kernel ----


def _row(cupy: Any, array: Any, n: int, read: bool) -> Matrix:
    """Return gamma, beta or a sum over rows as one row."""
    if array is None:
        return arrays.NOWHERE
    if array.flags.c_contiguous:
        return Matrix(array.data.ptr, n)
    return matrix(cupy, Folded(array), (1, n), read)


def _aligned(itemsize: int, *rows: Matrix) -> bool:
    """Tell whether all rows begin at multiples of 16 bytes, as copies of so many need it."""
    bits = 0
    for pointer, stride, _, _ in rows:
        bits |= pointer | stride * itemsize
    return bits % 16 == 0


def _dtype(array: Any) -> Any:
    return None if array is None else array.dtype


def _places(*given: Any) -> list[int]:
    """Return the addresses of arrays; 0 for None."""
    return [0 if array is None else array.data.ptr for array in given]


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
    with _OnDevice(x=like) as (cupy, _):
        return cupy.empty(shape, dtype)


# How the public functions handle these arrays.
ARRAYS = Arrays(arrays.convert, arrays.target, _empty, arrays.overlap, arrays.same_elements, Folded)
