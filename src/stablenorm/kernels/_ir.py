"""What operations on vectors are made of: pieces of LLVM's intermediate code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

# Lanes, each a column, that a vector has of a row.
WIDTH = 8

F64, F32, F16 = ir.DoubleType(), ir.FloatType(), ir.HalfType()
I64, I32, I16, I8 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)
I1 = ir.IntType(1)


def vector(element: Any, rows: int = 1) -> Any:
    """Return the type of eight elements of each row."""
    return ir.VectorType(element, WIDTH * rows)


def every(kind: Any, value: Any) -> Any:
    """Return a constant vector of one value."""
    return ir.Constant(kind, [value] * kind.count)


def of_elements(v: Any, element: Any) -> Any:
    """Return the type of as many elements as `v` has."""
    return ir.VectorType(element, v.type.count)


def call(builder: Any, name: str, result: Any, args: Any) -> Any:
    """Call an LLVM intrinsic function."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, args)


def shuffle(builder: Any, v: Any, lanes: Any) -> Any:
    """Return the vector of these lanes of `v`."""
    chosen = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), chosen)


def splatted(builder: Any, scalar: Any, count: int) -> Any:
    """Return a vector of so many lanes of one value."""
    one = ir.Constant(ir.VectorType(scalar.type, 1), ir.Undefined)
    return shuffle(builder, builder.insert_element(one, scalar, ir.Constant(I32, 0)), [0] * count)


def concatenated(builder: Any, parts: list[Any]) -> Any:
    """Join vectors, pair by pair."""
    while len(parts) > 1:
        width = parts[0].type.count
        both = ir.Constant(ir.VectorType(I32, 2 * width), list(range(2 * width)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(one, other, both) for one, other in pairs]
    return parts[0]


def row_of(builder: Any, v: Any, row: int) -> Any:
    """Return the eight lanes of one row."""
    return shuffle(builder, v, list(range(WIDTH * row, WIDTH * (row + 1))))


def first_columns(builder: Any, count: Any) -> Any:
    """Return a mask of eight lanes: the first `count`."""
    columns = ir.Constant(vector(I64), list(range(WIDTH)))
    return builder.icmp_signed("<", columns, splatted(builder, count, WIDTH))
