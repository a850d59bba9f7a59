"""Compile kernels for given types once, and keep the machine code on disk where that is possible."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, config, from_dtype, njit, types
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from stablenorm.threads import starting

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    # The kernels exist as machine code only.
    msg = "NUMBA_DISABLE_JIT switches its compiler off; unset it"
    raise ImportError(msg)

# How the kernels are told the element type: 16-bit types by the integers that hold their bits. These are
# NumPy's types, whose identity is the same in every process.
ELEMENTS: dict[Any, Any] = {
    FLOAT64.dtype: np.float64,
    FLOAT32.dtype: np.float32,
    FLOAT16.dtype: np.int16,
    BFLOAT16.dtype: np.uint16,
}


def _stamp() -> str:
    """
    Return a digest of every source of this folder that Numba compiles.

    Numba notices a change of the file that holds the cached function, not of those that it calls
    into. The digest is a constant of each cached function, and thereby part of its key.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


STAMP = _stamp()


# They own the machine code.
_DISPATCHERS: list[Any] = []
_C_FUNCTIONS: list[Any] = []

_C_SIGNATURE = types.void(types.int64, types.int64, types.int64)


def compiled(function: Callable[..., None], signature: Any) -> Callable[..., None]:
    """
    Compile `function` for `signature`, and for nothing else; it runs without the GIL.

    Where the disk cannot be read or written, it is compiled anew in each process.
    """
    with starting:
        function.__qualname__ = f"{function.__name__}.{_key(signature)}"
        # Of threads that need it at the same time, the first compiles it for all.
        known = [made for made in _DISPATCHERS if _is_same(made.py_func, function)]
        dispatcher = known[0] if known else _dispatcher(function, signature)
    # What a dispatcher calls once it has looked up the types of all arguments, which takes 0.3
    # microseconds, a tenth of a small layer norm. They have been seen to before. What is left, of
    # arrays, is a look at their itemsize; so 16-bit types pass for the integers of their bits.
    (made,) = dispatcher.overloads.values()
    return made.entry_point


def _dispatcher(function: Any, signature: Any) -> Any:
    def make(cache: bool) -> Any:
        dispatcher = njit(nogil=True, error_model="numpy", cache=cache)(function)
        dispatcher.compile(signature)
        return dispatcher

    dispatcher = _cached(make, function)
    dispatcher.disable_compile()
    _DISPATCHERS.append(dispatcher)
    return dispatcher


def compiled_c(function: Callable[..., None], name: str) -> Any:
    """Compile `function` of three int64 as a C function; return its address."""
    with starting:
        function.__name__ = name
        function.__qualname__ = f"{name}.{_key(_C_SIGNATURE)}"
        make = lambda cache: cfunc(_C_SIGNATURE, error_model="numpy", cache=cache)(function)
        made = _cached(make, function)
        _C_FUNCTIONS.append(made)
    return made.address


def _cached(make: Callable[[bool], Any], function: Any) -> Any:
    """Return what `make` makes with the cache on disk; without it if that is forbidden."""
    for _ in range(2):
        try:
            return make(True)
        except Exception:  # noqa: BLE001  # whatever a forbidden cache or damaged files raise
            with contextlib.suppress(Exception):
                # Damaged files: forgotten by this, and written anew.
                FunctionCache(function).flush()
    # An error of the function itself comes again, here.
    return make(False)


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two functions are one definition, made of equal things for the same types."""
    if one.__qualname__ != other.__qualname__ or one.__code__ is not other.__code__:
        return False
    first, second = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other))
    return first == second


def _key(signature: Any) -> str:
    """
    Return a digest of the types and the processor, for cache files of their own.

    Of an index that they shared, processes that start at the same time would each write their own
    version, and a later one could be led to the machine code of other types or another processor.
    """
    processor = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((str(signature), processor)).encode()).hexdigest()[:16]


def array_type(dtype: Any, ndim: int, out: bool = False) -> types.Array:
    """Return the type of an array of any strides and alignment."""
    element = from_dtype(np.dtype(ELEMENTS[dtype]))
    return types.Array(element, ndim, "A", readonly=not out, aligned=False)
