"""
`exact_layer_norm`: the exact y, dx, dgamma, dbeta, how far given arrays are from them, the contract.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from stablenorm.oracle.rounding import (
    Array,
    Judged,
    format_of,
    judge_block,
    judge_undefined,
    power,
    read_rows,
    round_block,
)
from stablenorm.oracle.rows import Inputs

Given = Array | None

# ---- the contract ----

# The contract: |error| <= limit ulp + c * S. float64 arithmetic serves the three narrower formats;
# float64 itself is served by pairs of float64 (u**2 = 2**-106), less what its tree sums lose.
# By quantity: the limit and log2(c), those of float64 last.
LIMITS = {
    "y": (0.501, -48, 0.501, -98),
    "dx": (0.501, -48, 0.75, -98),
    "dgamma": (0.501, -44, 0.51, -94),
    "dbeta": (0.501, -44, 0.51, -94),
}


@dataclass(frozen=True, slots=True)
class ContractResult:
    """
    How one array stands against the contract ``|error| <= limit_ulp * ulp + c * S``.

    Attributes
    ----------
    passed : bool
        Whether every element keeps the contract.
    worst_ulp : float
        The largest error, in ulp of the array's dtype at the exact value. 0 for an empty array.
    misrounded : float
        The fraction of elements that are not the correctly rounded exact values; decided exactly.
    second_term : int
        How many elements have an error above `limit_ulp`: only ``c * S`` could let them pass.
    worst_excess : float
        The largest ``(error - limit_ulp * ulp) / (c * S)`` of those, or 0. At most 1 if passed.
    worst_index : tuple of int
        Where `worst_ulp` is, or `worst_excess` if the contract is broken. Empty for an empty array.
    limit_ulp : float
        The limit of this quantity in this dtype.
    """

    passed: bool
    worst_ulp: float
    misrounded: float
    second_term: int
    worst_excess: float
    worst_index: tuple[int, ...]
    limit_ulp: float


def _hold(inputs: Inputs, name: str, actual: Array, judged: Judged) -> ContractResult:
    """Hold an array, judged and flattened, against the contract."""
    limits = LIMITS[name]
    limit, second = limits[2:] if actual.dtype.name == "float64" else limits[:2]
    errors = judged.in_ulp()
    if not errors.size:
        return ContractResult(True, 0.0, 0.0, 0, 0.0, (), limit)
    n = inputs.x.shape[1]
    above = np.flatnonzero(errors > limit)
    # An infinite error needs no S, which may be undefined there.
    finite = above[np.isfinite(judged.mantissa[above])]
    excess = np.where(np.isinf(judged.mantissa), math.inf, 0.0)
    for block in np.unique(finite // n).tolist():
        sizes = next(inputs.block(name, block).blocks(name, sizes=True)) or []
        for i in finite[finite // n == block]:
            mantissa, exponent = float(judged.mantissa[i]), int(judged.exponent[i])
            over = mantissa - math.ldexp(limit, int(judged.ulp[i]) - exponent)
            low, _, unit = sizes[i % n]
            try:
                excess[i] = Fraction(over) * power(exponent - unit - second) / low
            except (OverflowError, ZeroDivisionError):
                excess[i] = math.inf
    worst = float(excess.max())
    where = np.argmax(errors if worst <= 1 else excess)
    return ContractResult(
        passed=worst <= 1,
        worst_ulp=float(errors.max()),
        misrounded=float(judged.misrounded.mean()),
        second_term=above.size,
        worst_excess=worst,
        worst_index=tuple(int(i) for i in np.unravel_index(where, actual.shape)),
        limit_ulp=limit,
    )


# ---- the public class and function ----


class ExactLayerNorm:
    """
    The exact layer norm of given floats, and of its gradients. Made by `exact_layer_norm`.

    Nothing is computed before it is asked for, and only what is asked for: y needs no dx. Arrays
    handed in have the shape of the exact quantity: y, dx that of x, dgamma, dbeta ``(n,)``.

    Attributes
    ----------
    shape : tuple of int
        The shape of x.
    rows, n : int
        x seen as a matrix.
    """

    def __init__(self, shape: tuple[int, ...], inputs: Inputs):
        """Take checked inputs; `shape` is that of x."""
        self.shape = shape
        self.rows, self.n = inputs.x.shape
        self._inputs = inputs

    def mean(self, row: int) -> Fraction:
        """Return the exact mean of one row of the matrix view."""
        return statistics.mean(map(Fraction, self._inputs.x[row].tolist()))

    def var(self, row: int) -> Fraction:
        """Return the exact biased variance of one row of the matrix view, without eps."""
        return statistics.pvariance(map(Fraction, self._inputs.x[row].tolist()))

    def value(self, name: str, index: tuple[int, ...], bits: int = 256) -> Fraction:
        """
        Return one element to a relative ``2**-bits``, and as it is if it is rational.

        `name` is that of the quantity, `index` has one index for each axis. ValueError if the
        element is undefined: its row has no variance, and eps is 0.
        """
        place = int(np.ravel_multi_index(index, self._shape_of(name)))
        block, column = divmod(place, self.n)
        return self._inputs.block(name, block).surds(name, [column])[0].value_to(bits)

    def rounded(self, name: str, dtype: npt.DTypeLike) -> Array:
        """
        Return the exact values of a quantity, rounded once to one of the four dtypes.

        To nearest, ties to even; inf from halfway above the largest finite number on. An exact zero
        is +0; a nonzero value that rounds to zero keeps its sign. NaN where a row has no variance
        and eps is 0.
        """
        fmt = format_of(dtype, "dtype")
        out = np.full(self._shape_of(name), math.nan)
        flat = out.reshape(-1, self.n)
        for i, block in enumerate(self._inputs.blocks(name)):
            if block is not None:
                flat[i] = round_block(block, fmt, self._inputs.exactly(name, i))
        return out.astype(dtype)

    def ulp_errors(
        self, y: Given = None, dx: Given = None, dgamma: Given = None, dbeta: Given = None
    ) -> dict[str, Array]:
        """
        Return the error of every element of the given arrays, in ulp.

        Parameters
        ----------
        y, dx, dgamma, dbeta : array, optional
            What an implementation returned; each may have any of the four dtypes.

        Returns
        -------
        dict of str to array
            For each array given, float64 errors of its shape. The ulp is that of its dtype at the
            exact value, never below the smallest subnormal. An infinity counts 0.5 where the exact
            value rounds to it, and inf elsewhere; so does NaN, but for rows whose exact value is
            undefined: there NaN counts 0 and all else inf.
        """
        found = self._judge({"y": y, "dx": dx, "dgamma": dgamma, "dbeta": dbeta})
        return {name: judged.in_ulp().reshape(actual.shape) for name, actual, judged in found}

    def check_contract(
        self, y: Given = None, dx: Given = None, dgamma: Given = None, dbeta: Given = None
    ) -> dict[str, ContractResult]:
        """
        Hold the given arrays against the contract ``|error| <= limit ulp + c * S``.

        Parameters
        ----------
        y, dx, dgamma, dbeta : array, optional
            What an implementation returned; the dtype of each chooses its limit and c, `LIMITS`.
            S is the sum of the magnitudes that an element is made of, so that only an element that
            cancels almost completely may use the second term.

        Returns
        -------
        dict of str to ContractResult
            One for each array given.

        Examples
        --------
        >>> x = np.array([[1.0, 2.0, 4.0]], np.float32)
        >>> exact = exact_layer_norm(x)
        >>> exact.check_contract(y=exact.rounded("y", np.float32))["y"].passed
        True
        """
        found = self._judge({"y": y, "dx": dx, "dgamma": dgamma, "dbeta": dbeta})
        return {name: _hold(self._inputs, name, actual, judged) for name, actual, judged in found}

    def _shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a quantity."""
        if name not in LIMITS:
            msg = f"name must be one of {', '.join(LIMITS)}, got {name!r}"
            raise ValueError(msg)
        return self.shape if name in {"y", "dx"} else (self.n,)

    def _judge(self, arrays: dict[str, Array | None]) -> Iterator[tuple[str, Array, Judged]]:
        """Yield the name of each array given, the array, and how it is judged, flattened."""
        for name, array in arrays.items():
            if array is None:
                continue
            actual = np.asarray(array)
            fmt = format_of(actual.dtype, name)
            values = _as_float64(name, actual, self._shape_of(name)).reshape(-1, self.n)
            parts = [
                judge_undefined(values[i])
                if block is None
                else judge_block(block, values[i], fmt, self._inputs.exactly(name, i))
                for i, block in enumerate(self._inputs.blocks(name))
            ]
            # Where there are no rows, this makes the dtypes.
            parts.append(judge_undefined(np.zeros(0)))
            yield name, actual, Judged(*map(np.concatenate, zip(*parts, strict=True)))


