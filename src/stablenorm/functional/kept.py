"""`save=`: what a cache keeps in the place of x and its statistics, and how these are made again."""

from __future__ import annotations

import math
from textwrap import shorten
from typing import Any

import numpy as np

from stablenorm.arrays import HOST, as_matrix, as_rows
from stablenorm.control import default_control
from stablenorm.formats import format_of
from stablenorm.functional import samples
from stablenorm.reference.rounding import round_to
from stablenorm.types import Array, Cache, Norm, Statistics

_SAVES = ("x", "y", "recompute")

# The most that an element of xhat, itself of size 1, may lose by the rounding of y: two bits of the
# eight that bfloat16 has. y keeps that for |beta| <= 3 |gamma| in bfloat16, 31 in float16, 2**18 in
# float32 and 2**47 in float64.
_MOST_LOST = 2.0**-6

# Elements that are made again at a time.
_BLOCK = 1 << 15

_NOTHING: Any = (None,) * len(Statistics._fields)


def check_save(save: Any, norm: Norm, x: Array, axes: tuple[int, ...], residual: Any) -> None:
    """Raise unless what the backward needs of x can be had again from what is saved."""
    if not isinstance(save, str) or save not in _SAVES:
        msg = f'save must be "x", "y" or "recompute", got {shorten(repr(save), 60)}'
        raise ValueError(msg)
    if save != "y":
        return
    if norm.rounding == "nearest":
        msg = (
            'save must be "x" or "recompute" with rounding="nearest", which needs x itself, got "y"'
        )
        raise ValueError(msg)
    if residual is not None:
        msg = 'save must be "x" or "recompute" with a residual, whose sum is cache.x, got "y"'
        raise ValueError(msg)
    n, form = math.prod(x.shape[axis] for axis in axes), format_of(x.dtype)
    scale, shift = np.broadcast_arrays(*_parameters(norm))
    with np.errstate(all="ignore"):
        lost = 2.0**-form.digits * (1 + np.abs(shift / scale))
        # Half of the smallest subnormal number.
        lost += 2.0 ** (form.emin - form.digits) / np.abs(scale)
        largest = np.abs(scale) * np.sqrt(n) + np.abs(shift)
    carried = (lost <= _MOST_LOST) & (largest <= form.largest)
    if not carried.all():
        at = np.unravel_index(np.argmin(carried), carried.shape)
        msg = (
            f'save="y" needs a gamma and beta from whose y, in {x.dtype}, xhat can be had to 2**-6; got '
            f"gamma {scale[at]:.3g} and beta {shift[at]:.3g} at {tuple(map(int, at))}; use "
            'save="x" or save="recompute"'
        )
        raise TypeError(msg)


def saved(save: str, x: Any, y: Array, statistics: Statistics) -> tuple[Array, Statistics]:
    """Return what a cache keeps: x or y, and statistics."""
    return (y, statistics) if save == "y" else (x, Statistics(*_NOTHING))


def restored(cache: Cache) -> Cache:
    """Return the cache of ``save="x"``: x and the statistics, made again."""
    if cache.save == "y":
        return cache._replace(x=_x_again(cache), save="x")
    # One row that all write over: nobody reads this y.
    x, norm, axes = cache[:3]
    row = np.empty([length if i in axes else 1 for i, length in enumerate(x.shape)], x.dtype)
    strides = [step if i in axes else 0 for i, step in enumerate(row.strides)]
    y = np.lib.stride_tricks.as_strided(row, x.shape, strides)
    statistics = samples.forward(cache.backend, True, x, norm, axes, y, None, cache.where)
    return cache._replace(statistics=statistics, save="x")


@default_control()
def _x_again(cache: Cache) -> Array:
    """Return x from y, rounded to its dtype: the same x where y tells its neighbours apart."""
    y, _, axes, kept = cache[:4]
    x = HOST.empty(y.shape, y.dtype, y)
    last = tuple(range(y.ndim - len(axes), y.ndim))
    shape = np.moveaxis(y, axes, last).shape
    scale, shift = (
        as_matrix(as_rows(np.broadcast_to(each, shape), last)) for each in _parameters(cache.norm)
    )
    of_y, of_x = (as_matrix(as_rows(each, axes)) for each in (y, x))
    mean, largest = cache.mean.reshape(-1, 1), format_of(x.dtype).largest
    count, n = of_y.shape
    for start in range(0, count, step := max(1, _BLOCK // n)):
        rows = slice(start, min(start + step, count))
        with np.errstate(all="ignore"):
            centered = (of_y[rows].astype(np.float64) - shift[rows]) / scale[rows]
            centered /= kept.rstd[rows, None]
            if kept.exponent is not None:
                centered = np.ldexp(centered, -kept.exponent[rows, 1:])
            # What is rounded up beyond the largest number was that.
            of_x[rows] = round_to(np.clip(centered + mean[rows], -largest, largest), x.dtype)
    return x


def _parameters(norm: Norm) -> tuple[Array, Array]:
    """Return gamma + gamma_offset and beta in float64."""
    gamma = np.ones(1) if norm.gamma is None else norm.gamma.astype(np.float64)
    beta = np.zeros(1) if norm.beta is None else norm.beta.astype(np.float64)
    return gamma + norm.gamma_offset, beta
