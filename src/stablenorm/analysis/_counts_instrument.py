"""
An array that counts what NumPy does with it: the instrument that the formulas are held against.

It sees ufuncs, reductions, conversions, copies and assignments of slices; its results count as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm._types import Array

_SINGLE = frozenset({np.add, np.subtract, np.multiply, np.square})
_DIVISIONS = frozenset({np.divide, np.sqrt})
# They move bits, or compare them.
_FREE = frozenset(
    {np.negative, np.absolute, np.copysign, np.maximum, np.frexp, np.ldexp, np.equal, np.not_equal,
     np.greater, np.less_equal, np.floor_divide, np.bitwise_or, np.bitwise_and}
)  # fmt: skip


class Counter:
    """What has been counted so far, in the words of `Term`."""

    def __init__(self) -> None:
        self.single = self.divisions = self.read = self.written = self.converted = 0

    def array(self, array: Array) -> Any:
        """Return a view of `array` that counts into this."""
        view = array.view(_Counting)
        view.counter = self
        return view


class _Counting(np.ndarray[Any, Any]):
    """See `Counter.array`."""

    counter: Counter | None = None

    def __array_finalize__(self, parent: Any) -> None:
        if isinstance(parent, _Counting):
            self.counter = parent.counter

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any
    ) -> Any:
        if method not in ("__call__", "reduce"):
            msg = f"an operation that is counted must be a call or a reduction, got {method}"
            raise TypeError(msg)
        plain = [_plain(value) for value in inputs]
        if out is not None:
            options["out"] = tuple(_plain(array) for array in out)
        result = getattr(ufunc, method)(*plain, **options)
        counter = _counter_of(*inputs, *(out or ()))
        if counter is None:
            return result
        results = result if isinstance(result, tuple) else (result,)
        size = plain[0].size - results[0].size if method == "reduce" else results[0].size
        if results[0].dtype.kind != "f":
            size = 0
        if ufunc in _SINGLE:
            counter.single += size
        elif ufunc in _DIVISIONS:
            counter.divisions += size
        elif ufunc not in _FREE:
            msg = f"an operation that is counted must be one that is known, got {ufunc}"
            raise TypeError(msg)
        counter.read += sum(value.nbytes for value in plain if isinstance(value, np.ndarray))
        counter.written += sum(value.nbytes for value in results)
        if out is not None:
            return out[0]
        wrapped = tuple(counter.array(np.asarray(value)) for value in results)
        return wrapped if isinstance(result, tuple) else wrapped[0]

    def __array_function__(self, function: Any, kinds: Any, arguments: Any, options: Any) -> Any:
        result = super().__array_function__(function, kinds, arguments, options)
        if function is not np.concatenate:
            return result
        # Of arrays of equal rank among subclasses NumPy makes a plain one.
        counter = _counter_of(*arguments[0])
        return result if counter is None else counter.array(result)

    def astype(  # type: ignore[override]
        self, dtype: Any, *args: Any, copy: bool = True, **options: Any
    ) -> Any:
        """Convert, and count it, unless it is nothing."""
        kind = np.dtype(dtype)
        if not copy and kind == self.dtype:
            return self
        if self.counter is not None:
            self.counter.read += self.nbytes
            self.counter.written += self.size * kind.itemsize
            self.counter.converted += self.size if kind != self.dtype else 0
        return np.ndarray.astype(self, dtype, *args, copy=copy, **options)  # type: ignore[call-overload]

    def copy(self, *args: Any) -> Any:
        """Copy, and count it."""
        if self.counter is not None:
            self.counter.read += self.nbytes
            self.counter.written += self.nbytes
        return super().copy(*args)

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = np.asarray(value)
        target = np.asarray(self)[key]
        # After ``a[part] += b`` Python assigns the part to itself, which NumPy notices.
        if self.counter is not None and target.ctypes.data != plain.ctypes.data:
            self.counter.read += plain.nbytes
            self.counter.written += target.nbytes
        super().__setitem__(key, plain)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Counting) else value


def _counter_of(*values: Any) -> Counter | None:
    found = (value.counter for value in values if isinstance(value, _Counting))
    return next((counter for counter in found if counter is not None), None)
