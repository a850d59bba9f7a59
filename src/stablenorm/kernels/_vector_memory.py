"""
Vectors of lanes from and to memory.

Memory is addressed by pointer, byte offset and byte stride from row to row, so that one compiled
kernel serves every layout whose rows are contiguous, aligned or not. `load` widens to float64,
exactly; `store` rounds once to the type in memory. 16-bit types are handed over as their bits:
uint16 is bfloat16, int16 is float16.

Pointers, not arrays, are passed from function to function: an array argument costs an atomic
reference count each, which tripled the time of rows of 64 elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stablenorm.kernels._formats import IN_MEMORY, rounded, widened
from stablenorm.kernels._ir import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    WIDTH,
    call,
    concatenated,
    first_columns,
    row_of,
    shuffle,
    splatted,
    vector,
)

_SUFFIX = {F64: "f64", F32: "f32", I16: "i16"}


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
        return builder.ptrtoint(args[0], I64)

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
        return ir.Constant(I64, sig.args[0].dtype.bitwidth // 8)

    return types.intp(at), generate


def _places(builder: Any, at: Any, offset: Any, stride: Any, kind: Any, rows: int) -> Any:
    """Yield a pointer to a `kind` for each row."""
    base = builder.bitcast(at, I8.as_pointer())
    for row in range(rows):
        if row:
            offset = builder.add(offset, stride)
        yield builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


@intrinsic
def load(_typing: Any, at: Any, offset: Any, stride: Any, like: Any) -> Any:
    """Return the eight elements from `offset` on, of each row."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.return_type.rows
        places = _places(builder, *args[:3], vector(IN_MEMORY[dtype]), rows)
        parts = [widened(builder, dtype, builder.load(place, align=1)) for place in places]
        return concatenated(builder, parts)

    return like(at, types.intp, types.intp, like), generate


@intrinsic
def load_some(_typing: Any, at: Any, offset: Any, stride: Any, count: Any, like: Any) -> Any:
    """Return the first `count` elements from `offset` on, and zeros, of each row."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.return_type.rows
        kind = vector(IN_MEMORY[dtype])
        name = f"llvm.masked.load.v{WIDTH}{_SUFFIX[kind.element]}.p0"
        mask, nothing = first_columns(builder, args[3]), ir.Constant(kind, None)
        parts = [
            call(builder, name, kind, [place, ir.Constant(I32, 1), mask, nothing])
            for place in _places(builder, *args[:3], kind, rows)
        ]
        return concatenated(builder, [widened(builder, dtype, part) for part in parts])

    return like(at, types.intp, types.intp, types.intp, like), generate


@intrinsic
def store(_typing: Any, at: Any, offset: Any, stride: Any, v: Any) -> Any:
    """Write eight elements of each row, rounded once to the type in memory."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.args[3].rows
        kind = vector(IN_MEMORY[dtype])
        narrow = rounded(builder, dtype, args[3])
        for row, place in enumerate(_places(builder, *args[:3], kind, rows)):
            builder.store(row_of(builder, narrow, row), place, align=1)
        return context.get_dummy_value()

    return types.none(at, types.intp, types.intp, v), generate


@intrinsic
def stream(_typing: Any, at: Any, offset: Any, stride: Any, v: Any) -> Any:
    """Do what `store` does, past the caches; the places must be multiples of eight elements."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.args[3].rows
        kind = vector(IN_MEMORY[dtype])
        once = builder.module.add_metadata([ir.Constant(I32, 1)])
        narrow = rounded(builder, dtype, args[3])
        for row, place in enumerate(_places(builder, *args[:3], kind, rows)):
            stored = builder.store(row_of(builder, narrow, row), place, align=dtype.bitwidth)
            stored.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.none(at, types.intp, types.intp, v), generate


@intrinsic
def store_some(_typing: Any, at: Any, offset: Any, stride: Any, count: Any, v: Any) -> Any:
    """Write the first `count` of the eight elements of each row."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype, rows = sig.args[0].dtype, sig.args[4].rows
        kind = vector(IN_MEMORY[dtype])
        name = f"llvm.masked.store.v{WIDTH}{_SUFFIX[kind.element]}.p0"
        mask = first_columns(builder, args[3])
        narrow = rounded(builder, dtype, args[4])
        for row, place in enumerate(_places(builder, *args[:3], kind, rows)):
            part = row_of(builder, narrow, row)
            call(builder, name, ir.VoidType(), [part, place, ir.Constant(I32, 1), mask])
        return context.get_dummy_value()

    return types.none(at, types.intp, types.intp, types.intp, v), generate


