"""Dask arrays as their blocks: what is checked of them, and how results are made of those."""

import itertools
import math
import threading
from collections.abc import Callable
from operator import getitem
from typing import Any

import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array import Array, blockwise, from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from stablenorm.arrays import HOST, is_lazy
from stablenorm.formats import check_dtype

# An array whose axes are some of those of x, and which; or two times None.
Operand = tuple[Any, Any]

# How many sums are merged at a time: enough that the tree is a small part of the tasks.
_FAN_IN = 8


def threads_of_task() -> int | None:
    """
    Return how many threads a call in a task may use: one, since the scheduler has threads of its own.

    In the main thread, whoever schedules runs one task at a time: as many as always.
    """
    return None if threading.current_thread() is threading.main_thread() else 1


def convert(name: str, value: Any) -> Any:
    """Return an argument, its dtype checked and in this machine's byte order; a Dask array stays one."""
    if not is_lazy(value):
        return HOST.convert(name, value)
    check_blocks(name, value)
    check_dtype(name, value)
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def check_blocks(name: str, array: Array) -> None:
    """Raise unless the shape of a Dask array is known, and its blocks are NumPy's."""
    if any(math.isnan(length) for length in array.shape):
        msg = (
            f"{name} must have chunks of known sizes, got {array.chunks}; "
            f"{name}.compute_chunk_sizes() finds them"
        )
        raise ValueError(msg)
    if type(array._meta) is not np.ndarray:
        made = f"{type(array._meta).__module__}.{type(array._meta).__name__}"
        msg = f"{name} must be a Dask array of NumPy arrays, got one of {made}"
        raise TypeError(msg)


def check_whole_rows(x: Array, axes: tuple[int, ...]) -> None:
    """Raise if an axis that is normalized is cut."""
    if cut := [axis - x.ndim for axis in axes if x.numblocks[axis] > 1]:
        msg = (
            f"x has {x.numblocks[cut[0]]} chunks along axis {cut[0]}, which is normalized; "
            f"x.rechunk({dict.fromkeys(cut, -1)}) first"
        )
        raise ValueError(msg)


def operand(name: str, value: Any, x: Array, axes: tuple[int, ...]) -> Operand:
    """Return `value`, whose axes are these of x or have length 1, cut as x is."""
    if value is None:
        return None, None
    if not is_lazy(value):
        # One block of a name that is always the same, which all tasks refer to.
        value = from_array(value, chunks=-1, name=f"stablenorm-{name}-{tokenize(value)}")
    # An axis of length 1 may be cut too, into it and chunks of nothing.
    pairs = zip(axes, value.shape, strict=True)
    chunks = tuple(x.chunks[i] if length == x.shape[i] else (1,) for i, length in pairs)
    return value.rechunk(chunks), axes


def of_blocks(
    name: str, function: Any, *operands: Operand, dtype: Any = object, ones: tuple[int, ...] = ()
) -> Array:
    """
    Return the array whose blocks a function makes of those of the operands; like the first, but for `ones`.

    With `dtype` object they are no arrays. Along the axes `ones` they have length 1.
    """
    axes = operands[0][1]
    made = blockwise(
        function,
        axes,
        *itertools.chain.from_iterable(operands),
        name=name,
        meta=np.empty((0,) * len(axes), dtype),
        # They are cut alike already; and chunks of nothing are not what Dask expects.
        align_arrays=False,
        adjust_chunks=dict.fromkeys(ones, 1),
    )
    # As tasks: Dask would merge the layer with that of x, whose blocks a cache is asked for.
    layers = {**made.dask.layers, name: dict(made.dask.layers[name])}
    return Array(HighLevelGraph(layers, made.dask.dependencies), name, made.chunks, meta=made)


def part_of(made: Array, index: int, what: str, dtype: Any) -> Array:
    """Return what is at `index` of each block of `made`."""
    first, _, token = made.name.rpartition("-")
    operands = (made, tuple(range(made.ndim))), (index, None)
    return of_blocks(f"{first}-{what}-{token}", getitem, *operands, dtype=dtype)


def tree(key: tuple[Any, ...], leaves: list[Any], merge: Callable[..., Any]) -> dict[Any, Task]:
    """
    Return the tasks that merge the leaves, some at a time; the last one has this key.

    Their order is that of the leaves, whoever computes them, and whenever.
    """
    tasks: dict[Any, Task] = {}
    level = 0
    while len(leaves) > _FAN_IN:
        starts = range(0, len(leaves), _FAN_IN)
        made = [Task((*key, level, i), merge, *leaves[i : i + _FAN_IN]) for i in starts]
        tasks |= {each.key: each for each in made}
        leaves, level = [TaskRef(each.key) for each in made], level + 1
    return tasks | {key: Task(key, merge, *leaves)}
