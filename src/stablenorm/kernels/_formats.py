"""From and to the types in memory: widened exactly, rounded once."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from numba import types
from numba.core.registry import cpu_target

from stablenorm.kernels._ir import F16, F32, F64, I16, I32, I64, every, of_elements, vector

IN_MEMORY = {types.float64: F64, types.float32: F32, types.int16: I16, types.uint16: I16}

# Without these instructions LLVM calls a library function that need not exist. What counts is the
# processor that Numba compiles for: NUMBA_CPU_FEATURES may leave out what this one has.
HALF_IN_HARDWARE = "+f16c" in cpu_target.target_context.codegen().magic_tuple()[
    2
] or llvm.get_process_triple().startswith(("aarch64", "arm64"))

# Low bits of a float64 that round-to-odd drops: kept are two more than the narrow type has,
# 8 + 2 and 11 + 2. Not more: so few pass through float32 exactly, where they matter even among
# its subnormals.
_ODD_BFLOAT16, _ODD_FLOAT16 = 53 - 10, 53 - 13


def widened(builder: Any, dtype: Any, v: Any) -> Any:
    """Return eight elements as float64."""
    if dtype is types.float64:
        return v
    if dtype is types.float32:
        return builder.fpext(v, vector(F64))
    if dtype is types.uint16:
        bits = builder.shl(builder.zext(v, vector(I32)), every(vector(I32), 16))
        return builder.fpext(builder.bitcast(bits, vector(F32)), vector(F64))
    if HALF_IN_HARDWARE:
        half = builder.bitcast(v, vector(F16))
        return builder.fpext(builder.fpext(half, vector(F32)), vector(F64))
    return _half_widened(builder, v)


def _half_widened(builder: Any, v: Any) -> Any:
    """Widen float16 bits by shifting them into a float32, 2**112 too small, subnormals as well."""
    i32, i64 = vector(I32), vector(I64)
    wide = builder.zext(v, i32)
    rest = builder.shl(builder.and_(wide, every(i32, 0x7FFF)), every(i32, 13))
    small = builder.fpext(builder.bitcast(rest, vector(F32)), vector(F64))
    scaled = builder.fmul(small, every(vector(F64), 2.0**112))
    special = builder.icmp_unsigned(">=", rest, every(i32, 0x7C00 << 13))
    infinite = builder.bitcast(builder.or_(rest, every(i32, 0x7F800000)), vector(F32))
    value = builder.select(special, builder.fpext(infinite, vector(F64)), scaled)
    sign = builder.shl(builder.zext(builder.and_(wide, every(i32, 0x8000)), i64), every(i64, 48))
    return builder.bitcast(builder.or_(builder.bitcast(value, i64), sign), vector(F64))


def rounded(builder: Any, dtype: Any, v: Any) -> Any:
    """Round float64 lanes once. All rows together: 16 lanes of 32 bits fill an AVX-512 register."""
    if dtype is types.float64:
        return v
    single = of_elements(v, F32)
    if dtype is types.float32:
        return builder.fptrunc(v, single)
    if dtype is types.uint16:
        return _to_bfloat16(builder, builder.fptrunc(_to_odd(builder, v, _ODD_BFLOAT16), single))
    odd = builder.fptrunc(_to_odd(builder, v, _ODD_FLOAT16), single)
    if HALF_IN_HARDWARE:
        return builder.bitcast(builder.fptrunc(odd, of_elements(v, F16)), of_elements(v, I16))
    return _to_float16(builder, odd)


def _to_odd(builder: Any, v: Any, dropped: int) -> Any:
    """Truncate, and set the last kept bit if anything was lost: no midpoint is left to round."""
    i64 = of_elements(v, I64)
    mask = (1 << dropped) - 1
    bits = builder.bitcast(v, i64)
    lost = builder.icmp_unsigned("!=", builder.and_(bits, every(i64, mask)), every(i64, 0))
    kept = builder.and_(bits, every(i64, -1 - mask))
    odd = builder.select(lost, builder.or_(kept, every(i64, 1 << dropped)), kept)
    return builder.bitcast(odd, v.type)


def _to_bfloat16(builder: Any, odd: Any) -> Any:
    """Round float32 to bfloat16 bits, to nearest even."""
    i32 = of_elements(odd, I32)
    bits = builder.bitcast(odd, i32)
    last = builder.and_(builder.lshr(bits, every(i32, 16)), every(i32, 1))
    nearest = builder.add(builder.add(bits, every(i32, 0x7FFF)), last)
    # The carry of a NaN with all bits set would make it a zero.
    nan = builder.fcmp_unordered("uno", odd, odd)
    nearest = builder.select(nan, every(i32, 0x7FC00000), nearest)
    return builder.trunc(builder.lshr(nearest, every(i32, 16)), of_elements(odd, I16))


def _to_float16(builder: Any, odd: Any) -> Any:
    """Round float32 to float16 bits, to nearest even, where no instruction does it."""
    i32 = of_elements(odd, I32)
    bits = builder.bitcast(odd, i32)
    sign = builder.and_(builder.lshr(bits, every(i32, 16)), every(i32, 0x8000))
    size = builder.and_(bits, every(i32, 0x7FFFFFFF))
    # Normal results: the exponent less 127 - 15; the carry rounds.
    last = builder.and_(builder.lshr(size, every(i32, 13)), every(i32, 1))
    carried = builder.add(builder.sub(size, every(i32, (112 << 23) - 0xFFF)), last)
    result = builder.lshr(carried, every(i32, 13))
    # Subnormal results: adding 0.5, whose ulp is 2**-24, rounds to their grid.
    half = builder.fadd(builder.bitcast(size, odd.type), every(odd.type, 0.5))
    tiny = builder.sub(builder.bitcast(half, i32), every(i32, 0x3F000000))
    below = builder.icmp_unsigned("<", size, every(i32, 113 << 23))
    result = builder.select(below, tiny, result)
    # From the midpoint between the largest, 65504, and 65536 on.
    above = builder.icmp_unsigned(">=", size, every(i32, 0x477FF000))
    result = builder.select(above, every(i32, 0x7C00), result)
    nan = builder.icmp_unsigned(">", size, every(i32, 0x7F800000))
    result = builder.select(nan, every(i32, 0x7E00), result)
    return builder.trunc(builder.or_(result, sign), of_elements(odd, I16))
