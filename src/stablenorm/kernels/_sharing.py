"""
One call's tiles, shared between the calling thread and those that wait to help: all compiled.

A `share` publishes a function and its arguments in the words of a crew, and rings a bell: a counter
that is odd while there is work. Whoever runs the function takes tile after tile until none is
left, so it does not matter how many helpers come, when, or whether at all: the caller takes tiles
itself, and waits only for those who have entered.

Nothing of this needs the GIL, which a helper would have to wait for, asleep, whenever the caller
holds it: that took 50 microseconds of a call of 300. A helper that has just worked spins a
while, then sleeps in `read` on a pipe of its own.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from stablenorm.kernels._compiling import STAMP, compiled
from stablenorm.kernels._control import restore, set_default
from stablenorm.kernels._memory import add_atomically, exchange, pause, read_atomically
from stablenorm.kernels._vector_memory import address, pointer, pointer_at

# int64 from one word that threads write to the next: two cache lines, so that their writers do
# not disturb one another.
_APART = 16

# The words of a crew. Some caller has it; odd while there is work; helpers within the work.
_LENT, _BELL, _INSIDE = (i * _APART for i in range(3))
# What the work is: written before the bell rings. Who takes part: the caller, 0, and helpers.
_FUNCTION, _RECORD, _PARTS, _TILES, _FAILED, _CPU = (3 * _APART + i for i in range(6))
# Of each who takes part: the next of its own tiles; whether it sleeps, and where to write to wake
# it.
_OWN = 4 * _APART
_NEXT, _ASLEEP, _WAKE = range(3)

# Stands for a crew where there are no helpers.
NO_CREW = np.zeros(1, np.int64)

# More would find no tiles: the backward has at most 64.
MOST_HELPERS = 63

# int64 in a set of processors: 1024 of them, as in glibc's cpu_set_t.
_MASK = 16

# Turns of some 40 cycles. A helper spins for about 100 microseconds: the next call of a loop then
# finds it awake, where waking it takes 50 and more. One that waits for a helper to leave spins for
# 20, and then lets others run, since the helper may have lost its processor.
_TURNS_OF_HELPER, _TURNS_OF_CALLER = 10_000, 2000


def words() -> Any:
    """Return the words of a new crew."""
    return np.zeros(_OWN + (1 + MOST_HELPERS) * _APART, np.int64)


def enlist(crew: Any, me: int, wake: int) -> None:
    """Tell the crew that helper `me`, from 1 on, has come, woken by a byte written to `wake`."""
    crew[_OWN + me * _APART + _WAKE] = wake


def asleep(crew: Any, me: int) -> bool:
    """Tell whether a helper sleeps, or is about to."""
    return bool(crew[_OWN + me * _APART + _ASLEEP])


def _name_system_calls() -> bool:
    """Let compiled code find them; return whether a thread can choose its processors."""
    if os.name == "nt":
        c = ctypes.CDLL("ucrtbase")
        calls = {
            "read": c._read,
            "write": c._write,
            "yield": ctypes.CDLL("kernel32").SwitchToThread,
        }
    else:
        c = ctypes.CDLL(None)
        calls = {"read": c.read, "write": c.write, "yield": c.sched_yield}
    # macOS and Windows have other ways, which are not needed there.
    choosing = {
        "getcpu": "sched_getcpu",
        "allowed": "sched_getaffinity",
        "allow": "sched_setaffinity",
    }
    chooses = all(hasattr(c, name) for name in choosing.values())
    if chooses:
        calls |= {name: getattr(c, function) for name, function in choosing.items()}
    for name, function in calls.items():
        where = ctypes.cast(function, ctypes.c_void_p).value
        llvm.add_symbol(f"stablenorm_{name}", where)
    return chooses


_CHOOSES = _name_system_calls()
_read = types.ExternalFunction("stablenorm_read", types.intp(types.intc, types.intp, types.uintp))
_write = types.ExternalFunction("stablenorm_write", types.intp(types.intc, types.intp, types.uintp))
_yield = types.ExternalFunction("stablenorm_yield", types.intc())
_getcpu = types.ExternalFunction("stablenorm_getcpu", types.intc())
_affinity = types.intc(types.intc, types.uintp, types.intp)
_allowed = types.ExternalFunction("stablenorm_allowed", _affinity)
_allow = types.ExternalFunction("stablenorm_allow", _affinity)


@njit(error_model="numpy")
def _at(crew, word):
    return pointer_at(address(crew) + 8 * word, crew)


@njit(error_model="numpy")
def current_cpu():
    """Return the number of the processor that this thread runs on; -1 where nobody knows."""
    if _CHOOSES:
        return np.int64(_getcpu())
    return np.int64(-1)


@njit(error_model="numpy")
def _leave(cpu, process, space):
    """
    Move this thread to any other processor of those that the process may use.

    Linux wakes a thread where it last ran, and where two virtual processors do not look as if
    they shared a cache, it leaves it there for milliseconds: after a pause of 5 ms, two threads
    on one of two processors took the time of one (586 us for (4, 512, 1024), against 287). So a
    helper that finds itself beside the caller goes, and is woken elsewhere from then on.
    """
    if not _CHOOSES or cpu < 0 or cpu >= 64 * _MASK:
        return
    size = np.uint64(8 * _MASK)
    for word in range(_MASK):
        space[word] = 0
    if _allowed(np.int32(process), size, address(space)) < 0:
        return
    space[cpu // 64] &= ~(np.int64(1) << (cpu % 64))
    # Refused if none is left: then it stays.
    _allow(np.int32(0), size, address(space))


@intrinsic
def _record(_typing: Any, arguments: Any) -> Any:
    """Return the address of a copy of a tuple, which lasts as long as the calling function."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, args[0]), ir.IntType(64))

    return types.intp(arguments), generate


