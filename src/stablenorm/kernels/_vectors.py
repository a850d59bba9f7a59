"""
Rows of eight float64 lanes as one number: the arithmetic that the CPU kernels are written in.

A `Lanes` value holds eight columns of one, four or eight rows: one LLVM vector. Its operators act
lane by lane, each rounded once, in the order written: nothing here lets the compiler reassociate,
so that error-free transformations stay exact, a row has the same bits whether it is computed
alone or among others, and the bits are the same on every machine, whatever width its registers
have (LLVM splits the vector where they are narrower).

Memory is addressed by pointer, byte offset and byte stride from row to row, so that one compiled
kernel serves every layout whose rows are contiguous, aligned or not. `load` widens to float64,
exactly; `store` rounds once to the type in memory. 16-bit types are handed over as their bits:
uint16 is bfloat16, int16 is float16.

Pointers, not arrays, are passed from function to function: an array argument costs an atomic
reference count each, which tripled the time of rows of 64 elements.
"""

from __future__ import annotations

import operator
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, lower_builtin, register_model, type_callable

WIDTH = 8

_F64, _F32, _F16 = ir.DoubleType(), ir.FloatType(), ir.HalfType()
_I64, _I32, _I16, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_SUFFIX = {_F64: "f64", _F32: "f32", _I16: "i16"}
_IN_MEMORY = {types.float64: _F64, types.float32: _F32, types.int16: _I16, types.uint16: _I16}

# Without these instructions LLVM calls a library function that need not exist.
_HALF_IN_HARDWARE = bool(
    llvm.get_host_cpu_features().get("f16c")
    or llvm.get_process_triple().startswith(("aarch64", "arm64"))
)

# Low bits of a float64 that round-to-odd drops: kept are two more than the narrow type has,
# 8 + 2 and 11 + 2. Not more: so few pass through float32 exactly, where they matter even among
# its subnormals.
_ODD_BFLOAT16, _ODD_FLOAT16 = 53 - 10, 53 - 13


class Lanes(types.Type):
    """The Numba type of eight columns of `rows` rows, in float64."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        super().__init__(name=f"lanes[{rows}]")


@register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _vector(_F64, fe_type.rows))


def _vector(element: Any, rows: int = 1) -> Any:
    return ir.VectorType(element, WIDTH * rows)


def _every(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)


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


def _call(builder: Any, name: str, result: Any, args: Any) -> Any:
    """Call an LLVM intrinsic function."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _shuffle(builder: Any, v: Any, lanes: Any) -> Any:
    chosen = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), chosen)


def _splat(builder: Any, scalar: Any, count: int) -> Any:
    one = ir.Constant(ir.VectorType(scalar.type, 1), ir.Undefined)
    return _shuffle(builder, builder.insert_element(one, scalar, ir.Constant(_I32, 0)), [0] * count)


