"""How an array is dealt out: in tiles, in blocks, past the caches or not. The shape alone decides."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

# Tiles are whole groups of rows: what `_narrow` has in flight, and twice that.
_ROWS_TOGETHER = 8

# Elements of a tile of the forward: 4 microseconds of work, so that the last tile does not leave
# a thread waiting, and taking one (20 ns) is nothing; of few elements, four tiles, down to 1
# microsecond each.
_FORWARD_TILE, _LEAST_FORWARD_TILE = 1 << 14, 1 << 12

# Tiles of the backward: each has its own four vectors of sums. At most 64, and as few as 8 where
# rows are long, keeps these within a few MB. Of few elements, up to four tiles, if each has so
# many elements and rows that clearing and adding up its sums is a small part of the work.
_BACKWARD_TILE, _LEAST_BACKWARD_TILE, _LEAST_ROWS, _FEW = 1 << 16, 1 << 13, 16, 4
_MOST_TILES, _FEWEST_TILES, _SUMS = 64, 8, 1 << 17

# Elements gathered at a time from layouts that have no (rows, n) view with contiguous rows.
_GATHERED = 1 << 16


@functools.lru_cache(1024)
def forward_rows(rows: int, n: int) -> int:
    """Return the rows of a tile of the forward."""
    elements = min(max(rows * n // _FEW, _LEAST_FORWARD_TILE), _FORWARD_TILE)
    return max(elements // n // _ROWS_TOGETHER, 1) * _ROWS_TOGETHER


@functools.lru_cache(1024)
def backward_rows(rows: int, n: int) -> int:
    """Return the rows of a tile of the backward."""
    most = max(min(_SUMS // n, _MOST_TILES), _FEWEST_TILES)
    few = min(rows * n // _LEAST_BACKWARD_TILE, rows // _LEAST_ROWS, _FEW)
    tiles = min(max(rows * n // _BACKWARD_TILE, few, 1), most)
    tile_rows = max(-(-rows // tiles), 1)
    return tile_rows + -tile_rows % _ROWS_TOGETHER


def blocks(rows: int, n: int, tile_rows: int) -> Iterator[slice]:
    """Yield slices of whole tiles, of about as many elements as are gathered at a time."""
    step = max(_GATHERED // n // tile_rows, 1) * tile_rows
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def has_contiguous_rows(array: Any) -> bool:
    """Tell whether a kernel can be given `array` as it is."""
    return isinstance(array, np.ndarray) and (
        array.flags.c_contiguous or array.strides[1] == array.itemsize or array.shape[1] == 1
    )


def past_caches(out: Any, other: Any) -> bool:
    """Tell whether `out` is to go past the caches: large, and not written over `other`."""
    return out.nbytes >= _streamed_from() and not np.may_share_memory(out, other)


@functools.cache
def _streamed_from() -> int:
    """
    Return from how many bytes on results go past the caches.

    Half of the last-level cache: a smaller result is likely to be read from there by whatever
    comes next.
    """
    try:
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError, AttributeError):
        size = 0
    # Where the system does not tell: 32 MiB.
    return (size if size > 0 else 1 << 25) // 2


def joined(words: Any) -> Any:
    """Return arrays of one number a row as one array: the one they are views of, if so."""
    base = words[0].base
    if isinstance(base, np.ndarray) and base.shape == (len(words), len(words[0])):
        # Not all(...): its generator takes as long as a small layer norm's arithmetic.
        for word in words:
            if word.base is not base:
                break
        else:
            return base
    return np.stack(words)
