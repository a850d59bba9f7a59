"""
The backend "cuda": layer norm on a CUDA device, one launch forward and one backward.

`layer_norm.cu` does the work, `plan` says how it is compiled and launched; here arguments become
addresses. Everything happens on the device of x and its current stream, without waiting for it.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import Arrays
from stablenorm.call import Backward, Forward
from stablenorm.cuda import arrays, driver
from stablenorm.cuda.arrays import Matrix
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

# Copies of 16 bytes need addresses that are multiples of it.
_VECTOR_BYTES = 16

_NOWHERE = Matrix(0, 0)


class Plan(NamedTuple):
    """A kernel, loaded, and the blocks of it that the device holds at once."""

    kernel: Kernel
    function: Any
    resident: int
    # Whether all blocks of a launch can be promised to run at once.
    cooperative: bool


@functools.lru_cache(1024)
def find_plan(device: int, n: int, aligned: bool, x: Any, dy: Any, gamma: Any, beta: Any) -> Plan:
    """Return the plan for rows of `n`, given the dtypes of the arrays."""
    facts = driver.read_facts(device)
    kernel = choose_kernel(n, x, dy, gamma, beta, facts.shared, aligned)
    function = driver.load(device, kernel)
    return Plan(kernel, function, driver.count_resident(device, kernel), facts.cooperative)


def forward(call: Forward) -> Statistics:
    """Do what `reference.forward` does."""
    x, (gamma, beta, eps, *_), y = call[:3]
    with _OnDevice(x=x.array, gamma=gamma, beta=beta, out=y.array) as (cupy, device):
        rows, n = x.shape
        kept = _new_statistics(cupy, rows, x.dtype.itemsize == 8)
        if rows:
            source, target = arrays.matrix(cupy, x, True), arrays.matrix(cupy, y, False)
            scale, shift = arrays.flat(cupy, gamma), arrays.flat(cupy, beta)
            aligned = _aligned(x.dtype.itemsize, source, target)
            plan = find_plan(device, n, aligned, x.dtype, None, _dtype(gamma), _dtype(beta))
            values = (
                source.pointer, 0, _place(scale), _place(shift), target.pointer, 0, 0,
                *_words(kept), 0, 0, rows, n, source.stride, 0, target.stride, 0, 0, eps,
            )  # fmt: skip
            _launch(plan, -(-rows // plan.kernel.slots), values)
            arrays.put_back(cupy, target, y)
        return kept


def backward(call: Backward) -> None:
    """Do what `reference.backward` does."""
    dy, x, norm, kept, dx, *totals = call[:7]
    gamma, outs = norm.gamma, (getattr(dx, "array", None), *totals)
    named = dict(zip(("out.dx", "out.dgamma", "out.dbeta"), outs, strict=True))
    with _OnDevice(x=x.array, dy=dy.array, gamma=gamma, **named) as (cupy, device):
        rows, n = x.shape
        summing = any(total is not None for total in totals)
        if rows == 0:
            for total in filter(lambda total: total is not None, totals):
                total[...] = 0
        if rows == 0 or (dx is None and not summing):
            return
        target = _NOWHERE if dx is None else arrays.matrix(cupy, dx, False)
        source, cotangent = arrays.matrix(cupy, x, True), arrays.matrix(cupy, dy, True)
        scale = arrays.flat(cupy, gamma)
        # A strided dgamma or dbeta is written to memory of its own first.
        made = [
            t if t is None or t.flags.c_contiguous else driver.held(cupy, cupy.empty(n, t.dtype))
            for t in totals
        ]
        aligned = _aligned(x.dtype.itemsize, source, cotangent, target)
        # The backward has no beta: the dtype is that of dbeta.
        dtypes = x.dtype, dy.dtype, _dtype(gamma), _dtype(totals[1])
        plan = find_plan(device, n, aligned, *dtypes)
        chunks, room = cut(rows, plan.kernel), (None, None)
        if summing:
            room = driver.room(cupy, device, 2 * n * chunks.number * plan.kernel.number_bytes)
        values = (
            source.pointer, cotangent.pointer, _place(scale), 0,
            target.pointer, *map(_place, made), *_words(kept), *map(_place, room), rows, n,
            source.stride, cotangent.stride, target.stride, chunks.rows, chunks.number, 0.0,
        )  # fmt: skip
        # Blocks wait for one another only where all are promised to run at once.
        _launch(plan, chunks.number, values, summing and plan.cooperative)
        if dx is not None:
            arrays.put_back(cupy, target, dx)
        for total, sums in zip(totals, made, strict=True):
            if sums is not total:
                total[...] = sums.reshape(total.shape)


def _launch(plan: Plan, work: int, values: tuple[Any, ...], barrier: bool = False) -> None:
    """Launch once, at most a block for each piece of `work`."""
    kernel, function, resident, _ = plan
    grid = min(work, resident)
    try:
        driver.launch(function, kernel, grid, pack_parameters(*values, barrier), barrier)
    except RuntimeError as error:
        if not barrier or _TOO_MANY not in str(error):
            raise
        # Refused before anything ran. The last block gives the same bits and needs no company.
        driver.launch(function, kernel, grid, pack_parameters(*values, 0), False)


class _OnDevice:
    """Make the one device of all arrays current; if its memory is not enough, say the cure."""

    def __init__(self, **places: Any) -> None:
        self._device = places["x"].device
        for name, array in places.items():
            if array is not None and array.device.id != self._device.id:
                msg = (
                    f"{name} must be on device {self._device.id}, like x, got device {array.device.id}; "
                    f"copy it there: with cupy.cuda.Device({self._device.id}): {name} = cupy.array({name})"
                )
                raise ValueError(msg)

    def __enter__(self) -> tuple[Any, int]:
        self._device.__enter__()
        return driver.import_cupy(), int(self._device.id)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._device.__exit__(kind, error, trace)
        if not isinstance(error, (RuntimeError, MemoryError)):
            return
        line = first_line(error)
        if isinstance(error, MemoryError) or any(word in line for word in _NO_MEMORY):
            msg = (
                f"too little memory on CUDA device {self._device.id} ({line}); let go of arrays and call "
                "cupy.get_default_memory_pool().free_all_blocks(), or pass fewer rows at a time"
            )
            raise MemoryError(msg) from error


def _new_statistics(cupy: Any, rows: int, pairs: bool) -> Statistics:
    numbers = cupy.empty((5 if pairs else 3, rows), np.float64)
    if not pairs:
        return Statistics(numbers[0], numbers[1], numbers[2])
    exponent = cupy.empty((rows, 2), np.int16)
    mean, mean_lo, rstd, rstd_lo, tail = (numbers[i] for i in range(5))
    return Statistics(mean, mean_lo, rstd, rstd_lo, tail, None, exponent)


# ---- arguments as parameters of a kernel ----


def _aligned(itemsize: int, *rows: Matrix) -> bool:
    """Tell whether all rows begin at multiples of 16 bytes."""
    return all((each.pointer | each.stride * itemsize) % _VECTOR_BYTES == 0 for each in rows)


def _dtype(array: Any) -> Any:
    return None if array is None else array.dtype


def _place(array: Any) -> int:
    """Return the address of an array; 0 for None."""
    return 0 if array is None else array.data.ptr


def _words(kept: Statistics) -> tuple[int, ...]:
    """Return the addresses of the statistics, in the order of the parameters."""
    mean, mean_lo, rstd, rstd_lo, tail, _, exponent = kept
    return tuple(map(_place, (mean, mean_lo, rstd, rstd_lo, tail, exponent)))


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
    with _OnDevice(x=like) as (cupy, _):
        return cupy.empty(shape, dtype)


# How the public functions handle these arrays.
ARRAYS = Arrays(
    arrays.convert, arrays.target, _empty, arrays.overlap, arrays.same_elements, arrays.Folded
)
