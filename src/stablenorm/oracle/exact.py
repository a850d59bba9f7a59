"""The exact quantities of a norm, their rounded values, and the errors of arrays against them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from stablenorm.oracle import rounding
from stablenorm.oracle.rounding import (
    ERROR_BITS,
    Array,
    Interval,
    Vector,
    Verdict,
    format_of,
    read,
    require,
)
from stablenorm.oracle.rows import Magnitudes, Parts, Quantity, Row
from stablenorm.oracle.surds import (
    RATIONAL,
    T,
    enclose,
    enclose_all,
    enclose_root,
    exactly,
    merge,
    settle,
)

# The limit and log2(c) of each quantity, those of float64 last. float64 arithmetic serves the three
# narrower formats; pairs of float64 (u**2 = 2**-106), less what their tree sums lose, serve float64.
LIMITS = {
    "y": ((0.501, -48), (0.501, -98)),
    "dx": ((0.501, -48), (0.75, -98)),
    "dgamma": ((0.501, -44), (0.51, -94)),
    "dbeta": ((0.501, -44), (0.51, -94)),
    # These two have the limits of y: float64 data is computed with more digits than the kernels' dx.
    "ty": ((0.501, -48), (0.501, -98)),
    "ddy": ((0.501, -48), (0.501, -98)),
}


@dataclass(frozen=True, slots=True)
class ContractResult:
    """
    The verdict on one array by the contract ``|error| <= limit_ulp * ulp + c * S``.

    Attributes
    ----------
    passed : bool
        Whether every element keeps the contract.
    worst_ulp : float
        The largest error, in ulp of the array's dtype at the exact value. 0 for an empty array.
    misrounded : float
        The fraction of elements that are not the correctly rounded exact values; decided exactly.
    second_term : int
        Number of elements with an error above `limit_ulp`: only ``c * S`` can let them pass.
    worst_excess : float
        The largest ``(error - limit_ulp * ulp) / (c * S)`` of those, or 0. At most 1 if passed.
    worst_index : tuple of int
        Index of `worst_ulp`, or of `worst_excess` if the contract is broken. Empty for an empty array.
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


