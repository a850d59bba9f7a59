"""
`reference.forward` and `reference.backward` for arrays on a CUDA device, one launch each.

`layer_norm.cu` does the work, `plan` says how it is compiled and launched; here arguments
become addresses. Everything happens on the device of x and its current stream, without waiting
for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from stablenorm._arrays import Arrays
from stablenorm._types import Array, Gradients, Statistics
from stablenorm.cuda import arrays, workspace
from stablenorm.cuda.arrays import Folded, Matrix
from stablenorm.cuda.driver import Driver, check_device, fit, make_driver
from stablenorm.cuda.errors import (
    cupy_missing,
    explained,
    is_cuda,
    needs_copy,
    other_devices,
)
from stablenorm.cuda.plan import (
    DOUBLE,
    DOUBLE_PAIRS,
    DTYPE_CODES,
    GRID_BARRIER,
    TICKETS,
    Plan,
    arithmetic,
    final_mode,
    grid_blocks,
    pack_parameters,
    plan_backward,
    plan_forward,
)
from stablenorm.cuda.workspace import CudaWorkspace

__all__ = ["CudaWorkspace"]

# What the driver says when blocks that wait for one another would not all fit, whatever was
# computed before: another process, or a share of the device, may take multiprocessors away.
_TOO_MANY = "COOPERATIVE_LAUNCH_TOO_LARGE"

# And where blocks that share a row do not fit side by side, if it could not be asked before.
_NO_CLUSTER = "INVALID_CLUSTER_SIZE"

_plan_forward = functools.lru_cache(1024)(plan_forward)
_plan_backward = functools.lru_cache(1024)(plan_backward)


def check_usable() -> None:
    """Raise ImportError or RuntimeError unless there are CuPy and a device."""
    check_device(_cupy())


def forward(x: Any, gamma: Array | None, beta: Array | None, eps: float, y: Any) -> Statistics:
    """Do what `reference.forward` does."""
    device = _one_device({"x": x.array, "gamma": gamma, "beta": beta, "out": y.array})
    return _on(device, _forward, x, gamma, beta, eps, y)


def backward(dy: Any, x: Any, gamma: Array | None, statistics: Statistics, out: Gradients) -> None:
    """Do what `reference.backward` does."""
    folded = _folded(out.dx)
    places = {"x": x.array, "dy": dy.array, "gamma": gamma}
    dx = None if folded is None else folded.array
    targets = {"dx": dx, "dgamma": out.dgamma, "dbeta": out.dbeta}
    device = _one_device({**places, **{f"out.{name}": value for name, value in targets.items()}})
    _on(device, _backward, dy, x, gamma, statistics, out)


def _forward(
    cupy: Any, device: int, x: Folded, gamma: Any, beta: Any, eps: float, y: Folded
) -> Statistics:
    rows, n = x.shape
    which = arithmetic(_driver().facts(device).capability, x, gamma, beta)
    statistics = _new_statistics(cupy, rows, which)
    if rows == 0:
        return statistics
    capturing = _capturing(cupy)
    source, target = _read(cupy, "x", x, capturing), _write(cupy, "out", y, capturing)
    scale, shift = _flat(cupy, "gamma", gamma, capturing), _flat(cupy, "beta", beta, capturing)
    _launch(
        cupy,
        device,
        functools.partial(_plan_forward, rows, n, x.dtype, which),
        (rows, n),
        capturing,
        **_addresses(statistics),
        **_vector(scale, "gamma"),
        **_vector(shift, "beta"),
        x=source.pointer,
        x_stride=source.stride,
        out=target.pointer,
        out_stride=target.stride,
        eps=eps,
    )
    if target.copied:
        arrays.scatter(cupy, target.array, y)
    return statistics


def _backward(
    cupy: Any,
    device: int,
    dy: Folded,
    x: Folded,
    gamma: Any,
    statistics: Statistics,
    out: Gradients,
) -> None:
    (rows, n), folded = x.shape, _folded(out.dx)
    if rows == 0:
        for total in out[1:]:
            if total is not None:
                total[...] = 0
        return
    if all(gradient is None for gradient in out):
        return
    capturing = _capturing(cupy)
    parts = (x, dy, gamma, *out[1:], statistics.rstd_lo)
    which = arithmetic(_driver().facts(device).capability, *parts)
    summing = out.dgamma is not None or out.dbeta is not None
    make_plan = functools.partial(
        _plan_backward, rows, n, x.dtype, dy.dtype, which, summing=summing
    )
    sources = _read(cupy, "x", x, capturing), _read(cupy, "dy", dy, capturing)
    scale = _flat(cupy, "gamma", gamma, capturing)
    target = None if folded is None else _write(cupy, "out.dx", folded, capturing)
    sums = [
        total if total is None or total.flags.c_contiguous else cupy.empty(n, total.dtype)
        for total in out[1:]
    ]
    # beta itself is no argument of the backward: its type says how to write dbeta.
    codes = {
        "gamma_type": DTYPE_CODES[(scale if scale is not None else x).dtype],
        "beta_type": DTYPE_CODES[(sums[1] if sums[1] is not None else x).dtype],
    }
    _launch(
        cupy,
        device,
        make_plan,
        (rows, n),
        capturing,
        **_addresses(statistics),
        **codes,
        x=sources[0].pointer,
        x_stride=sources[0].stride,
        dy=sources[1].pointer,
        dy_stride=sources[1].stride,
        gamma=_pointer(scale),
        out=0 if target is None else target.pointer,
        out_stride=0 if target is None else target.stride,
        dgamma=_pointer(sums[0]),
        dbeta=_pointer(sums[1]),
    )
    if folded is not None and target is not None and target.copied:
        arrays.scatter(cupy, target.array, folded)
    for total, made in zip(out[1:], sums, strict=True):
        if total is not None and made is not None and made is not total:
            total[...] = made.reshape(total.shape)


def _launch(
    cupy: Any,
    device: int,
    make_plan: Callable[..., Plan],
    shape: tuple[int, int],
    capturing: bool,
    cluster_limit: int | None = None,
    **values: Any,
) -> None:
    """Launch once: every block that waits for others is resident, or none waits."""
    driver = _driver()
    facts = driver.facts(device)
    plan, kernel, resident = fit(driver, facts, make_plan, cluster_limit)
    grid = grid_blocks(plan, shape[0], resident)
    mode = final_mode(plan, grid, resident if facts.cooperative else 0)
    room = workspace.room(cupy, device, plan.workspace_bytes, capturing)
    given = {**values, "partials": room.partials, "counters": room.counters}

    def launch(mode: int) -> None:
        parameters = pack_parameters(plan, *shape, **given, final_mode=mode)
        launched = plan.shared_bytes, parameters, mode == GRID_BARRIER
        driver.launch(kernel, grid, plan.block, *launched)

    try:
        launch(mode)
    except RuntimeError as error:
        # Refused before anything ran.
        if mode == GRID_BARRIER and _TOO_MANY in str(error):
            # Tickets give the same bits and need no company.
            launch(TICKETS)
        elif plan.cluster > 1 and _NO_CLUSTER in str(error):
            _launch(cupy, device, make_plan, shape, capturing, 1, **values)
        else:
            raise


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


def _folded(dx: Any) -> Folded | None:
    # What `ARRAYS.rows` made of an array; `Gradients` knows only arrays.
    return dx


def _one_device(places: dict[str, Any]) -> int:
    device = places["x"].device.id
    for name, array in places.items():
        if array is not None and array.device.id != device:
            raise other_devices(name, array.device.id, device)
    return int(device)


def _new_statistics(cupy: Any, rows: int, which: int) -> Statistics:
    numbers = cupy.empty((5 if which == DOUBLE_PAIRS else 3, rows), np.float64)
    words = Statistics(numbers[0], numbers[1], numbers[2])
    if which == DOUBLE_PAIRS:
        words = words._replace(rstd_lo=numbers[3], mean_tail=numbers[4])
    # The range of float64 itself is enough for narrower data.
    return words if which == DOUBLE else words._replace(exponent=cupy.empty((rows, 2), np.int16))


def _addresses(statistics: Statistics) -> dict[str, int]:
    # Words that these have not stay null: the kernels take them for zero.
    named: dict[str, Any] = statistics._asdict()
    return {name: part.data.ptr for name, part in named.items() if part is not None}


def _vector(array: Any, name: str) -> dict[str, int]:
    if array is None:
        return {}
    return {name: _pointer(array), f"{name}_type": DTYPE_CODES[array.dtype]}


def _pointer(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def _read(cupy: Any, name: str, folded: Folded, capturing: bool) -> Matrix:
    found = arrays.view(folded)
    if found is not None:
        return found
    if capturing:
        raise needs_copy(name)
    rows = arrays.gathered(cupy, folded)
    return Matrix(rows, rows.data.ptr, rows.shape[1], True)


def _write(cupy: Any, name: str, folded: Folded, capturing: bool) -> Matrix:
    found = arrays.view(folded)
    if found is not None:
        return found
    if capturing:
        raise needs_copy(name)
    rows = cupy.empty(folded.shape, folded.dtype)
    return Matrix(rows, rows.data.ptr, rows.shape[1], True)


def _flat(cupy: Any, name: str, array: Any, capturing: bool) -> Any:
    if array is None or array.flags.c_contiguous:
        return array
    if capturing:
        raise needs_copy(name)
    return cupy.ascontiguousarray(array)


def _capturing(cupy: Any) -> bool:
    return bool(cupy.cuda.get_current_stream().is_capturing())


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
    Folded,
)
