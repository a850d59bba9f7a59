"""The table of features that cannot be combined, from which the documentation makes its own."""

from collections.abc import Iterable
from typing import Any

from stablenorm.types import Norm

CUDA, DASK = "arrays on a CUDA device", "a Dask array"
NEAREST, LEADING = 'rounding="nearest"', "leading axes of gamma or beta"
_DERIVATIVES = "jvp", "double_backward"

# Features, what they cannot be combined with, why, and what to do instead.
REFUSED: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("residual", "where", "dsum", "dmean", "drstd", "sum_axes", "accumulate", "RMS norm",
      "gamma_offset", NEAREST, LEADING, *_DERIVATIVES),
     CUDA, "its kernel has no place for it", "copy them to the host, as x.get() does"),
    (("where that varies inside a row", "dmean", "drstd", *_DERIVATIVES),
     NEAREST, "its error is not bounded there", 'use rounding="fast"'),
    (_DERIVATIVES, LEADING, "each part has a gamma of its own",
     "leave them out of the forward, and apply them to its y"),
    (("out",), DASK, "it has no memory", "dask.array.store(result, out) writes into arrays"),
    (("sum_axes",), DASK, "sums are over all chunks",
     "for gradients of each sample, give gamma and beta leading axes"),
    (("accumulate",), DASK, "sums are over all chunks", "add dgamma and dbeta to others yourself"),
    (("dmean", "drstd"), DASK, "they are of whole arrays",
     "call forward and backward on chunks in memory, in dask.array.map_blocks"),
    (_DERIVATIVES, DASK, "they are for arrays in memory", "call forward on x.compute()"),
)  # fmt: skip


def features_of(norm: Norm, axes: tuple[int, ...], backend: str) -> list[str]:
    """Return the features in the table that a norm has whose arrays are those of a backend."""
    has = {
        CUDA: backend == "cuda",
        NEAREST: norm.rounding == "nearest",
        "RMS norm": norm.kind == "rms",
        "gamma_offset": norm.gamma_offset != 0.0,
        LEADING: any(each is not None and each.ndim > len(axes) for each in norm[:2]),
    }
    return [feature for feature, is_there in has.items() if is_there]


def check_combinations(features: Iterable[str], **keywords: Any) -> None:
    """Raise ValueError if two of these features and given keywords are in the table together."""
    # `is not`, since `!=` of an array is an array.
    given = {name for name, value in keywords.items() if value is not None and value is not False}
    given |= set(features)
    for refused, other, reason, cure in REFUSED:
        for feature in refused:
            if other in given and feature in given:
                msg = f"{feature} cannot be combined with {other}: {reason}; {cure}"
                raise ValueError(msg)
