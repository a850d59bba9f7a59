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

from typing import Any

import numpy as np

from stablenorm.arrays import rows as rows_of
from stablenorm.backends import arrays_of, module_of
from stablenorm.call import Backward, Forward
from stablenorm.functional.layout import Layout, Lead, layout_of
from stablenorm.reference import add, uncertified
from stablenorm.reference.equations import round_to, sum_rows
from stablenorm.reference.sums import NOTHING, PARTIAL, merged
from stablenorm.types import Array, Cache, Norm, Statistics, new_norm

# The faster constructor of a NamedTuple.
_new = tuple.__new__

# The index of the elements of a part in (rows, n), its rows, the columns that count (None: all), its first row, and the
# number of its gamma, beta and sums in their lead.
Part = tuple[Any, Any, Any, int, int]


def parts_of(layout: Layout, lead: Lead | None, mask: Array | None) -> list[Part]:
    """Return the rows that have one gamma, one beta and one mask, in groups; without a lead, these are one for all rows."""
    samples = keys = np.zeros(layout.shape[0], int) if lead is None else layout.numbers(lead)
    inside = mask if mask is not None and mask.shape[1] > 1 else None
    if inside is not None:
        # Rows of one sample and of equal bits get one number.
        known: dict[Any, int] = {}
        pairs = zip(samples.tolist(), map(bytes, np.packbits(inside, 1)), strict=True)
        keys = np.array([known.setdefault(pair, len(known)) for pair in pairs])
    if mask is not None:
        counts = np.logical_or.reduce(mask, 1)
        keys = keys * counts - ~counts
    order = keys.argsort(kind="stable")
    ordered, parts, start = keys[order], list[Part](), 0
    ends = (ordered[1:] != ordered[:-1]).nonzero()[0] + 1
    for stop in (*ends.tolist(), len(order)):
        some, first, columns = order[start:stop], int(order[start]), None
        is_adjacent = order[stop - 1] - first == stop - start - 1
        # Adjacent rows are a view.
        at: Any = slice(first, first + len(some)) if is_adjacent else some
        rows = at
        if inside is not None and not np.logical_and.reduce(inside[first]):
            columns = inside[first].nonzero()[0]
            at = some[:, None], columns
        if ordered[start] >= 0:
            parts.append((at, rows, columns, first, int(samples[first])))
        start = stop
    return parts


def _of_parts(values: Array | None, layout: Layout, parts: list[Part]) -> list[Any]:
    """Return the gamma or beta of each part."""
    if values is None:
        return [None] * len(parts)
    rows, numbers, own = values[None], None, []
    if values.ndim > 1:
        rows = np.ascontiguousarray(values).reshape(-1, layout.shape[1])
        numbers = layout.numbers(layout.lead_of(values))
    for _, _, columns, first, _ in parts:
        row = rows[0 if numbers is None else numbers[first]]
        own.append(row if columns is None else row[columns])
    return own


def _norm_of(backend: str, norm: Norm, layout: Layout) -> tuple[Norm, bool]:
    """Return `norm` with gamma_offset added to gamma, and whether gamma and beta are one for all rows: then vectors."""
    gamma, beta, n = norm.gamma, norm.beta, layout.shape[1]
    if norm.gamma_offset and gamma is not None:
        gamma = gamma.astype(np.float64) + norm.gamma_offset
    is_plain = (gamma is None or gamma.size == n) and (beta is None or beta.size == n)
    if is_plain:
        contiguous = arrays_of(backend).contiguous
        gamma = gamma if gamma is None else contiguous(gamma).reshape(-1)
        beta = beta if beta is None else contiguous(beta).reshape(-1)
    return new_norm((gamma, beta, norm.eps, norm.kind, 0.0, norm.rounding)), is_plain


# ---- the loops over parts ----


