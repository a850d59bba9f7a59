r"""
The norms in forward mode, and the gradient of their backward, on (rows, n).

J is the symmetric Jacobian of xhat: the backward without gamma. For one row, with ``scale = gamma +
gamma_offset``, given tangents of x, gamma and beta::

    ty     = scale * J tx + tgamma * xhat + tbeta

The backward makes dx, dgamma and dbeta of dy, x and gamma. Given cotangents ddx, ddgamma and
ddbeta of what it makes, and with ``g = scale * dy``::

    ddy    = scale * J ddx + ddgamma * xhat + ddbeta
    dgamma = sum over rows of dy * J ddx
    dx     = J (ddgamma * dy) - rstd * (mean(g * xhat) * J ddx
                                        + mean(ddx * xhat) * J g + xhat * mean(ddx * J g))

Results of float64 rows that are out of range, beyond about 2**200 or below 2**-200, are NaN.

docs/explanation/derivation.md derives these lines, D21, D29 and D30. The precision, the blocks and
the sums are those of `stablenorm.reference.blocks`.
"""

from functools import partial
from typing import Any

import numpy as np

from stablenorm.call import DoubleBackward, Jvp
from stablenorm.reference.blocks import (
    Counted,
    RowSum,
    blocks,
    lifter,
    parameter,
    rebuilt,
    scale_of,
)
from stablenorm.reference.doubledouble import round_to
from stablenorm.reference.equations import backward


def jvp(call: Jvp) -> None:
    """
    Push the tangents of x, gamma and beta (None: 0) through `forward`, into ty; 0 where the mask is False.

    Each element is within ``0.501 ulp + c * S`` of the exact one, c as for y, S the magnitudes that
    it is made of: with ``T(v) = rstd (|v| + mean|v| + (|xhat| + mean|xhat|) mean|(v - mean(v)) xhat|)``,
    ``|scale| T(tx) + |tgamma| (|xhat| + mean|xhat|) + |tbeta|``.
    """
    tx, x, norm, statistics, tgamma, tbeta, ty, where = call
    lift = lifter(x)
    parameters = scale_of(norm, lift), parameter(tgamma, lift), parameter(tbeta, lift)
    with np.errstate(all="ignore"):
        for rows in blocks(x.shape):
            counted = Counted(where, rows, x.shape[1])
            xhat, rstd = rebuilt(lift(x[rows]), statistics, rows)
            moved = backward(lift(tx[rows]), xhat, rstd, None, norm.kind, counted.mean)
            ty[rows] = round_to(counted.only(_pushed(moved, xhat, *parameters)), ty.dtype)


def double_backward(call: DoubleBackward) -> None:
    """
    Pull ddx, ddgamma and ddbeta (None: 0) back through `backward`, into ddy, dx and dgamma.

    The errors are as for `jvp`: S of ddy is that of ty; of dgamma, the sum over rows of
    ``|dy| T(ddx)``; of dx, ``T(ddgamma * dy) + rstd (mean|g' xhat| T(ddx) + mean|ddx' xhat| T(g) +
    (|xhat| + mean|xhat|) mean(|ddx'| T(g)))``, g' and ddx' centered.
    """
    ddx, dy, x, norm, statistics, ddgamma, ddbeta, ddy, dx, dgamma, where = call
    lift = lifter(x)
    scale, *of_xhat = scale_of(norm, lift), parameter(ddgamma, lift), parameter(ddbeta, lift)
    sum_dgamma = RowSum()
    with np.errstate(all="ignore"):
        for rows in blocks(x.shape):
            counted = Counted(where, rows, x.shape[1])
            xhat, rstd = rebuilt(lift(x[rows]), statistics, rows)
            mean, only = counted.mean, counted.only
            jacobian = partial(
                backward, xhat=xhat, rstd=rstd, scale=None, kind=norm.kind, mean=mean
            )
            cotangent, tangent = lift(dy[rows]), lift(ddx[rows])
            g = cotangent if scale is None else cotangent * scale
            pushed, pulled = jacobian(tangent), jacobian(g)
            ddy[rows] = round_to(only(_pushed(pushed, xhat, scale, *of_xhat)), ddy.dtype)
            if dgamma is not None:
                sum_dgamma.add(only(cotangent * pushed))
            if norm.kind == "layer":
                # For the means of products that follow: the reason of `project`.
                g, tangent = g - mean(g), tangent - mean(tangent)
            bent = mean(g * xhat) * pushed + mean(tangent * xhat) * pulled
            total = -(rstd * (bent + xhat * mean(tangent * pulled)))
            if of_xhat[0] is not None:
                total = total + jacobian(cotangent * of_xhat[0])
            dx[rows] = round_to(only(total), dx.dtype)
        if dgamma is not None:
            sum_dgamma.put(dgamma)


def _pushed(moved: Any, xhat: Any, scale: Any, tgamma: Any, tbeta: Any) -> Any:
    """Return the tangent of y, given that of xhat."""
    result = moved if scale is None else moved * scale
    if tgamma is not None:
        result = result + tgamma * xhat
    return result if tbeta is None else result + tbeta
