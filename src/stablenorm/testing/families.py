"""
Hard inputs for a layer norm: the families F01 to F41, one table.

In each, implementations in use lose digits for one reason: an offset, a row constant but for its
last bit, an outlier, squares that overflow or underflow, a cotangent that the projection
annihilates. This file imports nothing that computes a layer norm.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import FLOAT16, Format, format_of, parse
from stablenorm.records import Array

Random = np.random.Generator
Parts = dict[str, Any]


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

    Its difficulty needs `smallest_n` elements and `smallest_rows` rows. `without` maps each dtype in
    which the family does not exist to the reason. `finite` is False if the input holds NaN or
    infinity, which an exact oracle cannot take.
    """

    name: str
    title: str
    # Returns x alone, or parts by name.
    make: Callable[["_Draw"], Array | Parts]
    smallest_n: int = 1
    smallest_rows: int = 1
    without: Mapping[str, str] = MappingProxyType({})
    finite: bool = True

    def why_not(self, dtype: Any, n: int, rows: int | None = None) -> str:
        """Say why the family does not exist for this dtype and shape; "" where it does."""
        kind = np.dtype(dtype).name
        if kind in self.without:
            return f"{self.name} must have another dtype than {kind}, {self.without[kind]}"
        for size, count, least in ("n", n, self.smallest_n), ("rows", rows, self.smallest_rows):
            if count is not None and count < least:
                return f"{self.name} must have {size} >= {least}, got {count}"
        return ""

    def applies(self, dtype: Any, n: int) -> bool:
        """Tell whether the family exists for this dtype and row length."""
        return not self.why_not(dtype, n)