def forward(backend: str, call: Forward, layout: Layout, where: Array | None) -> Any:
    """Do a forward of rows whose gamma and beta are as the user gave them; return the statistics."""
    norm, is_plain = _norm_of(backend, call.norm, layout)
    do, residual, total = module_of(backend).forward, call.residual, call.total
    x, y, keep, threads = call.x, call.y, call.keep, call.threads
    if (is_plain and where is None) or not x.size:
        norm = norm if is_plain else norm._replace(gamma=None, beta=None)
        return do(_new(Forward, (x, norm, y, keep, residual, total, threads)))
    lead = None
    if not is_plain:
        lead = tuple(map(max, layout.lead_of(norm.gamma), layout.lead_of(norm.beta)))
    mask = layout.mask(where)
    parts = parts_of(layout, lead, mask)
    gammas, betas = _of_parts(norm.gamma, layout, parts), _of_parts(norm.beta, layout, parts)
    if mask is not None:
        y[...] = 0
    if residual is not None and (mask is not None or not isinstance(parts[0][0], slice)):
        add(x, residual, total)
        x, residual = total, None
    # The words of the statistics of all rows, those of RMS norm without a mean; of no part they are 0.
    zeros = np.zeros(len(x))
    words: list[Any] = [None, None, zeros, zeros, None, None, None]
    if norm.kind == "layer":
        words = [zeros] * 5 + words[5:]
    for i, ((at, rows, *_), gamma, beta) in enumerate(zip(parts, gammas, betas, strict=True)):
        own = new_norm((gamma, beta, norm.eps, norm.kind, 0.0, norm.rounding))
        some, is_view = x[at], isinstance(at, slice)
        of_y = y[at] if is_view else np.empty(some.shape, y.dtype)
        added = (None, None) if residual is None else (residual[at], total[at])
        statistics = do(_new(Forward, (some, own, of_y, keep, *added, threads)))
        if not is_view:
            y[at] = of_y
        for k, word in enumerate(statistics if keep else ()):
            if i == 0:
                words[k] = None if word is None else np.zeros(len(x))
            if words[k] is not None:
                # Rows without digits that others have go to integers.
                words[k][rows] = np.nan if word is None else word
    return _new(Statistics, words)


def backward(
    backend: str, call: Backward, layout: Layout, where: Array | None,
    sum_lead: Lead | None = None, accumulate: bool = False,
) -> None:  # fmt: skip
    """Do a backward of rows whose gamma, beta and sums are as the user gave them: one pass for each lead."""
    norm, is_plain = _norm_of(backend, call.norm, layout)
    where = where if call.x.size else None
    main = of_beta = None
    if not is_plain or sum_lead is not None:
        main, of_beta = layout.lead_of(norm.gamma), sum_lead or layout.lead_of(norm.beta)
        if call.dgamma is not None and sum_lead is not None:
            main = sum_lead
    own = new_norm((norm.gamma, None, norm.eps, norm.kind, 0.0, norm.rounding))
    inputs, others = (call.dy, call.x), (call.dsum, call.partial, call.threads)
    if call.dbeta is not None and of_beta != main:
        # dbeta alone needs no gamma, which may have another lead.
        alone = *inputs, own._replace(gamma=None), call.statistics, None, None, call.dbeta, *others
        _one_pass(backend, _new(Backward, alone), layout, where, of_beta, accumulate)
        call = call._replace(dbeta=None)
    fields = *inputs, own, call.statistics, call.dx, call.dgamma, call.dbeta, *others
    if is_plain and where is None is sum_lead and not (accumulate or call.partial):
        _whole(backend, _new(Backward, fields))
    else:
        _one_pass(backend, _new(Backward, fields), layout, where, main, accumulate)


def _whole(backend: str, call: Backward) -> None:
    """Do a plain backward."""
    contiguous, sums = arrays_of(backend).contiguous, []
    for result in (call.dgamma, call.dbeta):
        sums.append(result if result is None else contiguous(result).reshape(-1))
    results = call.dx, *sums, call.dsum, False, call.threads
    fields = call.dy, call.x, call.norm, call.statistics, *results
    module_of(backend).backward(_new(Backward, fields))
    for total, result in zip(sums, (call.dgamma, call.dbeta), strict=True):
        if total is not None and not result.flags.c_contiguous:
            result[...] = total.reshape(result.shape)


