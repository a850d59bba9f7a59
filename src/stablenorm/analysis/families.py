"""
Hard inputs for a layer norm: the families F01 to F38, one table.

Each is a way in which implementations in use lose their digits: an offset, a row constant but
for its last bit, an outlier, squares that overflow or underflow, a cotangent that the projection
annihilates. `make_case` builds one for a dtype and a length; what judges the results is the
reader's choice, nothing of the package is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stablenorm._types import Array

# With fewer elements, a family built on one marked element has no row left around it.
_ENOUGH = 8


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

    name: str
    p: int
    largest: float
    emax: int
    emin: int


class Family(NamedTuple):
    """
    A family of inputs.

    `build` takes (format, rows, n, rng) and returns the float64 parts that differ from the
    ordinary case: x, and gamma, beta, dy, eps where the family is about them.
    """

    name: str
    title: str
    build: Callable[[Format, int, int, np.random.Generator], dict[str, Any]]
    smallest_n: int = 1
    without: tuple[str, ...] = ()
    # False where the input holds NaN or infinity, which an exact oracle cannot take.
    finite: bool = True

    def applies(self, dtype: Any, n: int) -> bool:
        """Tell whether the family exists for this dtype and row length."""
        return n >= self.smallest_n and np.dtype(dtype).name not in self.without


def format_of(dtype: Any) -> Format:
    """Return the numbers of a floating dtype."""
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return Format(
        np.dtype(dtype).name,
        int(info.nmant) + 1,
        float(info.max),
        int(info.maxexp) - 1,
        int(info.minexp),
    )


def make_case(
    name: str, dtype: Any, n: int, rows: int = 2, rng: np.random.Generator | int | None = 0
) -> Case:
    """
    Build one case of the family `name`.

    Parameters
    ----------
    name : str
        A key of `FAMILIES`, such as "F07".
    dtype : dtype
        float16, bfloat16, float32 or float64: of all four arrays.
    n, rows : int
        Elements of a row, and rows.
    rng : Generator or int, default: 0
        Normalized by ``np.random.default_rng``; the same one gives the same case.

    Returns
    -------
    Case
        x and dy (rows, n), gamma and beta (n,), eps.

    Raises
    ------
    KeyError
        If there is no family of that name.
    ValueError
        If the family does not exist for this dtype or n (`Family.applies` tells).

    Examples
    --------
    >>> from stablenorm.analysis.families import make_case
    >>> case = make_case("F06", "float32", n=5)
    >>> case.x[0]
    array([524288., 524289., 524290., 524291., 524288.], dtype=float32)
    """
    family = FAMILIES[name]
    if not family.applies(dtype, n):
        msg = (
            f"{name} must have n >= {family.smallest_n} and a dtype other than "
            f"{family.without or 'none'}, got n={n}, {np.dtype(dtype).name}"
        )
        raise ValueError(msg)
    rng = np.random.default_rng(rng)
    with np.errstate(all="ignore"):
        parts = family.build(format_of(dtype), rows, n, rng)
        gamma = parts.get("gamma", 1 + 0.1 * rng.standard_normal(n))
        beta = parts.get("beta", 0.1 * rng.standard_normal(n))
        dy = parts.get("dy", rng.standard_normal((rows, n)))
        x, gamma, beta, dy = (_cast(v, dtype) for v in (parts["x"], gamma, beta, dy))
        eps = parts.get("eps", 1e-5)
        if name == "F28":
            dy = _cast(_plain_forward(x, gamma, beta, eps), dtype)
        if name == "F32":
            beta = _cast(-_plain_forward(x, gamma, np.zeros(n), eps)[0], dtype)
    return Case(x, gamma, beta, float(eps), dy)


def _cast(value: Any, dtype: Any) -> Array:
    """Round to `dtype`, keeping what is meant to be finite finite."""
    largest = format_of(dtype).largest
    value = np.asarray(value, dtype=np.float64)
    clipped = np.where(np.isfinite(value), np.clip(value, -largest, largest), value)
    return clipped.astype(dtype)


def _plain_forward(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    """The textbook formula in float64: good enough to build an input from."""
    x, gamma, beta = (v.astype(np.float64) for v in (x, gamma, beta))
    centered = x - x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt((centered * centered).mean(axis=-1, keepdims=True) + eps)
    return gamma * (centered * rstd) + beta


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


def _cotangent(make: Callable[..., Array]) -> Callable[..., dict[str, Any]]:
    def build(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": _normal(f, rows, n, rng), "dy": make(rows, n, rng)}

    return build


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
    x[:, 0] = x.mean(axis=-1)
    return {"x": x, "eps": 0.0}


def _pairs(f: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    x = _normal(f, rows, n, rng)
    x[:, 1 : n // 2 * 2 : 2] = -x[:, : n // 2 * 2 : 2]
    x[:, -1] += 2.0 ** -(f.p - 2)
    return {"x": x}


def _squares_overflow(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    scale = 5000.0 if f.name == "float16" else 2.0 ** (f.emax // 2 + 4)
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
    return {"x": np.exp((2 if f.name == "float16" else 6) * _normal(f, rows, n, rng))}


def _two_outliers(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    x = _normal(f, rows, n, rng)
    x[:, 3] = 2.0 ** min(f.p - 2, 14)
    x[:, -9 if n > 16 else 5] = -x[:, 3]
    return {"x": x}


def _halves(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    x = 2.0 ** -(f.p - 4) * _normal(f, rows, n, rng)
    x[:, : n // 2] += 1
    x[:, n // 2 :] -= 1
    return {"x": x}


def _residual_stream(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    x = 7.4e3 * _normal(f, rows, n, rng)
    x[:, :4] = 2.77e5, -2.7e5, 2.5e5, -2.6e5
    return {"x": x / (8 if f.name == "float16" else 1), "eps": 1e-6}


def _var_below_eps(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    if f.name == "float16":
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
    x[0, 0], x[0, n // 2], x[-1, n - 1] = np.nan, np.inf, -0.0
    return {"x": x}


def _shuffled(_: Format, rows: int, n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Rows hold the same numbers: sorted, reversed, then shuffled."""
    base = np.sort(3 + rng.standard_normal(n))
    x = np.stack([base, base[::-1], *(rng.permutation(base) for _ in range(rows))])[:rows]
    return {"x": x, "gamma": np.ones(n), "beta": np.zeros(n), "dy": np.cos(x)}


