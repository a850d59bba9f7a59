"""Equations that the gradients of layer and RMS normalization satisfy exactly."""

import numpy as np

from stablenorm.check.closed_form import Judged
from stablenorm.check.results import Identity
from stablenorm.types import Array


def row_identities(judged: dict[str, Judged]) -> tuple[Identity, ...]:
    """
    Evaluate the equations that exact gradients satisfy, with xhat, rstd and g = gamma dy.

    In every row sum(dx) = 0, since adding a constant to x changes nothing (not of RMS norm), and
    sum(dx xhat) / rstd = eps rstd^2 sum(g xhat), since stretching x about its mean changes y only
    as far as eps matters. Over all rows <gamma, dgamma> + <beta, dbeta> = <dy, y>, since y is linear
    in (gamma, beta). They are necessary, not sufficient: a row of dx that is zero satisfies the first.
    The bounds are those of careless code. Rows of zero variance with eps = 0 are skipped.
    """
    found, of = [], judged["y"].expected
    case, keep = of.case, of.s[:, 0] > 0
    # An element that should be finite and is not makes an error of NaN, which passes no comparison.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if "dx" in judged and keep.any():
            # dx / rstd has the size of g; the share of eps is eps / (var + eps).
            scaled, bound = judged["dx"].actual * of.s, judged["dx"].bounds.careless * of.s
            if case.kind == "layer":
                found.append(_worst("sum(dx) = 0", scaled[keep], bound[keep]))
            name = "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd"
            projected = (scaled - np.square(np.sqrt(case.eps) / of.s) * of.g) * of.xhat
            found.append(_worst(name, projected[keep], (bound * np.abs(of.xhat))[keep]))
        if "dgamma" in judged and (case.beta is None or "dbeta" in judged) and keep.all():
            weights = {"dgamma": of.gamma, "dbeta": of.beta, "y": -of.dy}
            sides = [(w, judged[name]) for name, w in weights.items() if name in judged]
            terms = [(w * each.actual).reshape(1, -1) for w, each in sides]
            bounds = [(np.abs(w) * each.bounds.careless).reshape(1, -1) for w, each in sides]
            name = "<gamma, dgamma> + <beta, dbeta> = <dy, y>"
            found.append(_worst(name, np.hstack(terms), np.hstack(bounds)))
    return tuple(found)


def _worst(name: str, terms: Array, bounds: Array) -> Identity:
    """Sum each row of terms, and keep the one that is worst in proportion to its bound."""
    # 0 times infinity is 0.
    bounds = np.nan_to_num(bounds, nan=0, posinf=np.inf)
    residual, bound = np.sum(terms, axis=-1), np.sum(bounds, axis=-1)
    # NaN sorts first; a residual of 0 needs no bound.
    z = np.where(residual == 0, 0.0, np.abs(residual) / np.where(bound > 0, bound, 1e-300))
    row = int(np.argmax(np.where(np.isnan(z), np.inf, z)))
    return Identity(name, float(np.abs(residual[row])), float(bound[row]), bool(np.all(z <= 1)))
