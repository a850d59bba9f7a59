"""
The rules of a call: what every forward and backward must do, whatever it computes.

Inputs are left alone, the same call gives the same bits, and the backward is linear in dy. Each is
one `Finding`, whose message is one line, also where the functions raise.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator

from stablenorm.check.compare import natural_size
from stablenorm.check.operation import FaultError, Loss, as_array, draw, flat, rms, unit_roundoff
from stablenorm.check.results import TINIEST, Finding
from stablenorm.formats import format_of
from stablenorm.types import Array

# A race shows seldom in three runs, but random numbers in the code show at once.
_RUNS = 3
# Depth to which a cache is searched for arrays: a cache of a layer in a block in a model.
_DEPTH = 4
# No powers of two, so that every rounding is drawn anew; dy still fits into all dtypes.
_FACTORS = np.array([3, 5, 7, 11])
_OF = "the gradient of "
_OVERWRITTEN = "results, and the cache, are overwritten by the next call"
_UNKNOWN = "the cache is overwritten by the next call, or not used: it cannot be copied to tell"

# Arrays by argument; those that cannot be compared are left out.
Gradients = dict[str, Array]


class CallRules:
    """The operation; by name its arguments' scales, and the gradients that can be compared."""

    def __init__(self, loss: Loss, spans: Gradients, gradients: Gradients, rng: Generator):
        self._loss, self._spans, self._gradients, self._rng = loss, spans, gradients, rng
        self._operation, self._dy = loss.operation, flat(loss.cotangent())

    def check(self, *, backward: bool = True) -> list[Finding]:
        """Check everything but the derivatives; without `backward`, the forward alone."""
        # A rule returns the words for what is wrong.
        y, again = self._loss.y_as_returned, [self._dy] * _RUNS
        rules: dict[str, Callable[[], str]] = {
            "the forward leaves its arguments alone": partial(self._modified, "forward"),
            "the forward is deterministic": lambda: _differ(
                "", {"y": y}, *({"y": self._forward()[0]} for _ in again[1:])
            ),
            "the backward leaves dy, the cache and the arguments alone": partial(
                self._modified, "backward"
            ),
            "the backward is deterministic, and a cache can be used twice": lambda: _differ(
                _OF, *self._pulls(again)
            ),
            "the backward is linear in dy": self._linear,
            "the backward uses the cache that it is given": self._uses_its_cache,
        }
        found: list[Finding] = []
        for name, rule in list(rules.items())[: None if backward else 2]:
            # Gradients that differ at each call would be blamed on the cache too.
            if rule == self._uses_its_cache and any(f.verdict == "FAIL" for f in found):
                continue
            try:
                message = rule()
            except FaultError as fault:
                message = str(fault)
            found.append(Finding("contract", name, "FAIL" if message else "PASS", message))
        return found

    def allowances(self) -> Gradients:
        """
        Return what the rounding errors measured in the backward may add to its bounds, flat.

        They do not show in the size of a gradient whose terms cancel, that of a saturated softmax
        say. Measured is how far multiples of dy are from giving multiples of the gradients, by the
        RMS along the last axis, and at most what rounding can explain.
        """
        try:
            first, *more = self._pulls(self._dy * factor for factor in (1, *_FACTORS))
        except FaultError:
            # The rules have found it, and said so.
            return {name: np.zeros(a.size) for name, a in self._gradients.items()}
        found = {}
        for name, a in self._gradients.items():
            runs, wide = np.array([flat(each[name]) for each in more]), np.atleast_1d(a)
            apart = np.nan_to_num((runs.T / _FACTORS).T - flat(first[name]), posinf=0, neginf=0)
            measured = rms(rms(apart, 0).reshape(wide.shape), -1)
            # The bound has the rounding of the gradient itself already, drawn twice here.
            own = 1.5 * unit_roundoff(a.dtype) * rms(wide.astype(np.float64), -1)
            # Few samples may be 16 times too small.
            allowed = np.minimum(16 * np.maximum(measured - own, 0), self._explained(name))
            found[name] = np.broadcast_to(allowed, wide.shape).reshape(-1)
        return found

    def _explained(self, name: str) -> float:
        """Return 256 roundings of a gradient, or of y changing by its size over the scale."""
        gradient = self._gradients[name]
        typical = max(float(rms(flat(gradient))), natural_size(self._loss, self._spans[name]))
        return 2.0**8 * unit_roundoff(gradient.dtype) * typical

    def _forward(self) -> tuple[Array, Any]:
        return self._operation.forward(self._loss.arguments())

    def _pulls(self, dys: Iterable[Array], cache: Any = None) -> list[Gradients]:
        """Pull each dy back through one cache; return what was fit to be compared the first time."""
        cache, runs = self._forward()[1] if cache is None else cache, []
        for dy in dys:
            given = dy.reshape(self._loss.shape).astype(self._loss.dtype)
            returned, found = self._operation.gradients(given, cache, self._loss.args), {}
            for position, name in enumerate(self._spans):
                if name in self._gradients:
                    shape = self._gradients[name].shape
                    array = as_array(f"{_OF}{name}", returned[position], shape)
                    found[name] = self._loss.settled(position, array)
            runs.append(found)
        return runs

    def _modified(self, what: str) -> str:
        """Say which arrays a call modifies."""
        args, dy = self._loss.arguments(), self._loss.cotangent()
        cache = self._operation.forward(args)[1] if what == "backward" else None
        held = [("dy", dy), *zip(self._spans, args, strict=True), ("the cache", cache)]
        arrays = [(name, a, a.tobytes()) for name, each in held for a in _arrays_in(each)]
        if what == "backward":
            self._operation.gradients(dy, cache, args)
        else:
            self._operation.forward(args)
        changed = dict.fromkeys(name for name, a, before in arrays if a.tobytes() != before)
        return f"the {what} modifies {', '.join(changed)}" if changed else ""

    def _linear(self) -> str:
        """Say where a backward is not linear: by twice dy, lest it be additive for these signs alone."""
        dy, other = self._dy, draw(self._dy.size, self._rng)
        # The sum is exact in every dtype, see `draw`.
        first, second, both = self._pulls((dy, other, 2 * dy + other))
        for name, total in both.items():
            a, b = first[name], second[name]
            made = 2 * flat(a) + flat(b)
            # Nearer to the end of the range, the sum may overflow.
            far = np.abs(made) >= 2.0 ** format_of(total.dtype).emax
            # Any order of summation, and terms that cancel.
            bound = 2 * _bound(a) + _bound(b) + _bound(total) + 4 * self._explained(name)
            made = np.where(far, flat(total), made)
            if said := _apart(f"{_OF}{name}", flat(total), made, bound):
                return said
        return ""

    def _uses_its_cache(self) -> str:
        """Pull dy back through the first of two forwards, after the second one."""
        cache, moved = self._forward()[1], self._loss.arguments()
        # A class that keeps what it needs has no cache.
        if cache is None:
            return ""
        copied = _copy_of(cache)
        for i, (a, span) in enumerate(zip(moved, self._spans.values(), strict=True)):
            if a is not None:
                # At random, by up to a quarter of the scale: a shift of all is nothing to a softmax.
                by = span * self._rng.uniform(-0.25, 0.25, span.shape)
                moved[i] = (a + by.reshape(a.shape)).astype(a.dtype)

        def is_off(cache: Any) -> bool:
            try:
                return bool(_differ(_OF, self._gradients, *self._pulls([self._dy], cache)))
            except FaultError:
                return True

        # Nothing can be asked where the operation is not defined.
        with suppress(FaultError):
            self._operation.forward(moved)
            if is_off(cache):
                if copied is not None and is_off(copied):
                    return "it returns the gradients of the latest forward, whose cache it was not given"
                self._operation.overwritten = _OVERWRITTEN if copied is not None else _UNKNOWN
        return ""


