"""
Sixteen rows as one number: what predictions need beside the operators of sixteen columns.

As there, `Singles` are float32 and `Lanes` of two float64; here lane k stands for row k.
"""
# mypy: ignore-errors
# ruff: noqa: ARG001
# What Numba compiles has the types that Numba infers; the parameters of an intrinsic are there to
# be typed, its code gets their values elsewhere.

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stablenorm.kernels._ir import F32, F64, I8, I16, I32, I64, call, every, splatted
from stablenorm.kernels._sweep_lanes import COLUMNS, Singles, resized

_SINGLE, _DOUBLE = ir.VectorType(F32, COLUMNS), ir.VectorType(F64, COLUMNS)
_WORDS, _LONG = ir.VectorType(I32, COLUMNS), ir.VectorType(I64, COLUMNS)
_NO_SINGLES = every(_SINGLE, 0.0)
_ELEMENT = {types.float64: F64, types.float32: F32}

# What subtracting from the bits of a float64 brings its mantissa to between sqrt(1/2) and sqrt(2).
_ROOT_HALF = 0x3FE6A09E667F3BCD
# log2(m) = 2/ln 2 (t + t^3/3 + t^5/5 + t^7/7 + ...), t = (m - 1) / (m + 1), here below 0.172 in
# size: what is left out is below 5e-8.
_LOG_TERMS = tuple(2 / math.log(2) / k for k in (7, 5, 3, 1))

# float16: the smallest normal number; half the quantum's inverse; the largest.
_HALF_NORMAL, _HALF_LARGEST = 2.0**-14, 65504.0


@intrinsic
def put(_typing: Any, at: Any, offset: Any, v: Any) -> Any:
    """Write the sixteen numbers at byte `offset`, in the type of `at`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, v = sig.args[0].dtype, args[2]
        if dtype is types.uint16:
            v = builder.trunc(builder.fptoui(v, _WORDS), ir.VectorType(I16, COLUMNS))
        else:
            v = resized(builder, v, _ELEMENT[dtype])
        base = builder.gep(builder.bitcast(args[0], I8.as_pointer()), [args[1]])
        builder.store(v, builder.bitcast(base, v.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(at, types.intp, v), generate


@intrinsic
def root(_typing: Any, v: Any) -> Any:
    """Return the square root of each."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        suffix = "f32" if args[0].type == _SINGLE else "f64"
        return call(builder, f"llvm.sqrt.v{COLUMNS}{suffix}", args[0].type, args)

    return v(v), generate


def _conditional(is_less: bool) -> Any:
    @intrinsic
    def value(_typing: Any, a: Any, b: Any, value: Any) -> Any:
        def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            less = builder.fcmp_ordered("<", args[0], args[1])
            some, none = splatted(builder, builder.fptrunc(args[2], F32), COLUMNS), _NO_SINGLES
            return builder.select(less, *((some, none) if is_less else (none, some)))

        return Singles()(a, a, types.float64), generate

    return value


# A value where a < b, else 0; and where that does not hold, NaN among them: in float32.
if_less, unless_less = _conditional(is_less=True), _conditional(is_less=False)


@intrinsic
def where_less(_typing: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where a < b, `no` elsewhere, NaN among them."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        a, b, yes, no = args
        return builder.select(builder.fcmp_ordered("<", a, b), yes, no)

    return yes(a, a, yes, yes), generate


@intrinsic
def singles_of(_typing: Any, v: Any) -> Any:
    """Return the numbers, rounded to float32."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return resized(builder, args[0], F32)

    return Singles()(v), generate


def _rounded_bits(builder: Any, v: Any, dropped: int) -> Any:
    """Return float32 without its last bits, rounded to nearest, ties to even."""
    words = builder.bitcast(v, _WORDS)
    shift = every_int(_WORDS, dropped)
    odd = builder.and_(builder.lshr(words, shift), every_int(_WORDS, 1))
    up = builder.add(odd, every_int(_WORDS, (1 << (dropped - 1)) - 1))
    kept = builder.and_(builder.add(words, up), every_int(_WORDS, -(1 << dropped)))
    return builder.bitcast(kept, _SINGLE)


def every_int(kind: Any, value: int) -> Any:
    """Return a constant vector of integers."""
    return ir.Constant(kind, [value] * COLUMNS)


@intrinsic
def held_in_bfloat16(_typing: Any, v: Any) -> Any:
    """Return float32 rounded to bfloat16."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return _rounded_bits(builder, args[0], 16)

    return v(v), generate


@intrinsic
def held_in_float16(_typing: Any, v: Any) -> Any:
    """Return float32 rounded to float16."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        v = args[0]
        size = call(builder, f"llvm.fabs.v{COLUMNS}f32", _SINGLE, [v])
        normal = _rounded_bits(builder, size, 13)
        beyond = builder.fcmp_ordered(">", normal, every(_SINGLE, _HALF_LARGEST))
        normal = builder.select(beyond, every(_SINGLE, math.inf), normal)
        # Float32 next to 1/2 are 2**-24 apart, as subnormal float16 are.
        half = every(_SINGLE, 0.5)
        subnormal = builder.fsub(builder.fadd(size, half), half)
        is_small = builder.fcmp_ordered("<", size, every(_SINGLE, _HALF_NORMAL))
        size = builder.select(is_small, subnormal, normal)
        return call(builder, f"llvm.copysign.v{COLUMNS}f32", _SINGLE, [size, v])

    return v(v), generate


@intrinsic
def bits_of(_typing: Any, squared: Any, most: Any) -> Any:
    """Return ``log2(squared) / 2``, between 0 and `most`: that if `squared` is NaN."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        words = builder.bitcast(args[0], _LONG)
        power = builder.ashr(builder.sub(words, every_int(_LONG, _ROOT_HALF)), every_int(_LONG, 52))
        mantissa = builder.sub(words, builder.shl(power, every_int(_LONG, 52)))
        m = builder.fptrunc(builder.bitcast(mantissa, _DOUBLE), _SINGLE)
        one = every(_SINGLE, 1.0)
        t = builder.fdiv(builder.fsub(m, one), builder.fadd(m, one))
        square, total = builder.fmul(t, t), every(_SINGLE, _LOG_TERMS[0])
        for term in _LOG_TERMS[1:]:
            total = builder.fadd(builder.fmul(total, square), every(_SINGLE, term))
        whole = builder.sitofp(builder.trunc(power, _WORDS), _SINGLE)
        log = builder.fadd(whole, builder.fmul(t, total))
        bits = builder.fmul(log, every(_SINGLE, 0.5))
        bits = builder.select(
            builder.fcmp_ordered(">", bits, every(_SINGLE, 0.0)), bits, every(_SINGLE, 0.0)
        )
        limit = ir.Constant(_SINGLE, ir.Undefined)
        p = builder.fptrunc(args[1], F32)
        limit = builder.insert_element(limit, p, ir.Constant(I32, 0))
        limit = builder.shuffle_vector(limit, limit, every_int(_WORDS, 0))
        is_number = builder.fcmp_ordered("ord", args[0], args[0])
        below = builder.and_(is_number, builder.fcmp_ordered("<", bits, limit))
        return builder.select(below, bits, limit)

    return Singles()(squared, types.float64), generate