def _concatenated(builder: Any, parts: list[Any]) -> Any:
    """Join vectors, pair by pair."""
    while len(parts) > 1:
        width = parts[0].type.count
        both = ir.Constant(ir.VectorType(_I32, 2 * width), list(range(2 * width)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(one, other, both) for one, other in pairs]
    return parts[0]


def _row(builder: Any, v: Any, row: int) -> Any:
    return _shuffle(builder, v, list(range(WIDTH * row, WIDTH * (row + 1))))


# ---- constants and arithmetic ----


def _zeros(rows: int) -> Any:
    @intrinsic
    def zeros(_typing: Any) -> Any:
        def generate(_context: Any, _builder: Any, sig: Any, _args: Any) -> Any:
            return _every(_vector(_F64, sig.return_type.rows), 0.0)

        return Lanes(rows)(), generate

    return zeros


# Zero in all lanes, of so many rows. Other functions take such a value for its type.
ZEROS = {rows: _zeros(rows) for rows in (1, 4, 8)}


@intrinsic
def splat(_typing: Any, value: Any, like: Any) -> Any:
    """Return float64 `value` in all lanes of the rows of `like`."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], WIDTH * sig.return_type.rows)

    return like(types.float64, like), generate


@intrinsic
def of_rows(_typing: Any, numbers: Any, like: Any) -> Any:
    """Return, in all lanes of each row, its own of the float64 `numbers`."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts = []
        for row in range(sig.return_type.rows):
            at = builder.gep(args[0], [ir.Constant(_I32, row)])
            parts.append(_splat(builder, builder.load(at, align=8), WIDTH))
        return _concatenated(builder, parts)

    return like(numbers, like), generate


@intrinsic
def in_rows(_typing: Any, v: Any, like: Any) -> Any:
    """Return the eight lanes `v` in each row of `like`."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _shuffle(builder, args[0], list(range(WIDTH)) * sig.return_type.rows)

    return like(v, like), generate


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, rounded once."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        kind = args[0].type
        return _call(builder, f"llvm.fma.v{kind.count}f64", kind, args)

    return a(a, a, a), generate


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
        return _call(builder, f"llvm.fabs.v{kind.count}f64", kind, args)

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
        nonzero = builder.fcmp_ordered("!=", b, _every(b.type, 0.0))
        return builder.select(builder.and_(less, nonzero), b, a)

    return a(a, a), generate


@intrinsic
def square_root(_typing: Any, v: Any) -> Any:
    """Return the square root of each lane."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        kind = args[0].type
        return _call(builder, f"llvm.sqrt.v{kind.count}f64", kind, args)

    return v(v), generate


@intrinsic
def row_totals(_typing: Any, v: Any, to: Any) -> Any:
    """Write, for each row, the sum of its lanes, by halves, to the float64 from `to` on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for row in range(sig.args[0].rows):
            part = _row(builder, args[0], row)
            width = WIDTH
            while width > 1:
                width //= 2
                low, high = list(range(width)), list(range(width, 2 * width))
                part = builder.fadd(_shuffle(builder, part, low), _shuffle(builder, part, high))
            total = builder.extract_element(part, ir.Constant(_I32, 0))
            builder.store(total, builder.gep(args[1], [ir.Constant(_I32, row)]), align=8)
        return context.get_dummy_value()

    return types.none(v, to), generate


def _swapping(distance: int) -> Any:
    @intrinsic
    def swapped(_typing: Any, v: Any) -> Any:
        def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
            count = WIDTH * sig.args[0].rows
            return _shuffle(builder, args[0], [lane ^ distance for lane in range(count)])

        return v(v), generate

    return swapped


# Lanes exchanged over a distance of 4, 2, 1: added up, all lanes of a row hold their sum.
SWAPPED = {distance: _swapping(distance) for distance in (4, 2, 1)}


@intrinsic
def first_lane(_typing: Any, v: Any) -> Any:
    """Return the first lane as a float64."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(_I32, 0))

    return types.float64(v), generate


@intrinsic
def sum_rows(_typing: Any, v: Any) -> Any:
    """Return the eight lanes summed over the rows, by pairs."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts = [_row(builder, args[0], row) for row in range(sig.args[0].rows)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [builder.fadd(one, other) for one, other in pairs]
        return parts[0]

    return Lanes(1)(v), generate


@intrinsic
def keep(_typing: Any, v: Any, count: Any) -> Any:
    """Return `v` with zeros from column `count` on."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        mask = _shuffle(builder, _mask(builder, args[1]), list(range(WIDTH)) * sig.args[0].rows)
        return builder.select(mask, args[0], _every(args[0].type, 0.0))

    return v(v, types.intp), generate


def _mask(builder: Any, count: Any) -> Any:
    columns = ir.Constant(_vector(_I64), list(range(WIDTH)))
    return builder.icmp_signed("<", columns, _splat(builder, count, WIDTH))


# ---- memory ----


@intrinsic
def pointer(_typing: Any, array: Any) -> Any:
    """
    Return where `array` begins.

    It does not keep `array` alive, and Numba frees an array after the last use of its name: take
    the pointer anew wherever the memory is used.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.make_array(sig.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def address(_typing: Any, at: Any) -> Any:
    """Return a pointer as an integer."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], _I64)

    return types.intp(at), generate


@intrinsic
def pointer_at(_typing: Any, number: Any, like: Any) -> Any:
    """Return the address `number` as a pointer like `like`."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], args[1].type)

    return like(types.intp, like), generate


@intrinsic
def itemsize(_typing: Any, at: Any) -> Any:
    """Return the bytes of what `at` points to."""

    def generate(_context: Any, _builder: Any, sig: Any, _args: Any) -> Any:
        return ir.Constant(_I64, sig.args[0].dtype.bitwidth // 8)

    return types.intp(at), generate


def _places(builder: Any, at: Any, offset: Any, stride: Any, kind: Any, rows: int) -> Any:
    """Yield a pointer to a `kind` for each row."""
    base = builder.bitcast(at, _I8.as_pointer())
    for row in range(rows):
        if row:
            offset = builder.add(offset, stride)
        yield builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


@intrinsic
def load(_typing: Any, at: Any, offset: Any, stride: Any, like: Any) -> Any:
    """Return the eight elements from `offset` on, of each row."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.return_type.rows
        places = _places(builder, *args[:3], _vector(_IN_MEMORY[dtype]), rows)
        parts = [_widened(builder, dtype, builder.load(place, align=1)) for place in places]
        return _concatenated(builder, parts)

    return like(at, types.intp, types.intp, like), generate


@intrinsic
def load_some(_typing: Any, at: Any, offset: Any, stride: Any, count: Any, like: Any) -> Any:
    """Return the first `count` elements from `offset` on, and zeros, of each row."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.return_type.rows
        kind = _vector(_IN_MEMORY[dtype])
        name = f"llvm.masked.load.v{WIDTH}{_SUFFIX[kind.element]}.p0"
        mask, nothing = _mask(builder, args[3]), ir.Constant(kind, None)
        parts = [
            _call(builder, name, kind, [place, ir.Constant(_I32, 1), mask, nothing])
            for place in _places(builder, *args[:3], kind, rows)
        ]
        return _concatenated(builder, [_widened(builder, dtype, part) for part in parts])

    return like(at, types.intp, types.intp, types.intp, like), generate


@intrinsic
def store(_typing: Any, at: Any, offset: Any, stride: Any, v: Any) -> Any:
    """Write eight elements of each row, rounded once to the type in memory."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.args[3].rows
        kind = _vector(_IN_MEMORY[dtype])
        rounded = _rounded(builder, dtype, args[3])
        for row, place in enumerate(_places(builder, *args[:3], kind, rows)):
            builder.store(_row(builder, rounded, row), place, align=1)
        return context.get_dummy_value()

    return types.none(at, types.intp, types.intp, v), generate


@intrinsic
def stream(_typing: Any, at: Any, offset: Any, stride: Any, v: Any) -> Any:
    """Do what `store` does, past the caches; the places must be multiples of eight elements."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.args[3].rows
        kind = _vector(_IN_MEMORY[dtype])
        once = builder.module.add_metadata([ir.Constant(_I32, 1)])
        rounded = _rounded(builder, dtype, args[3])
        for row, place in enumerate(_places(builder, *args[:3], kind, rows)):
            stored = builder.store(_row(builder, rounded, row), place, align=dtype.bitwidth)
            stored.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.none(at, types.intp, types.intp, v), generate


@intrinsic
def store_some(_typing: Any, at: Any, offset: Any, stride: Any, count: Any, v: Any) -> Any:
    """Write the first `count` of the eight elements of each row."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.args[4].rows
        kind = _vector(_IN_MEMORY[dtype])
        name = f"llvm.masked.store.v{WIDTH}{_SUFFIX[kind.element]}.p0"
        mask = _mask(builder, args[3])
        rounded = _rounded(builder, dtype, args[4])
        for row, place in enumerate(_places(builder, *args[:3], kind, rows)):
            part = _row(builder, rounded, row)
            _call(builder, name, ir.VoidType(), [part, place, ir.Constant(_I32, 1), mask])
        return context.get_dummy_value()

    return types.none(at, types.intp, types.intp, types.intp, v), generate


def _prefetching(name: str, writing: int, summary: str) -> Any:
    @intrinsic
    def prefetch(_typing: Any, at: Any, offset: Any, stride: Any, like: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            # Into all caches, from the data side.
            kind = [ir.Constant(_I32, value) for value in (writing, 3, 1)]
            for place in _places(builder, *args[:3], _I8, sig.args[3].rows):
                _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *kind])
            return context.get_dummy_value()

        return types.none(at, types.intp, types.intp, like), generate

    prefetch.__name__, prefetch.__doc__ = name, summary
    return prefetch


