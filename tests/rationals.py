"""The norm in rational arithmetic, rounding to a dtype, and S of the contract."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import ml_dtypes
import numpy as np

DTYPES = [np.dtype(kind) for kind in ("f2", ml_dtypes.bfloat16, "f4", "f8")]
NAMES = ["y", "dx", "dgamma", "dbeta"]


def rational(array):
    """The same numbers as an array of fractions."""
    array = np.asarray(array)
    exact = array if array.dtype == object else array.astype(np.float64)
    return np.vectorize(Fraction, otypes=[object])(exact)


def square_root(value, digits):
    """The square root of a rational to so many digits, by decimal arithmetic."""
    with localcontext() as context:
        context.prec = digits + 10
        context.Emax, context.Emin = 10**6, -(10**6)
        root = (Decimal(value.numerator) / Decimal(value.denominator)).sqrt()
        return Fraction(root)


def unit(value, dtype):
    """The last place of `dtype` at a value other than 0."""
    info, size = ml_dtypes.finfo(dtype), abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    return Fraction(2) ** (max(exponent, int(info.minexp)) - int(info.nmant))


def nearest(value, dtype):
    """Round a Fraction to a multiple of the last place, half to even as Python does; return a float."""
    if not value:
        return 0.0
    rounded = round(value / unit(value, dtype)) * unit(value, dtype)
    beyond = math.inf if value > 0 else -math.inf
    largest = Fraction(float(ml_dtypes.finfo(dtype).max))
    return beyond if abs(rounded) > largest else math.copysign(rounded, value)


def plain(kind, x, gamma, beta, eps, where=None, digits=320):
    """One row of y, its mean, its rstd, by the formula; `digits` are those of the square root."""
    unmasked = x if where is None else x[where]
    mean = unmasked.sum() / unmasked.size if kind == "layer" else Fraction(0)
    rstd = 1 / square_root(((unmasked - mean) ** 2).sum() / unmasked.size + eps, digits)
    y = gamma * (x - mean) * rstd + beta
    return y if where is None else np.where(where, y, Fraction(0)), mean, rstd


def plain_backward(kind, x, gamma, eps, dy, digits=320):
    """One row of dx and the row's terms of dgamma, by the chain rule through rstd and mean."""
    xhat, mean, rstd = plain(kind, x, 1, 0, eps, digits=digits)
    g = gamma * dy
    drstd, dmean = g @ (x - mean), -rstd * g.sum() if kind == "layer" else 0
    return g * rstd + (dmean - drstd * rstd**3 * (x - mean)) / x.size, dy * xhat


def textbook(x, gamma, beta, eps, dy, kind="layer", digits=320):
    """All four quantities as rationals; only the square root is rounded."""
    (x, gamma, beta, dy), eps = map(rational, (x, gamma, beta, dy)), Fraction(eps)
    y = [plain(kind, row, gamma, beta, eps, digits=digits)[0] for row in x]
    rows = zip(x, dy, strict=True)
    pairs = [plain_backward(kind, row, gamma, eps, pulled, digits) for row, pulled in rows]
    dx, dgamma = map(np.array, zip(*pairs, strict=True))
    return {"y": np.array(y), "dx": dx, "dgamma": dgamma.sum(0), "dbeta": dy.sum(0)}


def magnitudes(
    kind, x, gamma, beta, eps, dy, dsum=0.0, tx=0.0, tgamma=0.0, tbeta=0.0, old=(0.0, 0.0)
):  # fmt: skip
    """S of the norm's quantities, and of second order with tangents as cotangents, in float64."""

    is_layer = kind == "layer"
    mean = lambda v: v.mean(-1, keepdims=True)
    center = lambda v: v - is_layer * mean(v)
    spread = lambda v: np.abs(v) + is_layer * mean(np.abs(v))
    inner = lambda a, b: mean(np.abs(a * b))
    projected = lambda v: rstd * (spread(v) + spread(xhat) * inner(center(v), xhat))
    tx = tx + 0 * x
    rstd = 1 / np.sqrt(mean(center(x) ** 2) + eps)
    xhat, g = center(x) * rstd, gamma * dy
    tangent = np.abs(gamma) * projected(tx) + np.abs(tgamma) * spread(xhat) + np.abs(tbeta)
    first = {
        "y": np.abs(gamma) * spread(xhat) + np.abs(beta),
        "dx": projected(g) + np.abs(dsum),
        "ty": tangent,
        "dgamma": (np.abs(dy) * spread(xhat)).sum(0) + np.abs(old[0]),
        "dbeta": np.abs(dy).sum(0) + np.abs(old[1]),
    }
    bent = inner(center(g), xhat) * projected(tx) + inner(center(tx), xhat) * projected(g)
    bent += spread(xhat) * inner(center(tx), projected(g))
    return first, {
        "ddy": tangent,
        "dx": projected(tgamma * dy) + rstd * bent,
        "dgamma": (np.abs(dy) * projected(tx)).sum(0),
    }