# Of the address of a record, that of a crew and who calls; 0, or something else if it has failed.
_I64 = ir.IntType(64)
_ENTRY = ir.FunctionType(_I64, [_I64] * 3)


def _entry_to(work: Any) -> Any:
    work_type = types.Dispatcher(work)

    @intrinsic
    def entry(typing: Any, crew: Any, arguments: Any) -> Any:
        """Return the address of a function that calls `work`; it takes what `_call` gives it."""
        inner = work_type.get_call_type(typing, (crew, types.intp, *arguments.types), {})

        def generate(context: Any, builder: Any, sig: Any, _args: Any) -> Any:
            made = work.overloads[tuple(inner.args)]
            context.active_code_library.add_linking_library(made.library)
            callee = context.declare_function(builder.module, made.fndesc)
            crew_type, record_type = map(context.get_value_type, sig.args)

            function = ir.Function(builder.module, _ENTRY, f"{made.fndesc.llvm_func_name}.entry")
            function.linkage = "internal"
            # Called from two places: machine code for one is enough.
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block())
            record, where, me = function.args
            kept = inside.load(inside.inttoptr(record, record_type.as_pointer()))
            values = (inside.extract_value(kept, i) for i in range(len(inner.args) - 2))
            values = [inside.inttoptr(where, crew_type), me, *values]
            status, _ = context.call_conv.call_function(
                inside, callee, inner.return_type, inner.args, values
            )
            inside.ret(inside.zext(status.is_error, _I64))
            return builder.ptrtoint(function, _I64)

        return types.intp(crew, arguments), generate

    return entry


