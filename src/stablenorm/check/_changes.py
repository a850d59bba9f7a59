"""The usual departures from the formula of dx, each in words and as what it puts in the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array, bfloat16


class Facts(NamedTuple):
    """What a change may be made of; var, rstd and mean are (rows, 1)."""

    var: Array
    eps: float
    n: int
    rstd: Array
    mean: Array


class Change(NamedTuple):
    """
    One departure: of which kind, in words, and what stands in the place of the right thing.

    By kind, `make` gives rstd, the mean of x, a further factor of dx, or the number of times that
    the term is subtracted, from `Facts` or as it is; for gamma, it names the place.
    """

    kind: str
    words: str
    make: Any

    def value(self, facts: Facts) -> Any:
        """Return what it puts in the place."""
        return self.make(facts) if callable(self.make) else self.make

    @property
    def in_dx(self) -> str:
        """The sentence, with dx in it."""
        known = self.words.endswith("dx") or self.words.startswith("dx ")
        return self.words if known else f"{self.words} in dx"


_NARROW = (("float32", np.float32), ("bfloat16", bfloat16), ("float16", np.float16))


def _narrow(field: str, dtype: Any) -> Callable[[Facts], Array]:
    def make(facts: Facts) -> Array:
        rounded: Array = getattr(facts, field).astype(dtype).astype(np.float64)
        return rounded

    return make


def _statistics() -> list[Change]:
    biased = "the variance is divided by n - 1"
    rstd = [
        (biased, lambda f: (f.var * f.n / (f.n - 1) + f.eps) ** -0.5),
        (biased, lambda f: ((f.var + f.eps) * f.n / (f.n - 1)) ** -0.5),
        ("eps is missing from rstd", lambda f: f.var**-0.5),
        ("rstd is 1 / (sqrt(var) + eps)", lambda f: 1 / (f.var**0.5 + f.eps)),
        ("eps was applied twice", lambda f: (f.var + 2 * f.eps) ** -0.5),
        ("eps is squared in rstd", lambda f: (f.var + f.eps * f.eps) ** -0.5),
        ("rstd is squared", lambda f: f.rstd * f.rstd),
        ("rstd is the standard deviation itself", lambda f: 1 / f.rstd),
    ]
    found = [Change("rstd", words, make) for words, make in rstd]
    for name, dtype in _NARROW:
        found.append(Change("rstd", f"rstd is kept in {name}", _narrow("rstd", dtype)))
        found.append(Change("mean", f"the mean is kept in {name}", _narrow("mean", dtype)))
    return [*found, Change("mean", "the mean of x is missing from xhat", 0.0)]


def _terms() -> list[Change]:
    found = []
    for place, what in enumerate(("the mean of g", "the xhat term")):
        times = [
            ("is missing from dx", 0.0),
            ("is subtracted twice", 2.0),
            ("is added, not subtracted", -1.0),
            ("is divided by n - 1", lambda f: f.n / (f.n - 1)),
            ("is not divided by n", lambda f: f.n),
        ]
        found += [Change(f"term {place}", f"{what} {words}", make) for words, make in times]
    return found


STATISTICS: tuple[Change, ...] = tuple(_statistics())
CHANGES: tuple[Change, ...] = (
    *STATISTICS,
    *_terms(),
    Change("factor", "rstd is missing from dx", lambda f: 1 / f.rstd),
    Change("factor", "rstd is applied twice", lambda f: f.rstd),
    Change("factor", "dx has the wrong sign", -1.0),
    Change("factor", "dx is divided by n", lambda f: 1 / f.n),
    Change("factor", "dx is multiplied by n", lambda f: f.n),
    Change("gamma", "gamma is applied twice", "twice"),
    Change("gamma", "gamma is not applied", "never"),
    Change("gamma", "gamma is applied after the projection", "after"),
)
