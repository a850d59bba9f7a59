"""
The gradient checkers of the shoot-out: ours, plain differences, and criteria written anew.

A tool gets one hand-written layer norm and says whether it found it wrong, by its own step and its
own tolerance. Those whose package is called are in shootout_peers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.check import GradientReport, check_gradients, check_layer_norm

EPS = 1e-5
NAMES = ("x", "gamma", "beta")


class Subject(NamedTuple):
    """What is judged: an implementation, and where."""

    forward: Callable[..., tuple[Array, Any]]
    backward: Callable[[Array, Any], tuple[Array, Array, Array]]
    args: tuple[Array, Array, Array]
    seed: int

    def loss(self, u: Array | None = None) -> tuple[Callable[[Array], Any], Array, Array]:
        """Return <u, y> as a function of all arguments in one vector, that vector, its gradient."""
        if u is None:
            u = np.random.default_rng(self.seed).standard_normal(self.args[0].shape)

        def value(vector: Array) -> Any:
            return np.sum(u * self.forward(*self.split(vector))[0])

        gradients = self.backward(u, self.forward(*self.args)[1])
        return value, _join(self.args), _join(gradients)

    def split(self, vector: Array) -> list[Array]:
        """Undo the joining of arguments, or of their gradients, into one vector."""
        parts = np.split(vector, np.cumsum([a.size for a in self.args])[:-1])
        return [part.reshape(a.shape) for part, a in zip(parts, self.args, strict=True)]


class Outcome(NamedTuple):
    """What a tool said of one subject."""

    verdict: Literal["found", "accepted", "inconclusive", "no verdict"]
    # The arguments whose gradient it called wrong, and its words for what is wrong; ours alone.
    blamed: tuple[str, ...] = ()
    words: str = ""
    # What it returns, where that is all that it does.
    number: float | None = None


class Tool(NamedTuple):
    """A way to check a gradient."""

    name: str
    # The package itself, or its rule written anew.
    real: bool
    version: str
    # In words: step, and what it calls wrong.
    criterion: str
    # Whether one check of 24576 elements takes seconds or less.
    large: bool
    check: Callable[[Subject], Outcome]


def said(wrong: bool) -> Outcome:
    """Put a tool's yes or no into words."""
    return Outcome("found" if wrong else "accepted")


def our_tools(version: str) -> list[Tool]:
    """Return the two of this package; neither gets the exact oracle."""
    none = "no tolerance: differs by more than the computed bounds of both sides"
    return [
        Tool("check_layer_norm", True, version, f"{none}; identities", True, _layer_norm),
        Tool("check_gradients", True, version, none, True, _gradients),
    ]


def plain_tools() -> list[Tool]:
    """Return what is written by hand, and Theano's rule, whose package no longer installs."""
    central = "central, step 1e-5, every element; for some argument max|a - n| >= "
    each = "central, step 1e-5, every element; somewhere |a - n| >= 1e-7 max(|a|, |n|)"
    return [
        Tool(
            "Theano",
            False,
            "",
            "forward, step 1e-7, every element, 2 projections u in [.5, 1.5]; "
            "some element has both errors > 1e-4",
            False,
            _theano,
        ),
        *(
            Tool(
                f"rel < {limit}",
                False,
                "",
                f"{central}{limit} max|n|",
                False,
                partial(_central, limit=float(limit)),
            )
            for limit in ("1e-4", "1e-7")
        ),
        Tool("each rel < 1e-7", False, "", each, False, partial(_central, limit=1e-7, each=True)),
        Tool(
            "complex step",
            False,
            "",
            "step 1e-100 i, every element; worst |a - n| >= 1e-12 of the largest |n|",
            False,
            _complex,
        ),
    ]


def _join(arrays: Any) -> Array:
    return np.concatenate([np.asarray(a).reshape(-1) for a in arrays])


def _outcome(report: GradientReport) -> Outcome:
    words: dict[str, Any] = {"PASS": "accepted", "FAIL": "found", "INCONCLUSIVE": "inconclusive"}
    blamed = tuple(result.name for result in report.arguments if result.verdict == "FAIL")
    return Outcome(words[report.verdict], blamed, "; ".join(report.diagnosis))


def _gradients(subject: Subject) -> Outcome:
    forward, backward, args, seed = subject
    return _outcome(check_gradients(forward, backward, args, names=NAMES, rng=seed))


def _layer_norm(subject: Subject) -> Outcome:
    forward, backward, args, seed = subject
    return _outcome(check_layer_norm(forward, backward, *args, EPS, rng=seed))


def _differences(value: Callable[[Array], Any], at: Array, step: float, central: bool) -> Array:
    """Difference the loss in every element, divided by the nominal step, as is usual."""
    numeric = np.empty_like(at)
    here = None if central else value(at)
    for i in range(at.size):
        moved = at.copy()
        moved[i] = at[i] + step
        ahead = value(moved)
        if central:
            moved[i] = at[i] - step
            numeric[i] = (ahead - value(moved)) / (2 * step)
        else:
            numeric[i] = (ahead - here) / step
    return numeric


def _central(subject: Subject, limit: float, *, each: bool = False) -> Outcome:
    value, at, actual = subject.loss()
    numeric = _differences(value, at, 1e-5, central=True)
    wrong = False
    for a, n in zip(subject.split(actual), subject.split(numeric), strict=True):
        size = np.maximum(np.abs(a), np.abs(n)) if each else np.max(np.abs(n))
        # 0 against 0 is right.
        wrong |= bool(np.any((np.abs(a - n) >= limit * size) & (a != n)))
    return said(wrong)


def _complex(subject: Subject) -> Outcome:
    value, at, actual = subject.loss()
    numeric = np.empty_like(at)
    for i in range(at.size):
        moved = at.astype(np.complex128)
        moved[i] += 1e-100j
        numeric[i] = value(moved).imag / 1e-100
    return said(bool(np.max(np.abs(actual - numeric)) >= 1e-12 * np.max(np.abs(numeric))))


def _theano(subject: Subject) -> Outcome:
    rng = np.random.default_rng(subject.seed)
    wrong = False
    for _ in range(2):
        value, at, actual = subject.loss(rng.uniform(0.5, 1.5, subject.args[0].shape))
        numeric = _differences(value, at, 1e-7, central=False)
        absolute = np.abs(actual - numeric)
        relative = absolute / np.maximum(np.abs(actual) + np.abs(numeric), 1e-8)
        wrong |= bool(np.any((absolute > 1e-4) & (relative > 1e-4)))
    return said(wrong)
