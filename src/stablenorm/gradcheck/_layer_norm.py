r"""
What layer normalization adds: equations that its gradients satisfy exactly, and the right steps.

The identities need no step and hold to rounding, so they show errors far below any finite
difference. In every row, with xhat, rstd = (var + eps)^(-1/2) and g = gamma dy:

- sum(dx) = 0, since adding a constant to x changes nothing;
- sum(dx xhat) / rstd = eps rstd^2 sum(g xhat): stretching x about its mean changes y only as far
  as eps matters. It is the one that sees eps: left out of the backward, the right side is 0;

and over all rows <gamma, dgamma> + <beta, dbeta> = <dy, y>, since y is linear in (gamma, beta)
(Euler's theorem). They are necessary, not sufficient: a row of dx that is zero satisfies the
first, and the second as far as eps is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.gradcheck._check import Backward, check_gradients
from stablenorm.gradcheck._report import GradientReport, Identity
from stablenorm.gradcheck._secants import unit_roundoff


class _Rows(NamedTuple):
    """The rows that can be judged, in float64, (rows, n), with statistics of this file's own."""

    xhat: Array
    rstd: Array
    # eps / (var + eps) and mean|x| * rstd, (rows, 1).
    share: Array
    offset: Array
    gamma: Array
    dy: Array
    keep: Array


def check_layer_norm(
    forward: Callable[..., Any],
    backward: Backward,
    x: Any = None,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    *,
    rng: Any = None,
    **options: Any,
) -> GradientReport:
    """
    Check a layer normalization over the last axis: `check_gradients`, and the row identities.

    Parameters
    ----------
    forward : callable
        ``forward(x, gamma, beta, eps) -> (y, cache)``.
    backward : callable
        ``backward(dy, cache) -> (dx, dgamma, dbeta)``; None for what is not to be checked.
    x : array, optional
        Input, (..., n). Default: (4, 8), float64, random; then gamma and beta too, unless given:
        gamma of both signs and different from 1, beta different from 0. Not modified.
    gamma, beta : array, optional
        Scale and shift, (n,). With `x` given, None is passed on as None.
    eps : float, default: 1e-5
        Passed on, finite and >= 0.
    rng : int or numpy.random.Generator, optional
        For the default data and for everything random in the check.
    **options
        Further keywords of `check_gradients`: `probes`, `max_elements`, `progress`.

    Returns
    -------
    GradientReport
        With `identities`; a broken one makes the verdict FAIL.

    Raises
    ------
    TypeError, ValueError
        As `check_gradients` and `row_identities`.

    See Also
    --------
    check_gradients : For any operation; the bounds are explained there.
    row_identities : The identities alone, without a forward.

    Examples
    --------
    >>> import numpy as np
    >>> def forward(x, gamma, beta, eps):
    ...     centered = x - x.mean(-1, keepdims=True)
    ...     rstd = 1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps)
    ...     return gamma * centered * rstd + beta, (centered * rstd, rstd, gamma)
    >>> def backward(dy, cache):
    ...     xhat, rstd, gamma = cache
    ...     g = gamma * dy
    ...     dx = g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True)
    ...     return rstd * dx, (dy * xhat).sum(0), dy.sum(0)
    >>> check_layer_norm(forward, backward, rng=0).verdict
    'PASS'
    """
    rng = np.random.default_rng(rng)
    if x is None:
        x = rng.standard_normal((4, 8))
        signs = rng.permutation([1.0, -1.0] * 4)
        gamma = signs * (1 + 0.5 * rng.random(8)) if gamma is None else gamma
        beta = 0.5 + rng.random(8) if beta is None else beta
    args = [None if a is None else np.array(a) for a in (x, gamma, beta)]
    _check_eps(eps)

    def call(*arrays: Array | None) -> Any:
        """Call `forward` with its fixed eps."""
        return forward(*arrays, eps)

    report = check_gradients(
        call,
        backward,
        args,
        names=("x", "gamma", "beta"),
        scales=(_row_scale(args[0], eps), None, None),
        rng=rng,
        **options,
    )
    if any(result.message and result.verdict == "FAIL" for result in report.arguments):
        # Gradients of a wrong shape have no identities to satisfy.
        return report
    y, cache = call(*(None if a is None else a.copy() for a in args))
    dy = rng.standard_normal(np.shape(y)).astype(np.asarray(y).dtype)
    gradients = backward(dy.copy(), cache)
    dx, dgamma, dbeta = gradients
    x, gamma, beta = args
    identities = row_identities(x, gamma, beta, eps, dy, y, dx, dgamma, dbeta)
    return GradientReport(report.arguments, report.forward_calls + 1, identities)


