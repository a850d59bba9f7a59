"""The one table of implementations, and the choice of one."""

import functools
import importlib
import os
import warnings
from typing import Any

from stablenorm import arrays, reference
from stablenorm.call import OPERATIONS, sample
from stablenorm.types import joined

# A backend is a module with a function for each operation. Backends for NumPy arrays, and all of them:
BACKENDS = {"numpy": "stablenorm.reference", "native": "stablenorm.native"}
_MODULES = BACKENDS | {"cuda": "stablenorm.cuda"}


@functools.cache
def _module(backend: str) -> Any:
    return importlib.import_module(_MODULES[backend])


def run(backend: str, call: Any) -> Any:
    """Do a call by a backend or, if that declines, sample by sample or by the reference; return its result."""
    operation, samples = OPERATIONS[type(call)], getattr(call, "samples", 1)
    if samples == 1 or backend != "numpy":
        done = implementation(operation, backend)(call)
        if done is not NotImplemented:
            return done
    if samples == 1:
        return getattr(reference, operation)(call)
    # The gamma of one sample may be out of range while others are within.
    parts = [run(backend, sample(call, i)) for i in range(samples)]
    return joined(parts) if getattr(call, "keep", False) else None


@functools.cache
def implementation(operation: str, backend: str) -> Any:
    """Return the function of a backend, or else of the reference, that takes the record of a call."""
    return getattr(_module(backend), operation, None) or getattr(reference, operation)


@functools.cache
def plain(operation: str) -> Any:
    """Return the function of the kernels that does a plain call at once, or returns None if it is none."""
    try:
        return getattr(_module("native"), f"plain_{operation}")
    except (ImportError, AttributeError):
        return lambda *_: None


@functools.cache
def _default() -> str:
    try:
        implementation("forward", "native")
    except ImportError as error:
        # STABLENORM_PURE: the user chose an installation without kernels, and needs no warning.
        if not os.environ.get("STABLENORM_PURE"):
            msg = f"{error}; the results are within the same bounds without it, ten times as slow"
            warnings.warn(msg, RuntimeWarning, stacklevel=5)
        return "numpy"
    return "native"


def choose(backend: str | None, on_device: bool = False) -> str:
    """Return the name of the backend to use: the one asked for, or the default for these arrays."""
    if on_device:
        if backend not in (None, "cuda"):
            msg = (
                f'backend must be "cuda" for an x on a CUDA device, got {backend!r}; for the '
                "others copy x to the host, as its method get does"
            )
            raise ValueError(msg)
        return "cuda"
    if backend is None:
        return _default()
    if backend == "cuda":
        # A missing device or library is reported first.
        _module(backend).check_usable()
        msg = (
            'backend="cuda" is for arrays on a CUDA device, and x is in host memory; '
            "pass cupy.asarray(x)"
        )
        raise TypeError(msg)
    if backend not in BACKENDS:
        msg = f"backend must be one of {', '.join(map(repr, _MODULES))}, got {backend!r}"
        raise ValueError(msg)
    if backend == "native":
        # Loading raises ImportError with the reason.
        implementation("forward", backend)
    return backend


def arrays_of(backend: str) -> Any:
    """Return the module that handles the arrays of a backend."""
    return _module(backend) if backend == "cuda" else arrays
