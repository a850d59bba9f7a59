"""
The contract: what every forward and backward must do, whatever it computes.

Inputs are left alone, the same call gives the same bits, the backward is linear in dy, and the
layout of an array in memory does not change what is in it. Each is one `Finding`, whose message
is one line, also where the functions raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from stablenorm.check.operation import FaultError, digits, draw
from stablenorm.check.report import Finding
from stablenorm.check.subject import Outcome, Subject, compared, gradient_bound, y_bound
from stablenorm.formats import format_of
from stablenorm.types import Array

_LAYER = "contract"
# Two more runs of each: a race shows seldom, but what draws random numbers shows at once.
_RUNS = 2
# How deep a cache is searched for arrays: a cache of a layer in a block in a model.
_DEPTH = 4

# Named arrays, and a call that must leave them alone.
Call = tuple[list[tuple[str, Array]], Callable[[], Any]]
_FINE: Outcome = ("PASS", "")


def check_contract(subject: Subject, *, backward: bool = True) -> list[Finding]:
    """Check everything but the derivatives; without `backward`, the forward alone."""
    checks: list[tuple[str, Callable[[Subject], Outcome]]] = [
        ("the forward leaves its arguments alone", _forward_leaves_alone),
        ("the forward is deterministic", _forward_repeats),
    ]
    if backward:
        checks += [
            ("the backward leaves dy, the cache and the arguments alone", _backward_leaves_alone),
            ("the results share no memory with the inputs", _shares_nothing),
            ("the backward is deterministic, and a cache can be used twice", _backward_repeats),
            ("the gradients have the dtypes of the arguments", _dtypes),
            ("dy = 0 gives gradients of exactly 0", _zero),
            ("2^k dy gives 2^k times the gradients", _homogeneous),
            ("the backward is additive in dy", _additive),
            ("views of the inputs give the same results", _layouts),
        ]
    found = []
    for name, check in checks:
        try:
            verdict, message = check(subject)
        except FaultError as fault:
            verdict, message = "FAIL", str(fault)
        found.append(Finding(_LAYER, name, verdict, message))
    return found


# ---- inputs are left alone ----


def arrays_in(thing: Any, depth: int = _DEPTH) -> Iterator[Array]:
    """Yield the arrays in a cache: in tuples, lists, dicts and the attributes of objects."""
    if isinstance(thing, np.ndarray):
        yield thing
        return
    if depth == 0 or isinstance(thing, (str, bytes, type)):
        return
    parts: Iterable[Any] = thing if isinstance(thing, (tuple, list)) else ()
    if isinstance(thing, dict):
        parts = thing.values()
    elif is_dataclass(thing):
        parts = [getattr(thing, field.name, None) for field in fields(thing)]
    elif hasattr(thing, "__dict__"):
        parts = vars(thing).values()
    for part in list(parts):
        yield from arrays_in(part, depth - 1)


@contextmanager
def _frozen(arrays: list[Array]) -> Iterator[None]:
    """Make arrays read-only for a while: a cache may hold buffers that live on."""
    changed = [a for a in arrays if a.flags.writeable]
    for array in changed:
        array.flags.writeable = False
    try:
        yield
    finally:
        # Owners first: a view can only be written to if they can.
        for array in sorted(changed, key=lambda a: a.base is not None):
            with suppress(ValueError):
                array.flags.writeable = True


def _left_alone(make: Callable[[], Call]) -> Outcome:
    """Call what `make` gives twice: as it is, then with its arrays read-only."""
    arrays, call = make()
    before = [array.tobytes() for _, array in arrays]
    call()
    pairs = zip(arrays, before, strict=True)
    changed = dict.fromkeys(name for (name, array), old in pairs if array.tobytes() != old)
    if changed:
        return "FAIL", f"modifies {', '.join(changed)}"
    arrays, call = make()
    try:
        with _frozen([array for _, array in arrays]):
            call()
    except FaultError as fault:
        if not fault.raised:
            raise
        # Cython refuses the buffer before it has looked at it: that is no writing.
        refused = "buffer source array" in str(fault)
        return "NOTE" if refused else "FAIL", f"with read-only inputs, {fault}"
    return _FINE


def _forward_leaves_alone(subject: Subject) -> Outcome:
    def make() -> Call:
        arguments = subject.arguments()
        return list(arguments.items()), lambda: subject.forward(arguments)

    verdict, message = _left_alone(make)
    return verdict, message.replace("modifies", "forward modifies", 1)


def _backward_leaves_alone(subject: Subject) -> Outcome:
    def make() -> Call:
        arguments, dy = subject.arguments(), subject.dy
        cache = subject.forward(arguments)[1]
        held = [("the cache", array) for array in arrays_in(cache)]
        arrays = [("dy", dy), *arguments.items(), *held]
        return arrays, lambda: subject.loss.operation.backward(dy, cache)

    verdict, message = _left_alone(make)
    return verdict, message.replace("modifies", "backward modifies", 1)


def _shares_nothing(subject: Subject) -> Outcome:
    arguments, dy = subject.arguments(), subject.dy
    y, cache = subject.forward(arguments)
    gradients = subject.pull_as_is(dy, cache).items()
    results = [("y", y), *((f"the gradient of {name}", g) for name, g in gradients)]
    others = [*arguments.items(), ("dy", dy), *results]
    shared = [
        f"{name} with {other}"
        for place, (name, result) in enumerate(results)
        for other, array in others[: len(arguments) + 1 + place]
        if result.size and np.may_share_memory(result, array)
    ]
    return ("NOTE", f"shared: {', '.join(shared)}") if shared else _FINE


# ---- the same call, the same bits ----


def _forward_repeats(subject: Subject) -> Outcome:
    first, bound = subject.loss.y_as_returned, y_bound(subject)
    runs = [subject.forward()[0].copy() for _ in range(_RUNS)]
    return compared([("y", y, first, bound) for y in runs])


def _backward_repeats(subject: Subject) -> Outcome:
    cache = subject.forward()[1]
    first, *again = (subject.pull(subject.dy, cache) for _ in range(1 + _RUNS))
    return compared([part for other in again for part in subject.parts(other, first)])


# ---- gradients, and their linearity in dy ----


def _dtypes(subject: Subject) -> Outcome:
    other = [
        f"{name}: {array.dtype}, its gradient {subject.gradients[name].dtype}"
        for name, array in subject.arguments().items()
        if name in subject.gradients and array.dtype != subject.gradients[name].dtype
    ]
    return ("NOTE", "; ".join(other)) if other else _FINE


def _zero(subject: Subject) -> Outcome:
    gradients = subject.pull(np.zeros_like(subject.dy), subject.forward()[1])
    wrong = [
        f"that of {name} has {float(np.max(np.abs(gradient.astype(np.float64)))):.3g}"
        for name, gradient in gradients.items()
        if not (gradient == 0).all()
    ]
    return ("FAIL", "; ".join(wrong)) if wrong else _FINE


def _homogeneous(subject: Subject) -> Outcome:
    cache = subject.forward()[1]
    first = subject.pull(subject.dy, cache)
    parts = []
    # By 4, up and down: no dtype overflows where gradients are usual.
    for power in (2, -2):
        dy = np.ldexp(subject.dy.astype(np.float64), power).astype(subject.loss.dtype)
        scaled = subject.pull(dy, cache)
        for name, actual, given, bound in subject.parts(scaled, first):
            # What comes near the ends of the dtype's range is not scaled exactly.
            good = _ordinary(given, power)
            expected = np.ldexp(given.astype(np.float64), power)[good]
            part = actual.astype(np.float64)[good], expected
            parts.append((name, *part, np.ldexp(bound, power)[good.reshape(-1)]))
    return compared(parts)


def _ordinary(gradient: Array, power: int) -> Array:
    """Tell which elements stay normal numbers, or 0, when multiplied by 2^power."""
    exponent = np.frexp(gradient.astype(np.float64))[1] + power
    kind = format_of(gradient.dtype)
    # frexp's exponents are one more than those of the format.
    sure = (exponent > kind.emin + 3) & (exponent < kind.emax + 1) & np.isfinite(gradient)
    return np.asarray(sure | (gradient == 0))


def _additive(subject: Subject) -> Outcome:
    cache, loss = subject.forward()[1], subject.loss
    other = draw(loss.y.size, subject.rng).reshape(loss.shape)
    both = (subject.dy.astype(np.float64) + other).astype(loss.dtype)
    first, second, sums = (
        subject.pull(dy, cache) for dy in (subject.dy, other.astype(loss.dtype), both)
    )
    parts = []
    for name, a in first.items():
        # What cancels in the gradient leaves rounding errors that do not show in its size. Two
        # multiples: the largest of all elements needs no more.
        noise = max(float(np.max(np.abs(d), initial=0.0)) for d in subject.departures[name][:2])
        b, total = second[name], sums[name].astype(np.float64)
        bound = sum(gradient_bound(part, loss) for part in (a, b, sums[name])) + 16 * noise
        expected = a.astype(np.float64) + b.astype(np.float64)
        parts.append((f"the gradient of {name}", total, expected, np.asarray(bound)))
    verdict, message = compared(parts)
    # Three results, each rounded: equal bits are not to be had.
    return _FINE if verdict == "NOTE" else (verdict, message)


# ---- layouts ----


def _strided(a: Array) -> Array:
    wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1]), a.dtype) if a.ndim else np.zeros(2, a.dtype)
    view = wide[..., ::2] if a.ndim else wide[0:1].reshape(())
    view[...] = a
    return view


def _reversed(a: Array) -> Array:
    flip = (slice(None, None, -1),) * a.ndim
    return np.ascontiguousarray(a[flip])[flip] if a.ndim else a.copy()


def _fortran(a: Array) -> Array:
    return np.array(a, order="F")


def _offset(a: Array) -> Array:
    room = np.zeros(a.size + 1, a.dtype)
    view = room[1:].reshape(a.shape)
    view[...] = a
    return view


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "strided": _strided,
    "reversed": _reversed,
    "Fortran-ordered": _fortran,
    "offset": _offset,
}


def _layouts(subject: Subject) -> Outcome:
    y, cache = subject.forward()
    expected = {"y": y.copy(), **subject.pull(subject.dy, cache)}
    bounds = _dither(subject, expected)
    names = ["dy", *subject.arguments()]
    notes = []
    for layout, change in LAYOUTS.items():
        verdict, message = _in_layout(subject, names, change, expected, bounds)
        if verdict == "PASS":
            continue
        # Which of them: each alone.
        alone = ((name, _in_layout(subject, [name], change, expected, bounds)) for name in names)
        which = next(((name, text) for name, (one, text) in alone if one == verdict), None)
        name, text = which or ("inputs", message)
        if verdict == "FAIL":
            return verdict, f"{layout} {name}: {text}"
        notes.append(f"{layout} {name}: {text}")
    return ("NOTE", "; ".join(notes)) if notes else _FINE


def _in_layout(
    subject: Subject,
    which: list[str],
    change: Callable[[Array], Array],
    expected: dict[str, Array],
    bounds: dict[str, Array],
) -> Outcome:
    """Run with the chosen inputs in another layout, and compare."""
    inputs = {"dy": subject.dy, **subject.arguments()}
    inputs |= {name: change(inputs[name]) for name in which}
    dy = inputs.pop("dy")
    try:
        y, cache = subject.forward(inputs)
        gradients = subject.pull(dy, cache)
    except FaultError as fault:
        # To refuse a layout is a limit, not a wrong result.
        if fault.raised:
            return "NOTE", str(fault)
        raise
    parts = [("y", y, expected["y"], y_bound(subject) + bounds["y"])]
    parts += [
        (label, actual, e, bound + bounds[name])
        for name, (label, actual, e, bound) in zip(
            gradients,
            subject.parts(gradients, {name: expected[name] for name in gradients}),
            strict=True,
        )
    ]
    return compared(parts)


def _dither(subject: Subject, expected: dict[str, Array]) -> dict[str, Array]:
    """
    Bound what another order of summation may do: n times what an ulp in every input does.

    A layout makes NumPy sum in another order, whose error is that of moving each term by up to n
    roundings, n the length of the sum.
    """
    terms = max([16, *(n for a in subject.arguments().values() for n in a.shape)])
    largest = dict.fromkeys(expected, 0.0)
    for _ in range(2):
        moved = {}
        for name, a in subject.arguments().items():
            ulps = subject.rng.choice([-1.0, 1.0], size=a.shape) * 2.0 ** (1 - digits(a.dtype))
            moved[name] = (a.astype(np.float64) * (1 + ulps)).astype(a.dtype)
        y, cache = subject.forward(moved)
        for name, now in {"y": y, **subject.pull(subject.dy, cache)}.items():
            apart = np.abs(now.astype(np.float64) - expected[name].astype(np.float64))
            # Of the whole array: one draw of an element may be small by chance.
            largest[name] = max(largest[name], 2 * terms * float(np.max(apart, initial=0.0)))
    # What is not finite knows no rounding: it is compared as it is.
    return {n: np.asarray(b if np.isfinite(b) else 0.0) for n, b in largest.items()}
