"""
Rows of eight float64 lanes as one number: the arithmetic that the CPU kernels are written in.

A `Lanes` value holds eight columns of one, four or eight rows: one LLVM vector. Its operators act
lane by lane, each rounded once, in the order written: nothing here lets the compiler reassociate,
so that error-free transformations stay exact, a row has the same bits whether it is computed
alone or among others, and the bits are the same on every machine, whatever width its registers
have (LLVM splits the vector where they are narrower).
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, lower_builtin, register_model, type_callable

from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import (
    F64,
    I32,
    I64,
    WIDTH,
    call,
    concatenated,
    every,
    first_columns,
    row_of,
    shuffle,
    splatted,
    vector,
)


class Lanes(types.Type):
    """The Numba type of eight columns of `rows` rows, in float64."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        super().__init__(name=f"lanes[{rows}]")


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, vector(F64, fe_type.rows))


def _define_operator(symbol: Any, instruction: str) -> None:
    @type_callable(symbol)
    def _typed(_context: Any) -> Any:
        def typer(a: Any, b: Any) -> Any:
            return a if isinstance(a, Lanes) and a == b else None

        return typer

    @lower_builtin(symbol, Lanes, Lanes)
    def _lowered(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_symbol, _instruction)


def _zeros(rows: int) -> Any:
    @intrinsic
    def zeros(_typing: Any) -> Any:
        def generate(_context: Any, _builder: Any, sig: Any, _args: Any) -> Any:
            return every(vector(F64, sig.return_type.rows), 0.0)

        return Lanes(rows)(), generate

    return zeros


# Zero in all lanes, of so many rows. Other functions take such a value for its type.
ZEROS = {rows: _zeros(rows) for rows in (1, 4, 8)}


@intrinsic
def count_rows(_typing: Any, v: Any) -> Any:
    """Return how many rows `v` has."""

    def generate(_context: Any, _builder: Any, sig: Any, _args: Any) -> Any:
        return ir.Constant(I64, sig.args[0].rows)

    return types.intp(v), generate


@intrinsic
def splat(_typing: Any, value: Any, like: Any) -> Any:
    """Return float64 `value` in all lanes of the rows of `like`."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return splatted(builder, args[0], WIDTH * sig.return_type.rows)

    return like(types.float64, like), generate


@intrinsic
def of_rows(_typing: Any, numbers: Any, like: Any) -> Any:
    """Return, in all lanes of each row, its own of the float64 `numbers`."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts = []
        for row in range(sig.return_type.rows):
            at = builder.gep(args[0], [ir.Constant(I32, row)])
            parts.append(splatted(builder, builder.load(at, align=8), WIDTH))
        return concatenated(builder, parts)

    return like(numbers, like), generate


@intrinsic
def in_rows(_typing: Any, v: Any, like: Any) -> Any:
    """Return the one row `v` in each row of `like`, or `v` if it has as many."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[0] == sig.return_type:
            return args[0]
        return shuffle(builder, args[0], list(range(WIDTH)) * sig.return_type.rows)

    return like(v, like), generate


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, rounded once."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        kind = args[0].type
        return call(builder, f"llvm.fma.v{kind.count}f64", kind, args)

    return a(a, a, a), generate


def _hidden_one(builder: Any, kind: Any) -> Any:
    """Return 1.0 in all lanes, from where LLVM cannot see it: a times 1 it would leave out."""
    hidden = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0")
    # So declared, it is done once, before the loop that uses it.
    bits = builder.call(hidden, [I64(0x3FF0000000000000)], attrs=("readnone", "nounwind"))
    return splatted(builder, builder.bitcast(bits, F64), kind.count)


@intrinsic
def plus(_typing: Any, a: Any, b: Any) -> Any:
    """
    Return ``a + b``, made by the units that multiply.

    On many processors (AMD Zen) those that add convert between formats as well, and are the ones
    that all wait for. The bits are the same; the result is one cycle or two later.
    """

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        a, b = args
        one = _hidden_one(builder, a.type)
        return call(builder, f"llvm.fma.v{a.type.count}f64", a.type, [a, one, b])

    return a(a, a), generate


@inner
def minus(a, b):
    """Return ``a - b`` as `plus` returns a sum."""
    return plus(a, negative(b))


@intrinsic
def negative(_typing: Any, v: Any) -> Any:
    """Return ``-v``."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.fneg(args[0])

    return v(v), generate


