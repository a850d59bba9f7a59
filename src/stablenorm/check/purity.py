"""
The rules of a call: what every forward and backward must do, whatever it computes.

Inputs are left alone, the same call gives the same bits, and the backward is linear in dy. Each is
one `Finding`, whose message is one line, also where the functions raise.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from stablenorm.check.differences import Argument
from stablenorm.check.operation import FaultError, Loss, as_array, flat, leaves, rms, unit_roundoff
from stablenorm.check.results import TINIEST, Finding
from stablenorm.formats import format_of
from stablenorm.types import Array

# A race shows seldom in three runs, but random numbers in the code show at once.
_RUNS = 3
# No powers of two, so that every rounding is drawn anew; dy still fits into all dtypes.
_FACTORS = np.array([3, 5, 7, 11])
_LATEST = "it returns the gradients of the latest forward, whose cache it was not given"
_OVERWRITTEN = "results, and the cache, are overwritten by the next call"
_UNKNOWN = "the cache is overwritten by the next call, or not used: it cannot be copied to tell"


class CallRules:
    """The rules for one operation, and its arguments whose gradients can be compared."""

    def __init__(self, loss: Loss, arguments: list[Argument]):
        self._loss, self._operation, self._dy = loss, loss.operation, flat(loss.dy)
        self._arguments = {each.label: each for each in arguments}

    def check(self, *, backward: bool = True) -> list[Finding]:
        """Check everything but the derivatives; without `backward`, the forward alone."""
        modified, pulled = self._operation.modified, self._pulls([self._dy] * _RUNS)
        # A rule returns the words for what is wrong.
        rules: list[tuple[str, Callable[[], str]]] = [
            ("the forward leaves its arguments alone", lambda: modified.get("forward", "")),
            ("the forward is deterministic", lambda: _differ(*self._outputs())),
            ("the backward leaves dy, the cache and the arguments alone",
             lambda: modified.get("backward", "")),
            ("the backward is deterministic, and a cache can be used twice",
             lambda: _differ(*pulled)),
            ("the backward is linear in dy", self._linear),
            ("the backward uses the cache that it is given", self._uses_its_cache),
        ]  # fmt: skip
        found: list[Finding] = []
        for name, rule in rules[: None if backward else 2]:
            # Gradients that differ at each call would be blamed on the cache too.
            if rule == self._uses_its_cache and any(f.verdict == "FAIL" for f in found):
                break
            try:
                message = rule()
            except FaultError as fault:
                message = str(fault)
            found.append(Finding("contract", name, "FAIL" if message else "PASS", message))
        return found

    def widen_bounds(self) -> None:
        """Add to the bounds of each gradient the rounding errors that are measured in the backward."""
        # The size of a gradient whose terms cancel (a saturated softmax) does not show them. Measured
        # is how far multiples of dy are from giving its multiples, RMS along the last axis.
        try:
            runs = [*self._pulls(self._dy * factor for factor in (1, *_FACTORS))]
        except FaultError:
            # The rules have found it, and said so.
            return
        for name, argument in self._arguments.items():
            one, *others = (flat(run[name]) for run in runs)
            a, multiples = np.atleast_1d(argument.gradient), np.array(others)
            apart = np.nan_to_num((multiples.T / _FACTORS).T - one, posinf=0, neginf=0)
            measured = rms(rms(apart, 0).reshape(a.shape), -1)
            # The bound has the rounding of the gradient itself already, drawn twice here.
            own = 1.5 * unit_roundoff(a.dtype) * rms(a.astype(np.float64), -1)
            # Few samples may be 16 times too small.
            allowed = np.minimum(16 * np.maximum(measured - own, 0), argument.explained)
            argument.bounds += np.broadcast_to(allowed, a.shape).reshape(-1)

    def _pulls(self, dys: Iterable[Array], cache: Any = None) -> Iterator[dict[str, Array]]:
        """Pull each dy back through one cache; yield what can be compared, by its name in messages."""
        dy = self._loss.dy
        cache = self._operation.forward(self._loss.args)[1] if cache is None else cache
        for each in dys:
            returned = self._operation.gradients(each.reshape(dy.shape).astype(dy.dtype), cache)
            yield {name: a.settled(returned) for name, a in self._arguments.items()}

    def _outputs(self) -> Iterator[dict[str, Array]]:
        """Yield the y of the same call again and again."""
        yield {"y": self._loss.y_as_returned}
        for _ in range(1, _RUNS):
            yield {"y": self._operation.forward(self._loss.args)[0]}

    def _linear(self) -> str:
        """Say where a backward is not linear: by twice dy, lest it be additive for these signs alone."""
        dy, other = self._dy, self._loss.draw()
        # The sum is exact in every dtype, see `Loss.draw`.
        runs = [*self._pulls((dy, other, 2 * dy + other))]
        for name, argument in self._arguments.items():
            a, b, total = (run[name] for run in runs)
            made = 2 * flat(a) + flat(b)
            # Nearer to the end of the range, the sum may overflow.
            far = np.abs(made) >= 2.0 ** format_of(total.dtype).emax
            made = np.where(far, flat(total), made).reshape(total.shape)
            # Any order of summation, and terms that cancel.
            bound = 2 * _bound(a) + _bound(b) + _bound(total) + 4 * argument.explained
            if said := _differ({name: total}, {name: made}, bound=bound):
                return said
        return ""

    def _uses_its_cache(self) -> str:
        """Pull dy back through the first of two forwards, after the second one."""
        loss, cache, copied = self._loss, self._operation.forward(self._loss.args)[1], None
        # A class that keeps what it needs has no cache.
        if cache is None:
            return ""
        # Some objects cannot be copied; a closure is its own copy, with all in it.
        with suppress(Exception):
            copied = copy.deepcopy(cache)
        ours, theirs = (set(map(id, leaves(each))) for each in (cache, copied))
        is_copy = bool(theirs) and theirs.isdisjoint(ours)
        moved, right = {**loss.args}, {n: each.gradient for n, each in self._arguments.items()}
        for name, a in loss.args.items():
            if a is not None:
                # At random, by up to a quarter of the scale: a shift of all is nothing to a softmax.
                by = loss.spans[name] * loss.rng.uniform(-0.25, 0.25, a.size)
                moved[name] = (a + by.reshape(a.shape)).astype(a.dtype)

        def is_off(cache: Any) -> bool:
            with suppress(FaultError):
                return bool(_differ(right, *self._pulls([self._dy], cache)))
            return True

        # Nothing can be asked where the operation is not defined.
        with suppress(FaultError):
            self._operation.forward(moved)
            if is_off(cache):
                if is_copy and is_off(copied):
                    return _LATEST
                self._operation.overwritten = _OVERWRITTEN if is_copy else _UNKNOWN
        return ""


def _bound(a: Array) -> float:
    """Bound what another order of summation does to the elements of an array."""
    largest = float(np.max(np.abs(flat(a)), initial=0.0))
    bound = 16 * unit_roundoff(a.dtype) * np.sqrt(a.size) * largest
    return float(bound if np.isfinite(bound) else 0.0) + TINIEST


def _differ(first: dict[str, Array], *others: dict[str, Array], bound: float = 0.0) -> str:
    """Say which results are apart by more than rounding, or `bound`, explains, and how far."""
    for name, one in first.items():
        for other in others:
            a, b = flat(as_array(name, other[name], one.shape)), flat(one)
            # NaN where only one of them is NaN.
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            z = np.max(apart, initial=0.0) / (bound or _bound(one))
            if not z <= 1:
                return f"{name} differs by {z:.2g} times what rounding explains"
    return ""
