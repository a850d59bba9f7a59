"""
The backward of some of the rows: dgamma and dbeta as sums that those over other rows are merged with.

With rounding="nearest", columns that cannot be rounded safely are summed again, with integers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.functional.backward import BackwardOptions, do, prepared
from stablenorm.functional.checks import asked_names
from stablenorm.functional.combinations import CUDA, refuse
from stablenorm.reference.exact import Root
from stablenorm.reference.partial import PARTIAL
from stablenorm.types import NAMES, Array, Cache, Gradients


def backward_parts(
    dy: ArrayLike,
    cache: Cache,
    wrt: str | Sequence[str] = NAMES,
    *,
    dx: Array | None = None,
    dsum: ArrayLike | None = None,
    threads: int | None = None,
) -> Gradients:
    """Return dx, in `dx` if that is given; dgamma and dbeta as PARTIAL, for `partial.merged`."""
    if cache.backend == "cuda":
        refuse("sums over some of the rows", CUDA)
    asked = asked_names(wrt)
    sums = [
        None if parameter is None or name not in asked else np.zeros(parameter.shape, PARTIAL)
        for name, parameter in zip(NAMES[1:], cache.norm[:2], strict=True)
    ]
    only_x = ("x",) if "x" in asked else ()
    options = BackwardOptions(only_x, (dx, None, None), dsum, threads=threads)
    call, _ = prepared(dy, cache, cache.norm.kind, options)
    out = Gradients(call.out.dx, *sums)
    do(call._replace(out=out, sums="pairs"), cache)
    return out


def exact_parts(
    dy: ArrayLike, cache: Cache, columns: Sequence[Array | None], threads: int | None = None
) -> tuple[Any, Any]:
    """
    Return the exact sums of some columns of dgamma and of dbeta, of a cache with rounding="nearest".

    `columns` are two arrays of bool, or None; the sums, which `partial.merged` takes too, arrays of objects of
    these shapes. Where no column is wanted, nothing is computed.
    """
    dgamma, dbeta = (None if each is None else each.astype(object) for each in columns)
    if any(each is not None and each.any() for each in columns):
        options = BackwardOptions((), threads=threads)
        call, _ = prepared(dy, cache, cache.norm.kind, options)
        do(call._replace(out=Gradients(None, dgamma, dbeta), sums="exact"), cache)
    return dgamma, dbeta


def decided(values: Array, undecided: Array, exact: Array) -> Array:
    """Return what `partial.rounded` did, with the exact sums over all rows where that was undecided."""
    result, roots = values.copy(), dict[int, Root]()
    result[undecided] = [each.rounded(values.dtype, roots) for each in exact[undecided]]
    return result
