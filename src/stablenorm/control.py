"""The control word of a thread: no result depends on whether the caller rounds upward, flushes subnormals or traps."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

# The compiled module, once it is loaded; without it, NumPy computes as the thread of the caller is set.
_core: Any = None


def use(core: Any) -> None:
    """Take the compiled module, which sets control words."""
    global _core  # noqa: PLW0603  # there is one of the process
    _core = core


def with_default_control(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that computes with the default control word, and never lets NumPy raise."""

    @functools.wraps(function)
    def inside(*args: P.args, **options: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            if _core is None:
                return function(*args, **options)
            done: R = _core.call(function, args, options)
            return done

    return inside
