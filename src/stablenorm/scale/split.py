"""
The public functions on Dask arrays whose rows are cut: `reference.moments` as a graph.

Of a row, blocks tell one another its moments, not its elements. Only the rows that rounding="nearest" leaves
undecided are put together, and are done anew as a whole. The blocks of a group have the same rows, and its
place is that of the first of them. A whole row has its columns in the order of the blocks: to a sum that
is exact, order is nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from operator import getitem
from typing import Any

import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array import Array
from dask.array.core import finalize
from dask.base import tokenize

from stablenorm import reference
from stablenorm.functional import calls
from stablenorm.reference import exact, moments
from stablenorm.reference.partial import PARTIAL
from stablenorm.scale import lazy
from stablenorm.scale.blocks import Block, array_of, places
from stablenorm.threads import alone
from stablenorm.types import Cache, Gradients, Norm, Statistics


class SplitCache(lazy.LazyCache):
    """A `LazyCache` of rows that are cut: `kept` has a block for each group, a `moments.Whole`."""

    def _of_rows(self, which: str) -> Array:
        graph = _Graph(f"{self.norm.kind}-norm-{which}", self.x, self.axis, tokenize(self.kept))
        for at in graph.groups:
            shape = [sizes[i] for sizes, i in zip(self.kept.chunks, at, strict=True)]
            graph.add("", at, _statistics, which, tuple(shape), TaskRef((self.kept.name, *at)))
        return graph.array("", self.kept, chunks=self.kept.chunks, dtype=np.float64)

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        _, (norm, are_lazy, axes, backend, _) = super().__dask_postcompute__()
        return _whole, (norm, are_lazy, axes, backend)


class _Graph:
    """Tasks for the blocks of x, under names that begin alike."""

    def __init__(self, first: str, x: Array, axes: tuple[int, ...], token: str) -> None:
        self.first, self.x, self.axes, self.token = first, x, axes, token
        self.tasks: dict[Any, Any] = {}
        self.groups: dict[Block, list[Block]] = {}
        for at in places(x):
            self.groups.setdefault(self.group(at), []).append(at)

    def group(self, at: Block) -> Block:
        """Return the place of the group of a block."""
        return tuple(0 if axis in self.axes else i for axis, i in enumerate(at))

    def columns(self, group: Block) -> dict[Block, slice]:
        """Return where the columns of each block of a group are in a whole row."""
        blocks = self.groups[group]
        widths = [math.prod(self.x.chunks[axis][at[axis]] for axis in self.axes) for at in blocks]
        ends = itertools.accumulate(widths, initial=0)
        return {at: slice(*both) for at, both in zip(blocks, itertools.pairwise(ends), strict=True)}

    def name(self, what: str) -> str:
        """Return the name of tasks."""
        return "-".join(part for part in (self.first, what, self.token) if part)

    def add(self, what: str, at: Block, *task: Any) -> Any:
        """Add a task, and return what refers to it."""
        key: Any = self.name(what), *at
        self.tasks[key] = Task(key, *task)
        return TaskRef(key)

    def each(self, what: str, task: Callable[[Block], tuple[Any, ...]]) -> dict[Block, Any]:
        """Add a task for each block."""
        return {at: self.add(what, at, *task(at)) for at in places(self.x)}

    def merge(self, what: str, task: Any, parts: dict[Block, Any], *first: Any) -> dict[Block, Any]:
        """Add a task for each group, which reads a part of each of its blocks."""
        return {
            group: self.add(what, group, task, *first, *(parts[at] for at in blocks))
            for group, blocks in self.groups.items()
        }

    def array(self, what: str, *needed: Any, chunks: Any, dtype: Any = object) -> Array:
        """Return the array of the tasks of that name."""
        return array_of(self.name(what), self.tasks, *needed, chunks=chunks, dtype=dtype)

    def decided(self, what: str, made: dict[Block, Any], call: Any, read: Any) -> None:
        """
        Add tasks that decide what `made` has first, of the rows that it has last.

        `read` names gamma and beta of a block, x, and for dx dy.
        """
        is_open = self.each(f"{what}-open", lambda at: (getitem, made[at], -1))
        rows = self.merge(f"{what}-rows", _rows_open, is_open)
        lent = self.each(f"{what}-lent", lambda at: (_lent, call, rows[self.group(at)], *read(at)))
        solved = self.merge(f"{what}-solved", _solved, lent, call)
        for group in self.groups:
            for at, columns in self.columns(group).items():
                found = call, made[at], rows[group], solved[group], columns
                self.add(what, at, _patched, *found)


def forward(
    x: Array, norm: Norm, call: lazy.Call, needed: list[Any], token: str
) -> tuple[Array, SplitCache | None]:
    """Do what `lazy.forward` does; `needed` are x, gamma and beta as operands."""
    kind = f"{norm.kind}-norm-forward" if call.keep else f"{norm.kind}-norm"
    graph = _Graph(kind, x, call.axes, token)
    parts = graph.each("moments", lambda at: (_moments, call, *lazy.read(needed, at)))
    of_x = graph.merge("cache", _of_x, parts, norm.eps)
    chunks = tuple((1,) if i in call.axes else sizes for i, sizes in enumerate(x.chunks))
    kept = graph.array("cache", *needed, chunks=chunks)
    graph = _Graph(kind, x, call.axes, token)
    nearest = norm.rounding == "nearest"
    made = graph.each(
        "made" if nearest else "y",
        lambda at: (_forward, call, *lazy.read(needed, at), of_x[graph.group(at)]),
    )
    if nearest:
        x_, *parameters = needed
        graph.decided("y", made, call, lambda at: lazy.read([*parameters, x_], at))
    y = graph.array("y", *needed, kept, chunks=x.chunks, dtype=x.dtype)
    return y, SplitCache(x, norm, call.axes, call.backend, kept) if call.keep else None


def backward(
    x: Array, cache: SplitCache, asked: tuple[str, ...], needed: list[Any], first: str, token: str
) -> tuple[Array, Array | None]:
    """Return blocks as `lazy.backward` makes them, and dx; `needed` are dy, x, gamma and beta."""
    call = lazy.Call(cache.norm[2:], cache.axis, cache.backend, True)
    graph = _Graph(first, x, cache.axis, token)
    of_x = {group: TaskRef((cache.kept.name, *group)) for group in graph.groups}

    def block(at: Block) -> tuple[Any, ...]:
        return call, *lazy.read(needed, at), of_x[graph.group(at)]

    of_g: dict[Block, Any] = {}
    if "x" in asked:
        parts = graph.each("moments", lambda at: (_moments_of_g, *block(at)))
        of_g = graph.merge("merged", _of_g, parts)
    made = graph.each("", lambda at: (_backward, *block(at), of_g.get(graph.group(at)), asked))
    blocks = graph.array("", *needed, cache.kept, chunks=x.chunks)
    if "x" not in asked:
        return blocks, None
    graph = _Graph(first, x, cache.axis, token)
    if cache.norm.rounding == "nearest":
        dy, x_, *parameters = needed
        graph.decided("dx", made, call, lambda at: lazy.read([*parameters, x_, dy], at))
    else:
        graph.each("dx", lambda at: (getitem, made[at], 0))
    return blocks, graph.array("dx", *needed, blocks, chunks=x.chunks, dtype=x.dtype)


def exact_tasks(
    cache: SplitCache, needed: list[Any], indices: tuple[int, ...], tasks: dict[Any, Any],
    found: dict[Block, Any], group: Any, first: str, token: str,
) -> Callable[[Block], tuple[Any, ...]]:  # fmt: skip
    """
    Return the task of each block for exact sums of the columns that `found` leaves open; add others.

    Whole rows of x are put together only if there is such a column.
    """
    dy, x, *_ = needed
    call = lazy.Call(cache.norm[2:], cache.axis, cache.backend, True)
    graph = _Graph(first, cache.x, cache.axis, token)
    graph.tasks = tasks
    is_open = graph.add("open", (), _any_open, indices, *found.values())
    lent = graph.each("lent", lambda at: (_lent, call, is_open, None, None, x.at(at)))
    rows = graph.merge("rows", _exact_rows, lent, call)
    return lambda at: (
        _exact, call, indices, found[group(at)], dy.at(at), x.at(at), rows[graph.group(at)],
    )  # fmt: skip


# ---- tasks ----


def _matrix(block: Any, axes: tuple[int, ...]) -> Any:
    """Return a block as (rows, columns)."""
    moved = np.moveaxis(block, axes, range(-len(axes), 0))
    lead = moved.ndim - len(axes)
    return moved.reshape(math.prod(moved.shape[:lead]), math.prod(moved.shape[lead:]))


def _block(matrix: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    """Return what `_matrix` was given."""
    lead = [length for i, length in enumerate(shape) if i not in axes]
    moved = matrix.reshape(*lead, *(shape[i] for i in axes))
    return np.moveaxis(moved, range(-len(axes), 0), axes)


def _moments(call: lazy.Call, x: Any, gamma: Any, beta: Any) -> moments.Moments:
    return moments.moments(_matrix(x, call.axes), Norm(gamma, beta, *call.norm))


def _of_x(eps: float, *parts: moments.Moments) -> moments.Whole:
    return moments.of_x(moments.merged(parts), eps)


def _forward(call: lazy.Call, x: Any, gamma: Any, beta: Any, of_x: moments.Whole) -> Any:
    """Return y of a block; with rounding="nearest", which of its rows are undecided as well."""
    matrix, norm = _matrix(x, call.axes), Norm(gamma, beta, *call.norm)
    y = np.empty(matrix.shape, x.dtype)
    is_open = moments.forward(matrix, norm, of_x, y)
    y = _block(y, x.shape, call.axes)
    return (y, is_open) if norm.rounding == "nearest" else y


def _moments_of_g(
    call: lazy.Call, dy: Any, x: Any, gamma: Any, beta: Any, of_x: moments.Whole
) -> moments.Moments:
    norm = Norm(gamma, beta, *call.norm)
    return moments.moments_of_g(_matrix(dy, call.axes), _matrix(x, call.axes), norm, of_x)


def _of_g(*parts: moments.Moments) -> moments.Whole:
    return moments.of_g(moments.merged(parts))


def _backward(
    call: lazy.Call, dy: Any, x: Any, gamma: Any, beta: Any, of_x: moments.Whole,
    of_g: moments.Whole | None, asked: tuple[str, ...],
) -> Any:  # fmt: skip
    """Return dx, dgamma and dbeta of a block as `lazy` has them, and which rows of dx are undecided."""
    norm = Norm(gamma, beta, *call.norm)
    given = _matrix(dy, call.axes), _matrix(x, call.axes), norm
    dx = dgamma = dbeta = is_open = None
    if of_g is not None:
        dx = np.empty(given[1].shape, x.dtype)
        is_open = moments.backward(*given, of_x, of_g, dx)
        dx = _block(dx, x.shape, call.axes)
    if gamma is not None and "gamma" in asked:
        dgamma = moments.dgamma(*given, of_x).reshape(gamma.shape)
    if beta is not None and "beta" in asked:
        dbeta = np.zeros(beta.shape, PARTIAL)
        if x.size:
            none = Statistics(None, None, of_x.k)
            reference.backward(*given, none, Gradients(None, None, dbeta))
    return dx, dgamma, dbeta, is_open


def _statistics(which: str, shape: tuple[int, ...], of_x: moments.Whole) -> Any:
    mean, rstd = moments.statistics(of_x)
    return (mean if which == "mean" else rstd).reshape(shape)


def _whole(results: Any, norm: Norm, are_lazy: Any, axes: tuple[int, ...], backend: str) -> Cache:
    """Return the cache of the whole array, from a call on it: its statistics have the same digits."""
    x, _, *others = results
    computed = iter(others)
    pairs = zip(are_lazy, norm[:2], strict=True)
    gamma, beta = (finalize(next(computed)) if one else given for one, given in pairs)
    norm = norm._replace(gamma=gamma, beta=beta)
    cache: Cache = calls.forward(finalize(x), norm, axes, None, backend)[1]
    return cache


# ---- tasks of what is undecided ----


def _rows_open(*is_open: Any) -> Any:
    return np.flatnonzero(np.logical_or.reduce(is_open))


def _lent(call: lazy.Call, rows: Any, gamma: Any, beta: Any, *blocks: Any) -> Any:
    """Return gamma and beta of a block in a line, and these rows of x and dy."""
    lines = [None if each is None else each.reshape(-1) for each in (gamma, beta)]
    return *lines, *(_matrix(block, call.axes)[rows] for block in blocks)


@alone()
def _solved(call: lazy.Call, *lent: Any) -> Any:
    """Return y, or dx, of whole rows, if there are any."""
    columns: list[Any] = [
        None if c[0] is None else np.concatenate(c, -1) for c in zip(*lent, strict=True)
    ]
    gamma, beta, x, *dy = columns
    if not len(x):
        return None
    norm = Norm(gamma, beta, *call.norm)
    y, cache = calls.forward(x, norm, 1, None, call.backend)
    if not dy:
        return y
    return calls.backward(dy[0], cache, "x", None, kind=norm.kind).dx


def _patched(call: lazy.Call, made: Any, rows: Any, solved: Any, columns: slice) -> Any:
    if solved is None:
        return made[0]
    matrix = _matrix(made[0], call.axes).copy()
    matrix[rows] = solved[:, columns]
    return _block(matrix, made[0].shape, call.axes)


def _any_open(indices: tuple[int, ...], *found: Any) -> slice:
    """Return all rows if dgamma, which comes first, has an undecided column, else none."""
    return slice(None if indices[0] == 1 and any(each[1][0].any() for each in found) else 0)


def _exact_rows(call: lazy.Call, *lent: Any) -> Any:
    """Return what exact sums need of whole rows, as far as these are lent."""
    rows, norm = np.concatenate([x for _, _, x in lent], 1), Norm(None, None, *call.norm)
    return [exact.Row(row.astype(np.float64), norm, keep=False) for row in rows]


def _exact(
    call: lazy.Call, indices: tuple[int, ...], found: Any, dy: Any, x: Any, rows: Any
) -> Any:
    """Return exact sums over a block, as `lazy` has them."""
    undecided = found[1]
    if not undecided.any():
        return None
    totals = undecided.astype(object)
    dy, x = (_matrix(each, call.axes).T for each in (dy, x))
    for i, total, columns in zip(indices, totals, undecided, strict=True):
        for j in np.flatnonzero(columns):
            terms, factors = dy[j].astype(np.float64), x[j].astype(np.float64)
            of = exact.ExactSum
            total.flat[j] = of.of_products(terms, factors, rows) if i == 1 else of.of_numbers(terms)
    return totals
