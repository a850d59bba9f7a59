"""
Compiled loops that find out how fast this processor calculates and converts, in its first cache.

Each does one thing, as the kernels do it: with their vectors, and eight of these in flight, so that
nothing waits for the one before. How long they take, and what follows, is for `analysis.machine`.
"""
# mypy: ignore-errors
# What Numba compiles has the types that Numba infers.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from stablenorm.kernels._compiling import ELEMENTS, bits
from stablenorm.kernels._vector_memory import itemsize, load, pointer, store
from stablenorm.kernels._vectors import ZEROS, splat

_eight, _one = ZEROS[8], ZEROS[1]
_ROWS = 8
# Eight rows of these are 16 KiB in float64: half of the smallest first-level cache of today.
_COLUMNS = 256
# Rounds of a call: two to four milliseconds, in which starting threads, a tenth of one, hardly shows.
# A quarter of that made reading float32, the shortest, look much slower: an addition's time
# is taken off, and so all that is amiss counts twice.
_ADDITIONS, _PASSES = 1 << 22, 1 << 15
# Vectors in flight: latency 4, two a cycle, 64 bytes each on the widest of today's processors.
_BYTES_IN_FLIGHT = 8 * 64


def _looping(kind: Any, suffix: str, added: int, multiplied: int) -> Any:
    """
    Return an intrinsic: as many rounds as asked with vectors of ``v``, all stored at the end.

    So many vectors become ``v + v0``, so many others ``v * v0 + v0``.
    """
    lanes = _BYTES_IN_FLIGHT // 8 // (8 if suffix == "f64" else 4)

    @intrinsic
    def loop(_typing: Any, to: Any, rounds: Any) -> Any:
        def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            vector = ir.VectorType(kind, lanes)
            target = builder.bitcast(args[0], vector.as_pointer())
            start = builder.load(target, align=8)
            held = [cgutils.alloca_once_value(builder, start) for _ in range(added + multiplied)]
            name = f"llvm.fma.v{lanes}{suffix}"
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), name
            )
            with cgutils.for_range(builder, args[1]):
                for number, place in enumerate(held):
                    v = builder.load(place)
                    if number < added:
                        v = builder.fadd(v, start)
                    else:
                        v = builder.call(fma, [v, start, start])
                    builder.store(v, place)
            for number, place in enumerate(held):
                to_here = builder.gep(target, [ir.Constant(ir.IntType(32), number)])
                builder.store(builder.load(place), to_here, align=8)
            return context.get_dummy_value()

        return types.none(to, rounds), generate

    return loop


_fma64 = _looping(ir.DoubleType(), "f64", 0, 8)
_fma32 = _looping(ir.FloatType(), "f32", 0, 8)
_add64 = _looping(ir.DoubleType(), "f64", 8, 0)
# Eight of each, or they would wait for one another: a multiply-add takes four cycles.
_both64 = _looping(ir.DoubleType(), "f64", 8, 8)


def _multiply_add_64(v: Any, rounds: int) -> None:
    _fma64(pointer(v), rounds)


def _multiply_add_32(v: Any, rounds: int) -> None:
    _fma32(pointer(v), rounds)


def _add_64(v: Any, rounds: int) -> None:
    _add64(pointer(v), rounds)


def _both_64(v: Any, rounds: int) -> None:
    _both64(pointer(v), rounds)


def _divide(v: Any, rounds: int) -> None:
    value = load(pointer(v), 0, 64, _eight())
    start = value
    for _ in range(rounds):
        value = start / value
    store(pointer(v), 0, 64, value)


def _read(x: Any, v: Any, rounds: int) -> None:
    total = _eight()
    for _ in range(rounds):
        for col in range(0, x.shape[1], 8):
            total = total + load(pointer(x), col * itemsize(pointer(x)), x.strides[0], total)
    store(pointer(v), 0, 64, total)


def _write(y: Any, v: Any, rounds: int) -> None:
    value = load(pointer(v), 0, 64, _eight())
    start = splat(1.0, value)
    for _ in range(rounds):
        for col in range(0, y.shape[1], 8):
            value = value + start
            store(pointer(y), col * itemsize(pointer(y)), y.strides[0], value)


_SIGNATURES: dict[str, Any] = {}


def _made(function: Any, *kinds: Any) -> Any:
    """Compile `function` once for these types."""
    key = f"{function.__name__} {kinds}"
    if key not in _SIGNATURES:
        compiled = njit(nogil=True, error_model="numpy")(function)
        compiled.compile(types.void(*kinds))
        _SIGNATURES[key] = compiled
    return _SIGNATURES[key]


def arithmetic_loops() -> dict[str, tuple[Callable[[], Callable[[], Any]], int]]:
    """
    Return, by name, a maker of the loop for one thread, and what a call of it does.

    "flops float64" and "flops float32" do multiply-adds, two flops each; "additions" additions,
    "operations" both, as many of each; "divisions" divisions. The last three in float64.
    """
    found: dict[str, tuple[Callable[[], Callable[[], Any]], int]] = {}
    for name, function, kind, dtype, each, vectors in (
        ("flops float64", _multiply_add_64, types.float64, np.float64, 2, 8),
        ("flops float32", _multiply_add_32, types.float32, np.float32, 2, 8),
        ("additions", _add_64, types.float64, np.float64, 1, 8),
        ("operations", _both_64, types.float64, np.float64, 1, 16),
    ):
        lanes = vectors * _BYTES_IN_FLIGHT // 8 // np.dtype(dtype).itemsize
        job = _made(function, kind[::1], types.int64)
        # Below 1: it converges, to nothing subnormal.
        found[name] = (_on_vector(job, lanes, dtype, _ADDITIONS), each * lanes * _ADDITIONS)
    job = _made(_divide, types.float64[::1], types.int64)
    rounds = _ADDITIONS // 16
    found["divisions"] = (_on_vector(job, 8 * _ROWS, np.float64, rounds), 8 * _ROWS * rounds)
    return found


def conversion_loops(
    dtype: np.dtype[Any],
) -> dict[str, tuple[Callable[[], Callable[[], Any]], int]]:
    """Return, as above, "loads" and "stores" of elements of `dtype`; with each goes an addition."""
    element = ELEMENTS[dtype]
    work = _ROWS * _COLUMNS * _PASSES
    found = {}
    for name, function in (("loads", _read), ("stores", _write)):
        job = _made(function, element[:, ::1], types.float64[::1], types.int64)
        found[name] = (_on_matrix(job, dtype), work)
    return found


def _on_vector(job: Any, lanes: int, dtype: Any, rounds: int) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        v = np.full(lanes, 0.5, dtype)
        return lambda: job(v, rounds)

    return make


def _on_matrix(job: Any, dtype: np.dtype[Any]) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        x = bits(np.ones((_ROWS, _COLUMNS), dtype))
        v = np.ones(8 * _ROWS)
        return lambda: job(x, v, _PASSES)

    return make
