"""
Limits of the error of a layer or RMS norm that follow from its arithmetic, for each element.

A limit is a theorem: no kernel that computes as declared exceeds it. The section "Limits for other
kernels" of the page "Error analysis" has the proof, step by step, in the names of this file.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import FLOAT32, FLOAT64, Format, check_dtype, format_of, parse
from stablenorm.oracle import ExactNorm
from stablenorm.records import Array

# The chance of a false alarm in one call, of all its elements together: of a thousand tests that run
# a thousand times, one in a thousand suites has one.
FAILURE = 1e-9
# In units of u: the roundings of the root and the quotient are 2; CUDA's rsqrtf errs by 2 ulp, which is 4.
_ROOT = 4
# Roundings that one element passes through beside the longest sum, for the terms of second order.
_OTHERS = 24


@dataclass(frozen=True)
class Arithmetic:
    """
    How a kernel computes, as its author declares it.

    Attributes
    ----------
    statistics : dtype, optional
        The dtype in which mean and rstd are kept. Sums have it too, but no less than float32.
        Default: float32, and float64 for float64 data.
    elementwise : dtype, optional
        The dtype in which elements are centered, scaled and shifted. Default: that of the sums.
    cast : {"y", "xhat"}, default: "y"
        What is rounded to the dtype of x: y alone, or xhat first, as in Hugging Face's Llama.
    sums : "any" or int, default: "any"
        The order of the sums: any, atomics included, or the most additions that a term passes
        through: 24 for runs of 16 and a tree above 256 of them.
    centered : bool, default: True
        Whether the mean is subtracted before x is scaled. False: ``x * a + b``.
    bound : {"probable", "worst"}, default: "probable"
        Whether rounding errors of long sums count as independent with mean zero, or as the worst.
    """

    statistics: Any = None
    elementwise: Any = None
    cast: str = "y"
    sums: str | int = "any"
    centered: bool = True
    bound: str = "probable"

    def for_data(self, x: Array) -> "Arithmetic":
        """Return the same with the dtypes that were left out; ValueError or TypeError if it makes no sense."""
        for name, words in ("cast", ("y", "xhat")), ("bound", ("probable", "worst")):
            if getattr(self, name) not in words:
                msg = f"{name} must be {' or '.join(words)}, got {getattr(self, name)!r}"
                raise ValueError(msg)
        if self.sums != "any" and not (isinstance(self.sums, int) and self.sums > 0):
            msg = f'sums must be "any" or a number of additions, got {self.sums!r}'
            raise ValueError(msg)
        usual = FLOAT64 if x.dtype == np.float64 else FLOAT32
        statistics = parse(self.statistics or usual.dtype)
        check_dtype("statistics", np.empty(0, statistics))
        wide = _wider(statistics, FLOAT32.dtype)
        return replace(self, statistics=statistics, elementwise=parse(self.elementwise or wide))


def _wider(*dtypes: Any) -> Any:
    return max(dtypes, key=lambda dtype: format_of(dtype).digits)


class Statistics(NamedTuple):
    """The exact statistics of rows, rounded to float64: mean and rstd (rows, 1), xhat (rows, n)."""

    mean: Array
    rstd: Array
    xhat: Array

    @classmethod
    def of(cls, exact: ExactNorm) -> "Statistics":
        """Return those of an exact norm."""
        rows = range(exact.rows)
        mean = np.array([float(exact.mean(i)) for i in rows])[:, None]
        rstd = np.array([exact.rstd(i) for i in rows])[:, None]
        return cls(mean, rstd, exact.floats("xhat").reshape(exact.rows, exact.n))


@dataclass(frozen=True)
class Bound:
    """
    A bound on errors: `fixed`, and lambda times `random` for sums of independent roundings.

    Bounds of independent errors are added: the fixed parts as they are, the random parts as roots of
    sums of squares.
    """

    random: Any = 0.0
    fixed: Any = 0.0

    def __add__(self, other: "Bound") -> "Bound":
        """Return the bound of a sum of errors."""
        return Bound(np.hypot(self.random, other.random), self.fixed + other.fixed)

    def __mul__(self, weight: Any) -> "Bound":
        """Return the bound of weighted errors."""
        return Bound(self.random * abs(weight), self.fixed * abs(weight))

    def over_rows(self) -> "Bound":
        """Return the bound of the sums over rows, whose errors are independent."""
        return Bound(np.hypot.reduce(self.random, axis=0), self.fixed.sum(axis=0))


class Limits:
    """
    The limits on one input; a method for each output returns them, as (rows, n) or (n,).

    An infinite limit says that the declared arithmetic promises nothing there: a sum or a product
    leaves its range, or rounding may take all of the variance.
    """

    def __init__(
        self, x: Array, gamma: Array | None, beta: Array | None, dy: Array | None,
        statistics: Statistics, arithmetic: Arithmetic, kind: str = "layer",
    ):  # fmt: skip
        self.mean, self.rstd, self.xhat = statistics
        self.rows, self.n = self.xhat.shape
        self.declared, self.is_layer, self.form = arithmetic, kind == "layer", format_of(x.dtype)
        arrays = {"x": x, "gamma": gamma, "beta": beta, "dy": dy}
        wide = {name: 0.0 if a is None else a.astype(np.float64) for name, a in arrays.items()}
        self.x = np.reshape(wide["x"], (self.rows, self.n))
        self.dy: Any = 0.0 if dy is None else np.reshape(wide["dy"], (self.rows, self.n))
        self.gamma, self.beta = 1.0 if gamma is None else wide["gamma"], wide["beta"]
        # s: sums and statistics, e: elements, k: statistics as they are kept.
        sums, elements, kept = map(
            format_of,
            (_wider(arithmetic.statistics, FLOAT32.dtype), arithmetic.elementwise, arithmetic.statistics),
        )  # fmt: skip
        self.s, self.e, self.u, self.u_e = sums, elements, 0.5**sums.digits, 0.5**elements.digits
        # The largest errors of an underflow: GPUs flush subnormals to zero.
        self.tiny_s, self.tiny_e = 2.0**sums.emin, 2.0**elements.emin
        # Statistics are rounded once more where they are kept, and where elements use them.
        self.kept = 0.5**kept.digits * (kept.digits < sums.digits)
        self.kept += self.u_e * (elements.digits < sums.digits)
        # Arguments that are wider than the arithmetic are rounded to it: one rounding more of each.
        widest = max(format_of(a.dtype).digits for a in arrays.values() if a is not None)
        self.extra = self.u_e * (widest > elements.digits)
        # Each element of four outputs has a bound, and so have its statistics; errors have two signs.
        count = 2 * 4 * 2 * self.x.size / FAILURE
        self.factor = (
            math.inf if arithmetic.bound == "worst" else math.sqrt(2 * math.log(max(count, 2)))
        )
        with np.errstate(all="ignore"):
            self._bound_statistics()

    def additions(self, count: int) -> int:
        """Return how many additions a term of a sum of `count` terms passes through, at most."""
        most = max(count - 1, 0)
        return most if self.declared.sums == "any" else min(int(self.declared.sums), most)

    def chain(self, terms: Array, axis: int = -1) -> Bound:
        """Bound the roundings of the sum of terms along an axis, given their magnitudes."""
        h = self.additions(terms.shape[axis])
        size = terms.sum(axis=axis, keepdims=True)
        worst = h * self.u * size
        random = 0 * size
        if h:
            # Terms below four ulp of the sum are rounded one way, and lose at most themselves.
            small = np.where(terms < 8 * self.u * size, terms, 0)
            lost = (np.minimum(small, self.u * size) + h * self.u * small).sum(axis, keepdims=True)
            root = math.sqrt(h) * self.u * size
            is_random = self.factor * root + lost < worst
            is_random &= ~are_alike(terms, 4 * self.u * size, axis)
            random, worst = np.where(is_random, root, 0), np.where(is_random, lost, worst)
        # A sum along the row is a column of its row.
        return Bound(random, worst) if axis == -1 else Bound(random[0], worst[0])

    def total(self, bound: Bound) -> Any:
        """Return the limit that a bound stands for."""
        return bound.fixed + (0 if math.isinf(self.factor) else self.factor * bound.random)

    def _bound_statistics(self) -> None:
        """
        Bound the errors of the mean and of rstd, and the elementwise one of xhat.

        The computed xhat is ``(xhat - a) (1 + p)``, but for `local`: `shift` bounds a, the error of
        the mean times rstd; `scale` bounds p, the relative error of rstd.
        """
        m, r, xhat, u, n = self.mean, self.rstd, self.xhat, self.u, self.n
        sizes = np.abs(r * self.x)
        size = sizes.mean(axis=-1, keepdims=True)
        from_x = self.u * (self.form.digits > self.s.digits)
        rest = (2 * u + self.kept) * abs(m * r) + from_x * size + self.tiny_s * r
        self.shift = (self.chain(sizes / n) + Bound(0.0, rest)) * float(self.is_layer)
        shift = self.total(self.shift)
        # The relative error of var + eps: two for centered, one for its square, two for the division by
        # n; the sum with eps; eps itself.
        q = (xhat**2).mean(axis=-1, keepdims=True)
        terms = 5 * u * q + 2 * from_x * np.abs(xhat * sizes).mean(axis=-1, keepdims=True)
        others = terms + u + u * np.maximum(1 - q, 0) + 2 * self.tiny_s * r**2
        of_var = self.chain(xhat**2 / n) + Bound(0.0, others)
        loss = np.minimum(self.total(of_var), 1)
        # An error of the mean adds its square to the variance.
        drift = 1 - 1 / np.sqrt(1 + shift**2)
        own = of_var * (0.5 * (1 - loss) ** -1.5) + Bound(0.0, _ROOT * u)
        # The relative error of rstd without that of the mean, as `attribution` compares it.
        self.own_scale = self.total(own)
        self.scale = own + Bound(0.0, drift + self.kept)
        # Sums of x, sums of squares and rstd have to be numbers.
        fits = (n * size <= self.s.largest * r) & (n * q <= self.s.largest * r**2)
        self.scale += Bound(0.0, np.where(fits & (r <= self.s.largest) & (loss < 1), 0, np.inf))
        self.lift = 1 + self.total(self.scale)
        # Rounded are centered x, twice, or the terms of x * a + b, four times.
        self.before = sizes + abs(m * r)
        self.spread = np.abs(xhat) + shift if self.declared.centered else self.before
        roundings = (2 if self.declared.centered else 4) * self.u_e * self.spread
        self.local = roundings + self.extra * sizes + self.tiny_e * (r + 1)
        self.local += np.where(self.spread <= self.e.largest, 0, np.inf)

    def elements_of_y(self, dtype: Any) -> Array:
        """Return the errors of y that its elements do not share, but for the last rounding."""
        scaled = np.abs(self.gamma * self.xhat)
        # Two roundings, of the product and of the sum with beta.
        own = (2 * self.u_e + self.extra) * scaled + 2 * self.u_e * np.abs(self.beta)
        if self.declared.cast == "xhat":
            # xhat is rounded to the dtype of x, its product with gamma to that of y.
            own += np.abs(self.gamma) * half_ulp(self.xhat, self.form)
            own += half_ulp(scaled, format_of(dtype))
        return np.asarray(own + np.abs(self.gamma) * self.local * self.lift + 2 * self.tiny_e)

    def y(self, exact: Array, dtype: Any) -> Array:
        """Return the limits of y, whose exact values are given, in this dtype."""
        statistics = self.shift * self.lift + self.scale * self.xhat
        bound = statistics * self.gamma + Bound(0.0, self.elements_of_y(dtype))
        peak = np.abs(self.gamma * self.xhat) + np.abs(self.beta)
        return self.finish(bound, exact, dtype, self.n, peak)

    def terms_of_dx(self) -> tuple[Array, Array, Array]:
        """Return g, mean(g), 0 for an RMS norm, and mean(g xhat)."""
        g = self.gamma * self.dy
        mean_g = g.mean(axis=-1, keepdims=True) * self.is_layer
        return g, mean_g, (g * self.xhat).mean(axis=-1, keepdims=True)

    def elements_of_dx(self) -> Array:
        """Return the errors of dx / rstd that its elements do not share."""
        g, mean_g, slope = self.terms_of_dx()
        own = (self.u_e + 2 * self.extra) * np.abs(g)
        # Four roundings of each term cover all forms in use, six that with rstd**3.
        own += self.u_e * (4 * (np.abs(g) + abs(mean_g)) + 6 * np.abs(self.xhat * slope))
        return np.asarray(own + self.local * abs(slope) + self.tiny_e)

    def dx(self, exact: Array, dtype: Any) -> Array:
        """Return the limits of dx."""
        r, xhat, n = self.rstd, self.xhat, self.n
        g, mean_g, slope = self.terms_of_dx()
        sizes, shift = np.abs(g), self.total(self.shift)
        products = sizes * self.spread
        # The product gamma dy, and arguments that are rounded.
        of_g = self.u_e + 2 * self.extra
        tiny = self.tiny_e + self.tiny_s
        own = of_g * sizes.mean(axis=-1, keepdims=True) + 2 * self.u * abs(mean_g) + tiny
        of_mean = (self.chain(sizes / n) + Bound(0.0, own)) * float(self.is_layer)
        own = ((of_g + self.u_e) * products + sizes * self.local).mean(axis=-1, keepdims=True)
        own += 2 * self.u * abs(slope) + shift**2 * abs(mean_g) + tiny
        of_slope = self.chain(products / n) + Bound(0.0, own)
        error = of_mean + of_slope * (np.abs(xhat) + shift)
        # mean(g xhat) errs by the shift of xhat times mean(g), unless g is centered first.
        error += self.shift * (abs(slope) + np.abs(xhat * mean_g))
        # rstd stands in xhat too, twice.
        error += self.scale * (g - mean_g - 3 * xhat * slope)
        error = (error + Bound(0.0, self.elements_of_dx())) * (r * self.lift**3)
        peak = np.maximum(sizes, products).sum(axis=-1, keepdims=True) * np.maximum(r, 1)
        return self.finish(error + Bound(0.0, tiny), exact, dtype, n, peak)

    def dgamma(self, exact: Array, dtype: Any) -> Array:
        """Return the limits of dgamma."""
        sizes = np.abs(self.dy)
        error = (self.shift + Bound(0.0, self.local)) * self.lift + self.scale * self.xhat
        products = (sizes * self.spread).sum(axis=0)
        # The product with dy, and what is rounded before.
        own = (self.u_e + self.extra) * products + 2 * self.tiny_e * self.rows
        bound = (error * sizes).over_rows() + Bound(0.0, own)
        bound += self.chain(sizes * self.spread, 0)
        return self.finish(bound, exact, dtype, self.rows, products)

    def dbeta(self, exact: Array, dtype: Any) -> Array:
        """Return the limits of dbeta."""
        sizes = np.abs(self.dy)
        size = sizes.sum(axis=0)
        own = Bound(0.0, self.extra * size + self.tiny_s)
        bound = self.chain(sizes, 0) + own
        return self.finish(bound, exact, dtype, self.rows, size)

    def finish(self, bound: Bound, exact: Array, dtype: Any, count: int, peak: Array) -> Array:
        """Return the limits with the terms of second order and the last rounding, infinite beyond the range."""
        room = 1 - (self.additions(count) + _OTHERS) * max(self.u, self.u_e)
        error = np.asarray(self.total(bound)) / room if room > 0 else np.full(exact.shape, np.inf)
        error = np.where((peak <= self.e.largest) & (error >= 0), error, np.inf)
        form = format_of(dtype)
        # The exact values are within an ulp of float64.
        last = half_ulp(np.abs(exact) + error, form)
        return np.asarray(error + last * (3 if form is FLOAT64 else 1))


def half_ulp(values: Array, form: Format) -> Array:
    """Return half an ulp of a format at these values, infinities included."""
    exponents = np.frexp(np.where(np.isfinite(values), values, 1.0))[1] - 1
    # float64 has no half of its smallest number.
    half = np.maximum(np.ldexp(0.5, np.maximum(exponents, form.emin) - form.digits + 1), 2.0**-1074)
    return np.where(np.isfinite(values), half, np.inf)


def are_alike(terms: Array, step: Array, axis: int) -> Array:
    """
    Tell where terms are rounded alike, so that the errors of their sum cannot count as independent.

    Either fewer than half of them differ, or the middle half of them spans less than a step, two ulp
    of the sum.
    """
    ordered, count = np.sort(terms, axis=axis), terms.shape[axis]
    different = 1 + (np.diff(ordered, axis=axis) != 0).sum(axis=axis, keepdims=True)
    low, high = (ordered.take([place * count // 4], axis) for place in (1, 3))
    return np.asarray((2 * different < count) | (high - low < step))
