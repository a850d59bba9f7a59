"""
The columns of sixteen rows folded at a time: each step joins the halves of two rows in one vector.

Row by row, half of every vector would be folded for nothing, and each step would wait for the one
before: two thirds of what a row of 64 elements takes. The order is that of `fold_sum`: columns i
and i + 8, then i + 4, i + 2, i + 1.
"""
# mypy: ignore-errors
# ruff: noqa: ARG001
# What Numba compiles has the types that Numba infers; the parameters of an intrinsic are there to
# be typed, its code gets their values elsewhere.

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stablenorm.kernels._ir import I8, I32, every, splatted
from stablenorm.kernels._sweep_lanes import COLUMNS, element_of, larger_of, resized, smaller_of

# Rows that are folded together: as many as columns.
ROWS = COLUMNS

# Bytes from row to row of what waits to be folded: sixteen float64, or as many float32 and a gap.
PITCH = 8 * COLUMNS


def _place(builder: Any, at: Any, offset: Any, v: Any) -> Any:
    base = builder.gep(builder.bitcast(at, I8.as_pointer()), [offset])
    return builder.bitcast(base, v.as_pointer())


@intrinsic
def keep(_typing: Any, at: Any, offset: Any, v: Any) -> Any:
    """Write the columns of a row at byte `offset`, in their own precision."""

    def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        at, offset, v = args
        builder.store(v, _place(builder, at, offset, v.type), align=8)
        return context.get_dummy_value()

    return types.none(at, types.intp, v), generate


def _kept(builder: Any, at: Any, offset: Any, element: Any) -> list[Any]:
    """Return the columns of the sixteen rows from byte `offset` on."""
    kind = ir.VectorType(element, COLUMNS)
    rows = [builder.add(offset, ir.Constant(offset.type, PITCH * row)) for row in range(ROWS)]
    return [builder.load(_place(builder, at, row, kind), align=8) for row in rows]


def _halves(builder: Any, u: Any, v: Any, width: int) -> tuple[Any, Any]:
    """Return the lower and the upper halves of the blocks of `width` columns of two vectors."""
    blocks = range(0, 2 * COLUMNS, width)
    low = [block + col for block in blocks for col in range(width // 2)]
    high = [place + width // 2 for place in low]
    kind = ir.VectorType(I32, COLUMNS)
    return tuple(builder.shuffle_vector(u, v, ir.Constant(kind, side)) for side in (low, high))


def _pairs(rows: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(rows[::2], rows[1::2], strict=True))


def _folding(combine: Any) -> Any:
    @intrinsic
    def folded(_typing: Any, at: Any, offset: Any, like: Any) -> Any:
        def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
            rows, width = _kept(builder, args[0], args[1], element_of(sig.return_type)), COLUMNS
            while width > 1:
                rows = [combine(builder, *_halves(builder, *pair, width)) for pair in _pairs(rows)]
                width //= 2
            return rows[0]

        return like(at, types.intp, like), generate

    return folded


# Of the rows kept from byte `offset` on: the sums of their columns, the smallest, the largest, each
# a vector with a place for each row.
row_sums = _folding(lambda builder, a, b: builder.fadd(a, b))
row_smallest, row_largest = _folding(smaller_of), _folding(larger_of)


@intrinsic
def row_welford(_typing: Any, at: Any, means: Any, m2s: Any, count: Any, like: Any) -> Any:
    """
    Join the columns' means and sums of squared deviations; return both, a place for each row.

    Each column stands for `count` elements; the formula is that of Chan, Golub and LeVeque.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        element = element_of(sig.args[4])
        mean = _kept(builder, args[0], args[1], element)
        m2 = _kept(builder, args[0], args[2], element)
        half_count = builder.fmul(resized(builder, args[3], element), ir.Constant(element, 0.5))
        width = COLUMNS
        while width > 1:
            counts = splatted(builder, half_count, COLUMNS)
            joined = [
                _joined(builder, _halves(builder, *m, width), _halves(builder, *d, width), counts)
                for m, d in zip(_pairs(mean), _pairs(m2), strict=True)
            ]
            mean, m2 = ([each[k] for each in joined] for k in (0, 1))
            half_count = builder.fmul(half_count, ir.Constant(element, 2.0))
            width //= 2
        return context.make_tuple(builder, sig.return_type, (mean[0], m2[0]))

    return types.UniTuple(like, 2)(at, types.intp, types.intp, types.float64, like), generate


def _joined(builder: Any, means: Any, m2s: Any, half_count: Any) -> tuple[Any, Any]:
    (a, b), (m2_a, m2_b) = means, m2s
    apart = builder.fsub(b, a)
    mean = builder.fadd(a, builder.fmul(apart, every(apart.type, 0.5)))
    between = builder.fmul(builder.fmul(apart, apart), half_count)
    return mean, builder.fadd(builder.fadd(m2_a, m2_b), between)
