"""The mean and rstd of rows whose columns come one part after another."""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import ArrayLike

from stablenorm.arrays import HOST
from stablenorm.reference import moments
from stablenorm.types import Array, Norm, check_eps


class RowMoments:
    """
    The mean and rstd of rows whose columns come in parts: streamed, or from several machines.

    Parameters
    ----------
    kind : {"layer", "rms"}, default: "layer"
        Of RMS norm, the mean is 0.

    Notes
    -----
    A part is kept as its sums of x - k and of (x - k)**2, of a k close to its mean, in pairs of float64.
    To merge two, both are shifted to one k. Nothing large cancels, so that the result is as accurate as
    that of whole rows, however these are cut. In its last bits it depends on the cut. 72 bytes per row
    are kept, whatever the number of columns; the object can be pickled.

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
        self._norm = Norm(kind=kind)
        self._shape: tuple[int, ...] = ()
        self._total: moments.Moments | None = None

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
        rows = array.reshape(math.prod(lead), columns)
        self._add(tuple(lead), moments.moments(rows, self._norm))

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
        if other._norm != self._norm:
            msg = f'other must be of kind "{self._norm.kind}", got "{other._norm.kind}"'
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
        mean, rstd = moments.statistics(moments.of_x(self._total, eps))
        return mean.reshape(*self._shape, 1), rstd.reshape(*self._shape, 1)

    def _add(self, shape: tuple[int, ...], part: moments.Moments) -> None:
        if self._total is None:
            self._shape, self._total = shape, part
            return
        if shape != self._shape:
            msg = f"all parts must have the leading shape {self._shape}, got {shape}"
            raise ValueError(msg)
        self._total = moments.merged([self._total, part])
