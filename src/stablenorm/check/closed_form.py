"""
The closed form: layer normalization and its gradients by this checker's own formulas, with bounds.

Everything here is float64 from re-centered rows, so an offset costs nothing; what is checked may
be in any precision. `Bounds` say how far a right program may be off: `plain` if it computes the
variance from centered x, `careless` if it does so from E[x^2] - E[x]^2, which loses as many
digits again to an offset. Between the two, a program is inaccurate; beyond, it is wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.operation import FaultError, Operation, copies, unit_roundoff
from stablenorm.types import Array

# Its square, 1e-12, is no more than any eps in use, so that the eps shows in full.
_SPREAD = 2.0**-20
OUTPUTS = ("y", "dx", "dgamma", "dbeta")


class Case(NamedTuple):
    """One problem, in the dtypes and shapes in which the forward and the backward get it."""

    x: Array
    gamma: Array | None
    beta: Array | None
    eps: float
    dy: Array

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the normalized axes."""
        for parameter in (self.gamma, self.beta):
            if parameter is not None:
                return parameter.shape
        return self.x.shape[-1:]

    @property
    def n(self) -> int:
        """Elements of a row."""
        return int(np.prod(self.row_shape))

    def rows(self, a: Array) -> Array:
        """See an array of the shape of x as (rows, n), in float64."""
        return np.asarray(a).astype(np.float64).reshape(-1, self.n)

    def vector(self, a: Array | None, default: float) -> Array:
        """See gamma or beta as (n,), in float64."""
        if a is None:
            return np.full(self.n, default)
        return np.asarray(a).astype(np.float64).reshape(-1)


class Statistics(NamedTuple):
    """Statistics of each row, in float64; all but `xhat` are (rows, 1)."""

    xhat: Array
    # 1 / rstd, which has no overflow where rstd would.
    s: Array
    mean: Array
    # eps / (var + eps), and mean|x| rstd.
    share: Array
    offset: Array


class Bounds(NamedTuple):
    """How far a right program may be from `value`, elementwise."""

    value: Array
    plain: Array
    careless: Array
    # The sum of the magnitudes that each element is made of: what digits are counted from.
    magnitude: Array


def row_mean(a: Array) -> Array:
    """Average over the last axis and keep it."""
    return np.mean(a, axis=-1, keepdims=True)


def unit(n: int, u: float) -> float:
    """Return what one element may lose to `n` additions and a few operations, relative."""
    # Random-walk error of a plain sum: N. J. Higham and T. Mary, SIAM J. Sci. Comput. 41 (2019)
    # A2815.
    return float((4 + np.sqrt(n) / 2) * u)


def statistics(x: Array, eps: float) -> Statistics:
    """Return the statistics of float64 rows, good for any offset and any finite range."""
    exponent = np.frexp(np.max(np.abs(x), axis=-1, keepdims=True))[1]
    scaled = np.ldexp(x, -exponent)
    mean = scaled.mean(axis=-1, keepdims=True)
    centered = scaled - mean
    # What rounding the mean has left: under an offset, more than all the rest.
    rest = centered.mean(axis=-1, keepdims=True)
    centered = centered - rest
    # A second power of two, since under an offset the spread can still have squares that vanish.
    largest = np.max(np.abs(centered), axis=-1, keepdims=True)
    divisor = np.where(largest > 0, largest, 1)
    std = divisor * np.sqrt(row_mean(np.square(centered / divisor)))
    # In units of 2^exponent, where +-largest cannot overflow on its way to xhat.
    root = np.sqrt(eps)
    s = np.ldexp(std, exponent)
    s = np.hypot(s, root)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        # Whichever of the two is the larger has not lost its digits to underflow.
        inner = np.hypot(std, np.ldexp(root, -exponent))
        xhat = np.where(np.isfinite(inner), centered / inner, np.ldexp(centered, exponent) / s)
        share, offset = np.square(root / s), row_mean(np.abs(x / s))
    return Statistics(xhat, s, np.ldexp(mean + rest, exponent), share, offset)


