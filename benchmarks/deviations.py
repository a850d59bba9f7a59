"""Calls that deviate from the plain one, beside the plain call that a user would write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from page import digits, medians, seconds, table

import stablenorm as sn
from stablenorm.timing import make_problem

Ways = list[tuple[str, Callable[[], Any], Callable[[], Any]]]


def deviations() -> list[tuple[Any, ...]]:
    """Time each deviation and what stands beside it, in turns."""
    ways = _small() + _gamma() + _layouts() + _rows()
    return [(what, *medians({"it": it, "plain": plain})) for what, it, plain in ways]


def _small() -> Ways:
    x, gamma, beta, *_ = make_problem((1, 1, 64), "float32")
    plain = lambda: sn.layer_norm(x, gamma, beta)
    eps: Any = np.float32(1e-5)
    named: dict[str, Callable[[], Any]] = {
        "`axis=(-1,)`": lambda: sn.layer_norm(x, gamma, beta, axis=(-1,)),
        "`eps=0`": lambda: sn.layer_norm(x, gamma, beta, 0),
        "`eps=np.float32(1e-5)`": lambda: sn.layer_norm(x, gamma, beta, eps),
    }
    return [(f"(1, 1, 64), {what}", it, plain) for what, it in named.items()]


def _gamma() -> Ways:
    x, gamma, beta, dy, *_ = make_problem((256, 1024), "float32")
    wide, shift = np.ones(1024), np.zeros(1024)
    _, cache = sn.layer_norm_forward(x, gamma, beta)
    _, other = sn.layer_norm_forward(x, wide, shift)
    return [
        (
            "(256, 1024), gamma and beta of float64, forward",
            lambda: sn.layer_norm(x, wide, shift),
            lambda: sn.layer_norm(x, gamma, beta),
        ),
        (
            "the same, backward",
            lambda: sn.layer_norm_backward(dy, other),
            lambda: sn.layer_norm_backward(dy, cache),
        ),
    ]


def _layouts() -> Ways:
    wide, gamma, beta, *_ = make_problem((256, 2048), "float32")
    gamma, beta = gamma[:1024], beta[:1024]
    gaps = wide[:, ::2]
    x, *_ = make_problem((8, 256, 56, 56), "float32")
    scale, shift = make_problem((1, 256), "float32")[1:3]

    def by_copies() -> Any:
        y = sn.layer_norm(np.ascontiguousarray(x.transpose(0, 2, 3, 1)), scale, shift)
        return np.ascontiguousarray(y.transpose(0, 3, 1, 2))

    return [
        (
            "(256, 1024), every second element: over a copy first",
            lambda: sn.layer_norm(gaps, gamma, beta),
            lambda: sn.layer_norm(np.ascontiguousarray(gaps), gamma, beta),
        ),
        (
            "(8, 256, 56, 56), `axis=1`: over two copies around the call",
            lambda: sn.layer_norm(x, scale, shift, axis=1),
            by_copies,
        ),
    ]


def _rows() -> Ways:
    x, gamma, beta, *_ = make_problem((4096, 1024), "float64")
    nan, huge = x.copy(), x.copy()
    nan[7, 7] = np.nan
    huge[7] *= 1e300
    small, scale, shift, dy, *_ = make_problem((65536, 256), "float32")
    hard = small.copy()
    hard[7] = 1
    hard[7, ::2] = np.nextafter(np.float32(1), np.float32(2))
    caches = [
        sn.layer_norm_forward(each, scale, shift, rounding="nearest")[1] for each in (hard, small)
    ]
    plain = lambda: sn.layer_norm(x, gamma, beta)
    return [
        ("(4096, 1024) float64, one row with NaN", lambda: sn.layer_norm(nan, gamma, beta), plain),
        ("the same, one row of 1e300", lambda: sn.layer_norm(huge, gamma, beta), plain),
        (
            "(65536, 256), nearest, one row of two neighbouring floats, backward",
            lambda: sn.layer_norm_backward(dy, caches[0]),
            lambda: sn.layer_norm_backward(dy, caches[1]),
        ),
    ]


def deviations_table(found: list[Any]) -> str:
    """Return the table of the page."""
    lines = [(what, seconds(it), digits(it / plain, 3)) for what, it, plain in found]
    return table(("what", "time", "over the plain call"), lines)
