"""
What Numba lacks: pointers, 16-bit floats, fused multiply-add, stores past the caches.

Compiled functions here take pointers, not arrays: an array argument costs two atomic reference
counts per call, which halved the speed of rows of 64 elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

# Bytes of a cache line, on x86-64 and most of arm64.
LINE = 64

ARCHITECTURE = llvm.get_process_triple().split("-")[0]

# Without these instructions, which processors have since 2013, LLVM calls a library function that need
# not exist: float16 goes to the reference. What counts is the
# processor that Numba compiles for: NUMBA_CPU_FEATURES may leave out what this one has.
HALF_IN_HARDWARE = "+f16c" in cpu_target.target_context.codegen().magic_tuple()[
    2
] or ARCHITECTURE in ("aarch64", "arm64")

# Bits of precision of the narrow types.
_DIGITS = {types.uint16: 8, types.int16: 11}

# Of functions that others call, never Python: what Python and C would call is a tenth of the time to compile.
within = functools.partial(
    njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
inner, inlined = within(), within(forceinline=True)
# Of a few lines: what Numba puts in place of a call before it compiles anything, in half the time.
pasted = within(inline="always")


def named(function: Any, *variant: Any) -> Any:
    """
    Give a function that is made more than once a name that no other one has.

    Machine code is linked by module, name, types and a number that counts what the process has
    compiled: of two functions of one name, from the caches of two processes, the one loaded first
    would take the place of the other.
    """
    function.__name__ = "_".join(map(str, (function.__name__, *variant)))
    function.__qualname__ = function.__name__
    return function


def emit(result: Any, *kinds: Any) -> Callable[[Any], Any]:
    """Make an intrinsic, of these types, of a function of the builder and the arguments."""

    def make(function: Any) -> Any:
        # Numba takes the names of the arguments from `function`.
        @intrinsic
        @functools.wraps(function)
        def emitted(_typing: Any, *_given: Any) -> Any:
            def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
                made = function(builder, *args)
                return context.get_dummy_value() if result is types.none else made

            return result(*kinds), generate

        return emitted

    return make


# ---- pointers ----


@intrinsic
def address(_typing: Any, p: Any) -> Any:
    """Return the address that `p` points to."""
    return types.intp(p), lambda _context, builder, _sig, args: builder.ptrtoint(args[0], _I64)


@intrinsic
def pointer_at(_typing: Any, number: Any, dtype: Any) -> Any:
    """Return the address `number` as a pointer to elements of `dtype`."""
    kind = types.CPointer(dtype.dtype)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return kind(types.intp, dtype), generate


@intrinsic
def further(_typing: Any, p: Any, count: Any) -> Any:
    """Return the pointer `count` bytes on."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        bytes_ = builder.bitcast(args[0], _I8.as_pointer())
        return builder.bitcast(builder.gep(bytes_, [args[1]]), args[0].type)

    return p(p, types.intp), generate


