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
from numba.extending import intrinsic

from stablenorm.cpu.memory import ARCHITECTURE, call_llvm

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_X86 = ARCHITECTURE in ("x86_64", "i686")
_ARM = ARCHITECTURE in ("aarch64", "arm64")

# MXCSR of x86: all exceptions masked, no flushing, to nearest. Its last six bits are no settings
# but what has happened so far.
_MXCSR, _SETTINGS = 0x1F80, 0xFFC0


@intrinsic
def set_default(_typing: Any) -> Any:
    """Set the default control word, if it is another; return what it was."""

    def generate(_context: Any, builder: Any, _sig: Any, _args: Any) -> Any:
        word = _read(builder)
        _write_unless_default(builder, word, _default())
        return word

    return types.int64(), generate


@intrinsic
def restore(_typing: Any, word: Any) -> Any:
    """Set the control word that `set_default` returned, if it is not the default."""

    def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        _write_unless_default(builder, args[0], args[0])
        return context.get_dummy_value()

    return types.none(types.int64), generate


def _default() -> Any:
    return ir.Constant(_I64, _MXCSR if _X86 else 0)


def _write_unless_default(builder: Any, word: Any, value: Any) -> None:
    settings = builder.and_(word, ir.Constant(_I64, _SETTINGS)) if _X86 else word
    # Writing it, on x86, waits for all arithmetic before it.
    with builder.if_then(builder.icmp_unsigned("!=", settings, _default()), likely=False):
        _write(builder, value)


def _read(builder: Any) -> Any:
    if _X86:
        place = cgutils.alloca_once(builder, _I32)
        call_llvm(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [_as_bytes(builder, place)])
        return builder.zext(builder.load(place), _I64)
    if _ARM:
        return call_llvm(builder, "llvm.aarch64.get.fpcr", _I64, [])
    # Other processors are left as they are.
    return _default()


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


def _atomic(operation: str) -> Any:
    @intrinsic
    def change(_typing: Any, p: Any, value: Any) -> Any:
        """Change the int64 that `p` points to; return what was there before."""

        def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            return builder.atomic_rmw(operation, args[0], args[1], "seq_cst")

        return types.intp(p, types.intp), generate

    return change


atomic_add, exchange = _atomic("add"), _atomic("xchg")


@intrinsic
def atomic_load(_typing: Any, p: Any) -> Any:
    """Return the int64 that `p` points to as other threads last left it."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.load_atomic(args[0], "seq_cst", 8)

    return types.intp(p), generate


@intrinsic
def pause(_typing: Any) -> Any:
    """Tell the processor that this thread is waiting."""

    def generate(context: Any, builder: Any, _sig: Any, _args: Any) -> Any:
        # On other processors, nothing: the wait is as right, and a little hotter.
        if _X86:
            call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif _ARM:
            call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), [_I32(1)])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def call(_typing: Any, function: Any, record: Any, pool: Any, me: Any) -> Any:
    """Call the C function of three int64 whose address is `function`."""
    kind = ir.FunctionType(ir.VoidType(), [_I64] * 3).as_pointer()

    def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        builder.call(builder.inttoptr(args[0], kind), args[1:])
        return context.get_dummy_value()

    return types.none(*[types.intp] * 4), generate
