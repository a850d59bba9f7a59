"""The functions of RMS normalization."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from stablenorm.api.layer_norm import _new, on_dask
from stablenorm.arrays import is_lazy, is_lazy_cache
from stablenorm.functional.backward import backward
from stablenorm.functional.forward import forward
from stablenorm.types import NAMES, Array, Backend, Cache, Gradients, Name, Norm, Rounding


def rms_norm(
    x: ArrayLike,
    gamma: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    axis: int | tuple[int, ...] | None = -1,
    out: Array | None = None,
    backend: Backend | None = None,
    gamma_offset: float = 0.0,
    rounding: Rounding = "fast",
    residual: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """
    Divide `x` by its root mean square over `axis`, then scale and shift.

    Parameters
    ----------
    x : array
        As for `layer_norm`, and so are all the rest and the errors; not for CUDA arrays.
    eps : float, default: 1e-5
        Added to the mean square before the square root. Finite and >= 0.

    Returns
    -------
    array
        ``y = gamma * x / sqrt(mean(x**2) + eps) + beta``, of the shape and dtype of `x`; `out` if
        that was given.

    Notes
    -----
    Each element is within ``0.501 ulp + c * S`` of the exact result, or correctly rounded, as
    `layer_norm` says, with ``S = |gamma xhat| + |beta|``.
    A row of zeros is beta; with ``eps=0`` it is NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import rms_norm
    >>> rms_norm(np.array([[3.0, 4.0], [-60.0, 80.0]])).round(3)
    array([[ 0.849,  1.131],
           [-0.849,  1.131]])
    """
    norm = _new(Norm, (gamma, beta, eps, "rms", gamma_offset, rounding))
    run = on_dask().forward if is_lazy(x) else forward
    return run(x, norm, axis, out, backend, False, residual, where)[0]


def rms_norm_forward(
    x: ArrayLike,
    gamma: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    axis: int | tuple[int, ...] | None = -1,
    out: Array | None = None,
    backend: Backend | None = None,
    gamma_offset: float = 0.0,
    rounding: Rounding = "fast",
    residual: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> tuple[Array, Cache]:
    """
    Normalize `x` as `rms_norm` does, and keep what the backward needs.

    Parameters
    ----------
    x : array
        As for `layer_norm_forward`, and so are all the rest and the errors.

    Returns
    -------
    y : array
        The result, of the shape and dtype of `x`.
    cache : Cache
        For `rms_norm_backward`: `x` and `gamma` by reference, and per row the reciprocal root mean
        square, 8 bytes (16 with float64 data; 8 more with ``rounding="nearest"``).

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import rms_norm_forward
    >>> y, cache = rms_norm_forward(np.array([[3.0, 4.0]]), gamma=np.zeros(2), gamma_offset=1.0)
    >>> cache.rstd.round(3)
    array([[0.283]])
    """
    norm = _new(Norm, (gamma, beta, eps, "rms", gamma_offset, rounding))
    run = on_dask().forward if is_lazy(x) else forward
    return run(x, norm, axis, out, backend, True, residual, where)


def rms_norm_backward(
    dy: ArrayLike,
    cache: Cache,
    *,
    wrt: Sequence[Name] = NAMES,
    out: Sequence[Array | None] | None = None,
    dsum: ArrayLike | None = None,
    sum_axes: int | tuple[int, ...] | None = None,
    drstd: ArrayLike | None = None,
    accumulate: bool = False,
) -> Gradients:
    """
    Pull the cotangent `dy` back through `rms_norm_forward`.

    Parameters
    ----------
    dy : array
        As for `layer_norm_backward`, and so are all the rest and the errors. There is no `dmean`.
    cache : Cache
        What `rms_norm_forward` returned; not a cache of `layer_norm_forward`.

    Notes
    -----
    The errors are those of `layer_norm_backward`; here S is

    - for dx: ``rstd (|g| + |xhat| mean|g xhat|)``, plus the size of dsum and of what drstd adds;
    - for dgamma: the sum over rows of ``|dy xhat|``; for dbeta: of ``|dy|``.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import rms_norm_backward, rms_norm_forward
    >>> y, cache = rms_norm_forward(np.array([[3.0, 4.0]]))
    >>> rms_norm_backward(np.array([[1.0, 0.0]]), cache).dx.round(3)
    array([[ 0.181, -0.136]])
    """
    run = on_dask().backward if is_lazy_cache(cache) else backward
    return run(dy, cache, "rms", wrt, out, dsum, sum_axes, None, drstd, accumulate)
