"""The one table of implementations, and which one an array calls for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stablenorm import reference
from stablenorm._types import Statistics


class Backend(NamedTuple):
    """Two functions with the signatures of `reference.forward` and `reference.backward`."""

    forward: Callable[..., Statistics]
    backward: Callable[..., None]


BACKENDS = {
    "numpy": Backend(reference.forward, reference.backward),
}


def choose(backend: str | None) -> str:
    """Return the name of the backend to use: the one asked for, or the default."""
    if backend is None:
        return "numpy"
    if backend not in BACKENDS:
        msg = f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}"
        raise ValueError(msg)
    return backend
