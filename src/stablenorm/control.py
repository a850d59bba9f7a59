"""The control word of the thread: results do not depend on whether the caller rounds upward or flushes subnormals."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _kernels() -> Any:
    """Return the compiled module, None where it is not built: then NumPy computes as the caller's thread is set."""
    try:
        from stablenorm import _core  # noqa: PLC0415  # when first needed
    except ImportError:
        return None
    return _core


def with_default_control(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that computes with the default control word, and tells NumPy to raise nothing."""

    @functools.wraps(function)
    def inside(*args: P.args, **options: P.kwargs) -> R:
        core = _kernels()
        with np.errstate(all="ignore"):
            done: R = (
                function(*args, **options) if core is None else core.call(function, args, options)
            )
            return done

    return inside
