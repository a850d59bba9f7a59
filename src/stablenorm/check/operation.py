"""Call the functions under test safely, and measure what they return."""

import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
from numpy.random import Generator

from stablenorm.formats import check_dtype, format_of
from stablenorm.output import described, shape_text
from stablenorm.records import Array, Shape

# Frames of ours, which no traceback of a user's code shows.
_OURS = str(Path(__file__).parents[1])
# Py_TPFLAGS_HEAPTYPE: a class that Python code made.
_HEAP_TYPE = 1 << 9
Given = dict[str, Array | None]
Backward = Callable[[Array, Any], Any]


class FaultError(Exception):
    """A function under test broke its contract or raised; the message is one line of the report."""

    # The traceback of what it raised, from its own code on.
    trace = ""

    @property
    def raised(self) -> bool:
        """Whether the function raised."""
        return self.trace != ""

    @classmethod
    def of(cls, error: BaseException) -> "FaultError":
        """Say what a function raised, and where in its own file."""
        every = traceback.extract_tb(error.__traceback__)
        frames = [
            *itertools.dropwhile(lambda frame: frame.filename.startswith((_OURS, "<frozen")), every)
        ]
        # Name the innermost line of that file: code that it calls is seldom to blame.
        own = [f for f in frames if f.filename == frames[0].filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        # 120 characters, with the words around them, are two lines of a terminal.
        said = " ".join(str(error).split())[:120].strip()
        if isinstance(error, SyntaxError):
            said, place = error.msg, f"{Path(error.filename or '').name}:{error.lineno}"
        fault = cls(
            f"{type(error).__name__}: {said}".removesuffix(": ") + f" at {place}" * bool(place)
        )
        words = traceback.format_exception_only(error)
        fault.trace = "".join(traceback.format_list(frames) + words)
        return fault


class Missing(str):
    """Stands for a gradient that is found nowhere; the text says so."""


class Unknown(str):
    """Stands for a gradient that cannot be judged; the text says why."""


class Operation:
    """A forward and its backward; watches the calls, and turns their exceptions into FaultError."""

    def __init__(self, forward: Callable[..., Any], backward: Backward, view: Any = None):
        self._forward, self._backward, self.start = forward, backward, time.perf_counter()
        # Arrays as the code takes them: `view.back` of ours by name, `view.there` of its by name.
        self._view = view
        self.forward_calls = self.backward_calls = 0
        # Arguments whose gradient has a wrong shape, or is none: reported once, then left out.
        self.left_out: set[str] = set()
        # The traceback of the first fault that ended the check.
        self.trace = ""
        # Words for the arrays that a "forward" or a "backward" has modified.
        self.modified: dict[str, str] = {}
        # A warning if a later call overwrites results; else empty.
        self.overwritten = ""
        # Copies of the arguments of the latest forward, by name.
        self._given: Given = {}
        # The latest array of each result, and a copy of it.
        self._latest: dict[str, tuple[Array, Array]] = {}

    def forward(self, args: Given, *eps: float) -> tuple[Array, Any]:
        """Return (y, cache) for copies of `args`; a layer norm takes `eps`."""
        self.forward_calls += 1
        # A function that modifies its arguments must not reach the next call.
        own = {name: None if a is None else a.copy() for name, a in args.items()}
        own = self._given = self._view.back(own) if self._view else own
        result = self._watched("forward", self._forward, [*own.items()], *own.values(), *eps)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            msg = f"the forward must return (y, cache), got {described(result)}"
            raise FaultError(msg)
        y = as_array("the y that forward returns", result[0])
        return self._copied("y", y), result[1]

    def gradients(self, dy: Array, cache: Any) -> dict[str, Any]:
        """Return the gradients by the names of the arguments; FaultError for another return value."""
        self.backward_calls += 1
        dy = self._view.back({"x": dy})["x"] if self._view else dy
        reach = [("dy", dy), *self._given.items(), ("the cache", cache)]
        returned = self._watched("backward", self._backward, reach, dy, cache)
        if isinstance(returned, (tuple, list)) and len(returned) == len(self._given):
            both = zip(self._given, returned, strict=True)
            known = ((n, None if n in self.left_out else gradient) for n, gradient in both)
            return {name: self._copied(f"d{name}", gradient) for name, gradient in known}
        wanted = f"a tuple or list of {len(self._given)} gradients, one for each argument"
        msg = f"the backward must return {wanted}, got {described(returned)}"
        raise FaultError(msg)

    def _watched(self, way: str, function: Any, reach: list[tuple[str, Any]], *args: Any) -> Any:
        """Call a function, and remember which arrays within its reach it modifies."""
        before = [(name, a, a.tobytes()) for name, value in reach for a in leaves(value)]
        try:
            # Squares may overflow and roots be NaN: the check judges results instead of warning.
            with np.errstate(all="ignore"):
                result = function(*args)
        except FaultError:
            # The message of an adapter is complete.
            raise
        except (KeyboardInterrupt, MemoryError):
            raise
        # SystemExit too: exit() in a function ends the function, not the check.
        except BaseException as error:  # noqa: BLE001 - whatever a user's function raises
            fault = FaultError.of(error)
            fault.args = (f"your {way} raised {fault}",)
            raise fault from None
        if changed := dict.fromkeys(name for name, a, old in before if a.tobytes() != old):
            self.modified[way] = f"the {way} modifies {', '.join(changed)}"
        return result

    def _copied(self, name: str, result: Any) -> Any:
        """Copy an array, because the next call may overwrite it; remember if one did."""
        if not isinstance(result, np.ndarray):
            return result
        result = self._view.there(name, result) if self._view else result
        before, copied = self._latest.get(name, (result, result))
        if before.tobytes() != copied.tobytes() and np.may_share_memory(before, result):
            self.overwritten = "results are overwritten by the next call; copy what is to be kept"
        self._latest[name] = result, result.copy()
        return self._latest[name][1]


def as_array(name: str, value: Any, shape: Shape | None = None) -> Array:
    """Return a result as an array of this shape and one of the four dtypes, or raise FaultError."""
    try:
        array = np.asarray(value)
        check_dtype(name, array)
    except Exception as error:  # noqa: BLE001 - whatever an array of another package raises
        said = " ".join(str(error).split())
        if not said.startswith(name):
            said = f"{name} must be an array, got {type(value).__name__}: {said}"
        raise FaultError(said) from None
    if shape is not None and array.shape != shape:
        msg = f"{name} must have shape {shape_text(shape)}, got {shape_text(array.shape)}"
        raise FaultError(msg)
    return array


def leaves(cache: Any, depth: int = 4) -> Iterator[Array]:
    """Yield the arrays in a cache; the depth is enough for a layer in a block in a model."""
    return (array for _, array in arrays_in(cache, depth))


def arrays_in(
    owner: Any, depth: int = 4, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Array]]:
    """Yield the arrays in an object, its classes and closures, and the attributes, keys and places that lead to them."""
    if isinstance(owner, np.ndarray):
        yield path, owner
    elif depth and not isinstance(owner, (type, ModuleType)):
        parts: dict[Any, Any] = dict(enumerate(owner)) if isinstance(owner, (tuple, list)) else {}
        parts |= owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        if cells := getattr(owner, "__closure__", None):
            parts |= zip(owner.__code__.co_freevars, (c.cell_contents for c in cells), strict=True)
        for class_ in type(owner).__mro__ if type(owner).__flags__ & _HEAP_TYPE else ():
            for name, value in vars(class_).items():
                # Slots by the names under which they are stored: those of private ones hold the name of the class.
                is_slot = isinstance(value, MemberDescriptorType)
                if is_slot or isinstance(value, (np.ndarray, dict, list, FunctionType)):
                    parts.setdefault(name, getattr(owner, name, None) if is_slot else value)
        for name, part in parts.items():
            yield from arrays_in(part, depth - 1, (*path, str(name)))


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """Return u, the largest relative error of one rounding to `dtype`."""
    return 2.0 ** -format_of(dtype).digits