def make_case(
    name: str, dtype: Any, n: int, rows: int | None = None, rng: Random | int | None = 0
) -> Case:
    """
    Build one `Case` of the family `name`.

    Parameters
    ----------
    name : str
        A key of `FAMILIES`, such as "F07".
    dtype : dtype
        float16, bfloat16, float32 or float64: of all four arrays.
    n : int
        Elements of a row.
    rows : int, optional
        Default: two, or as many as the family needs.
    rng : Generator or int, default: 0
        Normalized by ``np.random.default_rng``; the same one gives the same case.

    Raises
    ------
    ValueError
        If there is no family of that name, or it does not exist for this dtype, n or rows.

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
    rng, form = np.random.default_rng(rng), format_of(parse(dtype))
    with np.errstate(all="ignore"):
        made = family.make(_Draw(form, (rows, n), rng))
        # Default parts, for those that the family does not make.
        parts: Parts = {
            "gamma": 1 + 0.1 * rng.standard_normal(n), "beta": 0.1 * rng.standard_normal(n),
            "dy": rng.standard_normal((rows, n)), "eps": 1e-5,
        }  # fmt: skip
        parts |= made if isinstance(made, dict) else {"x": made}
        x, gamma, beta, dy = (_cast(parts[name], form) for name in ("x", "gamma", "beta", "dy"))
        return Case(x, np.resize(gamma, n), beta, parts["eps"], dy)


def _cast(value: Any, form: Format) -> Array:
    """Round to a format; finite values stay finite, clipped to its largest number."""
    value = np.asarray(value, np.float64)
    clipped = np.clip(value, -form.largest, form.largest)
    return np.asarray(np.where(np.isinf(value), value, clipped), form.dtype)


def _put(x: Array, columns: Any, values: Any, rows: Any = slice(None)) -> Array:
    x[rows, columns] = values
    return x


class _Draw:
    """Draws parts of inputs: a format `f` of `p` bits, its ulp at 1, its smallest number, a shape."""

    def __init__(self, f: Format, shape: tuple[int, int], rng: Random):
        self.f, self.p, self.shape, self.rng = f, f.digits, shape, rng
        self.rows, self.n = shape
        self.ulp, self.tiny = 2.0 ** (1 - self.p), 2.0 ** (f.emin - self.p + 1)
        # The column of each element.
        self.j = np.tile(np.arange(self.n), (self.rows, 1))

    @property
    def v(self) -> Array:
        """Normal numbers of this shape; every use draws anew."""
        return self.rng.standard_normal(self.shape)

    def rounded(self, v: Array) -> Array:
        """Round to the format, and return float64."""
        return _cast(v, self.f).astype(np.float64)

    def xhat(self, x: Array, eps: float) -> Array:
        """The textbook xhat of the rounded `x`, in float64: good enough to build an input from."""
        x = self.rounded(x)
        centered = x - x.mean(axis=-1, keepdims=True)
        xhat: Array = centered / np.sqrt((centered * centered).mean(axis=-1, keepdims=True) + eps)
        return xhat

    def dy_is_y(self, eps: float) -> Parts:
        x = self.v
        zeros = np.zeros(self.n)
        return {"x": x, "gamma": 1.0, "beta": zeros, "dy": self.xhat(x, eps), "eps": eps}

    def cancelling_beta(self) -> Parts:
        x, gamma = self.v, 1 + 0.1 * self.rng.standard_normal(self.n)
        # beta cancels xhat of the first row; other rows cancel less.
        return {"x": x, "gamma": gamma, "beta": -self.rounded(gamma) * self.xhat(x, 1e-5)[0]}

    def near_the_mean(self) -> Parts:
        step = 16 * self.ulp
        x = 1 + self.rng.integers(-8, 9, self.shape) * step
        x[:, 1:3] = 1 - step, 1 + step
        return {"x": _put(x, 0, x[:, 1:].mean(axis=-1)), "eps": 0.0}

    def pairs(self) -> Array:
        x, even = self.v, self.n // 2 * 2
        x[:, 1:even:2], x[:, even:] = -x[:, :even:2], 0
        x[:, -1] += 2 * self.ulp
        return x

    def row_pairs(self) -> Parts:
        x, dy, half = self.v, self.v, self.rows // 2
        x[half : 2 * half], dy[half : 2 * half] = x[:half], -dy[:half]
        return {"x": x, "dy": dy}

    def huge_terms(self) -> Parts:
        """Two values in each row of x and of gamma dy, at the same places: g is a multiple of xhat and of ones."""
        two = np.arange(self.n) % 2
        size = 2.0 ** min(self.f.emax, 127)
        dy = self.rng.standard_normal((self.rows, 2))[:, two] * size**0.5
        gamma = np.array([0.9, -0.7])[two] * size
        return {
            "x": self.rng.standard_normal((self.rows, 2))[:, two],
            "gamma": gamma,
            "dy": dy,
            "eps": 0.0,
        }

    def shuffled(self) -> Parts:
        """Rows hold the same numbers: sorted, reversed, then shuffled."""
        # Round first: equal elements then have equal dy.
        base = np.sort(self.rounded(3 + self.rng.standard_normal(self.n)))
        x = np.stack([base, base[::-1], *(self.rng.permutation(base) for _ in range(self.rows))])
        x = x[: self.rows]
        return {"x": x, "gamma": 1.0, "beta": np.zeros(self.n), "dy": np.cos(x)}


# The fields of each `Family`. The smallest n is 8 where one marked element needs a row around it. The
# order of draws matters: x comes before dy.
# fmt: off
_ALL: tuple[tuple[Any, ...], ...] = (
    ("F01", "mean 0, std 1", lambda c: c.v),
    ("F02", "mean 16, std 1", lambda c: 16 + c.v),
    ("F03", "mean 2^(p/2), std 1: half of the bits left", lambda c: 2.0 ** (c.p // 2) + c.v),
    ("F04", "mean 2^(p-3), std 1: three bits left", lambda c: 2.0 ** (c.p - 3) + c.v),
    ("F05", "integers around 2^(p-1), eps 0",
     lambda c: {"x": 2.0 ** (c.p - 1) + np.rint(2 * c.v), "eps": 0.0}, 8),
    ("F06", "0, 1, 2, 3 repeated, on 2^(p-5)", lambda c: 2.0 ** (c.p - 5) + c.j % 4),
    # 1.7 rounded to the format.
    ("F07", "constant, but one element an ulp up, eps 0",
     lambda c: {"x": (np.rint(1.7 / c.ulp) + (c.j == c.n // 2)) * c.ulp, "eps": 0.0}, 2),
    ("F08", "1 or the next float, at random, eps 0",
     lambda c: {"x": 1 + _put(c.rng.integers(0, 2, c.shape), slice(2), (0, 1)) * c.ulp, "eps": 0.0}, 2),
    ("F09", "constant rows, eps 1e-12",
     lambda c: {"x": np.resize([[0.1], [12345.678]], (c.rows, 1)) + 0 * c.j, "eps": 1e-12}, 1, 2),
    ("F10", "around 1, one element at the mean, eps 0", _Draw.near_the_mean, 3),
    ("F11", "pairs of +v and -v, the last a little more", _Draw.pairs, 2),
    ("F12", "squares overflow",
     lambda c: (5000.0 if c.f is FLOAT16 else 2.0 ** (c.f.emax // 2 + 4)) * c.v),
    ("F13", "plus and minus the largest float", lambda c: c.f.largest * np.sign(c.v)),
    ("F14", "near the largest float: the sum overflows",
     lambda c: c.f.largest * (1 - c.rng.integers(0, 8, c.shape) * c.ulp / 2)),
    ("F15", "squares underflow, eps 0",
     lambda c: {"x": 2.0 ** (c.f.emin // 2 - 8) * c.v, "eps": 0.0}, 2),
    ("F16", "subnormals, eps 0", lambda c: {"x": FAMILIES["F17"].make(c), "eps": 0.0}, 2),
    ("F17", "subnormals, eps 1e-5",
     lambda c: _put(c.rng.integers(-9, 10, c.shape), slice(2), (-3, 5)) * c.tiny, 2),
    ("F18", "exponentials of normal numbers", lambda c: np.exp((2 if c.f is FLOAT16 else 6) * c.v)),
    ("F19", "one outlier of 1024", lambda c: _put(c.v, 5, 2.0**10), 8),
    ("F20", "one outlier of 2^p", lambda c: _put(c.v, 5, 2.0 ** min(c.p, c.f.emax - 1)), 8),
    # No float16: its outlier would be 2^9, less than that of F19, and float32 holds its square.
    ("F21", "one outlier whose square overflows",
     lambda c: _put(c.v, 5, 2.0 ** (c.f.emax // 2 + 2)), 8, 1,
     {"float16": "whose squares do not overflow in float32"}),
    ("F22", "two opposite outliers",
     lambda c: _put(c.v, [3, 9], np.array([1, -1]) * 2.0 ** min(c.p - 2, 14)), 10),
    ("F23", "one half around +1, the other around -1",
     lambda c: 8 * c.ulp * c.v + np.where(c.j < c.n // 2, 1, -1), 2),
    ("F24", "four outliers of 2.7e5, eps 1e-6",
     lambda c: {"x": _put(7.4e3 * c.v, slice(4), (2.77e5, -2.7e5, 2.5e5, -2.6e5))
                / (8 if c.f is FLOAT16 else 1), "eps": 1e-6}, 8),
    ("F25", "variance far below eps",
     lambda c: {"x": 1e-4 * c.v, "eps": 1e-2} if c.f is FLOAT16 else 1e-6 * c.v),
    ("F26", "variance equal to eps", lambda c: 1e-5**0.5 * c.v),
    ("F27", "dy = 1, gamma = 1: dx is 0",
     lambda c: {"x": c.v, "dy": np.ones(c.shape), "gamma": 1.0}),
    ("F28", "dy = y, gamma = 1: dx nearly vanishes", lambda c: c.dy_is_y(1e-5)),
    ("F28b", "dy = y, gamma = 1, eps 0: dx is dy's rounding", lambda c: c.dy_is_y(0.0), 2),
    ("F29", "dy = 1 + N/1000, gamma = 1",
     lambda c: {"x": c.v, "dy": 1 + 1e-3 * c.v, "gamma": 1.0}),
    ("F30", "dy one-hot", lambda c: {"x": c.v, "dy": c.j == c.n // 3}),
    ("F31", "dy of very different sizes",
     lambda c: {"x": c.v, "dy": np.sign(c.v) * np.exp(4 * c.v)}),
    ("F32", "beta cancels gamma * xhat", _Draw.cancelling_beta),
    ("F33", "gamma of 0, -0, 1e30, subnormals",
     lambda c: {"x": c.v, "gamma": np.resize(
         [0.0, -0.0, min(1e30, c.f.largest / 8), 3 * c.tiny, -1.0, 2.0, -3 * c.tiny], c.n)}),
    ("F34", "two neighbouring floats, eps 0", lambda c: {"x": 1 + c.j % 2 * c.ulp, "eps": 0.0}, 2),
    ("F35", "rows in pairs: dgamma, dbeta cancel", _Draw.row_pairs, 1, 2),
    ("F36", "NaN, infinity, -0",
     lambda c: _put(c.v, [0, c.n // 2, -1], (np.nan, np.inf, -0.0), [0, 1, -1]), 1, 3, {}, False),
    ("F37", "the same numbers in other orders", _Draw.shuffled, 2, 3),
    ("F38", "rows of mean 0, 1, 10, 100",
     lambda c: np.resize([[0.0], [1.0], [10.0], [100.0]], (c.rows, 1)) + c.v, 1, 4),
    ("F39", "small integers, beta 0: y is 0 at the mean",
     lambda c: {"x": c.rng.integers(-4, 5, c.shape), "beta": np.zeros(c.n)}),
    ("F40", "small integers in x and dy, gamma 1, beta 0",
     lambda c: {"x": c.rng.integers(-4, 5, c.shape), "dy": c.rng.integers(-4, 5, c.shape),
                "gamma": 1.0, "beta": np.zeros(c.n)}),
    ("F41", "huge gamma and dy, whose dx is 0, eps 0", _Draw.huge_terms, 2),
)
# fmt: on
FAMILIES: dict[str, Family] = {row[0]: Family(*row) for row in _ALL}