def _prefetching(name: str, writing: int, summary: str) -> Any:
    @intrinsic
    def prefetch(_typing: Any, at: Any, offset: Any, stride: Any, like: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            # Into all caches, from the data side.
            kind = [ir.Constant(I32, value) for value in (writing, 3, 1)]
            for place in _places(builder, *args[:3], I8, sig.args[3].rows):
                call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *kind])
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
        element = IN_MEMORY[dtype]
        v = ir.Constant(vector(element), ir.Undefined)
        for lane, place in enumerate(_places(builder, *args[:3], element, WIDTH)):
            v = builder.insert_element(v, builder.load(place, align=1), ir.Constant(I32, lane))
        return widened(builder, dtype, v)

    return like(at, types.intp, types.intp, like), generate


@intrinsic
def store_column(_typing: Any, at: Any, offset: Any, stride: Any, v: Any) -> Any:
    """Write a lane a row, `stride` apart, each rounded once."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        narrow = rounded(builder, dtype, args[3])
        for lane, place in enumerate(_places(builder, *args[:3], IN_MEMORY[dtype], WIDTH)):
            element = builder.extract_element(narrow, ir.Constant(I32, lane))
            builder.store(element, place, align=1)
        return context.get_dummy_value()

    return types.none(at, types.intp, types.intp, v), generate


@intrinsic
def load_everywhere(_typing: Any, at: Any, offset: Any, like: Any) -> Any:
    """Return the one element at `offset` in all lanes of the rows of `like`."""

    def generate(_context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        (place,) = _places(builder, *args[:2], I64(0), IN_MEMORY[dtype], 1)
        narrow = splatted(builder, builder.load(place, align=1), WIDTH)
        return concatenated(builder, [widened(builder, dtype, narrow)] * sig.return_type.rows)

    return like(at, types.intp, like), generate


def _loading(columns: int) -> Any:
    @intrinsic
    def load_columns(_typing: Any, at: Any, offset: Any, stride: Any, to: Any, apart: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            dtype = sig.args[0].dtype
            kind = ir.VectorType(IN_MEMORY[dtype], columns)
            places = _places(builder, *args[:3], kind, WIDTH)
            rows = concatenated(builder, [builder.load(place, align=1) for place in places])
            targets = _places(builder, args[3], I64(0), args[4], vector(F64), columns)
            for col, target in enumerate(targets):
                column = shuffle(builder, rows, list(range(col, columns * WIDTH, columns)))
                builder.store(widened(builder, dtype, column), target, align=1)
            return context.get_dummy_value()

        return types.none(at, types.intp, types.intp, to, types.intp), generate

    return load_columns


def _storing(columns: int) -> Any:
    @intrinsic
    def store_columns(
        _typing: Any, at: Any, offset: Any, stride: Any, source: Any, apart: Any
    ) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            element = IN_MEMORY[sig.args[0].dtype]
            sources = _places(builder, args[3], I64(0), args[4], vector(element), columns)
            loaded = [builder.load(place, align=1) for place in sources]
            together = concatenated(builder, loaded)
            kind = ir.VectorType(element, columns)
            for row, place in enumerate(_places(builder, *args[:3], kind, WIDTH)):
                elements = shuffle(builder, together, list(range(row, columns * WIDTH, WIDTH)))
                builder.store(elements, place, align=1)
            return context.get_dummy_value()

        return types.none(at, types.intp, types.intp, at, types.intp), generate

    return store_columns


# By number of columns. Load: of eight rows, `stride` apart, read so many elements from `offset`
# on; write them as columns, `apart`, of eight float64. Store: read so many columns, `apart`, of
# eight elements of the type of `at`; write them into eight rows from `offset` on.
LOAD_COLUMNS = {columns: _loading(columns) for columns in (2, 4)}
STORE_COLUMNS = {columns: _storing(columns) for columns in (2, 4)}
