"""Compile kernels for given types once, and keep the machine code on disk where that is possible."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature

from stablenorm.cpu.memory import HALF_IN_HARDWARE, named
from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from stablenorm.reference.partial import PARTIAL
from stablenorm.threads import starting

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    # The kernels exist as machine code only.
    msg = "NUMBA_DISABLE_JIT switches its compiler off; unset it"
    raise ImportError(msg)

# How the kernels are told the element type: 16-bit types by the integers that hold their bits. These are
# NumPy's types, whose identity is the same in every process. None is for what is missing, PARTIAL for sums.
ELEMENTS: dict[Any, Any] = {
    None: None,
    FLOAT64.dtype: np.float64,
    FLOAT32.dtype: np.float32,
    FLOAT16.dtype: np.int16,
    BFLOAT16.dtype: np.uint16,
    PARTIAL: "partial",
}
if not HALF_IN_HARDWARE:
    del ELEMENTS[FLOAT16.dtype]


# Every source of this folder. Numba notices a change of the file that holds a function, not of those
# that it calls into.
_SOURCES = b"".join(source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py")))

# They own the machine code.
_DISPATCHERS: list[Any] = []
_C_FUNCTIONS: list[Any] = []

_C_SIGNATURE = types.void(types.int64, types.int64, types.int64)

# No kernel makes an array, so none needs Numba's runtime: it would be compiled in each process, which
# takes LLVM, 20 MB of it, and 0.1 s.
_OPTIONS: Any = {"error_model": "numpy", "_nrt": False}


class _Cache(FunctionCache):
    """Numba's, which would import all that can be compiled before it loads what is: 0.2 s, 15 MB."""

    def load_overload(self: Any, sig: Any, target_context: Any) -> Any:
        """Return what was compiled, or None."""
        try:
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        except AttributeError:
            # These are Numba's own affair: a version without them is slower, and finds its files all the same.
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]


def compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """
    Compile `function` for `signature`, and for nothing else; it runs without the GIL.

    Where the disk cannot be read or written, it is compiled anew in each process.
    """
    dispatcher: Any = njit(nogil=True, **_OPTIONS)(function)
    _compile(dispatcher, function, signature, functools.partial(dispatcher.compile, signature))
    _DISPATCHERS.append(dispatcher)
    # What a dispatcher calls once it has looked up the types of all arguments, which takes 0.3
    # microseconds, a tenth of a small layer norm.
    (made,) = dispatcher.overloads.values()
    entry: Callable[..., Any] = made.entry_point
    return entry


def address_of_compiled(choose: Callable[..., Any]) -> Callable[..., int]:
    """
    Decorate what returns a function of three int64, given the types of elements or other choices.

    What it returns then is the address of that function, compiled as a C function; 0 of None.
    """

    @functools.cache
    def address(*choices: Any) -> int:
        if None in choices:
            return 0
        names = (getattr(choice, "__name__", choice) for choice in choices)
        function = named(choose(*choices), *names)
        signature = normalize_signature(_C_SIGNATURE)
        made: Any = CFunc(function, signature, {}, _OPTIONS)
        _compile(made, function, _C_SIGNATURE, made.compile)
        _C_FUNCTIONS.append(made)
        place: int = made.address
        return place

    return address


def _compile(made: Any, function: Any, signature: Any, compile_it: Callable[[], Any]) -> None:
    """Compile what Numba made of a function, with the cache on disk; without it if that is forbidden."""
    with starting:
        # Inside: the digest asks LLVM, whose lock a fork must not find taken.
        # Cache files of their own: of an index that they shared, processes that start at the same time
        # would each write their own version, and a later one could be led to the machine code of other
        # types or another processor.
        processor = cpu_target.target_context.codegen().magic_tuple()
        key = repr((str(signature), processor)).encode() + _SOURCES
        function.__qualname__ = f"{function.__name__}.{hashlib.sha256(key).hexdigest()[:16]}"
        for _ in range(2):
            try:
                made._cache = _Cache(function)  # type: ignore[no-untyped-call]
                compile_it()
            except Exception:  # noqa: BLE001  # whatever a forbidden cache or damaged files raise
                with contextlib.suppress(Exception):
                    # Damaged files: forgotten by this, and written anew.
                    FunctionCache(function).flush()
            else:
                return
        # An error of the function itself comes again, here.
        made._cache = NullCache()
        compile_it()
