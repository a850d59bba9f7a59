"""
``rounding="nearest"``: every element is the exact one rounded to nearest, ties to even.

The equations of `equations` run on `Bounded` numbers. Where both ends of a bound round to the same bits, so
does the exact value. What that leaves undecided goes to `exact`. The bound is 0 where an element is exact:
of constant rows y is beta, and a gamma or dy of 0 adds nothing.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.formats import format_of
from stablenorm.reference import exact
from stablenorm.reference.bounded import UNIT, Bounded, size_of
from stablenorm.reference.doubledouble import Wide
from stablenorm.reference.equations import (
    _BLOCK,
    Normalized,
    _blocks,
    _Keeper,
    _RowSum,
    affine,
    normalized,
    project,
)
from stablenorm.reference.partial import as_partial, merged, rounded
from stablenorm.types import Array, Norm, Statistics

# Sums below 2**102 of the last place of their terms are exact in double-double: each error is a
# multiple of that place, and less than it.
_EXACT = 102
_NONE = 1 << 20


def forward(call: Forward) -> Statistics:
    """Do what `equations.forward` does, rounded to nearest; `spread` is filled as well."""
    x, norm, y = call[:3]
    n, dtype = x.shape[1], x.dtype
    gamma, beta = _parameter(norm.gamma, n, 1.0), _parameter(norm.beta, n, 0.0)
    finite = np.isfinite(gamma) & np.isfinite(beta)
    scale, shift = np.where(finite, gamma, 0.0), np.where(finite, beta, 0.0)
    exact_scale, exact_shift = _with_offset(scale, norm), Bounded.exactly(shift[None])
    keep, spread = _AllWords(x.shape[0], n, True, norm.kind), np.empty(x.shape[0])
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            part = _normalized(x[rows], norm)
            spread[rows] = part.keep(keep, rows)
            if y is None:
                continue
            value = affine(part.rows.xhat, exact_scale, exact_shift)
            result, high, undecided = value.ends(dtype)
            undecided[part.undefined] = False
            result[undecided] = exact.y_elements(
                part.x, scale, shift, norm, undecided, result, high
            )
            if not finite.all():
                # Of an infinite gamma, the sign of xhat counts.
                sign = np.zeros(result.shape)
                infinite = np.isinf(gamma) & ~part.undefined[:, None]
                sign[infinite] = exact.signs(part.x, norm, infinite)
                extended = np.where(np.isfinite(gamma), 0.0, gamma) * sign + beta
                result[:, ~finite] = extended[:, ~finite]
            result[part.undefined[:, None] | np.isnan(result)] = np.nan
            y[rows] = result
    return keep.statistics._replace(spread=spread)


def backward(call: Backward) -> None:
    """
    Do what `equations.backward` does, every element rounded to nearest, from x and eps.

    dx may be dy itself: the sums over rows come first.
    """
    dgamma, dbeta = call.dgamma, call.dbeta
    if call.sums == "exact":
        _write_exact(call)
    elif not dgamma is None is dbeta:
        found = columns_of_sums(call, np.arange(call.x.shape[-1]))
        for total, values in zip((dgamma, dbeta), found, strict=True):
            if total is not None and values is not None:
                total[...] = merged(total, values) if call.sums == "pairs" else values
    if call.dx is not None:
        _write_dx(call)


def _write_dx(call: Backward) -> None:
    dy, x, norm, _, dx, _, _, dsum = call[:8]
    gamma = _parameter(norm.gamma, x.shape[1], 1.0)
    finite = np.isfinite(gamma)
    scale = np.where(finite, gamma, 0.0)
    exact_scale = _with_offset(scale, norm)
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            part = _normalized(x[rows], norm)
            cotangent = dy[rows].astype(np.float64)
            undefined = part.undefined | ~(finite & np.isfinite(cotangent)).all(axis=1)
            cotangent[undefined] = 0.0
            g = Bounded.exactly(cotangent) * exact_scale
            addend, infinite = _split(np.zeros(1) if dsum is None else dsum[rows])
            value = project(g, part.rows.xhat, norm.kind) * part.rows.rstd
            value = value + Bounded.exactly(np.broadcast_to(addend, part.x.shape))
            result, high, undecided = value.ends(dx.dtype)
            zero = _vanishes(g, cotangent, exact_scale, norm)
            undecided[undefined | zero] = False
            result[undecided] = exact.dx_elements(
                cotangent, part.x, scale, norm, undecided, result, high, addend
            )
            whole = np.broadcast_to(addend, part.x.shape)
            result[zero] = Wide.exactly(whole[zero] + 0.0).round_to(dx.dtype)
            result = np.where(infinite == 0, result, infinite.astype(dx.dtype))
            result[undefined] = np.nan
            dx[rows] = result


def columns_of_sums(call: Backward, columns: Array) -> tuple[Array | None, Array | None]:
    """
    Return some columns of dgamma and dbeta, as far as they are wanted: rounded to nearest, or as pairs.

    Each is added to its old value before it is rounded.
    """
    dy, x, pairs = call.dy, call.x, call.sums == "pairs"
    old = np.zeros((2, len(columns)))
    found: list[Array | None] = [None, None]
    with np.errstate(all="ignore"):
        for i, result in enumerate((call.dgamma, call.dbeta)):
            if result is None:
                continue
            if i == 0:
                total = _dgamma(dy, x, call.norm, columns, old[:1])
            else:
                # Old values are numbers of the result's type.
                total = _dbeta(dy, columns, old[1:], old.dtype if pairs else result.dtype)
            found[i] = total if pairs else _decided(call, i, columns, (total, old[i], result.dtype))
    return found[0], found[1]


def _decided(
    call: Backward, i: int, columns: Array, sums: tuple[Array, Array, np.dtype[Any]]
) -> Array:
    """Return dgamma (0) or dbeta (1) rounded, with integers where its bound leaves that open."""
    total, old, dtype = sums
    (first, _), (result, undecided) = _split(old), rounded(total, dtype)
    roots: dict[int, exact.Root] = {}
    for j, sum_ in _exact(call, i, columns, undecided):
        result[j] = (sum_ + exact.ExactSum.of_numbers(first[[j]])).rounded(result.dtype, roots)
    return result


def _write_exact(call: Backward) -> None:
    """Write exact sums where dgamma and dbeta, of objects, have True."""
    columns = np.arange(call.x.shape[-1])
    with np.errstate(all="ignore"):
        for i, result in enumerate((call.dgamma, call.dbeta)):
            if result is not None:
                wanted = result.reshape(-1) != 0
                for j, sum_ in _exact(call, i, columns, wanted):
                    result.flat[j] = sum_


def _dgamma(dy: Array, x: Array, norm: Norm, columns: Array, old: Array) -> Array:
    undefined, total = False, _Total(len(columns))
    for rows in _blocks(x.shape):
        part = _normalized(x[rows], norm)
        cotangent, infinite = _split(dy[rows][:, columns])
        if infinite.any():
            # Of an infinite dy, the sign of xhat counts.
            wanted, sign = np.zeros(part.x.shape, bool), np.zeros(part.x.shape)
            wanted[:, columns] = infinite != 0
            sign[wanted] = exact.signs(part.x, norm, wanted)
            infinite *= sign[:, columns]
        total.add(Bounded.exactly(cotangent) * part.rows.xhat[:, columns], infinite)
        undefined |= bool(part.undefined.any())
    first, infinite = _split(old)
    total.add(Bounded.exactly(first), infinite)
    found = total.partial()
    if undefined:
        found["high"] = np.nan
    return found


def _dbeta(dy: Array, columns: Array, old: Array, kind_of_old: np.dtype[Any]) -> Array:
    total, sizes = _Total(len(columns)), _RowSum()
    # The exponent of a last place that all terms of a column have.
    last = np.full(len(columns), _NONE)
    blocks = ((dy[rows][:, columns], dy.dtype) for rows in _blocks(dy.shape))
    for values, kind in itertools.chain(blocks, [(old, kind_of_old)]):
        cotangent, infinite = _split(values)
        places = np.where(cotangent == 0, _NONE, np.frexp(cotangent)[1] - format_of(kind).digits)
        last = np.minimum(last, places.min(axis=0))
        total.add(Bounded.exactly(cotangent), infinite)
        sizes.add(size_of(Wide.exactly(cotangent)))
    found = total.partial()
    found["error"][(sizes.total().magnitude() <= last + _EXACT)[0]] = 0.0
    return found


def _exact(
    call: Backward, i: int, columns: Array, wanted: Array
) -> Iterator[tuple[int, exact.ExactSum]]:
    """Yield the places that are `wanted`, and the exact dgamma (0) or dbeta (1) of these columns."""
    dy, x, norm = call[:3]
    if i == 1:
        for j, (values,) in _columns(columns, wanted, dy):
            yield j, exact.ExactSum.of_numbers(values)
    elif wanted.any():
        blocks = (x[rows].astype(np.float64) for rows in _blocks(x.shape))
        known = [exact.Row(row, norm, keep=False) for block in blocks for row in block]
        for j, (values, others) in _columns(columns, wanted, dy, x):
            yield j, exact.ExactSum.of_products(values, others, known)


class _Total:
    """A sum over rows: of terms, and of what is not finite."""

    def __init__(self, width: int) -> None:
        self._terms, self._infinite = _RowSum(), np.zeros(width)

    def add(self, terms: Bounded, infinite: Array) -> None:
        self._terms.add(terms)
        self._infinite += infinite.sum(axis=0)

    def partial(self) -> Array:
        """Return the sums as `partial` has them."""
        found = self._terms.total()
        bound = found.bound
        total: Array = as_partial(found, Wide(bound.hi * UNIT, bound.lo, bound.exponent))[0]
        # 0 says that the sum is exact: no bound may vanish.
        inexact = bound.hi[0] != 0
        total["error"][inexact] = np.maximum(total["error"][inexact], 2.0**-1000)
        total["high"] += self._infinite
        return total


def _columns(columns: Array, wanted: Array, *matrices: Array) -> Iterator[tuple[int, Any]]:
    """Yield the places that are `wanted`, and those columns of the matrices in float64."""
    places, shape = np.flatnonzero(wanted), matrices[0].shape
    # As many as a block holds.
    step = max(1, _BLOCK // max(shape[0], 1))
    for some in (places[start : start + step] for start in range(0, len(places), step)):
        # Of no rows, none is left but the first.
        blocks = [slice(0), *_blocks(shape)]
        parts = [[m[rows][:, columns[some]] for rows in blocks] for m in matrices]
        whole = (np.concatenate(part).astype(np.float64).T for part in parts)
        yield from zip(some.tolist(), zip(*whole, strict=True), strict=True)


def _split(values: Array) -> tuple[Array, Array]:
    """Return in float64 what is finite and what is not, zeros between."""
    values = values.astype(np.float64)
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0), np.where(finite, 0.0, values)


# ---- rows ----


class _Part(NamedTuple):
    """Some rows: x without what is not finite, and what the equations make of it."""

    x: Array
    spoiled: Array
    undefined: Array
    rows: Normalized

    def keep(self, keep: _Keeper, rows: slice) -> Array:
        """Keep the statistics; return the root mean square of xhat, or a little more."""
        var, rstd = self.rows.var.value, self.rows.rstd.value
        square = var * rstd * rstd
        exponent = square.magnitude()
        exponent += exponent & 1
        root = np.ldexp(np.sqrt(square.scaled_to(exponent).hi), exponent // 2)
        # Two ulps are more than the roundings above; with eps = 0 it is 1.
        root = np.minimum(np.nextafter(np.nextafter(root, 2.0), 2.0), 1.0)
        root[square.hi == 0] = 0.0
        root[self.undefined[:, None]] = np.nan
        # As without rounding="nearest": infinite where the variance is 0 and eps too.
        rstd.hi[self.undefined] = np.where(self.spoiled, np.nan, np.inf)[self.undefined, None]
        if self.rows.mean is not None:
            self.rows.mean[self.spoiled] = np.nan
        keep(rows, self.rows._replace(var=var, rstd=rstd))
        spread: Array = root[:, 0]
        return spread


class _AllWords(_Keeper):
    """Keeps the last word of each mean."""

    def _matters(self, mean_lo: Wide, var: Wide) -> Array:  # noqa: ARG002
        return np.array(True)


def _normalized(x: Array, norm: Norm) -> _Part:
    x = x.astype(np.float64)
    spoiled: Any = ~np.isfinite(x).all(axis=1)
    x[spoiled] = 0.0
    same = x[:, :1] if norm.kind == "layer" else np.zeros((1, 1))
    undefined: Array = spoiled if norm.eps else (x == same).all(axis=1)
    # Where there is no layer norm, the numbers are of no use, but finite.
    eps = Bounded.exactly(np.where(undefined, 1.0, norm.eps)[:, None])
    found = normalized(Bounded.exactly(x), eps, Bounded.exactly, norm.kind)
    return _Part(x, spoiled, undefined, found)


def _parameter(parameter: Array | None, n: int, default: float) -> Array:
    return np.full(n, default) if parameter is None else parameter.reshape(-1).astype(np.float64)


def _with_offset(scale: Array, norm: Norm) -> Bounded:
    """Return ``gamma + gamma_offset`` as one row."""
    exactly = Bounded.exactly(scale[None])
    return exactly + Bounded.exactly(norm.gamma_offset) if norm.gamma_offset else exactly


def _vanishes(g: Wide, dy: Array, scale: Wide, norm: Norm) -> Array:
    """Tell of which rows dx is 0 throughout, as far as that is seen without integers."""
    n = dy.shape[1]
    if norm.eps == 0 and n == (2 if norm.kind == "layer" else 1):
        return np.full(len(dy), True)
    if norm.kind == "rms":
        none: Array = (g.hi == 0).all(axis=1)
        return none
    # A product with a pair is rounded: then equal ones may differ.
    return _constant(Wide.exactly(dy)) & _constant(scale) if norm.gamma_offset else _constant(g)


def _constant(v: Wide) -> Array:
    """Tell which rows have elements all of which are the same."""
    if not isinstance(v.exponent, int):
        v = v.scaled_to(v.magnitude().max(axis=1, keepdims=True))
    same: Array = ((v.hi == v.hi[:, :1]) & (v.lo == v.lo[:, :1])).all(axis=1)
    return same
