"""
Norms of known arithmetic, right ones and ones with a fault, to judge the judge by.

All are NumPy in float32 unless they say otherwise. `run` computes y, dx, dgamma and dbeta; its
keywords put one fault, or one way of summing, into it.
"""

# ruff: noqa: ARG001, ARG005 - all faults have one signature
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.records import Array, bfloat16

F32 = np.float32
Sum = Callable[[Array], Array]


def pairwise(a: Array) -> Array:
    return np.asarray(a.sum(axis=-1, keepdims=True, dtype=a.dtype))


def running(a: Array) -> Array:
    return np.asarray(np.add.accumulate(a, axis=-1, dtype=a.dtype)[..., -1:])


def backwards(a: Array) -> Array:
    return running(a[..., ::-1])


def lanes(a: Array) -> Array:
    """Sum in 32 lanes, then in a tree, as a warp does."""
    padded = np.zeros((*a.shape[:-1], -(-a.shape[-1] // 32) * 32), a.dtype)
    padded[..., : a.shape[-1]] = a
    parts = running(np.moveaxis(padded.reshape(*a.shape[:-1], -1, 32), -2, -1))[..., 0]
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts


ORDERS: dict[str, Sum] = {
    "pairwise": pairwise, "running": running, "backwards": backwards, "lanes": lanes,
}  # fmt: skip


def narrow(a: Any, dtype: Any) -> Any:
    return np.asarray(a).astype(dtype).astype(np.asarray(a).dtype)


def run(
    x: Array, gamma: Array, beta: Array, eps: float, dy: Array, *, total: Sum = pairwise,
    kind: str = "layer", dtype: Any = None, cast: str = "y", change: Any = None, back: Any = None,
    means: Any = None, over_rows: Sum | None = None, apply: Any = None,
) -> dict[str, Array]:  # fmt: skip
    """
    Return the outputs.

    `change` and `back` map (x, mean, var, rstd, eps) to another mean and rstd, of both directions or of
    the backward alone; `means` maps mean(g), mean(g xhat) and n to others; `apply` makes xhat.
    """
    wide = dtype or (np.float64 if x.dtype == np.float64 else F32)
    wx, wg, n = x.astype(wide), gamma.astype(wide), wide(x.shape[-1])
    mean = total(wx) / n if kind == "layer" else np.zeros((len(x), 1), wide)
    centered = wx - mean
    var = total(centered * centered) / n
    rstd = wide(1) / np.sqrt(var + wide(eps))
    if change:
        mean, rstd = change(wx, mean, var, rstd, wide(eps))
    xhat = apply(wx, mean, rstd) if apply else (wx - mean) * rstd
    if cast == "xhat":
        y = (xhat.astype(x.dtype) * gamma).astype(x.dtype) + beta
    else:
        y = (xhat * wg + beta.astype(wide)).astype(x.dtype)
    if back:
        mean, rstd = back(wx, mean, var, rstd, wide(eps))
        xhat = (wx - mean) * rstd
    wdy = dy.astype(wide)
    g = wg * wdy
    of_g = total(g) / n if kind == "layer" else wide(0)
    along = total(g * xhat) / n
    if means:
        of_g, along = means(of_g, along, n)
    dx = (rstd * (g - of_g - xhat * along)).astype(x.dtype)
    rows = over_rows or total
    dgamma, dbeta = (rows(np.ascontiguousarray(a.T))[:, 0] for a in (wdy * xhat, wdy))
    return {
        "y": y,
        "dx": dx,
        "dgamma": dgamma.astype(gamma.dtype),
        "dbeta": dbeta.astype(beta.dtype),
    }


# ---- faults ----


def one_pass(x: Array, m: Array, v: Array, r: Array, eps: Any) -> Any:
    var = np.maximum(pairwise(x * x) / F32(x.shape[-1]) - m * m, 0)
    return m, F32(1) / np.sqrt(var + eps)


def padded(width: int) -> Any:
    def change(x: Array, m: Array, v: Array, r: Array, eps: Any) -> Any:
        n = x.shape[-1]
        return m, F32(1) / np.sqrt(v + F32((width - n) / n) * m * m + eps)

    return change


def kept(dtype: Any, what: str) -> Any:
    def change(x: Array, m: Array, v: Array, r: Array, eps: Any) -> Any:
        return (narrow(m, dtype), r) if what == "mean" else (m, narrow(r, dtype))

    return change


def _exact_mean(x: Array, m: Array, v: Array, r: Array, eps: Any) -> Any:
    return x.astype(float).mean(axis=-1, keepdims=True).astype(F32), r


FAULTS: dict[str, Any] = {
    "one-pass": one_pass,
    "rstd in bfloat16": kept(bfloat16, "rstd"),
    "rstd in float16": kept(np.float16, "rstd"),
    "mean in bfloat16": kept(bfloat16, "mean"),
    "mean in float16": kept(np.float16, "mean"),
    "padded to 1024": padded(1024),
    "padded to 800": padded(800),
    "eps missing": lambda x, m, v, r, eps: (m, 1 / np.sqrt(v)),
    "eps outside": lambda x, m, v, r, eps: (m, 1 / (np.sqrt(v) + eps)),
    "n - 1": lambda x, m, v, r, eps: (
        m, 1 / np.sqrt(v * F32(x.shape[-1] / (x.shape[-1] - 1)) + eps)),
}  # fmt: skip


class Known(NamedTuple):
    """A norm whose loss is known: how it computes, its input, the output and its largest part, the mistake."""

    options: dict[str, Any]
    offset: float
    output: str
    part: str
    mistake: str = ""
    scale: float = 1.0
    rows: int = 8
    dtype: Any = F32
    n: int = 768


def _changed(name: str) -> dict[str, Any]:
    return {"change": FAULTS[name]}


def _in_blocks(a: Array) -> Array:
    return np.asarray(a.astype(float).sum(axis=-1, keepdims=True).astype(a.dtype))


_KEPT, _DIVIDED = "kept in bfloat16", "the variance is divided by n - 1"
_PADDED = "256 padded elements count as zeros"
# fmt: off
KNOWN: dict[str, Known] = {
    "pairwise, offset 1000": Known({}, 1e3, "y", "mean"),
    "running, offset 1000": Known({"total": running}, 1e3, "y", "mean"),
    "lanes, offset 10 000": Known({"total": lanes}, 1e4, "y", "mean"),
    "exact mean, offset 1000": Known({"change": _exact_mean}, 1e3, "y", "mean"),
    "float64": Known({"dtype": np.float64}, 1e3, "y", "rest"),
    "bfloat16": Known({}, 1.0, "y", "rest", dtype=bfloat16),
    "float16, offset 10": Known({}, 10.0, "y", "rest", dtype=np.float16),
    "one-pass, offset 100": Known(_changed("one-pass"), 1e2, "y", "rstd", "the variance is E[x**2] - mean**2"),
    "one-pass, offset 1000": Known(_changed("one-pass"), 1e3, "y", "rstd", "the variance is E[x**2] - mean**2"),
    "one-pass, dx": Known(_changed("one-pass"), 1e3, "dx", "rstd", "the variance is E[x**2] - mean**2"),
    "rstd in bfloat16": Known(_changed("rstd in bfloat16"), 0.0, "y", "rstd", _KEPT),
    "rstd in bfloat16, offset 1000": Known(_changed("rstd in bfloat16"), 1e3, "y", "rstd", _KEPT),
    "rstd in float16": Known(_changed("rstd in float16"), 1.0, "y", "rstd", "kept in float16"),
    "rstd in bfloat16, bfloat16": Known(
        _changed("rstd in bfloat16"), 0.0, "y", "rstd", _KEPT, dtype=bfloat16),
    "mean in bfloat16": Known(_changed("mean in bfloat16"), 1.0, "y", "mean", _KEPT),
    "mean in bfloat16, offset 100": Known(_changed("mean in bfloat16"), 1e2, "y", "mean", _KEPT),
    "mean in float16, offset 10": Known(_changed("mean in float16"), 10.0, "y", "mean", "kept in float16"),
    "padding": Known(_changed("padded to 1024"), 1.0, "y", "rstd", _PADDED),
    "padding, offset 10": Known(_changed("padded to 1024"), 10.0, "y", "rstd", _PADDED),
    "padding to a multiple of 32": Known(
        _changed("padded to 800"), 1.0, "y", "rstd", "30 padded elements count as zeros", n=770),
    "eps missing": Known(_changed("eps missing"), 0.0, "y", "rstd", "eps is missing"),
    "eps missing, std 0.01": Known(_changed("eps missing"), 0.0, "y", "rstd", "eps is missing", 0.01),
    "eps outside": Known(_changed("eps outside"), 0.0, "y", "rstd", "eps is added outside the root"),
    "n - 1": Known(_changed("n - 1"), 0.0, "y", "rstd", _DIVIDED),
    "scaled before centered": Known(
        {"dtype": np.float64, "apply": lambda x, m, r: (
            (x * r).astype(F32) - m * r)},
        1e3, "y", "rest", "x is scaled before the mean is subtracted"),
    "mean(g) missing": Known({"means": lambda g, b, n: (0 * g, b)}, 0.0, "dx", "mean(g)", "which is missing"),
    "mean(g) by n - 1": Known(
        {"means": lambda g, b, n: (g * n / (n - 1), b)}, 0.0, "dx", "mean(g)", "which is divided by n - 1"),
    "xhat term missing": Known({"means": lambda g, b, n: (g, 0 * b)}, 0.0, "dx", "mean(g xhat)", "which is missing"),
    "xhat term not divided by n": Known(
        {"means": lambda g, b, n: (g, b * n)}, 0.0, "dx", "mean(g xhat)", "which is not divided by n"),
    "n - 1 in the backward": Known({"back": FAULTS["n - 1"]}, 0.0, "dx", "rstd", _DIVIDED),
    "eps missing in the backward": Known({"back": FAULTS["eps missing"]}, 0.0, "dx", "rstd", "eps is missing"),
    "rstd in bfloat16 in the backward": Known({"back": FAULTS["rstd in bfloat16"]}, 0.0, "dx", "rstd", _KEPT),
    "mean in bfloat16 in the backward": Known({"back": FAULTS["mean in bfloat16"]}, 1.0, "dx", "xhat", _KEPT),
    "rows summed in bfloat16": Known(
        {"over_rows": lambda a: running(a.astype(bfloat16)).astype(F32)}, 0.0, "dbeta", "order", "summed in bfloat16"),
    "rows summed one by one": Known({"over_rows": running}, 0.0, "dbeta", "order", rows=4096, n=16),
    "dgamma of a wrong rstd": Known(_changed("rstd in bfloat16"), 0.0, "dgamma", "statistics"),
}
# fmt: on


def inputs(known: Known, seed: int = 0) -> tuple[Any, ...]:
    """Return x, gamma, beta, eps and dy for a known norm."""
    rng = np.random.default_rng(seed)
    x = known.scale * (known.offset + rng.standard_normal((known.rows, known.n)))
    # dy around 1: sums over rows grow.
    dy = rng.standard_normal((known.rows, known.n)) + 1.0 * (known.rows > 100)
    gamma, beta = 1 + 0.1 * rng.standard_normal(known.n), 0.1 * rng.standard_normal(known.n)
    x, gamma, beta, dy = (a.astype(known.dtype) for a in (x, gamma, beta, dy))
    return x, gamma, beta, 1e-5, dy
