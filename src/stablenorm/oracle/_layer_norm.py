"""
`exact_layer_norm`: the exact y, dx, dgamma, dbeta, and how far given arrays are from them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stablenorm.oracle._formats import Array, Format, format_of, power, read_rows, to_float
from stablenorm.oracle._judge import Block, judge_block, round_block
from stablenorm.oracle._rows import (
    Row,
    Terms,
    dx_magnitudes,
    dx_terms,
    enclose,
    read_row,
    y_terms,
)
from stablenorm.oracle._surds import Surd, value_to

NAMES = ("y", "dx", "dgamma", "dbeta")

# The contract: |error| <= limit ulp + c * S. float64 arithmetic serves the three narrower formats;
# float64 itself is served by pairs of float64 (u**2 = 2**-106), less what its tree sums lose.
LIMITS = {
    "narrow": {"y": 0.501, "dx": 0.501, "dgamma": 0.501, "dbeta": 0.501},
    "float64": {"y": 0.501, "dx": 0.75, "dgamma": 0.51, "dbeta": 0.51},
}
SECOND = {
    "narrow": {"y": -48, "dx": -48, "dgamma": -44, "dbeta": -44},
    "float64": {"y": -98, "dx": -98, "dgamma": -94, "dbeta": -94},
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
        How many elements have an error above `limit_ulp`, so that only ``c * S`` could let them
        pass.
    worst_excess : float
        The largest ``(error - limit_ulp * ulp) / (c * S)`` of those elements; 0 if there are none.
        At most 1 if the contract is kept.
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


class NormwiseErrors(NamedTuple):
    """Errors of dx a row: ``max|error| / (rstd max|g|)`` and ``max|error| / max|dx|``."""

    to_g: Array
    to_dx: Array


class _Measured(NamedTuple):
    """Errors in ulp, whether misrounded, and the exponents of the ulps, of the given shape."""

    errors: Array
    misrounded: Array
    ulps: Array


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

    def __init__(self, x: Array, gamma: Array, beta: Array, eps: Fraction, dy: Array | None):
        """Take float64 copies of checked arrays."""
        self.shape: tuple[int, ...] = x.shape
        self.n = x.shape[-1]
        self.rows = math.prod(x.shape[:-1])
        self._x = x.reshape(self.rows, self.n)
        self._dy = None if dy is None else dy.reshape(self.rows, self.n)
        self._eps = eps
        ((self._gamma, self._gamma_exponent),) = read_rows(gamma[None])
        ((self._beta, self._beta_exponent),) = read_rows(beta[None])

    def mean(self, row: int) -> Fraction:
        """
        Return the exact mean of one row.

        Parameters
        ----------
        row : int
            Index of the row in the matrix view.

        Returns
        -------
        Fraction
            The mean.
        """
        return self._mean_var(row)[0]

    def var(self, row: int) -> Fraction:
        """
        Return the exact biased variance of one row, without eps.

        Parameters
        ----------
        row : int
            Index of the row in the matrix view.

        Returns
        -------
        Fraction
            The variance.
        """
        return self._mean_var(row)[1]

    def value(self, name: str, index: tuple[int, ...], bits: int = 256) -> Fraction:
        """
        Return one element to any precision.

        Parameters
        ----------
        name : {"y", "dx", "dgamma", "dbeta"}
            The quantity.
        index : tuple of int
            The element: one index for each axis.
        bits : int, default: 256
            The relative error is at most ``2**-bits``; none if the element is rational.

        Returns
        -------
        Fraction
            The element.

        Raises
        ------
        ValueError
            If the element is undefined: its row has no variance, and eps is 0.
        """
        flat = int(np.ravel_multi_index(index, self._shape_of(name)))
        block, column = divmod(flat, self.n)
        if self._undefined(name, block):
            msg = f"{name} must be defined at {index}, got a row with var + eps = 0"
            raise ValueError(msg)
        return value_to(self._surds(name, block, [column])[0], bits)

    def rounded(self, name: str, dtype: npt.DTypeLike) -> Array:
        """
        Return the correctly rounded exact values.

        Parameters
        ----------
        name : {"y", "dx", "dgamma", "dbeta"}
            The quantity.
        dtype : dtype
            float16, bfloat16, float32 or float64.

        Returns
        -------
        array
            Rounded once, to nearest, ties to even; inf from halfway above the largest finite number
            on. An exact zero is +0; a nonzero value that rounds to zero keeps its sign. NaN where
            the row has no variance and eps is 0.
        """
        fmt = format_of(dtype, "dtype")
        out = np.empty(self._shape_of(name), np.float64)
        flat = out.reshape(-1)
        for i, block in enumerate(self._blocks(name)):
            if block is None:
                flat[i * self.n : (i + 1) * self.n] = math.nan
                continue
            flat[i * self.n : (i + 1) * self.n] = round_block(
                block, fmt, lambda columns, i=i: self._surds(name, i, columns)
            )
        return out.astype(dtype)