def _one_pass(
    backend: str, call: Backward, layout: Layout, where: Array | None, lead: Lead | None, accumulate: bool
) -> None:  # fmt: skip
    """Do a backward whose sums have one lead."""
    mask, do, n = layout.mask(where), module_of(backend).backward, layout.shape[1]
    parts, dx = parts_of(layout, lead, mask), call.dx
    gammas = _of_parts(call.norm.gamma, layout, parts)
    if mask is not None and dx is not None:
        dx[...] = 0 if call.dsum is None else call.dsum
    inside = mask is not None and mask.shape[1] > 1
    # Sums that are to be added to others are not rounded yet.
    kind: Any = PARTIAL if call.partial else float if accumulate or inside else None
    results, sums = (call.dgamma, call.dbeta), list[Any]()
    for result in results:
        sums.append(None if result is None else np.zeros((len(parts), n), kind or result.dtype))
    for i, (part, gamma) in enumerate(zip(parts, gammas, strict=True)):
        at, _, columns, *_ = part
        one = _part_of(call, part, gamma, sums, i)
        do(one)
        if one.dx is not None and not isinstance(at, slice):
            dx[at] = one.dx
        for total in sums if columns is not None else ():
            if total is not None:
                packed = total[i, : len(columns)].copy()
                total[i] = np.zeros((), total.dtype)
                total[i, columns] = packed
    places: dict[int, list[int]] = {}
    for i, part in enumerate(parts):
        places.setdefault(part[4], []).append(i)
    for total, result in zip(sums, results, strict=True):
        if total is None:
            continue
        # The sums of the parts of each sample, which are rounded once.
        whole = np.zeros((result.size // n, n), total.dtype)
        for sample, some in places.items():
            whole[sample] = total[some[0]]
            if len(some) > 1:
                of_parts = total[some]
                whole[sample] = merged(*of_parts) if call.partial else sum_rows(of_parts)
        whole = whole.reshape(result.shape)
        if accumulate:
            whole = result.astype(float) + whole
        result[...] = whole if whole.dtype == result.dtype else round_to(whole, result.dtype)


def _part_of(call: Backward, part: Part, gamma: Any, sums: list[Any], i: int) -> Backward:
    """Return the backward of part `i`, whose sums are packed into row i of `sums`."""
    at, rows, *_ = part
    own = new_norm((gamma, None, call.norm.eps, call.norm.kind, 0.0, call.norm.rounding))
    words = []
    for word in call.statistics:
        words.append(word if word is None else word[rows])
    dsum = None if call.dsum is None else call.dsum[at]
    x, dx, (dgamma, dbeta) = call.x[at], call.dx, sums
    if dx is not None:
        dx = dx[at] if isinstance(at, slice) else np.empty(x.shape, dx.dtype)
    dgamma = None if dgamma is None else dgamma[i, : x.shape[1]]
    dbeta = None if dbeta is None else dbeta[i, : x.shape[1]]
    results = dx, dgamma, dbeta, dsum, call.partial, call.threads
    return _new(Backward, (call.dy[at], x, own, _new(Statistics, words), *results))


def exact_sums(cache: Cache, dy: Array, which: int, asked: Array) -> Array:
    """Return the exact sums, dgamma (0) or dbeta (1), of the columns that are asked for; 0 for others."""
    layout, whole = layout_of(cache.x.shape, cache.axis), np.zeros(asked.shape, object)
    whole[asked] = NOTHING
    if not asked.any() or not cache.x.size:
        return whole
    rows = rows_of(dy, layout)[0], rows_of(cache.x, layout)[0]
    call = Backward(*rows, cache.norm, cache.statistics)
    sums, flags = (v.reshape(-1, layout.shape[1]) for v in (whole, asked))
    every = np.arange(layout.shape[1])
    for part in parts_of(layout, layout.lead_of(asked), layout.mask(cache.where)):
        columns = every if part[2] is None else part[2]
        places = flags[part[4], columns].nonzero()[0]
        one = _part_of(call, part, None, [None, None], 0)
        for j, total in uncertified.exact_sums(one, which, places):
            sums[part[4], columns[j]] += total
    return whole