def dx_terms(g: Array, xhat: Array) -> tuple[Array, Array, Array]:
    """Return the three terms of dx / rstd: g, mean(g), xhat mean(g xhat)."""
    return g, row_mean(g) + np.zeros_like(g), xhat * row_mean(g * xhat)


class Expected:
    """The four outputs of one case with their bounds; `u` is the precision they are judged by."""

    def __init__(self, case: Case, u: float):
        self.case, self.u = case, u
        x, self.dy = case.rows(case.x), case.rows(case.dy)
        self.stats = statistics(x, case.eps)
        self.gamma, self.beta = case.vector(case.gamma, 1.0), case.vector(case.beta, 0.0)
        self.g = self.gamma * self.dy

    def _slack(self, *, careless: bool) -> tuple[Array, Array]:
        """Return how far off xhat may be shifted, and rstd relatively, (rows, 1)."""
        each = unit(self.case.n, self.u)
        shift = each * self.stats.offset
        stretch = each + np.square(shift)
        if careless:
            stretch = each * (1 + np.square(self.stats.offset)) + np.square(shift)
        # Half of it gone: first order says nothing any more.
        hopeless = (shift > 0.5) | (stretch > 0.5)
        return np.where(hopeless, np.inf, shift), np.where(hopeless, np.inf, stretch)

    def _xhat_slack(self, *, careless: bool) -> Array:
        shift, stretch = self._slack(careless=careless)
        return shift + (stretch + 2 * self.u) * np.maximum(np.abs(self.stats.xhat), 1e-300)

    def bounds_of(self, name: str, dtype: Any) -> Bounds:
        """Return one output, as (rows, n) or (n,), and how far a right one may be off."""
        find = {"y": self._y, "dx": self._dx, "dgamma": self._dgamma, "dbeta": self._dbeta}[name]
        with np.errstate(all="ignore"):
            value, plain, magnitude = find(careless=False)
            careless = find(careless=True)[1]
        kind = np.dtype(dtype).type
        tiniest = 4 * float(np.nextafter(kind(0), kind(1)))
        return Bounds(value, _known(plain) + tiniest, _known(careless) + tiniest, magnitude)

    def _y(self, *, careless: bool) -> tuple[Array, Array, Array]:
        scaled = self.gamma * self.stats.xhat
        magnitude = np.abs(scaled) + np.abs(self.beta)
        slack = np.abs(self.gamma) * self._xhat_slack(careless=careless)
        return scaled + self.beta, 4 * self.u * magnitude + slack, magnitude

    def _dx(self, *, careless: bool) -> tuple[Array, Array, Array]:
        found = self.dx_from(self.g, self.stats.xhat, careless=careless)
        value, bound, magnitude = (each / self.stats.s for each in found)
        return value, bound, magnitude

    def dx_from(
        self, g: Array, xhat: Array, *, careless: bool = False
    ) -> tuple[Array, Array, Array]:
        """Return dx / rstd made of g and xhat, its bound and its magnitude."""
        shift, stretch = self._slack(careless=careless)
        first, second, third = dx_terms(g, xhat)
        size, slope = row_mean(np.abs(g)), row_mean(np.abs(g * xhat))
        magnitude = np.abs(g) + size + np.abs(xhat) * slope
        bound = (3 * stretch + unit(self.case.n, self.u)) * magnitude
        # The mean of x off by `shift`: once in xhat, once in mean(g xhat), and both.
        bound = bound + shift * (slope + np.abs(xhat) * size + shift * size)
        return first - second - third, bound, magnitude

    def _dgamma(self, *, careless: bool) -> tuple[Array, Array, Array]:
        terms = self.dy * self.stats.xhat
        magnitude = np.sum(np.abs(terms), axis=0)
        slack = np.sum(np.abs(self.dy) * self._xhat_slack(careless=careless), axis=0)
        return np.sum(terms, axis=0), slack + unit(len(terms), self.u) * magnitude, magnitude

    def _dbeta(self, *, careless: bool) -> tuple[Array, Array, Array]:
        del careless
        magnitude = np.sum(np.abs(self.dy), axis=0)
        return np.sum(self.dy, axis=0), unit(len(self.dy), self.u) * magnitude, magnitude


