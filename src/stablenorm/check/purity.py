"""
The contract: what every forward and backward must do, whatever it computes.

Inputs are left alone, the same call gives the same bits, and the backward is linear in dy. Each is
one `Finding`, whose message is one line, also where the functions raise.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.random import Generator

from stablenorm.check.compare import natural_size, rms
from stablenorm.check.operation import FaultError, Loss, as_array, copies, draw, flat, unit_roundoff
from stablenorm.check.results import Finding
from stablenorm.formats import format_of
from stablenorm.types import Array

# Two more runs of each: a race shows seldom, but what draws random numbers shows at once.
_RUNS = 2
# How deep a cache is searched for arrays: a cache of a layer in a block in a model.
_DEPTH = 4
# Not powers of two, so that every rounding is drawn anew; dy still fits into all dtypes.
_FACTORS = (3, 5, 7, 11)

# By argument; those that cannot be compared are left out.
Gradients = dict[str, Array]


class Contract:
    """The operation; by name its arguments' scales, and the gradients that can be compared."""

    def __init__(self, loss: Loss, spans: Gradients, gradients: Gradients, rng: Generator):
        self._loss, self._spans, self._gradients, self._rng = loss, spans, gradients, rng

    def check(self, *, backward: bool = True) -> list[Finding]:
        """Check everything but the derivatives; without `backward`, the forward alone."""
        # What each returns is what is wrong.
        checks: dict[str, Callable[[], str]] = {
            "the forward leaves its arguments alone": self._forward_leaves_alone,
            "the forward is deterministic": self._forward_repeats,
        }
        if backward:
            checks |= {
                "the backward leaves dy, the cache and the arguments alone": self._leaves_alone,
                "the backward is deterministic, and a cache can be used twice": self._repeats,
                "the backward is linear in dy": self._linear,
                "the backward uses the cache that it is given": self._uses_its_cache,
            }
        found: list[Finding] = []
        for name, check in checks.items():
            if check == self._uses_its_cache and any(f.verdict == "FAIL" for f in found):
                # What gives other gradients at each call would be blamed for this too.
                continue
            try:
                message = check()
            except FaultError as fault:
                message = str(fault)
            found.append(Finding("contract", name, "FAIL" if message else "PASS", message))
        return found

    def _forward(self) -> tuple[Array, Any]:
        return self._loss.operation.forward(copies(self._loss.args))

    def _pull(self, dy: Array, cache: Any) -> Gradients:
        """Return gradients, copied: a backward may fill a buffer of its own again."""
        returned = self._loss.operation.gradients(dy, cache, self._loss.args)
        found = {}
        for position, (name, now) in enumerate(zip(self._spans, returned, strict=True)):
            # What was not fit to be compared the first time is not looked at again.
            if name in self._gradients:
                array = as_array(f"the gradient of {name}", now)
                found[name] = self._loss.settled(position, array)
                shapes = self._gradients[name].shape, found[name].shape
                if shapes[0] != shapes[1]:
                    msg = f"the gradient of {name} had shape {shapes[0]}, then came {shapes[1]}"
                    raise FaultError(msg)
        return found

    def allowances(self) -> Gradients:
        """
        Return what the rounding errors measured in the backward may add to its bounds, flat.

        A backward is linear in dy but for its rounding errors, and these do not show in the size
        of a gradient whose terms cancel (that of a softmax near 0 and 1, say). Measured is how far
        multiples of dy are from giving multiples of the gradients: the root mean square along the
        last axis, since a single element may be lucky. Never more than rounding can explain: a
        backward that keeps float32 inside, 2^29 of these roundings, must not excuse itself.
        """
        cache, dy = self._forward()[1], self._loss.cotangent()
        scaled = [(dy.astype(np.float64) * factor).astype(dy.dtype) for factor in _FACTORS]
        try:
            first, *more = (self._pull(each, cache) for each in (dy, *scaled))
        except FaultError:
            # Found, and said, by the contract.
            return {name: np.zeros(a.size) for name, a in self._gradients.items()}
        found = {}
        for name, a in self._gradients.items():
            runs = np.array([each[name].astype(np.float64) for each in more])
            wide = np.atleast_1d(a.astype(np.float64))
            apart = (runs.T / _FACTORS).T - first[name].astype(np.float64)
            measured = rms(rms(np.nan_to_num(apart, posinf=0, neginf=0), 0).reshape(wide.shape), -1)
            # Less the rounding of the gradient itself, twice drawn, which is in the bound already.
            measured = np.maximum(measured - 1.5 * unit_roundoff(a.dtype) * rms(wide, -1), 0)
            # 16: of few samples, so many times their size.
            allowed = np.minimum(16 * measured, self._explained(name))
            found[name] = np.broadcast_to(allowed, wide.shape).reshape(-1)
        return found

    def _explained(self, name: str) -> float:
        """Return 256 roundings of a gradient, or of y changing by its size over the scale."""
        gradient = self._gradients[name]
        typical = max(float(rms(flat(gradient))), natural_size(self._loss, self._spans[name]))
        return 2.0**8 * unit_roundoff(gradient.dtype) * typical

    def _forward_leaves_alone(self) -> str:
        args = copies(self._loss.args)
        return _modified("forward", self._named(args), lambda: self._loss.operation.forward(args))

    def _leaves_alone(self) -> str:
        args, dy, operation = copies(self._loss.args), self._loss.cotangent(), self._loss.operation
        cache = operation.forward(args)[1]
        arrays = [("dy", dy), *self._named(args), *(("the cache", a) for a in _arrays_in(cache))]
        return _modified("backward", arrays, lambda: operation.gradients(dy, cache, args))

    def _named(self, args: list[Array | None]) -> list[tuple[str, Array]]:
        return [(n, a) for n, a in zip(self._spans, args, strict=True) if a is not None]

    def _forward_repeats(self) -> str:
        found = [self._forward()[0] for _ in range(_RUNS)]
        return _apart("y", [self._loss.y_as_returned, *found])

    def _repeats(self) -> str:
        cache = self._forward()[1]
        runs = [self._pull(self._loss.cotangent(), cache) for _ in range(1 + _RUNS)]
        said = [_apart(f"the gradient of {n}", [each[n] for each in runs]) for n in runs[0]]
        return next(filter(None, said), "")

    def _uses_its_cache(self) -> str:
        """Pull dy back through the first of two forwards, after the second one."""
        operation, cache = self._loss.operation, self._forward()[1]
        # A class that keeps what it needs has none.
        if cache is None:
            return ""
        copied = _copy_of(cache)
        try:
            operation.forward(self._elsewhere())
        except FaultError:
            # Nothing can be asked where the operation is not defined.
            return ""
        if not self._off(cache):
            return ""
        if copied is None:
            operation.overwritten = "the cache is overwritten by the next call, or not used: it cannot be copied to tell"
        elif self._off(copied):
            return "it returns the gradients of the latest forward, whose cache it was not given"
        else:
            operation.overwritten = "results, and the cache, are overwritten by the next call"
        return ""

    def _elsewhere(self) -> list[Array | None]:
        """Return the arguments, moved by up to a quarter of their scales, as differences do."""
        moved: list[Array | None] = []
        for a, span in zip(self._loss.args, self._spans.values(), strict=True):
            # At random: a shift of all elements is nothing to a softmax.
            by = span * self._rng.uniform(-0.25, 0.25, span.shape)
            moved.append(None if a is None else (a + by.reshape(a.shape)).astype(a.dtype))
        return moved

    def _off(self, cache: Any) -> bool:
        """Tell whether a backward through `cache` does not give the gradients that it gave at first."""
        try:
            found = self._pull(self._loss.cotangent(), cache)
        except FaultError:
            return True
        return any(_apart(name, [a, found[name]]) for name, a in self._gradients.items())

    def _linear(self) -> str:
        cache, loss = self._forward()[1], self._loss
        dy = loss.cotangent().astype(np.float64)
        other = draw(loss.y.size, self._rng).reshape(loss.shape)
        # Twice one: a backward that is additive in dy for the signs it happens to meet need not
        # be homogeneous. The sum is exact in every dtype, see `draw`.
        dys = (each.astype(loss.dtype) for each in (dy, other, 2 * dy + other))
        first, second, both = (self._pull(each, cache) for each in dys)
        for name, total in both.items():
            a, b = first[name], second[name]
            made = 2 * flat(a) + flat(b)
            # Nearer to the end of the range, the sum may overflow.
            far = np.abs(made) >= 2.0 ** format_of(total.dtype).emax
            largest = np.max(np.where(far, 0, np.abs(flat(total) - made)), initial=0.0)
            # Any order of summation, and what cancels.
            bound = 2 * _bound(a) + _bound(b) + _bound(total) + 4 * self._explained(name)
            if not largest <= bound:
                return _differs(f"the gradient of {name}", largest / bound)
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
    # A closure is its own copy, and what is in it.
    arrays, there = list(_arrays_in(copied)), {id(array) for array in _arrays_in(cache)}
    return copied if arrays and not there & set(map(id, arrays)) else None


