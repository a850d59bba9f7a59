"""
Make any call plain: a backend gets its rows as they lie or, if they are not plain, as copies of blocks.

Rows without an element that counts are left out. This module also rounds sums that are made in parts or added to old
values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenorm import memory
from stablenorm.backends import implementation, run
from stablenorm.call import WRITTEN, Backward, Forward, change, part
from stablenorm.functional.layout import Layout
from stablenorm.reference.blocks import add
from stablenorm.reference.exact import Root
from stablenorm.reference.partial import NOTHING, ExactSum, as_partial, round_sum, rounded
from stablenorm.types import Array, Statistics, joined

# Bytes of an array that are copied at a time, or the rows of one tile or sample if these are more: they fit a cache.
# Channels first, (8, 256, 56, 56): 28 ms; by 4 MiB 37, by 64 MiB 45, and two copies around the plain call 52.
BLOCK = 2 << 20


class Part(NamedTuple):
    """Rows for one call of a backend."""

    rows: slice | Array
    # Whether only some of their elements count.
    masked: bool = False
    # The rows of the whole call, which decide the tiles.
    plan_rows: int = 0
    # The samples of these rows; None if the call has one.
    samples: slice | None = None


def run_plain(operation: str, backend: str, call: Any, layout: Layout, old: Any = None) -> Any:
    """
    Do a call whose arrays have the shape of x; return the statistics of a forward, in the order of the layout.

    Gamma, beta and their gradients are those of the layout. `where` is of the shape of x, or has length 1 along the
    normalized axes. `old` are the values that dgamma and dbeta are added to.
    """
    count, samples = layout.shape[0], layout.samples
    if call.where is None or operation not in ("forward", "backward"):
        seen = _view(call, layout)
        if seen is not None and old is None:
            return run(operation, backend, seen._replace(samples=samples) if samples > 1 else seen)
        cut = None if samples == 1 else slice(0, samples)
        every = Part(slice(0, count), call.where is not None, samples=cut)
        blocks = [every]
        if seen is None:
            blocks = list(_blocks(operation, backend, call, layout, every))
        found = _run_parts(operation, backend, call, layout, blocks, old)
        return joined(found) if isinstance(call, Forward) and call.keep else None
    axes = layout.order[layout.leading :]
    whole, some = call.where.all(axis=axes, keepdims=True), call.where.any(axis=axes, keepdims=True)
    rows_of = [each.transpose(layout.order).reshape(samples, -1) for each in (whole, some & ~whole)]
    words: list[tuple[Any, Any]] = []
    for i, each in enumerate(zip(*rows_of, strict=True)):
        first = i * count // samples
        sets = [Part(first + np.flatnonzero(rows), k == 1) for k, rows in enumerate(each)]
        sets = [one for one in sets if len(one.rows)] or sets[:1]  # type: ignore[arg-type]
        blocks = [block for one in sets for block in _blocks(operation, backend, call, layout, one)]
        one_call, one_old = call, old
        if samples > 1:
            one_call, one_old = _sample(call, i), old and [part(each, i) for each in old]
        found = _run_parts(operation, backend, one_call, layout, blocks, one_old)
        words += [(block.rows, kept) for block, kept in zip(blocks, found, strict=False)]
    _fill_others(call, layout, np.flatnonzero(~some.transpose(layout.order).reshape(-1)))
    return _spread(words, count) if isinstance(call, Forward) and call.keep else None


# ---- rows, as they lie or as copies ----


def _view(call: Any, layout: Layout) -> Any:
    """Return the call with its arrays seen as rows; None if an array has no such view, or is overwritten too early."""
    if _reads_again(call):
        return None
    is_plain = True

    def view(array: Array) -> Array | None:
        nonlocal is_plain
        found = layout.view(array) if is_plain else None
        is_plain = is_plain and found is not None
        return found

    seen = change(call, view, view, slice(None))
    return seen if is_plain else None


def _reads_again(call: Any) -> bool:
    """Tell whether a result is written over an array that uncertified rows or sums may need again."""
    is_backward = isinstance(call, Backward)
    if call.norm.rounding != "nearest" and not (is_backward and call.x.dtype == np.float64):
        return False
    pair = (call.dy, call.dx) if is_backward else (call.x, call.y)
    return pair[1] is not None and np.may_share_memory(*pair)


def _blocks(operation: str, backend: str, call: Any, layout: Layout, whole: Part) -> Iterator[Part]:
    """Cut rows into blocks: each of whole tiles or samples, so that no bit depends on the blocks."""
    rows, masked, _, samples = whole
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    if isinstance(samples, slice):
        unit = count // samples.stop
    else:
        is_nearest = call.norm.rounding == "nearest"
        unit = implementation("tile_rows", backend)(count, layout.shape[1], is_nearest)
    step = max(BLOCK // max(unit * layout.shape[1] * call.x.itemsize, 1), 1) * max(unit, 1)
    if operation == "double_backward" or step >= count:
        yield Part(rows, masked, count, samples)
        return
    for start in range(0, count, step):
        stop = min(start + step, count)
        some = slice(start, stop) if isinstance(rows, slice) else rows[start:stop]
        own = slice(start // unit, stop // unit) if isinstance(samples, slice) else None
        yield Part(some, masked, count, own)


def _run_part(operation: str, backend: str, call: Any, layout: Layout, some: Part) -> Any:
    """Do some rows: plain arrays as they lie, others as copies."""
    rows, copied, written = some.rows, _reads_again(call), {}

    def read(array: Array) -> Array:
        view = layout.view(array) if isinstance(rows, slice) and not copied else None
        return layout.read(array, rows) if view is None else view[rows]

    def write(array: Array) -> Array:
        view = layout.view(array) if isinstance(rows, slice) else None
        if view is not None:
            return view[rows]
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        written[id(array)] = array, (found := memory.empty((count, layout.shape[1]), array.dtype))
        return found

    where = call.where if some.masked else None
    seen = change(call._replace(where=where), read, write, rows)
    if isinstance(some.samples, slice):
        number = some.samples.stop - some.samples.start
        seen = _sample(seen, some.samples if number > 1 else some.samples.start)
        seen = seen._replace(samples=number)
    if isinstance(call, Backward):
        seen = seen._replace(plan_rows=some.plan_rows)
    kept = run(operation, backend, seen)
    for array, found in written.values():
        layout.write(array, rows, found)
    return kept


def _sample(call: Any, i: int | slice) -> Any:
    """Return a call with gamma, beta and their gradients of one sample, or of some."""
    if isinstance(call, Backward):
        call = call._replace(dgamma=part(call.dgamma, i), dbeta=part(call.dbeta, i))
    return call._replace(norm=call.norm.sample(i))


def _fill_others(call: Any, layout: Layout, rows: Array) -> None:
    """Write 0, or in dx dsum, rounded, into rows without an element that counts."""
    for name in WRITTEN.intersection(call._fields) - {"total"}:
        array = getattr(call, name)
        if array is None:
            continue
        found = np.broadcast_to(np.zeros((), array.dtype), (len(rows), layout.shape[1]))
        if getattr(call, "dsum", None) is not None:
            zeros, found = found, np.empty(found.shape, array.dtype)
            add(layout.read(call.dsum, rows), zeros, found)
        layout.write(array, rows, found)


def _spread(words: list[tuple[Any, Any]], count: int) -> Statistics:
    """Return the statistics of all rows, 0 for rows without an element that counts."""
    found = joined([kept for _, kept in words])
    numbers = np.concatenate([rows for rows, _ in words])
    whole: list[Any] = []
    for word in found:
        whole.append(None if word is None else np.zeros((count, *word.shape[1:]), word.dtype))
        if word is not None:
            whole[-1][numbers] = word
    return Statistics._make(whole)


# ---- sums over rows that are done in parts ----


def _run_parts(
    operation: str, backend: str, call: Any, layout: Layout, parts: list[Part], old: Any = None
) -> list[Any]:
    """Do all parts; return what each returns."""
    is_cut = len(parts) > 1 and parts[0].samples is None
    if isinstance(call, Backward) and call.sums == "rounded" and (is_cut or old is not None):
        if call.dx is None or not np.may_share_memory(call.dy, call.dx):
            _round_parts(backend, call, layout, parts, old)
            return []
        # The sums come first: dx is written over dy.
        _round_parts(backend, call._replace(dx=None), layout, parts, old)
        call = call._replace(dgamma=None, dbeta=None)
    return [_run_part(operation, backend, call, layout, each) for each in parts]


def _round_parts(backend: str, call: Backward, layout: Layout, parts: list[Part], old: Any) -> None:
    """Do the parts, which add their sums to the old values, and round once."""
    results = call.dgamma, call.dbeta
    olds: Any = old or (None, None)
    sums: list[Any] = [None, None]
    values, exact = sums.copy(), sums.copy()
    for k, result in enumerate(results):
        if result is not None:
            start = np.zeros(result.shape) if old is None else olds[k].astype(np.float64)
            sums[k] = as_partial(start, 0.0, 0.0)
    some = call._replace(dgamma=sums[0], dbeta=sums[1], sums="pairs")
    _run_parts("backward", backend, some, layout, parts)
    for k, result in enumerate(results):
        if result is not None:
            values[k], asked = rounded(sums[k], result.dtype)
            exact[k] = _exact_start(asked, olds[k])
    if any(each is not None and each.any() for each in exact):
        again = call._replace(dx=None, dgamma=exact[0], dbeta=exact[1], sums="exact")
        _run_parts("backward", backend, again, layout, parts)
    for k, result in enumerate(results):
        if result is not None:
            result[...] = decided(values[k], exact[k] != 0, exact[k])


def _exact_start(uncertified: Array, old: Array | None) -> Array:
    """Return objects: 0 for a certified column; for others the exact old value, to which sums are added."""
    start: Array = np.where(uncertified, NOTHING, 0)
    if old is not None:
        for place in zip(*np.nonzero(uncertified), strict=True):
            number = old[place].astype(np.float64)
            is_finite = np.isfinite(number)
            start[place] = ExactSum.of_numbers(number[None]) if is_finite else float(number)
    return start


def decided(values: Array, uncertified: Array, exact: Array) -> Array:
    """Return what `partial.rounded` did, uncertified columns by their exact sums over all rows."""
    result, roots = values.copy(), dict[int, Root]()
    result[uncertified] = [round_sum(each, values.dtype, roots) for each in exact[uncertified]]
    return result
