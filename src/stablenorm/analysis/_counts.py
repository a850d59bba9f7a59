"""
Formulas of operations and bytes as data: sums of products that are shown as they are evaluated.

A formula is a text such as "rows n - rows": products of an optional integer and names, a space
between them, added or subtracted. Nothing else is needed to count what a layer norm does, and
nothing is evaluated that is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_PRODUCT = re.compile(r"([+-]?)\s*([a-z0-9]+(?: [a-z0-9]+)*)")

# The quantities of a term that are formulas, in the order of `Term`.
QUANTITIES = (
    "single", "fused", "divisions", "others", "loaded", "stored", "read", "written", "fetched",
    "kept",
    "memory",
)  # fmt: skip


class Term(NamedTuple):
    """
    One step of an implementation, by its name, and what it costs.

    `single` counts additions, subtractions and multiplications, `fused` multiply-adds, `divisions`
    divisions and square roots, `others` comparisons and selections: those that a time depends on.
    `loaded` and `stored` are elements that pass between the type in memory and that of the
    arithmetic, `fetched` and `kept` float64 words that pass between it and memory as they are, and
    `read` and `written` bytes of all of these. `memory` is the part of those bytes that memory itself
    must move where the arrays are larger than the caches.
    """

    name: str
    single: str = "0"
    fused: str = "0"
    divisions: str = "0"
    others: str = "0"
    loaded: str = "0"
    stored: str = "0"
    read: str = "0"
    written: str = "0"
    fetched: str = "0"
    kept: str = "0"
    memory: str = "0"


class Cost(NamedTuple):
    """A `Term`, or a sum of terms, evaluated."""

    single: int
    fused: int
    divisions: int
    others: int
    loaded: int
    stored: int
    read: int
    written: int
    fetched: int
    kept: int
    memory: int

    @property
    def flops(self) -> int:
        """Roundings of reals; a fused multiply-add is two operations in one."""
        return self.single + 2 * self.fused + self.divisions

    @property
    def operations(self) -> int:
        """Instructions' worth of arithmetic: a fused multiply-add is one, a comparison is one."""
        return self.single + self.fused + self.others

    @property
    def moved(self) -> int:
        """Bytes read and written, wherever they are."""
        return self.read + self.written


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """Return the value of `formula`, given that of each name."""
    total, end = 0, 0
    for match in _PRODUCT.finditer(formula):
        if formula[end : match.start()].strip():
            break
        product = -1 if match[1] == "-" else 1
        for factor in match[2].split():
            product *= int(factor) if factor.isdecimal() else values[factor]
        total, end = total + product, match.end()
    if formula[end:].strip() or not end:
        msg = f"formula must be a sum of products of names and integers, got {formula!r}"
        raise ValueError(msg)
    return total


def cost_of(term: Term, values: Mapping[str, int]) -> Cost:
    """Evaluate all formulas of a term."""
    return Cost(*(evaluate(getattr(term, quantity), values) for quantity in QUANTITIES))


def total(costs: Iterable[Cost]) -> Cost:
    """Add costs up."""
    return Cost(*(sum(parts) for parts in zip(*costs, strict=True)))


def flops_formula(term: Term) -> str:
    """Return the formula of a term's floating-point operations, as it is shown."""
    parts = [term.single, *_doubled(term.fused), term.divisions]
    return " + ".join(part for part in parts if part != "0") or "0"


def bytes_formula(term: Term) -> str:
    """Return the formula of a term's bytes, as it is shown."""
    parts = [
        f"{way} {part}"
        for way, part in (("read", term.read), ("write", term.written))
        if part != "0"
    ]
    return ", ".join(parts) or "0"


def _doubled(formula: str) -> list[str]:
    return [] if formula == "0" else [f"2 ({formula})" if "+" in formula else f"2 {formula}"]
