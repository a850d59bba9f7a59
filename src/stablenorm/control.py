"""
The floating-point control word of the calling thread, for what NumPy computes.

A library may have set it to flush subnormals to zero, or to round upward; the equations of
`reference` are right only with gradual underflow and rounding to nearest.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

# Of fenv_t, which has 8 to 32 bytes.
_ROOM = 256


def _library() -> Any:
    """Return what has `fegetenv` and `fesetenv`: this process, or else the C library of that."""
    # PyDLL: no other thread is to run in between, and letting one takes longer than the call.
    for name in (None, "libm.so.6"):
        with contextlib.suppress(OSError, TypeError, AttributeError):
            library = ctypes.PyDLL(name)
            # AttributeError where it has none.
            _ = library.fegetenv, library.fesetenv
            return library
    # Windows, where no library is known to change the control word.
    return None


_LIBRARY = _library()
# What C calls FE_DFL_ENV.
_DEFAULT: Any = ctypes.c_void_p(-1)
if sys.platform == "darwin":
    _DEFAULT = ctypes.byref(ctypes.c_char.in_dll(_LIBRARY, "_FE_DFL_ENV"))


@contextlib.contextmanager
def default_control() -> Iterator[None]:
    """Set the default control word, and restore what it was."""
    if _LIBRARY is None:
        yield
        return
    before = ctypes.create_string_buffer(_ROOM)
    _LIBRARY.fegetenv(before)
    _LIBRARY.fesetenv(_DEFAULT)
    try:
        yield
    finally:
        _LIBRARY.fesetenv(before)
