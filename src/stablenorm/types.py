"""The types that every floor shares: gradients, norms, statistics and caches."""

import math
import operator
import sys
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stablenorm.formats import BFLOAT16

Array = NDArray[Any]
# Lengths, or axes.
Shape = tuple[int, ...]
bfloat16 = BFLOAT16.dtype

# Words for arguments, for type checkers.
Rounding = Literal["fast", "nearest"]
Backend = Literal["native", "numpy", "cuda"]
Name = Literal["x", "gamma", "beta"]


class Gradients(NamedTuple):
    """The gradients that a backward returns; None for those that wrt leaves out."""

    dx: Array | None
    dgamma: Array | None
    dbeta: Array | None


class Norm(NamedTuple):
    """The options of one call: gamma, beta, eps, kind, gamma_offset and rounding."""

    gamma: Array | None = None
    beta: Array | None = None
    eps: float = 1e-5
    # "layer", or "rms": as if the mean, and in the backward that of g, were 0.
    kind: str = "layer"
    # y = (gamma + gamma_offset) * xhat + beta, the sum exact.
    gamma_offset: float = 0.0
    rounding: str = "fast"


class Statistics(NamedTuple):
    """
    The numbers of each row that the backward needs: 24 bytes, 40 for float64 data; 8 or 16 for RMS
    norm. `spread` adds 8.

    The mean is ``mean + mean_lo (+ mean_tail)``, the reciprocal standard deviation ``rstd (+
    rstd_lo)``. `mean_lo` is the mean of ``x - mean``: one float64 has too few digits for a row
    whose elements differ in their last bit (float32, n = 50 000: 374 ulp without, 0.45 with it).
    """

    # Arrays; None for RMS norm.
    mean: Any
    mean_lo: Any
    rstd: Array
    # Float64 data only: the second word of rstd. It is NaN for rows out of the range of pairs, whose mean and rstd are
    # the exact ones, rounded.
    rstd_lo: Array | None = None
    # Float64 data only: the second word of mean_lo.
    mean_tail: Array | None = None
    # Kernels alone, for rounding="nearest": the root mean square of xhat, or of (x - k) * rstd for a k near the
    # mean, which is no less; 0 for constant rows, NaN for rows that have no layer norm.
    spread: Array | None = None
    # CUDA alone, int16 (rows, 2): powers of two by which mean_lo and rstd are to be multiplied.
    exponent: Array | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all rows together."""
        return sum(part.nbytes for part in self if part is not None)

    @property
    def out_of_range(self) -> Array:
        """Tell which rows are out of the range of pairs."""
        if self.rstd_lo is None:
            return np.zeros(len(self.rstd), bool)
        return np.isnan(self.rstd_lo) & ~np.isnan(self.rstd)

    def of_rows(self, rows: Any) -> "Statistics":
        """Return the statistics of some rows."""
        return Statistics._make(None if word is None else word[rows] for word in self)


def joined(parts: list[Statistics]) -> Statistics:
    """Return the statistics of successive parts as those of all rows; keep the words that all parts have."""
    if len(parts) == 1:
        return parts[0]
    return Statistics._make(
        None if any(word is None for word in words) else np.concatenate(words)
        for words in zip(*parts, strict=True)
    )


# The names of the gradients, in their order.
NAMES: tuple[Name, ...] = ("x", "gamma", "beta")


class Cache(NamedTuple):
    """
    The record that `layer_norm_forward` and `rms_norm_forward` hand to their backward.

    `x` and gamma are kept by reference: changing them in between changes the gradients.

    Attributes
    ----------
    x : array
        What was normalized, with a residual the sum.
    norm : Norm
        How: gamma, beta, eps and the options of the call.
    where : array of bool or None
        Which elements count; of length 1 along the normalized axes where whole rows do or do not.
    mean, rstd : array
        The mean of each row, 0 for RMS norm, and ``(var + eps)**-0.5``: float64, of the shape of x
        with 1 for the normalized axes. Computed anew at each access.

    Notes
    -----
    `mean` is within ``0.501 ulp + c * mean|x - mean|`` of the exact mean, with the c of the
    accuracy contract, 2**-48 or, for float64 data, 2**-98; `rstd` is within 2**-48 of the exact
    one in relative terms, for float64 data within 0.501 ulp. `statistics`, which the backward
    reads, holds more digits than one float64. An rstd beyond the range of float64 is inf here,
    as is that of a row of zero variance with eps = 0.
    """

    x: Array
    norm: Norm
    axis: tuple[int, ...]
    statistics: Statistics
    backend: str
    where: Array | None = None

    def __repr__(self) -> str:
        """Return shapes, dtypes and bytes on one line, no elements."""
        shown = self.x, *self.norm[:2]
        x, gamma, beta = (v if v is None else f"{v.dtype} {v.shape}" for v in shown)
        return (
            f"Cache(x: {x}, gamma: {gamma}, beta: {beta}, axis: {self.axis}, "
            f"statistics: {self.statistics.nbytes} bytes, backend: {self.backend!r}, "
            f"rounding: {self.norm.rounding!r})"
        )

    @property
    def gamma(self) -> Array | None:
        """Return the gamma that was given."""
        return self.norm.gamma

    @property
    def mean(self) -> Array:
        """Return the mean of each row."""
        statistics = self.statistics
        if statistics.mean is None:
            return self._of_rows(np.zeros_like(statistics.rstd), 0.0, None, 0)
        return self._of_rows(statistics.mean, statistics.mean_lo, statistics.mean_tail, 0)

    @property
    def rstd(self) -> Array:
        """Return the reciprocal standard deviation of each row."""
        return self._of_rows(0.0, self.statistics.rstd, self.statistics.rstd_lo, 1)

    def _of_rows(self, first: Any, low: Any, lower: Any, which: int) -> Array:
        """Return ``first + (low + lower) * 2**exponent`` in one float64 per row."""
        exponent = self.statistics.exponent
        with np.errstate(all="ignore"):
            if lower is not None:
                # NaN of rows out of range, which have one word.
                low = low + np.where(np.isnan(lower), 0.0, lower)
            if exponent is not None:
                low = np.ldexp(low, exponent[:, which])
            total: Array = first + low
        lengths = enumerate(self.x.shape)
        return total.reshape([1 if i in self.axis else length for i, length in lengths])


def check_eps(eps: Any) -> float:
    """Return `eps` as a float; TypeError if it is no number, ValueError if not finite and >= 0."""
    value = real("eps", eps)
    if not 0.0 <= value < math.inf:
        msg = f"eps must be finite and >= 0, got {eps}"
        raise ValueError(msg)
    return value


def real(name: str, value: Any) -> float:
    """Return a number as a float; TypeError if it is none, or complex. Too large an int is inf."""
    if type(value) is float:
        return value
    try:
        if isinstance(value, (str, bytes)) or np.iscomplexobj(value):
            raise TypeError  # noqa: TRY301 - what float() would take, or warn of
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        msg = f"{name} must be a real number, got {value!r:.60}"
        raise TypeError(msg) from None


def shown(number: int) -> str:
    """Write an int of any length; Python writes no more than 4300 digits."""
    return str(number) if abs(number) < 10**20 else f"an int of {number.bit_length()} bits"


def check_count(
    name: str, value: Any, *, least: int, most: int = sys.maxsize, cure: str = ""
) -> int:
    """Return `value` as an int; TypeError if it is none, ValueError if it is not from `least` to `most`."""
    cure = cure and f"; {cure}"
    try:
        number = operator.index(value)
    except TypeError:
        msg = f"{name} must be an int, got {value!r:.60}{cure}"
        raise TypeError(msg) from None
    if number < least:
        msg = f"{name} must be at least {least}, got {shown(number)}{cure}"
        raise ValueError(msg)
    if number > most:
        msg = f"{name} must be at most {most}, got {shown(number)}{cure}"
        raise ValueError(msg)
    return number
