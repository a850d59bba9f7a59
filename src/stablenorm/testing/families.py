"""
Hard inputs for a layer norm: the families F01 to F38, one table.

Each is a way in which implementations in use lose their digits: an offset, a row constant but
for its last bit, an outlier, squares that overflow or underflow, a cotangent that the projection
annihilates. `make_case` builds one for a dtype and a length; what judges the results is the
reader's choice, nothing of the package is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stablenorm.types import Array

# With fewer elements, a family built on one marked element has no row left around it.
_ENOUGH = 8
# Enough for dgamma and dbeta to be sums.
_ROWS = 2


class Case(NamedTuple):
    """
    One input: `x` and `dy` (rows, n), `gamma` and `beta` (n,), all of one dtype, and `eps`.
    """

    x: Array
    gamma: Array
    beta: Array
    eps: float
    dy: Array


class Format(NamedTuple):
    """A floating type in numbers: `p` bits of precision, the largest value, exponent limits."""

    dtype: Any
    p: int
    largest: float
    emax: int
    emin: int


class Family(NamedTuple):
    """
    A family of inputs.

    `build` takes (format, rows, n, rng) and returns the float64 parts that differ from the
    ordinary case: x, and gamma, beta, dy, eps where the family is about them. With fewer than
    `smallest_n` elements or `smallest_rows` rows it would be another family; `without` maps
    the dtypes for which there is none to the reason.
    """

    name: str
    title: str
    build: Callable[[Format, int, int, np.random.Generator], dict[str, Any]]
    smallest_n: int = 1
    smallest_rows: int = 1
    without: Mapping[str, str] = MappingProxyType({})
    # False where the input holds NaN or infinity, which an exact oracle cannot take.
    finite: bool = True

    def why_not(self, dtype: Any, n: int, rows: int | None = None) -> str:
        """Say why the family does not exist for this dtype and shape; "" where it does."""
        kind = np.dtype(dtype).name
        if kind in self.without:
            return f"{self.name} must have another dtype than {kind}, {self.without[kind]}"
        if n < self.smallest_n:
            return f"{self.name} must have n >= {self.smallest_n}, got {n}"
        if rows is not None and rows < self.smallest_rows:
            return f"{self.name} must have rows >= {self.smallest_rows}, got {rows}"
        return ""

    def applies(self, dtype: Any, n: int) -> bool:
        """Tell whether the family exists for this dtype and row length."""
        return not self.why_not(dtype, n)


def format_of(dtype: Any) -> Format:
    """Return the numbers of a floating dtype."""
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return Format(
        np.dtype(dtype),
        int(info.nmant) + 1,
        float(info.max),
        int(info.maxexp) - 1,
        int(info.minexp),
    )


def make_case(
    name: str,
    dtype: Any,
    n: int,
    rows: int | None = None,
    rng: np.random.Generator | int | None = 0,
) -> Case:
    """
    Build one case of the family `name`.

    Parameters
    ----------
    name : str
        A key of `FAMILIES`, such as "F07".
    dtype : dtype
        float16, bfloat16, float32 or float64: of all four arrays.
    n : int
        Elements of a row.
    rows : int, optional
        Two, or as many as the family needs, if not given.
    rng : Generator or int, default: 0
        Normalized by ``np.random.default_rng``; the same one gives the same case.

    Returns
    -------
    Case
        x and dy (rows, n), gamma and beta (n,), eps.

    Raises
    ------
    ValueError
        If there is no family of that name, or not for this dtype, n or rows
        (`Family.why_not` tells).

    Examples
    --------
    >>> from stablenorm.testing.families import make_case
    >>> case = make_case("F06", "float32", n=5)
    >>> case.x[0]
    array([524288., 524289., 524290., 524291., 524288.], dtype=float32)
    """
    if name not in FAMILIES:
        msg = f"name must be one of {', '.join(FAMILIES)}, got {name!r}"
        raise ValueError(msg)
    family = FAMILIES[name]
    if why_not := family.why_not(dtype, n, rows):
        raise ValueError(why_not)
    rows = max(_ROWS, family.smallest_rows) if rows is None else rows
    rng = np.random.default_rng(rng)
    with np.errstate(all="ignore"):
        return _complete(family.build(format_of(dtype), rows, n, rng), dtype, rng)


def _complete(parts: dict[str, Any], dtype: Any, rng: np.random.Generator) -> Case:
    """Round the parts given to `dtype`, and draw those that are not."""
    rows, n = np.shape(parts["x"])
    drawn = {
        "gamma": 1 + 0.1 * rng.standard_normal(n),
        "beta": 0.1 * rng.standard_normal(n),
        "dy": rng.standard_normal((rows, n)),
    }
    parts = {"eps": 1e-5, **drawn, **parts}
    parts["gamma"] = np.broadcast_to(parts["gamma"], n)
    x, gamma, beta, dy = (_cast(parts[key], dtype) for key in ("x", "gamma", "beta", "dy"))
    return Case(x, gamma, beta, float(parts["eps"]), dy)


def _cast(value: Any, dtype: Any) -> Array:
    """Round to `dtype`, keeping what is meant to be finite finite."""
    largest = format_of(dtype).largest
    value = np.asarray(value, dtype=np.float64)
    clipped = np.where(np.isfinite(value), np.clip(value, -largest, largest), value)
    return clipped.astype(dtype)


def _plain_xhat(x: Array, eps: float) -> Array:
    """The textbook formula in float64: good enough to build an input from."""
    x = x.astype(np.float64)
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered * centered).mean(axis=-1, keepdims=True) + eps)


# ---- what the families are made of ----


def _normal(_: Format, rows: int, n: int, rng: np.random.Generator) -> Array:
    return rng.standard_normal((rows, n))


def _offset(power: Callable[[Format], float]) -> Callable[..., dict[str, Any]]:
    return lambda f, rows, n, rng: {"x": power(f) + _normal(f, rows, n, rng)}


def _scaled(scale: Callable[[Format], float], **rest: Any) -> Callable[..., dict[str, Any]]:
    return lambda f, rows, n, rng: {"x": scale(f) * _normal(f, rows, n, rng), **rest}


def _with_outlier(value: Callable[[Format], float]) -> Callable[..., dict[str, Any]]:
    def build(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
        x = _normal(f, rows, n, rng)
        x[:, 5] = value(f)
        return {"x": x}

    return build


def _cotangent(make: Callable[..., Array], **rest: Any) -> Callable[..., dict[str, Any]]:
    def build(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": _normal(f, rows, n, rng), "dy": make(rows, n, rng), **rest}

    return build


def _dy_is_y(eps: float) -> Callable[..., dict[str, Any]]:
    def build(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
        x = _normal(f, rows, n, rng)
        xhat = _plain_xhat(_cast(x, f.dtype), eps)
        return {"x": x, "gamma": np.ones(n), "beta": np.zeros(n), "dy": xhat, "eps": eps}

    return build


def _cancelling_beta(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    x, gamma = _normal(f, rows, n, rng), 1 + 0.1 * rng.standard_normal(n)
    # Of the first row: the others cancel less.
    xhat = _plain_xhat(_cast(x, f.dtype), 1e-5)[0]
    return {"x": x, "gamma": gamma, "beta": -_cast(gamma, f.dtype).astype(np.float64) * xhat}


def _ulp(f: Format, below: int = 1) -> float:
    """Return 2**-(p - below): the spacing of the floats at 1 for below = 1."""
    return 2.0 ** (below - f.p)


def _integers_at_full_precision(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    return {"x": 2.0 ** (f.p - 1) + np.rint(2 * _normal(f, rows, n, rng)), "eps": 0.0}


def _ramp(f: Format, rows: int, n: int, _: Any) -> dict[str, Any]:
    return {"x": 2.0 ** (f.p - 5) + np.tile(np.arange(n) % 4, (rows, 1))}


def _one_ulp_up(f: Format, rows: int, n: int, _: Any) -> dict[str, Any]:
    # 1.7 rounded to p bits; the spacing in [1, 2) is 2**(1-p).
    base = np.rint(1.7 / _ulp(f)) * _ulp(f)
    x = np.full((rows, n), base)
    x[:, n // 2] += _ulp(f)
    return {"x": x, "eps": 0.0}


def _coin(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    flips = rng.integers(0, 2, (rows, n))
    flips[:, :2] = 0, 1
    return {"x": 1 + flips * _ulp(f), "eps": 0.0}


def _constant(_f: Format, rows: int, n: int, _: Any) -> dict[str, Any]:
    x = np.full((rows, n), 0.1)
    x[1::2] = 12345.678
    return {"x": x, "eps": 1e-12}


def _near_the_mean(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    x = 1 + rng.integers(-8, 9, (rows, n)) * 2.0 ** -(f.p - 5)
    x[:, 1:3] = 1 - 2.0 ** -(f.p - 5), 1 + 2.0 ** -(f.p - 5)
    x[:, 0] = x[:, 1:].mean(axis=-1)
    return {"x": x, "eps": 0.0}


def _pairs(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    x = _normal(f, rows, n, rng)
    x[:, 1 : n // 2 * 2 : 2] = -x[:, : n // 2 * 2 : 2]
    x[:, n // 2 * 2 :] = 0
    x[:, -1] += 2.0 ** -(f.p - 2)
    return {"x": x}


def _squares_overflow(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    scale = 5000.0 if f.dtype == np.float16 else 2.0 ** (f.emax // 2 + 4)
    return {"x": scale * _normal(f, rows, n, rng)}


def _largest(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    return {"x": f.largest * np.sign(_normal(f, rows, n, rng))}


def _sum_overflows(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": f.largest * (1 - rng.integers(0, 8, (rows, n)) * 2.0**-f.p)}


def _subnormals(eps: float) -> Callable[..., dict[str, Any]]:
    def build(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
        k = rng.integers(-9, 10, (rows, n)).astype(np.float64)
        k[:, :2] = -3, 5
        return {"x": np.ldexp(k, f.emin - f.p + 1), "eps": eps}

    return build


def _lognormal(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    return {"x": np.exp((2 if f.dtype == np.float16 else 6) * _normal(f, rows, n, rng))}


def _two_outliers(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    x = _normal(f, rows, n, rng)
    x[:, 3] = 2.0 ** min(f.p - 2, 14)
    x[:, 9] = -x[:, 3]
    return {"x": x}


def _halves(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    x = 2.0 ** -(f.p - 4) * _normal(f, rows, n, rng)
    x[:, : n // 2] += 1
    x[:, n // 2 :] -= 1
    return {"x": x}


def _residual_stream(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    x = 7.4e3 * _normal(f, rows, n, rng)
    x[:, :4] = 2.77e5, -2.7e5, 2.5e5, -2.6e5
    return {"x": x / (8 if f.dtype == np.float16 else 1), "eps": 1e-6}


def _var_below_eps(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    if f.dtype == np.float16:
        return {"x": 1e-4 * _normal(f, rows, n, rng), "eps": 1e-2}
    return {"x": 1e-6 * _normal(f, rows, n, rng)}


def _one_hot(rows: int, n: int, _: Any) -> Array:
    dy = np.zeros((rows, n))
    dy[:, n // 3] = 1
    return dy


def _signed_lognormal(rows: int, n: int, rng: np.random.Generator) -> Array:
    v = rng.standard_normal((rows, n))
    return np.sign(v) * np.exp(4 * rng.standard_normal((rows, n)))


def _hard_gamma(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    tiny = 3 * 2.0 ** (f.emin - f.p + 1)
    values = np.array([0.0, -0.0, min(1e30, f.largest / 8), tiny, -1.0, 2.0, -tiny])
    return {"x": _normal(f, rows, n, rng), "gamma": np.resize(values, n)}


def _neighbours(f: Format, rows: int, n: int, _: Any) -> dict[str, Any]:
    return {"x": 1 + np.tile(np.arange(n) % 2, (rows, 1)) * _ulp(f), "eps": 0.0}


def _row_pairs(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    x, dy = _normal(f, rows, n, rng), _normal(f, rows, n, rng)
    half = rows // 2
    x[half : 2 * half], dy[half : 2 * half] = x[:half], -dy[:half]
    return {"x": x, "dy": dy}


def _not_finite(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    x = _normal(f, rows, n, rng)
    x[0, 0], x[1, n // 2], x[-1, n - 1] = np.nan, np.inf, -0.0
    return {"x": x}


def _shuffled(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Rows hold the same numbers: sorted, reversed, then shuffled."""
    # Rounded first: equal elements have equal dy, whichever comes first.
    base = np.sort(_cast(3 + rng.standard_normal(n), f.dtype).astype(np.float64))
    x = np.stack([base, base[::-1], *(rng.permutation(base) for _ in range(rows))])[:rows]
    return {"x": x, "gamma": np.ones(n), "beta": np.zeros(n), "dy": np.cos(x)}


