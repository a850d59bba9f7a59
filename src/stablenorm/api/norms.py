"""The functions of layer normalization and of RMS normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from stablenorm.arrays import is_lazy, is_lazy_cache
from stablenorm.functional.operations import backward, forward
from stablenorm.records import NAMES, Array, Backend, Cache, Gradients, Name, Rounding, new_norm


def on_dask() -> Any:
    """Return the module for Dask arrays; a caller with such an array has loaded Dask."""
    from stablenorm import dask  # noqa: PLC0415

    return dask


def layer_norm(
    x: ArrayLike, gamma: ArrayLike | None = None, beta: ArrayLike | None = None, eps: float = 1e-5,
    *, axis: int | tuple[int, ...] | None = -1, out: Array | None = None,
    backend: Backend | None = None, gamma_offset: float = 0.0, rounding: Rounding = "fast",
    residual: ArrayLike | None = None, where: ArrayLike | None = None,
) -> Array:  # fmt: skip
    """
    Normalize `x` over `axis` to zero mean and unit variance, then scale and shift.

    Parameters
    ----------
    x : array
        Input: float16, bfloat16, float32 or float64, of any dimensions, strides and byte order. Not
        modified, unless it is `out`. With a Dask array the result is lazy: the page
        "Normalize Dask arrays".
    gamma, beta : array, optional
        Scale and shift, of the shape of the normalized axes, in the order in which `x` has them; each
        of a floating dtype of its own. Default: 1 and 0. Leading axes are as for `layer_norm_forward`.
    eps : float, default: 1e-5
        Added to the variance before the square root. Finite and >= 0.
    axis : int, tuple of int or None, default: -1
        The axes normalized together; None: all, as in NumPy.
    out : array, optional
        Where to write the result, rounded once to its dtype; of the shape of `x` and any of the four
        dtypes. It may be `x` itself.
    backend : {"native", "numpy", "cuda"}, optional
        "native", the default, is C++, with the same bits on every processor. "numpy" is the reference;
        without kernels it is the default, with a warning. Both keep the accuracy contract, for float64
        data "numpy" with the second term of float64 arithmetic. In y and dx of up to 32 bits, all but a
        few in 10^9 elements agree, unless they nearly cancel. "cuda" is for arrays on a CUDA device,
        which use no other backend: the page "On a CUDA device".
    gamma_offset : float, default: 0
        Added to `gamma` in float64: 1 if the array holds gamma - 1. Finite. "nearest" rounds the exact
        result of that sum.
    rounding : {"fast", "nearest"}, default: "fast"
        "fast" is within the bound of the Notes. With "nearest" every element is correctly rounded: the exact
        result rounded to nearest, ties to even, so that all backends, machines and versions
        return the same bits. It takes longer, and on arrays full of exact ties far longer.
    residual, where : array, optional
        As for `layer_norm_forward`.

    Returns
    -------
    array
        `y`, of the shape and dtype of `x`, in this machine's byte order; `out` if that was given.

    Raises
    ------
    TypeError
        If a dtype is not one of the four, or a `residual` has another of 16 bits than `x`.
    ValueError
        If `gamma`, `beta` or `out` has the wrong shape, `axis` is not an axis of `x` or has length
        zero, `eps` is negative or not finite, `gamma_offset` is not finite or without a gamma,
        `rounding` is neither of the two, `out` overlaps another argument, or what was given cannot be
        combined: the page "Layer and RMS normalization" has a table.
    ImportError
        If ``backend="native"`` was asked for and its kernels are not built.

    Notes
    -----
    Each element is within ``0.501 ulp + c * S`` of the exact result for the floats given. S is
    ``|gamma| (|xhat| + mean|xhat|) + |beta|``, where gamma means ``gamma + gamma_offset``, and c is
    2**-48, or 2**-98 for float64: the second term matters only to elements that cancel almost
    completely. The others are the nearest float in all but a few in 10^9 elements of ordinary
    float32 data. See the page "The accuracy contract".

    The dtype of x chooses the arithmetic. 16- and 32-bit data is computed in float64 and rounded once, float64
    data in double-double. A gamma or beta of another dtype is widened exactly. float64 rows with numbers beyond
    2**200 or below 2**-200 are computed in Python's integers, far more slowly; all rows are, if gamma or beta has such.

    Other layouts than rows without gaps are copied to such rows, whole. NaN and infinity spoil
    their own row only. With ``eps=0`` a row of zero variance is NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import layer_norm
    >>> x = np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    >>> layer_norm(x).round(3)
    array([[-1.225,  0.   ,  1.225],
           [-1.225,  0.   ,  1.225]])
    """
    norm = new_norm((gamma, beta, eps, "layer", gamma_offset, rounding))
    run = on_dask().forward if is_lazy(x) else forward
    return run(x, norm, axis, out, backend, False, residual, where)[0]


def layer_norm_forward(
    x: ArrayLike, gamma: ArrayLike | None = None, beta: ArrayLike | None = None, eps: float = 1e-5,
    *, axis: int | tuple[int, ...] | None = -1, out: Array | None = None,
    backend: Backend | None = None, gamma_offset: float = 0.0, rounding: Rounding = "fast",
    residual: ArrayLike | None = None, where: ArrayLike | None = None,
) -> tuple[Array, Cache]:  # fmt: skip
    """
    Normalize `x` as `layer_norm` does, and keep what the backward needs.

    Parameters
    ----------
    x : array
        As for `layer_norm`. The backward uses the same `eps`, `axis`, `backend`, `gamma_offset` and
        `rounding`, which are as there. The cache refers to `x`, or to a copy if it was in the other byte order.
    gamma, beta : array, optional
        As for `layer_norm`. They may have leading axes, which broadcast against the axes of `x`
        that are not normalized: (B, 1, D), for an `x` of shape (B, T, D), is one for each sample.
        Their gradients have their shapes. A part of `x` with its own gamma and beta is a call of its
        own, with the same bits.
    out : array, optional
        As for `layer_norm`, but it may be `x` itself only with a `residual`: the cache keeps the sum then.
    residual : array of the shape of x, optional
        Added to `x` first. The sum is rounded once to the wider dtype of both and normalized; y has the
        dtype of `x`. The sum is ``cache.x``, for the next residual.
    where : array of bool, optional
        Broadcast to the shape of `x`. Elements where it is False do not count, whatever they are,
        NaN included: they are in no statistic and no sum, and y and dx are 0 there. A row without
        any True has mean and rstd 0. A mask of whole rows gives the bits of a call on these rows, which are
        copied. If it varies inside rows, those of equal masks
        are a call of the elements that count.

    Returns
    -------
    y : array
        As `layer_norm` returns it.
    cache : Cache
        For `layer_norm_backward`, lazy if `x` is: `x` and `gamma` by reference, and per row the mean and the
        reciprocal standard deviation, 24 bytes (40 with float64 data; 8 more with
        ``rounding="nearest"``).

    Raises
    ------
    TypeError, ValueError, ImportError
        As `layer_norm` does.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import layer_norm_backward, layer_norm_forward
    >>> x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    >>> y, cache = layer_norm_forward(x)
    >>> layer_norm_backward(np.ones_like(y), cache).dx.any()
    np.False_
    """
    norm = new_norm((gamma, beta, eps, "layer", gamma_offset, rounding))
    run = on_dask().forward if is_lazy(x) else forward
    return run(x, norm, axis, out, backend, True, residual, where)


def layer_norm_backward(
    dy: ArrayLike, cache: Cache, *, wrt: Sequence[Name] = NAMES,
    out: Sequence[Array | None] | None = None, dsum: ArrayLike | None = None,
    sum_axes: int | tuple[int, ...] | None = None, accumulate: bool = False,
) -> Gradients:  # fmt: skip
    """
    Pull the cotangent `dy` back through `layer_norm_forward`.

    Parameters
    ----------
    dy : array
        Derivative of a scalar by `y`; of its shape, of the dtype of `cache.x` or a narrower one, any
        strides. Not modified, unless it is ``out.dx``. A Dask array if `x` was one.
    cache : Cache
        What `layer_norm_forward` returned. It can be used any number of times.
    wrt : sequence of {"x", "gamma", "beta"}, default: all three
        The gradients to compute.
    out : Gradients or tuple of three, optional
        Arrays to write dx, dgamma and dbeta into, each rounded once to its dtype; None for those to be
        allocated. They may not overlap one another or an input, but dx may be exactly `dy`.
    dsum : array of the shape of x, optional
        Added to dx before that is rounded: the gradient of ``s = x + residual`` from its other use, as
        the next residual; of the dtype of `cache.x` or a narrower one. dx is the gradient of `x` and of the
        residual alike, in the dtype of their sum.
    sum_axes : int or tuple of int, optional
        The axes of `x` that dgamma and dbeta are summed over, none of them normalized. The others
        remain, before the normalized axes: for an `x` of shape (B, T, D), ``sum_axes=1`` gives (B,
        D), the gradients of each sample. Default: all axes along which gamma or beta does not vary.
    accumulate : bool, default: False
        Add to the dgamma and dbeta that are in `out`, as micro-batches need: each becomes the old value
        plus the sum in float64, rounded to its dtype. dx is not added to. Not with "nearest".

    Returns
    -------
    Gradients
        dx, dgamma and dbeta, of the shapes (but for `sum_axes`) and dtypes of cache.x, gamma and beta.
        None for what was not asked for, and for a gamma or beta that was not given. The order of the
        sums depends on the shape and the dtypes alone.

    Raises
    ------
    TypeError
        If `cache` is no `Cache`, a dtype is not one of the four, or that of `dy` or `dsum` is wider than
        that of ``cache.x``.
    ValueError
        If `dy` or an `out` has the wrong shape, overlaps what it must not, or is read-only, `wrt`
        or `sum_axes` names something else, there is no `out` to accumulate in, or the cache is one
        of `rms_norm_forward`.

    Notes
    -----
    The errors are within ``0.501 ulp + c * S`` (float64: 0.75 ulp for dx, 0.51 for dgamma and
    dbeta), as `layer_norm` says of y. With ``g = gamma * dy``, S is

    - for dx: ``rstd (|g| + mean|g| + (|xhat| + mean|xhat|) mean|(g - mean(g)) xhat|)``, c as for y;
      plus the size of dsum;
    - for dgamma: the sum over rows of ``|dy| (|xhat| + mean|xhat|)``, c = 2**-44 or, for x of float64,
      2**-94; a float64 dgamma or dbeta of narrower x is promised within ``c * S`` alone;
    - for dbeta: the sum over rows of ``|dy|``, the same c;
    - for both, with ``accumulate=True``, plus the size of the old value. There, and with a mask inside
      rows, c is 2**-44 for float64 as well.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import layer_norm_backward, layer_norm_forward
    >>> y, cache = layer_norm_forward(np.array([[1.0, 2.0, 4.0]]), gamma=np.ones(3))
    >>> gradients = layer_norm_backward(np.array([[1.0, 0.0, 0.0]]), cache)
    >>> gradients.dx.round(3)
    array([[ 0.229, -0.344,  0.115]])
    >>> gradients.dbeta is None
    True
    """
    run = on_dask().backward if is_lazy_cache(cache) else backward
    return run(dy, cache, "layer", wrt, out, dsum, sum_axes, accumulate)


def rms_norm(
    x: ArrayLike, gamma: ArrayLike | None = None, beta: ArrayLike | None = None, eps: float = 1e-5,
    *, axis: int | tuple[int, ...] | None = -1, out: Array | None = None,
    backend: Backend | None = None, gamma_offset: float = 0.0, rounding: Rounding = "fast",
    residual: ArrayLike | None = None, where: ArrayLike | None = None,
) -> Array:  # fmt: skip
    """
    Divide `x` by its root mean square over `axis`, then scale and shift.

    Parameters
    ----------
    x : array
        All parameters and errors are as for `layer_norm`; CUDA arrays are refused.
    eps : float, default: 1e-5
        Added to the mean square before the square root. Finite and >= 0.

    Returns
    -------
    array
        ``y = gamma * x / sqrt(mean(x**2) + eps) + beta``, as `layer_norm` returns it.

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
    norm = new_norm((gamma, beta, eps, "rms", gamma_offset, rounding))
    run = on_dask().forward if is_lazy(x) else forward
    return run(x, norm, axis, out, backend, False, residual, where)[0]