def _known(bound: Array) -> Array:
    """Replace what is not a number by infinity: nothing is known there."""
    return np.where(np.isnan(bound), np.inf, bound)


def excess(actual: Array, value: Array, bound: Array) -> Array:
    """Return the error in units of the bound; not finite where it should be is infinite."""
    with np.errstate(all="ignore"):
        error = np.abs(actual - value) / np.where(bound > 0, bound, 1e-300)
        z = np.where(np.isinf(bound), 0.0, np.where(actual == value, 0.0, error))
    return np.where(np.isfinite(actual), np.where(np.isnan(z), np.inf, z), np.inf)


class Outcome(NamedTuple):
    """What a layer norm returned for a case; `error` says why there is nothing."""

    y: Array | None = None
    dx: Array | None = None
    dgamma: Array | None = None
    dbeta: Array | None = None
    error: str = ""

    def get(self, name: str) -> Array | None:
        """Return y, dx, dgamma or dbeta."""
        found: Array | None = getattr(self, name)
        return found


class Judged(NamedTuple):
    """One output beside its closed form: (rows, n) or (n,); the errors in units of each bound."""

    name: str
    actual: Array
    bounds: Bounds
    u: float
    plain: Array
    careless: Array

    @property
    def right(self) -> bool:
        """Within what a plain program loses."""
        return bool(np.all(self.plain <= 1))

    @property
    def wrong(self) -> bool:
        """Beyond what even a careless one loses."""
        return bool(np.any(self.careless > 1))

    @property
    def size(self) -> float:
        """The RMS of what the elements are made of: the value may vanish."""
        rms = float(np.sqrt(np.mean(np.square(self.bounds.magnitude))))
        return rms if np.isfinite(rms) and rms > 0 else 1.0

    @property
    def relative(self) -> float:
        """The largest error relative to `size`."""
        with np.errstate(all="ignore"):
            error = np.abs(self.actual - self.bounds.value)
        error = np.where(np.isfinite(error), error, np.inf)
        return float(np.max(error, initial=0.0)) / self.size

    @property
    def resolution(self) -> float:
        """The smallest relative error that would have shown anywhere."""
        return float(np.max(self.bounds.plain, initial=0.0)) / self.size


