"""The one table of implementations, and which one an array calls for."""

import functools
import importlib
import warnings
from typing import Any

from stablenorm import reference
from stablenorm.arrays import HOST, Arrays
from stablenorm.threads import get_num_threads, starting

# A backend is a module with a function for each operation. These are for NumPy's arrays.
BACKENDS = {"numpy": "stablenorm.reference", "numba": "stablenorm.cpu"}

# And all of them.
_MODULES = BACKENDS | {"cuda": "stablenorm.cuda"}


def run(operation: str, backend: str, call: Any) -> Any:
    """Do a call by a backend or, where that declines it, by the reference; return what it returns."""
    found = implementation(operation, backend)(call)
    return getattr(reference, operation)(call) if found is NotImplemented else found


@functools.cache
def implementation(operation: str, backend: str) -> Any:
    """Return the function of a backend, or else of the reference, that takes the record of a call."""
    # Numba takes half a second to load, so not before it is needed.
    with starting:
        module = importlib.import_module(_MODULES[backend])
    return getattr(module, operation, None) or getattr(reference, operation)


@functools.cache
def _why_not_numba() -> str | None:
    """Say what keeps the compiled kernels from being loaded."""
    # A NUMBA_NUM_THREADS that is no number is the user's error, not Numba's: raised here.
    get_num_threads()
    try:
        implementation("forward", "numba")
    except Exception as error:  # noqa: BLE001  # a broken Numba raises whatever it likes
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


@functools.cache
def _default() -> str:
    reason = _why_not_numba()
    if reason is None:
        return "numba"
    warnings.warn(
        f"stablenorm's fast kernels need Numba, which cannot be loaded ({reason}); the results "
        "are the same without it, ten times as slow. Cure: pip install --upgrade numba",
        RuntimeWarning,
        stacklevel=5,
    )
    return "numpy"


def choose(backend: str | None) -> str:
    """Return the name of the backend to use for NumPy's arrays: the one asked for, or the default."""
    if backend is None:
        return _default()
    if backend not in BACKENDS:
        if backend == "cuda":
            # What is missing on this machine comes first.
            _cuda().check_usable()
            msg = (
                'backend="cuda" is for arrays on a CUDA device, and x is in host memory; '
                "pass cupy.asarray(x)"
            )
            raise TypeError(msg)
        msg = f"backend must be one of {', '.join(map(repr, _MODULES))}, got {backend!r}"
        raise ValueError(msg)
    if backend == "numba" and (reason := _why_not_numba()) is not None:
        msg = (
            f'Numba is needed for backend="numba" and cannot be loaded ({reason}): '
            "pip install --upgrade numba"
        )
        raise ImportError(msg)
    return backend


def choose_cuda(backend: str | None) -> str:
    """Return "cuda", the only backend for arrays on a CUDA device."""
    if backend not in (None, "cuda"):
        msg = (
            f'backend must be "cuda" for an x on a CUDA device, got {backend!r}; for the others '
            "copy x to the host, as its method get does"
        )
        raise ValueError(msg)
    return "cuda"


def arrays_of(backend: str) -> Arrays:
    """Return how the arrays of a backend are handled."""
    return _cuda().ARRAYS if backend == "cuda" else HOST


def _cuda() -> Any:
    return importlib.import_module(_MODULES["cuda"])
