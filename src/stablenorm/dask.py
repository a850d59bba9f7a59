"""
The public functions on Dask arrays, chunk by chunk. Imported for a Dask array alone: it loads Dask.

This module computes names, shapes and checks only. The first task of a block returns all results of the
call on it; y, the cache and dx refer to this task by further tasks, each of which takes one part.
"""

import itertools
import math
import threading
from functools import partial
from operator import getitem
from types import SimpleNamespace
from typing import Any

import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array import Array, blockwise, from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from stablenorm import arrays, memory
from stablenorm.arrays import is_lazy, normalize_axes
from stablenorm.backends import choose
from stablenorm.formats import check_dtype
from stablenorm.functional import checks, keywords, operations
from stablenorm.records import NAMES, Cache, Gradients, Norm
from stablenorm.reference import sums
from stablenorm.reference.exact import nearest

# An array and the axes of x that its axes are, or (None, None).
Operand = tuple[Any, Any]
_NOTHING: Operand = None, None

# Sums that one task merges: with eight, the tree is a small part of the tasks.
_FAN_IN = 8


def threads_of_task() -> int | None:
    """Return the number of threads for a task: one if the scheduler has threads of its own, else None."""
    # In the main thread the scheduler runs one task at a time; None is the usual number.
    return None if threading.current_thread() is threading.main_thread() else 1


def convert(name: str, value: Any) -> Any:
    """Return an argument with its dtype checked, in this machine's byte order; Dask arrays stay lazy."""
    if not is_lazy(value):
        return arrays.convert(name, value)
    check_blocks(name, value)
    check_dtype(name, value)
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def check_blocks(name: str, array: Array) -> None:
    """Raise unless the shape of a Dask array is known, and its blocks are NumPy arrays."""
    if any(math.isnan(length) for length in array.shape):
        msg = f"{name} must have known chunk sizes, got {array.chunks}; call compute_chunk_sizes()"
        raise ValueError(msg)
    if (kind := type(array._meta)) is not np.ndarray:
        msg = f"{name} must be a Dask array of NumPy arrays, got one of {kind.__name__}"
        raise TypeError(msg)


def operand(value: Any, x: Array, axes: tuple[int, ...]) -> Operand:
    """Return `value` with the chunks of x; its axes are `axes` of x, or have length 1."""
    if value is None:
        return _NOTHING
    if not is_lazy(value):
        # All tasks refer to one block.
        value = from_array(value, chunks=-1)
    # Even an axis of length 1 may be cut, into chunks of length 1 and 0.
    pairs = zip(axes, value.shape, strict=True)
    chunks = tuple(x.chunks[i] if length == x.shape[i] else (1,) for i, length in pairs)
    return value.rechunk(chunks), axes


def of_blocks(
    name: str, function: Any, *operands: Operand, dtype: Any = object, ones: tuple[int, ...] = ()
) -> Array:
    """Return the results of a function on blocks: chunks like the first operand, but 1 along `ones`."""
    axes = operands[0][1]
    options = {"meta": np.empty((0,) * len(axes), dtype), "adjust_chunks": dict.fromkeys(ones, 1)}
    # Operands have equal chunks already, and Dask's alignment does not expect chunks of length 0.
    options |= {"name": name, "align_arrays": False}
    return blockwise(function, axes, *itertools.chain(*operands), **options)  # type: ignore[no-any-return]


def renamed(array: Array, word: str) -> str:
    """Return the name of a further array that is computed from `array`."""
    first, _, token = array.name.rpartition("-")
    return f"{first}-{word}-{token}"


def part_of(array: Array, index: int, word: str, dtype: Any) -> Array:
    """Return the item at `index` of each block of `array`."""
    operands = (array, tuple(range(array.ndim))), (index, None)
    return of_blocks(renamed(array, word), getitem, *operands, dtype=dtype)


