"""The operation that the contract is checked on, and the comparison of two results."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from stablenorm.check.compare import rounding_bound
from stablenorm.check.operation import FaultError, Loss, unit_roundoff
from stablenorm.check.report import FindingVerdict
from stablenorm.types import Array

# Not powers of two, so that every rounding is drawn anew; dy still fits into all dtypes.
_FACTORS = (3, 5, 7, 11)

# Verdict and message.
Outcome = tuple[FindingVerdict, str]
# What is compared: name, actual, expected, and how far they may be apart.
Part = tuple[str, Array, Array, Array]


class Subject:
    """The operation, its arguments, and the gradients that can be compared."""

    def __init__(
        self,
        loss: Loss,
        names: list[str],
        gradients: list[Array | None],
        rng: np.random.Generator,
    ):
        self.loss, self.names, self.rng = loss, names, rng
        pairs = zip(names, gradients, strict=True)
        self.gradients = {name: gradient for name, gradient in pairs if gradient is not None}

    @property
    def dy(self) -> Array:
        """A new array each time."""
        return self.loss.cotangent()

    def arguments(self) -> dict[str, Array]:
        """Return copies of the arguments that are there."""
        pairs = zip(self.names, self.loss.args, strict=True)
        return {name: array.copy() for name, array in pairs if array is not None}

    def forward(self, arguments: dict[str, Array] | None = None) -> tuple[Array, Any]:
        """Call the forward, on copies unless arguments are given."""
        arguments = self.arguments() if arguments is None else arguments
        return self.loss.operation.forward([arguments.get(name) for name in self.names])

    def pull(self, dy: Array, cache: Any) -> dict[str, Array]:
        """Return copies of the gradients: a backward may fill a buffer of its own again."""
        return {name: gradient.copy() for name, gradient in self.pull_as_is(dy, cache).items()}

    def pull_as_is(self, dy: Array, cache: Any) -> dict[str, Array]:
        """Return the gradients; FaultError if they are not of the form of the first ones."""
        returned = self.loss.operation.gradients(dy, cache, self.loss.args)
        gradients = {}
        for name, now in zip(self.names, returned, strict=True):
            # What was not fit to be compared the first time is not looked at again.
            first = self.gradients.get(name)
            if first is None:
                continue
            if now is None or np.shape(now) != first.shape:
                got = "None" if now is None else f"shape {np.shape(now)}"
                msg = f"the gradient of {name} had shape {first.shape}, then came {got}"
                raise FaultError(msg)
            gradients[name] = np.asarray(now)
        return gradients

    def parts(self, actual: dict[str, Array], expected: dict[str, Array]) -> list[Part]:
        """Pair gradients with what they must be, and with what rounding may do to them."""
        return [
            (f"the gradient of {name}", actual[name], e, gradient_bound(e, self.loss))
            for name, e in expected.items()
        ]

    @cached_property
    def departures(self) -> dict[str, list[Array]]:
        """
        How far multiples of dy are from giving multiples of the gradients, divided by the factor.

        A backward is linear in dy but for its rounding errors, and these do not show in the size
        of a gradient whose terms cancel (that of a softmax near 0 and 1, say).
        """
        cache = self.forward()[1]
        first = self.pull(self.dy, cache)
        found: dict[str, list[Array]] = {name: [] for name in first}
        for factor in _FACTORS:
            dy = (self.dy.astype(np.float64) * factor).astype(self.loss.dtype)
            for name, gradient in self.pull(dy, cache).items():
                apart = gradient.astype(np.float64) / factor - first[name].astype(np.float64)
                found[name].append(np.where(np.isfinite(apart), apart, 0.0))
        return found

    def roundings(self, name: str) -> Array | None:
        """
        Return the rounding errors of a gradient, flat; None where the backward breaks down.

        The root mean square along the last axis: a single element may be lucky.
        """
        try:
            departures = np.array(self.departures[name])
        except FaultError:
            # Found, and said, by the contract.
            return None
        shape = departures.shape[1:] or (1,)
        squares = np.mean(np.square(departures), axis=0).reshape(shape)
        rms = np.sqrt(np.mean(squares, axis=-1, keepdims=True))
        return np.broadcast_to(rms, shape).reshape(-1)


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _excess(actual: Array, expected: Array, bound: Array) -> float:
    """Return the largest difference in units of `bound`, flat; NaN where only one is NaN."""
    a, b = (v.astype(np.float64).reshape(-1) for v in (actual, expected))
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.max(np.where(alike, 0.0, np.abs(a - b) / bound), initial=0.0))


def compared(parts: Iterable[Part]) -> Outcome:
    """Compare parts: equal bits PASS, a difference within the bound is a NOTE, else FAIL."""
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
    """Bound what another order of summation does to y."""
    y, u = subject.loss.y, unit_roundoff(subject.loss.dtype)
    largest = np.max(np.abs(y), initial=0.0)
    return np.full(y.size, 16 * u * np.sqrt(max(y.size, 1)) * largest) + 2.0**-1074


def gradient_bound(gradient: Array, loss: Loss) -> Array:
    # The RMS of all of it: a row whose terms cancel has their rounding errors all the same.
    whole = rounding_bound(gradient.reshape(-1), loss)
    return np.maximum(rounding_bound(gradient, loss), np.max(whole, initial=0.0)) + 2.0**-1074
