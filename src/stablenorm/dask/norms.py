"""
The public functions on Dask arrays: a graph of calls on blocks of whole rows.

Nothing is computed here but names, shapes and checks. The first task of a block returns all that the
call made of it; what the user holds, y, the cache, dx, refers to it by tasks that only take a part.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array import Array
from dask.array.core import finalize, slices_from_chunks
from dask.base import DaskMethodsMixin, tokenize
from dask.highlevelgraph import HighLevelGraph

from stablenorm.arrays import HOST, is_lazy, normalize_axes
from stablenorm.backends import choose
from stablenorm.dask.graph import (
    Block,
    Operand,
    array_of,
    blocks_of,
    check_blocks,
    check_whole_rows,
    convert,
    operand,
    places,
    threads_of_task,
    tree,
)
from stablenorm.functional import forward as functional
from stablenorm.functional.backward import BackwardOptions
from stablenorm.functional.checks import (
    asked_names,
    check_kind,
    check_save,
    checked_norm,
    of_shape,
)
from stablenorm.functional.combinations import DASK, refuse
from stablenorm.functional.forward import ForwardOptions
from stablenorm.functional.masks import check_mask, check_where
from stablenorm.functional.row_parts import backward_parts, decided, exact_parts
from stablenorm.reference.partial import PARTIAL, merged, rounded
from stablenorm.types import NAMES, Cache, Gradients, Norm, Statistics

LAZY = HOST._replace(convert=convert)


class Call(NamedTuple):
    """What all blocks have in common: `norm` is that of the call less gamma and beta."""

    norm: tuple[Any, ...]
    axes: tuple[int, ...]
    backend: str
    keep: bool


def forward(x: Any, norm: Norm, options: ForwardOptions) -> tuple[Array, LazyCache | None]:
    """Do what `functional.forward` does with an x that is a Dask array."""
    axis, out, backend, keep, residual, where, save, _ = options
    if out is not None:
        refuse("out", DASK)
    if save != "x":
        check_save(save)
        refuse('save="recompute"', DASK)
    chosen = choose(backend)
    x = convert("x", x)
    axes = normalize_axes(axis, x.ndim)
    norm = checked_norm(LAZY, norm, x.shape, axes, chosen)
    check_whole_rows(x, axes)
    if residual is not None:
        residual = of_shape(LAZY, "residual", residual, x.shape)
    if is_lazy(where):
        # Its elements are looked at block by block.
        check_blocks("where", where)
        check_mask(where, x.shape)
    elif where is not None:
        where = check_where(where, x.shape, axes, norm.rounding)
    call = Call(norm[2:], axes, chosen, keep)
    token = tokenize(x, norm.gamma, norm.beta, residual, where, call)
    kind = f"{norm.kind}-norm"
    every = tuple(range(x.ndim))
    added = operand("residual", residual, x, every)
    mask = None if where is None else operand("where", where, x, every[x.ndim - where.ndim :])
    needed = operand("x", x, x, every), *parameters(norm, x, axes), added, mask
    first = f"{kind}-forward" if keep else kind
    name = f"{first}-{token}"
    tasks = blocks_of(name, x, lambda at: (_forward, call, *read(needed, at)))
    if not keep:
        return array_of(name, tasks, *needed, chunks=x.chunks, dtype=x.dtype), None
    made = array_of(name, tasks, *needed, chunks=x.chunks)
    y, kept = (
        _part(made, i, of, dtype) for i, of, dtype in ((0, "y", x.dtype), (1, "cache", object))
    )
    if residual is not None:
        x = _part(made, 2, "sum", x.dtype)
    return y, LazyCache(x, norm, axes, chosen, kept)


def _forward(call: Call, x: Any, gamma: Any, beta: Any, residual: Any, where: Any) -> Any:
    """Return y of a block; with a cache, that without its arrays as well, and cache.x if it is not x."""
    norm = Norm(gamma, beta, *call.norm)
    options = ForwardOptions(
        call.axes,
        backend=call.backend,
        keep=call.keep,
        residual=residual,
        where=where,
        threads=threads_of_task(),
    )
    y, cache = functional.forward(x, norm, options)
    if cache is None:
        return y
    bare = cache._replace(x=None, norm=cache.norm._replace(gamma=None, beta=None))
    return (y, bare) if residual is None else (y, bare, cache.x)


def _part(made: Array, index: int, what: str, dtype: Any) -> Array:
    """Return what is at `index` of each block of `made`."""
    first, _, token = made.name.rpartition("-")
    name = f"{first}-{what}-{token}"
    tasks = blocks_of(name, made, lambda at: (getitem, TaskRef((made.name, *at)), index))
    return array_of(name, tasks, made, chunks=made.chunks, dtype=dtype)


def read(needed: Any, at: Block) -> list[Any]:
    """Return the blocks that the task at this place reads of its operands, None of None."""
    return [None if each is None else each.at(at) for each in needed]


def backward(dy: Any, cache: LazyCache, kind: str, options: BackwardOptions) -> Gradients:
    """Do what `functional.backward` does with the cache of a Dask array."""
    check_kind(cache.norm, kind)
    for name in ("out", "sum_axes", "dmean", "drstd", "accumulate"):
        # Not `!=`: of arrays, that is one.
        if (value := getattr(options, name)) is not None and value is not False:
            refuse(name, DASK)
    asked, x, norm = asked_names(options.wrt), cache.x, cache.norm
    if not is_lazy(dy):
        msg = (
            f"dy must be a Dask array, as x was, got {type(dy).__name__}; "
            "pass dask.array.from_array(dy, chunks=cache.x.chunks)"
        )
        raise TypeError(msg)
    dy, dsum = of_shape(LAZY, "dy", dy, x.shape, "the y of this cache"), options.dsum
    if dsum is not None:
        dsum = of_shape(LAZY, "dsum", dsum, x.shape)
    every = tuple(range(x.ndim))
    gamma, beta = parameters(norm, x, cache.axis)
    block = [*(operand("", each, x, every) for each in (dy, x)), gamma, beta]
    # Not "backward": Dask takes a word of eight letters from a on for a token, and would not show it.
    first = f"{kind}-norm-gradients"
    token = tokenize(dy, cache, dsum, asked)
    block.append(operand("", cache.kept, x, every))
    needed = *block, operand("dsum", dsum, x, every)
    tasks = blocks_of(f"{first}-{token}", x, lambda at: (_backward, asked, *read(needed, at)))
    made = array_of(f"{first}-{token}", tasks, *needed, chunks=x.chunks)
    dx = _part(made, 0, "dx", x.dtype) if "x" in asked else None
    found: list[Any] = [dx, None, None]
    # gamma and beta in one tree, if they are alike.
    trees: dict[Any, dict[int, Operand]] = {}
    for i, parameter in ((1, gamma), (2, beta)):
        if parameter is not None and NAMES[i] in asked:
            like = parameter.cut, parameter.array.chunks, parameter.array.dtype
            trees.setdefault(like, {})[i] = parameter
    for wanted in trees.values():
        for i, total in _sums(made, block, wanted, norm.rounding == "nearest").items():
            found[i] = total
    return Gradients(*found)


def _backward(
    asked: tuple[str, ...], dy: Any, x: Any, gamma: Any, beta: Any, kept: Cache, dsum: Any
) -> Any:
    """Return the gradients of a block, those of gamma and beta as PARTIAL sums."""
    cache = _filled(kept, x, gamma, beta)
    return tuple(backward_parts(dy, cache, asked, dsum=dsum, threads=threads_of_task()))


def _filled(kept: Cache, x: Any, gamma: Any, beta: Any) -> Cache:
    return kept._replace(x=x, norm=kept.norm._replace(gamma=gamma, beta=beta))


def _sums(
    made: Array, block: list[Any], wanted: dict[int, Operand], nearest: bool
) -> dict[int, Array]:  # fmt: skip
    """
    Return dgamma (1) and dbeta (2), as far as wanted, whose parameters are alike.

    They are one array until the end. `made` has what `_backward` returned. What rounding to nearest leaves
    undecided each `block` is asked again, for exact sums.
    """
    first, _, token = made.name.rpartition("-")
    indices, like = tuple(wanted), next(iter(wanted.values()))
    cut, dtype = like.cut, like.array.dtype
    token = tokenize(token, cut, indices)
    tasks: dict[Any, Any] = {}

    def key(what: str, at: Block) -> Any:
        return f"{first}-{what}-{token}", *at

    def group(at: Block) -> Block:
        return tuple(at[axis] for axis in cut)

    def add(where: Any, *task: Any) -> Any:
        tasks[where] = Task(where, *task)
        return TaskRef(where)

    def total(what: str, task: Callable[[Block], tuple[Any, ...]]) -> dict[Block, Any]:
        leaves: dict[Block, list[Any]] = {}
        for at in places(made):
            leaves.setdefault(group(at), []).append(add(key(what, at), *task(at)))
        name = f"{first}-{what}-merged-{token}"
        return {some: tree((name, *some), each, _merged, tasks) for some, each in leaves.items()}

    total_of = total("sum", lambda at: (_taken, TaskRef((made.name, *at)), indices))
    found = {
        some: add(key("rounded", some), rounded, each, dtype) for some, each in total_of.items()
    }
    exact: dict[Block, Any] = {}
    if nearest:
        again = lambda at: (_exact, indices, found[group(at)], *read(block, at))
        exact = total("exact", again)
    shared = array_of(f"{first}-sum-{token}", tasks, made, *block, chunks=made.chunks)
    result = {}
    for position, (i, parameter) in enumerate(wanted.items()):
        tasks, name = {}, f"{first}-{'dgamma' if i == 1 else 'dbeta'}-{token}"
        for at in places(made):
            some = group(at)
            add((name, *parameter.place(at)), _decided, found[some], exact.get(some), position)
        result[i] = array_of(name, tasks, shared, chunks=like.array.chunks, dtype=dtype)
    return result


def _taken(found: Any, indices: tuple[int, ...]) -> Any:
    # As float64: NumPy copies records field by field, eight times as slowly.
    return np.stack([found[i].view(np.float64) for i in indices]).view(PARTIAL)


def _merged(*parts: Any) -> Any:
    """Return the sums of all parts, in their order; None where there are none."""
    return None if parts[0] is None else merged(*parts)


def _exact(
    indices: tuple[int, ...], found: Any, dy: Any, x: Any, gamma: Any, beta: Any, kept: Cache
) -> Any:
    """Return exact sums over a block of the columns that are undecided; None, at once, without any."""
    if not found[1].any():
        return None
    columns = dict(zip(indices, found[1], strict=True))
    wanted, cache = [columns.get(i) for i in (1, 2)], _filled(kept, x, gamma, beta)
    sums = exact_parts(dy, cache, wanted, threads_of_task())
    return np.stack([sums[i - 1] for i in indices])


def _decided(found: Any, exact: Any, position: int) -> Any:
    values, undecided = (each[position] for each in found)
    return decided(values, undecided, exact[position]) if undecided.any() else values


def parameters(norm: Norm, x: Array, axes: tuple[int, ...]) -> list[Any]:
    """Return gamma and beta as operands; one with leading axes is cut along these as x is."""
    others = [axis for axis in range(x.ndim) if axis not in axes]
    found = []
    for name, value in zip(("gamma", "beta"), norm[:2], strict=True):
        leading = 0 if value is None else value.ndim - len(axes)
        found.append(operand(name, value, x, (*others[len(others) - leading :], *axes)))
    return found


class LazyCache(DaskMethodsMixin):
    """
    The cache of a forward on a Dask array, itself lazy: a collection of Dask like the array.

    `compute` returns the `Cache` of the whole array, `persist` a `LazyCache` whose blocks are computed.

    Attributes
    ----------
    x : dask.array.Array
        What was normalized: the x that was given, or its sum with the residual.
    norm, gamma
        As in `Cache`; gamma and beta are what was given.
    axis : tuple of int
        The axes normalized together.
    mean, rstd : dask.array.Array
        As in `Cache`, but lazy.
    """

    def __init__(
        self, x: Array, norm: Norm, axis: tuple[int, ...], backend: str, kept: Array
    ) -> None:
        self.x, self.norm, self.axis, self.backend = x, norm, axis, backend
        # In place of arrays its blocks are caches, without x, gamma and beta.
        self.kept = kept

    def __repr__(self) -> str:
        """Return shapes, dtypes and the number of blocks on one line."""
        x, gamma, beta = (
            None if each is None else f"{each.dtype} {each.shape}"
            for each in (self.x, *self.norm[:2])
        )
        return (
            f"LazyCache(x: {x}, {self.kept.npartitions} blocks, gamma: {gamma}, beta: {beta}, "
            f"axis: {self.axis}, backend: {self.backend!r}, rounding: {self.norm.rounding!r})"
        )

    @property
    def gamma(self) -> Any:
        """Return the gamma that was given."""
        return self.norm.gamma

    @property
    def mean(self) -> Array:
        """Return the mean of each row."""
        return self._of_rows("mean")

    @property
    def rstd(self) -> Array:
        """Return the reciprocal standard deviation of each row."""
        return self._of_rows("rstd")

    def _of_rows(self, which: str) -> Array:
        x, axes = self.x, self.axis
        chunks = tuple((1,) if i in axes else sizes for i, sizes in enumerate(x.chunks))

        def task(at: Block) -> tuple[Any, ...]:
            shape = tuple(sizes[i] for sizes, i in zip(x.chunks, at, strict=True))
            return _of_rows, TaskRef((self.kept.name, *at)), which, shape

        name = f"{self.norm.kind}-norm-{which}-{tokenize(self.kept)}"
        tasks = blocks_of(name, x, task)
        return array_of(name, tasks, self.kept, chunks=chunks, dtype=np.float64)

    # ---- what Dask asks of a collection: it is made of those of its arrays that are lazy ----

    __dask_optimize__ = Array.__dict__["__dask_optimize__"]
    __dask_scheduler__ = Array.__dict__["__dask_scheduler__"]

    def _collections(self) -> list[Any]:
        return [each for each in (self.x, self.kept, *self.norm[:2]) if is_lazy(each)]

    def __dask_graph__(self) -> HighLevelGraph:
        return HighLevelGraph.merge(*(each.dask for each in self._collections()))

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._collections())

    def __dask_keys__(self) -> list[Any]:
        return [each.__dask_keys__() for each in self._collections()]

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.__dask_layers__(), tokenize(self.norm)

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        given = [None if is_lazy(each) else each for each in self.norm[:2]]
        lazy = [is_lazy(each) for each in self.norm[:2]]
        norm = self.norm._replace(gamma=given[0], beta=given[1])
        return _whole, (norm, lazy, self.axis, self.backend, self.x.chunks)

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._rebuilt, ()

    def _rebuilt(self, graph: Any, *, rename: Any = None) -> LazyCache:
        def again(each: Any) -> Any:
            if not is_lazy(each):
                return each
            rebuild, extra = each.__dask_postpersist__()
            return rebuild(graph, *extra, rename=rename)

        gamma, beta = map(again, self.norm[:2])
        norm = self.norm._replace(gamma=gamma, beta=beta)
        return type(self)(again(self.x), norm, self.axis, self.backend, again(self.kept))


def _of_rows(kept: Cache, which: str, shape: tuple[int, ...]) -> Any:
    """Return mean or rstd of a block of x of this shape, which is all that is asked of x."""
    return getattr(kept._replace(x=np.broadcast_to(np.float32(0), shape)), which)


def _whole(
    results: Any, norm: Norm, lazy: list[bool], axes: tuple[int, ...], backend: str, chunks: Any
) -> Cache:
    """Return the cache of the whole array, given the computed blocks of a lazy one."""
    x, kept, *others = results
    computed = iter(others)
    pairs = zip(lazy, norm[:2], strict=True)
    gamma, beta = (finalize(next(computed)) if is_lazy else given for is_lazy, given in pairs)
    norm = norm._replace(gamma=gamma, beta=beta)
    places, found = list(slices_from_chunks(chunks)), list(_leaves(kept))
    shape = tuple(map(sum, chunks))
    lengths = tuple(length for i, length in enumerate(shape) if i not in axes)
    lead = [tuple(cut for i, cut in enumerate(place) if i not in axes) for place in places]
    words: list[Any] = []
    for each in zip(*(cache.statistics for cache in found), strict=True):
        some = next((word for word in each if word is not None), None)
        whole = None
        if some is not None:
            # What some rows need no word for is 0.
            whole = np.zeros((*lengths, *some.shape[1:]), some.dtype)
            for place, word in zip(lead, each, strict=True):
                if word is not None:
                    part = whole[(*place, ...)]
                    part[...] = word.reshape(part.shape)
            whole = whole.reshape(-1, *some.shape[1:])
        words.append(whole)
    where = None
    if found[0].where is not None:
        wide = any(cache.where.shape[i] > 1 for cache in found for i in axes)
        where = np.zeros([1 if i in axes and not wide else k for i, k in enumerate(shape)], bool)
        for place, cache in zip(places, found, strict=True):
            where[place] = cache.where
    return Cache(finalize(x), norm, axes, Statistics._make(words), backend, where)


def _leaves(nested: Any) -> Any:
    if type(nested) not in (list, tuple):
        yield nested
        return
    for each in nested:
        yield from _leaves(each)
