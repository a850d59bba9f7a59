"""From and to the types in memory: widened exactly, rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from stablenorm.kernels._ir import (
    F16,
    F32,
    F64,
    I1,
    I16,
    I32,
    I64,
    WIDTH,
    call,
    concatenated,
    every,
    of_elements,
    shuffle,
    vector,
)

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
        return builder.fpext(_bfloat16_widened(builder, v), vector(F64))
    if HALF_IN_HARDWARE:
        half = builder.bitcast(v, vector(F16))
        return builder.fpext(builder.fpext(half, vector(F32)), vector(F64))
    return _half_widened(builder, v)


def _bfloat16_widened(builder: Any, v: Any) -> Any:
    """
    Return bfloat16 bits as float32: zeros below each.

    Both halves of a register get all eight, which a load does in passing, and keep four. To extend
    and to shift are two operations of the units that convert to float64, too, instead of one: the
    forward took 1.07 times as long (AMD EPYC 9005, n = 1024, in cache).
    """
    twice = shuffle(builder, v, 2 * list(range(WIDTH)))
    zeros, none = ir.Constant(twice.type, None), 2 * WIDTH
    kept = (*range(WIDTH // 2), *range(WIDTH + WIDTH // 2, 2 * WIDTH))
    lanes = [lane for word in kept for lane in (none, word)]
    chosen = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.bitcast(builder.shuffle_vector(twice, zeros, chosen), vector(F32))


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
    nearest = builder.fptrunc(v, of_elements(v, F32))
    if dtype is types.float32:
        return nearest
    return (_to_bfloat16 if dtype is types.uint16 else _to_float16)(builder, v, nearest)


# To 16 bits by way of float32: rounding twice differs from rounding once only where the first
# rounding ends on a midpoint of the second, which of bfloat16 one number in 2**16 does. A test of
# all lanes finds the vectors that may have one; only these are rounded to odd first. (Where all
# are such, bfloat16 takes the time it took when all were so rounded, float16 1.1 times that.)


def _to_bfloat16(builder: Any, v: Any, nearest: Any) -> Any:
    """Round float64 to bfloat16 bits, to nearest even; `nearest` is `v` in float32."""
    i32 = of_elements(v, I32)
    # Off the midpoints, adding a half and cutting rounds; a midpoint it leaves with 16 zeros.
    raised = builder.add(builder.bitcast(nearest, i32), every(i32, 0x8000))
    midpoint = _ends_in_zeros(builder, _smaller_words(builder, *_ends(builder, raised)), 16)
    # The carry of a NaN with all bits set would make it a zero.
    nan = builder.fcmp_unordered("uno", *_ends(builder, nearest))
    doubts = [midpoint, nan]
    raised = _unless(builder, doubts, raised, lambda: _raised_once(builder, v))
    words = [
        builder.trunc(builder.lshr(part, every(part.type, 16)), of_elements(part, I16))
        for part in _halves(builder, raised)
    ]
    return concatenated(builder, words)


def _to_float16(builder: Any, v: Any, nearest: Any) -> Any:
    """Round float64 to float16 bits, to nearest even; `nearest` is `v` in float32."""
    # A midpoint ends in 12 zeros at least, the more the smaller it is, among subnormals. So does
    # a float16 itself: 0, say.
    bits = builder.bitcast(nearest, of_elements(v, I32))
    doubts = [_ends_in_zeros(builder, part, 12) for part in _halves(builder, bits)]
    single = _unless(builder, doubts, nearest, lambda: _odd_single(builder, v, _ODD_FLOAT16))
    if HALF_IN_HARDWARE:
        return builder.bitcast(builder.fptrunc(single, of_elements(v, F16)), of_elements(v, I16))
    return _single_to_float16(builder, single)


def _halves(builder: Any, v: Any) -> list[Any]:
    """Return the lanes of half of the rows each: what a register holds; or those of the one row."""
    size = max(v.type.count // 2, WIDTH)
    starts = range(0, v.type.count, size)
    return [shuffle(builder, v, list(range(start, start + size))) for start in starts]


def _ends(builder: Any, v: Any) -> Any:
    """Return the first and the last of the halves."""
    halves = _halves(builder, v)
    return halves[0], halves[-1]


def _smaller_words(builder: Any, a: Any, b: Any) -> Any:
    """Return the smaller one of each two 16 bits: one test, instead of two, finds a zero."""
    words = ir.VectorType(I16, 2 * a.type.count)
    parts = [builder.bitcast(part, words) for part in (a, b)]
    return builder.bitcast(call(builder, f"llvm.umin.v{words.count}i16", words, parts), a.type)


def _ends_in_zeros(builder: Any, bits: Any, count: int) -> Any:
    low = builder.and_(bits, every(bits.type, (1 << count) - 1))
    return builder.icmp_unsigned("==", low, every(bits.type, 0))


def _unless(builder: Any, doubts: list[Any], usual: Any, exact: Callable[[], Any]) -> Any:
    """Return `usual`, or, if a lane of `doubts` is set, what `exact` generates."""
    doubt = functools.reduce(builder.or_, doubts)
    before = builder.block
    name = f"llvm.vector.reduce.or.v{doubt.type.count}i1"
    with builder.if_then(call(builder, name, I1, [doubt]), likely=False):
        rare, after = exact(), builder.block
    chosen = builder.phi(usual.type)
    chosen.add_incoming(usual, before)
    chosen.add_incoming(rare, after)
    return chosen


def _odd_single(builder: Any, v: Any, dropped: int) -> Any:
    """Return in float32 what rounds to 16 bits as `v` does."""
    return builder.fptrunc(_to_odd(builder, v, dropped), of_elements(v, F32))


def _to_odd(builder: Any, v: Any, dropped: int) -> Any:
    """Truncate, and set the last kept bit if anything was lost: no midpoint is left to round."""
    i64 = of_elements(v, I64)
    mask = (1 << dropped) - 1
    bits = builder.bitcast(v, i64)
    lost = builder.icmp_unsigned("!=", builder.and_(bits, every(i64, mask)), every(i64, 0))
    kept = builder.and_(bits, every(i64, -1 - mask))
    odd = builder.select(lost, builder.or_(kept, every(i64, 1 << dropped)), kept)
    return builder.bitcast(odd, v.type)


def _raised_once(builder: Any, v: Any) -> Any:
    """Return float32 bits of which the upper 16 are `v`, rounded to nearest even."""
    odd = _odd_single(builder, v, _ODD_BFLOAT16)
    i32 = of_elements(v, I32)
    bits = builder.bitcast(odd, i32)
    last = builder.and_(builder.lshr(bits, every(i32, 16)), every(i32, 1))
    nearest = builder.add(builder.add(bits, every(i32, 0x7FFF)), last)
    nan = builder.fcmp_unordered("uno", odd, odd)
    return builder.select(nan, every(i32, 0x7FC00000), nearest)


def _single_to_float16(builder: Any, odd: Any) -> Any:
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