class ExactNorm:
    """
    The exact norm of floats, and its derivatives: y, dx, dgamma, dbeta, and ty of the jvp.

    Made by `exact_layer_norm` and `exact_rms_norm`; by `exact_double_backward` with the quantities
    ddy, dx, dgamma instead. A method computes only the quantities it is asked for: y needs no dx.
    Arrays to be judged have the shape of the exact quantity: dgamma and dbeta ``(n,)``, all others
    that of x.

    Attributes
    ----------
    x : array
        The rows that are normalized: with a residual, ``x + residual`` rounded to the dtype of x.
        0 where a mask is False.
    shape : tuple of int
        The shape of x.
    rows, n : int
        x seen as a matrix.
    """

    def __init__(
        self, x: Array, eps: Fraction, kind: str, quantities: dict[str, Quantity],
        vectors: dict[str, Vector], matrices: dict[str, Array],
    ):  # fmt: skip
        self.x, self.shape = x, x.shape
        self.rows, self.n = matrices["x"].shape
        self._eps, self._kind, self._quantities = eps, kind, quantities
        # Arguments by name. Vectors are common to all rows; a summand of dgamma or dbeta has the name
        # of its sum. Matrices differ from row to row: float64 (rows, n) or (rows, 1).
        self._vectors, self._matrices = vectors, matrices
        # The last two rows: all quantities of a few rows are made of the same.
        self._kept: dict[tuple[int, type[Row]], Row] = {}

    def __repr__(self) -> str:
        """Return the kind, the shape, and the quantities that can be asked for."""
        made = [name for name, of in self._quantities.items() if of.needs in self._matrices]
        return f"ExactNorm({self._kind}, {self.shape}: {', '.join(made)})"

    def mean(self, row: int) -> Fraction:
        """Return the exact mean of one row of the matrix view; 0 for RMS norm."""
        return self._row(row).mean

    def var(self, row: int) -> Fraction:
        """Return the exact mean of ``(x - mean)**2`` of one row of the matrix view, without eps."""
        return self._row(row).var

    def value(self, name: str, index: tuple[int, ...], bits: int = 256) -> Fraction:
        """
        Return one element to a relative ``2**-bits``; exactly if it is rational.

        `name` is that of the quantity, `index` has one index for each axis. ValueError if the
        element is undefined: its row has no variance, and eps is 0.
        """
        block, column = divmod(int(np.ravel_multi_index(index, self._shape_of(name))), self.n)
        is_defined = not self._undefined(name, block)[column]
        require(is_defined, f"{name} must be defined there, got a row of zero variance and eps = 0")
        number = merge(exactly(self._parts(name, block), [column])[0])
        if number.keys() <= {1}:
            return number.get(1, Fraction(0))
        low, _, exponent = settle(
            number, lambda one: one if (one.width << bits) + one.width <= abs(one.low) else None
        )
        return low * Fraction(2) ** exponent

    def rounded(self, name: str, dtype: npt.DTypeLike) -> Array:
        """
        Return the exact values of a quantity, rounded once to one of the four dtypes.

        To nearest, ties to even; inf from halfway above the largest finite number on. An exact zero
        is +0; a nonzero value that rounds to zero keeps its sign. NaN where a row has no variance
        and eps is 0, but for elements that a mask leaves out.
        """
        fmt, shape = format_of(dtype, "dtype"), self._shape_of(name)
        values = self._decide(name, lambda _, interval: rounding.nearest(interval, fmt))
        return np.array(values, np.float64).reshape(shape).astype(dtype)

    def floats(self, name: str) -> Array:
        """
        Return the values of a quantity in float64, within an ulp: five times as fast as `rounded`.

        NaN where there is none.
        """
        values = []
        for block in range(1 if self._quantities[name].summed else self.rows):
            lows: Any
            lows, widths, exponent = enclose_all(self._parts(name, block), self.n)
            try:
                near = np.ldexp(lows.astype(np.float64), exponent)
            except OverflowError:
                return self.rounded(name, np.float64)
            # An element that cancels almost completely needs more bits.
            if (abs(lows) >> ERROR_BITS < widths).any():
                return self.rounded(name, np.float64)
            values.append(np.where(self._undefined(name, block), np.nan, near))
        return np.array(values, np.float64).reshape(self._shape_of(name))

    def rstd(self, row: int) -> float:
        """Return ``rstd`` of one row of the matrix view, rounded to float64; NaN if there is none."""
        of = self._row(row)
        if of.var + self._eps == 0:
            return math.nan
        low, _, exponent = enclose_root(of.square, ERROR_BITS)
        return rounding.quotient(low, 1, exponent)

    def ulp_errors(self, **arrays: Array | None) -> dict[str, Array]:
        """
        Return the error of every element of the arrays, in ulp.

        Parameters
        ----------
        **arrays : array, optional
            Results of an implementation, by the names of the quantities; each may have any of
            the four dtypes. None is passed over.

        Returns
        -------
        dict of str to array
            For each array, float64 errors of its shape. The ulp is that of its dtype at the exact
            value, never below the smallest subnormal. An infinity counts 0.5 where the exact value
            rounds to it, and inf elsewhere. NaN counts inf. Where the exact value is undefined, NaN
            counts 0 and every number inf.
        """
        return {
            name: np.array([ulps for ulps, *_ in verdicts], np.float64).reshape(array.shape)
            for name, array, verdicts in self._judge(arrays)
        }

    def check_contract(self, **arrays: Array | None) -> dict[str, ContractResult]:
        """
        Hold the arrays against the contract ``|error| <= limit ulp + c * S``.

        Parameters
        ----------
        **arrays : array, optional
            Results of an implementation, by the names of the quantities; the dtype of each
            chooses its limit and c. The page "The accuracy contract" defines S, the
            sum of the magnitudes that an element is made of.

        Returns
        -------
        dict of str to ContractResult
            One for each array.

        Examples
        --------
        >>> from stablenorm import exact_layer_norm
        >>> x = np.array([[1.0, 2.0, 4.0]], np.float32)
        >>> exact = exact_layer_norm(x)
        >>> exact.check_contract(y=exact.rounded("y", np.float32))["y"].passed
        True
        """
        results = {}
        for name, array, verdicts in self._judge(arrays):
            # Sums over rows of narrower data are computed in float64, so they have its limit.
            sources = [array, self.x] if self._quantities[name].summed else [array]
            limit, second = LIMITS[name][all(a.dtype.name == "float64" for a in sources)]
            if not verdicts:
                results[name] = ContractResult(True, 0.0, 0.0, 0, 0.0, (), limit)
                continue
            errors, misrounded = np.array([(ulps, wrong) for ulps, wrong, *_ in verdicts]).T
            excess, above = np.zeros(len(verdicts)), np.flatnonzero(errors > limit)
            # Elements come block by block: S of one block is kept.
            sizes = lru_cache(1)(partial(self._sizes, name))
            for i in above.tolist():
                ulps, _, error, exponent = verdicts[i]
                size, _, unit = sizes(i // self.n)[i % self.n]
                beyond = 1 - limit / ulps
                excess[i] = beyond * rounding.quotient(error, size, exponent - unit - second)
            worst = float(excess.max())
            place = np.argmax(errors if worst <= 1 else excess)
            index = tuple(map(int, np.unravel_index(place, array.shape)))
            of_all = float(errors.max()), float(misrounded.mean())
            results[name] = ContractResult(worst <= 1, *of_all, above.size, worst, index, limit)
        return results

    def _shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a quantity."""
        names = ", ".join(self._quantities)
        require(name in self._quantities, f"name must be one of {names}, got {name!r}")
        return (self.n,) if self._quantities[name].summed else self.shape

    def _judge(self, arrays: dict[str, Array | None]) -> Iterator[tuple[str, Array, list[Verdict]]]:
        """Yield the name of each array, the array, and the verdicts on its elements."""
        for name, returned in arrays.items():
            shape = self._shape_of(name)
            if returned is not None:
                array = np.asarray(returned)
                values = as_float64(name, array, shape).reshape(-1).tolist()
                verdict = partial(rounding.judge, format_of(array.dtype, name), values)
                yield name, array, self._decide(name, verdict)

    # ---- rows, and blocks: the elements of one row, or the sums over all ----

    def _row(self, index: int, kind: type[Row] = Row) -> Row:
        key = index, kind
        if key not in self._kept:
            own = {name: read(matrix[index]) for name, matrix in self._matrices.items()}
            self._kept = dict([*self._kept.items()][-1:])
            self._kept[key] = kind(self._vectors | own, self._eps, self._kind)
        return self._kept[key]

    def _rows(self, name: str, block: int, kind: type[Row] = Row) -> Iterator[Row]:
        """Yield the rows of one block."""
        indices = range(self.rows) if self._quantities[name].summed else [block]
        return (self._row(i, kind) for i in indices)

    def _parts(self, name: str, block: int, kind: type[Row] = Row) -> Parts:
        """Yield the parts of one block."""
        make, _, needed = self._quantities[name]
        require(needed in self._matrices, f"{needed} must be given for {name}, got None")
        if name in self._vectors:
            yield self._vectors[name], RATIONAL
        for row in self._rows(name, block, kind):
            yield from make(row)

    def _undefined(self, name: str, block: int) -> Array:
        """Tell which elements of a block have no value: var and eps are 0, the mask is True."""
        undefined: Array = np.zeros(self.n, bool)
        # dbeta, which is a sum of dy, is made without rstd.
        if self._eps == 0 and name != "dbeta":
            for row in self._rows(name, block):
                undefined |= (row.var == 0) & (row.ones.integers != 0)
        return undefined

    def _sizes(self, name: str, block: int) -> list[Interval]:
        """Return S of the contract: the sum of the magnitudes that each element is made of."""
        parts = self._parts(name, block, Magnitudes)
        return enclose(((abs(v), square) for v, square in parts), self.n)

    def _decide(self, name: str, verdict: Callable[[int, Interval | None], T | None]) -> list[T]:
        """Return the verdict on each element, a function of its place and, if defined, its interval."""
        verdicts: list[Any] = []
        for block in range(1 if self._quantities[name].summed else self.rows):
            intervals = enclose(self._parts(name, block), self.n)
            undefined = self._undefined(name, block).tolist()
            places = range(len(verdicts), len(verdicts) + self.n)
            for place, interval, is_undefined in zip(places, intervals, undefined, strict=True):
                verdicts.append(verdict(place, None if is_undefined else interval))
            if undecided := [place for place in places if verdicts[place] is None]:
                numbers = exactly(self._parts(name, block), [i % self.n for i in undecided])
                for place, number in zip(undecided, numbers, strict=True):
                    verdicts[place] = settle(number, partial(verdict, place))
        return verdicts


def as_float64(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """Return the float64 copy of an argument, or say what is wrong with it."""
    format_of(array.dtype, name)
    require(array.shape == shape, f"{name} must have shape {shape}, got {array.shape}")
    return array.astype(np.float64)