def exact_layer_norm(
    x: Array,
    gamma: Array | None = None,
    beta: Array | None = None,
    eps: float = 1e-5,
    dy: Array | None = None,
) -> ExactLayerNorm:
    """
    Return the exact layer norm of `x` over its last axis, to measure implementations against.

    Parameters
    ----------
    x : array of shape (..., n)
        Finite float16, bfloat16, float32 or float64; n at least 1.
    gamma, beta : array of shape (n,), optional
        Scale and shift, finite, of any of the four dtypes. Default: 1 and 0.
    eps : float, default: 1e-5
        Added to the variance before the square root: this float64, whatever the dtype of `x`.
    dy : array of the shape of x, optional
        The cotangent of y, finite, of any of the four dtypes. Needed for all but y.

    Returns
    -------
    ExactLayerNorm
        The exact y, dx, dgamma and dbeta, as of infinite precision: their errors in ulp, their
        correctly rounded values, the contract. Computed when asked for.

    Raises
    ------
    TypeError, ValueError
        If a dtype is not one of the four; if a shape is wrong, a value is not finite, or eps is
        negative or not finite.

    Notes
    -----
    A row of n = 768 costs milliseconds, and one of float64 that spans the whole range of exponents a
    multiple of that. Slice `x` and `dy` first when a sample of rows is enough.

    Examples
    --------
    >>> exact = exact_layer_norm(np.array([[0.0, 1.0, 5.0]]), eps=0.0)
    >>> exact.mean(0), exact.var(0)
    (Fraction(2, 1), Fraction(14, 3))
    >>> exact.rounded("y", np.float16).dtype
    dtype('float16')
    """
    x = np.asarray(x)
    if x.ndim < 1 or x.shape[-1] < 1:
        msg = f"x must have shape (..., n) with n >= 1, got {x.shape}"
        raise ValueError(msg)
    n = x.shape[-1]
    if not (math.isfinite(eps) and eps >= 0):
        msg = f"eps must be finite and >= 0, got {eps}"
        raise ValueError(msg)
    gamma = np.ones(n) if gamma is None else np.asarray(gamma)
    beta = np.zeros(n) if beta is None else np.asarray(beta)
    inputs = Inputs(
        _read("x", x, x.shape).reshape(-1, n),
        next(read_rows(_read("gamma", gamma, (n,))[None])),
        next(read_rows(_read("beta", beta, (n,))[None])),
        Fraction(float(eps)),
        None if dy is None else _read("dy", np.asarray(dy), x.shape).reshape(-1, n),
    )
    return ExactLayerNorm(x.shape, inputs)


def _read(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    values = _as_float64(name, array, shape)
    if not np.isfinite(values).all():
        msg = f"{name} must be finite for an exact result, got {values[~np.isfinite(values)][0]}"
        raise ValueError(msg)
    return values


def _as_float64(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """Return the float64 copy of an argument, or say what is wrong with it."""
    format_of(array.dtype, name)
    if array.shape != shape:
        msg = f"{name} must have shape {shape}, got {array.shape}"
        raise ValueError(msg)
    return array.astype(np.float64)