def _modified(what: str, named: list[tuple[str, Array]], call: Callable[[], object]) -> str:
    """Say which arrays a call modifies."""
    before = [array.tobytes() for _, array in named]
    call()
    pairs = zip(named, before, strict=True)
    changed = dict.fromkeys(name for (name, array), old in pairs if array.tobytes() != old)
    return f"{what} modifies {', '.join(changed)}" if changed else ""


def _bound(a: Array) -> float:
    """Bound what another order of summation does to the elements of an array."""
    largest = float(np.max(np.abs(flat(a)), initial=0.0))
    bound = 16 * unit_roundoff(a.dtype) * np.sqrt(a.size) * largest
    return float(bound if np.isfinite(bound) else 0.0) + 2.0**-1074


def _apart(name: str, runs: list[Array]) -> str:
    """Say how far results of the same call are apart, if by more than rounding explains."""
    first, bound = runs[0], _bound(runs[0])
    for each in runs[1:]:
        if each.shape != first.shape:
            return f"{name} has shape {first.shape}, then {each.shape}"
        a, b = flat(each), flat(first)
        alike = (a == b) | (np.isnan(a) & np.isnan(b))
        # NaN where only one of them is NaN.
        largest = np.max(np.where(alike, 0.0, np.abs(a - b)), initial=0.0)
        if not largest <= bound:
            return _differs(name, largest / bound)
    return ""


def _differs(name: str, excess: float) -> str:
    return f"{name} differs by {excess:.2g} times what rounding explains"