def tiniest(dtype: np.dtype[Any]) -> float:
    """Return the smallest positive number of `dtype`."""
    return float(np.nextafter(dtype.type(0), dtype.type(1)))


def flat(a: Array) -> Array:
    """Return an array as one row of float64."""
    return a.astype(np.float64).reshape(-1)


def rms(values: Array, axis: int | None = None) -> Array:
    """Return the root mean square along an axis, kept; None is all axes."""
    of: Any = {"axis": axis, "keepdims": axis is not None}
    # Divide by the largest, lest squares overflow or vanish.
    largest = np.max(np.abs(values), initial=0.0, **of)
    largest = np.where(largest > 0, largest, 1.0)
    return np.asarray(largest * np.sqrt(np.mean(np.square(values / largest), **of)))


class Loss:
    """L = <u, forward(*args)>, seen through differences of outputs; `args`, and `spans`, by name."""

    # How far gradients of one dy may be apart, relative to the largest.
    noise = 0.0

    def __init__(self, operation: Operation, args: Given, spans: dict[str, Array], rng: Generator):
        self.operation, self.args, self.spans, self.rng = operation, args, spans, rng
        self.y_as_returned, self.cache = operation.forward(args)
        self.y, self.dy = flat(self.y_as_returned), self.draw()
        self.u = flat(self.dy)
        # The first fault near x, by whether it was raised; the comparison skips such points.
        self.faults: dict[bool, str] = {}

    def draw(self) -> Array:
        """Draw a cotangent like y: signed, no zeros, and the same in all four dtypes."""
        # Both signs, because many maps annihilate the ones. Multiples of 1/16 below 4: every dtype holds
        # a number and three times its size exactly.
        y = self.y_as_returned
        u = np.round(self.rng.standard_normal(y.shape) * 16).clip(-63, 63) / 16
        return np.where(u == 0, 0.0625, u).astype(y.dtype)
