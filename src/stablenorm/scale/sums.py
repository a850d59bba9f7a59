"""
The backward of some of the rows: dgamma and dbeta as sums that those over other rows are merged with.

Where `partial.rounded` leaves such a sum of all rows undecided, which it may with rounding="nearest",
the same rows are asked again, for exact sums of these columns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.functional import calls
from stablenorm.reference.exact import Root
from stablenorm.reference.partial import PARTIAL
from stablenorm.types import Array, Cache, Gradients

# Of dgamma and of dbeta.
Pair = tuple[Array | None, Array | None]


def backward_parts(
    dy: ArrayLike,
    cache: Cache,
    wrt: str | Sequence[str] = calls.NAMES,
    *,
    dx: Array | None = None,
    dsum: ArrayLike | None = None,
) -> Gradients:
    """
    Return dx as the backward does, written into `dx` if that is given; dgamma and dbeta as PARTIAL.

    `reference.partial` has what to do with these.
    """
    calls.refuse_cuda("a sum over some of the rows", cache.backend)
    asked = calls.asked_names(wrt)
    sums = [
        None if parameter is None or name not in asked else np.zeros(parameter.shape, PARTIAL)
        for name, parameter in zip(("gamma", "beta"), cache.norm[:2], strict=True)
    ]
    of_x = ("x",) if "x" in asked else ()
    return calls.backward(
        dy, cache, of_x, (dx, None, None), dsum=dsum, kind=cache.norm.kind, sums=sums
    )


def exact_parts(dy: ArrayLike, cache: Cache, columns: Pair) -> Pair:
    """
    Return the exact sums of some columns of dgamma and of dbeta, of a cache with rounding="nearest".

    Each of `columns` is None or an array of bool; the sums, for `merged` and `decided`, are arrays of objects
    of its shape. Where no column is wanted, nothing is computed.
    """
    wanted = [None if each is None else each.astype(object) for each in columns]
    if any(each is not None and each.any() for each in columns):
        calls.backward(dy, cache, (), None, kind=cache.norm.kind, sums=wanted)
    return wanted[0], wanted[1]


def decided(values: Array, undecided: Array, exact: Array) -> Array:
    """Return what `partial.rounded` did, with exact sums over all rows where it was undecided."""
    result, roots = values.copy(), dict[int, Root]()
    result[undecided] = [each.rounded(values.dtype, roots) for each in exact[undecided]]
    return result
