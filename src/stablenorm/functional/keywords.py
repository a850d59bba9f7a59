"""
Keywords, each a composition of plain calls that one could write oneself.

A *part* of a call is a plain call: some rows, the columns of them that count, one gamma and one beta. `parts_of` finds the
parts of a call with a mask, or with gamma and beta of leading axes; `forward` and `backward` do them one after the other. A
call without either is a plain one.
All examples are over the last axis, and equal bit by bit.

>>> import numpy as np
>>> from stablenorm import layer_norm_backward, layer_norm_forward
>>> rng = np.random.default_rng(0)
>>> x, dy = rng.standard_normal((2, 4, 5, 8), np.float32)
>>> gamma, beta = rng.standard_normal((2, 8), np.float32)

gamma_offset is added to gamma in float64; the gradient of gamma has gamma's own dtype:

>>> y, cache = layer_norm_forward(x, gamma, beta, gamma_offset=1.0)
>>> other, wide = layer_norm_forward(x, gamma.astype(np.float64) + 1.0, beta)
>>> np.array_equal(y, other)
True
>>> dgamma = layer_norm_backward(dy, wide, out=(None, np.empty(8, np.float32), None)).dgamma
>>> np.array_equal(layer_norm_backward(dy, cache).dgamma, dgamma)
True

Gamma and beta with leading axes are a loop over samples; so is sum_axes, the gradients of each sample:

>>> scales = rng.standard_normal((4, 1, 8), np.float32)
>>> y, cache = layer_norm_forward(x, scales, beta)
>>> parts = [layer_norm_forward(x[i], scales[i, 0], beta) for i in range(4)]
>>> np.array_equal(y, [part for part, _ in parts])
True
>>> dgamma = [layer_norm_backward(dy[i], part).dgamma for i, (_, part) in enumerate(parts)]
>>> np.array_equal(layer_norm_backward(dy, cache).dgamma[:, 0], dgamma)
True
>>> _, cache = layer_norm_forward(x, gamma, beta)
>>> of_samples = layer_norm_forward(x, np.broadcast_to(gamma, (4, 1, 8)), beta)[1]
>>> dgamma = layer_norm_backward(dy, of_samples).dgamma[:, 0]
>>> np.array_equal(layer_norm_backward(dy, cache, sum_axes=1).dgamma, dgamma)
True

A mask of whole rows gathers those that count:

>>> mask = rng.random((4, 5)) < 0.5
>>> y, of_mask = layer_norm_forward(x, gamma, beta, where=mask[..., None])
>>> some, few = layer_norm_forward(x[mask], gamma, beta)
>>> np.array_equal(y[mask], some), y[~mask].any()
(True, np.False_)
>>> gradients, of_few = layer_norm_backward(dy, of_mask), layer_norm_backward(dy[mask], few)
>>> np.array_equal(gradients.dx[mask], of_few.dx), np.array_equal(gradients[1], of_few[1])
(True, True)

A mask within rows gathers rows of the same mask, and of them the columns that count; sums over groups are added in float64
and rounded once:

>>> columns = np.array([0, 2, 3, 7])
>>> y, _ = layer_norm_forward(x, gamma, beta, where=np.isin(np.arange(8), columns))
>>> some, _ = layer_norm_forward(x[..., columns], gamma[columns], beta[columns])
>>> np.array_equal(y[..., columns], some)
True

With accumulate=True, sums in float64 are added to old values, and rounded:

>>> out = None, None, beta.copy()
>>> dbeta = layer_norm_backward(dy, cache, wrt="beta", out=out, accumulate=True).dbeta
>>> wide = layer_norm_backward(dy, cache, wrt="beta", out=(None, None, np.empty(8))).dbeta
>>> np.array_equal(dbeta, (beta + wide).astype(np.float32))
True
"""

from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import rows as rows_of
from stablenorm.backends import arrays_of, module_of
from stablenorm.call import Backward, Forward
from stablenorm.functional.layout import Layout, layout_of
from stablenorm.records import Array, Cache, Gradients, Norm, Statistics, new_norm
from stablenorm.reference import add, uncertified
from stablenorm.reference.equations import round_to, sum_rows
from stablenorm.reference.exact import Number
from stablenorm.reference.sums import PARTIAL, merged

# The faster constructor of a NamedTuple.
_new = tuple.__new__


class Part(NamedTuple):
    """Rows with one gamma, one beta and one mask."""

    # The index of the elements that count in (rows, n); a slice gives a view.
    at: Any
    rows: Any
    # None: all.
    columns: Any
    # Its first row, which tells its gamma, beta and sums.
    first: int


