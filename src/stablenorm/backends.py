"""The one table of implementations, and the choice of one."""

import functools
import importlib
import os
import warnings
from types import SimpleNamespace
from typing import Any

from stablenorm import arrays

# A backend is a module with `forward` and `backward`, which take the records of `call`. Those for NumPy arrays, and all:
BACKENDS = {"numpy": "stablenorm.reference", "native": "stablenorm.native"}
_MODULES = BACKENDS | {"cuda": "stablenorm.cuda"}


@functools.cache
def module_of(backend: str) -> Any:
    """Return the module of a backend."""
    return importlib.import_module(_MODULES[backend])


@functools.cache
def kernels() -> Any:
    """Return the kernels' module, or if it is not built one that declines all plain calls."""
    try:
        return module_of("native")
    except (ImportError, AttributeError):
        decline = lambda *_: None
        return SimpleNamespace(plain_forward=decline, plain_backward=decline)


@functools.cache
def _default() -> str:
    try:
        module_of("native")
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
        module_of(backend).check_usable()
        msg = (
            'backend="cuda" is for arrays on a CUDA device, and x is in host memory; '
            "pass cupy.asarray(x)"
        )
        raise TypeError(msg)
    if backend not in BACKENDS:
        msg = f"backend must be one of {', '.join(map(repr, _MODULES))}, got {backend!r}"
        raise ValueError(msg)
    # Loading raises ImportError with the reason.
    module_of(backend)
    return backend


@functools.cache
def arrays_of(backend: str) -> Any:
    """Return the module that handles the arrays of a backend."""
    return module_of(backend) if backend == "cuda" else arrays
