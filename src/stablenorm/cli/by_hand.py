"""A row of four integers on which a wrong norm can be followed on paper, in fractions."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from stablenorm.cli.user_norm import Norm

# x, and the eps with which rstd is rational: the variance 1 and 3, or the mean square 5 and 4.
_ROWS = {"layer": ((1, 1, 3, 3), 3), "rms": ((1, -3, 1, 3), 4)}
# Both signs, and no two alike, so that no term vanishes or stands for another.
_GAMMA, _DY = (2, -2, 3, -1), (-1, 2, 1, -2)


def lines_by_hand(norm: Norm, kind: str) -> list[str]:
    """Return the row, its statistics, the right dx and theirs, and the terms; [] if their eps is their own."""
    row, eps = _ROWS[kind]
    x, gamma, dy = (np.array([v], float) for v in (row, _GAMMA, _DY))
    # Two equal rows: dgamma is a sum.
    x, dy = np.vstack([x, x]), np.vstack([dy, dy])
    given = gamma[0] if "gamma" in norm.takes else None
    scale = _GAMMA if given is not None else (1, 1, 1, 1)
    mean = Fraction(sum(row), 4) if kind == "layer" else Fraction(0)
    var = sum(((v - mean) ** 2 for v in row), Fraction(0)) / 4
    rstd = Fraction(1, math.isqrt(int(var) + eps))
    xhat = [(v - mean) * rstd for v in row]
    g = [Fraction(a * b) for a, b in zip(scale, _DY, strict=True)]
    of_g = sum(g, Fraction(0)) / 4 if kind == "layer" else Fraction(0)
    slope = sum((a * b for a, b in zip(g, xhat, strict=True)), Fraction(0)) / 4
    terms = {
        "rstd g": [rstd * a for a in g],
        "rstd mean(g)": [rstd * of_g] * 4,
        "rstd xhat mean(g xhat)": [rstd * slope * a for a in xhat],
    }
    right = [a - b - c for a, b, c in zip(*terms.values(), strict=True)]
    beta = np.zeros(4) if "beta" in norm.takes else None
    y, cache = norm.forward(x.copy(), given, beta, float(eps))
    expected = np.array([float(a * b) for a, b in zip(scale, xhat, strict=True)])
    if not np.allclose(np.asarray(y)[0], expected, rtol=1e-5):
        return []
    theirs = [_fraction(v) for v in np.asarray(norm.backward(dy, cache)[0])[0].tolist()]
    apart = [a - b for a, b in zip(theirs, right, strict=True)]
    known = (
        (sign, n) for n, v in terms.items() for sign in (1, -1) if apart == [sign * a for a in v]
    )
    said = [f", too {'large' if sign > 0 else 'small'} by {name}" for sign, name in known]
    statistics = f"mean {mean}, var {var}, " if kind == "layer" else f"mean square {var}, "
    return [
        "",
        f"  on paper: x = {_vector(row)}, gamma = {_vector(scale)}, dy = {_vector(_DY)}, eps = {eps}",
        f"    {statistics}rstd {rstd}, xhat = {_vector(xhat)}, g = {_vector(g)}",
        *(f"    {name} = {_vector(values)}" for name, values in terms.items() if any(values)),
        f"    right dx = {_vector(right)}",
        f"    yours    = {_vector(theirs)}" + "".join(said[:1]),
    ]


def _fraction(value: float) -> Fraction:
    """Return the fraction of few digits that a float stands for, or the float."""
    exact = Fraction(value) if math.isfinite(value) else Fraction(0)
    near = exact.limit_denominator(10_000)
    # Code in float32 is off by less than 1e-6.
    allowed = Fraction(1, 10**6) * max(Fraction(1), abs(exact))
    return near if abs(near - exact) <= allowed else exact.limit_denominator(10**6)


def _vector(values: Sequence[Any]) -> str:
    """Write numbers over their common denominator."""
    fractions = [Fraction(v) for v in values]
    common = math.lcm(*(f.denominator for f in fractions))
    # Numbers of many digits are no fractions of a reader's.
    if common > 10_000:
        return f"({', '.join(f'{float(f):.6g}' for f in fractions)})"
    top = ", ".join(str(int(f * common)) for f in fractions)
    return f"({top})" + f"/{common}" * (common > 1)
