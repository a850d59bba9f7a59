"""Equations that the gradients of layer and RMS normalization satisfy exactly."""

import numpy as np

from stablenorm.check.closed_form import Judged, excess
from stablenorm.check.results import Finding
from stablenorm.types import Array


def row_identities(judged: dict[str, Judged]) -> list[Finding]:
    """
    Evaluate the equations that exact gradients satisfy, with xhat, rstd and g = gamma dy.

    In every row of a layer norm sum(dx) = 0: adding a constant to x changes nothing. In every row
    sum(dx xhat) / rstd = eps rstd^2 sum(g xhat): stretching x changes y only as far as eps matters.
    Over all rows <gamma, dgamma> + <beta, dbeta> = <dy, y>: y is linear in (gamma, beta). The bounds
    are those of careless code. Rows of zero variance with eps = 0 are skipped.
    """
    of, found = judged["y"].expected, []
    keep = of.s[:, 0] > 0
    # Terms whose sum along a row is to be 0, and their bounds, by name.
    sums: dict[str, tuple[Array, Array]] = {}
    # An element that should be finite and is not makes an error that passes no comparison.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if "dx" in judged and keep.any():
            # dx / rstd has the size of g; the share of eps is eps / (var + eps).
            scaled, bound = judged["dx"].actual * of.s, judged["dx"].bounds.careless * of.s
            if of.case.kind == "layer":
                sums["sum(dx) = 0"] = scaled[keep], bound[keep]
            projected = (scaled - np.square(np.sqrt(of.eps) / of.s) * of.g) * of.xhat
            name = "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd"
            sums[name] = projected[keep], (bound * np.abs(of.xhat))[keep]
        if "dgamma" in judged and (of.case.beta is None or "dbeta" in judged) and keep.all():
            weights = {"dgamma": of.gamma, "dbeta": of.beta, "y": -of.dy}
            sides = [(w, judged[name]) for name, w in weights.items() if name in judged]
            terms = np.hstack([(w * each.actual).reshape(1, -1) for w, each in sides])
            bounds = [(np.abs(w) * each.bounds.careless).reshape(1, -1) for w, each in sides]
            sums["<gamma, dgamma> + <beta, dbeta> = <dy, y>"] = terms, np.hstack(bounds)
        for name, (terms, bound) in sums.items():
            # 0 times infinity is 0.
            most = np.sum(np.nan_to_num(bound, nan=0, posinf=np.inf), axis=-1)
            off = np.abs(np.sum(terms, axis=-1))
            row = int(np.argmax(z := excess(off, np.zeros_like(most), most)))
            said = f"off by {off[row]:.2e}, bound {most[row]:.2e}"
            found.append(Finding("identities", name, "PASS" if z[row] <= 1 else "FAIL", said))
    return found
