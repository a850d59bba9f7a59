"""The mean and rstd of rows whose columns come in parts: streamed, or from several machines."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import HOST
from stablenorm.control import default_control
from stablenorm.reference.doubledouble import Wide
from stablenorm.reference.equations import _center
from stablenorm.types import Array, check_eps

_FLOAT64 = np.dtype(np.float64)


class _Part(NamedTuple):
    """Of some columns of each row: their mean (RMS norm: 0), and the sum of squares about it."""

    columns: int
    mean: Wide
    squares: Wide


class RowMoments:
    """
    The mean and rstd of rows whose columns come in parts.

    Parameters
    ----------
    kind : {"layer", "rms"}, default: "layer"
        Of RMS norm, the mean is 0.

    Notes
    -----
    A part is kept as its mean and the sum of ``(x - mean)**2``, each a pair of float64; two are merged by
    the formulas of T. F. Chan, G. H. Golub and R. J. LeVeque, COMPSTAT (1982) 30. The result is as accurate
    as that of whole rows, however these are cut; in its last bits it depends on the cut. About 40 bytes
    per row are kept, whatever the number of columns; the object can be pickled.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import RowMoments
    >>> x = np.array([[1e8, 1e8 + 1, 1e8 + 5, 1e8 + 6]])
    >>> here, there = RowMoments(), RowMoments()
    >>> here.update(x[:, :3])
    >>> there.update(x[:, 3:])
    >>> here.merge(there)
    >>> mean, rstd = here.finish(eps=0.0)
    >>> mean, rstd.round(3)
    (array([[1.00000003e+08]]), array([[0.392]]))
    """

    def __init__(self, kind: str = "layer") -> None:
        if kind not in ("layer", "rms"):
            msg = f'kind must be "layer" or "rms", got {kind!r}'
            raise ValueError(msg)
        self._kind = kind
        self._shape: tuple[int, ...] = ()
        self._total: _Part | None = None

    def update(self, x: ArrayLike) -> None:
        """
        Add some columns.

        Parameters
        ----------
        x : array of shape (..., columns)
            float16, bfloat16, float32 or float64, any number of columns; the leading axes are those of all
            other parts. Not modified.
        """
        array = HOST.convert("x", x)
        if not array.ndim:
            msg = "x must have columns, its last axis, got a number"
            raise ValueError(msg)
        *lead, columns = array.shape
        self._add(tuple(lead), _part(array.reshape(math.prod(lead), columns), self._kind))

    def merge(self, other: Any) -> None:
        """
        Add all columns of another one, which is left as it is.

        Parameters
        ----------
        other : RowMoments
            Of the same kind and the same rows, and other columns.
        """
        if not isinstance(other, RowMoments):
            msg = f"other must be a RowMoments, got {type(other).__name__}"
            raise TypeError(msg)
        if other._kind != self._kind:
            msg = f'other must be of kind "{self._kind}", got "{other._kind}"'
            raise ValueError(msg)
        if other._total is not None:
            self._add(other._shape, other._total)

    def finish(self, eps: float = 1e-5) -> tuple[Array, Array]:
        """
        Return the statistics of all columns so far, to which others can still be added.

        Parameters
        ----------
        eps : float, default: 1e-5
            Added to the variance before the square root. Finite and >= 0.

        Returns
        -------
        mean : array of shape (..., 1)
            float64, what `Cache.mean` is of the whole rows.
        rstd : array of shape (..., 1)
            The same of `Cache.rstd`.
        """
        eps = check_eps(eps)
        if self._total is None or not self._total.columns:
            msg = "RowMoments must have columns, got none yet; call update"
            raise ValueError(msg)
        columns, mean, squares = self._total
        with default_control(), np.errstate(all="ignore"):
            rstd = (squares.divided(columns) + Wide.exactly(eps)).rsqrt()
            found = mean.round_to(_FLOAT64), rstd.round_to(_FLOAT64)
        first, second = (each.reshape(*self._shape, 1) for each in found)
        return first, second

    def _add(self, shape: tuple[int, ...], part: _Part) -> None:
        if self._total is None:
            self._shape, self._total = shape, part
            return
        if shape != self._shape:
            msg = f"all parts must have the leading shape {self._shape}, got {shape}"
            raise ValueError(msg)
        self._total = _merged(self._total, part)


@default_control()
def _part(x: Array, kind: str) -> _Part:
    rows, columns = x.shape
    if not columns:
        nothing = Wide.exactly(np.zeros((rows, 1)))
        return _Part(0, nothing, nothing)
    with np.errstate(all="ignore"):
        centered, mean, mean_lo = _center(Wide.exactly(x.astype(np.float64)), Wide.exactly, kind)
        squares = (centered * centered).mean() * Wide.exactly(columns)
        # Of RMS norm there is none; of its rows, NaN and infinity show in the squares.
        whole = Wide.exactly(np.zeros((rows, 1))) if mean is None else Wide.exactly(mean) + mean_lo
        return _Part(columns, whole, squares)


@default_control()
def _merged(one: _Part, other: _Part) -> _Part:
    if not (one.columns and other.columns):
        return one if one.columns else other
    columns = one.columns + other.columns
    with np.errstate(all="ignore"):
        apart = other.mean - one.mean
        share = (apart * Wide.exactly(other.columns)).divided(columns)
        squares = one.squares + other.squares + apart * share * Wide.exactly(one.columns)
        return _Part(columns, one.mean + share, squares)
