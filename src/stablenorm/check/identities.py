r"""
Equations that the gradients of layer normalization satisfy exactly.

They need no step and hold to rounding, so they show errors far below any finite difference. In
every row, with xhat, rstd = (var + eps)^(-1/2) and g = gamma dy:

- sum(dx) = 0, since adding a constant to x changes nothing;
- sum(dx xhat) / rstd = eps rstd^2 sum(g xhat): stretching x about its mean changes y only as far
  as eps matters. It is the one that sees eps: left out of the backward, the right side is 0;

and over all rows <gamma, dgamma> + <beta, dbeta> = <dy, y>, since y is linear in (gamma, beta)
(Euler's theorem). They are necessary, not sufficient: a row of dx that is zero satisfies the
first, and the second as far as eps is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.closed_form import Statistics, row_mean, statistics, unit
from stablenorm.check.operation import unit_roundoff
from stablenorm.check.report import Identity
from stablenorm.types import Array


class _Rows(NamedTuple):
    """The rows that can be judged, in float64, (rows, n), with statistics of this checker's own."""

    stats: Statistics
    gamma: Array
    dy: Array
    keep: Array


def row_identities(
    x: Any,
    gamma: Any,
    beta: Any,
    eps: float,
    dy: Any,
    y: Any,
    dx: Any,
    dgamma: Any,
    dbeta: Any,
) -> tuple[Identity, ...]:
    r"""
    Evaluate the equations that exact layer-normalization gradients satisfy.

    Parameters
    ----------
    x, dy, y, dx : array
        Of one shape (..., n). `y` or `dx` may be None: what needs it is left out.
    gamma, beta, dgamma, dbeta : array or None
        (n,), or the shape of the last axes of `x`, which are then normalized together.
    eps : float
        Finite and >= 0.

    Returns
    -------
    tuple of Identity
        "sum(dx) = 0", "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd" and "<gamma, dgamma> +
        <beta, dbeta> = <dy, y>", without those that lack an input. Rows with NaN or infinity in
        x or dy, or of zero variance with eps = 0, are skipped; if no row is left, there are no
        identities.

    Raises
    ------
    ValueError
        If shapes do not match, or `eps` is negative or not finite.

    See Also
    --------
    check_layer_norm : These, and finite differences.

    Notes
    -----
    Statistics are computed here, independently, in float64, from re-centered rows, so that an
    offset does not spoil the check. The bounds are (4 + sqrt(n) / 2) u times the sum of the
    magnitudes that dx is made of, u being that of the dtype of `dx`: a few operations on each
    term, and the random-walk error of a plain sum (N. J. Higham and T. Mary, SIAM J. Sci.
    Comput. 41 (2019) A2815). Magnitudes include mean\|x\| rstd, the loss that comes with rounding
    the mean of an offset row to the dtype of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.array([[1.0, 2.0, 4.0]]), np.array([[1.0, 0.0, 0.0]])
    >>> wrong = dy / x.std()
    >>> row_identities(x, None, None, 0.0, dy, None, wrong, None, None)[0].passed
    False
    """
    check_eps(eps)
    shape = _row_shape(x, gamma, beta)
    x, dy, y, dx = (_matrix(name, a, x, shape) for name, a in _named(x=x, dy=dy, y=y, dx=dx))
    gamma, beta, dgamma, dbeta = (
        _vector(name, a, shape)
        for name, a in _named(gamma=gamma, beta=beta, dgamma=dgamma, dbeta=dbeta)
    )
    if x.size == 0:
        return ()
    rows = _judgeable(x, gamma, dy, eps)
    found: list[Identity] = []
    # Not finite where it should be is an error of NaN, which passes no comparison.
    with np.errstate(invalid="ignore", over="ignore"):
        if rows.keep.any() and dx is not None:
            found += _dx_identities(rows, dx)
        known = dgamma is not None and (beta is None or dbeta is not None) and y is not None
        # Over all rows: one that cannot be judged spoils it.
        if known and rows.keep.all():
            found.append(_euler(rows, beta, y, dgamma, dbeta))
    return tuple(found)


def check_eps(eps: float) -> None:
    """Raise ValueError unless eps can be added to a variance."""
    if not (np.isfinite(eps) and eps >= 0):
        msg = f"eps must be finite and >= 0, got {eps}"
        raise ValueError(msg)


def _named(**arrays: Any) -> Any:
    return arrays.items()


def _row_shape(x: Any, gamma: Any, beta: Any) -> tuple[int, ...]:
    for parameter in (gamma, beta):
        if parameter is not None:
            return np.shape(parameter)
    if np.ndim(x) == 0:
        msg = "x must have at least one axis, got a scalar"
        raise ValueError(msg)
    return np.shape(x)[-1:]


