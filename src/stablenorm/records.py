"""The records that every floor shares: gradients, norms, statistics and caches; and the check of a cache."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from stablenorm.control import with_default_control
from stablenorm.formats import BFLOAT16, NATIVE, check_dtype

Array = NDArray[Any]
# Lengths, or axes.
Shape = tuple[int, ...]
bfloat16 = BFLOAT16.dtype

# Words for arguments, for type checkers.
Rounding = Literal["fast", "nearest"]
Backend = Literal["native", "numpy", "cuda"]
_BACKENDS = get_args(Backend)
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


# Makes a Norm of all its fields. Its own constructor takes 0.3 us, a sixth of a small call; mypy finds
# the places that lack a new field.
new_norm: Callable[[tuple[Any, Any, float, str, float, str]], Norm] = partial(tuple.__new__, Norm)


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
        words = []
        for word in self:
            words.append(word if word is None else word[rows])
        return tuple.__new__(Statistics, words)


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
        try:
            check_record(self)
            x, gamma, beta = (
                v if v is None else f"{v.dtype} {v.shape}" for v in (self.x, *self.norm[:2])
            )
            rounding = self.norm.rounding
        except (AttributeError, TypeError, ValueError) as error:
            return f"Cache({error})"
        return (
            f"Cache(x: {x}, gamma: {gamma}, beta: {beta}, axis: {self.axis}, "
            f"statistics: {self.statistics.nbytes} bytes, backend: {self.backend!r}, "
            f"rounding: {rounding!r})"
        )

    @property
    def gamma(self) -> Array | None:
        """Return the gamma that was given."""
        check_record(self)
        return self.norm.gamma

    @property
    def mean(self) -> Array:
        """Return the mean of each row."""
        check_rows(self)
        statistics = self.statistics
        if statistics.mean is None:
            return self._of_rows(np.zeros_like(statistics.rstd), 0.0, None, 0)
        return self._of_rows(statistics.mean, statistics.mean_lo, statistics.mean_tail, 0)

    @property
    def rstd(self) -> Array:
        """Return the reciprocal standard deviation of each row."""
        check_rows(self)
        return self._of_rows(0.0, self.statistics.rstd, self.statistics.rstd_lo, 1)

    @with_default_control
    def _of_rows(self, first: Any, low: Any, lower: Any, which: int) -> Array:
        """Return ``first + (low + lower) * 2**exponent`` in one float64 per row."""
        exponent = self.statistics.exponent
        if lower is not None:
            # NaN of rows out of range, which have one word.
            low = low + np.where(np.isnan(lower), 0.0, lower)
        if exponent is not None:
            low = np.ldexp(low, exponent[:, which])
        total: Array = first + low
        lengths = enumerate(self.x.shape)
        return total.reshape([1 if i in self.axis else length for i, length in lengths])


# ---- checks ----


def check_record(cache: Cache) -> None:
    """Raise unless each field of a cache, which may have been edited, holds what a forward puts there; gamma, beta apart."""
    check_rows(cache)
    norm, where = cache.norm, cache.where
    if type(norm) is not Norm or len(norm) != len(Norm._fields):
        msg = f"cache.norm must be the Norm of a forward, got {type(norm).__name__}"
        raise TypeError(msg)
    kind: Any = norm.kind
    if not (isinstance(kind, str) and kind in ("layer", "rms")):
        msg = f'cache.norm.kind must be "layer" or "rms", got {kind!r:.60}'
        raise ValueError(msg)
    if (cache.statistics.mean is None) != (norm.kind == "rms"):
        msg = f"cache.statistics.mean must be None for RMS norm alone, got kind={norm.kind!r}"
        raise ValueError(msg)
    lengths = cache.x.shape
    is_mask = isinstance(where, np.ndarray) and where.dtype == np.bool_
    if where is not None and not (is_mask and where.ndim == len(lengths)):
        msg = f"cache.where must be None or an array of bool with the axes of x, got {where!r:.60}"
        raise TypeError(msg)
    shape = () if where is None else where.shape
    for one, length in zip(shape, lengths, strict=False):
        if one not in (1, length):
            msg = f"cache.where must broadcast to the shape of x, {lengths}, got {shape}"
            raise ValueError(msg)


def check_rows(cache: Cache) -> None:
    """Raise unless x, axis, backend and statistics of a cache have their types and fit one another."""
    if len(cache) != len(Cache._fields):
        msg = f"cache must have {len(Cache._fields)} fields, got {len(cache)}"
        raise ValueError(msg)
    # Anything may be in it.
    fields: Any = cache
    x, _, axis, statistics, backend, _ = fields
    if not (isinstance(backend, str) and backend in _BACKENDS):
        msg = f"cache.backend must be one of {', '.join(_BACKENDS)}, got {backend!r:.60}"
        raise ValueError(msg)
    if isinstance(x, np.ndarray) == (backend == "cuda") or not hasattr(x, "dtype"):
        msg = f"cache.x must be the array that the backend {backend!r} normalized, got {type(x).__name__}"
        raise TypeError(msg)
    if x.dtype not in NATIVE:
        check_dtype("cache.x", x)
    is_ints = isinstance(axis, tuple) and set(map(type, axis)) == {int}
    if not (is_ints and set(axis) <= set(range(x.ndim)) and sorted(set(axis)) == list(axis)):
        msg = f"cache.axis must be a tuple of axes of x, each from 0 to {x.ndim - 1} once, got {axis!r:.60}"
        raise ValueError(msg)
    if type(statistics) is not Statistics or len(statistics) != len(Statistics._fields):
        msg = (
            f"cache.statistics must be the Statistics of a forward, got {type(statistics).__name__}"
        )
        raise TypeError(msg)
    rows = 1
    for i, length in enumerate(x.shape):
        rows *= 1 if i in axis else length
    layer, wide = statistics.mean is not None, x.dtype == np.float64 and backend == "native"
    needed = "rstd" + " mean_lo" * layer + " rstd_lo" * wide + " mean_tail" * (layer and wide)
    for name, word in zip(Statistics._fields, statistics, strict=True):
        like = (rows, 2) if name == "exponent" else (rows,)
        dtype = np.int16 if name == "exponent" else np.float64
        if word is None and name not in needed.split():
            continue
        if getattr(word, "dtype", None) != dtype or (
            backend != "cuda" and type(word) is not np.ndarray
        ):
            msg = f"cache.statistics.{name} must be an array of {dtype.__name__}, got {word!r:.60}"
            raise TypeError(msg)
        if word.shape != like:
            msg = f"cache.statistics.{name} must have shape {like}, got {word.shape}"
            raise ValueError(msg)
