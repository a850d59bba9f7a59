"""The one table of implementations, and which one an array calls for."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from stablenorm import reference
from stablenorm._arrays import HOST, Arrays
from stablenorm._threads import get_num_threads, starting
from stablenorm._types import Array, Gradients, Statistics


class Backend(NamedTuple):
    """
    Functions with the signatures of `reference.forward` and `reference.backward`.

    The small ones do it for float32 arrays of any shape, fewer than `SMALL` elements, with no time
    to lose: `forward_small` returns the first three statistics, `backward_small` takes the arrays of
    the gradients one by one and returns True. What they return is false, and nothing is written, if
    it is not for them: if results overlap what they must not, say. If `in_place`, y may be x.
    """

    forward: Callable[..., Statistics]
    backward: Callable[..., None]
    forward_small: Callable[..., Any]
    backward_small: Callable[..., Any]


def _numba_forward(
    x: Any, gamma: Array | None, beta: Array | None, eps: float, y: Any
) -> Statistics:
    """Load the compiled kernels, put them into the table, and go on with them."""
    _load_numba()
    return BACKENDS["numba"].forward(x, gamma, beta, eps, y)


def _numba_backward(
    dy: Any, x: Any, gamma: Array | None, statistics: Statistics, out: Gradients
) -> None:
    _load_numba()
    BACKENDS["numba"].backward(dy, x, gamma, statistics, out)


def _numba_forward_small(
    x: Array, gamma: Array, beta: Array, eps: float, y: Array, in_place: bool
) -> Any:
    _load_numba()
    return BACKENDS["numba"].forward_small(x, gamma, beta, eps, y, in_place)


def _numba_backward_small(
    dy: Array,
    x: Array,
    gamma: Array,
    statistics: Statistics,
    dx: Array,
    dgamma: Array,
    dbeta: Array,
) -> Any:
    _load_numba()
    return BACKENDS["numba"].backward_small(dy, x, gamma, statistics, dx, dgamma, dbeta)


# The reference has no time to save, and leaves all of it to the general ones.
def _no_forward_small(
    x: Array,  # noqa: ARG001
    gamma: Array,  # noqa: ARG001
    beta: Array,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    y: Array,  # noqa: ARG001
    in_place: bool,  # noqa: ARG001
) -> None:
    return None


def _no_backward_small(
    dy: Array,  # noqa: ARG001
    x: Array,  # noqa: ARG001
    gamma: Array,  # noqa: ARG001
    statistics: Statistics,  # noqa: ARG001
    dx: Array,  # noqa: ARG001
    dgamma: Array,  # noqa: ARG001
    dbeta: Array,  # noqa: ARG001
) -> None:
    return None


def _load_numba() -> None:
    # Half a second, so not before it is needed.
    with starting:
        cpu = importlib.import_module("stablenorm.kernels.cpu")
    BACKENDS["numba"] = Backend(cpu.forward, cpu.backward, cpu.forward_small, cpu.backward_small)


# For NumPy's arrays. Those on a CUDA device have one of their own, "cuda", in `of_name`.
BACKENDS = {
    "numpy": Backend(reference.forward, reference.backward, _no_forward_small, _no_backward_small),
    "numba": Backend(_numba_forward, _numba_backward, _numba_forward_small, _numba_backward_small),
}


_NAMES = (*BACKENDS, "cuda")


@functools.cache
def _why_not_numba() -> str | None:
    """Say what keeps the compiled kernels from being loaded."""
    # A NUMBA_NUM_THREADS that is no number is the user's error, not Numba's: raised here.
    get_num_threads()
    try:
        _load_numba()
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
        msg = f"backend must be one of {', '.join(map(repr, _NAMES))}, got {backend!r}"
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


def of_name(name: str) -> tuple[Arrays, Backend]:
    """Return how the arrays of a backend are handled, and its functions."""
    if name == "cuda":
        cuda = _cuda()
        return cuda.ARRAYS, cuda
    return HOST, BACKENDS[name]


def _cuda() -> Any:
    return importlib.import_module("stablenorm.cuda")