@intrinsic
def magnitude(_typing: Any, v: Any) -> Any:
    """Return ``|v|``."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        kind = args[0].type
        return call(builder, f"llvm.fabs.v{kind.count}f64", kind, args)

    return v(v), generate


@intrinsic
def larger(_typing: Any, a: Any, b: Any) -> Any:
    """Return the larger of each two lanes; `a` where either is NaN."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[1], args[0]), args[1], args[0])

    return a(a, a), generate


@intrinsic
def smaller_nonzero(_typing: Any, a: Any, b: Any) -> Any:
    """Return `b` where that is smaller than `a` and not zero, else `a`."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        a, b = args
        less = builder.fcmp_ordered("<", b, a)
        nonzero = builder.fcmp_ordered("!=", b, every(b.type, 0.0))
        return builder.select(builder.and_(less, nonzero), b, a)

    return a(a, a), generate


@intrinsic
def finite_or(_typing: Any, a: Any, b: Any) -> Any:
    """Return `a` where `b` is finite, else `b`."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        a, b = args
        # Infinity less infinity is NaN.
        finite = builder.fcmp_ordered("ord", b, builder.fsub(b, b))
        return builder.select(finite, a, b)

    return a(a, a), generate


@intrinsic
def square_root(_typing: Any, v: Any) -> Any:
    """Return the square root of each lane."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        kind = args[0].type
        return call(builder, f"llvm.sqrt.v{kind.count}f64", kind, args)

    return v(v), generate


@intrinsic
def row_totals(_typing: Any, v: Any) -> Any:
    """Return the sum of the lanes of each row, by halves, in the lane of the row's number."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows, part, width = sig.args[0].rows, args[0], WIDTH
        while width > 1:
            # The low and the high halves of all rows at once.
            width //= 2
            low = [2 * width * row + lane for row in range(rows) for lane in range(width)]
            high = [lane + width for lane in low]
            part = builder.fadd(shuffle(builder, part, low), shuffle(builder, part, high))
        if rows == WIDTH:
            return part
        zeros = ir.Constant(part.type, None)
        lanes = [min(lane, rows) for lane in range(WIDTH)]
        chosen = ir.Constant(vector(I32), lanes)
        return builder.shuffle_vector(part, zeros, chosen)

    return Lanes(1)(v), generate


def _swapping(distance: int) -> Any:
    @intrinsic
    def swapped(_typing: Any, v: Any) -> Any:
        def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
            count = WIDTH * sig.args[0].rows
            return shuffle(builder, args[0], [lane ^ distance for lane in range(count)])

        return v(v), generate

    return swapped


# Lanes exchanged over a distance of 4, 2, 1: added up, all lanes of a row hold their sum.
SWAPPED = {distance: _swapping(distance) for distance in (4, 2, 1)}


@intrinsic
def first_lane(_typing: Any, v: Any) -> Any:
    """Return the first lane as a float64."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(I32, 0))

    return types.float64(v), generate


@intrinsic
def sum_rows(_typing: Any, v: Any) -> Any:
    """Return the eight lanes summed over the rows, by pairs."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts = [row_of(builder, args[0], row) for row in range(sig.args[0].rows)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [builder.fadd(one, other) for one, other in pairs]
        return parts[0]

    return Lanes(1)(v), generate


@intrinsic
def add_in_order(_typing: Any, total: Any, v: Any) -> Any:
    """Return the one row `total` with the rows of `v` added, one after the other."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        total = args[0]
        for row in range(sig.args[1].rows):
            total = builder.fadd(total, row_of(builder, args[1], row))
        return total

    return total(total, v), generate


@intrinsic
def keep(_typing: Any, v: Any, count: Any) -> Any:
    """Return `v` with zeros from column `count` on."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        mask = shuffle(
            builder, first_columns(builder, args[1]), list(range(WIDTH)) * sig.args[0].rows
        )
        return builder.select(mask, args[0], every(args[0].type, 0.0))

    return v(v, types.intp), generate
