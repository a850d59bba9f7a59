"""Call the functions under test safely; `Loss` is the scalar that is differentiated."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stablenorm.formats import check_dtype, format_of
from stablenorm.text import shape_text
from stablenorm.types import Array

Forward = Callable[..., Any]
Backward = Callable[[Array, Any], Any]


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """Return u, the largest relative error of one rounding to `dtype`."""
    return 2.0 ** -format_of(dtype).digits


def tiniest(dtype: np.dtype[Any]) -> float:
    """Return the smallest positive number of `dtype`."""
    return float(np.nextafter(dtype.type(0), dtype.type(1)))


def described(name: str, array: Array) -> str:
    """Name an array with its shape and dtype."""
    return f"{name} {shape_text(array.shape)} {array.dtype}"


def flat(a: Array) -> Array:
    """Return an array as one row of float64."""
    return a.astype(np.float64).reshape(-1)


def norm(a: Array) -> float:
    """Return the root of the sum of squares."""
    # np.linalg.norm starts threads of its BLAS for 10 000 numbers, which takes 30 times as long as
    # the sum while others are busy (3 ms on two cores, 2026-11), and its bits depend on their number.
    return float(np.sqrt(np.sum(np.square(a))))


def rms(values: Array, axis: int | None = None) -> Array:
    """Return the root mean square along an axis, kept; None is all axes. Squares may overflow."""
    largest = float(np.max(np.abs(values), initial=0.0)) or 1.0
    squares = np.mean(np.square(values / largest), axis=axis, keepdims=axis is not None)
    return np.asarray(largest * np.sqrt(squares))


def sum_rounding(terms: Array) -> float:
    """Bound the error of NumPy's pairwise sum of float64 terms that were computed just before."""
    return (math.log2(terms.size + 1) + 8) * 2.0**-53 * float(np.sum(np.abs(terms)))


class FaultError(Exception):
    """A function under test broke its contract; the message is one line, for the report."""

    def __init__(self, message: str, *, raised: bool = False):
        super().__init__(message)
        self.raised = raised


def _called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises
        # 160 characters, with the words before them, are two lines of a terminal.
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}".removesuffix(": ")
        msg = f"{name} raised {said}"
        raise FaultError(msg, raised=True) from None


class Operation:
    """A forward and its backward; counts the calls, and turns what they raise into a FaultError."""

    def __init__(self, forward: Forward, backward: Backward):
        self._forward, self._backward = forward, backward
        self.forward_calls = self.backward_calls = 0
        # A warning about results that do not last; empty where they do.
        self.overwritten = ""
        # The latest array of each result as it was returned, and a copy.
        self._latest: dict[str | int, tuple[Array, Array]] = {}

    def forward(self, args: Sequence[Array | None], *extra: Any) -> tuple[Array, Any]:
        """Return (y, cache) for `args` themselves, not copies; `extra` is the eps of a layer norm."""
        self.forward_calls += 1
        result = _called("forward", self._forward, *args, *extra)
        is_many = isinstance(result, (tuple, list))
        if not (is_many and len(result) == 2):
            msg = f"forward must return (y, cache), got {type(result).__name__}"
            raise FaultError(msg + (f" of {len(result)}" if is_many else ""))
        return self._copied("y", as_array("the y that forward returns", result[0])), result[1]

    def gradients(self, dy: Array, cache: Any, args: Sequence[Array | None]) -> list[Any]:
        """Return the gradients as a list, one for each of `args`; or FaultError says what came."""
        self.backward_calls += 1
        returned = _called("backward", self._backward, dy, cache)
        is_many, wanted = (
            isinstance(returned, (tuple, list)),
            "a tuple, NamedTuple or list of gradients",
        )
        if not is_many or len(returned) != len(args):
            came = type(returned).__name__
            if is_many:
                wanted, came = f"{len(args)} gradients, one for each argument", str(len(returned))
            msg = f"backward must return {wanted}, got {came}"
            raise FaultError(msg)
        both = enumerate(returned)
        return [self._copied(i, g) if isinstance(g, np.ndarray) else g for i, g in both]

    def _copied(self, name: str | int, result: Array) -> Array:
        """Copy a result, since the next call may fill the same array; remember if one has."""
        before, copied = self._latest.get(name, (result, result))
        if before.tobytes() != copied.tobytes() and np.may_share_memory(before, result):
            self.overwritten = "results are overwritten by the next call; copy what is to be kept"
        self._latest[name] = result, result.copy()
        return self._latest[name][1]


def as_array(name: str, value: Any, shape: tuple[int, ...] | None = None) -> Array:
    """Return a result as an array of one of the four dtypes and of a shape, or raise FaultError."""
    try:
        array = np.asarray(value)
        check_dtype(name, array)
    except TypeError as error:
        raise FaultError(str(error)) from None
    except ValueError:
        msg = f"{name} must be an array, got {type(value).__name__}"
        raise FaultError(msg) from None
    if shape is not None and array.shape != shape:
        msg = f"{name} must have shape {shape_text(shape)}, got {shape_text(array.shape)}"
        raise FaultError(msg)
    return array


def copies(args: Sequence[Array | None]) -> list[Array | None]:
    """Copy each array: what a function does to its arguments must not reach the next call."""
    return [None if a is None else a.copy() for a in args]


class Loss:
    """L = <u, forward(args)>, seen through differences of outputs."""

    def __init__(self, operation: Operation, args: list[Array | None], rng: np.random.Generator):
        self.args, self.operation = args, operation
        y, self.cache = operation.forward(copies(args))
        self.shape, self.dtype, self.y_as_returned = y.shape, y.dtype, y
        self.y, self.u = flat(y), draw(y.size, rng)
        # The first fault near x, by whether it was raised: such a point is left out.
        self.faults: dict[bool, str] = {}

    def arguments(self) -> list[Array | None]:
        """Copy the arguments, for a call that may modify them."""
        return copies(self.args)

    def cotangent(self) -> Array:
        """Return u as dy: of the shape and dtype of y."""
        return self.u.reshape(self.shape).astype(self.dtype)

    def settled(self, position: int, gradient: Array) -> Array:
        """Copy a gradient, rounded to the coarsest dtype of it, of its argument and of dy."""
        # A float64 scalar of NumPy makes float64 of all that it meets, and adds no digit to it.
        dtypes = gradient.dtype, np.asarray(self.args[position]).dtype, self.dtype
        with np.errstate(over="ignore"):
            rounded: Array = gradient.astype(max(dtypes, key=unit_roundoff))
        return rounded if np.isfinite(rounded).all() else gradient.copy()

    def output(self, position: int, where: Any, values: Array) -> Array:
        """Return y, flat, with the entries `where` of one argument replaced; NaN if there is none."""
        args = self.arguments()
        moved = args[position] = np.array(args[position], order="C")
        moved.reshape(-1)[where] = values.astype(moved.dtype)
        try:
            return flat(as_array("y", self.operation.forward(args)[0], self.shape))
        except FaultError as fault:
            self.faults.setdefault(fault.raised, str(fault))
        return np.full(self.y.size, np.nan)


def draw(size: int, rng: np.random.Generator) -> Array:
    """Draw a cotangent: signed, no zeros, and the same in all four dtypes."""
    # Signed, since many maps annihilate the ones; multiples of 1/16 below 4, so that each dtype
    # holds a number and three times its size exactly.
    u = np.round(rng.standard_normal(size) * 16).clip(-63, 63) / 16
    return np.where(u == 0, 0.0625, u)
