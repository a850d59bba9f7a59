"""How an array is dealt out: in tiles, in blocks, past the caches or not. The shape alone decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm.arrays import SomeRows

# Rows of a tile are a multiple of this: the kernels take two at a time.
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

# Results of so many bytes go past the caches. Half of them would be gone before anybody reads them;
# what the system says of a cache that is shared with others is not to be believed (480 MB).
PAST_CACHES = 1 << 25

# Of inputs beyond the cache of one core, the rows to come are asked for while those at hand are written.
OWN_CACHE = 1 << 20

_ndarray = np.ndarray

# Elements gathered at a time from layouts that have no (rows, n) view with contiguous rows.
_GATHERED = 1 << 16


def forward_rows(rows: int, n: int) -> int:
    """Return the rows of a tile of the forward."""
    elements = min(max(rows * n // _FEW, _LEAST_FORWARD_TILE), _FORWARD_TILE)
    return max(elements // n // _ROWS_TOGETHER, 1) * _ROWS_TOGETHER


def backward_rows(rows: int, n: int) -> int:
    """Return the rows of a tile of the backward."""
    most = max(min(_SUMS // n, _MOST_TILES), _FEWEST_TILES)
    few = min(rows * n // _LEAST_BACKWARD_TILE, rows // _LEAST_ROWS, _FEW)
    tiles = min(max(rows * n // _BACKWARD_TILE, few, 1), most)
    tile_rows = max(-(-rows // tiles), 1)
    return tile_rows + -tile_rows % _ROWS_TOGETHER


def blocks(rows: int, n: int, tile_rows: int) -> Iterator[slice]:
    """Yield slices of whole tiles, of about as many elements as are gathered at a time."""
    # Two, or there is nothing to do for a second thread.
    step = max(_GATHERED // n // tile_rows, 2) * tile_rows
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


# What `row_strides` returns of some rows of contiguous arrays.
NUMBERED = "numbered"


def row_strides(*arrays: Any) -> Any:
    """
    Return the distances between rows, in bytes; None if all arrays are contiguous.

    Of samples, those within one. An empty tuple if the rows of an array are not contiguous.
    """
    for array in arrays:
        # Rows have no flags.
        if array is not None and not (type(array) is _ndarray and array.flags.c_contiguous):
            break
    else:
        return None
    some = [each for each in arrays if each is not None]
    if all(type(each) is SomeRows and row_strides(each.matrix) is None for each in some):
        return NUMBERED
    found = []
    for array in arrays:
        if array is None:
            found.append(0)
        elif type(array) is not _ndarray:
            return ()
        elif array.flags.c_contiguous:
            found.append(array.shape[-1] * array.itemsize)
        elif array.strides[-1] == array.itemsize or array.shape[-1] == 1:
            found.append(array.strides[-2])
        else:
            return ()
    return tuple(found)