prefetch = _prefetching(
    "prefetch", 0, "Ask for the line at `offset` of each row, wherever that is; never faults."
)
prefetch_to_write = _prefetching(
    "prefetch_to_write", 1, "Ask for the line at `offset` of each row, to write into it."
)


@intrinsic
def load_column(_typing: Any, at: Any, offset: Any, stride: Any, like: Any) -> Any:
    """Return the one element at `offset` of eight rows, `stride` apart, a row a lane."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        element = _IN_MEMORY[dtype]
        v = ir.Constant(_vector(element), ir.Undefined)
        for lane, place in enumerate(_places(builder, *args[:3], element, WIDTH)):
            v = builder.insert_element(v, builder.load(place, align=1), ir.Constant(_I32, lane))
        return _widened(builder, dtype, v)

    return like(at, types.intp, types.intp, like), generate


@intrinsic
def store_column(_typing: Any, at: Any, offset: Any, stride: Any, v: Any) -> Any:
    """Write a lane a row, `stride` apart, each rounded once."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        rounded = _rounded(builder, dtype, args[3])
        for lane, place in enumerate(_places(builder, *args[:3], _IN_MEMORY[dtype], WIDTH)):
            element = builder.extract_element(rounded, ir.Constant(_I32, lane))
            builder.store(element, place, align=1)
        return context.get_dummy_value()

    return types.none(at, types.intp, types.intp, v), generate


