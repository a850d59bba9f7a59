"""
Keywords, each a composition of plain calls that one could write oneself.

A *part* of a call is a plain call: some rows, the columns of them that count, one gamma and one beta. `parts_of` finds the
parts of a call with a mask, or with gamma and beta of leading axes; `forward` and `backward` do them one after the other. A
call without either has one part.
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

import math
from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import rows as rows_of
from stablenorm.backends import arrays_of, module_of
from stablenorm.call import Backward, Forward
from stablenorm.functional.layout import Layout, Lead, layout_of
from stablenorm.reference import add, uncertified
from stablenorm.reference.equations import round_to, sum_rows
from stablenorm.reference.exact import Number
from stablenorm.reference.sums import PARTIAL, merged
from stablenorm.types import Array, Cache, Gradients, Norm, Statistics

# The faster constructor of a NamedTuple.
_new = tuple.__new__


class Part(NamedTuple):
    """Rows with one gamma, one beta and one mask."""

    # The index of the elements that count in (rows, n); a slice gives a view.
    at: Any
    rows: Any
    # None: all.
    columns: Any
    # The number of its gamma, beta and sums in their lead.
    sample: int


def parts_of(layout: Layout, lead: Lead, mask: Array | None) -> list[Part]:
    """Return the parts of a call, at least one."""
    keys = samples = layout.numbers(lead)
    inside = mask if mask is not None and mask.shape[1] > 1 else None
    if inside is not None:
        # Rows of one sample and of equal bits get one number.
        known: dict[Any, int] = {}
        pairs = zip(samples.tolist(), map(bytes, np.packbits(inside, 1)), strict=True)
        keys = np.array([known.setdefault(pair, len(known)) for pair in pairs])
    if mask is not None:
        keys = np.where(np.logical_or.reduce(mask, 1), keys, -1)
    order: Any = keys.argsort(kind="stable")
    ordered, parts, start = keys[order], list[Part](), 0
    ends = (ordered[1:] != ordered[:-1]).nonzero()[0] + 1
    for stop in (*ends.tolist(), len(order)):
        rows, start = order[start:stop], stop
        if not len(rows) or keys[rows[0]] < 0:
            continue
        first, last, columns = int(rows[0]), int(rows[-1]), None
        at: Any = rows
        if inside is not None and not np.logical_and.reduce(inside[first]):
            columns = inside[first].nonzero()[0]
            at = rows[:, None], columns
        elif last - first == len(rows) - 1:
            at = rows = slice(first, last + 1)
        parts.append(_new(Part, (at, rows, columns, int(samples[first]))))
    return parts or [Part(slice(0), slice(0), None, 0)]


def _prepared(backend: str, norm: Norm, n: int) -> Norm:
    """Return `norm` with gamma_offset added to gamma; gamma and beta are in C order, vectors if they are one for all rows."""
    own, offset = [], norm.gamma_offset
    for value in (norm.gamma, norm.beta):
        parameter: Any = value
        if value is not None:
            parameter = value.astype(np.float64) + offset if offset else value
            parameter = arrays_of(backend).contiguous(parameter)
            parameter = parameter.reshape(-1) if parameter.size == n else parameter
        own.append(parameter)
        offset = 0.0
    return _new(Norm, (*own, norm.eps, norm.kind, 0.0, norm.rounding))


def _norm_of(part: Part, norm: Norm, gammas: Any, betas: Any = None) -> Norm:
    """Return the norm of a part."""
    own = []
    for values in (gammas, betas):
        vector = values if values is None else values[part.sample]
        own.append(vector if vector is None or part.columns is None else vector[part.columns])
    return _new(Norm, (*own, norm.eps, norm.kind, 0.0, norm.rounding))


def _room(part: Part, results: Any) -> Any:
    """Return the place of a part among results: a view, or new memory."""
    if results is None or isinstance(part.at, slice):
        return results if results is None else results[part.at]
    return np.empty(results[part.at].shape, results.dtype)


def forward(backend: str, call: Forward, layout: Layout, where: Array | None) -> Any:
    """Do a forward of rows whose gamma and beta are as the user gave them; return the statistics."""
    x, norm, y, keep, residual, total, threads = call
    norm, do = _prepared(backend, norm, layout.shape[1]), module_of(backend).forward
    mask = where if where is None else layout.mask(where)
    lead = layout.lead_of(norm.gamma, norm.beta)
    if mask is None and math.prod(lead) == 1:
        return do(_new(Forward, (x, norm, y, keep, residual, total, threads)))
    gammas, betas = layout.of_samples(norm.gamma, lead), layout.of_samples(norm.beta, lead)
    parts, done = parts_of(layout, lead, mask), list[Any]()
    if mask is not None:
        y[...] = 0
    if residual is not None:
        add(x, residual, total)
        x = total
    for part in parts:
        own, of_y = _norm_of(part, norm, gammas, betas), _room(part, y)
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
    """Do a backward of rows whose gamma, beta and sums are as the user gave them: one pass for each lead."""
    norm, n = _prepared(backend, call.norm, layout.shape[1]), layout.shape[1]
    mask = where if where is None else layout.mask(where)
    lead, of_beta = layout.lead_of(norm.gamma), layout.lead_of(norm.beta)
    sums: list[Any] = []
    for total in (call.dgamma, call.dbeta):
        sums.append(total if total is None else total.reshape(-1, n))
    if mask is None and math.prod(lead) == math.prod(of_beta) == 1:
        flat = [v if v is None else v[0] for v in sums]
        fields = call.dy, call.x, norm, call.statistics, call.dx, *flat, call.dsum, call.threads
        module_of(backend).backward(_new(Backward, fields))
        return
    if call.dbeta is not None and of_beta != lead:
        # dbeta alone needs no gamma.
        alone = call._replace(norm=norm._replace(gamma=None), dx=None)
        _one_pass(backend, alone, [None, sums[1]], layout, mask, of_beta)
        sums[1] = None
    _one_pass(backend, call._replace(norm=norm), sums, layout, mask, lead)


def _one_pass(
    backend: str, call: Backward, sums: list[Any], layout: Layout, mask: Any, lead: Lead
) -> None:
    """Write dx, and sums that have one lead."""
    do, n, dx = module_of(backend).backward, layout.shape[1], call.dx
    gammas, inside = (
        layout.of_samples(call.norm.gamma, lead),
        mask is not None and mask.shape[1] > 1,
    )
    if mask is not None:
        for result in (dx, *sums):
            if result is not None:
                result[...] = np.zeros((), result.dtype)
        if dx is not None and call.dsum is not None:
            dx[...] = call.dsum
    # By sample, the sums of its parts, which are rounded once.
    groups: list[dict[int, list[Array]]] = [{}, {}]
    for part in parts_of(layout, lead, mask):
        own, of_dx, totals = _norm_of(part, call.norm, gammas), _room(part, dx), list[Any]()
        for total in sums:
            if total is not None and inside:
                kind = PARTIAL if total.dtype == PARTIAL else float
                totals.append(np.zeros(n if part.columns is None else len(part.columns), kind))
            else:
                totals.append(total if total is None else total[part.sample])
        dy, x, statistics, dsum = _inputs(call, part)
        fields = dy, x, own, statistics, of_dx, *totals, dsum, call.threads
        do(_new(Backward, fields))
        if of_dx is not None and not isinstance(part.at, slice):
            dx[part.at] = of_dx
        for of_samples, total in zip(groups, totals if inside else [], strict=False):
            if total is not None:
                whole = np.zeros(n, total.dtype)
                whole[slice(None) if part.columns is None else part.columns] = total
                of_samples.setdefault(part.sample, []).append(whole)
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
    mask = None if cache.where is None else layout.mask(cache.where)
    for part in parts_of(layout, layout.lead_of(asked), mask):
        columns = np.arange(layout.shape[1]) if part.columns is None else part.columns
        places = flags[part.sample, columns].nonzero()[0]
        rows, x, statistics, _ = _inputs(call, part)
        one = Backward(rows, x, cache.norm, statistics)
        sums[part.sample, columns[places]] += uncertified.exact_sums(one, which, places)
    return whole
