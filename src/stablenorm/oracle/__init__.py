"""
The exact answers of layer norm, RMS norm and their derivatives, to judge implementations by.

Every float is an integer times a power of two, so mean, variance and all sums of a row are exact
integers over known denominators; the only irrational number is ``rstd``, enclosed by one integer
square root a row. Comparisons that this enclosure cannot decide are decided exactly, so correct
rounding is never estimated. The oracle shares no code with the implementations it judges; NumPy
only reads and writes the floats, and holds Python's integers.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from stablenorm.oracle.exact import ContractResult, ExactNorm, as_float64
from stablenorm.oracle.rounding import Array, format_of, nearest, read, require
from stablenorm.oracle.rows import DOUBLE_BACKWARD, NORM, Quantity
from stablenorm.oracle.surds import RATIONAL, enclose

__all__ = [
    "ContractResult", "ExactNorm", "exact_double_backward", "exact_layer_norm", "exact_rms_norm",
]  # fmt: skip

ArrayOrNone = Array | None


def exact_layer_norm(
    x: Array, gamma: ArrayOrNone = None, beta: ArrayOrNone = None, eps: float = 1e-5, dy: ArrayOrNone = None, *,
    gamma_offset: float = 0.0, residual: ArrayOrNone = None, where: ArrayOrNone = None,
    dsum: ArrayOrNone = None,
    accumulate: tuple[ArrayOrNone, ArrayOrNone] = (None, None),
    tx: ArrayOrNone = None, tgamma: ArrayOrNone = None, tbeta: ArrayOrNone = None,
) -> ExactNorm:  # fmt: skip
    """
    Return the exact layer norm of `x` over its last axis, to measure implementations against.

    Every array but `where` is float16, bfloat16, float32 or float64, and finite where it is used.

    Parameters
    ----------
    x : array of shape (..., n)
        The rows to normalize; n at least 1.
    gamma, beta : array of shape (n,), optional
        Scale and shift. Default: 1 and 0.
    eps : float, default: 1e-5
        Added to the variance before the square root: this float64, whatever the dtype of `x`.
    dy : array of the shape of x, optional
        The cotangent of y. Needed for dx, dgamma and dbeta.
    gamma_offset : float, default: 0.0
        The scale is ``gamma + gamma_offset``, rounded once to float64.
    residual : array of the shape of x, optional
        Added to `x`, and the sum rounded once to the wider dtype of both, before it is normalized.
    where : array of bool, optional
        Broadcast to the shape of `x`. Elements where it is False are in no statistic and in no sum
        over rows, and are not read; y, ty and dx without dsum are 0 there.
    dsum : array of the shape of x, optional
        Added to dx: the gradient of what is normalized from its other use, as the next residual.
    accumulate : pair of array of shape (n,) or None, optional
        Arrays that dgamma and dbeta are added to, before the sums are rounded.
    tx : array of the shape of x, optional
        The tangent of `x` (with a residual, of the sum). Needed for ty.
    tgamma, tbeta : array of shape (n,), optional
        The tangents of gamma and beta. Default: 0.

    Returns
    -------
    ExactNorm
        The exact y, dx, dgamma, dbeta and ty. Its methods round them correctly, measure errors in
        ulp and check the contract; they compute only what they are asked for.

    Raises
    ------
    TypeError, ValueError
        If a dtype is not one of the four; if a shape is wrong, a value is not finite, or eps is
        negative or not finite.

    Notes
    -----
    A row of n = 768 costs milliseconds; a float64 row over the whole range of exponents costs a
    multiple of that. Slice `x` and `dy` first when a sample of rows is enough.

    Examples
    --------
    >>> exact = exact_layer_norm(np.array([[0.0, 1.0, 5.0]]), eps=0.0)
    >>> exact.mean(0), exact.var(0)
    (Fraction(2, 1), Fraction(14, 3))
    >>> exact.rounded("y", np.float16).dtype
    dtype('float16')
    """
    dgamma, dbeta = accumulate
    return _exact(
        "layer", NORM, x, eps, gamma_offset, where, gamma=gamma, beta=beta, dy=dy, residual=residual,
        dsum=dsum, dgamma=dgamma, dbeta=dbeta, tx=tx, tgamma=tgamma, tbeta=tbeta,
    )  # fmt: skip


def exact_rms_norm(
    x: Array, gamma: ArrayOrNone = None, beta: ArrayOrNone = None, eps: float = 1e-5, dy: ArrayOrNone = None,
    **options: Any,
) -> ExactNorm:  # fmt: skip
    """
    Return the exact RMS norm of `x` over its last axis: ``xhat = x / sqrt(mean(x**2) + eps)``.

    The parameters and the result are those of `exact_layer_norm`, and `options` its keywords.

    Examples
    --------
    >>> exact = exact_rms_norm(np.array([[1.0, 7.0]]), eps=0.0)
    >>> exact.mean(0), exact.var(0)
    (Fraction(0, 1), Fraction(25, 1))
    >>> exact.rounded("y", np.float64)
    array([[0.2, 1.4]])
    """
    exact = exact_layer_norm(x, gamma, beta, eps, dy, **options)
    # Safe: `exact` has computed nothing yet.
    exact._kind = "rms"
    return exact


def exact_double_backward(
    ddx: Array, dy: Array, x: Array, gamma: ArrayOrNone = None, eps: float = 1e-5, *,
    ddgamma: ArrayOrNone = None, ddbeta: ArrayOrNone = None, gamma_offset: float = 0.0, kind: str = "layer",
) -> ExactNorm:  # fmt: skip
    """
    Return the exact pullback of the backward: of its dx, dgamma, dbeta to its dy, x and gamma.

    Parameters
    ----------
    ddx : array of the shape of x
        The cotangent of the backward's dx.
    dy, x, gamma, eps, gamma_offset : array or float
        Arguments of the backward, as in `exact_layer_norm`.
    ddgamma, ddbeta : array of shape (n,), optional
        The cotangents of the backward's dgamma and dbeta. Default: 0.
    kind : {"layer", "rms"}, default: "layer"
        Which norm.

    Returns
    -------
    ExactNorm
        The exact ddy, dx, dgamma: the gradients of ``sum(ddx * backward's dx) + sum(ddgamma *
        backward's dgamma) + sum(ddbeta * backward's dbeta)`` with respect to dy, x, gamma.

    Examples
    --------
    >>> x, dy, ddx = np.array([[1.0, 7.0]]), np.array([[25.0, 0.0]]), np.array([[0.0, 25.0]])
    >>> exact = exact_double_backward(ddx, dy, x, eps=0.0, kind="rms")
    >>> exact.rounded("dgamma", np.float64)
    array([-17.5,   0. ])
    """
    require(kind in {"layer", "rms"}, f"kind must be 'layer' or 'rms', got {kind!r}")
    return _exact(
        kind, DOUBLE_BACKWARD, x, eps, gamma_offset, None, gamma=gamma, dy=dy, ddx=ddx,
        ddgamma=ddgamma, ddbeta=ddbeta,
    )  # fmt: skip


def _exact(
    kind: str, quantities: dict[str, Quantity], x: Array, eps: float, gamma_offset: float,
    where: ArrayOrNone, **arguments: ArrayOrNone,
) -> ExactNorm:  # fmt: skip
    """Check the arguments, named as in a `Row`, and make them an `ExactNorm`."""
    x = np.asarray(x)
    has_rows = x.ndim > 0 and x.shape[-1] > 0
    require(has_rows, f"x must have shape (..., n) with n >= 1, got {x.shape}")
    require(0 <= eps < math.inf, f"eps must be finite and >= 0, got {eps}")
    require(math.isfinite(gamma_offset), f"gamma_offset must be finite, got {gamma_offset}")
    n, mask = x.shape[-1], np.asarray(True if where is None else where)
    require(mask.dtype == bool, f"where must be bool, got {mask.dtype.name}", TypeError)
    try:
        mask = np.broadcast_to(mask, x.shape)
    except ValueError:
        msg = f"where must broadcast against x of shape {x.shape}, got {mask.shape}"
        raise ValueError(msg) from None
    vectors, matrices = {}, {"where": mask.astype(np.float64)}
    for name, array in ({"x": x} | arguments).items():
        if array is None:
            continue
        if name.endswith(("gamma", "beta")):
            vectors[name] = read(_finite(name, as_float64(name, np.asarray(array), (n,))))
            continue
        values = as_float64(name, np.asarray(array), x.shape)
        # dsum does not pass through the norm: no mask applies to it.
        matrices[name] = _finite(name, values if name == "dsum" else np.where(mask, values, 0.0))
    if "residual" in matrices:
        # Sums of floats are integers in units of a power of two: `nearest` decides every rounding.
        summands = (matrices.pop(name).reshape(-1) for name in ("x", "residual"))
        sums = enclose([(read(v), RATIONAL) for v in summands], x.size)
        residual: Any = arguments["residual"]
        dtype = max(x.dtype, np.asarray(residual).dtype, key=lambda dtype: dtype.itemsize)
        rounded = np.array([nearest(v, format_of(dtype, "x")) for v in sums], float)
        x = x.astype(dtype)
        matrices["x"] = _finite("x + residual", rounded.reshape(x.shape))
    gamma = arguments["gamma"]
    scale = np.ones(n) if gamma is None else np.asarray(gamma).astype(np.float64)
    vectors["scale"] = read(scale + gamma_offset)
    rows = {name: array.reshape(-1, array.shape[-1]) for name, array in matrices.items()}
    x = matrices["x"].astype(x.dtype)
    return ExactNorm(x, Fraction(float(eps)), kind, quantities, vectors, rows)


def _finite(name: str, values: Array) -> Array:
    if not np.isfinite(values).all():
        msg = f"{name} must be finite for an exact result, got {values[~np.isfinite(values)][0]}"
        raise ValueError(msg)
    return values
