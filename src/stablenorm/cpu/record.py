"""
What a call is about, as 64-bit words in memory, so that all threads find it at one address.

`Call` gives the words names. Pointers are addresses here: the tiles, compiled for given types, make
pointers of them. `PLACE` is the type of an argument of which only the address is wanted: of an array
of any dtype and shape, 0 of None. To take arrays as arrays costs 0.1 microseconds each, and a function
for each dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from stablenorm.cpu.memory import emit, pasted, pointer_at

_I64 = ir.IntType(64)


class Call(NamedTuple):
    """Addresses, distances in bytes, and sizes; what an operation does not need is 0."""

    # Arrays, of which each call brings its own: x, y or dx, and dy.
    x: Any = 0
    out: Any = 0
    dy: Any = 0
    # As given; the job replaces them by float64 ones.
    gamma: Any = 0
    beta: Any = 0
    # One float64 per row; in double-double, rstd's low part and, or 0, the last part of the mean too.
    mean: Any = 0
    rest: Any = 0
    rstd: Any = 0
    rstd_low: Any = 0
    tails: Any = 0
    # Only in double-double, one byte per row: whether it is left to the reference.
    marks: Any = 0
    # Only for correct rounding, one float64 per row: rms(xhat), or a little more.
    spread: Any = 0
    # Of each tile: dgamma, its low part, dbeta, its low part; for correct rounding, two bounds as well.
    sums: Any = 0
    dgamma: Any = 0
    dbeta: Any = 0
    # Only for correct rounding, two bytes per column: whether dgamma and dbeta are undecided.
    undecided: Any = 0
    # float64: what dgamma, and then dbeta, is added to.
    old: Any = 0
    # int64: which rows of x, out, dy and plus these are; by default all. Statistics are of these alone, but
    # for those that a narrow forward with `all_rows` writes.
    numbers: Any = 0
    # x before the residual was added, and the residual; or what is added to dx. x is then their sum. Of
    # a jvp, gamma, its low part, and the tangents of gamma and beta, in float64.
    source: Any = 0
    plus: Any = 0
    # What the dtypes and the shape decide.
    rows: Any = 0
    # Of numbered rows, how many the result has of all, if the others are to be cleared.
    all_rows: Any = 0
    n: Any = 0
    x_stride: Any = 0
    out_stride: Any = 0
    dy_stride: Any = 0
    source_stride: Any = 0
    plus_stride: Any = 0
    tile_rows: Any = 0
    tiles: Any = 0
    # C functions: to do a tile, to widen gamma and beta, to round dgamma and dbeta.
    do_tile: Any = 0
    widen_gamma: Any = 0
    widen_beta: Any = 0
    round_dgamma: Any = 0
    round_dbeta: Any = 0
    # Bytes of a tile's sums, and of scratch memory: of all threads, and of each.
    sums_bytes: Any = 0
    shared_bytes: Any = 0
    scratch_bytes: Any = 0
    # How results reach memory; whether they may overwrite the input.
    way: Any = 0
    over_input: Any = 0
    # Whether the next rows are to be asked for ahead of time.
    ahead: Any = 0
    # The bits of gamma_offset.
    gamma_offset: Any = 0
    # Of a call done once for each of several samples: how many, and a C function that does one.
    samples: Any = 0
    do_sample: Any = 0
    # Set by the job: the bits of eps, the first thread's scratch memory; of samples, where it says how many
    # bytes each array's parts are apart, and the bytes of memory for each thread.
    eps: Any = 0
    scratch: Any = 0
    apart: Any = 0
    own_bytes: Any = 0


# Where each of them is; the arrays come first.
AT = Call(*range(len(Call._fields)))
ARRAYS = AT.rows


_RECORD = from_dtype(np.dtype([(name, np.int64) for name in Call._fields]))


@emit(_RECORD, types.intp)
def read_record(builder: Any, place: Any) -> Any:
    """Return a record with the names of `Call` at an address; each is read where it is used."""
    return builder.inttoptr(place, ir.ArrayType(ir.IntType(8), 8 * len(AT)).as_pointer())


@pasted
def float64_at(place):
    """Return a pointer to float64 at an address."""
    return pointer_at(place, np.float64)


# ---- arrays as addresses ----


class _Place(types.Type):
    """Where the elements of a NumPy array begin; of None, 0."""

    bitwidth = 64


PLACE = _Place("place")
register_model(_Place)(models.IntegerModel)


@unbox(_Place)
def _unbox(_kind: Any, value: Any, c: Any) -> Any:
    # An array's first field behind what every object has; NumPy's PyArray_DATA reads it so.
    fields = c.builder.bitcast(value, _I64.as_pointer())
    first = c.builder.load(c.builder.gep(fields, [_I64(object.__basicsize__ // 8)]))
    missing = c.builder.icmp_unsigned("==", value, c.pyapi.borrow_none())
    return NativeValue(c.builder.select(missing, _I64(0), first))


@intrinsic
def address_of(_typing: Any, place: Any) -> Any:
    """Return the address as an integer."""
    return types.intp(place), lambda _context, _builder, _sig, args: args[0]
