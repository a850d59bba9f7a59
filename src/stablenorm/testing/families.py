"""
Hard inputs for a layer norm: the families F01 to F38, one table.

Each is a way in which implementations in use lose their digits: an offset, a row constant but
for its last bit, an outlier, squares that overflow or underflow, a cotangent that the projection
annihilates. What judges the results is the reader's choice: nothing that computes a layer norm is
imported here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import FLOAT16, Format, format_of, parse
from stablenorm.types import Array

Random = np.random.Generator
Shape = tuple[int, int]
Parts = dict[str, Any]
Builder = Callable[[Format, Shape, Random], Parts]


class Case(NamedTuple):
    """One input: `x` and `dy` (rows, n), `gamma` and `beta` (n,), all of one dtype, and `eps`."""

    x: Array
    gamma: Array
    beta: Array
    eps: float
    dy: Array


class Family(NamedTuple):
    """
    A family of inputs.

    `build` takes (format, (rows, n), rng) and returns the float64 parts that differ from the
    ordinary case: x, and gamma, beta, dy, eps where the family is about them. With fewer than
    `smallest_n` elements or `smallest_rows` rows it would be another family; `without` maps
    the dtypes for which there is none to the reason. `finite` is False where the input holds NaN or
    infinity, which an exact oracle cannot take.
    """

    name: str
    title: str
    build: Builder
    smallest_n: int = 1
    smallest_rows: int = 1
    without: Mapping[str, str] = MappingProxyType({})
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
    # Two rows are enough for dgamma and dbeta to be sums.
    rows = max(2, family.smallest_rows) if rows is None else rows
    rng = np.random.default_rng(rng)
    with np.errstate(all="ignore"):
        form = format_of(parse(dtype))
        parts = family.build(form, (rows, n), rng)
        # Parts that the family does not make are drawn.
        drawn = {
            "gamma": 1 + 0.1 * rng.standard_normal(n),
            "beta": 0.1 * rng.standard_normal(n),
            "dy": rng.standard_normal((rows, n)),
        }
        eps, parts = float(parts.pop("eps", 1e-5)), drawn | parts
        parts["gamma"] = np.broadcast_to(parts["gamma"], n)
        x, gamma, beta, dy = (_cast(parts[key], form) for key in ("x", "gamma", "beta", "dy"))
        return Case(x, gamma, beta, eps, dy)


def _cast(value: Any, form: Format) -> Array:
    """Round to a format, keeping what is meant to be finite finite."""
    value = np.asarray(value, dtype=np.float64)
    clipped = np.clip(value, -form.largest, form.largest)
    kept: Array = np.where(np.isfinite(value), clipped, value)
    return kept.astype(form.dtype)


def _rounded(value: Any, form: Format) -> Array:
    return _cast(value, form).astype(np.float64)


# ---- what the families are made of ----


def _x(make: Callable[[Format, Array], Array], **rest: Any) -> Builder:
    """Make x of normal numbers, (rows, n)."""
    return lambda f, shape, rng: {"x": make(f, rng.standard_normal(shape)), **rest}


def _columns(values: Callable[[Format, Array], Array], **rest: Any) -> Builder:
    """Make all rows the same, of the numbers of the columns."""
    return lambda f, shape, _: {"x": np.tile(values(f, np.arange(shape[1])), (shape[0], 1)), **rest}


def _dy(make: Callable[[Shape, Random], Array], **rest: Any) -> Builder:
    """An ordinary x, and dy."""
    # x is drawn first, and dy beside it.
    return lambda _, shape, rng: {"x": rng.standard_normal(shape), "dy": make(shape, rng), **rest}


def _put(x: Array, columns: Any, values: Any) -> Array:
    x[:, columns] = values
    return x


def _ulp(f: Format) -> float:
    """Return the spacing of the floats from 1 to 2."""
    return 2.0 ** (1 - f.digits)


def _xhat(x: Array, f: Format, eps: float) -> Array:
    """The textbook formula in float64, of `x` rounded: good enough to build an input from."""
    x = _rounded(x, f)
    centered = x - x.mean(axis=-1, keepdims=True)
    xhat: Array = centered / np.sqrt((centered * centered).mean(axis=-1, keepdims=True) + eps)
    return xhat


def _dy_is_y(f: Format, shape: Shape, rng: Random, eps: float = 1e-5) -> Parts:
    x = rng.standard_normal(shape)
    return {"x": x, "gamma": 1.0, "beta": np.zeros(shape[1]), "dy": _xhat(x, f, eps), "eps": eps}


def _cancelling_beta(f: Format, shape: Shape, rng: Random) -> Parts:
    x, gamma = rng.standard_normal(shape), 1 + 0.1 * rng.standard_normal(shape[1])
    # xhat of the first row: the others cancel less.
    return {"x": x, "gamma": gamma, "beta": -_rounded(gamma, f) * _xhat(x, f, 1e-5)[0]}


def _near_the_mean(f: Format, shape: Shape, rng: Random) -> Parts:
    step = 2.0 ** -(f.digits - 5)
    x = _put(1 + rng.integers(-8, 9, shape) * step, slice(1, 3), (1 - step, 1 + step))
    return {"x": _put(x, 0, x[:, 1:].mean(axis=-1)), "eps": 0.0}


def _pairs(f: Format, x: Array) -> Array:
    even = x.shape[1] // 2 * 2
    x[:, 1:even:2] = -x[:, :even:2]
    x[:, even:] = 0
    x[:, -1] += 2.0 ** -(f.digits - 2)
    return x


def _subnormals(f: Format, shape: Shape, rng: Random, eps: float = 1e-5) -> Parts:
    k = _put(rng.integers(-9, 10, shape).astype(np.float64), slice(2), (-3, 5))
    return {"x": np.ldexp(k, f.emin - f.digits + 1), "eps": eps}


def _hard_gamma(f: Format, shape: Shape, rng: Random) -> Parts:
    tiny = 3 * 2.0 ** (f.emin - f.digits + 1)
    values = [0.0, -0.0, min(1e30, f.largest / 8), tiny, -1.0, 2.0, -tiny]
    return {"x": rng.standard_normal(shape), "gamma": np.resize(values, shape[1])}


def _row_pairs(_: Format, shape: Shape, rng: Random) -> Parts:
    x, dy = rng.standard_normal(shape), rng.standard_normal(shape)
    half = shape[0] // 2
    x[half : 2 * half], dy[half : 2 * half] = x[:half], -dy[:half]
    return {"x": x, "dy": dy}


def _not_finite(_: Format, x: Array) -> Array:
    n = x.shape[1]
    x[0, 0], x[1, n // 2], x[-1, n - 1] = np.nan, np.inf, -0.0
    return x


def _shuffled(f: Format, shape: Shape, rng: Random) -> Parts:
    """Rows hold the same numbers: sorted, reversed, then shuffled."""
    rows, n = shape
    # Rounded first: equal elements have equal dy, whichever comes first.
    base = np.sort(_rounded(3 + rng.standard_normal(n), f))
    x = np.stack([base, base[::-1], *(rng.permutation(base) for _ in range(rows))])[:rows]
    return {"x": x, "gamma": 1.0, "beta": np.zeros(n), "dy": np.cos(x)}


# Name, title, builder, smallest n (8 where one marked element needs a row around it), smallest rows.
# fmt: off
_ALL = (
    Family("F01", "mean 0, std 1", _x(lambda _, v: v)),
    Family("F02", "mean 16, std 1", _x(lambda _, v: 16 + v)),
    Family("F03", "mean 2^(p/2), std 1: half of the bits left",
           _x(lambda f, v: 2.0 ** (f.digits // 2) + v)),
    Family("F04", "mean 2^(p-3), std 1: three bits left",
           _x(lambda f, v: 2.0 ** (f.digits - 3) + v)),
    Family("F05", "integers around 2^(p-1), eps 0",
           _x(lambda f, v: 2.0 ** (f.digits - 1) + np.rint(2 * v), eps=0.0), 8),
    Family("F06", "0, 1, 2, 3 repeated, on 2^(p-5)",
           _columns(lambda f, i: 2.0 ** (f.digits - 5) + i % 4)),
    # 1.7 rounded to the format.
    Family("F07", "constant, but one element an ulp up, eps 0",
           _columns(lambda f, i: (np.rint(1.7 / _ulp(f)) + (i == i.size // 2)) * _ulp(f), eps=0.0), 2),
    Family("F08", "1 or the next float, at random, eps 0",
           lambda f, s, rng: {
               "x": 1 + _put(rng.integers(0, 2, s), slice(2), (0, 1)[: s[1]]) * _ulp(f), "eps": 0.0},
           2),
    Family("F09", "constant rows, eps 1e-12",
           lambda _, s, __: {"x": np.resize([[0.1], [12345.678]], (s[0], 1)) * np.ones(s), "eps": 1e-12},
           1, 2),
    Family("F10", "around 1, one element at the mean, eps 0", _near_the_mean, 3),
    Family("F11", "pairs of +v and -v, the last a little more", _x(_pairs), 2),
    Family("F12", "squares overflow",
           _x(lambda f, v: (5000.0 if f is FLOAT16 else 2.0 ** (f.emax // 2 + 4)) * v)),
    Family("F13", "plus and minus the largest float", _x(lambda f, v: f.largest * np.sign(v))),
    Family("F14", "near the largest float: the sum overflows",
           lambda f, s, rng: {"x": f.largest * (1 - rng.integers(0, 8, s) * 2.0**-f.digits)}),
    Family("F15", "squares underflow, eps 0",
           _x(lambda f, v: 2.0 ** (f.emin // 2 - 8) * v, eps=0.0), 2),
    Family("F16", "subnormals, eps 0", partial(_subnormals, eps=0.0), 2),
    Family("F17", "subnormals, eps 1e-5", _subnormals, 2),
    Family("F18", "exponentials of normal numbers",
           _x(lambda f, v: np.exp((2 if f is FLOAT16 else 6) * v))),
    Family("F19", "one outlier of 1024", _x(lambda _, v: _put(v, 5, 2.0**10)), 8),
    Family("F20", "one outlier of 2^p",
           _x(lambda f, v: _put(v, 5, 2.0 ** min(f.digits, f.emax - 1))), 8),
    # In float16 it would be 2^9, less than that of F19: float32 holds its square.
    Family("F21", "one outlier whose square overflows",
           _x(lambda f, v: _put(v, 5, 2.0 ** (f.emax // 2 + 2))), 8,
           without={"float16": "whose squares do not overflow in float32"}),
    Family("F22", "two opposite outliers",
           _x(lambda f, v: _put(v, [3, 9], np.array([1, -1]) * 2.0 ** min(f.digits - 2, 14))), 10),
    Family("F23", "one half around +1, the other around -1",
           _x(lambda f, v: 2.0 ** -(f.digits - 4) * v
              + np.where(np.arange(v.shape[1]) < v.shape[1] // 2, 1, -1)), 2),
    Family("F24", "four outliers of 2.7e5, eps 1e-6",
           _x(lambda f, v: _put(7.4e3 * v, slice(4), (2.77e5, -2.7e5, 2.5e5, -2.6e5))
              / (8 if f is FLOAT16 else 1), eps=1e-6), 8),
    Family("F25", "variance far below eps",
           lambda f, s, rng: {"x": (1e-4 if f is FLOAT16 else 1e-6) * rng.standard_normal(s),
                              "eps": 1e-2 if f is FLOAT16 else 1e-5}),
    Family("F26", "variance equal to eps", _x(lambda _, v: 1e-5**0.5 * v)),
    Family("F27", "dy = 1, gamma = 1: dx is 0", _dy(lambda s, _: np.ones(s), gamma=1.0)),
    Family("F28", "dy = y, gamma = 1: dx nearly vanishes", _dy_is_y),
    Family("F28b", "dy = y, gamma = 1, eps 0: dx is dy's rounding", partial(_dy_is_y, eps=0.0), 2),
    Family("F29", "dy = 1 + N/1000, gamma = 1",
           _dy(lambda s, rng: 1 + 1e-3 * rng.standard_normal(s), gamma=1.0)),
    Family("F30", "dy one-hot", _dy(lambda s, _: _put(np.zeros(s), s[1] // 3, 1))),
    Family("F31", "dy of very different sizes",
           _dy(lambda s, rng: np.sign(rng.standard_normal(s)) * np.exp(4 * rng.standard_normal(s)))),
    Family("F32", "beta cancels gamma * xhat", _cancelling_beta),
    Family("F33", "gamma of 0, -0, 1e30, subnormals", _hard_gamma),
    Family("F34", "two neighbouring floats, eps 0",
           _columns(lambda f, i: 1 + i % 2 * _ulp(f), eps=0.0), 2),
    Family("F35", "rows in pairs: dgamma, dbeta cancel", _row_pairs, 1, 2),
    Family("F36", "NaN, infinity, -0", _x(_not_finite), 1, 3, finite=False),
    Family("F37", "the same numbers in other orders", _shuffled, 2, 3),
    Family("F38", "rows of mean 0, 1, 10, 100",
           _x(lambda _, v: np.resize([[0.0], [1.0], [10.0], [100.0]], (len(v), 1)) + v), 1, 4),
)
# fmt: on
FAMILIES = {family.name: family for family in _ALL}