def _check_eps(eps: float) -> None:
    if not (np.isfinite(eps) and eps >= 0):
        msg = f"eps must be finite and >= 0, got {eps}"
        raise ValueError(msg)


def _statistics(x: Array, eps: float) -> tuple[Array, Array]:
    """Return centered and 1 / rstd of float64 rows, good for any offset and any finite range."""
    exponent = np.frexp(np.max(np.abs(x), axis=-1, keepdims=True))[1]
    scaled = np.ldexp(x, -exponent)
    centered = scaled - scaled.mean(axis=-1, keepdims=True)
    # What rounding the mean has left: under an offset, more than all the rest.
    centered -= centered.mean(axis=-1, keepdims=True)
    # A second power of two, since under an offset the spread can still have squares that vanish.
    largest = np.max(np.abs(centered), axis=-1, keepdims=True)
    divisor = np.where(largest > 0, largest, 1)
    std = divisor * np.sqrt(np.mean(np.square(centered / divisor), axis=-1, keepdims=True))
    return np.ldexp(centered, exponent), np.hypot(np.ldexp(std, exponent), np.sqrt(eps))


def _row_scale(x: Array | None, eps: float) -> Array | None:
    """Return sqrt(var + eps), the distance over which a row's y changes; None if unusable."""
    if x is None or x.ndim == 0 or x.size == 0 or not np.isfinite(x.astype(np.float64)).all():
        return None
    scale = _statistics(x.astype(np.float64), eps)[1]
    return np.where(scale > 0, scale, 1)


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
    Statistics are computed here, independently, in float64, from re-centred rows, so that an
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
    _check_eps(eps)
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
    centered, s = _statistics(x, eps)
    some = s[:, 0] > 0
    keep[keep] = some
    x, dy, centered, s = x[some], dy[some], centered[some], s[some]
    weight = np.ones(x.shape[-1]) if gamma is None else gamma.astype(np.float64)
    return _Rows(
        xhat=centered / s,
        rstd=1 / s,
        share=np.square(np.sqrt(eps) / s),
        offset=np.mean(np.abs(x / s), axis=-1, keepdims=True),
        gamma=weight,
        dy=dy,
        keep=keep,
    )


def _unit(n: int, dtype: Any) -> float:
    """Return what one element may lose, relative to the magnitudes in it."""
    return (4 + np.sqrt(n) / 2) * unit_roundoff(dtype)


def _mean(a: Array) -> Array:
    return np.mean(a, axis=-1, keepdims=True)


def _dx_identities(rows: _Rows, dx: Array) -> list[Identity]:
    dx_kept = dx[rows.keep].astype(np.float64)
    g, xhat = rows.gamma * rows.dy, rows.xhat
    size, slope = _mean(np.abs(g)), _mean(np.abs(g * xhat))
    # What dx / rstd is made of: its three terms, and what a mean off by offset * u does to xhat
    # in the last of them, inside and outside of the mean.
    magnitude = np.abs(g) + size + np.abs(xhat) * slope
    magnitude = magnitude + rows.offset * (slope + np.abs(xhat) * size)
    unit = _unit(dx.shape[-1], dx.dtype)
    # Divided by rstd, all is of the size of g.
    scaled = dx_kept / rows.rstd
    expected = rows.share * np.sum(g * xhat, axis=-1, keepdims=True)
    return [
        _worst("sum(dx) = 0", np.sum(scaled, axis=-1), unit * np.sum(magnitude, axis=-1)),
        _worst(
            "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd",
            np.sum(scaled * xhat, axis=-1) - expected[:, 0],
            unit * np.sum(magnitude * np.abs(xhat), axis=-1),
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
    from_xhat = np.sum(np.abs(rows.gamma) * weights * (np.abs(rows.xhat) + rows.offset))
    from_beta = np.sum(np.abs(beta64) * weights)
    bound = _unit(count, dgamma.dtype) * from_xhat
    bound += _unit(y.shape[-1], y.dtype) * (from_xhat + from_beta)
    if dbeta is not None:
        bound += _unit(count, dbeta.dtype) * from_beta
    return _worst("<gamma, dgamma> + <beta, dbeta> = <dy, y>", residual[None], bound[None])


def _worst(name: str, residual: Array, bound: Array) -> Identity:
    """Keep the row that is worst in proportion to its bound."""
    # What is not finite sorts first; a residual of 0 needs no bound.
    z = np.where(residual == 0, 0.0, np.abs(residual) / np.where(bound > 0, bound, 1e-300))
    row = int(np.argmax(np.where(np.isnan(z), np.inf, z)))
    passed = bool(np.all(z <= 1))
    return Identity(name, float(np.abs(residual[row])), float(bound[row]), passed)
