"""
Keywords, each a composition of plain calls that one could write oneself.

A *part* of a call is a plain call: some rows, the columns of them that count, one gamma and one beta. `parts_of` finds the
parts of a call with a mask, or with gamma and beta of leading axes; `forward` and `backward` do them one after the other.
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
from typing import Any

import numpy as np

from stablenorm.backends import module_of
from stablenorm.call import Backward, Forward
from stablenorm.functional.layout import Layout, Lead
from stablenorm.reference import add, uncertified
from stablenorm.reference.equations import round_to, sum_rows
from stablenorm.reference.sums import NOTHING, PARTIAL, merged
from stablenorm.types import Array, Norm, Statistics

# The faster constructor of a NamedTuple.
_new = tuple.__new__

# The index of the elements of a part in (rows, n), its rows, the columns that count (None: all), its first row, and the
# number of its gamma or beta in their lead.
Part = tuple[Any, Any, Any, int, int]


def offset_gamma(norm: Norm) -> Norm:
    """Return a norm whose gamma_offset is added to gamma, in float64."""
    if not norm.gamma_offset:
        return norm
    gamma: Any = norm.gamma
    return norm._replace(gamma=gamma.astype(np.float64) + norm.gamma_offset, gamma_offset=0.0)


def parts_of(layout: Layout, lead: Lead, mask: Array | None) -> list[Part]:
    """Return the rows that have one gamma, one beta and one mask, in groups."""
    if lead.count(1) == len(lead) and (mask is None or not mask.size):
        return [(slice(None), slice(None), None, 0, 0)]
    samples = keys = numbers_of(lead, layout)
    inside = mask if mask is not None and mask.shape[1] > 1 else None
    if inside is None and mask is not None:
        keys = np.where(mask[:, 0], keys, -1)
    elif inside is not None:
        # Rows of one sample and of equal bits get one number.
        known: dict[Any, int] = {}
        bits = map(bytes, np.packbits(inside, 1))
        pairs = list(zip(samples.tolist(), bits, strict=True))
        keys = np.array(
            [known.setdefault(pair, len(known)) if any(pair[1]) else -1 for pair in pairs]
        )
    order = keys.argsort(kind="stable")
    ordered, parts, start = keys[order], list[Part](), 0
    ends = (ordered[1:] != ordered[:-1]).nonzero()[0] + 1
    for stop in (*ends.tolist(), len(order)):
        some, first, last = order[start:stop], int(order[start]), int(order[stop - 1])
        rows: Any = some
        if last - first == stop - start - 1:
            # Adjacent rows are a view.
            rows = slice(first, last + 1)
        at, columns = rows, None
        if inside is not None and not inside[first].all():
            columns = inside[first].nonzero()[0]
            at = some[:, None], columns
        if ordered[start] >= 0:
            parts.append((at, rows, columns, first, int(samples[first])))
        start = stop
    return parts


def numbers_of(lead: Lead, layout: Layout) -> Array:
    """Return for each row the number of its gamma, beta or sum in their lead."""
    numbers = np.arange(math.prod(lead)).reshape(lead)
    return (numbers + np.zeros(layout.leading, int)).reshape(-1)


# ---- the loops over parts ----


def forward(backend: str, call: Forward, layout: Layout, mask: Array | None) -> Any:
    """Do a forward of rows whose gamma and beta are as the user gave them; return the statistics."""
    norm, whole = offset_gamma(call.norm), list[Any]()
    if not call.x.size:
        norm = norm._replace(gamma=None, beta=None)
    leads = [layout.lead_of(norm.gamma), layout.lead_of(norm.beta)]
    parts = parts_of(layout, tuple(map(max, *leads)), mask)
    gammas = _of_parts(norm.gamma, leads[0], layout, parts)
    betas = _of_parts(norm.beta, leads[1], layout, parts)
    if mask is not None:
        call.y[...] = 0
    if call.residual is not None and (mask is not None or not isinstance(parts[0][0], slice)):
        add(call.x, call.residual, call.total)
        call = call._replace(x=call.total, residual=None, total=None)
    do = module_of(backend).forward
    for (at, rows, *_), gamma, beta in zip(parts, gammas, betas, strict=True):
        own = _new(Norm, (gamma, beta, norm.eps, norm.kind, 0.0, norm.rounding))
        x, is_view = call.x[at], isinstance(at, slice)
        y = call.y[at] if is_view else np.empty(x.shape, call.y.dtype)
        residual = None if call.residual is None else call.residual[at]
        total = None if call.total is None else call.total[at]
        statistics = do(Forward(x, own, y, call.keep, residual, total, call.threads))
        if is_view and at == slice(None):
            return statistics
        if not is_view:
            call.y[at] = y
        if call.keep:
            whole = whole or [w if w is None else np.zeros(len(call.x)) for w in statistics]
            for target, word in zip(whole, statistics, strict=True):
                if target is not None:
                    # Rows without digits that others have go to integers.
                    target[rows] = np.nan if word is None else word
    if whole:
        return Statistics._make(whole)
    zeros = np.zeros(len(call.x))
    mean = zeros if norm.kind == "layer" else None
    return Statistics(mean, mean, zeros, zeros, mean)


def backward(
    backend: str, call: Backward, layout: Layout, mask: Array | None,
    sum_lead: Lead | None = None, accumulate: bool = False,
) -> None:  # fmt: skip
    """Do a backward of rows whose gamma, beta and sums are as the user gave them: one pass for each lead."""
    norm = offset_gamma(call.norm)._replace(beta=None)
    of_gamma, of_beta = layout.lead_of(norm.gamma), layout.lead_of(call.norm.beta)
    leads = {"dgamma": sum_lead or of_gamma, "dbeta": sum_lead or of_beta}
    leads["dx"] = of_gamma if call.dgamma is None else leads["dgamma"]
    passes: dict[Lead, list[str]] = {}
    for name, lead in leads.items():
        if getattr(call, name) is not None:
            passes.setdefault(lead, []).append(name)
    for lead, names in passes.items():
        asked: Any = dict.fromkeys(leads.keys() - names)
        # dbeta alone needs no gamma, which may have another lead.
        own = norm._replace(gamma=None) if names == ["dbeta"] else norm
        _one_pass(backend, call._replace(norm=own, **asked), layout, mask, lead, accumulate)


def _one_pass(
    backend: str, call: Backward, layout: Layout, mask: Array | None, lead: Lead, accumulate: bool
) -> None:
    """Do a backward whose sums have one lead."""
    parts, n = parts_of(layout, lead, mask), layout.shape[1]
    gammas = _of_parts(call.norm.gamma, layout.lead_of(call.norm.gamma), layout, parts)
    inside = mask is not None and mask.shape[1] > 1
    # Sums that are to be added to others are not rounded yet.
    kind: Any = PARTIAL if call.partial else float if accumulate or inside else None
    results, sums = (call.dgamma, call.dbeta), list[Any]()
    for result in results:
        if result is None:
            sums.append(None)
        elif kind is None and mask is None:
            # The results themselves, or a copy if they have gaps.
            sums.append(layout.arrays.contiguous(result).reshape(-1, n))
        else:
            sums.append(np.zeros((len(parts), n), kind or result.dtype))
    if mask is not None and call.dx is not None:
        call.dx[...] = 0 if call.dsum is None else call.dsum
    do = module_of(backend).backward
    for i, (part, gamma) in enumerate(zip(parts, gammas, strict=True)):
        (at, _, columns, *_), dx, rows = part, None, list(sums)
        if call.dx is not None:
            is_view = isinstance(at, slice)
            dx = call.dx[at] if is_view else np.empty(_shape_of(at, n), call.dx.dtype)
        for k, total in enumerate(sums):
            if total is not None:
                rows[k] = total[i] if columns is None else np.zeros(len(columns), kind)
        do(_part_of(call, part, gamma, dx, *rows))
        if dx is not None and not is_view:
            call.dx[at] = dx
        for k, total in enumerate(sums):
            if total is not None and columns is not None:
                total[i, columns] = rows[k]
    for total, result in zip(sums, results, strict=True):
        if total is not None and (kind is not None or mask is not None):
            _put_sums(total, result, parts, accumulate)
        elif total is not None and not layout.arrays.share(total, result):
            result[...] = total.reshape(result.shape)


def _put_sums(total: Array, result: Array, parts: list[Part], accumulate: bool) -> None:
    """Add up the sums of the parts of each sample, and write them, rounded once."""
    samples: dict[int, list[int]] = {}
    for i, (*_, sample) in enumerate(parts):
        samples.setdefault(sample, []).append(i)
    whole = np.zeros((result.size // total.shape[1], total.shape[1]), total.dtype)
    for sample, places in samples.items():
        whole[sample] = total[places[0]]
        if len(places) > 1:
            some = total[places]
            whole[sample] = merged(*some) if total.dtype == PARTIAL else sum_rows(some)
    whole = whole.reshape(result.shape)
    if accumulate:
        whole = result.astype(float) + whole
    result[...] = whole if whole.dtype == result.dtype else round_to(whole, result.dtype)


def _shape_of(at: Any, n: int) -> tuple[int, int]:
    """Return the shape of a part that is no view."""
    return (len(at[0]), len(at[1])) if isinstance(at, tuple) else (len(at), n)


def _part_of(call: Backward, part: Part, gamma: Array | None, *results: Any) -> Backward:
    """Return the backward of a part."""
    at, rows, *_ = part
    own = _new(Norm, (gamma, None, call.norm.eps, call.norm.kind, 0.0, call.norm.rounding))
    words = _new(Statistics, [w if w is None else w[rows] for w in call.statistics])
    dsum = None if call.dsum is None else call.dsum[at]
    dx, dgamma, dbeta = results or (None, None, None)
    return Backward(
        call.dy[at], call.x[at], own, words, dx, dgamma, dbeta, dsum, call.partial, call.threads
    )


def _of_parts(values: Array | None, lead: Lead, layout: Layout, parts: list[Part]) -> list[Any]:
    """Return the gamma or beta of each part."""
    if values is None:
        return [None] * len(parts)
    rows = layout.arrays.contiguous(values).reshape(-1, layout.shape[1])
    numbers = numbers_of(lead, layout) if len(rows) > 1 else None
    own = []
    for _, _, columns, first, _ in parts:
        row = rows[0 if numbers is None else numbers[first]]
        own.append(row if columns is None else row[columns])
    return own


def exact_sums(
    layout: Layout, call: Backward, mask: Array | None, which: int, asked: Array
) -> Array:
    """Return the exact sums, dgamma (0) or dbeta (1), of the columns that are asked for; 0 for others."""
    lead = layout.lead_of(asked)
    whole = np.zeros(asked.shape, object)
    if not asked.any() or not call.x.size:
        whole[asked] = NOTHING
        return whole
    sums, flags = (v.reshape(-1, layout.shape[1]) for v in (whole, asked))
    sums[flags] = NOTHING
    for part in parts_of(layout, lead, mask):
        columns, sample = part[2], part[4]
        every = np.arange(layout.shape[1]) if columns is None else columns
        places = flags[sample, every].nonzero()[0]
        for j, total in uncertified.exact_sums(_part_of(call, part, None), which, places):
            sums[sample, every[j]] += total
    return whole
