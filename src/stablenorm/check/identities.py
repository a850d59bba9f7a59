"""Equations that the gradients of layer and RMS normalization satisfy exactly."""

import numpy as np

from stablenorm.check.closed_form import Case, Expected
from stablenorm.check.operation import unit_roundoff
from stablenorm.check.results import Identity
from stablenorm.types import Array

_EULER = "<gamma, dgamma> + <beta, dbeta> = <dy, y>"


def row_identities(case: Case, outputs: dict[str, Array]) -> tuple[Identity, ...]:
    """
    Evaluate the equations that exact gradients satisfy, with xhat, rstd and g = gamma dy.

    In every row sum(dx) = 0, since adding a constant to x changes nothing (not of RMS norm), and
    sum(dx xhat) / rstd = eps rstd^2 sum(g xhat), since stretching x about its mean changes y only
    as far as eps matters. Over all rows <gamma, dgamma> + <beta, dbeta> = <dy, y>, since y is linear
    in (gamma, beta). They are necessary, not sufficient: a row of dx that is zero satisfies the first.
    The bounds are those of careless code. Rows of zero variance with eps = 0 are skipped.
    """

    def expected(name: str) -> Expected:
        """Judge by the coarsest dtype of x, dy and an output, which may have been promoted."""
        return Expected(case, max(unit_roundoff(a.dtype) for a in (case.x, case.dy, outputs[name])))

    found, weights = [], {"dgamma": case.scale, "dbeta": case.vector(case.beta, 0.0)}
    keep = Expected(case, 0.0).s[:, 0] > 0
    # An element that should be finite and is not makes an error of NaN, which passes no comparison.
    with np.errstate(invalid="ignore", over="ignore"):
        if "dx" in outputs and keep.any():
            right = expected("dx")
            # dx / rstd has the size of g; the share of eps is eps / (var + eps).
            scaled = case.rows(outputs["dx"]) * right.s
            bound = right.bounds_of("dx", outputs["dx"].dtype).careless * right.s
            projected = (scaled - np.square(np.sqrt(case.eps) / right.s) * right.g) * right.xhat
            if case.kind == "layer":
                found.append(_worst("sum(dx) = 0", scaled[keep], bound[keep]))
            name = "sum(dx xhat) = eps rstd^2 sum(g xhat) / rstd"
            bound = bound * np.abs(right.xhat)
            found.append(_worst(name, projected[keep], bound[keep]))
        has_sums = "dgamma" in outputs and (case.beta is None or "dbeta" in outputs)
        if has_sums and keep.all():
            weights["y"] = -case.rows(case.dy)
            sides = [
                (
                    factor,
                    expected(name).bounds_of(name, outputs[name].dtype).careless,
                    outputs[name],
                )
                for name, factor in weights.items()
                if name in outputs
            ]
            terms = [(w * np.reshape(a, w.shape)).reshape(-1) for w, _, a in sides]
            bounds = [(np.abs(w) * bound).reshape(-1) for w, bound, _ in sides]
            found.append(_worst(_EULER, np.concatenate(terms)[None], np.concatenate(bounds)[None]))
    return tuple(found)


def _worst(name: str, terms: Array, bounds: Array) -> Identity:
    """Sum each row of terms, and keep the one that is worst in proportion to its bound."""
    # 0 times infinity is 0.
    bounds = np.nan_to_num(bounds, nan=0, posinf=np.inf)
    residual, bound = np.sum(terms, axis=-1), np.sum(bounds, axis=-1)
    # What is not finite sorts first; a residual of 0 needs no bound.
    z = np.where(residual == 0, 0.0, np.abs(residual) / np.where(bound > 0, bound, 1e-300))
    row = int(np.argmax(np.where(np.isnan(z), np.inf, z)))
    return Identity(name, float(np.abs(residual[row])), float(bound[row]), bool(np.all(z <= 1)))
