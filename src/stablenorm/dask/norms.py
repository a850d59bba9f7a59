"""
The public functions on Dask arrays: a graph of calls on blocks of whole rows.

Nothing is computed here but names, shapes and checks. The first task of a block returns all that the
call made of it; what the user holds, y, the cache, dx, refers to it by tasks that only take a part.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
from dask._task_spec import TaskRef
from dask.array import Array
from dask.array.core import finalize, slices_from_chunks
from dask.base import DaskMethodsMixin, tokenize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from stablenorm.arrays import HOST, is_lazy, normalize_axes
from stablenorm.backends import choose
from stablenorm.dask.graph import (
    Operand,
    check_blocks,
    check_whole_rows,
    convert,
    of_blocks,
    operand,
    part_of,
    threads_of_task,
    tree,
)
from stablenorm.functional import forward as functional
from stablenorm.functional.backward import BackwardOptions
from stablenorm.functional.checks import (
    asked_names,
    check_kind,
    checked_norm,
    of_shape,
)
from stablenorm.functional.combinations import DASK, refuse
from stablenorm.functional.forward import ForwardOptions
from stablenorm.functional.masks import check_mask, check_where
from stablenorm.functional.row_parts import backward_parts, decided, exact_parts
from stablenorm.reference.partial import merged, rounded
from stablenorm.types import NAMES, Cache, Gradients, Norm, Statistics

LAZY = HOST._replace(convert=convert)


def forward(x: Any, norm: Norm, options: ForwardOptions) -> tuple[Array, LazyCache | None]:
    """Do what `functional.forward` does with an x that is a Dask array."""
    axis, out, backend, keep, residual, where, _ = options
    if out is not None:
        refuse("out", DASK)
    chosen = choose(backend)
    x = convert("x", x)
    axes, every = normalize_axes(axis, x.ndim), tuple(range(x.ndim))
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
    operands = (
        (x, every),
        *_parameters(norm, x, axes),
        operand("residual", residual, x, every),
        operand("where", where, x, every[x.ndim - np.ndim(where) :]),
    )
    call = norm._replace(gamma=None, beta=None), ForwardOptions(axes, backend=chosen, keep=keep)
    name = f"{norm.kind}-norm{'-forward' * keep}-{tokenize(call, *operands)}"
    function = partial(_forward, *call)
    if not keep:
        return of_blocks(name, function, *operands, dtype=x.dtype), None
    made = of_blocks(name, function, *operands)
    y, kept = part_of(made, 0, "y", x.dtype), part_of(made, 1, "cache", object)
    if residual is not None:
        x = part_of(made, 2, "sum", x.dtype)
    return y, LazyCache(x, norm, axes, chosen, kept)


def _forward(
    norm: Norm, options: ForwardOptions, x: Any, gamma: Any, beta: Any, residual: Any, where: Any
) -> Any:
    """Return y of a block; with a cache, that without its arrays as well, and cache.x if it is not x."""
    options = options._replace(residual=residual, where=where, threads=threads_of_task())
    y, cache = functional.forward(x, norm._replace(gamma=gamma, beta=beta), options)
    if cache is None:
        return y
    # All that mean and rstd ask of x is its shape along the other axes; of rounding="nearest" they get it again.
    nothing = np.empty([0 if i in cache.axis else k for i, k in enumerate(x.shape)], x.dtype)
    bare = _filled(cache, nothing, None, None)
    return (y, bare) if residual is None else (y, bare, cache.x)


def _filled(cache: Cache, x: Any, gamma: Any, beta: Any) -> Cache:
    return cache._replace(x=x, norm=cache.norm._replace(gamma=gamma, beta=beta))


def _parameters(norm: Norm, x: Array, axes: tuple[int, ...]) -> list[Operand]:
    """Return gamma and beta as operands; one with leading axes is cut along these as x is."""
    others = [axis for axis in range(x.ndim) if axis not in axes]
    found = []
    for name, value in zip(NAMES[1:], norm[:2], strict=True):
        leading = 0 if value is None else value.ndim - len(axes)
        found.append(operand(name, value, x, (*others[len(others) - leading :], *axes)))
    return found


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
    of_dy, of_dsum = (operand(name, each, x, every) for name, each in (("dy", dy), ("dsum", dsum)))
    block = of_dy, (x, every), *_parameters(norm, x, cache.axis), (cache.kept, every)
    # Not "backward": Dask takes a word of eight letters from a on for a token, and would not show it.
    name = f"{kind}-norm-gradients-{tokenize(dy, cache, dsum, asked)}"
    made = of_blocks(name, partial(_backward, asked), *block, of_dsum)
    found: list[Any] = [part_of(made, 0, "dx", x.dtype) if "x" in asked else None, None, None]
    # gamma and beta in one tree, if they are alike.
    trees = defaultdict(list)
    for i in (1, 2):
        if NAMES[i] in asked and norm[i - 1] is not None:
            parameter, axes = block[1 + i]
            trees[axes, parameter.chunks, parameter.dtype].append(i)
    for wanted in trees.values():
        totals = _sums(made, wanted, block, norm.rounding == "nearest")
        for i, total in zip(wanted, totals, strict=True):
            found[i] = total
    return Gradients(*found)


def _backward(
    asked: tuple[str, ...], dy: Any, x: Any, gamma: Any, beta: Any, kept: Cache, dsum: Any
) -> Gradients:
    """Return the gradients of a block, those of gamma and beta as PARTIAL sums."""
    cache = _filled(kept, x, gamma, beta)
    return backward_parts(dy, cache, asked, dsum=dsum, threads=threads_of_task())


def _sums(made: Array, wanted: list[int], block: tuple[Operand, ...], nearest: bool) -> list[Array]:
    """
    Return the wanted of dgamma (1) and dbeta (2), given what `_backward` made; the parameters are alike.

    What rounding to nearest leaves undecided each `block` is asked again, for exact sums.
    """
    like, axes = block[1 + wanted[0]]
    first, _, token = made.name.rpartition("-")
    token = tokenize(token, wanted)

    def merge(parts: Any, what: str) -> Operand:
        """Add up the blocks of x that the same block of the parameter belongs to."""
        name = f"{first}-{what}-merged-{token}"
        groups = defaultdict(list)
        for at in itertools.product(*map(range, parts.numblocks)):
            counts = zip(axes, like.numblocks, strict=True)
            place = tuple(at[axis] if count > 1 else 0 for axis, count in counts)
            groups[place].append(TaskRef((parts.name, *at)))
        tasks = dict[Any, Any]()
        for place, leaves in groups.items():
            tasks |= tree((name, *place), leaves, _merged)
        graph = HighLevelGraph.from_collections(name, tasks, [parts])
        return Array(graph, name, like.chunks, meta=np.empty((0,) * len(axes), object)), axes

    def each_block(what: str, function: Any, *operands: Operand, dtype: Any = object) -> Array:
        return of_blocks(f"{first}-{what}-{token}", function, *operands, dtype=dtype)

    some = slice(wanted[0], wanted[-1] + 1), None
    parts = each_block("sum", getitem, (made, tuple(range(made.ndim))), some)
    found = each_block("rounded", _rounded, merge(parts, "sum"), (like.dtype, None)), axes
    exact: Operand = None, None
    if nearest:
        exact = merge(each_block("exact", partial(_exact, wanted), *block, found), "exact")
    names = [("dgamma", "dbeta")[i - 1] for i in wanted]
    return [
        each_block(name, _decided, found, exact, (place, None), dtype=like.dtype)
        for place, name in enumerate(names)
    ]


def _merged(*parts: Any) -> Any:
    return [merged(*each) for each in zip(*parts, strict=True)]


def _rounded(totals: Any, dtype: Any) -> Any:
    return [rounded(each, dtype) for each in totals]


def _exact(
    wanted: list[int], dy: Any, x: Any, gamma: Any, beta: Any, kept: Cache, found: Any
) -> list[Any]:
    """Return exact sums over a block of the columns that are undecided."""
    columns = dict(zip(wanted, (undecided for _, undecided in found), strict=True))
    cache = _filled(kept, x, gamma, beta)
    sums = exact_parts(dy, cache, [columns.get(1), columns.get(2)], threads_of_task())
    return [sums[i - 1] for i in wanted]


def _decided(found: Any, exact: Any, place: int) -> Any:
    values, undecided = found[place]
    return values if exact is None else decided(values, undecided, exact[place])


def _word(kept: Cache, x: Any, which: str) -> Any:
    return getattr(kept if x is None else kept._replace(x=x), which)


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
        name = f"{self.norm.kind}-norm-{which}-{tokenize(self.kept)}"
        every = tuple(range(self.x.ndim))
        # Of rounding="nearest" they are made again.
        x = (self.x, every) if self.norm.rounding == "nearest" else (None, None)
        kept = self.kept, every
        return of_blocks(name, _word, kept, x, (which, None), dtype=np.float64, ones=self.axis)

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
        lazy = [name for name in NAMES[1:] if is_lazy(getattr(self.norm, name))]
        nothing: dict[str, Any] = dict.fromkeys(lazy)
        norm = self.norm._replace(**nothing)
        return _whole, (norm, lazy, self.axis, self.backend, self.x.chunks)

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._rebuilt, ()

    def _rebuilt(self, graph: Any, *, rename: Any = None) -> LazyCache:
        def again(each: Any) -> Any:
            return each.__dask_postpersist__()[0](graph, rename=rename) if is_lazy(each) else each

        norm = self.norm._replace(gamma=again(self.norm.gamma), beta=again(self.norm.beta))
        return LazyCache(again(self.x), norm, self.axis, self.backend, again(self.kept))


def _whole(
    results: Any, norm: Norm, lazy: list[str], axes: tuple[int, ...], backend: str, chunks: Any
) -> Cache:
    """Return the cache of the whole array, given the computed blocks of a lazy one."""
    x, kept, *others = results
    norm = norm._replace(**dict(zip(lazy, map(finalize, others), strict=True)))
    places, found = list(slices_from_chunks(chunks)), list(flatten(kept, container=list))
    shape = [sum(sizes) for sizes in chunks]
    of_rows = [1 if i in axes else length for i, length in enumerate(shape)]
    numbers = np.arange(math.prod(of_rows)).reshape(of_rows)
    words: list[Any] = []
    for each in zip(*(cache.statistics for cache in found), strict=True):
        some = next((word for word in each if word is not None), None)
        # What some rows need no word for is 0.
        whole: Any = None
        if some is not None:
            whole = np.zeros((numbers.size, *some.shape[1:]), some.dtype)
        for place, word in zip(places, each, strict=True):
            if word is not None:
                whole[numbers[place].ravel()] = word
        words.append(whole)
    where = None
    if found[0].where is not None:
        wide = any(cache.where.shape[i] > 1 for cache in found for i in axes)
        where = np.zeros(shape if wide else of_rows, bool)
        for place, cache in zip(places, found, strict=True):
            where[place] = cache.where
    return Cache(finalize(x), norm, axes, Statistics._make(words), backend, where)
