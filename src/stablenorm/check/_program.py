"""The layer normalization that is checked: called on cases, counted, and compared with ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.check._expected import OUTPUTS, Bounds, Case, Expected, excess


class Outcome(NamedTuple):
    """What the program returned for a case; `error` says why there is nothing."""

    y: Array | None = None
    dx: Array | None = None
    dgamma: Array | None = None
    dbeta: Array | None = None
    error: str = ""

    def get(self, name: str) -> Array | None:
        """Return y, dx, dgamma or dbeta."""
        found: Array | None = getattr(self, name)
        return found


class Judged(NamedTuple):
    """One output compared: (rows, n) or (n,), float64; z is the error in units of each bound."""

    name: str
    actual: Array
    bounds: Bounds
    u: float
    plain: Array
    careless: Array

    @property
    def right(self) -> bool:
        """Within what a plain program loses."""
        return bool(np.all(self.plain <= 1))

    @property
    def wrong(self) -> bool:
        """Beyond what even a careless one loses."""
        return bool(np.any(self.careless > 1))

    @property
    def size(self) -> float:
        """The RMS of what the elements are made of: the value may vanish."""
        rms = float(np.sqrt(np.mean(np.square(self.bounds.magnitude))))
        return rms if np.isfinite(rms) and rms > 0 else 1.0

    @property
    def relative(self) -> float:
        """The largest error relative to `size`."""
        with np.errstate(all="ignore"):
            error = np.abs(self.actual - self.bounds.value)
        error = np.where(np.isfinite(error), error, np.inf)
        return float(np.max(error, initial=0.0)) / self.size

    @property
    def resolution(self) -> float:
        """The smallest relative error that would have shown anywhere."""
        return float(np.max(self.bounds.plain, initial=0.0)) / self.size


class Program:
    """A forward and a backward, called on copies with warnings silenced; counts the calls."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any]):
        self._forward, self._backward = forward, backward
        self.forward_calls = self.backward_calls = 0
        # The precision inside, where that is less than that of the arrays.
        self.u = 0.0

    def forward(self, case: Case) -> tuple[Array | None, Any, str]:
        """Return y, cache and what went wrong."""
        self.forward_calls += 1
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                result = self._forward(
                    *(None if a is None else _copy(a) for a in (case.x, case.gamma, case.beta)),
                    case.eps,
                )
            y = np.asarray(result[0])
        except Exception as error:  # noqa: BLE001 - the program is the user's: it may raise anything
            return None, None, f"the forward raises {_told(error)}"
        if y.shape != case.x.shape or not _floating(y):
            return None, None, f"the forward returns y of shape {y.shape} and dtype {y.dtype}"
        return y, result[1], ""

    def backward(self, case: Case, y: Array, cache: Any) -> Outcome:
        """Return the gradients along case.dy."""
        self.backward_calls += 1
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                gradients = list(self._backward(_copy(case.dy), cache))
        except Exception as error:  # noqa: BLE001 - as above
            return Outcome(y, error=f"the backward raises {_told(error)}")
        if len(gradients) != 3:
            return Outcome(y, error=f"the backward returns {len(gradients)} gradients")
        arrays = [None if a is None else np.asarray(a) for a in gradients]
        for name, a in zip(OUTPUTS[1:], arrays, strict=True):
            shape = case.x.shape if name == "dx" else case.row_shape
            if a is not None and (a.shape != shape or not _floating(a)):
                message = f"the backward returns {name} of shape {a.shape} and dtype {a.dtype}"
                return Outcome(y, error=message)
        dx, dgamma, dbeta = arrays
        # What there is no argument for has no gradient.
        return Outcome(
            y,
            dx,
            None if case.gamma is None else dgamma,
            None if case.beta is None else dbeta,
        )

    def run(self, case: Case) -> Outcome:
        """Call both."""
        y, cache, error = self.forward(case)
        return Outcome(error=error) if y is None else self.backward(case, y, cache)

    def judge(self, case: Case, outcome: Outcome) -> dict[str, Judged]:
        """Compare every output that is there with the checker's own."""
        found = {}
        # Most outputs are of one precision: the statistics once for all of them.
        known: dict[float, Expected] = {}
        for name in OUTPUTS:
            actual = outcome.get(name)
            if actual is not None:
                found[name] = self.judge_one(case, name, actual, known)
        return found

    def judge_one(
        self, case: Case, name: str, actual: Array, known: dict[float, Expected] | None = None
    ) -> Judged:
        """Compare one output with the checker's own."""
        u, known = self.precision(case, actual), {} if known is None else known
        expected = known[u] = known[u] if u in known else Expected(case, u)
        bounds = expected.bounds_of(name, actual.dtype)
        flat = actual.astype(np.float64).reshape(bounds.value.shape)
        return Judged(
            name,
            flat,
            bounds,
            expected.u,
            excess(flat, bounds.value, bounds.plain),
            excess(flat, bounds.value, bounds.careless),
        )

    def precision(self, case: Case, actual: Array) -> float:
        """Return u, as the coarsest of x, dy, the output, and what was found inside."""
        return max(self.u, Expected.precision(case.x, case.dy, actual))


def narrowed(gradient: Any) -> Any:
    """
    Return a float64 gradient that holds nothing but float32 values as float32.

    Then it is judged as what it is, the product of single precision: less accurate, not wrong.
    """
    if gradient is None:
        return None
    values = np.asarray(gradient)
    if values.dtype != np.float64 or values.size == 0 or not np.isfinite(values).all():
        return gradient
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
    # Sums of few-bit numbers, as dbeta of this checker's dy is, are no evidence.
    coarse = np.round(np.frexp(values)[0] * 2.0**16) == np.frexp(values)[0] * 2.0**16
    if np.array_equal(single, values) and not coarse.all():
        return single
    return gradient


def _copy(a: Array) -> Array:
    """Copy what owns its memory; views are the memory layouts that are being tried."""
    return a if a.base is not None else a.copy()


def _floating(a: Array) -> bool:
    # bfloat16 is of kind "V" to NumPy.
    return a.dtype.kind == "f" or a.dtype.name == "bfloat16"


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:120]