@intrinsic
def width(_typing: Any, p: Any) -> Any:
    """Return the bytes of an element of what `p` points to."""
    return types.intp(p), lambda _c, _b, sig, _a: _I64(sig.args[0].dtype.bitwidth // 8)


# ---- elements ----


@intrinsic
def get(_typing: Any, p: Any, j: Any) -> Any:
    """Return element j as float64, of float32 or float64, of uint16 that hold bfloat16, of int16 that hold float16."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0].dtype
        # NumPy's arrays need not be aligned; on the processors of today that costs nothing.
        v = builder.load(builder.gep(args[0], [args[1]]), align=1)
        if kind is types.uint16:
            v = builder.bitcast(builder.shl(builder.zext(v, _I32), _I32(16)), _F32)
        if kind is types.int16:
            v = builder.fpext(builder.bitcast(v, _F16), _F32)
        return v if v.type == _F64 else builder.fpext(v, _F64)

    return types.float64(p, types.intp), generate


@intrinsic
def put(_typing: Any, p: Any, j: Any, value: Any) -> Any:
    """Round a float64 once, to nearest even, into element j."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = sig.args[0].dtype
        _store(builder, kind, _to_odd(builder, kind, args[2]), args)
        return context.get_dummy_value()

    return types.none(p, types.intp, types.float64), generate


def _to_odd(builder: Any, kind: Any, v: Any) -> Any:
    """
    Return a float64 that, rounded twice to a 16-bit type, gives what one rounding gives.

    Truncated, with the last kept bit set if anything was lost, a number is never a midpoint of the
    narrow type: it can be rounded again (Boldo and Melquiond 2008). Two bits more than that type has
    are kept: so few pass through float32 exactly, where that matters even among its subnormals.
    """
    if kind not in _DIGITS:
        return v
    bits, mask = builder.bitcast(v, _I64), (1 << (51 - _DIGITS[kind])) - 1
    # Carries into the last kept bit, if anything was lost.
    lost = builder.add(builder.and_(bits, _I64(mask)), _I64(mask))
    odd = builder.and_(builder.or_(bits, lost), _I64(-1 - mask))
    return builder.bitcast(odd, _F64)


def _putting_nearly(rounded: bool) -> Any:
    @intrinsic
    def put_nearly(_typing: Any, p: Any, j: Any, value: Any, doubt: Any) -> Any:
        """
        Do what `put` does by way of float32; return `doubt`, negative if that may have gone wrong.

        Twice rounded is wrong only where the first result is a midpoint for the second: one of 2**16
        values (float16: 2**13), and float16's subnormals, whose midpoints are elsewhere.
        """

        def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _, _, v, doubt = args
            kind = sig.args[0].dtype
            if kind is types.int16 and not rounded:
                # Doubt is frequent, and takes as long as to round once: n = 64, 10 % faster.
                _store(builder, kind, _to_odd(builder, kind, v), args)
                return doubt
            _store(builder, kind, v, args, nearly=True)
            # Of float16, the subnormals have other midpoints; a midpoint of float32 is in doubt only
            # where the value is itself a rounded sum.
            smallest = 113 << 23 if kind is types.int16 else 0
            if kind in _DIGITS:
                bits = builder.bitcast(builder.fptrunc(v, _F32), _I32)
                found = _doubt(builder, bits, 24 - _DIGITS[kind], smallest)
                doubt = builder.or_(doubt, builder.sext(found, _I64) if rounded else found)
            elif kind is types.float32 and rounded:
                doubt = builder.or_(doubt, _doubt(builder, builder.bitcast(v, _I64), 29, 897 << 52))
            return doubt

        # As wide as the bits that are looked at.
        kind = types.int64 if rounded else types.int32
        return kind(p, types.intp, types.float64, kind), generate

    return put_nearly


# Of a value that is itself a rounded sum, a midpoint of float32 is in doubt as well.
put_nearly, put_sum_nearly = _putting_nearly(False), _putting_nearly(True)


def _doubt(builder: Any, bits: Any, cut: int, smallest: int) -> Any:
    """Return an integer that is negative where the bits of a float are those of a midpoint, or of a small one."""
    word = bits.type
    rest = builder.and_(bits, word((1 << cut) - 1))
    doubt = builder.sub(builder.xor(rest, word(1 << (cut - 1))), word(1))
    if smallest:
        size = builder.and_(bits, word((1 << (word.width - 1)) - 1))
        doubt = builder.or_(doubt, builder.sub(size, word(smallest)))
    return doubt


def _store(builder: Any, kind: Any, v: Any, args: Any, nearly: bool = False) -> None:
    """Store a float64 as an element of this type, by way of float32 if that is narrower."""
    if kind is not types.float64:
        v = builder.fptrunc(v, _F32)
    if kind is types.int16:
        v = builder.bitcast(builder.fptrunc(v, _F16), _I16)
    if kind is types.uint16:
        v = _float_to_bfloat(builder, v, nearly)
    builder.store(v, builder.gep(args[0], [args[1]]), align=1)


def _float_to_bfloat(builder: Any, v: Any, nearly: bool) -> Any:
    bits = builder.bitcast(v, _I32)
    if nearly:
        # Midpoints, rounded up here, are in doubt anyway.
        near = builder.add(bits, _I32(0x8000))
    else:
        last = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        near = builder.add(builder.add(bits, _I32(0x7FFF)), last)
    # The carry of a NaN with all bits set would make it a zero.
    near = builder.select(builder.fcmp_unordered("uno", v, v), _I32(0x7FC00000), near)
    return builder.trunc(builder.lshr(near, _I32(16)), _I16)


@emit(types.float64, types.float64, types.float64, types.float64)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c`` of float64, rounded once."""
    return call_llvm(builder, "llvm.fma.f64", _F64, [a, b, c])


@emit(types.uint64, types.float64)
def bits_of(builder: Any, a: Any) -> Any:
    """Return the bits of a float64 as an unsigned integer."""
    return builder.bitcast(a, _I64)


@emit(types.float64, types.int64)
def float_of(builder: Any, bits: Any) -> Any:
    """Return the float64 of these bits."""
    return builder.bitcast(bits, _F64)


# ---- loops ----


@intrinsic
def wide_vectors(_typing: Any) -> Any:
    """
    Vectorize the calling function's loops by 512 bits if the processor can; its pointers never meet.

    LLVM prefers 256 bits, from the days when wider ones slowed processors down (2.7 against
    3.1 * 10^9 elements per second). Without the promise about pointers, it compiles a test and a
    second loop: 5 to 10 % at n up to 128.
    """

    def generate(context: Any, builder: Any, _sig: Any, _args: Any) -> Any:
        # llvmlite knows the names of no attributes with values.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        # The first two are Numba's own: where to put the result, and the exception.
        for arg in builder.function.args[2:]:
            if isinstance(arg.type, ir.PointerType):
                arg.add_attribute("noalias")
        return context.get_dummy_value()

    return types.none(), generate


def call_llvm(builder: Any, name: str, result: Any, args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


# ---- caches ----


@emit(types.none, types.intp)
def _prefetch_line(builder: Any, place: Any) -> None:
    p = builder.inttoptr(place, _I8.as_pointer())
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [p, _I32(0), _I32(2), _I32(1)])


@pasted
def prefetch(p, start, stop, distance):
    """Ask for what lies so many bytes behind elements ``[start, stop)`` to come; no address faults."""
    place = address(p) + distance
    for at in range(place + start * width(p), place + stop * width(p), LINE):
        _prefetch_line(at)


def _copying(kind: Any, align: int, past_caches: bool = False) -> Any:
    @emit(types.none, types.intp, types.intp)
    def copy(builder: Any, to: Any, source: Any) -> None:
        """Copy a number of this kind between addresses."""
        to, source = (builder.inttoptr(place, kind.as_pointer()) for place in (to, source))
        stored = builder.store(builder.load(source, align=align), to, align=align)
        if past_caches:
            stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))

    return copy


_LINE_OF_WORDS = ir.VectorType(_I64, LINE // 8)
_copy_byte, copy_line = _copying(_I8, 1), _copying(_LINE_OF_WORDS, LINE)
stream_line = _copying(_LINE_OF_WORDS, LINE, past_caches=True)


@pasted
def copy_bytes(to, source, count):
    """Copy a few bytes between addresses."""
    for at in range(count):
        _copy_byte(to + at, source + at)


@emit(types.none)
def fence(builder: Any) -> None:
    """Order everything stored so far, lines past the caches included, before what follows."""
    builder.fence("seq_cst")
