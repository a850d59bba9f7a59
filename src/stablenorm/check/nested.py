"""Arguments that are dicts or lists of arrays, as parameters of a model are, seen as single arrays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


def is_nested(value: Any) -> bool:
    """Tell whether a value is a dict, or a list or tuple of arrays; a list of numbers is an array."""
    parts = value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, dict) or any(isinstance(a, (np.ndarray, dict, list)) for a in parts)


def flattened(
    forward: Callable[..., Any], backward: Callable[..., Any], args: Sequence[Any],
    names: Sequence[str] | None,
) -> tuple[Any, Any, list[Any], list[str]]:  # fmt: skip
    """Return both functions as those of single arrays, the arrays, and their names, as "args[0]['weight']"."""
    labels = [f"args[{i}]" for i in range(len(args))] if names is None else names
    pairs = [pair for pair in zip(labels, args, strict=True) for pair in _parts(*pair)]

    def call(*arrays: Any) -> Any:
        leaves = iter(arrays)
        return forward(*(_like(arg, leaves) for arg in args))

    def pull(dy: Any, cache: Any) -> list[Any]:
        returned = backward(dy, cache)
        gradients = returned if isinstance(returned, (tuple, list)) else [returned]
        return [g for arg, own in zip(args, gradients, strict=True) for g in _follow(arg, own)]

    return call, pull, [array for _, array in pairs], [name for name, _ in pairs]


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _parts(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not is_nested(value):
        yield label, value
        return
    for key, part in _items(value):
        yield from _parts(f"{label}[{key!r}]", part)


def _like(value: Any, leaves: Iterator[Any]) -> Any:
    """Return the next leaves in the form of a value."""
    if not is_nested(value):
        return next(leaves)
    made = {key: _like(part, leaves) for key, part in _items(value)}
    return made if isinstance(value, dict) else type(value)(made.values())


def _follow(value: Any, gradient: Any) -> Iterator[Any]:
    """Yield the gradients of the parts of a value; one that is missing is None."""
    if not is_nested(value):
        yield gradient
        return
    for key, part in _items(value):
        has = gradient is not None and (key in gradient if isinstance(value, dict) else True)
        yield from _follow(part, gradient[key] if has else None)