def _matrix(name: str, array: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """See `array` as (rows, n)."""
    if array is None:
        return None
    array = np.asarray(array)
    if array.shape != np.shape(x) or array.shape[array.ndim - len(shape) :] != shape:
        msg = f"{name} must have the shape of x, ending in {shape}, got {array.shape}"
        raise ValueError(msg)
    return array.reshape(-1, int(np.prod(shape)))


def _vector(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    if array is None:
        return None
    array = np.asarray(array)
    if array.shape != shape:
        msg = f"{name} must have shape {shape}, got {array.shape}"
        raise ValueError(msg)
    return array.reshape(-1)


def _judgeable(x: Array, gamma: Array | None, dy: Array, eps: float) -> _Rows:
    keep: Array = np.asarray(np.isfinite(x).all(axis=-1) & np.isfinite(dy).all(axis=-1))
    x, dy = x[keep].astype(np.float64), dy[keep].astype(np.float64)
    stats = statistics(x, eps)
    some = stats.s[:, 0] > 0
    keep[keep] = some
    weight = np.ones(x.shape[-1]) if gamma is None else gamma.astype(np.float64)
    return _Rows(Statistics(*(part[some] for part in stats)), weight, dy[some], keep)


def _dx_identities(rows: _Rows, dx: Array) -> list[Identity]:
    dx_kept = dx[rows.keep].astype(np.float64)
    g, (xhat, s, _, share, offset) = rows.gamma * rows.dy, rows.stats
    size, slope = row_mean(np.abs(g)), row_mean(np.abs(g * xhat))
    # What dx / rstd is made of: its three terms, and what a mean off by offset * u does to xhat
    # in the last of them, inside and outside of the mean.
    magnitude = np.abs(g) + size + np.abs(xhat) * slope
    magnitude = magnitude + _times(offset, slope + np.abs(xhat) * size)
    # The smallest number of the dtype: dx is a multiple of it, however small the exact one is.
    kind = dx.dtype.type
    spacing = float(np.nextafter(kind(0), kind(1))) * s
    bound = unit(dx.shape[-1], unit_roundoff(dx.dtype)) * magnitude + spacing
    # Divided by rstd, all is of the size of g.
    scaled = dx_kept * s
    expected = share * np.sum(g * xhat, axis=-1, keepdims=True)
    return [
        _worst("sum(dx) = 0", np.sum(scaled, axis=-1), np.sum(bound, axis=-1)),
        _worst(
            "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd",
            np.sum(scaled * xhat, axis=-1) - expected[:, 0],
            np.sum(bound * np.abs(xhat), axis=-1),
        ),
    ]


def _euler(
    rows: _Rows, beta: Array | None, y: Array, dgamma: Array, dbeta: Array | None
) -> Identity:
    y64, count = y.astype(np.float64), len(y)
    beta64 = np.zeros(1) if beta is None else beta.astype(np.float64)
    left = np.sum(rows.gamma * dgamma.astype(np.float64))
    if dbeta is not None and beta is not None:
        left += np.sum(beta64 * dbeta.astype(np.float64))
    residual = left - np.sum(rows.dy * y64)
    # Each of the three inner products, by its own magnitudes and dtype.
    weights = np.abs(rows.dy)
    spread = np.abs(rows.stats.xhat) + rows.stats.offset
    from_xhat = np.sum(_times(np.abs(rows.gamma) * weights, spread))
    from_beta = np.sum(np.abs(beta64) * weights)
    bound = unit(count, unit_roundoff(dgamma.dtype)) * from_xhat
    bound += unit(y.shape[-1], unit_roundoff(y.dtype)) * (from_xhat + from_beta)
    if dbeta is not None:
        bound += unit(count, unit_roundoff(dbeta.dtype)) * from_beta
    return _worst("<gamma, dgamma> + <beta, dbeta> = <dy, y>", residual[None], bound[None])


def _times(a: Array, b: Array) -> Array:
    """Multiply; 0 times infinity is 0: the offset of a constant row near the largest number."""
    return np.where((a == 0) | (b == 0), 0.0, a * b)


def _worst(name: str, residual: Array, bound: Array) -> Identity:
    """Keep the row that is worst in proportion to its bound."""
    # What is not finite sorts first; a residual of 0 needs no bound.
    z = np.where(residual == 0, 0.0, np.abs(residual) / np.where(bound > 0, bound, 1e-300))
    row = int(np.argmax(np.where(np.isnan(z), np.inf, z)))
    passed = bool(np.all(z <= 1))
    return Identity(name, float(np.abs(residual[row])), float(bound[row]), passed)
