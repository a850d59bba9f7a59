"""The contract ``|error| <= limit ulp + c * S``: its limits, and an array held against it."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from stablenorm.oracle.rounding import FORMATS, Array, Format, in_ulp, power
from stablenorm.oracle.rows import Inputs

# The contract: |error| <= limit ulp + c * S. float64 arithmetic serves the three narrower formats;
# float64 itself is served by pairs of float64 (u**2 = 2**-106), less what its tree sums lose.
# By quantity: the limit and log2(c), those of float64 last.
LIMITS = {
    "y": (0.501, -48, 0.501, -98),
    "dx": (0.501, -48, 0.75, -98),
    "dgamma": (0.501, -44, 0.51, -94),
    "dbeta": (0.501, -44, 0.51, -94),
    # Those of y: of float64 data both are computed with more digits than the kernels' dx.
    "ty": (0.501, -48, 0.501, -98),
    "ddy": (0.501, -48, 0.501, -98),
}


@dataclass(frozen=True, slots=True)
class ContractResult:
    """
    How one array stands against the contract ``|error| <= limit_ulp * ulp + c * S``.

    Attributes
    ----------
    passed : bool
        Whether every element keeps the contract.
    worst_ulp : float
        The largest error, in ulp of the array's dtype at the exact value. 0 for an empty array.
    misrounded : float
        The fraction of elements that are not the correctly rounded exact values; decided exactly.
    second_term : int
        How many elements have an error above `limit_ulp`: only ``c * S`` could let them pass.
    worst_excess : float
        The largest ``(error - limit_ulp * ulp) / (c * S)`` of those, or 0. At most 1 if passed.
    worst_index : tuple of int
        Where `worst_ulp` is, or `worst_excess` if the contract is broken. Empty for an empty array.
    limit_ulp : float
        The limit of this quantity in this dtype.
    """

    passed: bool
    worst_ulp: float
    misrounded: float
    second_term: int
    worst_excess: float
    worst_index: tuple[int, ...]
    limit_ulp: float


def hold(inputs: Inputs, name: str, fmt: Format, judged: Array) -> ContractResult:
    """Hold an array of this format, judged, against the contract."""
    limits, shape, judged = LIMITS[name], judged.shape, judged.reshape(-1)
    limit, second = limits[2:] if fmt is FORMATS["float64"] else limits[:2]
    errors = in_ulp(judged)
    if not errors.size:
        return ContractResult(True, 0.0, 0.0, 0, 0.0, (), limit)
    above = np.flatnonzero(errors > limit)
    # An infinite error needs no S, which may be undefined there.
    finite = above[np.isfinite(judged["mantissa"][above])]
    excess = np.where(np.isinf(judged["mantissa"]), math.inf, 0.0)
    for block in np.unique(finite // inputs.n).tolist():
        sizes = inputs.sizes(name, block)
        for i in finite[finite // inputs.n == block]:
            mantissa, exponent, _, ulp = judged[i].item()
            over = Fraction(mantissa - math.ldexp(limit, ulp - exponent))
            low, _, unit = sizes[i % inputs.n]
            try:
                excess[i] = over * power(exponent - unit - second) / low
            except (OverflowError, ZeroDivisionError):
                excess[i] = math.inf
    worst = float(excess.max())
    where = np.argmax(errors if worst <= 1 else excess)
    return ContractResult(
        passed=worst <= 1,
        worst_ulp=float(errors.max()),
        misrounded=float(judged["misrounded"].mean()),
        second_term=above.size,
        worst_excess=worst,
        worst_index=tuple(int(i) for i in np.unravel_index(where, shape)),
        limit_ulp=limit,
    )
