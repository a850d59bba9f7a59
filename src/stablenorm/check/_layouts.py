"""Whether the layout of an array in memory changes what comes out: it should not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stablenorm._types import Array
from stablenorm.check._loss import FaultError, digits
from stablenorm.check._subject import Subject, compared, kept, pairs, y_bound


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


_LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "strided": _strided,
    "reversed": _reversed,
    "Fortran-ordered": _fortran,
    "offset": _offset,
}


def check_layouts(subject: Subject) -> tuple[str, str]:
    y, cache = subject.run()
    expected = (y.copy(), kept(subject.pull(subject.dy, cache)))
    bounds = _dither(subject)
    notes = []
    for layout, change in _LAYOUTS.items():
        verdict, message = _in_layout(
            subject, set(range(-1, len(subject.args))), change, expected, bounds
        )
        if verdict == "PASS":
            continue
        # Which of them: each alone. Position -1 is dy.
        for position, name in enumerate(["dy", *subject.names], start=-1):
            one, text = _in_layout(subject, {position}, change, expected, bounds)
            if one == verdict:
                message = f"{layout} {name}: {text}"
                break
        else:
            message = f"{layout} inputs: {message}"
        if verdict == "FAIL":
            return verdict, message
        notes.append(message)
    return ("NOTE", "; ".join(notes)) if notes else ("PASS", "")


def _in_layout(
    subject: Subject,
    which: set[int],
    change: Callable[[Array], Array],
    expected: tuple[Array, list[Array | None]],
    bounds: list[Array],
) -> tuple[str, str]:
    """Run with the chosen inputs in another layout, and compare."""
    args: list[Array | None] = [
        None if a is None else change(a) if i in which else a.copy()
        for i, a in enumerate(subject.args)
    ]
    dy = change(subject.dy) if -1 in which else subject.dy
    try:
        y, cache = subject.operation.forward(args)
        gradients = subject.pull(dy, cache)
    except FaultError as fault:
        # To refuse a layout is a limit, not a wrong result.
        if fault.raised:
            return "NOTE", str(fault)
        raise
    parts = [("y", y, expected[0], bounds[0])]
    for pair, bound in zip(pairs(subject, gradients, expected[1]), bounds[1:], strict=True):
        parts.append((*pair[:3], pair[3] + bound))
    return compared(parts)


def _dither(subject: Subject) -> list[Array]:
    """
    Bound what another order of summation may do: n times what an ulp in every input does.

    A layout makes NumPy sum in another order, whose error is that of moving each term by up to n
    roundings, n the length of the sum.
    """
    first_y, cache = subject.run()
    first = kept(subject.pull(subject.dy, cache))
    given = [g for g in first if g is not None]
    bounds = [y_bound(subject), *(np.zeros(g.size) for g in given)]
    terms = max([16, *(n for a in subject.args if a is not None for n in a.shape)])
    for _ in range(2):
        y, cache = subject.operation.forward([_moved(a, subject.rng) for a in subject.args])
        gradients = [g for g in subject.pull(subject.dy, cache) if g is not None]
        for i, (now, before) in enumerate(zip([y, *gradients], [first_y, *given], strict=True)):
            moved = np.abs(now.astype(np.float64) - before.astype(np.float64)).reshape(-1)
            # Of the whole array: one draw of an element may be small by chance.
            bounds[i] = np.maximum(bounds[i], 2 * terms * np.max(moved, initial=0.0))
    # What is not finite knows no rounding: it is compared as it is.
    return [np.where(np.isfinite(bound), bound, 0.0) for bound in bounds]


def _moved(a: Array | None, rng: np.random.Generator) -> Array | None:
    if a is None:
        return None
    signs = rng.choice([-1.0, 1.0], size=a.shape)
    return (a.astype(np.float64) * (1 + signs * 2.0 ** (1 - digits(a.dtype)))).astype(a.dtype)