def rms_norm_forward(
    x: ArrayLike, gamma: ArrayLike | None = None, beta: ArrayLike | None = None, eps: float = 1e-5,
    *, axis: int | tuple[int, ...] | None = -1, out: Array | None = None,
    backend: Backend | None = None, gamma_offset: float = 0.0, rounding: Rounding = "fast",
    residual: ArrayLike | None = None, where: ArrayLike | None = None,
) -> tuple[Array, Cache]:  # fmt: skip
    """
    Normalize `x` as `rms_norm` does, and keep what the backward needs.

    Parameters
    ----------
    x : array
        All parameters, results and errors are as for `layer_norm_forward`. The cache is for
        `rms_norm_backward`, and holds one number per row, the reciprocal root mean square: 8 bytes (16
        with float64 data; 8 more with ``rounding="nearest"``).

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import rms_norm_forward
    >>> y, cache = rms_norm_forward(np.array([[3.0, 4.0]]), gamma=np.zeros(2), gamma_offset=1.0)
    >>> cache.rstd.round(3)
    array([[0.283]])
    """
    norm = new_norm((gamma, beta, eps, "rms", gamma_offset, rounding))
    run = on_dask().forward if is_lazy(x) else forward
    return run(x, norm, axis, out, backend, True, residual, where)


def rms_norm_backward(
    dy: ArrayLike, cache: Cache, *, wrt: Sequence[Name] = NAMES,
    out: Sequence[Array | None] | None = None, dsum: ArrayLike | None = None,
    sum_axes: int | tuple[int, ...] | None = None, accumulate: bool = False,
) -> Gradients:  # fmt: skip
    """
    Pull the cotangent `dy` back through `rms_norm_forward`.

    Parameters
    ----------
    dy : array
        All parameters and errors are as for `layer_norm_backward`; the cache is that of
        `rms_norm_forward`.

    Notes
    -----
    The errors are those of `layer_norm_backward`; here S is

    - for dx: ``rstd (|g| + |xhat| mean|g xhat|)``, plus the size of dsum;
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
    return run(dy, cache, "rms", wrt, out, dsum, sum_axes, accumulate)


# By the kind of the norm: forward and backward.
FUNCTIONS = {
    "layer": (layer_norm_forward, layer_norm_backward),
    "rms": (rms_norm_forward, rms_norm_backward),
}
