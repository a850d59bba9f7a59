"""
The bits of y that methods in common use lose, measured: what `diagnose` predicts is compared with.

Each method is computed step by step in NumPy, every operation rounded as the method rounds it, and
its y is compared with the exact one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stablenorm import diagnose, exact_layer_norm
from stablenorm.diagnosis.methods import TITLES, working_format
from stablenorm.formats import format_of, parse
from stablenorm.testing.families import FAMILIES, make_case

DTYPES = ("float16", "bfloat16", "float32", "float64")

# Of each family. The oracle takes 11 ms for a row of 768.
ROWS = 4


class Case(NamedTuple):
    """A family of hard inputs: the rows, their exact y, and the bits predicted lost by method."""

    family: str
    x: Any
    eps: float
    exact: Any
    predicted: dict[str, Any]


def cases(dtypes: Sequence[Any] = DTYPES, lengths: Sequence[int] = (127, 768)) -> Iterator[Case]:
    """Yield every family that exists for a dtype and a length."""
    for dtype in map(parse, dtypes):
        for n in lengths:
            for family in FAMILIES.values():
                if not (family.finite and family.applies(dtype, n)):
                    continue
                case = make_case(family.name, dtype, n, max(ROWS, family.smallest_rows), rng=3)
                x = case.x[:ROWS]
                exact = exact_layer_norm(x, eps=case.eps).rounded("y", np.float64)
                found = diagnose(x, case.eps).per_row
                assert found is not None
                predicted = dict(zip(TITLES, found.lost, strict=True))
                yield Case(family.name, x, case.eps, exact, predicted)


def measure(case: Case, method: str, lanes: int = 16) -> Any:
    """Return the bits lost on each row by a method; `lanes` as in `simulate`."""
    return measure_bits(simulate(method, case.x, case.eps, lanes), case)


def measure_bits(y: Any, case: Case) -> Any:
    """Return the bits of `y` lost on each row of a case, in the units of `diagnose`."""
    form = format_of(y.dtype)
    with np.errstate(all="ignore"):
        constant = (case.x == case.x[:, :1]).all(axis=1)
        error = _rms(y.astype(np.float64) - case.exact)
        size = np.where(constant, 1.0, np.maximum(_rms(case.exact), 2.0**form.emin))
        # Half of the smallest float64 is none.
        bits = np.log2(error / np.maximum(2.0**-form.digits * size, 5e-324))
    return np.where(bits < form.digits, np.maximum(bits, 0.0), form.digits)


def _rms(v: Any) -> Any:
    """Return the root mean square of each row; scaled, as squares of small errors underflow."""
    largest = np.abs(v).max(axis=1, keepdims=True)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return scale[:, 0] * np.sqrt(np.square(v / scale).mean(axis=1))


def simulate(method: str, x: Any, eps: float, lanes: int = 16) -> Any:
    """
    Return y of `x`, (rows, n), without gamma and beta, as a method computes it.

    Sums are formed in as many running sums as `lanes`, a power of two, says: element i goes into sum
    i mod `lanes`; in the end they are added by halves. As many as elements are pairwise summation.
    The saved statistics are correctly rounded, and y is what a backward would rebuild from them.
    """
    with np.errstate(all="ignore"):
        working = x.astype(working_format(x.dtype).dtype)
        mean, rstd = _mean_rstd(method, working, eps, lanes)
        center, scale = (v[:, None].astype(working.dtype) for v in (mean, rstd))
        return ((working - center) * scale).astype(x.dtype)


def _mean_rstd(method: str, x: Any, eps: float, lanes: int) -> tuple[Any, Any]:
    if method.startswith("saved"):
        kind: Any = np.float32 if method == "saved float32" else ml_dtypes.bfloat16
        mean, rstd = (v.astype(np.float32).astype(kind) for v in _exact_mean_rstd(x, eps))
        return mean, rstd
    n = x.dtype.type(x.shape[1])
    mean = _sum(x, lanes) / n
    if method == "one-pass":
        var = _sum(x * x, lanes) / n - mean * mean
    else:
        var = _sum((x - mean[:, None]) ** 2, lanes) / n
    kind = np.float16 if method == "float16" else x.dtype.type
    mean, var = mean.astype(kind), var.astype(kind)
    return mean, kind(1) / np.sqrt(var + kind(eps))


def _exact_mean_rstd(x: Any, eps: float) -> tuple[Any, Any]:
    # Scaled to [1, 2): squares of float64 may overflow.
    power = np.frexp(np.abs(x).max(axis=1).astype(np.float64))[1][:, None]
    scaled = np.ldexp(x.astype(np.longdouble), -power)
    mean = scaled.mean(axis=1, keepdims=True)
    mean = mean + (scaled - mean).mean(axis=1, keepdims=True)
    var = np.square(scaled - mean).mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(np.ldexp(var, 2 * power) + np.longdouble(eps))
    return np.ldexp(mean, power)[:, 0], rstd[:, 0]


def _sum(v: Any, lanes: int) -> Any:
    sums = np.zeros((len(v), lanes), v.dtype)
    for start in range(0, v.shape[1], lanes):
        part = v[:, start : start + lanes]
        sums[:, : part.shape[1]] += part
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
