"""
The contract that a correctly rounded layer norm keeps, and how an array stands against it.
"""

import math
from dataclasses import dataclass

import numpy as np

from stablenorm.oracle._formats import Array
from stablenorm.oracle._judge import Judged, quotient
from stablenorm.oracle._quantities import Inputs, magnitudes

# The contract: |error| <= limit ulp + c * S. float64 arithmetic serves the three narrower formats;
# float64 itself is served by pairs of float64 (u**2 = 2**-106), less what its tree sums lose.
LIMITS = {
    "narrow": {"y": 0.501, "dx": 0.501, "dgamma": 0.501, "dbeta": 0.501},
    "float64": {"y": 0.501, "dx": 0.75, "dgamma": 0.51, "dbeta": 0.51},
}
SECOND = {
    "narrow": {"y": -48, "dx": -48, "dgamma": -44, "dbeta": -44},
    "float64": {"y": -98, "dx": -98, "dgamma": -94, "dbeta": -94},
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
        How many elements have an error above `limit_ulp`, so that only ``c * S`` could let them
        pass.
    worst_excess : float
        The largest ``(error - limit_ulp * ulp) / (c * S)`` of those elements; 0 if there are none.
        At most 1 if the contract is kept.
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


def hold(inputs: Inputs, name: str, actual: Array, judged: Judged) -> ContractResult:
    """Hold an array, judged and flattened, against the contract."""
    kind = "float64" if actual.dtype.name == "float64" else "narrow"
    limit, second = LIMITS[kind][name], SECOND[kind][name]
    errors = judged.in_ulp()
    if not errors.size:
        return ContractResult(True, 0.0, 0.0, 0, 0.0, (), limit)
    n = inputs.x.shape[1]
    above = np.flatnonzero(errors > limit)
    # An infinite error needs no S, which may be undefined there.
    finite = above[np.isfinite(judged.mantissa[above])]
    excess = np.where(np.isinf(judged.mantissa), math.inf, 0.0)
    for block in np.unique(finite // n).tolist():
        places = finite[finite // n == block]
        sizes = magnitudes(inputs, name, block, (places - block * n).tolist())
        for i, (size, unit) in zip(places, sizes, strict=True):
            mantissa, exponent = float(judged.mantissa[i]), int(judged.exponent[i])
            over = mantissa - math.ldexp(limit, int(judged.ulp[i]) - exponent)
            excess[i] = quotient(over, exponent, size, unit + second)
    worst = float(excess.max())
    where = np.argmax(errors if worst <= 1 else excess)
    return ContractResult(
        passed=worst <= 1,
        worst_ulp=float(errors.max()),
        misrounded=float(judged.misrounded.mean()),
        second_term=above.size,
        worst_excess=worst,
        worst_index=tuple(int(i) for i in np.unravel_index(where, actual.shape)),
        limit_ulp=limit,
    )
