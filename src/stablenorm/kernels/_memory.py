"""
What the CPU kernels need of the machine beside arithmetic: atomic counters, fences, waiting.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Bytes of a cache line, on x86-64 and most of arm64.
LINE = 64

_I64, _I8 = ir.IntType(64), ir.IntType(8)
_LINE = ir.VectorType(_I64, LINE // 8)
_ARCHITECTURE = llvm.get_process_triple().split("-")[0]


@intrinsic
def fence(_typing: Any) -> Any:
    """Order everything stored so far, streamed lines included, before what follows."""

    def generate(context: Any, builder: Any, _sig: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def pause(_typing: Any) -> Any:
    """Tell the processor that this thread is waiting."""

    def generate(context: Any, builder: Any, _sig: Any, _args: Any) -> Any:
        # On other processors, nothing: the wait is as right, and a little hotter.
        if _ARCHITECTURE in ("x86_64", "i686"):
            _call(builder, "llvm.x86.sse2.pause", [])
        elif _ARCHITECTURE in ("aarch64", "arm64"):
            _call(builder, "llvm.aarch64.hint", [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.none(), generate


def _call(builder: Any, name: str, args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


@intrinsic
def add_atomically(_typing: Any, counter: Any, amount: Any) -> Any:
    """Add to the int64 at a pointer; return what was there before."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], args[1], "seq_cst")

    return types.intp(counter, types.intp), generate


@intrinsic
def exchange(_typing: Any, counter: Any, value: Any) -> Any:
    """Write to the int64 at a pointer; return what was there before."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", args[0], args[1], "seq_cst")

    return types.intp(counter, types.intp), generate


@intrinsic
def read_atomically(_typing: Any, counter: Any) -> Any:
    """Return the int64 at a pointer as other threads last left it."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.load_atomic(args[0], "seq_cst", 8)

    return types.intp(counter), generate


@intrinsic
def _stream_line(_typing: Any, to: Any, source: Any) -> Any:
    """Copy 64 bytes to an address that is a multiple of 64, past the caches."""

    def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        to, source = (builder.inttoptr(arg, _LINE.as_pointer()) for arg in args)
        stored = builder.store(builder.load(source, align=1), to, align=LINE)
        stored.set_metadata(
            "nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        )
        return context.get_dummy_value()

    return types.none(types.intp, types.intp), generate


@intrinsic
def _copy_byte(_typing: Any, to: Any, source: Any) -> Any:
    """Copy one byte between addresses."""

    def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        to, source = (builder.inttoptr(arg, _I8.as_pointer()) for arg in args)
        builder.store(builder.load(source), to)
        return context.get_dummy_value()

    return types.none(types.intp, types.intp), generate


@njit(error_model="numpy")
def stream_bytes(to, source, count):
    """Copy `count` bytes between addresses, whole lines of them past the caches."""
    head = min(-to % LINE, count)
    for at in range(head):
        _copy_byte(to + at, source + at)
    whole = count - (count - head) % LINE
    for at in range(head, whole, LINE):
        _stream_line(to + at, source + at)
    for at in range(whole, count):
        _copy_byte(to + at, source + at)