def merged(name: str, parts: Any, like: Array, axes: Any) -> Operand:
    """Return sums with the chunks of `like`, whose axes are `axes` of `parts`; other blocks merge in order."""
    groups, tasks = dict[Any, list[Any]](), dict[Any, Task]()
    for at in itertools.product(*map(range, parts.numblocks)):
        counts = zip(axes, like.numblocks, strict=True)
        place = tuple(at[axis] if count > 1 else 0 for axis, count in counts)
        groups.setdefault((name, *place), []).append(TaskRef((parts.name, *at)))
    for key, leaves in groups.items():
        for level in itertools.count():
            batches = [leaves[i : i + _FAN_IN] for i in range(0, len(leaves), _FAN_IN)]
            keys = [(*key, level, i) for i in range(len(batches))] if len(batches) > 1 else [key]
            both = zip(keys, batches, strict=True)
            tasks |= {made: Task(made, sums.merged, *group) for made, group in both}
            leaves[:] = map(TaskRef, keys)
            if keys == [key]:
                break
    graph = HighLevelGraph.from_collections(name, tasks, [parts])
    return Array(graph, name, like.chunks, meta=np.empty((0,) * len(axes), object)), axes


class LazyCache(SimpleNamespace):
    """
    The cache of a forward on a Dask array: the fields of `Cache` as lazy arrays; `blocks` are the caches of blocks.

    It is no Dask collection, so `dask.compute` and `dask.persist` leave it as it is.
    """

    def __repr__(self) -> str:
        """Return the shape, the dtype and the number of blocks on one line."""
        x = f"{self.x.dtype} {self.x.shape}, {self.blocks.npartitions} blocks"
        return f"LazyCache(x: {x}, axis: {self.axis}, rounding: {self.norm.rounding!r})"


def _word(bare: Cache, x: Any, which: str) -> Any:
    return getattr(bare._replace(x=x), which)


def forward(
    x: Any, norm: Norm, axis: Any, out: Any, backend: Any, keep: bool, residual: Any, where: Any
) -> tuple[Array, LazyCache | None]:
    """Do the work of `operations.forward` for an x that is a Dask array."""
    checks.check_combinations({checks.DASK: True, "out": out})
    chosen, x = choose(backend), convert("x", x)
    axes, every = normalize_axes(axis, x.ndim), tuple(range(x.ndim))
    norm = checks.checked_norm(convert, norm, x.shape, axes)
    if cut := [axis - x.ndim for axis in axes if x.numblocks[axis] > 1]:
        msg = (
            f"x has {x.numblocks[cut[0]]} chunks along axis {cut[0]}, which is normalized; "
            f"x.rechunk({dict.fromkeys(cut, -1)}) first"
        )
        raise ValueError(msg)
    if residual is not None:
        residual = checks.of_shape(convert, "residual", residual, x.shape)
    if is_lazy(where):
        # Tasks check the elements, block by block.
        check_blocks("where", where)
        checks.check_mask(where, x.shape)
    elif where is not None:
        where = checks.check_where(where, x.shape, axes, norm.rounding)
    operands = (
        (x, every),
        operand(residual, x, every),
        operand(where, x, every[x.ndim - np.ndim(where) :]),
        *_parameters(norm, x, axes),
    )
    call = norm._replace(gamma=None, beta=None), axes, chosen, keep
    name = f"{norm.kind}-norm{'-forward' * keep}-{tokenize(call, *operands)}"
    made = of_blocks(name, partial(_forward, call), *operands, dtype=object if keep else x.dtype)
    if not keep:
        return made, None
    y, blocks = part_of(made, 0, "y", x.dtype), part_of(made, 1, "cache", object)
    if residual is not None:
        x = part_of(made, 2, "sum", max(x.dtype, residual.dtype, key=lambda d: d.itemsize))
    cache = LazyCache(x=x, norm=norm, gamma=norm.gamma, axis=axes, backend=chosen, blocks=blocks)
    for word in ("mean", "rstd"):
        of_word = (blocks, every), (x, every), (word, None)
        lazy = of_blocks(renamed(blocks, word), _word, *of_word, dtype=np.float64, ones=axes)
        setattr(cache, word, lazy)
    return y, cache


def _forward(call: Any, x: Any, residual: Any, where: Any, *parameters: Any) -> Any:
    """Return y of a block; if asked also its cache without arrays, and with a residual the sum."""
    norm, axes, backend, keep = call
    norm, threads = Norm._make((*parameters, *norm[2:])), threads_of_task()
    y, cache = operations.forward(x, norm, axes, None, backend, keep, residual, where, threads)
    if cache is None:
        return y
    bare = _filled(None, None, None, cache)
    return (y, bare) if residual is None else (y, bare, cache.x)


def _filled(x: Any, gamma: Any, beta: Any, bare: Cache) -> Cache:
    return bare._replace(x=x, norm=bare.norm._replace(gamma=gamma, beta=beta))


