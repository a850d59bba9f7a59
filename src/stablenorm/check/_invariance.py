"""Whether rows are independent of one another, and results of how arrays lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.check._expected import Case
from stablenorm.check._program import Outcome, Program
from stablenorm.check._report import Finding

LAYER = "invariance"


class _Variation(NamedTuple):
    """The same problem told differently, and how to read its results as those of the first."""

    name: str
    case: Case
    # From y or dx, (rows, n), to the part of the base that it must equal.
    part: Callable[[Array], Array]
    # Whether dgamma and dbeta are the same sums.
    whole: bool
    # Of a shape other than the caller's, which the program need not take.
    optional: bool = False


def check_invariance(program: Program, base: Case) -> list[Finding]:
    """Compare `base` with its rows alone, in other orders, in other memory layouts."""
    first = program.run(base)
    if first.error:
        return []
    found = []
    again = program.run(base)
    found.append(_compare(program, base, first, again, _Variation("twice", base, _same, True)))
    for variation in _variations(base):
        outcome = program.run(variation.case)
        found.append(_compare(program, base, first, outcome, variation))
    return found


def _same(a: Array) -> Array:
    return a


def _variations(base: Case) -> Iterator[_Variation]:
    shape, row = base.x.shape, base.row_shape
    x, dy = (a.reshape(-1, *row) for a in (base.x, base.dy))
    rows = len(x)

    def of(x: Array, dy: Array) -> Case:
        return base._replace(x=x.copy(), dy=dy.copy())

    if rows > 1:
        last, half = rows - 1, (rows + 1) // 2
        yield _Variation("the last row alone", of(x[last:], dy[last:]), lambda a: a[last:], False)
        yield _Variation("the first rows alone", of(x[:half], dy[:half]), lambda a: a[:half], False)
        order = np.roll(np.arange(rows)[::-1], 1)
        yield _Variation("rows in another order", of(x[order], dy[order]), lambda a: a[order], True)
    yield from _layouts(base)
    if len(shape) == 1 + len(row):
        extra = of(x[:, None], dy[:, None])
        yield _Variation("one more leading axis", extra, _same, True, optional=True)
        single = of(x[0], dy[0])
        yield _Variation("no leading axis", single, lambda a: a[:1], rows == 1, optional=True)


def _layouts(base: Case) -> Iterator[_Variation]:
    def strided(a: Array) -> Array:
        wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1]), dtype=a.dtype)
        wide[..., ::2] = a
        return wide[..., ::2]

    def backwards(a: Array) -> Array:
        return np.ascontiguousarray(a[..., ::-1])[..., ::-1]

    def shifted(a: Array) -> Array:
        longer = np.zeros(a.size + 1, dtype=a.dtype)
        longer[1:] = a.reshape(-1)
        return longer[1:].reshape(a.shape)

    for name, view in (
        ("Fortran order", np.asfortranarray),
        ("strided views", strided),
        ("negative strides", backwards),
        ("views that begin in the middle", shifted),
    ):
        yield _Variation(name, base._replace(x=view(base.x), dy=view(base.dy)), _same, True)


def _compare(
    program: Program, base: Case, first: Outcome, outcome: Outcome, variation: _Variation
) -> Finding:
    name = f"the same for {variation.name}" if variation.name != "twice" else "the same twice"
    if outcome.error:
        verdict = "NOTE" if variation.optional else "FAIL"
        return Finding(LAYER, name, verdict, outcome.error)  # type: ignore[arg-type]
    inexact, resolution = "", 0.0
    for judged in program.judge(base, first).values():
        other = outcome.get(judged.name)
        by_row = judged.name in ("y", "dx")
        if other is None or not (by_row or variation.whole):
            continue
        expected = variation.part(judged.actual) if by_row else judged.actual
        bound = variation.part(judged.bounds.plain) if by_row else judged.bounds.plain
        difference = np.abs(other.astype(np.float64).reshape(expected.shape) - expected)
        resolution = max(resolution, 2 * judged.resolution)
        # Both may be off by the bound.
        if not np.all(difference <= 2 * bound):
            seen, explained = np.max(difference), 2 * np.max(bound)
            message = f"{judged.name} differs by {seen:.1e}, rounding explains {explained:.1e}"
            return Finding(LAYER, name, "FAIL", message, resolution)
        if difference.any():
            inexact = f"{inexact}, {judged.name}" if inexact else judged.name
    if inexact:
        message = f"{inexact}: not the same bits, though equal to rounding"
        return Finding(LAYER, name, "NOTE", message, resolution)
    return Finding(LAYER, name, "PASS", "", resolution)
