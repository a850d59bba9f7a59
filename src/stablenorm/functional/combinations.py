"""The table of features that cannot be combined, from which the documentation makes its own."""

from typing import NamedTuple, NoReturn

CUDA, DASK = "arrays on a CUDA device", "a Dask array"
NEAREST, LEADING = 'rounding="nearest"', "leading axes of gamma or beta"


class Refusal(NamedTuple):
    """Some features, what they cannot be combined with, why, and what to do instead."""

    features: tuple[str, ...]
    other: str
    reason: str
    cure: str


_DERIVATIVES = "jvp", "double_backward"
_ITS_KERNEL = "its kernel has no place for it"
_NO_BOUND = "its error is not bounded there"

REFUSED = (
    Refusal(
        ("residual", "where", "dsum", "dmean", "drstd", "sum_axes", "accumulate", "RMS norm",
         "gamma_offset", NEAREST, LEADING, *_DERIVATIVES, "sums over some of the rows"),
        CUDA, _ITS_KERNEL, "copy them to the host, as x.get() does",
    ),
    Refusal(
        ("where that varies inside a row", "dmean", "drstd", *_DERIVATIVES),
        NEAREST, _NO_BOUND, 'use rounding="fast"',
    ),
    Refusal(
        _DERIVATIVES, LEADING, "each part has a gamma of its own",
        "leave them out of the forward, and apply them to its y",
    ),
    Refusal(("out",), DASK, "it has no memory", "dask.array.store(result, out) writes into arrays"),
    Refusal(
        ("sum_axes",), DASK, "sums are over all chunks",
        "for gradients of each sample, give gamma and beta leading axes",
    ),
    Refusal(
        ("accumulate",), DASK, "sums are over all chunks",
        "add dgamma and dbeta to others yourself",
    ),
    Refusal(
        ("dmean", "drstd"), DASK, "they are of whole arrays",
        "call forward and backward on chunks in memory, in dask.array.map_blocks",
    ),
    Refusal(_DERIVATIVES, DASK, "they are for arrays in memory", "call forward on x.compute()"),
)  # fmt: skip

_FOUND = {(feature, each.other): each for each in REFUSED for feature in each.features}


def refuse(feature: str, other: str) -> NoReturn:
    """Raise the ValueError of a combination in the table."""
    refusal = _FOUND[feature, other]
    msg = f"{feature} cannot be combined with {other}: {refusal.reason}; {refusal.cure}"
    raise ValueError(msg)