def parts_of(mask: Array | None, numbers: Array, others: Any = 0) -> list[Part]:
    """Return the parts of rows with a mask and numbers of gamma and of beta, at least one."""
    keys = numbers * (len(numbers) + 1) + others
    if mask is not None:
        known: dict[Any, int] = {}
        # Rows with the same numbers and equal bits have one number.
        pairs = zip(keys.tolist(), map(bytes, np.packbits(mask, 1)), strict=True)
        keys = np.array([known.setdefault(pair, len(known)) for pair in pairs])
    order = keys.argsort(kind="stable")
    ordered, parts, start = keys[order], list[Part](), 0
    ends = (ordered[1:] != ordered[:-1]).nonzero()[0] + 1
    for stop in (*ends.tolist(), len(order)):
        rows: Any = order[start:stop]
        at, first, columns, start = rows, int(rows[0]), None, stop
        if mask is not None and not np.logical_and.reduce(mask[first]):
            columns = mask[first].nonzero()[0]
            at = rows[:, None], columns
        elif rows[-1] - first == len(rows) - 1:
            at = rows = slice(first, first + len(rows))
        if columns is None or len(columns):
            parts.append(_new(Part, (at, rows, columns, first)))
    return parts or [Part(slice(0), slice(0), None, 0)]


def _prepared(backend: str, norm: Norm) -> Norm:
    """Return `norm` with gamma_offset added to gamma; gamma and beta are in C order."""
    gamma, beta, contiguous = norm.gamma, norm.beta, arrays_of(backend).contiguous
    if norm.gamma_offset and gamma is not None:
        gamma = gamma.astype(np.float64) + norm.gamma_offset
    gamma = gamma if gamma is None else contiguous(gamma)
    beta = beta if beta is None else contiguous(beta)
    return new_norm((gamma, beta, norm.eps, norm.kind, 0.0, norm.rounding))


def _flat(norm: Norm, n: int) -> Norm | None:
    """Return `norm` with vectors; None unless gamma and beta are one for all rows."""
    own: list[Any] = []
    for values in (norm.gamma, norm.beta):
        if values is not None and values.size != n:
            return None
        own.append(values if values is None else values.reshape(-1))
    return new_norm((own[0], own[1], norm.eps, norm.kind, 0.0, norm.rounding))


def _norm_of(part: Part, norm: Norm, n: int, *numbers: Array) -> Norm:
    """Return the norm of a part, given the numbers of gamma, and of beta."""
    own: list[Any] = [None, None]
    for k, of_rows in enumerate(numbers):
        values: Any = norm[k]
        if values is not None:
            row = values.reshape(-1, n)[of_rows[part.first]]
            own[k] = row if part.columns is None else row[part.columns]
    return new_norm((own[0], own[1], norm.eps, norm.kind, 0.0, norm.rounding))


def _room(part: Part, results: Any) -> Any:
    """Return the place of a part among results: a view, or new memory."""
    if results is None or isinstance(part.at, slice):
        return results if results is None else results[part.at]
    return np.empty(results[part.at].shape, results.dtype)


def forward(backend: str, call: Forward, layout: Layout, where: Array | None) -> Any:
    """Do a forward of rows whose gamma and beta are as the user gave them; return the statistics."""
    x, norm, y, keep, residual, total, threads = call
    do, mask, n = module_of(backend).forward, layout.mask(where), layout.shape[1]
    norm = _prepared(backend, norm)
    if not x.size:
        norm = norm._replace(gamma=None, beta=None)
    if mask is None and (one := _flat(norm, n)):
        return do(_new(Forward, (x, one, y, keep, residual, total, threads)))
    if mask is not None:
        y[...] = 0
    if residual is not None:
        add(x, residual, total)
        x = total
    numbers, done = (layout.numbers(norm.gamma), layout.numbers(norm.beta)), list[Any]()
    parts = parts_of(mask, *numbers)
    for part in parts:
        own, of_y = _norm_of(part, norm, n, *numbers), _room(part, y)
        done.append(do(_new(Forward, (x[part.at], own, of_y, keep, None, None, threads))))
        if not isinstance(part.at, slice):
            y[part.at] = of_y
    return _joined(parts, done, len(x)) if keep else None


def _joined(parts: list[Part], done: list[Statistics], count: int) -> Statistics:
    """Return the statistics of all rows, 0 for rows of no part."""
    words = []
    for of_parts in zip(*done, strict=True):
        whole = None if {*map(type, of_parts)} == {type(None)} else np.zeros(count)
        for part, word in zip(parts, of_parts, strict=True):
            if whole is not None:
                # Rows without digits that others have go to integers.
                whole[part.rows] = np.nan if word is None else word
        words.append(whole)
    return _new(Statistics, words)


