"""Dask arrays as their blocks: what is checked of them, and how a task names those that it reads."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array import Array, from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from stablenorm.arrays import HOST, is_lazy
from stablenorm.formats import check_dtype

Block = tuple[int, ...]

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


class Operand(NamedTuple):
    """A Dask array that a task reads one block of, given the place of a block of x."""

    array: Array
    # For each of its axes, that of x.
    axes: tuple[int, ...]

    def place(self, block: Block) -> Block:
        """Return the place of the block to read; the only one along axes where there is one."""
        numbers = zip(self.axes, self.array.numblocks, strict=True)
        return tuple(block[axis] if count > 1 else 0 for axis, count in numbers)

    def at(self, block: Block) -> Any:
        """Return the block to read."""
        return TaskRef((self.array.name, *self.place(block)))

    @property
    def cut(self) -> tuple[int, ...]:
        """The axes of x along which there are several blocks."""
        numbers = zip(self.axes, self.array.numblocks, strict=True)
        return tuple(axis for axis, count in numbers if count > 1)


def operand(name: str, value: Any, x: Array, axes: tuple[int, ...]) -> Any:
    """Return `value`, whose axes are those of x or have length 1, cut as x is; None for None."""
    if value is None:
        return None
    if not is_lazy(value):
        # One block of a name that is always the same, which all tasks refer to.
        value = from_array(value, chunks=-1, name=f"stablenorm-{name}-{tokenize(value)}")
    # An axis of length 1 may be cut too, into it and chunks of nothing.
    pairs = zip(axes, value.shape, strict=True)
    chunks = tuple(x.chunks[i] if length == x.shape[i] else (1,) for i, length in pairs)
    return Operand(value.rechunk(chunks), axes)


def places(x: Array) -> Iterator[Block]:
    """Yield the place of each block of x, in C order."""
    return itertools.product(*map(range, x.numblocks))


def blocks_of(name: str, x: Array, task: Callable[[Block], tuple[Any, ...]]) -> dict[Any, Any]:
    """Return a task for each block of x, of the function and the arguments that `task` gives it."""
    return {(name, *at): Task((name, *at), *task(at)) for at in places(x)}


def tree(name: Any, leaves: list[Any], merge: Any, tasks: dict[Any, Any]) -> Any:
    """
    Add tasks, of keys that begin with `name`, that merge the leaves, some at a time; return the last.

    Their order is that of the leaves, whoever computes them, and whenever.
    """
    level = 0
    while len(leaves) > 1:
        some = [leaves[i : i + _FAN_IN] for i in range(0, len(leaves), _FAN_IN)]
        keys = [(*name, level, i) for i in range(len(some))]
        tasks |= {key: Task(key, merge, *each) for key, each in zip(keys, some, strict=True)}
        leaves, level = [TaskRef(key) for key in keys], level + 1
    return leaves[0]


def graph_of(name: str, tasks: dict[Any, Any], *needed: Any) -> HighLevelGraph:
    """Return the graph of tasks, and of the arrays or operands whose blocks they read; None aside."""
    some = (each for each in needed if each is not None)
    read: Any = [each.array if isinstance(each, Operand) else each for each in some]
    return HighLevelGraph.from_collections(name, tasks, dependencies=read)


def array_of(
    name: str, tasks: dict[Any, Any], *needed: Any, chunks: Any, dtype: Any = object
) -> Array:
    """Return the array whose blocks the tasks make; with `dtype` object, they are no arrays."""
    meta = np.empty((0,) * len(chunks), dtype)
    return Array(graph_of(name, tasks, *needed), name, chunks, meta=meta)