def _arrays_in(thing: Any, depth: int = _DEPTH) -> Iterator[Array]:
    """Yield the arrays in a cache: in tuples, lists, dicts and the attributes of objects."""
    if isinstance(thing, np.ndarray):
        yield thing
    elif depth and not isinstance(thing, type):
        held = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
        for part in [*(thing if isinstance(thing, (tuple, list)) else ()), *held.values()]:
            yield from _arrays_in(part, depth - 1)


def _copy_of(cache: Any) -> Any:
    """Copy a cache with its arrays; None where that cannot be, or there are none to be seen."""
    try:
        copied = copy.deepcopy(cache)
    except Exception:  # noqa: BLE001 - whatever an object of the user's raises
        return None
    # A closure is its own copy, and all in it.
    arrays = set(map(id, _arrays_in(copied)))
    return copied if arrays and arrays.isdisjoint(map(id, _arrays_in(cache))) else None


def _bound(a: Array) -> float:
    """Bound what another order of summation does to the elements of an array."""
    largest = float(np.max(np.abs(flat(a)), initial=0.0))
    bound = 16 * unit_roundoff(a.dtype) * np.sqrt(a.size) * largest
    return float(bound if np.isfinite(bound) else 0.0) + TINIEST


def _differ(what: str, first: Gradients, *more: Gradients) -> str:
    """Say which results of the same call differ, and how far."""
    said = (_apart(f"{what}{n}", a, each[n], _bound(a)) for n, a in first.items() for each in more)
    return next(filter(None, said), "")


def _apart(name: str, first: Array, other: Array, bound: float) -> str:
    """Say how far two results are apart, if by more than rounding explains."""
    a, b = flat(as_array(name, other, first.shape)), flat(first)
    # NaN where only one of them is NaN.
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    z = np.max(apart, initial=0.0) / bound
    return "" if z <= 1 else f"{name} differs by {z:.2g} times what rounding explains"