def _offsets(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    offsets = np.resize([0.0, 1.0, 10.0, 100.0], rows)[:, None]
    return {"x": offsets + _normal(f, rows, n, rng)}


_ALL = (
    Family("F01", "mean 0, std 1", lambda f, r, n, g: {"x": _normal(f, r, n, g)}),
    Family("F02", "mean 16, std 1", _offset(lambda _: 16.0)),
    Family(
        "F03", "mean 2^(p/2), std 1: half of the bits left", _offset(lambda f: 2.0 ** (f.p // 2))
    ),
    Family("F04", "mean 2^(p-3), std 1: three bits left", _offset(lambda f: 2.0 ** (f.p - 3))),
    Family("F05", "integers around 2^(p-1), eps 0", _integers_at_full_precision, 8),
    Family("F06", "0, 1, 2, 3 repeated, on 2^(p-5)", _ramp),
    Family("F07", "constant, but one element an ulp up, eps 0", _one_ulp_up, 2),
    Family("F08", "1 or the next float, at random, eps 0", _coin, 2),
    Family("F09", "constant rows, eps 1e-12", _constant, smallest_rows=2),
    Family("F10", "around 1, one element at the mean, eps 0", _near_the_mean, 3),
    Family("F11", "pairs of +v and -v, the last a little more", _pairs, 2),
    Family("F12", "squares overflow", _squares_overflow),
    Family("F13", "plus and minus the largest float", _largest),
    Family("F14", "near the largest float: the sum overflows", _sum_overflows),
    Family(
        "F15",
        "squares underflow, eps 0",
        _scaled(lambda f: 2.0 ** (f.emin // 2 - 8), eps=0.0),
        2,
    ),
    Family("F16", "subnormals, eps 0", _subnormals(0.0), 2),
    Family("F17", "subnormals, eps 1e-5", _subnormals(1e-5), 2),
    Family("F18", "exponentials of normal numbers", _lognormal),
    Family("F19", "one outlier of 1024", _with_outlier(lambda _: 2.0**10), _ENOUGH),
    Family(
        "F20", "one outlier of 2^p", _with_outlier(lambda f: 2.0 ** min(f.p, f.emax - 1)), _ENOUGH
    ),
    Family(
        "F21",
        "one outlier whose square overflows",
        _with_outlier(lambda f: 2.0 ** (f.emax // 2 + 2)),
        _ENOUGH,
        # It would be 2^9, less than that of F19: float32 holds its square.
        without={"float16": "whose squares do not overflow in float32"},
    ),
    Family("F22", "two opposite outliers", _two_outliers, 10),
    Family("F23", "one half around +1, the other around -1", _halves, 2),
    Family("F24", "four outliers of 2.7e5, eps 1e-6", _residual_stream, _ENOUGH),
    Family("F25", "variance far below eps", _var_below_eps),
    Family("F26", "variance equal to eps", _scaled(lambda _: 1e-5**0.5)),
    Family(
        "F27", "dy = 1, gamma = 1: dx is 0", _cotangent(lambda r, n, _: np.ones((r, n)), gamma=1.0)
    ),
    Family("F28", "dy = y, gamma = 1: dx nearly vanishes", _dy_is_y(1e-5)),
    Family("F28b", "dy = y, gamma = 1, eps 0: dx is dy's rounding", _dy_is_y(0.0), 2),
    Family(
        "F29",
        "dy = 1 + N/1000, gamma = 1",
        _cotangent(lambda r, n, g: 1 + 1e-3 * g.standard_normal((r, n)), gamma=1.0),
    ),
    Family("F30", "dy one-hot", _cotangent(_one_hot)),
    Family("F31", "dy of very different sizes", _cotangent(_signed_lognormal)),
    Family("F32", "beta cancels gamma * xhat", _cancelling_beta),
    Family("F33", "gamma of 0, -0, 1e30, subnormals", _hard_gamma),
    Family("F34", "two neighbouring floats, eps 0", _neighbours, 2),
    Family("F35", "rows in pairs: dgamma, dbeta cancel", _row_pairs, smallest_rows=2),
    Family("F36", "NaN, infinity, -0", _not_finite, smallest_rows=3, finite=False),
    Family("F37", "the same numbers in other orders", _shuffled, 2, 3),
    Family("F38", "rows of mean 0, 1, 10, 100", _offsets, smallest_rows=4),
)
FAMILIES = {family.name: family for family in _ALL}