class Candidate:
    """The layer normalization that is checked, run on cases and compared with the closed form."""

    def __init__(self, operation: Operation):
        self._operation = operation
        # The precision inside, where that is less than that of the arrays.
        self.u = 0.0

    def forward(self, case: Case) -> tuple[Array, Any]:
        """Return y and cache; FaultError if y is not one for this case."""
        args = copies([case.x, case.gamma, case.beta])
        with np.errstate(all="ignore"):
            y, cache = self._operation.forward(args, case.eps)
        if y.shape != case.x.shape:
            msg = f"the forward returns y of shape {y.shape}"
            raise FaultError(msg)
        return y, cache

    def run(self, case: Case) -> Outcome:
        """Call both functions, and return what came."""
        try:
            y, cache = self.forward(case)
            args = [case.x, case.gamma, case.beta]
            # What has another shape on the caller's own data is reported already, and judged by its
            # values. What has one only here, of code for two axes say, is a restriction.
            known = dict(self._operation.reshaped)
            with np.errstate(all="ignore"):
                gradients = self._operation.gradients(case.dy.copy(), cache, args)
            only_here = self._operation.reshaped.keys() - known.keys()
            shapes, self._operation.reshaped = self._operation.reshaped, known
            if only_here:
                i = min(only_here)
                return Outcome(
                    y, error=f"the backward returns {OUTPUTS[1 + i]} of shape {shapes[i]}"
                )
        except FaultError as fault:
            return Outcome(error=str(fault))
        found: list[Array | None] = []
        for name, argument, gradient in zip(OUTPUTS[1:], args, gradients, strict=True):
            # What there is no argument for has no gradient.
            array = None if gradient is None or argument is None else np.asarray(gradient)
            # bfloat16 is of kind "V" to NumPy.
            floating = array is None or array.dtype.kind == "f" or array.dtype.name == "bfloat16"
            like = None if argument is None else argument.shape
            if array is not None and not (floating and array.shape == like):
                what = f"shape {array.shape} and dtype {array.dtype}"
                return Outcome(y, error=f"the backward returns {name} of {what}")
            found.append(array)
        return Outcome(y, found[0], found[1], found[2])

    def judge(self, case: Case, outcome: Outcome) -> dict[str, Judged]:
        """Compare every output that is there."""
        # Most outputs are of one precision: the statistics once for all of them.
        known: dict[float, Expected] = {}
        arrays = {name: outcome.get(name) for name in OUTPUTS}
        return {
            name: self.judge_one(case, name, actual, known)
            for name, actual in arrays.items()
            if actual is not None
        }

    def judge_one(
        self, case: Case, name: str, actual: Array, known: dict[float, Expected] | None = None
    ) -> Judged:
        """Compare one output."""
        # The coarsest of x, dy, the output, and what was found inside.
        u = max(self.u, *(unit_roundoff(a.dtype) for a in (case.x, case.dy, actual)))
        known = {} if known is None else known
        expected = known[u] = known[u] if u in known else Expected(case, u)
        bounds = expected.bounds_of(name, actual.dtype)
        flat = actual.astype(np.float64).reshape(bounds.value.shape)
        plain, careless = (
            excess(flat, bounds.value, each) for each in (bounds.plain, bounds.careless)
        )
        return Judged(name, flat, bounds, expected.u, plain, careless)

    def read_eps(self, case: Case) -> tuple[float, bool]:
        """Return the eps that the forward uses, and whether that is the one it is given."""
        values = _SPREAD * np.resize([1.0, -1.0], case.n)
        x = np.broadcast_to(values, (case.x.size // case.n, case.n)).reshape(case.x.shape)
        probe = case._replace(x=x.astype(case.x.dtype))
        try:
            first = self.forward(probe)[0]
            second = self.forward(probe._replace(eps=4 * case.eps + 1))[0]
        except FaultError:
            return case.eps, True
        if not np.array_equal(first, second) or case.n < 2:
            return case.eps, True
        beta, gamma = case.vector(case.beta, 0.0), case.vector(case.gamma, 1.0)
        row = case.rows(probe.x)[0]
        centered, keep = row - row.mean(), gamma != 0
        xhat = (case.rows(first)[0] - beta) / np.where(keep, gamma, 1.0)
        slope = float(xhat[keep] @ centered[keep]) / float(centered[keep] @ centered[keep])
        if not (np.isfinite(slope) and slope > 0):
            return case.eps, False
        found = slope**-2 - float(np.mean(centered**2))
        # To the three digits in which such constants are written.
        written = float(f"{found:.3g}")
        same = abs(found - case.eps) <= 1e-3 * case.eps
        return (case.eps if same or written < 0 else written), False


def narrowed(gradient: Any) -> Any:
    """
    Return a float64 gradient that holds nothing but float32 values as float32.

    Then it is judged as what it is, the product of single precision: less accurate, not wrong.
    """
    if gradient is None:
        return None
    values = np.asarray(gradient)
    if values.dtype != np.float64 or values.size == 0 or not np.isfinite(values).all():
        return gradient
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
    # Sums of few-bit numbers, as dbeta of this checker's dy is, are no evidence.
    coarse = np.round(np.frexp(values)[0] * 2.0**16) == np.frexp(values)[0] * 2.0**16
    if np.array_equal(single, values) and not coarse.all():
        return single
    return gradient