def backward(backend: str, call: Backward, layout: Layout, where: Array | None) -> None:
    """Do a backward of rows whose gamma, beta and sums are as the user gave them."""
    norm, mask, n = _prepared(backend, call.norm), layout.mask(where), layout.shape[1]
    sums: list[Any] = []
    for total in (call.dgamma, call.dbeta):
        sums.append(total if total is None else total.reshape(-1, n))
    if mask is None and (one := _flat(norm, n)):
        flat = [v if v is None else v[0] for v in sums]
        fields = call.dy, call.x, one, call.statistics, call.dx, *flat, call.dsum, call.threads
        module_of(backend).backward(_new(Backward, fields))
        return
    of_gamma, of_beta = layout.numbers(norm.gamma), layout.numbers(norm.beta)
    if sums[1] is not None and np.logical_or.reduce(of_gamma != of_beta):
        # dbeta alone needs no gamma.
        alone = norm._replace(gamma=None)
        _one_pass(backend, call._replace(dx=None), alone, [None, sums[1]], mask, of_beta)
        sums[1] = None
    _one_pass(backend, call, norm, sums, mask, of_gamma)


def _one_pass(
    backend: str, call: Backward, norm: Norm, sums: list[Any], mask: Any, numbers: Array
) -> None:
    """Write dx, and sums of one number for each row."""
    do, n, dx = module_of(backend).backward, call.x.shape[1], call.dx
    inside = mask is not None and mask.shape[1] > 1
    if mask is not None:
        for result in (dx, *sums):
            if result is not None:
                result[...] = np.zeros((), result.dtype)
        if dx is not None and call.dsum is not None:
            dx[...] = call.dsum
    # By sample, the sums of its parts, which are rounded once.
    groups: list[dict[int, list[Array]]] = [{}, {}]
    for part in parts_of(mask, numbers):
        own, of_dx, totals = _norm_of(part, norm, n, numbers), _room(part, dx), list[Any]()
        sample = int(numbers[part.first])
        for total in sums:
            if total is not None and inside:
                kind = PARTIAL if total.dtype == PARTIAL else float
                totals.append(np.zeros(n if part.columns is None else len(part.columns), kind))
            else:
                totals.append(total if total is None else total[sample])
        dy, x, statistics, dsum = _inputs(call, part)
        fields = dy, x, own, statistics, of_dx, *totals, dsum, call.threads
        do(_new(Backward, fields))
        if of_dx is not None and not isinstance(part.at, slice):
            dx[part.at] = of_dx
        for of_samples, total in zip(groups, totals if inside else [], strict=False):
            if total is not None:
                whole = np.zeros(n, total.dtype)
                whole[slice(None) if part.columns is None else part.columns] = total
                of_samples.setdefault(sample, []).append(whole)
    for of_samples, result in zip(groups, sums, strict=True):
        for sample, some in of_samples.items():
            if result.dtype == PARTIAL:
                result[sample] = merged(*some)
            else:
                result[sample] = round_to(sum_rows(np.array(some)), result.dtype)


def _inputs(call: Backward, part: Part) -> tuple[Array, Array, Statistics, Any]:
    """Return dy, x, the statistics and dsum of a part."""
    dsum = None if call.dsum is None else call.dsum[part.at]
    return call.dy[part.at], call.x[part.at], call.statistics.of_rows(part.rows), dsum


def accumulate(gradients: Gradients, sums: Gradients) -> None:
    """Add sums in float64 to the dgamma and dbeta that are there."""
    old: Any
    for old, total in zip(gradients[1:], sums[1:], strict=True):
        if old is not None:
            old[...] = round_to(old.astype(np.float64) + total, old.dtype)


def exact_sums(cache: Cache, dy: Array, which: int, asked: Array) -> Array:
    """Return the exact sums, dgamma (0) or dbeta (1), of the columns that are asked for; 0 for others."""
    layout, whole = layout_of(cache.x.shape, cache.axis), np.zeros(asked.shape, object)
    whole[asked] = Number()
    if not asked.any() or not cache.x.size:
        return whole
    call = Backward(rows_of(dy, layout), rows_of(cache.x, layout), cache.norm, cache.statistics)
    sums, flags = (v.reshape(-1, layout.shape[1]) for v in (whole, asked))
    numbers = layout.numbers(asked)
    for part in parts_of(layout.mask(cache.where), numbers):
        columns = np.arange(layout.shape[1]) if part.columns is None else part.columns
        sample = numbers[part.first]
        places = flags[sample, columns].nonzero()[0]
        rows, x, statistics, _ = _inputs(call, part)
        one = Backward(rows, x, cache.norm, statistics)
        sums[sample, columns[places]] += uncertified.exact_sums(one, which, places)
    return whole
