"""
The backend "cuda": layer norm on a CUDA device, one launch forward and one backward.

`layer_norm.cu` does the work, `plan` says how it is compiled and launched; here arguments become
addresses. Everything happens on the device of x and its current stream, without waiting for it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from stablenorm.arrays import Arrays
from stablenorm.cuda import arrays, workspace
from stablenorm.cuda.arrays import Matrix
from stablenorm.cuda.driver import Driver, check_device, count_resident, make_driver
from stablenorm.cuda.errors import cupy_missing, explained, is_cuda, needs_copy, other_devices
from stablenorm.cuda.plan import DTYPE_CODES, Chunks, Kernel, choose_kernel, cut, pack_parameters
from stablenorm.cuda.workspace import CudaWorkspace
from stablenorm.types import Array, Gradients, Statistics, any_float64

__all__ = ["CudaWorkspace"]

# What the driver says when blocks that wait for one another would not all fit, whatever was
# computed before: another process, or a share of the device, may take multiprocessors away.
_TOO_MANY = "COOPERATIVE_LAUNCH_TOO_LARGE"

_choose_kernel = functools.lru_cache(1024)(choose_kernel)


def check_usable() -> None:
    """Raise ImportError or RuntimeError unless there are CuPy and a device."""
    check_device(_cupy())


def forward(x: Any, gamma: Array | None, beta: Array | None, eps: float, y: Any) -> Statistics:
    """Do what `reference.forward` does."""
    device = _one_device({"x": x.array, "gamma": gamma, "beta": beta, "out": y.array})
    return _on(device, _forward, x, gamma, beta, eps, y)


def backward(dy: Any, x: Any, gamma: Array | None, statistics: Statistics, out: Gradients) -> None:
    """Do what `reference.backward` does."""
    # What `ARRAYS.rows` made of an array; `Gradients` knows only arrays.
    dx: Any = out.dx
    places = {"x": x.array, "dy": dy.array, "gamma": gamma}
    targets = {"dx": None if dx is None else dx.array, "dgamma": out.dgamma, "dbeta": out.dbeta}
    device = _one_device({**places, **{f"out.{name}": value for name, value in targets.items()}})
    _on(device, _backward, dy, x, gamma, statistics, dx, (out.dgamma, out.dbeta))


def _forward(
    cupy: Any, device: int, x: Any, gamma: Any, beta: Any, eps: float, y: Any
) -> Statistics:
    rows, n = x.shape
    pairs = any_float64(x, gamma, beta)
    statistics = _new_statistics(cupy, rows, pairs)
    if rows == 0:
        return statistics
    source, target = _place(cupy, "x", x, read=True), _place(cupy, "out", y, read=False)
    values = {
        **_addresses(statistics),
        **_parameter("gamma", _flat(cupy, "gamma", gamma)),
        **_parameter("beta", _flat(cupy, "beta", beta)),
        **_matrix("x", source),
        **_matrix("out", target),
    }
    kernel = _choose_kernel(True, n, x.dtype, x.dtype, pairs)
    work = -(-rows // kernel.slots)
    _launch(cupy, device, kernel, work, None, rows=rows, n=n, eps=eps, **values)
    if target.copied:
        arrays.scatter(cupy, target.array, y)
    return statistics


def _backward(
    cupy: Any,
    device: int,
    dy: Any,
    x: Any,
    gamma: Any,
    statistics: Statistics,
    dx: Any,
    totals: tuple[Any, Any],
) -> None:
    (rows, n), wanted = x.shape, [total for total in totals if total is not None]
    if rows == 0:
        for total in wanted:
            total[...] = 0
        return
    if dx is None and not wanted:
        return
    pairs = any_float64(x, dy, gamma, *wanted) or statistics.rstd_lo is not None
    sources = _place(cupy, "x", x, read=True), _place(cupy, "dy", dy, read=True)
    scale = _flat(cupy, "gamma", gamma)
    target = None if dx is None else _place(cupy, "out.dx", dx, read=False)
    # A strided dgamma or dbeta is written to memory of its own first.
    made = [
        total if total is None or total.flags.c_contiguous else cupy.empty(n, total.dtype)
        for total in totals
    ]
    kernel = _choose_kernel(False, n, x.dtype, dy.dtype, pairs)
    chunks = cut(rows, kernel.slots)
    values = {
        **_addresses(statistics),
        **_matrix("x", sources[0]),
        **_matrix("dy", sources[1]),
        **_matrix("out", target),
        **_parameter("gamma", scale),
        "dgamma": _pointer(made[0]),
        "dbeta": _pointer(made[1]),
        # beta itself is no argument of the backward: its type says how to write dbeta.
        "beta_type": DTYPE_CODES[(x if made[1] is None else made[1]).dtype],
    }
    summed = chunks if wanted else None
    sizes = {"rows": rows, "n": n, "chunks": chunks.number, "chunk_rows": chunks.rows}
    _launch(cupy, device, kernel, chunks.number, summed, **sizes, **values)
    if target is not None and target.copied:
        arrays.scatter(cupy, target.array, dx)
    for total, held in zip(totals, made, strict=True):
        if held is not total:
            total[...] = held.reshape(total.shape)


def _launch(
    cupy: Any, device: int, kernel: Kernel, work: int, summed: Chunks | None, **values: Any
) -> None:
    """Launch once, at most a block for each piece of `work`, with memory for what is `summed`."""
    driver = _driver()
    facts = driver.facts(device)
    function = driver.load(kernel, facts)
    grid = min(work, count_resident(driver, facts, function, kernel))
    barrier = False
    if summed is not None:
        nbytes = 2 * values["n"] * summed.number * kernel.number_bytes
        room = workspace.room(cupy, device, nbytes, _capturing(cupy))
        values.update(partials=room.partials, counters=room.counters)
        # Blocks wait for one another only where all are promised to run at once.
        barrier = facts.cooperative
    try:
        driver.launch(function, kernel, grid, pack_parameters(barrier=barrier, **values), barrier)
    except RuntimeError as error:
        if not barrier or _TOO_MANY not in str(error):
            raise
        # Refused before anything ran. The last block gives the same bits and needs no company.
        driver.launch(function, kernel, grid, pack_parameters(**values), False)


def _on(device: int, function: Any, *arguments: Any) -> Any:
    """Call `function` with `device` current; make CUDA's errors say their cure."""
    cupy = _cupy()
    try:
        with cupy.cuda.Device(device):
            return function(cupy, device, *arguments)
    except (RuntimeError, MemoryError) as error:
        if is_cuda(error):
            # Whatever ran last may have left the barrier half open.
            workspace.forget(device)
        reason = explained(error, device)
        if reason is error:
            raise
        raise reason from error


