"""The functions of forward mode and of second order, for both norms."""

from __future__ import annotations

from numpy.typing import ArrayLike

from stablenorm.functional.derivatives import double_backward, jvp
from stablenorm.records import Array, Cache


def layer_norm_jvp(
    tx: ArrayLike, cache: Cache, tgamma: ArrayLike | None = None, tbeta: ArrayLike | None = None
) -> Array:
    """
    Push the tangents of x, gamma and beta through `layer_norm_forward`: forward mode.

    Parameters
    ----------
    tx : array
        The tangent of x, a small change of it; of its shape, of any of the four dtypes.
    cache : Cache
        What `layer_norm_forward` returned, of arrays in host memory, with ``rounding="fast"``.
    tgamma, tbeta : array, optional
        The tangents of gamma and beta, of their shapes. Default: 0.

    Returns
    -------
    array
        ``ty``, the change of y to first order; of the shape and dtype of y.

    Raises
    ------
    TypeError
        If `cache` is no `Cache`, or a dtype is not one of the four.
    ValueError
        If a shape is wrong, a tangent is given of a gamma or beta that was not, or the cache is one
        that this function does not serve: the page "Layer and RMS normalization" has a table.

    Notes
    -----
    Each element is within ``0.501 ulp + c * S``, with the c of y. S is
    ``|gamma| T(tx) + |tgamma| (|xhat| + mean|xhat|) + |tbeta|``, where T(v) is
    ``rstd (|v| + mean|v| + (|xhat| + mean|xhat|) mean|(v - mean(v)) xhat|)``; for RMS norm both are
    without mean|v|, mean(v) and mean|xhat|. Elements that a mask leaves out get 0. It is computed by
    plain calls on float64 copies of the rows: float64 results have the second term of the narrower
    dtypes. Products that leave the range of float64 are infinite or NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import layer_norm_forward, layer_norm_jvp
    >>> y, cache = layer_norm_forward(np.array([[1.0, 2.0, 4.0]]))
    >>> layer_norm_jvp(np.array([[1.0, 0.0, 0.0]]), cache).round(3)
    array([[ 0.229, -0.344,  0.115]])
    """
    return jvp("layer", tx, cache, tgamma, tbeta)


def rms_norm_jvp(
    tx: ArrayLike, cache: Cache, tgamma: ArrayLike | None = None, tbeta: ArrayLike | None = None
) -> Array:
    """
    Push the tangents of x, gamma and beta through `rms_norm_forward`: forward mode.

    Parameters
    ----------
    tx : array
        As for `layer_norm_jvp`, and so is all the rest; the cache is that of `rms_norm_forward`.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import rms_norm_forward, rms_norm_jvp
    >>> y, cache = rms_norm_forward(np.array([[1.0, 2.0, 2.0]]))
    >>> rms_norm_jvp(np.array([[1.0, 0.0, 0.0]]), cache).round(3)
    array([[ 0.513, -0.128, -0.128]])
    """
    return jvp("rms", tx, cache, tgamma, tbeta)


def layer_norm_double_backward(
    ddx: ArrayLike, dy: ArrayLike, cache: Cache, *,
    ddgamma: ArrayLike | None = None, ddbeta: ArrayLike | None = None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """
    Pull cotangents of dx, dgamma and dbeta back through `layer_norm_backward`: second order.

    For gradient penalties and Hessian-vector products: the page "Second derivatives and forward mode".

    Parameters
    ----------
    ddx : array
        Derivative by dx of a scalar that depends on the gradients; any of the four dtypes.
    dy : array
        What `layer_norm_backward` was given.
    cache : Cache
        What `layer_norm_forward` returned, of arrays in host memory, with ``rounding="fast"``.
    ddgamma, ddbeta : array, optional
        Derivatives of the scalar by dgamma and dbeta, of their shapes. Default: 0.

    Returns
    -------
    ddy, dx : array
        Derivatives of the scalar by dy and x, of the shape and dtype of x.
    dgamma : array or None
        That by gamma, of its shape and dtype; None for a gamma that was not given.

    Raises
    ------
    TypeError, ValueError
        As `layer_norm_jvp` does.

    Notes
    -----
    Computed as by `layer_norm_jvp`. Each element is within ``0.501 ulp + c * S`` (float64: 0.75 ulp for dx, 0.51 for dgamma), with the
    c of y, and for dgamma that of `layer_norm_backward`'s. With T as in `layer_norm_jvp`, ``g =
    gamma * dy``, and g' and ddx' for g and ddx less their means, S is

    - for ddy: as for `layer_norm_jvp`;
    - for dx: ``T(ddgamma * dy) + rstd (mean|g' xhat| T(ddx) + mean|ddx' xhat| T(g) + (|xhat| +
      mean|xhat|) mean(|ddx'| T(g)))``;
    - for dgamma: the sum over rows of ``|dy| T(ddx)``.

    Examples
    --------
    The gradient of ``sum(dx**2) / 2``, whose derivative by dx is dx:

    >>> import numpy as np
    >>> from stablenorm import layer_norm_backward, layer_norm_double_backward, layer_norm_forward
    >>> y, cache = layer_norm_forward(np.array([[1.0, 2.0, 4.0]]), gamma=np.ones(3))
    >>> dy = np.array([[1.0, 0.0, 0.0]])
    >>> gradients = layer_norm_backward(dy, cache)
    >>> ddy, dx, dgamma = layer_norm_double_backward(gradients.dx, dy, cache)
    >>> dx.round(3)
    array([[ 0.105, -0.066, -0.039]])
    """
    return double_backward("layer", ddx, dy, cache, ddgamma, ddbeta)


def rms_norm_double_backward(
    ddx: ArrayLike, dy: ArrayLike, cache: Cache, *,
    ddgamma: ArrayLike | None = None, ddbeta: ArrayLike | None = None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """
    Pull cotangents of dx, dgamma and dbeta back through `rms_norm_backward`: second order.

    Parameters
    ----------
    ddx : array
        As for `layer_norm_double_backward`, and so is all the rest; the cache is that of
        `rms_norm_forward`.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import rms_norm_double_backward, rms_norm_forward
    >>> y, cache = rms_norm_forward(np.array([[1.0, 2.0, 2.0]]))
    >>> ddx, dy = np.array([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    >>> rms_norm_double_backward(ddx, dy, cache)[1].round(3)
    array([[-0.086,  0.021,  0.086]])
    """
    return double_backward("rms", ddx, dy, cache, ddgamma, ddbeta)
