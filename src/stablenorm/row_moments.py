"""The mean and rstd of rows whose columns come in parts: streamed, or from several machines."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import HOST
from stablenorm.reference.doubledouble import Wide
from stablenorm.reference.equations import _center
from stablenorm.types import Array, check_eps


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
        self._shape: tuple[int, ...] | None = None
        # Of the columns so far: how many, the mean (RMS norm: 0), the sum of squares about it.
        self._columns = 0
        self._mean: Any = None
        self._squares: Any = None

    @np.errstate(all="ignore")
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
        part = RowMoments(self._kind)
        *lead, part._columns = array.shape
        part._shape = tuple(lead)
        if part._columns:
            rows = array.reshape(-1, part._columns).astype(np.float64)
            centered, mean, mean_lo = _center(Wide.exactly(rows), Wide.exactly, self._kind)
            part._squares = (centered * centered).mean() * Wide.exactly(part._columns)
            # Of RMS norm there is none; of its rows, NaN and infinity show in the squares.
            part._mean = Wide.exactly(np.zeros((len(rows), 1)))
            if mean is not None:
                part._mean = Wide.exactly(mean) + mean_lo
        self.merge(part)

    @np.errstate(all="ignore")
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
        if self._shape is None:
            self._shape = other._shape
        if other._shape not in (None, self._shape):
            msg = f"all parts must have the leading shape {self._shape}, got {other._shape}"
            raise ValueError(msg)
        if not (self._columns and other._columns):
            if other._columns:
                self.__dict__ |= other.__dict__
            return
        columns = self._columns + other._columns
        apart = other._mean - self._mean
        share = (apart * Wide.exactly(other._columns)).divided(columns)
        between = apart * share * Wide.exactly(self._columns)
        self._squares = self._squares + other._squares + between
        self._mean = self._mean + share
        self._columns = columns

    @np.errstate(all="ignore")
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
        if self._shape is None or not self._columns:
            msg = "RowMoments must have columns, got none yet; call update"
            raise ValueError(msg)
        rstd = (self._squares.divided(self._columns) + Wide.exactly(eps)).rsqrt()
        lead, float64 = self._shape, np.dtype(np.float64)
        mean, rstd = (each.round_to(float64).reshape(*lead, 1) for each in (self._mean, rstd))
        return mean, rstd
