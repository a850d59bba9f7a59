"""Dask arrays as their blocks: what is checked of them, and how a task names those that it reads."""

from __future__ import annotations

import itertools
import math
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


class Operand(NamedTuple):
    """A Dask array that a task reads one block of, given the place of a block of x."""

    array: Array
    # For each of its axes, that of x.
    axes: tuple[int, ...]

    def at(self, block: Block) -> Any:
        """Return the block to read; the only one along axes where there is one."""
        numbers = zip(self.axes, self.array.numblocks, strict=True)
        return TaskRef((self.array.name, *(block[i] if count > 1 else 0 for i, count in numbers)))

    @property
    def numblocks(self) -> Block:
        """How many blocks there are."""
        return tuple(self.array.numblocks)


def operand(name: str, value: Any, x: Array, axes: tuple[int, ...]) -> Any:
    """Return `value`, whose axes are those of x or have length 1, cut as x is; None for None."""
    if value is None:
        return None
    if not is_lazy(value):
        # One block of a name that is always the same, which all tasks refer to.
        value = from_array(value, chunks=-1, name=f"stablenorm-{name}-{tokenize(value)}")
    pairs = zip(axes, value.shape, strict=True)
    chunks = tuple(x.chunks[i] if length != 1 else (1,) for i, length in pairs)
    return Operand(value.rechunk(chunks), axes)


def places(x: Array) -> Iterator[Block]:
    """Yield the place of each block of x, in C order."""
    return itertools.product(*map(range, x.numblocks))


def layer(
    name: str, x: Array, task: Callable[[Block], tuple[Any, ...]], *needed: Any,
    dtype: Any = object, chunks: Any = None,
) -> Array:  # fmt: skip
    """
    Return an array with a block for each one of x, made by the function and arguments of `task`.

    `needed` are the arrays, or operands, that it reads; None aside. By default the blocks are no
    arrays: `dtype` object, of size 1.
    """
    tasks: dict[Any, Any] = {}
    for place in places(x):
        key = (name, *place)
        tasks[key] = Task(key, *task(place))
    some = (each for each in needed if each is not None)
    arrays: Any = [each.array if isinstance(each, Operand) else each for each in some]
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=arrays)
    if chunks is None:
        chunks = tuple((1,) * count for count in x.numblocks)
    return Array(graph, name, chunks, meta=np.empty((0,) * x.ndim, dtype))