def _one_device(places: dict[str, Any]) -> int:
    device = places["x"].device.id
    for name, array in places.items():
        if array is not None and array.device.id != device:
            raise other_devices(name, array.device.id, device)
    return int(device)


def _new_statistics(cupy: Any, rows: int, pairs: bool) -> Statistics:
    numbers = cupy.empty((5 if pairs else 3, rows), np.float64)
    words = Statistics(numbers[0], numbers[1], numbers[2])
    if not pairs:
        return words
    exponent = cupy.empty((rows, 2), np.int16)
    return words._replace(rstd_lo=numbers[3], mean_tail=numbers[4], exponent=exponent)


# ---- arguments as parameters of a kernel ----


def _addresses(statistics: Statistics) -> dict[str, int]:
    # Words that these have not stay null: the kernels take them for zero.
    return {name: _pointer(part) for name, part in statistics._asdict().items()}


def _matrix(name: str, matrix: Matrix | None) -> dict[str, int]:
    if matrix is None:
        return {}
    return {name: matrix.pointer, f"{name}_stride": matrix.stride}


def _parameter(name: str, array: Any) -> dict[str, int]:
    if array is None:
        return {}
    return {name: _pointer(array), f"{name}_type": DTYPE_CODES[array.dtype]}


def _pointer(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def _place(cupy: Any, name: str, folded: Any, *, read: bool) -> Matrix:
    """Return contiguous rows: those of the array, or a copy, of its elements if it is `read`."""
    found = arrays.view(folded)
    if found is not None:
        return found
    if _capturing(cupy):
        raise needs_copy(name)
    rows = arrays.gathered(cupy, folded) if read else cupy.empty(folded.shape, folded.dtype)
    return Matrix(rows, rows.data.ptr, rows.shape[1], True)


def _flat(cupy: Any, name: str, array: Any) -> Any:
    if array is None or array.flags.c_contiguous:
        return array
    if _capturing(cupy):
        raise needs_copy(name)
    return cupy.ascontiguousarray(array)


def _capturing(cupy: Any) -> bool:
    return bool(cupy.cuda.get_current_stream().is_capturing())


# ---- CuPy ----


def _cupy() -> Any:
    try:
        import cupy  # noqa: PLC0415  # only where there is CUDA
    except Exception as error:
        # ImportError, or what CuPy raises where a library of CUDA's is missing.
        raise cupy_missing(error) from error
    return cupy


@functools.cache
def _driver() -> Driver:
    return make_driver(_cupy())


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
    cupy = _cupy()
    with cupy.cuda.Device(like.device.id):
        try:
            return cupy.empty(shape, dtype)
        except MemoryError as error:
            raise explained(error, like.device.id) from error


# What the public functions do with these arrays.
ARRAYS = Arrays(
    lambda name, value: arrays.convert(_cupy(), name, value),
    lambda name, array, shape, dtype: arrays.target(_cupy(), name, array, shape, dtype),
    _empty,
    arrays.overlap,
    arrays.same_elements,
    arrays.Folded,
)
