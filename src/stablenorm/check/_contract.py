"""
What every forward and backward owes its caller, whatever it computes: the contract.

Inputs are left alone, the same call gives the same bits, the backward is linear in dy, and the
layout of an array in memory does not change what is in it. Each is one `Finding`, whose message
is one line, also where the functions raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from stablenorm._types import Array
from stablenorm.check._layouts import check_layouts
from stablenorm.check._loss import FaultError, copies, draw
from stablenorm.check._report import Finding
from stablenorm.check._subject import (
    Subject,
    apart_at_multiples,
    compared,
    gradient_bound,
    kept,
    pairs,
    y_bound,
)

_LAYER = "contract"
# Two more runs of each: a race shows seldom, but what draws random numbers shows at once.
_RUNS = 2
# How deep a cache is searched for arrays: a cache of a layer in a block in a model.
_DEPTH = 4


def check_contract(subject: Subject, *, backward: bool = True) -> list[Finding]:
    """Go through the contract, the derivatives aside; without `backward`, half of it."""
    checks: list[tuple[str, Callable[[Subject], tuple[str, str]]]] = [
        ("the forward leaves its arguments alone", _forward_leaves_alone),
        ("the forward is deterministic", _forward_repeats),
    ]
    if not backward:
        return [_finding(name, check, subject) for name, check in checks]
    checks += [
        ("the backward leaves dy, the cache and the arguments alone", _backward_leaves_alone),
        ("the results share no memory with the inputs", _shares_nothing),
        ("the backward is deterministic, and a cache can be used twice", _backward_repeats),
        ("the gradients have the dtypes of the arguments", _dtypes),
        ("dy = 0 gives gradients of exactly 0", _zero),
        ("2^k dy gives 2^k times the gradients", _homogeneous),
        ("the backward is additive in dy", _additive),
        ("views of the inputs give the same results", check_layouts),
    ]
    return [_finding(name, check, subject) for name, check in checks]


def _finding(name: str, check: Callable[[Subject], tuple[str, str]], subject: Subject) -> Finding:
    try:
        verdict, message = check(subject)
    except FaultError as fault:
        verdict, message = "FAIL", str(fault)
    return Finding(_LAYER, name, verdict, message)  # type: ignore[arg-type]


# ---- inputs are left alone ----


def arrays_in(thing: Any, depth: int = _DEPTH) -> Iterator[Array]:
    """Yield the arrays in a cache: in tuples, lists, dicts, dataclasses and plain objects."""
    if isinstance(thing, np.ndarray):
        yield thing
        return
    if depth == 0 or isinstance(thing, (str, bytes, type)):
        return
    parts: Any = ()
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, (tuple, list)):
        parts = thing
    elif is_dataclass(thing):
        parts = [getattr(thing, field.name, None) for field in fields(thing)]
    elif hasattr(thing, "__dict__"):
        parts = list(vars(thing).values())
    for part in parts:
        yield from arrays_in(part, depth - 1)


def _bytes(arrays: list[Array | None]) -> list[bytes]:
    return [b"" if a is None else a.tobytes() for a in arrays]


def _changed(names: list[str], before: list[bytes], after: list[Array | None]) -> list[str]:
    pairs = zip(names, before, _bytes(after), strict=True)
    return [name for name, old, new in pairs if old != new]


@contextmanager
def _frozen(arrays: list[Array | None]) -> Iterator[None]:
    """Make arrays read-only for a while: a cache may hold buffers that live on."""
    changed = [a for a in arrays if a is not None and a.flags.writeable]
    for array in changed:
        array.flags.writeable = False
    try:
        yield
    finally:
        # Owners first: a view can only be written to if they can.
        for array in sorted(changed, key=lambda a: a.base is not None):
            with suppress(ValueError):
                array.flags.writeable = True


def _read_only(arrays: list[Array | None], call: Callable[[], Any]) -> tuple[str, str]:
    """Call with `arrays` read-only; with writable ones, all went well."""
    try:
        with _frozen(arrays):
            call()
    except FaultError as fault:
        if not fault.raised:
            raise
        # Cython refuses the buffer before it has looked at it: that is no writing.
        verdict = "NOTE" if "buffer source array" in str(fault) else "FAIL"
        return verdict, f"with read-only inputs, {fault}"
    return "PASS", ""


def _forward_leaves_alone(subject: Subject) -> tuple[str, str]:
    args = copies(subject.args)
    before = _bytes(args)
    subject.operation.forward(args)
    if changed := _changed(subject.names, before, args):
        return "FAIL", f"forward modifies {', '.join(changed)}"
    return _read_only(args, lambda: subject.operation.forward(args))


def _backward_leaves_alone(subject: Subject) -> tuple[str, str]:
    args, dy = copies(subject.args), subject.dy
    cache = subject.operation.forward(args)[1]
    held = list(arrays_in(cache))
    things: list[Array | None] = [dy, *args, *held]
    names = ["dy", *subject.names, *["the cache"] * len(held)]
    before = _bytes(things)
    subject.operation.backward(dy, cache)
    if changed := dict.fromkeys(_changed(names, before, things)):
        return "FAIL", f"backward modifies {', '.join(changed)}"
    args, dy = copies(subject.args), subject.dy
    cache = subject.operation.forward(args)[1]
    frozen = [dy, *args, *arrays_in(cache)]
    return _read_only(frozen, lambda: subject.operation.backward(dy, cache))


def _shares_nothing(subject: Subject) -> tuple[str, str]:
    args, dy = copies(subject.args), subject.dy
    y, cache = subject.operation.forward(args)
    gradients = subject.pull(dy, cache)
    results = {
        "y": y,
        **{f"the gradient of {n}": g for n, g in zip(subject.names, gradients, strict=True)},
    }
    inputs = {**dict(zip(subject.names, args, strict=True)), "dy": dy}
    shared = [
        f"{result} with {given}"
        for result, r in results.items()
        for given, g in inputs.items()
        # y is there before dy is.
        if r is not None and g is not None and np.may_share_memory(r, g)
    ]
    gives = list(results.items())
    for i, (result, r) in enumerate(gives):
        for other, o in gives[:i]:
            if r is not None and o is not None and r.size and np.may_share_memory(r, o):
                shared.append(f"{result} with {other}")
    return ("NOTE", f"shared: {', '.join(shared)}") if shared else ("PASS", "")


# ---- the same call, the same bits ----


def _forward_repeats(subject: Subject) -> tuple[str, str]:
    first, bound = subject.loss.y_as_returned, y_bound(subject)
    runs = [subject.run()[0].copy() for _ in range(_RUNS)]
    return compared([("y", y, first, bound) for y in runs])


def _backward_repeats(subject: Subject) -> tuple[str, str]:
    cache = subject.run()[1]
    first = kept(subject.pull(subject.dy, cache))
    parts = []
    for _ in range(_RUNS):
        again = kept(subject.pull(subject.dy, cache))
        parts += pairs(subject, again, first)
    return compared(parts)


# ---- gradients, and their linearity in dy ----


def _dtypes(subject: Subject) -> tuple[str, str]:
    other = [
        f"{name}: {array.dtype}, its gradient {gradient.dtype}"
        for name, array, gradient in zip(
            subject.names, subject.args, subject.gradients, strict=True
        )
        if array is not None and gradient is not None and array.dtype != gradient.dtype
    ]
    return ("NOTE", "; ".join(other)) if other else ("PASS", "")


def _zero(subject: Subject) -> tuple[str, str]:
    gradients = subject.pull(np.zeros_like(subject.dy), subject.run()[1])
    wrong = [
        f"that of {name} has {float(np.max(np.abs(g.astype(np.float64)))):.3g}"
        for name, g in zip(subject.names, gradients, strict=True)
        if g is not None and g.size and not (g == 0).all()
    ]
    return ("FAIL", "; ".join(wrong)) if wrong else ("PASS", "")


def _homogeneous(subject: Subject) -> tuple[str, str]:
    cache = subject.run()[1]
    first = kept(subject.pull(subject.dy, cache))
    parts = []
    # By 4, up and down: no dtype overflows where gradients are usual.
    for power in (2, -2):
        dy = np.ldexp(subject.dy.astype(np.float64), power).astype(subject.loss.dtype)
        scaled = subject.pull(dy, cache)
        for name, a, e in zip(subject.names, scaled, first, strict=True):
            if a is None or e is None:
                continue
            expected = np.ldexp(e.astype(np.float64), power)
            # What comes near the ends of the dtype's range is not scaled exactly.
            good = _ordinary(e, power)
            bound = np.ldexp(gradient_bound(e, subject.loss), power)[good.reshape(-1)]
            a64 = a.astype(np.float64)
            parts.append((f"the gradient of {name}", a64[good], expected[good], bound))
    return compared(parts)


def _ordinary(gradient: Array, power: int) -> Array:
    """Tell which elements stay normal numbers, or 0, when multiplied by 2^power."""
    exponent = np.frexp(gradient.astype(np.float64))[1] + power
    # frexp's exponents of the largest and the smallest normal number.
    low, high = _RANGE.get(gradient.dtype.name, (-1021, 1024))
    sure = (exponent > low + 2) & (exponent < high) & np.isfinite(gradient)
    return np.asarray(sure | (gradient == 0))


_RANGE = {"float16": (-13, 16), "bfloat16": (-125, 128), "float32": (-125, 128)}


def _noise_of_backward(subject: Subject, cache: Any, first: list[Array | None]) -> dict[str, float]:
    """Return, by argument, how far 3 dy and 5 dy are from 3 and 5 times the gradients of dy."""
    noise = dict.fromkeys(subject.names, 0.0)
    # Two of those that `measure_roundings` takes: the largest of all elements needs no more.
    for differences in apart_at_multiples(subject, cache, first, (3, 5)):
        for name, apart in zip(subject.names, differences, strict=True):
            if apart is not None:
                noise[name] = max(noise[name], float(np.max(np.abs(apart), initial=0.0)))
    return noise


def _additive(subject: Subject) -> tuple[str, str]:
    cache = subject.run()[1]
    loss = subject.loss
    other = draw(loss.y.size, subject.rng).reshape(loss.shape)
    one = subject.dy
    both = (one.astype(np.float64) + other).astype(loss.dtype)
    first = kept(subject.pull(one, cache))
    noise = _noise_of_backward(subject, cache, first)
    second = kept(subject.pull(other.astype(loss.dtype), cache))
    parts = []
    for name, a, b, s in zip(subject.names, first, second, subject.pull(both, cache), strict=True):
        if a is None or b is None or s is None:
            continue
        # What cancels in the gradient leaves rounding errors that do not show in its size.
        bound = sum(gradient_bound(part, loss) for part in (a, b, s)) + 16 * noise[name]
        total = a.astype(np.float64) + b.astype(np.float64)
        parts.append((f"the gradient of {name}", s.astype(np.float64), total, np.asarray(bound)))
    verdict, message = compared(parts)
    # Three results, each rounded: equal bits are not to be had.
    return ("PASS", "") if verdict == "NOTE" else (verdict, message)
