"""All that the report tells, computed and measured; the page only writes it down."""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import stablenorm
from stablenorm.cost import Measured, measure_costs
from stablenorm.diagnosis import Diagnosis, diagnose
from stablenorm.report._findings import Findings, Problem, compute, inspect
from stablenorm.threads import get_num_threads
from stablenorm.types import Array

# Elements that are computed and judged by identities, about a second of it; of a larger array
# evenly spaced rows.
_ELEMENTS = 2**24
# Elements summarized at once: 8 MiB of float64, which stays in the caches.
_BLOCK = 2**20
# Bytes of x beyond the caches of most machines: a copy reads and writes twice as much. Rounds and
# seconds of each size: a reader waits for them, and a median of three tells a factor.
_FAR, _ROUNDS, _SECONDS = 2**25, 9, 3.0
# At most: the rows; the four steps of `inspect`; the diagnosis; the two sizes that are timed.
STEPS = 1 + 4 + 1 + 2


class Rows(NamedTuple):
    """What is known of each row of x, each of shape (rows,); NaN for a row that is not finite."""

    mean: Array
    std: Array
    low: Array
    high: Array
    finite: Array
    constant: Array


class Facts(NamedTuple):
    """Everything that the page says; a str stands for what could not be had, and says why."""

    problem: Problem
    rows: Rows
    # How many rows are judged, and, where these are not all, which ones.
    judged: int
    choice: str
    findings: Findings | str
    diagnosis: Diagnosis
    # Of the data's own shape, and of more rows where that fits the caches.
    costs: tuple[Measured, ...] | str
    versions: str
    machine: str
    date: str

    @property
    def passed(self) -> bool:
        """Whether no check failed; what could not be checked did not."""
        return isinstance(self.findings, str) or self.findings.passed


def gather(problem: Problem, step: Callable[[str], None]) -> Facts:
    """Compute and measure everything; `step` is told what is going on."""
    step("rows of x")
    rows = summarize(problem.x.reshape(-1, problem.x.shape[-1]))
    part, choice = _judgeable(problem, rows)
    findings: Findings | str = choice
    if part is not None:
        findings = inspect(part, compute(part), step)
    step("diagnosis")
    diagnosis = diagnose(problem.x, problem.eps)
    costs = _measure(problem, step)
    return Facts(
        problem,
        rows,
        0 if part is None else part.x.shape[0],
        choice,
        findings,
        diagnosis,
        costs,
        f"stablenorm {stablenorm.__version__}, NumPy {np.__version__}, "
        f"Python {platform.python_version()}",
        f"{_processor()}, {os.cpu_count()} processors, {platform.system()}",
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC",
    )


def summarize(x: Array) -> Rows:
    """Find mean, std, least and largest of each row of a matrix, in float64, block by block."""
    every = max(1, _BLOCK // x.shape[-1])
    blocks = [_summarize_block(x[first : first + every]) for first in range(0, len(x), every)]
    return Rows(*(np.concatenate(column) for column in zip(*blocks, strict=True)))


def _summarize_block(x: Array) -> Rows:
    wide = x.astype(np.float64)
    finite = np.asarray(np.isfinite(wide).all(axis=-1))
    wide = np.where(finite[:, None], wide, 0.0)
    low, high = wide.min(axis=-1), wide.max(axis=-1)
    # Divided by the largest magnitude first: squares of float64 could overflow or vanish.
    largest = np.maximum(np.abs(low), np.abs(high))
    unit = np.where(largest > 0, largest, 1.0)
    scaled = wide / unit[:, None]
    constant = finite & (low == high)
    # The rounded mean of a constant row would leave a trace.
    std = np.where(constant, 0.0, scaled.std(axis=-1) * unit)
    known = (scaled.mean(axis=-1) * unit, std, low, high)
    mean, std, low, high = (np.where(finite, v, np.nan) for v in known)
    return Rows(mean, std, low, high, finite, constant)


def check_problem(problem: Problem) -> None:
    """Refuse what the package refuses, in its words, before anything is computed."""
    x, dy = problem.x, problem.dy
    # Without rows: the checks alone. What differs in shape is refused whole.
    whole = x.ndim < 2 or x.shape != dy.shape
    compute(problem if whole else problem._replace(x=x[:0], dy=dy[:0]))
    if x.size == 0:
        msg = f"x must have at least one row, got shape {x.shape}"
        raise ValueError(msg)


def _judgeable(problem: Problem, rows: Rows) -> tuple[Problem | None, str]:
    """Return the rows that have an exact result, few enough, and which they are."""
    for name in ("gamma", "beta"):
        array = getattr(problem, name)
        if array is not None and not np.isfinite(array.astype(np.float64)).all():
            return None, f"{name} is not finite, so that no row has an exact result"
    n = problem.x.shape[-1]
    x, dy = (array.reshape(-1, n) for array in (problem.x, problem.dy))
    keep = rows.finite & np.isfinite(dy.astype(np.float64)).all(axis=-1)
    if problem.eps == 0:
        keep &= ~rows.constant
    chosen = np.flatnonzero(keep)
    if not chosen.size:
        return None, "no row of x and dy has an exact result: they hold NaN, infinity or 0/0"
    words = []
    if chosen.size < len(x):
        words.append(
            f"{len(x) - chosen.size} rows that hold NaN or infinity, or are constant with eps = 0, "
            "are left out"
        )
    most = max(1, _ELEMENTS // n)
    if chosen.size > most:
        words.append(f"{most} rows are taken, evenly spaced")
        chosen = chosen[np.linspace(0, chosen.size - 1, most).astype(np.intp)]
    if words:
        return problem._replace(x=x[chosen], dy=dy[chosen], expected={}), "; ".join(words)
    # As a matrix; the file's own results are compared, as all rows are there.
    expected = {
        name: held.reshape(-1, n) if held.shape == problem.x.shape else held
        for name, held in problem.expected.items()
    }
    return problem._replace(x=x, dy=dy, expected=expected), ""


def _measure(problem: Problem, step: Callable[[str], None]) -> tuple[Measured, ...] | str:
    """Time the programs at the data's own shape and, if that is small, beyond the caches."""
    n, kind = problem.x.shape[-1], problem.x.dtype
    own, far = problem.x.size // n, max(1, _FAR // (n * kind.itemsize))
    sizes = [min(own, far)] if own > far // 2 else [own, far]
    found = []
    for rows in sizes:
        step(f"time of {rows} rows")
        try:
            found.append(
                measure_costs(
                    (rows, n), str(kind), get_num_threads(), rounds=_ROUNDS, limit=_SECONDS
                )
            )
        except ImportError as error:
            return f"the fused kernel cannot be loaded: {error}"
    return tuple(found)


def _processor() -> str:
    """Return the processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
