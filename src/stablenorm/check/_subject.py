"""What the contract is checked on, and how two results of the same thing are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablenorm._types import Array
from stablenorm.check._compare import rounding_bound
from stablenorm.check._loss import FaultError, Loss, Operation, copies, digits


@dataclass(frozen=True)
class Subject:
    """What the contract is checked on: the operation, where, and the first results."""

    operation: Operation
    loss: Loss
    names: list[str]
    gradients: list[Array | None]
    rng: np.random.Generator

    @property
    def args(self) -> list[Array | None]:
        """The arguments; whoever hands them on makes copies."""
        return self.loss.args

    @property
    def dy(self) -> Array:
        """A new array each time."""
        return self.loss.cotangent()

    def run(self) -> tuple[Array, Any]:
        """Call the forward on copies."""
        return self.operation.forward(copies(self.args))

    def pull(self, dy: Array, cache: Any) -> list[Array | None]:
        """Call the backward; FaultError if its answer is not of the form of the first one."""
        returned = as_list(self.operation.backward(dy, cache), len(self.args))
        gradients = [
            # What was not fit to be compared the first time is not looked at again.
            None if g is None or first is None else np.asarray(g)
            for g, first in zip(returned, self.gradients, strict=True)
        ]
        for name, first, now in zip(self.names, self.gradients, gradients, strict=True):
            if first is not None and (now is None or now.shape != first.shape):
                got = "None" if now is None else f"shape {now.shape}"
                msg = f"the gradient of {name} had shape {first.shape}, then came {got}"
                raise FaultError(msg)
        return gradients


# Not powers of two, so that every rounding is drawn anew; dy still fits into all dtypes.
_FACTORS = (3, 5, 7, 11)


def measure_roundings(subject: Subject) -> list[Array | None]:
    """
    Return, for each gradient, how far multiples of dy are from giving its multiples, by row.

    A backward is linear in dy but for its rounding errors, and these do not show in the size of a
    gradient whose terms cancel (that of a softmax near 0 and 1, say). The root mean square along
    the last axis: a single element may be lucky in all of the few multiples.
    """
    try:
        cache = subject.run()[1]
        first = kept(subject.pull(subject.dy, cache))
        squares = [None if g is None else np.zeros(np.shape(g)) for g in first]
        for differences in apart_at_multiples(subject, cache, first, _FACTORS):
            for total, apart in zip(squares, differences, strict=True):
                if total is not None and apart is not None:
                    total[...] += np.square(np.where(np.isfinite(apart), apart, 0.0))
    except FaultError:
        # Found, and said, by the contract.
        return [None] * len(subject.args)
    return [None if total is None else _by_row(total / len(_FACTORS)) for total in squares]


def apart_at_multiples(
    subject: Subject, cache: Any, first: list[Array | None], factors: Sequence[int]
) -> Iterator[list[Array | None]]:
    """Yield, for each factor, how far the gradients of that many dy, divided by it, are from `first`."""
    for factor in factors:
        dy = (subject.dy.astype(np.float64) * factor).astype(subject.loss.dtype)
        yield [
            None if g is None or e is None else g.astype(np.float64) / factor - e.astype(np.float64)
            for g, e in zip(subject.pull(dy, cache), first, strict=True)
        ]


def _by_row(squares: Array) -> Array:
    rows = np.atleast_1d(squares)
    mean = np.mean(rows, axis=-1, keepdims=True) if rows.size else rows
    return np.sqrt(np.broadcast_to(mean, rows.shape)).reshape(-1)


def as_list(returned: Any, count: int) -> list[Any]:
    """Return the gradients as a list; FaultError says what came instead."""
    if not isinstance(returned, (tuple, list)):
        kind = type(returned).__name__
        msg = f"backward must return a tuple, NamedTuple or list of gradients, got {kind}"
        raise FaultError(msg)
    if len(returned) != count:
        msg = f"backward must return {count} gradients, one for each argument, got {len(returned)}"
        raise FaultError(msg)
    return list(returned)


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _excess(actual: Array, expected: Array, bound: Array) -> float:
    """Return the largest difference in units of `bound`, flat; NaN where only one is NaN."""
    a, b = (v.astype(np.float64).reshape(-1) for v in (actual, expected))
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.max(np.where(alike, 0.0, np.abs(a - b) / bound), initial=0.0))


def compared(parts: list[tuple[str, Array, Array, Array]]) -> tuple[str, str]:
    """Compare (name, actual, expected, bound) each: bits, then within rounding, then not at all."""
    note = ""
    for name, actual, expected, bound in parts:
        if _same(actual, expected):
            continue
        if actual.shape != expected.shape:
            return "FAIL", f"{name} has shape {expected.shape}, then {actual.shape}"
        excess = _excess(actual, expected, bound)
        if not excess <= 1:
            return "FAIL", f"{name} differs by {excess:.2g} times what rounding explains"
        if excess > 0:
            note = note or f"{name} differs in its last bits"
    return ("NOTE", note) if note else ("PASS", "")


def y_bound(subject: Subject) -> Array:
    """Bound what another order of summation does to y: noise as measured, where it was."""
    y = subject.loss.y
    largest = np.max(np.abs(y), initial=0.0)
    u = 2.0 ** -digits(subject.loss.dtype)
    return np.full(y.size, 16 * u * np.sqrt(max(y.size, 1)) * largest) + 2.0**-1074


def kept(gradients: list[Array | None]) -> list[Array | None]:
    # A backward may hand out a buffer of its own, which the next call fills again.
    return copies(gradients)


def pairs(
    subject: Subject, actual: list[Array | None], expected: list[Array | None], times: float = 1.0
) -> list[tuple[str, Array, Array, Array]]:
    return [
        (f"the gradient of {name}", a, e, times * gradient_bound(e, subject.loss))
        for name, a, e in zip(subject.names, actual, expected, strict=True)
        if a is not None and e is not None
    ]


def gradient_bound(gradient: Array, loss: Loss) -> Array:
    # The RMS of all of it: a row whose terms cancel has their rounding errors all the same.
    whole = rounding_bound(gradient.reshape(-1), loss)
    return np.maximum(rounding_bound(gradient, loss), np.max(whole, initial=0.0)) + 2.0**-1074
