"""What `check_gradients` is given: checked once, in full, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stablenorm._types import Array, check_dtype
from stablenorm.check._loss import powers_of_two


def check_args(args: Sequence[Any]) -> list[Array | None]:
    """Return the arguments as arrays of their own, C-contiguous; raise if there are none."""
    if not isinstance(args, (tuple, list)) or len(args) == 0:
        msg = f"args must be a tuple or list of at least one array, got {args!r:.60}"
        raise ValueError(msg)
    # Copies, so that nothing that forward or backward does can reach the caller's arrays.
    arrays = [None if a is None else np.array(a, order="C") for a in args]
    for position, array in enumerate(arrays):
        if array is not None:
            check_dtype(f"args[{position}]", array)
    return arrays


def check_finite(name: str, array: Array | None) -> None:
    """Raise ValueError if there is no derivative to be had at `array`."""
    if array is not None and not np.isfinite(array).all():
        msg = f"{name} must be finite to be differentiated, got NaN or infinity"
        raise ValueError(msg)


def check_names(names: Sequence[str] | None, count: int) -> list[str]:
    """Return one name for each argument."""
    if names is None:
        return [f"args[{position}]" for position in range(count)]
    if len(names) != count:
        msg = f"names must have one name for each of {count} args, got {len(names)}"
        raise ValueError(msg)
    return list(names)


def check_scales(scales: Sequence[Any] | None, arrays: list[Array | None]) -> list[Array | None]:
    """Return for each argument its scale, flat, in powers of two."""
    if scales is None:
        scales = [None] * len(arrays)
    if len(scales) != len(arrays):
        msg = f"scales must have one entry for each of {len(arrays)} args, got {len(scales)}"
        raise ValueError(msg)
    spans: list[Array | None] = []
    for position, (scale, array) in enumerate(zip(scales, arrays, strict=True)):
        if array is None:
            spans.append(None)
            continue
        span = _default_scale(array) if scale is None else np.asarray(scale, dtype=np.float64)
        if not (np.isfinite(span).all() and (span > 0).all()):
            msg = f"scales[{position}] must be finite and > 0, got {scale!r:.60}"
            raise ValueError(msg)
        spans.append(powers_of_two(np.broadcast_to(span, array.shape).reshape(-1)))
    return spans


def _default_scale(array: Array) -> Array:
    """Return the standard deviation along the last axis; where that is 0, the next best."""
    if array.size == 0 or not np.isfinite(array).all():
        return np.ones(())
    values = np.atleast_1d(array.astype(np.float64))
    # Divided by the largest magnitude, lest squares overflow or vanish.
    largest = float(np.abs(values).max()) or 1.0
    values /= largest
    scale = values.std(axis=-1, keepdims=True)
    # No spread, but for rounding: that of the whole array; none either: the magnitude is all
    # that is known.
    for fallback in (float(values.std()), 1.0):
        scale = np.where(scale > 2.0**-50, scale, fallback)
    return (scale * largest).reshape(array.shape[:-1] + (1,) * min(array.ndim, 1))