def _offsets(f: Format, rows: int, n: int, rng: Any) -> dict[str, Any]:
    offsets = np.resize([0.0, 1.0, 10.0, 100.0], rows)[:, None]
    return {"x": offsets + _normal(f, rows, n, rng)}


_ALL = (
    Family("F01", "N(0, 1)", lambda f, r, n, g: {"x": _normal(f, r, n, g)}),
    Family("F02", "16 + N", _offset(lambda _: 16.0)),
    Family("F03", "2^(p/2) + N", _offset(lambda f: 2.0 ** (f.p // 2))),
    Family("F04", "2^(p-3) + N: three bits left", _offset(lambda f: 2.0 ** (f.p - 3))),
    Family("F05", "2^(p-1) + round(2N), eps 0", _integers_at_full_precision, 8),
    Family("F06", "2^(p-5) + (i mod 4)", _ramp),
    Family("F07", "constant, one element one ulp up, eps 0", _one_ulp_up, 2),
    Family("F08", "coin of 1 and the next float, eps 0", _coin, 2),
    Family("F09", "constant rows 0.1 and 12345.678, eps 1e-12", _constant),
    Family("F10", "around 1, one element at the mean, eps 0", _near_the_mean, 3),
    Family("F11", "pairs +-N, the last a little more", _pairs, 2),
    Family("F12", "squares overflow", _squares_overflow),
    Family("F13", "+-largest", _largest),
    Family("F14", "near largest: the sum overflows", _sum_overflows),
    Family(
        "F15",
        "squares underflow, eps 0",
        _scaled(lambda f: 2.0 ** (f.emin // 2 - 8), eps=0.0),
        2,
    ),
    Family("F16", "subnormals, eps 0", _subnormals(0.0), 2),
    Family("F17", "subnormals, eps 1e-5", _subnormals(1e-5), 2),
    Family("F18", "exp(6N)", _lognormal),
    Family("F19", "an outlier of 2^10", _with_outlier(lambda _: 2.0**10), _ENOUGH),
    Family(
        "F20", "an outlier of 2^p", _with_outlier(lambda f: 2.0 ** min(f.p, f.emax - 1)), _ENOUGH
    ),
    Family(
        "F21",
        "an outlier whose square overflows",
        _with_outlier(lambda f: 2.0 ** (f.emax // 2 + 2)),
        _ENOUGH,
        without=("float16",),
    ),
    Family("F22", "two opposite outliers", _two_outliers, _ENOUGH),
    Family("F23", "halves +1 and -1", _halves, 2),
    Family("F24", "a residual stream: four of 2.7e5, eps 1e-6", _residual_stream, _ENOUGH),
    Family("F25", "var far below eps", _var_below_eps),
    Family("F26", "var = eps", _scaled(lambda _: 1e-5**0.5)),
    Family("F27", "dy = 1: dx is 0 but for gamma", _cotangent(lambda r, n, _: np.ones((r, n)))),
    Family("F28", "dy = y: dx nearly vanishes", lambda f, r, n, g: {"x": _normal(f, r, n, g)}),
    Family(
        "F29",
        "dy = 1 + 1e-3 N",
        _cotangent(lambda r, n, g: 1 + 1e-3 * g.standard_normal((r, n))),
    ),
    Family("F30", "dy one-hot", _cotangent(_one_hot)),
    Family("F31", "dy = +-exp(4N)", _cotangent(_signed_lognormal)),
    Family("F32", "beta cancels gamma xhat", lambda f, r, n, g: {"x": _normal(f, r, n, g)}),
    Family("F33", "gamma of 0, -0, 1e30, subnormals", _hard_gamma),
    Family("F34", "two neighbouring floats, eps 0", _neighbours, 2),
    Family("F35", "rows in pairs: dgamma, dbeta cancel exactly", _row_pairs),
    Family("F36", "NaN, infinity, -0", _not_finite, finite=False),
    Family("F37", "the same numbers in other orders", _shuffled, 2),
    Family("F38", "offsets 0, 1, 10, 100", _offsets),
)
FAMILIES = {family.name: family for family in _ALL}


class Published(NamedTuple):
    """A row that went wrong in public: its values, eps, and the exact result to `digits`."""

    source: str
    x: tuple[float, ...]
    eps: float
    y: tuple[float, ...]
    digits: int


_STEPS = (-1.3416, -0.4472, 0.4472, 1.3416)
PUBLISHED = (
    Published("onnxruntime 28463", (40000.0, 40001.0, 40002.0, 40003.0), 1e-5, _STEPS, 4),
    Published("onnxruntime 28463", (80000.0, 80001.0, 80002.0, 80003.0), 1e-5, _STEPS, 4),
    Published("onnxruntime 21935", (1234.0,) * 256, 1e-5, (0.0,) * 256, 7),
)
