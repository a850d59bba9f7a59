"""Equations that the gradients of layer and RMS normalization satisfy exactly."""

from typing import Any

import numpy as np

from stablenorm.check.closed_form import Case, Expected, statistics
from stablenorm.check.operation import unit_roundoff
from stablenorm.check.results import Identity
from stablenorm.types import Array, check_eps


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
    *,
    kind: str = "layer",
    gamma_offset: float = 0.0,
) -> tuple[Identity, ...]:
    r"""
    Evaluate the equations that exact layer-normalization gradients satisfy.

    In every row, with xhat, rstd = (var + eps)^(-1/2) and g = gamma dy:

    - sum(dx) = 0, since adding a constant to x changes nothing: not of RMS norm;
    - sum(dx xhat) / rstd = eps rstd^2 sum(g xhat): stretching x about its mean changes y only as
      far as eps matters. Where eps is left out of the backward, the right side is 0;

    and over all rows <gamma, dgamma> + <beta, dbeta> = <dy, y>, since y is linear in (gamma, beta).
    They are necessary, not sufficient: a row of dx that is zero satisfies the first.

    Parameters
    ----------
    x, dy, y, dx : array
        Of one shape (..., n). `y` or `dx` may be None: what needs it is left out.
    gamma, beta, dgamma, dbeta : array or None
        (n,), or the shape of the last axes of `x`, which are then normalized together.
    eps : float
        Finite and >= 0.
    kind : {"layer", "rms"}, default: "layer"
        Which norm. Of "rms", the mean is 0 and var is mean(x^2).
    gamma_offset : float, default: 0
        What the norm adds to gamma first, where gamma stands above.

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

    Notes
    -----
    The bounds are what arithmetic in the coarsest dtype of x, dy and the output may lose, a few times (4 + sqrt(n) / 2) u of
    the magnitudes that dx is made of. They include what an offset costs a variance made of E[x^2]
    and the mean; where that leaves no digits, they are infinite.

    Examples
    --------
    >>> import numpy as np
    >>> x, dy = np.array([[1.0, 2.0, 4.0]]), np.array([[1.0, 0.0, 0.0]])
    >>> wrong = dy / x.std()
    >>> row_identities(x, None, None, 0.0, dy, None, wrong, None, None)[0].passed
    False
    """
    check_eps(eps)
    like = np.shape(x)
    shape = next((np.shape(p) for p in (gamma, beta) if p is not None), like[-1:])
    if not like or like[len(like) - len(shape) :] != shape:
        msg = f"x must have at least one axis and end in the shape of gamma, {shape}, got {like}"
        raise ValueError(msg)
    given = {"dy": dy, "y": y, "dx": dx, "beta": beta, "dgamma": dgamma, "dbeta": dbeta}
    for name, array in given.items():
        required = like if name in ("dy", "y", "dx") else shape
        if array is not None and np.shape(array) != required:
            msg = f"{name} must have shape {required}, got {np.shape(array)}"
            raise ValueError(msg)
    n = int(np.prod(shape))
    if np.size(x) == 0:
        return ()
    x, dy, y, dx = (None if a is None else np.reshape(a, (-1, n)) for a in (x, dy, y, dx))
    gamma, beta, dgamma, dbeta = (
        None if a is None else np.reshape(a, -1) for a in (gamma, beta, dgamma, dbeta)
    )
    keep = np.isfinite(x).all(axis=-1) & np.isfinite(dy).all(axis=-1)
    keep[keep] = statistics(x[keep].astype(np.float64), eps, kind)[1][:, 0] > 0
    if not keep.any():
        return ()
    case = Case(x[keep], gamma, beta, eps, dy[keep], kind, gamma_offset)
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


def _dx_identities(case: Case, dx: Array) -> list[Identity]:
    expected = Expected(case, _coarsest(case, dx))
    # Divided by rstd, all is of the size of g.
    scaled = dx.astype(np.float64) * expected.s
    bound = expected.bounds_of("dx", dx.dtype).careless * expected.s
    # eps / (var + eps), where squares may overflow.
    share = np.square(np.sqrt(case.eps) / expected.s)
    projected = (scaled - share * expected.g) * expected.xhat
    name = "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd"
    second = _worst(name, projected, bound * np.abs(expected.xhat))
    first = _worst("sum(dx) = 0", scaled, bound)
    return [first, second] if case.kind == "layer" else [second]


def _euler(case: Case, y: Array, dgamma: Array, dbeta: Array | None) -> Identity:
    terms, bounds = [], []
    # Each of the three inner products, by its own magnitudes and dtype.
    products = {
        "dgamma": (case.scale, dgamma),
        "dbeta": (case.vector(case.beta, 0.0), dbeta),
        "y": (-case.rows(case.dy), y),
    }
    for name, (weights, array) in products.items():
        if array is not None:
            off = Expected(case, _coarsest(case, array)).bounds_of(name, array.dtype).careless
            terms.append((weights * array.astype(np.float64)).reshape(-1))
            bounds.append((np.abs(weights) * off).reshape(-1))
    name = "<gamma, dgamma> + <beta, dbeta> = <dy, y>"
    return _worst(name, np.concatenate(terms)[None], np.concatenate(bounds)[None])


def _coarsest(case: Case, array: Array) -> float:
    """Return the coarsest roundoff of x, dy and an output, which may have been promoted."""
    return max(unit_roundoff(a.dtype) for a in (case.x, case.dy, array))


def _worst(name: str, terms: Array, bounds: Array) -> Identity:
    """Sum each row of terms, and keep the one that is worst in proportion to its bound."""
    # 0 times infinity is 0.
    bounds = np.nan_to_num(bounds, nan=0, posinf=np.inf)
    residual, bound = np.sum(terms, axis=-1), np.sum(bounds, axis=-1)
    # What is not finite sorts first; a residual of 0 needs no bound.
    z = np.where(residual == 0, 0.0, np.abs(residual) / np.where(bound > 0, bound, 1e-300))
    row = int(np.argmax(np.where(np.isnan(z), np.inf, z)))
    return Identity(name, float(np.abs(residual[row])), float(bound[row]), bool(np.all(z <= 1)))
