"""
Sixteen elements of one row as one number, in the precision that a layer norm of them computes in.

A `Singles` value holds float32, what 16- and 32-bit data is computed in by others; float64 data has
`Lanes` of two rows, which here are sixteen columns of one. As in `_vectors`, each operation rounds
once, in the order written.
"""
# mypy: ignore-errors
# ruff: noqa: ARG001
# What Numba compiles has the types that Numba infers; the parameters of an intrinsic are there to
# be typed, its code gets their values elsewhere.

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

from stablenorm.kernels._formats import HALF_IN_HARDWARE, IN_MEMORY, widened
from stablenorm.kernels._ir import F16, F32, F64, I8, I32, concatenated, every, shuffle, splatted
from stablenorm.kernels._vectors import Lanes

# Elements side by side: a register of AVX-512 in float32. The NumPy twin has as many.
COLUMNS = 16


class Singles(Lanes):
    """The Numba type of sixteen columns of a row, in float32."""

    def __init__(self) -> None:
        super().__init__(2)
        self.name = "singles"


@register_model(Singles)
class _SinglesModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(F32, COLUMNS))


def element_of(kind: Any) -> Any:
    """Return the LLVM type of one column."""
    return F32 if isinstance(kind, Singles) else F64


def _zeros(kind: Any) -> Any:
    @intrinsic
    def zeros(_typing: Any) -> Any:
        def generate(_context: Any, _builder: Any, sig: Any, _args: Any) -> Any:
            return every(ir.VectorType(element_of(sig.return_type), COLUMNS), 0.0)

        return kind(), generate

    return zeros


# Zero in all columns. Other functions take such a value for its type.
SINGLES, DOUBLES = _zeros(Singles()), _zeros(Lanes(2))


def resized(builder: Any, v: Any, element: Any) -> Any:
    """Return a float or a vector of them in another precision."""
    kind = ir.VectorType(element, v.type.count) if isinstance(v.type, ir.VectorType) else element
    if v.type == kind:
        return v
    wider = kind in (F64, ir.VectorType(F64, COLUMNS))
    return builder.fpext(v, kind) if wider else builder.fptrunc(v, kind)


def _singles_of(builder: Any, dtype: Any, v: Any) -> Any:
    """Return sixteen 16-bit elements as float32."""
    single, i32 = ir.VectorType(F32, COLUMNS), ir.VectorType(I32, COLUMNS)
    if dtype is types.uint16:
        bits = builder.shl(builder.zext(v, i32), every(i32, 16))
        return builder.bitcast(bits, single)
    if HALF_IN_HARDWARE:
        return builder.fpext(builder.bitcast(v, ir.VectorType(F16, COLUMNS)), single)
    halves = [shuffle(builder, v, list(range(at, at + 8))) for at in (0, 8)]
    return resized(
        builder, concatenated(builder, [widened(builder, dtype, h) for h in halves]), F32
    )


@intrinsic
def load_columns(_typing: Any, at: Any, offset: Any, like: Any) -> Any:
    """Return the sixteen elements at `offset`, exactly."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        base = builder.gep(builder.bitcast(args[0], I8.as_pointer()), [args[1]])
        kind = ir.VectorType(IN_MEMORY[dtype], COLUMNS)
        v = builder.load(builder.bitcast(base, kind.as_pointer()), align=1)
        if dtype.bitwidth == 16:
            v = _singles_of(builder, dtype, v)
        return resized(builder, v, element_of(sig.return_type))

    return like(at, types.intp, like), generate


@intrinsic
def wide(_typing: Any, v: Any) -> Any:
    """Return the columns as float64."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return resized(builder, args[0], F64)

    return Lanes(2)(v), generate


@intrinsic
def fill(_typing: Any, value: Any, like: Any) -> Any:
    """Return float64 `value`, rounded to the precision of `like`, in all columns."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        one = resized(builder, args[0], element_of(sig.return_type))
        return splatted(builder, one, COLUMNS)

    return like(types.float64, like), generate


@intrinsic
def narrow(_typing: Any, value: Any, like: Any) -> Any:
    """
    Return a float64 rounded to the precision of `like`.

    A sum, difference, product or quotient of two float32, rounded to float64 first, is the one
    that float32 arithmetic returns: 53 bits are more than 2 * 24 + 1.
    """

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return resized(builder, resized(builder, args[0], element_of(sig.args[1])), F64)

    return types.float64(types.float64, like), generate


def smaller_of(builder: Any, a: Any, b: Any) -> Any:
    """Return the smaller of each two columns; that of `a` where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", b, a), b, a)


def larger_of(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger of each two columns; that of `a` where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


@intrinsic
def smaller(_typing: Any, a: Any, b: Any) -> Any:
    """Return the smaller of each two columns; `a` where either is NaN."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return smaller_of(builder, *args)

    return a(a, a), generate


def _halves(builder: Any, v: Any, width: int) -> Any:
    low, high = list(range(width)), list(range(width, 2 * width))
    return shuffle(builder, v, low), shuffle(builder, v, high)


@intrinsic
def fold_sum(_typing: Any, v: Any) -> Any:
    """Return the sum of the columns, by halves, as float64."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        part, width = args[0], COLUMNS
        while width > 1:
            width //= 2
            part = builder.fadd(*_halves(builder, part, width))
        return resized(builder, builder.extract_element(part, ir.Constant(I32, 0)), F64)

    return types.float64(v), generate
