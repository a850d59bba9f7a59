"""
What Numba lacks of the processor: its floating-point control word, atomics, a pause, a call by address.

A library may have set the calling thread to flush subnormals to zero, or to round upward. That
would change results, and those of helper threads not. So whatever is computed here begins with
`set_default` and ends with `restore`: two instructions, as long as nothing is to be changed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from stablenorm.cpu.memory import ARCHITECTURE, call_llvm, emit, pasted

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_X86 = ARCHITECTURE in ("x86_64", "i686")
_ARM = ARCHITECTURE in ("aarch64", "arm64")

# MXCSR of x86: all exceptions masked, no flushing, to nearest. Its last six bits are no settings
# but what has happened so far.
_DEFAULT, _SETTINGS = (0x1F80, 0xFFC0) if _X86 else (0, -1)


@pasted
def set_default():  # type: ignore[no-untyped-def]
    """Set the default control word, if it is another; return what it was."""
    word = _read()
    # Writing it, on x86, waits for all arithmetic before it.
    if word & _SETTINGS != _DEFAULT:
        _write(_DEFAULT)
    return word


@pasted
def restore(word):  # type: ignore[no-untyped-def]
    """Set the control word that `set_default` returned, if it is not the default."""
    if word & _SETTINGS != _DEFAULT:
        _write(word)


@emit(types.int64)
def _read(builder: Any) -> Any:
    if _X86:
        place = cgutils.alloca_once(builder, _I32)
        call_llvm(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [_as_bytes(builder, place)])
        return builder.zext(builder.load(place), _I64)
    if _ARM:
        return call_llvm(builder, "llvm.aarch64.get.fpcr", _I64, [])
    # Other processors are left as they are.
    return _I64(_DEFAULT)


@emit(types.none, types.int64)
def _write(builder: Any, word: Any) -> None:
    if _X86:
        place = cgutils.alloca_once(builder, _I32)
        builder.store(builder.trunc(word, _I32), place)
        call_llvm(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [_as_bytes(builder, place)])
    elif _ARM:
        call_llvm(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), [word])


def _as_bytes(builder: Any, place: Any) -> Any:
    return builder.bitcast(place, ir.IntType(8).as_pointer())


# ---- threads ----


_WORD = types.CPointer(types.int64)


def _atomic(operation: str) -> Any:
    @emit(types.intp, _WORD, types.intp)
    def change(builder: Any, p: Any, value: Any) -> Any:
        """Change the int64 that `p` points to; return what was there before."""
        return builder.atomic_rmw(operation, p, value, "seq_cst")

    return change


atomic_add, exchange = _atomic("add"), _atomic("xchg")


@emit(types.intp, _WORD)
def atomic_load(builder: Any, p: Any) -> Any:
    """Return the int64 that `p` points to as other threads last left it."""
    return builder.load_atomic(p, "seq_cst", 8)


@emit(types.none)
def pause(builder: Any) -> None:
    """Tell the processor that this thread is waiting."""
    # On other processors, nothing: the wait is as right, and a little hotter.
    if _X86:
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif _ARM:
        call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), [_I32(1)])


@emit(types.none, *[types.intp] * 4)
def call(builder: Any, function: Any, first: Any, second: Any, third: Any) -> None:
    """Call the C function of three int64 whose address is `function`."""
    kind = ir.FunctionType(ir.VoidType(), [_I64] * 3).as_pointer()
    builder.call(builder.inttoptr(function, kind), [first, second, third])
