"""
What the public functions do with the arrays they are given, for each place that arrays live in.

NumPy's are here; those on a CUDA device have the same six functions in `stablenorm.cuda`. A CUDA array
is recognised by its protocols, so that nothing of CUDA is loaded to find that there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm import _recycling
from stablenorm._shapes import as_rows, overlap, same_elements
from stablenorm._types import Array, check_dtype

# Of DLPack: memory of a CUDA device, and memory that CUDA moves between host and device.
_CUDA_KINDS = frozenset((2, 13))


class Arrays(NamedTuple):
    """
    How arrays of one place are read, made and compared.

    `convert` (name, value) returns an array of this place, its dtype checked. `target` (name,
    array, shape, dtype) returns an array that may be written into, `empty` (shape, dtype, like) a
    new one beside `like`. `rows` (array, axes) returns what a backend takes for it.
    """

    convert: Callable[[str, Any], Array]
    target: Callable[..., Array]
    empty: Callable[[tuple[int, ...], np.dtype[Any], Any], Array]
    overlap: Callable[[Array, Array], bool]
    same_elements: Callable[[Array, Array], bool]
    rows: Callable[[Array, tuple[int, ...]], Any]


def on_cuda_device(value: Any) -> bool:
    """Tell whether the elements of `value` are in the memory of a CUDA device."""
    if isinstance(value, (np.ndarray, np.generic)):
        return False
    # Others' attributes raise whatever they like where they do not apply.
    with contextlib.suppress(Exception):
        return value.__dlpack_device__()[0] in _CUDA_KINDS
    with contextlib.suppress(Exception):
        return value.__cuda_array_interface__ is not None
    return False


def _convert(name: str, value: Any) -> Array:
    if type(value) is np.ndarray:
        check_dtype(name, value)
        return _native(value)
    if isinstance(value, np.ma.MaskedArray):
        msg = f"{name} must be a plain array, got a masked one, whose mask would be ignored"
        raise TypeError(msg)
    if on_cuda_device(value):
        raise TypeError(mixed(name, value, "in host memory"))
    array = np.asarray(value)
    check_dtype(name, array)
    return _native(array)


def _native(array: Array) -> Array:
    """Return `array`, or a copy in the byte order of this machine, the only one computed with."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _target(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if not isinstance(array, np.ndarray):
        if on_cuda_device(array):
            raise TypeError(mixed(name, array, "in host memory"))
        msg = f"{name} must be a NumPy array to write into, got {type(array).__name__}"
        raise TypeError(msg)
    check_target(name, array, shape, dtype)
    if not array.flags.writeable:
        msg = f"{name} must be writeable, got a read-only array"
        raise ValueError(msg)
    check_distinct(name, array)
    return array


def check_target(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise unless a result of this shape and dtype can be written into `array`."""
    if array.shape != shape:
        msg = f"{name} must have shape {shape}, got {array.shape}"
        raise ValueError(msg)
    if array.dtype != dtype:
        msg = f"{name} must have dtype {dtype}, got {array.dtype}"
        raise TypeError(msg)


def check_distinct(name: str, array: Any) -> None:
    """Raise if two elements of `array` share memory by a stride of zero."""
    # Looked for first, since of small arrays the loop would be a twentieth of the whole call; and
    # an array without elements, whose strides NumPy sets to 0, has none to share.
    if 0 not in array.strides or not array.size:
        return
    if any(step == 0 < length - 1 for step, length in zip(array.strides, array.shape, strict=True)):
        msg = f"{name} must have an element of its own for each result, got strides {array.strides}"
        raise ValueError(msg)


def mixed(name: str, value: Any, others: str) -> str:
    """Say that `value` is not where the other arguments are."""
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    return (
        f"{name} must be {others}, like the other arguments, got {kind}; cupy.asarray copies an "
        "array to the device, its method get back"
    )


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], _: Any) -> Array:
    return _recycling.empty(shape, dtype)


HOST = Arrays(_convert, _target, _empty, overlap, same_elements, as_rows)
