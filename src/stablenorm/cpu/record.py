"""
What a call is about, as 64-bit words in memory, so that all threads find it at one address.

`Call` gives the words names. Pointers are addresses here: the tiles, compiled for given types, make
pointers of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stablenorm.cpu.memory import pasted, pointer_at


class Call(NamedTuple):
    """Addresses, distances in bytes, and sizes; what an operation does not need is 0."""

    x: Any
    # y or dx.
    out: Any
    # Of the backward.
    dy: Any
    # float64, widened.
    gamma: Any
    beta: Any
    # The bits of a float64.
    eps: Any
    # Of all rows: mean, its rest, rstd and, in double-double, its low part, each so many bytes on.
    numbers: Any
    words_apart: Any
    # In double-double: the last part of the mean, or 0; whether the row is left to the reference.
    tails: Any
    marks: Any
    # Of each tile: dgamma, its low part, dbeta, its low part.
    sums: Any
    x_stride: Any
    out_stride: Any
    dy_stride: Any
    rows: Any
    n: Any
    tile_rows: Any
    # Of each thread, so many bytes on.
    scratch: Any
    scratch_bytes: Any
    # How results reach memory; whether dx is wanted.
    way: Any
    wanted: Any
    # Whether the next rows are to be asked for ahead of time.
    ahead: Any


# Bytes of a record.
SIZE = 8 * len(Call._fields)


@pasted
def write_record(call, record):
    """Write the words of `call` to the address `record`."""
    words = pointer_at(record, np.int64)
    for i in range(len(call)):
        words[i] = call[i]


@pasted
def read_record(record):
    """Return the `Call` at the address `record`."""
    w = pointer_at(record, np.int64)
    return Call(
        w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10],
        w[11], w[12], w[13], w[14], w[15], w[16], w[17], w[18], w[19], w[20], w[21],
    )  # fmt: skip


@pasted
def float64_at(place):
    """Return a pointer to float64 at an address."""
    return pointer_at(place, np.float64)