@intrinsic
def load_everywhere(_typing: Any, at: Any, offset: Any, like: Any) -> Any:
    """Return the one element at `offset` in all lanes of the rows of `like`."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        (place,) = _places(builder, *args[:2], _I64(0), _IN_MEMORY[dtype], 1)
        narrow = _splat(builder, builder.load(place, align=1), WIDTH)
        return _concatenated(builder, [_widened(builder, dtype, narrow)] * sig.return_type.rows)

    return like(at, types.intp, like), generate


def _loading(columns: int) -> Any:
    @intrinsic
    def load_columns(_typing: Any, at: Any, offset: Any, stride: Any, to: Any, apart: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            dtype = sig.args[0].dtype
            kind = ir.VectorType(_IN_MEMORY[dtype], columns)
            places = _places(builder, *args[:3], kind, WIDTH)
            rows = _concatenated(builder, [builder.load(place, align=1) for place in places])
            targets = _places(builder, args[3], _I64(0), args[4], _vector(_F64), columns)
            for col, target in enumerate(targets):
                column = _shuffle(builder, rows, list(range(col, columns * WIDTH, columns)))
                builder.store(_widened(builder, dtype, column), target, align=1)
            return context.get_dummy_value()

        return types.none(at, types.intp, types.intp, to, types.intp), generate

    return load_columns


def _storing(columns: int) -> Any:
    @intrinsic
    def store_columns(
        _typing: Any, at: Any, offset: Any, stride: Any, source: Any, apart: Any
    ) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            element = _IN_MEMORY[sig.args[0].dtype]
            sources = _places(builder, args[3], _I64(0), args[4], _vector(element), columns)
            loaded = [builder.load(place, align=1) for place in sources]
            together = _concatenated(builder, loaded)
            kind = ir.VectorType(element, columns)
            for row, place in enumerate(_places(builder, *args[:3], kind, WIDTH)):
                elements = _shuffle(builder, together, list(range(row, columns * WIDTH, WIDTH)))
                builder.store(elements, place, align=1)
            return context.get_dummy_value()

        return types.none(at, types.intp, types.intp, at, types.intp), generate

    return store_columns


# By number of columns. Load: of eight rows, `stride` apart, read so many elements from `offset`
# on; write them as columns, `apart`, of eight float64. Store: read so many columns, `apart`, of
# eight elements of the type of `at`; write them into eight rows from `offset` on.
LOAD_COLUMNS = {columns: _loading(columns) for columns in (2, 4)}
STORE_COLUMNS = {columns: _storing(columns) for columns in (2, 4)}


# ---- from and to the narrow types: one row of eight at a time ----


def _widened(builder: Any, dtype: Any, v: Any) -> Any:
    if dtype is types.float64:
        return v
    if dtype is types.float32:
        return builder.fpext(v, _vector(_F64))
    if dtype is types.uint16:
        bits = builder.shl(builder.zext(v, _vector(_I32)), _every(_vector(_I32), 16))
        return builder.fpext(builder.bitcast(bits, _vector(_F32)), _vector(_F64))
    if _HALF_IN_HARDWARE:
        half = builder.bitcast(v, _vector(_F16))
        return builder.fpext(builder.fpext(half, _vector(_F32)), _vector(_F64))
    return _half_widened(builder, v)


def _half_widened(builder: Any, v: Any) -> Any:
    """Widen float16 bits by shifting them into a float32, 2**112 too small, subnormals as well."""
    i32, i64 = _vector(_I32), _vector(_I64)
    wide = builder.zext(v, i32)
    rest = builder.shl(builder.and_(wide, _every(i32, 0x7FFF)), _every(i32, 13))
    small = builder.fpext(builder.bitcast(rest, _vector(_F32)), _vector(_F64))
    scaled = builder.fmul(small, _every(_vector(_F64), 2.0**112))
    special = builder.icmp_unsigned(">=", rest, _every(i32, 0x7C00 << 13))
    infinite = builder.bitcast(builder.or_(rest, _every(i32, 0x7F800000)), _vector(_F32))
    value = builder.select(special, builder.fpext(infinite, _vector(_F64)), scaled)
    sign = builder.shl(builder.zext(builder.and_(wide, _every(i32, 0x8000)), i64), _every(i64, 48))
    return builder.bitcast(builder.or_(builder.bitcast(value, i64), sign), _vector(_F64))


def _rounded(builder: Any, dtype: Any, v: Any) -> Any:
    """Round float64 lanes once. All rows together: 16 lanes of 32 bits fill an AVX-512 register."""
    if dtype is types.float64:
        return v
    single = _like(v, _F32)
    if dtype is types.float32:
        return builder.fptrunc(v, single)
    if dtype is types.uint16:
        return _to_bfloat16(builder, builder.fptrunc(_to_odd(builder, v, _ODD_BFLOAT16), single))
    odd = builder.fptrunc(_to_odd(builder, v, _ODD_FLOAT16), single)
    if _HALF_IN_HARDWARE:
        return builder.bitcast(builder.fptrunc(odd, _like(v, _F16)), _like(v, _I16))
    return _to_float16(builder, odd)


def _like(v: Any, element: Any) -> Any:
    return ir.VectorType(element, v.type.count)


def _to_odd(builder: Any, v: Any, dropped: int) -> Any:
    """Truncate, and set the last kept bit if anything was lost: no midpoint is left to round."""
    i64 = _like(v, _I64)
    mask = (1 << dropped) - 1
    bits = builder.bitcast(v, i64)
    lost = builder.icmp_unsigned("!=", builder.and_(bits, _every(i64, mask)), _every(i64, 0))
    kept = builder.and_(bits, _every(i64, -1 - mask))
    odd = builder.select(lost, builder.or_(kept, _every(i64, 1 << dropped)), kept)
    return builder.bitcast(odd, v.type)


def _to_bfloat16(builder: Any, odd: Any) -> Any:
    """Round float32 to bfloat16 bits, to nearest even."""
    i32 = _like(odd, _I32)
    bits = builder.bitcast(odd, i32)
    last = builder.and_(builder.lshr(bits, _every(i32, 16)), _every(i32, 1))
    nearest = builder.add(builder.add(bits, _every(i32, 0x7FFF)), last)
    # The carry of a NaN with all bits set would make it a zero.
    nan = builder.fcmp_unordered("uno", odd, odd)
    nearest = builder.select(nan, _every(i32, 0x7FC00000), nearest)
    return builder.trunc(builder.lshr(nearest, _every(i32, 16)), _like(odd, _I16))


def _to_float16(builder: Any, odd: Any) -> Any:
    """Round float32 to float16 bits, to nearest even, where no instruction does it."""
    i32 = _like(odd, _I32)
    bits = builder.bitcast(odd, i32)
    sign = builder.and_(builder.lshr(bits, _every(i32, 16)), _every(i32, 0x8000))
    size = builder.and_(bits, _every(i32, 0x7FFFFFFF))
    # Normal results: the exponent less 127 - 15; the carry rounds.
    last = builder.and_(builder.lshr(size, _every(i32, 13)), _every(i32, 1))
    carried = builder.add(builder.sub(size, _every(i32, (112 << 23) - 0xFFF)), last)
    result = builder.lshr(carried, _every(i32, 13))
    # Subnormal results: adding 0.5, whose ulp is 2**-24, rounds to their grid.
    half = builder.fadd(builder.bitcast(size, odd.type), _every(odd.type, 0.5))
    tiny = builder.sub(builder.bitcast(half, i32), _every(i32, 0x3F000000))
    below = builder.icmp_unsigned("<", size, _every(i32, 113 << 23))
    result = builder.select(below, tiny, result)
    # From the midpoint between the largest, 65504, and 65536 on.
    above = builder.icmp_unsigned(">=", size, _every(i32, 0x477FF000))
    result = builder.select(above, _every(i32, 0x7C00), result)
    nan = builder.icmp_unsigned(">", size, _every(i32, 0x7F800000))
    result = builder.select(nan, _every(i32, 0x7E00), result)
    return builder.trunc(builder.or_(result, sign), _like(odd, _I16))
