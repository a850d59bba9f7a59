"""
Make any call plain: a backend gets plain rows directly, and other rows as copies of blocks.

Rows without an element that counts are skipped; sums of several parts are rounded once, at the end.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from stablenorm import memory
from stablenorm.backends import implementation, run
from stablenorm.call import READ, SUMS, WRITTEN, Backward, Forward, change, of_sample
from stablenorm.functional.layout import Layout, Lead, is_plain, layout_of
from stablenorm.reference.blocks import add
from stablenorm.reference.doubledouble import as_partial, rounded
from stablenorm.reference.uncertified import ExactSum, with_exact
from stablenorm.types import Array, Shape, Statistics, joined

# Bytes of an array that are copied at a time, at least a tile or a sample: they fit a cache.
# Channels first, (8, 256, 56, 56): 28 ms; by 4 MiB 37, by 64 MiB 45, and two copies around the plain call 52.
BLOCK = 2 << 20


class Part(NamedTuple):
    """Rows for one call of a backend."""

    # The rows; None for all rows of the call, uncopied.
    rows: Any
    # Whether only some of their elements count.
    masked: bool
    # The rows of the whole call, or of each sample, which decide the tiles.
    plan_rows: int


def run_plain(backend: str, call: Any, axes: Shape, *leads: Lead) -> Statistics | None:
    """Do a call on arrays of the shape of x, cut by `leads`; return the statistics of a forward that keeps them."""
    layout = layout_of(call.x.shape, axes, *leads)
    numbers = layout.numbers(call.x.shape)
    gamma, beta = map(layout.parameter, call.norm[:2])
    sums = {n: total for n in SUMS if (total := getattr(call, n, None)) is not None}
    rooms = {n: np.ascontiguousarray(total).reshape(layout.of_samples) for n, total in sums.items()}
    call = change(call, layout.moved, layout.moved, numbers)
    call = call._replace(norm=call.norm._replace(gamma=gamma, beta=beta), **rooms)
    if layout.samples > 1:
        call = call._replace(samples=layout.samples)
    stats = _run_rows(backend, call, layout)
    for name, room in rooms.items():
        if not np.may_share_memory(room, sums[name]):
            sums[name][...] = room.reshape(sums[name].shape)
    return stats if stats is None or numbers is None else stats.of_rows(np.argsort(numbers))


def _run_rows(backend: str, call: Any, layout: Layout) -> Statistics | None:
    """Do a call whose arrays are in the order of a layout; return its statistics in that order."""
    count, samples = layout.shape[0], layout.samples
    unit = count // samples
    jobs, others = [(call, [Part(range(count), call.where is not None, unit)])], None
    if call.where is not None and isinstance(call, (Forward, Backward)):
        axes = tuple(range(-len(layout.last), 0))
        counts, most = call.where.sum(axis=axes), math.prod(call.where.shape[axes[0] :])
        jobs, others = [], (counts == 0).ravel().nonzero()[0]
        for i, own in enumerate(counts.reshape(samples, -1)):
            sets = [
                Part(i * unit + (rows := which.nonzero()[0]), masked, len(rows))
                for which, masked in ((own == most, False), ((own > 0) & (own < most), True))
            ]
            one_call = call if samples == 1 else of_sample(call, i)
            jobs.append((one_call, [one for one in sets if one.plan_rows] or sets[:1]))
    done: list[tuple[Part, Any]] = []
    for one_call, sets in jobs:
        parts = [block for one in sets for block in _blocks(backend, one_call, layout, one)]
        done += zip(parts, _run_parts(backend, one_call, layout, parts), strict=False)
    if others is not None:
        _fill(call, layout, others)
    return _joined(done, count) if isinstance(call, Forward) and call.keep else None


def _joined(done: list[tuple[Part, Statistics]], count: int) -> Statistics:
    """Return the statistics of all rows, 0 for rows without an element that counts."""
    if done[0][0].rows is None:
        return done[0][1]
    # A part without rows may be the reference's, which keeps no spread.
    done = [entry for entry in done if len(entry[0].rows)] or done[:1]
    rows = np.concatenate([part.rows for part, _ in done]).astype(int)
    words = joined([statistics for _, statistics in done])
    whole = Statistics._make(None if word is None else np.zeros(count) for word in words)
    for target, word in zip(whole, words, strict=True):
        if word is not None:
            target[rows] = word
    return whole


def _fill(call: Any, layout: Layout, rows: Array) -> None:
    """Write 0, or in dx dsum, rounded, into rows without an element that counts."""
    result, dsum = (call.y, None) if isinstance(call, Forward) else (call.dx, call.dsum)
    if result is not None and len(rows):
        values = np.broadcast_to(np.zeros((), result.dtype), (len(rows), layout.shape[1]))
        if dsum is not None:
            values = values.copy()
            add(layout.read(dsum, rows), values, values)
        layout.write(result, rows, values)


# ---- rows, in place or as copies ----


def _index(rows: range | Array) -> slice | Array:
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


def _reads_again(call: Any) -> bool:
    """Tell whether a result is written over an array that uncertified rows or sums may need again."""
    is_backward = isinstance(call, Backward)
    if call.norm.rounding != "nearest" and not (is_backward and call.x.dtype == np.float64):
        return False
    pair = (call.dy, call.dx) if is_backward else (call.x, call.y)
    return pair[1] is not None and np.may_share_memory(*pair)


def _blocks(backend: str, call: Any, layout: Layout, whole: Part) -> list[Part]:
    """Cut rows that are not plain into blocks of whole tiles or samples: no bit depends on them."""
    rows, n = whole.rows, layout.shape[1]
    fields = zip(call._fields, call, strict=True)
    like_x = (v for n, v in fields if v is not None and (n in READ or n in WRITTEN))
    if isinstance(rows, range) and all(map(is_plain, like_x)) and not _reads_again(call):
        return [whole._replace(rows=None)]
    if not isinstance(call, (Forward, Backward)):
        return [whole]
    unit = whole.plan_rows
    if call.samples == 1:
        unit = implementation("tile_rows", backend)(len(rows), n, call.norm.rounding == "nearest")
    unit = max(unit, 1)
    step = max(BLOCK // (unit * n * call.x.itemsize), 1) * unit
    starts = range(0, max(len(rows), 1), step)
    return [whole._replace(rows=rows[start : start + step]) for start in starts]


def _run_part(backend: str, call: Any, layout: Layout, part: Part) -> Any:
    """Do some rows: plain arrays directly, others as copies."""
    if part.rows is None:
        return run(backend, call)
    rows, copied, written = part.rows, _reads_again(call), list[tuple[Array, Array]]()
    is_range, index = isinstance(rows, range), _index(rows)

    def read(array: Array) -> Array:
        as_is = is_range and is_plain(array) and not copied
        return array[index] if as_is else layout.read(array, rows)

    def write(array: Array) -> Array:
        if is_range and is_plain(array):
            return array[index]
        written.append((array, memory.empty((len(rows), layout.shape[1]), array.dtype)))
        return written[-1][1]

    if call.where is not None and not part.masked:
        call = call._replace(where=None)
    seen = change(call, read, write, index)
    if is_range and layout.samples > 1:
        first, stop = rows.start // part.plan_rows, rows.stop // part.plan_rows
        seen = of_sample(seen, first if stop - first == 1 else slice(first, stop))
        seen = seen._replace(samples=stop - first)
    if isinstance(call, Backward) and part.plan_rows != len(rows):
        seen = seen._replace(plan_rows=part.plan_rows)
    statistics = run(backend, seen)
    for array, values in written:
        layout.write(array, rows, values)
    return statistics


# ---- sums over several parts ----


def _run_parts(backend: str, call: Any, layout: Layout, parts: list[Part]) -> list[Any]:
    """Do all parts; return what each returns."""
    sums = call.sums if isinstance(call, Backward) else ""
    if sums == "added" or (sums == "rounded" and len(parts) > 1 and call.samples == 1):
        is_over = call.dx is not None and np.may_share_memory(call.dy, call.dx)
        _round_parts(backend, call._replace(dx=None) if is_over else call, layout, parts)
        if not is_over:
            return []
        # The sums come first: dx is written over dy.
        call = call._replace(dgamma=None, dbeta=None, sums="rounded")
    return [_run_part(backend, call, layout, part) for part in parts]


def _round_parts(backend: str, call: Backward, layout: Layout, parts: list[Part]) -> None:
    """Do the parts, merge their sums, with old values if they are to be added, and round once."""
    results = {n: total for n in SUMS if (total := getattr(call, n)) is not None}
    is_added = call.sums == "added"
    olds = {n: v.astype(float) if is_added else np.zeros(v.shape) for n, v in results.items()}
    sums: Any = {name: as_partial(old, 0.0, 0.0) for name, old in olds.items()}
    _run_parts(backend, call._replace(sums="pairs", **sums), layout, parts)
    exact: Any = {}
    for name, result in results.items():
        result[...], uncertified = rounded(sums[name], result.dtype)
        exact[name] = np.zeros(result.shape, object)
        for place in zip(*uncertified.nonzero(), strict=True):
            exact[name][place] = ExactSum.of_numbers(olds[name][place][None])
    if any(columns.any() for columns in exact.values()):
        _run_parts(backend, call._replace(dx=None, sums="exact", **exact), layout, parts)
    for name, result in results.items():
        result[...] = with_exact(result, exact[name])
