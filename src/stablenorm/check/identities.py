"""Equations that the gradients of layer and RMS normalization satisfy exactly."""

import numpy as np

from stablenorm.check.closed_form import Judged, excess
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
    of = judged["y"].expected
    case, keep, found = of.case, of.s[:, 0] > 0, []

    def add(name: str, terms: Array, bounds: Array) -> None:
        # 0 times infinity is 0.
        bound = np.sum(np.nan_to_num(bounds, nan=0, posinf=np.inf), axis=-1)
        residual = np.abs(np.sum(terms, axis=-1))
        row = int(np.argmax(z := excess(residual, np.zeros_like(bound), bound)))
        found.append(Identity(name, float(residual[row]), float(bound[row]), bool(z[row] <= 1)))

    # An element that should be finite and is not makes an error that passes no comparison.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if "dx" in judged and keep.any():
            # dx / rstd has the size of g; the share of eps is eps / (var + eps).
            scaled, bound = judged["dx"].actual * of.s, judged["dx"].bounds.careless * of.s
            if case.kind == "layer":
                add("sum(dx) = 0", scaled[keep], bound[keep])
            projected = (scaled - np.square(np.sqrt(case.eps) / of.s) * of.g) * of.xhat
            name = "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd"
            add(name, projected[keep], (bound * np.abs(of.xhat))[keep])
        if "dgamma" in judged and (case.beta is None or "dbeta" in judged) and keep.all():
            weights = {"dgamma": of.gamma, "dbeta": of.beta, "y": -of.dy}
            sides = [(w, judged[name]) for name, w in weights.items() if name in judged]
            terms = [(w * each.actual).reshape(1, -1) for w, each in sides]
            bounds = [(np.abs(w) * each.bounds.careless).reshape(1, -1) for w, each in sides]
            add("<gamma, dgamma> + <beta, dbeta> = <dy, y>", np.hstack(terms), np.hstack(bounds))
    return tuple(found)
