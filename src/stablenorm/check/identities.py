r"""
Equations that the gradients of layer normalization satisfy exactly.

In every row, with xhat, rstd = (var + eps)^(-1/2) and g = gamma dy:

- sum(dx) = 0, since adding a constant to x changes nothing;
- sum(dx xhat) / rstd = eps rstd^2 sum(g xhat): stretching x about its mean changes y only as far
  as eps matters. Where eps is left out of the backward, the right side is 0;

and over all rows <gamma, dgamma> + <beta, dbeta> = <dy, y>, since y is linear in (gamma, beta)
(Euler's theorem). They are necessary, not sufficient: a row of dx that is zero satisfies the
first, and the second as far as eps is small.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm.check.closed_form import Case, Expected, statistics
from stablenorm.check.operation import unit_roundoff
from stablenorm.check.report import Identity
from stablenorm.types import Array


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
    offset does not spoil the check. The bounds are what arithmetic in the dtype of `dx` may lose,
    a few times (4 + sqrt(n) / 2) u of the magnitudes that dx is made of: some operations on each
    term, and the random-walk error of a plain sum (N. J. Higham and T. Mary, SIAM J. Sci. Comput.
    41 (2019) A2815). They include what an offset costs a variance made of E[x^2] and the mean;
    where that leaves no digits, they are infinite.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.array([[1.0, 2.0, 4.0]]), np.array([[1.0, 0.0, 0.0]])
    >>> wrong = dy / x.std()
    >>> row_identities(x, None, None, 0.0, dy, None, wrong, None, None)[0].passed
    False
    """
    check_eps(eps)
    if np.ndim(x) == 0:
        msg = "x must have at least one axis, got a scalar"
        raise ValueError(msg)
    shape = next((np.shape(p) for p in (gamma, beta) if p is not None), np.shape(x)[-1:])
    rows = {"x": x, "dy": dy, "y": y, "dx": dx}
    x, dy, y, dx = (_matrix(name, a, np.shape(x), shape) for name, a in rows.items())
    parameters = {"gamma": gamma, "beta": beta, "dgamma": dgamma, "dbeta": dbeta}
    gamma, beta, dgamma, dbeta = (_vector(name, a, shape) for name, a in parameters.items())
    if x.size == 0:
        return ()
    keep = np.isfinite(x).all(axis=-1) & np.isfinite(dy).all(axis=-1)
    keep[keep] = statistics(x[keep].astype(np.float64), eps).s[:, 0] > 0
    if not keep.any():
        return ()
    case = Case(x[keep], gamma, beta, eps, dy[keep])
    found: list[Identity] = []
    # Not finite where it should be is an error of NaN, which passes no comparison.
    with np.errstate(invalid="ignore", over="ignore"):
        if dx is not None:
            found += _dx_identities(case, dx[keep])
        known = dgamma is not None and (beta is None or dbeta is not None) and y is not None
        # Over all rows: one that cannot be judged spoils it.
        if known and keep.all():
            found.append(_euler(case, y, dgamma, None if beta is None else dbeta))
    return tuple(found)


def check_eps(eps: float) -> None:
    """Raise ValueError unless eps can be added to a variance."""
    if not (np.isfinite(eps) and eps >= 0):
        msg = f"eps must be finite and >= 0, got {eps}"
        raise ValueError(msg)


def _matrix(name: str, array: Any, like: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """See `array` as (rows, n)."""
    if array is None:
        return None
    array = np.asarray(array)
    if array.shape != like or array.shape[array.ndim - len(shape) :] != shape:
        msg = f"{name} must have the shape of x, ending in {shape}, got {array.shape}"
        raise ValueError(msg)
    return array.reshape(-1, int(np.prod(shape)))


def _vector(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    if array is not None and np.shape(array) != shape:
        msg = f"{name} must have shape {shape}, got {np.shape(array)}"
        raise ValueError(msg)
    return None if array is None else np.reshape(array, -1)


def _dx_identities(case: Case, dx: Array) -> list[Identity]:
    expected = Expected(case, unit_roundoff(dx.dtype))
    stats = expected.stats
    # Divided by rstd, all is of the size of g.
    scaled = dx.astype(np.float64) * stats.s
    bound = expected.bounds_of("dx", dx.dtype).careless * stats.s
    right = stats.share * np.sum(expected.g * stats.xhat, axis=-1, keepdims=True)
    return [
        _worst("sum(dx) = 0", np.sum(scaled, axis=-1), np.sum(bound, axis=-1)),
        _worst(
            "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd",
            np.sum(scaled * stats.xhat, axis=-1) - right[:, 0],
            np.sum(_times(bound, np.abs(stats.xhat)), axis=-1),
        ),
    ]


def _euler(case: Case, y: Array, dgamma: Array, dbeta: Array | None) -> Identity:
    gamma, beta = case.vector(case.gamma, 1.0), case.vector(case.beta, 0.0)
    residual = bound = np.zeros(())
    # Each of the three inner products, by its own magnitudes and dtype.
    products = {"dgamma": (gamma, dgamma), "dbeta": (beta, dbeta), "y": (-case.rows(case.dy), y)}
    for name, (weights, array) in products.items():
        if array is not None:
            off = Expected(case, unit_roundoff(array.dtype)).bounds_of(name, array.dtype).careless
            residual = residual + np.sum(weights * array.astype(np.float64))
            bound = bound + np.sum(_times(np.abs(weights), off))
    return _worst("<gamma, dgamma> + <beta, dbeta> = <dy, y>", residual[None], bound[None])


def _times(a: Array, b: Array) -> Array:
    """Multiply; 0 times infinity is 0."""
    return np.where((a == 0) | (b == 0), 0.0, a * b)


def _worst(name: str, residual: Array, bound: Array) -> Identity:
    """Keep the row that is worst in proportion to its bound."""
    # What is not finite sorts first; a residual of 0 needs no bound.
    z = np.where(residual == 0, 0.0, np.abs(residual) / np.where(bound > 0, bound, 1e-300))
    row = int(np.argmax(np.where(np.isnan(z), np.inf, z)))
    passed = bool(np.all(z <= 1))
    return Identity(name, float(np.abs(residual[row])), float(bound[row]), passed)
