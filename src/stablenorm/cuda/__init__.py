"""
The backend "cuda": layer norm on a CUDA device, one launch forward and one backward.

`layer_norm.cu` does the work, `plan` says how it is compiled and launched; here arguments become
addresses. Everything happens on the device of x and its current stream, without waiting for it.
"""

import functools
from typing import Any

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.cuda import driver
from stablenorm.cuda.arrays import (
    contiguous,
    convert,
    empty_like,
    overlap,
    rows,
    same_elements,
    target,
)
from stablenorm.cuda.driver import check_usable
from stablenorm.cuda.plan import Kernel, choose_kernel, cut, pack
from stablenorm.records import Statistics

__all__ = [
    "check_usable", "contiguous", "convert", "empty_like", "overlap", "rows", "same_elements", "target",
]  # fmt: skip

# The driver refuses a launch whose blocks wait for one another if they would not all fit, whatever it
# said before: another process, or a share of the device, may have taken multiprocessors away.
_TOO_MANY = "COOPERATIVE_LAUNCH_TOO_LARGE"


@functools.lru_cache(1024)
def find_plan(
    device: int, rows: int, n: int, aligned: bool, forward: bool, x: Any, gamma: Any, beta: Any
) -> tuple[Kernel, Any, int, tuple[int, int], tuple[int, int]]:
    """Return all of a launch but addresses and strides; last the bytes of partial sums and of the counter."""
    facts = driver.read_facts(device)
    kernel = choose_kernel(n, forward, x, gamma, beta, facts.shared, aligned)
    function, fitting = driver.load(device, kernel)
    chunks, chunk_rows = cut(rows, kernel)
    # No more blocks than the device holds at once.
    grid = kernel.count_blocks(chunks, fitting * facts.multiprocessors)
    nbytes = 2 * n * chunks * kernel.number_bytes, kernel.counter_bytes(grid)
    return kernel, function, grid, (chunk_rows, chunks), nbytes


def forward(call: Forward) -> Statistics:
    """Do what `reference.forward` does."""
    x, y, norm = call.x, call.y, call.norm
    pairs = x.dtype.itemsize == 8
    cupy = driver.import_cupy()
    _check_device(x, gamma=norm.gamma, beta=norm.beta, out=y)
    with x.device:
        # Pairs keep five words and an exponent of each row; no kernel keeps a spread.
        words = [cupy.empty(len(x), np.float64) for _ in range(5 if pairs else 3)]
        exponent = cupy.empty((len(x), 2), np.int16) if pairs else None
        statistics = Statistics(*words)._replace(exponent=exponent)
        if len(x):
            _launch(x, None, norm.gamma, norm.beta, (y, None, None), statistics, norm.eps)
    return statistics


def backward(call: Backward) -> None:
    """Do what `reference.backward` does."""
    results = call.dx, call.dgamma, call.dbeta
    outs = dict(zip(("out.dx", "out.dgamma", "out.dbeta"), results, strict=True))
    _check_device(call.x, dy=call.dy, gamma=call.norm.gamma, **outs)
    with call.x.device:
        _launch(call.x, call.dy, call.norm.gamma, None, results, call.statistics, 0.0)


def _launch(
    x: Any, dy: Any, gamma: Any, beta: Any, results: tuple[Any, Any, Any],
    statistics: Statistics, eps: float,
) -> None:  # fmt: skip
    """Launch a forward or, if there is a dy, a backward; `results` are y or dx, dgamma and dbeta."""
    cupy = driver.import_cupy()
    out, dgamma, dbeta = results
    count, n = x.shape
    places = [0 if v is None else v.data.ptr for v in (x, dy, gamma, beta, *results)]
    strides = x_stride, dy_stride, out_stride = [
        0 if array is None else array.strides[0] // array.itemsize for array in (x, dy, out)
    ]
    # Copies of 16 bytes need rows that begin at multiples of so many.
    begins = places[0] | places[1] | places[4] | (x_stride | dy_stride | out_stride) * x.itemsize
    # The backward has no beta: the dtype is that of dbeta.
    typed = x, gamma, beta if dy is None else dbeta
    dtypes = [None if array is None else array.dtype for array in typed]
    device, aligned = x.device.id, begins % 16 == 0
    kernel, function, grid, chunks, nbytes = find_plan(
        device, count, n, aligned, dy is None, *dtypes
    )
    # Blocks that share a row, or add up what others have, wait for one another.
    has_sums = dgamma is not None or dbeta is not None
    meet = has_sums or kernel.parts > 1
    room = driver.room(cupy, device, nbytes[0] * has_sums, nbytes[1]) if meet else (None, None)
    others = (*statistics[:5], statistics.exponent, *room)
    places += [0 if array is None else array.data.ptr for array in others]
    parameters = pack(*places, count, n, *strides, *chunks, eps)
    while True:
        try:
            driver.launch(function, kernel, grid, parameters, meet)
            break
        except RuntimeError as error:
            if _TOO_MANY not in str(error) or grid == kernel.parts:
                raise
            # Refused before anything ran. Fewer blocks give the same bits.
            grid = kernel.count_blocks(grid, grid // 2)


def _check_device(x: Any, **others: Any) -> None:
    """Raise ValueError unless the other arrays are on the device of x."""
    device = x.device.id
    for name, array in others.items():
        if array is not None and array.device.id != device:
            msg = (
                f"{name} must be on device {device}, like x, got device {array.device.id}; "
                f"copy it there: with cupy.cuda.Device({device}): {name} = cupy.array({name})"
            )
            raise ValueError(msg)