@intrinsic
def _call(_typing: Any, function: Any, record: Any, crew: Any, me: Any) -> Any:
    """Call what is at the address that an `entry` returned."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.call(builder.inttoptr(args[0], _ENTRY.as_pointer()), args[1:])

    return types.intp(*[types.intp] * 4), generate


@njit(error_model="numpy")
def take(crew, me, previous):
    """
    Return the next tile; there is none if it is not below the number of tiles.

    `previous` is the one taken before, or -1. Everyone has a range of tiles of its own, the same
    in each call of a shape, and so finds in its own cache what it has read or written before;
    who has done with that helps the others with theirs.
    """
    if address(crew) == 0:
        return previous + 1
    parts, tiles = crew[_PARTS], crew[_TILES]
    for step in range(parts):
        whose = (me + step) % parts
        last = (whose + 1) * tiles // parts
        counter = _at(crew, _OWN + whose * _APART + _NEXT)
        if read_atomically(counter) < last:
            tile = add_atomically(counter, 1)
            if tile < last:
                return tile
    return tiles


@njit(error_model="numpy")
def _open(crew, function, record, tiles, helpers):
    """Ring for `helpers`."""
    parts = helpers + 1
    crew[_FUNCTION], crew[_RECORD], crew[_PARTS], crew[_TILES] = function, record, parts, tiles
    crew[_FAILED], crew[_CPU] = 0, current_cpu()
    for part in range(parts):
        crew[_OWN + part * _APART + _NEXT] = part * tiles // parts
    add_atomically(_at(crew, _BELL), 1)
    for part in range(1, parts):
        own = _OWN + part * _APART
        # Asleep, or about to be: it looks at the bell once more after it has said so.
        sleeping = _at(crew, own + _ASLEEP)
        if read_atomically(sleeping) == 1 and exchange(sleeping, 0) == 1:
            _write(np.int32(crew[own + _WAKE]), address(crew), np.uint64(1))


@njit(error_model="numpy")
def _close(crew):
    """Let nobody enter any more, and wait for those inside; return whether one has failed."""
    add_atomically(_at(crew, _BELL), 1)
    turns = 0
    while read_atomically(_at(crew, _INSIDE)) != 0:
        turns += 1
        if turns > _TURNS_OF_CALLER:
            _yield()
        pause()
    failed = crew[_FAILED]
    exchange(_at(crew, _LENT), 0)
    return failed


def sharing(work: Any) -> Any:
    """
    Return ``share(arguments, tiles, crew, helpers)`` for ``work(crew, me, *arguments)``.

    It runs `work` on this thread and, if the crew is to be had, on that many helpers; all get
    their tiles from `take`. MemoryError if it failed on one of them.
    """
    # One for each `work`: a function given as an argument would keep Numba from the cache on disk.
    entry = _entry_to(work)

    def share(arguments, tiles, crew, helpers):
        function, record = entry(crew, arguments), _record(arguments)
        word = set_default()
        if helpers > 0 and exchange(_at(crew, _LENT), 1) == 0:
            _open(crew, function, record, tiles, helpers)
            failed = _call(function, record, address(crew), 0)
            # Also if it has: the record is this function's own.
            failed += _close(crew)
        else:
            # No helpers, or another thread has them: alone.
            failed = _call(function, record, 0, 0)
        restore(word)
        if failed != 0:
            raise MemoryError

    return njit(error_model="numpy")(named(share, work.py_func.__qualname__))


def named(function: Any, after: str) -> Any:
    """
    Give a function that is made more than once a name that no other one has.

    Machine code is linked by module, name, types and a number that counts what the process has
    compiled; so that of two functions of one name and types, from the caches of two processes,
    the one that is loaded first takes the place of the other.
    """
    function.__qualname__ = f"{function.__name__}.{after}"
    return function


def _helping() -> Any:
    stamp = STAMP

    def help_out(crew, me, pipe, process):  # type: ignore[no-untyped-def]
        """Help with whatever comes, for ever; `pipe` is the end to read from."""
        if stamp == "":
            return
        own = _OWN + me * _APART
        # A thread begins with the control word of the one that starts it.
        set_default()
        words = pointer(crew)
        space = np.empty(_MASK, np.int64)
        sleeping, bell_word = _at(words, own + _ASLEEP), _at(words, _BELL)
        inside = _at(words, _INSIDE)
        heard = 0
        # Always: Numba does not compile a loop without an end.
        while me > 0:
            turns, woken = 0, False
            bell = read_atomically(bell_word)
            while bell % 2 == 0 or bell == heard:
                turns += 1
                if turns > _TURNS_OF_HELPER:
                    exchange(sleeping, 1)
                    if read_atomically(bell_word) == bell:
                        # One byte, or more if earlier ones came too late. Or none, if a signal
                        # came: then it spins once more.
                        _read(np.int32(pipe), address(pointer(space)), np.uint64(64))
                        woken = True
                    exchange(sleeping, 0)
                    turns = 0
                pause()
                bell = read_atomically(bell_word)
            add_atomically(inside, 1)
            # Once it has entered, the work stays what it is.
            if read_atomically(bell_word) == bell and me < words[_PARTS]:
                if woken and words[_CPU] == current_cpu():
                    _leave(words[_CPU], process, pointer(space))
                failed = _call(words[_FUNCTION], words[_RECORD], address(words), me)
                if failed != 0:
                    words[_FAILED] = 1
            add_atomically(inside, -1)
            heard = bell

    kind = types.void(types.int64[::1], types.int64, types.int64, types.int64)
    return compiled(help_out, kind)


help_out = _helping()