def _parameters(norm: Any, x: Array, axes: tuple[int, ...]) -> list[Operand]:
    """Return gamma and beta as operands; leading axes have the chunks of x."""
    others = [axis for axis in range(x.ndim) if axis not in axes]
    return [operand(v, x, (*others[x.ndim - np.ndim(v) :], *axes)) for v in (norm.gamma, norm.beta)]


def backward(
    dy: Any,
    cache: LazyCache,
    kind: str,
    wrt: Any,
    out: Any,
    dsum: Any,
    sum_axes: Any,
    accumulate: Any,
) -> Gradients:
    """Do the work of `operations.backward` for the cache of a Dask array."""
    checks.checked_cache(cache, dy, kind)
    given = {"out": out, "sum_axes": sum_axes, "accumulate": accumulate}
    checks.check_combinations(given | {checks.DASK: True})
    asked, x, norm = checks.asked_names(wrt), cache.x, cache.norm
    if not is_lazy(dy):
        msg = f"dy must be a Dask array, as x was, got {type(dy).__name__}; pass da.from_array(dy)"
        raise TypeError(msg)
    dy = checks.of_shape(convert, "dy", dy, x.shape, "the y of this cache", x.dtype)
    if dsum is not None:
        dsum = checks.of_shape(convert, "dsum", dsum, x.shape, dtype=x.dtype)
    every = tuple(range(x.ndim))
    of_dy, of_dsum = operand(dy, x, every), operand(dsum, x, every)
    block = (x, every), *_parameters(norm, x, cache.axis), (cache.blocks, every)
    # The word is "gradients": Dask hides "backward", which it takes for a token of eight letters.
    name = f"{kind}-norm-gradients-{tokenize(dy, cache.blocks, dsum, asked)}"
    made = of_blocks(name, partial(_backward, asked), of_dy, of_dsum, *block)
    gradients: list[Any] = [part_of(made, 0, "dx", x.dtype) if "x" in asked else None]
    # Partial sums of narrower numbers never leave the range of float64.
    exact = norm.rounding == "nearest" or x.dtype == np.float64
    for i, parameter in enumerate((norm.gamma, norm.beta)):
        is_wanted = NAMES[i + 1] in asked and parameter is not None
        gradients.append(_sum(made, i, exact, of_dy, block) if is_wanted else None)
    return Gradients(*gradients)


def _backward(asked: Any, dy: Any, dsum: Any, *block: Any) -> Gradients:
    """Return the gradients of a block, with partial sums."""
    cache = _filled(*block)
    dx = memory.empty(cache.x.shape, cache.x.dtype) if "x" in asked else None
    totals = (
        None if parameter is None or name not in asked else np.zeros(parameter.shape, sums.PARTIAL)
        for name, parameter in (("gamma", cache.norm.gamma), ("beta", cache.norm.beta))
    )
    out = Gradients(dx, *totals)
    operations.run_backward(dy, cache, out, dsum, threads_of_task())
    return out


def _sum(made: Array, i: int, exact: bool, dy: Operand, block: tuple[Operand, ...]) -> Array:
    """Return dgamma (i = 0) or dbeta (i = 1) from the results of `_backward` on each `block`."""
    (like, axes), name = block[1 + i], ("dgamma", "dbeta")[i]
    parts = part_of(made, 1 + i, f"{name}-sum", object)
    total = merged(renamed(parts, "merged"), parts, like, axes)
    result = of_blocks(renamed(parts, "rounded"), sums.rounded, total, (like.dtype, None))
    values, uncertified = part_of(result, 0, name, like.dtype), part_of(result, 1, "asked", bool)
    if not exact:
        return values
    # Each block computes uncertified columns again: this keeps x and dy in memory.
    again = of_blocks(renamed(parts, "again"), partial(_again, i), dy, (uncertified, axes), *block)
    others = merged(renamed(parts, "exact"), again, like, axes)
    return of_blocks(renamed(made, name), _decided, (values, axes), others, dtype=like.dtype)


def _again(which: int, dy: Any, uncertified: Any, *block: Any) -> Any:
    """Return the exact sums of a block for the columns that are uncertified."""
    return keywords.exact_sums(_filled(*block), dy, which, uncertified)


def _decided(values: Any, exact: Any) -> Any:
    """Return rounded sums, but those that have an exact sum, not 0, by that."""
    result, places = values.copy(), exact != 0
    result[places] = nearest(exact[places], values.dtype)
    return result
