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
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        dispatcher = njit(cache=True, **options)(function)
        _compile_or_load(dispatcher, signature)
    except Exception:  # noqa: BLE001  # whatever a forbidden cache raises
        # An error of the function itself comes again, here.
        dispatcher = njit(**options)(function)
        dispatcher.compile(signature)
    dispatcher.disable_compile()
    _DISPATCHERS.append(dispatcher)
    return dispatcher


_C_SIGNATURE = types.void(types.int64, types.int64, types.int64)
# They own the machine code.
_C_FUNCTIONS: list[Any] = []


def compiled_c(function: Callable[..., None], name: str) -> Any:
    """Compile `function` of three int64 as a C function; return its address."""
    with starting:
        function.__name__ = name
        function.__qualname__ = f"{name}.{_key(_C_SIGNATURE)}"
        options: dict[str, Any] = {"error_model": "numpy"}
        for _ in range(2):
            try:
                made = cfunc(_C_SIGNATURE, cache=True, **options)(function)
                break
            except Exception:  # noqa: BLE001  # whatever a forbidden cache or damaged files raise
                with contextlib.suppress(Exception):
                    # Damaged files: forgotten by this, and written anew.
                    FunctionCache(function).flush()
        else:
            made = cfunc(_C_SIGNATURE, **options)(function)
        _C_FUNCTIONS.append(made)
    address: Any = made.address
    return address


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


def _compile_or_load(dispatcher: Any, signature: Any) -> None:
    try:
        dispatcher.compile(signature)
    except Exception:  # noqa: BLE001  # whatever damaged files raise
        # Compiled, and only not written, to a full disk say: as good for this process.
        if dispatcher.signatures:
            return
        # Damaged files: forgotten by this, and written anew.
        dispatcher.recompile()
        dispatcher.compile(signature)


def array_type(dtype: Any, ndim: int, out: bool = False) -> types.Array:
    """Return the type of an array of any strides and alignment."""
    element = from_dtype(np.dtype(ELEMENTS[dtype]))
    return types.Array(element, ndim, "A", readonly=not out, aligned=False)
