"""The rules of a call: what every forward and backward must do, whatever it computes."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from stablenorm.check.differences import Argument
from stablenorm.check.operation import FaultError, Loss, as_array, flat, leaves, rms, unit_roundoff
from stablenorm.check.results import TINIEST, Finding
from stablenorm.formats import format_of
from stablenorm.records import Array

# Runs of each function: random numbers in the code show at once, a race seldom.
_RUNS = 3
# Factors of dy that are no powers of two, so that every rounding differs; all dtypes hold the products.
_FACTORS = np.array([3, 5, 7, 11])
_LATEST = "it returns the gradients of the latest forward, whose cache it was not given"
_OVERWRITTEN = "results, and the cache, are overwritten by the next call"
_UNKNOWN = "the cache is overwritten by the next call, or not used: it cannot be copied to tell"


def check_rules(loss: Loss, arguments: list[Argument], *, backward: bool) -> list[Finding]:
    """Check everything but the derivatives; without `backward`, the forward alone."""
    noise = loss.noise
    modified = loss.operation.modified.get
    outputs = ({"y": loss.operation.forward(loss.args)[0]} for _ in range(1, _RUNS))
    pulled = _pulls(loss, arguments, [loss.dy] * _RUNS)
    # The condition, the words if it does not hold, and a rule that returns words for the fault.
    rules: list[tuple[str, str, Callable[[], str]]] = [
        ("the forward leaves its arguments alone", "", lambda: modified("forward", "")),
        ("the forward is deterministic", "the forward is not deterministic",
         lambda: _differ({"y": loss.y_as_returned}, *outputs)),
        ("the backward leaves dy, the cache and the arguments alone", "", lambda: modified("backward", "")),
        ("the backward is deterministic, and a cache can be used twice",
         "a second call of the backward gives another result", lambda: _differ(*pulled, noise=noise)),
        ("the backward is linear in dy", "the backward is not linear in dy", lambda: _linear(loss, arguments)),
        ("the backward uses the cache that it is given", "", lambda: _uses_its_cache(loss, arguments)),
    ]  # fmt: skip
    findings: list[Finding] = []
    for name, wrong, rule in rules[: None if backward else 2]:
        # Skip the last rule after a failure: it would blame random gradients on the cache.
        if name == rules[-1][0] and any(f.verdict == "FAIL" for f in findings):
            break
        try:
            said = rule()
        except FaultError as fault:
            said = str(fault)
        message = ": ".join(filter(None, [wrong, said])) if said else ""
        findings.append(Finding("contract", name, "FAIL" if said else "PASS", message))
    return findings


def widen_bounds(loss: Loss, arguments: list[Argument]) -> None:
    """Add to the bounds of each gradient the rounding errors that are measured in the backward."""
    # The size of a gradient whose terms cancel (a saturated softmax) does not show these errors. We measure
    # how far the gradients of multiples of dy are from multiples of the gradient, RMS along the last axis.
    try:
        runs = [*_pulls(loss, arguments, (loss.dy * factor for factor in (1, *_FACTORS)))]
    except FaultError:
        # `check_rules` has reported the fault.
        return
    for argument in arguments:
        one, *others = (flat(run[argument.label]) for run in runs)
        a, multiples = np.atleast_1d(argument.gradient), np.array(others)
        apart = np.nan_to_num(multiples / _FACTORS[:, None] - one, posinf=0, neginf=0)
        measured = rms(rms(apart, 0).reshape(a.shape), -1)
        # Subtract the rounding of the gradient itself, which its bound contains; two gradients differ here.
        own = 1.5 * unit_roundoff(a.dtype) * rms(a.astype(np.float64), -1)
        # A measurement of few samples may be 16 times too small.
        allowed = np.minimum(16 * np.maximum(measured - own, 0), argument.explained)
        allowed += loss.noise * np.max(np.abs(flat(a)), initial=0.0)
        argument.bounds += np.broadcast_to(allowed, a.shape).reshape(-1)


def _pulls(
    loss: Loss, arguments: list[Argument], dys: Iterable[Array], cache: Any = None
) -> Iterator[dict[str, Array]]:
    """Pull each dy back through one cache; yield the gradients of `arguments`, by their names in messages."""
    cache = loss.operation.forward(loss.args)[1] if cache is None else cache
    for dy in dys:
        returned = loss.operation.gradients(np.array(dy, loss.dy.dtype), cache)
        yield {argument.label: argument.settled(returned) for argument in arguments}


def _linear(loss: Loss, arguments: list[Argument]) -> str:
    """Say which gradient is not linear in dy; twice dy, because it may be additive for these signs alone."""
    other = loss.draw()
    # The sum is exact in every dtype, see `Loss.draw`.
    runs = [*_pulls(loss, arguments, (loss.dy, other, 2 * loss.dy + other))]
    for argument in arguments:
        a, b, total = (run[argument.label] for run in runs)
        made = 2 * flat(a) + flat(b)
        # Skip sums near the end of the range, which may overflow.
        far = np.abs(made) >= 2.0 ** format_of(total.dtype).emax
        made = np.where(far, flat(total), made).reshape(total.shape)
        # The bound allows any order of summation, and terms that cancel.
        bound = 2 * _bound(a) + _bound(b) + _bound(total) + 4 * argument.explained
        made_of = {argument.label: made}
        if said := _differ({argument.label: total}, made_of, bound=bound, noise=4 * loss.noise):
            return said
    return ""


def _uses_its_cache(loss: Loss, arguments: list[Argument]) -> str:
    """Pull dy back through the first of two forwards, after the second one."""
    operation, copied = loss.operation, None
    # A class that stores its values itself has no cache.
    if (cache := operation.forward(loss.args)[1]) is None:
        return ""
    # Some objects cannot be copied; a closure is its own copy, with all in it.
    with suppress(Exception):
        copied = copy.deepcopy(cache)
    ours, theirs = (set(map(id, leaves(one))) for one in (cache, copied))
    is_copy = bool(theirs) and theirs.isdisjoint(ours)
    moved, right = {**loss.args}, {argument.label: argument.gradient for argument in arguments}
    for name, a in loss.args.items():
        if a is not None:
            # Move at random by up to a quarter of the scale: a softmax does not see a shift of all.
            by = loss.spans[name] * loss.rng.uniform(-0.25, 0.25, a.size)
            moved[name] = (a + by.reshape(a.shape)).astype(a.dtype)

    def is_off(cache: Any) -> bool:
        with suppress(FaultError):
            pulled = _pulls(loss, arguments, [loss.dy], cache)
            return bool(_differ(right, *pulled, noise=loss.noise))
        return True

    # Skip the rule if the operation is not defined at the moved arguments.
    with suppress(FaultError):
        operation.forward(moved)
        if is_off(cache):
            if is_copy and is_off(copied):
                return _LATEST
            operation.overwritten = _OVERWRITTEN if is_copy else _UNKNOWN
    return ""


def _bound(a: Array) -> float:
    """Return a bound for the change of the elements under another order of summation."""
    bound = 16 * unit_roundoff(a.dtype) * np.sqrt(a.size) * np.max(np.abs(flat(a)), initial=0.0)
    return float(bound if np.isfinite(bound) else 0.0) + TINIEST


def _differ(
    first: dict[str, Array], *others: dict[str, Array], bound: float = 0.0, noise: float = 0.0
) -> str:
    """Say which results are apart by more than rounding, or `bound`, and noise explain, and how far."""
    for name, one in first.items():
        for other in others:
            a, b = flat(as_array(name, other[name], one.shape)), flat(one)
            # NaN if exactly one of the two is NaN.
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            allowed = (bound or _bound(one)) + noise * np.max(np.abs(b), initial=0.0)
            z = np.max(apart, initial=0.0) / allowed
            if np.isnan(z):
                return f"{name} is NaN in one of them"
            if z > 1:
                return f"{name} differs by {z:.2g} times what rounding explains"
    return ""
