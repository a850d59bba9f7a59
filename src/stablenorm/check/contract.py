"""
The contract: what every forward and backward must do, whatever it computes.

Inputs are left alone, the same call gives the same bits, and the backward is linear in dy. Each is
one `Finding`, whose message is one line, also where the functions raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from stablenorm.check.compare import natural_size, rms
from stablenorm.check.operation import FaultError, Loss, draw, flat, unit_roundoff
from stablenorm.check.report import Finding, FindingVerdict
from stablenorm.formats import format_of
from stablenorm.types import Array

# Two more runs of each: a race shows seldom, but what draws random numbers shows at once.
_RUNS = 2
# How deep a cache is searched for arrays: a cache of a layer in a block in a model.
_DEPTH = 4
# Not powers of two, so that every rounding is drawn anew; dy still fits into all dtypes.
_FACTORS = (3, 5, 7, 11)

# Verdict and message.
Outcome = tuple[FindingVerdict, str]
# Arrays by what a message calls them: "y", "the gradient of x".
Arrays = dict[str, Array]
_FINE: Outcome = ("PASS", "")


class Contract:
    """The operation, its arguments, and by name the gradients and scales that can be compared."""

    def __init__(
        self,
        loss: Loss,
        names: list[str],
        gradients: dict[str, Array],
        spans: list[Array],
        rng: np.random.Generator,
    ):
        self._loss, self._names, self._rng = loss, names, rng
        self._gradients = {_label(name): gradient for name, gradient in gradients.items()}
        self._spans = dict(zip(names, spans, strict=True))

    def check(self, *, backward: bool = True) -> list[Finding]:
        """Check everything but the derivatives; without `backward`, the forward alone."""
        checks: list[tuple[str, Callable[[], Outcome]]] = [
            ("the forward leaves its arguments alone", self._forward_leaves_alone),
            ("the forward is deterministic", self._forward_repeats),
        ]
        if backward:
            alone = "the backward leaves dy, the cache and the arguments alone"
            checks += [
                (alone, self._backward_leaves_alone),
                ("the backward is deterministic, and a cache can be used twice", self._repeats),
                ("the backward is linear in dy", self._linear),
            ]
        found = []
        for name, check in checks:
            try:
                verdict, message = check()
            except FaultError as fault:
                verdict, message = "FAIL", str(fault)
            found.append(Finding("contract", name, verdict, message))
        return found

    # ---- calls ----

    def _arguments(self) -> Arrays:
        """Return copies of the arguments that are there, by name."""
        pairs = zip(self._names, self._loss.args, strict=True)
        return {name: array.copy() for name, array in pairs if array is not None}

    def _forward(self, arguments: Arrays | None = None) -> tuple[Array, Any]:
        """Call the forward, on copies unless arguments are given."""
        arguments = self._arguments() if arguments is None else arguments
        return self._loss.operation.forward([arguments.get(name) for name in self._names])

    def _pull(self, dy: Array, cache: Any) -> Arrays:
        """Return gradients, copied: a backward may fill a buffer of its own again."""
        returned = self._loss.operation.gradients(dy, cache, self._loss.args)
        gradients = {}
        for label, now in zip(map(_label, self._names), returned, strict=True):
            # What was not fit to be compared the first time is not looked at again.
            first = self._gradients.get(label)
            if first is not None and (now is None or np.shape(now) != first.shape):
                got = "None" if now is None else f"shape {np.shape(now)}"
                msg = f"{label} had shape {first.shape}, then came {got}"
                raise FaultError(msg)
            if first is not None:
                gradients[label] = np.array(now)
        return gradients

    # ---- what a backward rounds ----

    @cached_property
    def _departures(self) -> Arrays:
        """
        How far multiples of dy are from giving multiples of the gradients, divided by the factor.

        A backward is linear in dy but for its rounding errors, and these do not show in the size
        of a gradient whose terms cancel (that of a softmax near 0 and 1, say).
        """
        cache = self._forward()[1]
        first = self._pull(self._loss.cotangent(), cache)
        found: dict[str, list[Array]] = {name: [] for name in first}
        for factor in _FACTORS:
            dy = (self._loss.cotangent().astype(np.float64) * factor).astype(self._loss.dtype)
            for name, gradient in self._pull(dy, cache).items():
                apart = gradient.astype(np.float64) / factor - first[name].astype(np.float64)
                found[name].append(np.where(np.isfinite(apart), apart, 0.0))
        return {name: np.array(apart) for name, apart in found.items()}

    def allowance(self, name: str) -> Array:
        """
        Return what the rounding errors measured in a backward may add to its bound, flat.

        The root mean square along the last axis: a single element may be lucky.
        """
        gradient = np.atleast_1d(self._gradients[_label(name)].astype(np.float64))
        try:
            departures = self._departures[_label(name)].reshape(-1, *gradient.shape)
        except FaultError:
            # Found, and said, by the contract.
            return np.zeros(gradient.size)
        measured = rms(rms(departures, 0)[0], -1)
        # Less the rounding of the gradient itself, twice drawn, which is in the bound already.
        u = unit_roundoff(self._gradients[_label(name)].dtype)
        measured = np.maximum(measured - 1.5 * u * rms(gradient, -1), 0.0)
        # Never more than rounding what the gradient is made of can explain: the gradient itself,
        # or y changing by its own size over the argument's scale. A backward that keeps float32
        # inside, 2^29 of these roundings, must not excuse itself.
        typical = max(float(rms(gradient)), natural_size(self._loss, self._spans[name]))
        # 16: of few samples, so many times their size.
        allowed = np.minimum(16 * measured, 2.0**8 * u * typical)
        return np.broadcast_to(allowed, gradient.shape).reshape(-1)

    # ---- inputs are left alone ----

    def _forward_leaves_alone(self) -> Outcome:
        arguments = self._arguments()
        before = _bytes(arguments.items())
        self._forward(arguments)
        return _left_alone("forward", arguments.items(), before)

    def _backward_leaves_alone(self) -> Outcome:
        arguments, dy = self._arguments(), self._loss.cotangent()
        cache = self._forward(arguments)[1]
        held = [("the cache", array) for array in _arrays_in(cache)]
        arrays = [("dy", dy), *arguments.items(), *held]
        before = _bytes(arrays)
        self._loss.operation.gradients(dy, cache, self._loss.args)
        return _left_alone("backward", arrays, before)

    # ---- the same call, the same bits; gradients, and their linearity in dy ----

    def _forward_repeats(self) -> Outcome:
        first, runs = self._loss.y_as_returned, range(_RUNS)
        return _worst(_compared({"y": self._forward()[0]}, {"y": first}) for _ in runs)

    def _repeats(self) -> Outcome:
        cache = self._forward()[1]
        first, *again = (self._pull(self._loss.cotangent(), cache) for _ in range(1 + _RUNS))
        return _worst(_compared(other, first) for other in again)

    def _linear(self) -> Outcome:
        cache, loss = self._forward()[1], self._loss
        dy, other = loss.cotangent().astype(np.float64), draw(loss.y.size, self._rng)
        other = other.reshape(loss.shape)
        # Twice one: a backward that is additive in dy for the signs it happens to meet need not
        # be homogeneous. The sum is exact in every dtype, see `draw`.
        dys = (each.astype(loss.dtype) for each in (dy, other, 2 * dy + other))
        first, second, both = (self._pull(each, cache) for each in dys)
        expected, bounds = {}, {}
        for name in self._names:
            if (label := _label(name)) in first:
                a, b, total = (flat(each[label]) for each in (first, second, both))
                # Nearer to the end of the range, the sum may overflow.
                far = np.abs(2 * a + b) >= 2.0 ** format_of(both[label].dtype).emax
                expected[label] = np.where(far, total, 2 * a + b)
                bound = sum(_bound(each[label]) for each in (first, first, second, both))
                bounds[label] = bound + 4 * self.allowance(name)
        verdict, message = _compared({n: flat(g) for n, g in both.items()}, expected, bounds)
        # Three results, each rounded: equal bits are not to be had.
        return _FINE if verdict == "NOTE" else (verdict, message)


def _arrays_in(thing: Any, depth: int = _DEPTH) -> Iterator[Array]:
    """Yield the arrays in a cache: in tuples, lists, dicts and the attributes of objects."""
    if isinstance(thing, np.ndarray):
        yield thing
    elif depth and not isinstance(thing, type):
        parts: Iterable[Any] = thing if isinstance(thing, (tuple, list)) else ()
        held = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
        for part in [*parts, *held.values()]:
            yield from _arrays_in(part, depth - 1)


def _bytes(arrays: Iterable[tuple[str, Array]]) -> list[bytes]:
    return [array.tobytes() for _, array in arrays]


def _left_alone(what: str, arrays: Iterable[tuple[str, Array]], before: list[bytes]) -> Outcome:
    pairs = zip(arrays, before, strict=True)
    changed = dict.fromkeys(name for (name, array), old in pairs if array.tobytes() != old)
    return ("FAIL", f"{what} modifies {', '.join(changed)}") if changed else _FINE


def _bound(a: Array) -> Array:
    """Bound what another order of summation does to an array, flat."""
    largest = float(np.max(np.abs(flat(a)), initial=0.0))
    bound = 16 * unit_roundoff(a.dtype) * np.sqrt(a.size) * largest
    return np.full(a.size, (bound if np.isfinite(bound) else 0.0) + 2.0**-1074)


def _label(name: str) -> str:
    return f"the gradient of {name}"


def _worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the first failure; without one, the first note."""
    found = list(outcomes)
    return next((o for verdict in ("FAIL", "NOTE") for o in found if o[0] == verdict), _FINE)


def _compared(found: Arrays, expected: Arrays, bounds: Arrays | None = None) -> Outcome:
    """Compare: equal bits PASS, a difference within the bound, flat, is a NOTE, else FAIL."""
    note = ""
    for name, e in expected.items():
        actual = found[name]
        if actual.shape != e.shape:
            return "FAIL", f"{name} has shape {e.shape}, then {actual.shape}"
        if actual.dtype == e.dtype and actual.tobytes() == e.tobytes():
            continue
        a, b, bound = flat(actual), flat(e), _bound(e) if bounds is None else bounds[name]
        alike = (a == b) | (np.isnan(a) & np.isnan(b))
        # NaN where only one of them is NaN.
        excess = float(np.max(np.where(alike, 0.0, np.abs(a - b) / bound), initial=0.0))
        if not excess <= 1:
            return "FAIL", f"{name} differs by {excess:.2g} times what rounding explains"
        if excess > 0:
            share = np.max(np.abs(a - b)) / np.max(np.abs(b), initial=2.0**-1074)
            note = note or f"{name} differs by {share:.0e} of its largest element"
    return ("NOTE", note) if note else _FINE
