"""
What the gradient checkers must reach, measured: finds, false alarms, bounds, seconds.

Writes docs/checker.md; with `--quick`, a few seeds, prints only. Two processes; some ten minutes.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import processor
from rich.progress import track

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.analysis.mistakes import MISTAKES, VARIANTS, forward
from stablenorm.check import check_gradients, check_layer_norm
from stablenorm.oracle import exact_layer_norm

PAGE = Path(__file__).parent.parent / "docs" / "checker.md"
SHAPES = ((4, 8), (32, 768))
OFFSETS = (0.0, 1.0, 1e2, 1e4, 1e6)
NAMES = ("x", "gamma", "beta")
# Not the seeds that the checkers were made on.
FIRST_SEED = 5000


class Job(NamedTuple):
    """One check: which checker, of what, where."""

    checker: str
    code: str
    shape: tuple[int, int]
    dtype: str
    offset: float
    seed: int


class Outcome(NamedTuple):
    """What it said."""

    job: Job
    verdict: str
    # The arguments found wrong, and whether the sentence expected was among those said.
    blamed: tuple[str, ...]
    named: bool
    seconds: float


def ours(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
    """Call ours, as the variants are called."""
    return layer_norm_forward(x, gamma, beta, eps)


CODE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{name: (forward, mistake.backward) for name, mistake in MISTAKES.items()},
    **VARIANTS,
    "stablenorm": (ours, layer_norm_backward),
}
RIGHT = (*VARIANTS, "stablenorm")


def make_args(job: Job) -> list[Any]:
    """Draw x ~ N + offset, gamma = 1 + .1 N, beta = .1 N."""
    rng = np.random.default_rng(job.seed)
    n = job.shape[1]
    drawn = (
        job.offset + rng.standard_normal(job.shape),
        1 + 0.1 * rng.standard_normal(n),
        0.1 * rng.standard_normal(n),
    )
    return [a.astype(job.dtype) for a in drawn]


def run(job: Job) -> Outcome:
    """Check once."""
    args = make_args(job)
    front, back = CODE[job.code]
    start = time.perf_counter()
    if job.checker == "check_layer_norm":
        report = check_layer_norm(front, back, *args, rng=job.seed)
    else:
        report = check_gradients(lambda *a: front(*a, 1e-5), back, args, names=NAMES, rng=job.seed)
    seconds = time.perf_counter() - start
    blamed = tuple(r.name for r in report.arguments if r.verdict == "FAIL")
    sentence = MISTAKES[job.code].diagnosis if job.code in MISTAKES else ""
    named = any(sentence in said for said in report.diagnosis) if sentence else not report.diagnosis
    return Outcome(job, report.verdict, blamed, named, seconds)


def cover(seed: int) -> list[tuple[float, float]]:
    """Return true error and bound of every numeric derivative by x of one layer norm."""
    offset = (*OFFSETS, 10.0, 1e3, 1e5)[seed % 8]
    x, gamma, beta = make_args(Job("", "plain", (4, 8 + seed % 9), "float64", offset, seed))
    front, back = CODE["plain"]
    seen: list[tuple[Any, Any]] = []
    checker: Any = importlib.import_module("stablenorm.check._check")
    judge = checker.judge

    def overhear(task: Any, loss: Any, comparisons: Any, pattern: Any) -> Any:
        """Note the bounds of all elements: a report has only the sum of both sides' bounds."""
        seen.append((loss, comparisons))
        return judge(task, loss, comparisons, pattern)

    checker.judge = overhear
    try:
        args = [x, gamma, beta]
        check_gradients(lambda *a: front(*a, 1e-5), back, args, rng=seed, max_elements=200)
    finally:
        checker.judge = judge
    loss, comparisons = seen[0]
    exact = exact_layer_norm(x, gamma, beta, dy=loss.cotangent()).rounded("dx", np.float64)
    return [
        (abs(c.derivative.numeric - float(exact[c.place])), c.derivative.bound)
        for c in comparisons
        if c.place is not None
    ]


def jobs(seeds: int, alarms: int) -> Iterable[Job]:
    """Yield all checks: mistakes, then right code with the seeds dealt out over the offsets."""
    for checker in ("check_layer_norm", "check_gradients"):
        for shape in SHAPES:
            for code in MISTAKES:
                for seed in range(seeds):
                    yield Job(checker, code, shape, "float64", 0.0, FIRST_SEED + seed)
    for code in RIGHT:
        for dtype in ("float64", "float32"):
            for seed in range(alarms):
                offset = OFFSETS[seed % len(OFFSETS)]
                yield Job("check_layer_norm", code, (4, 8), dtype, offset, FIRST_SEED + seed)


def finds(outcomes: list[Outcome]) -> list[str]:
    """Return the table of mistakes."""
    lines = ["| mistake | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for code, mistake in MISTAKES.items():
        cells = []
        for checker, shape in ((c, s) for c in CHECKERS for s in SHAPES):
            here = [o for o in outcomes if o.job[:3] == (checker, code, shape)]
            found = sum(o.verdict == "FAIL" for o in here)
            placed = sum(o.blamed == (mistake.argument,) for o in here)
            cell = f"{found} of {len(here)}, {placed} at d{mistake.argument} alone"
            if checker == "check_layer_norm":
                cell += f", {sum(o.named for o in here)} named"
            cells.append(cell if found == len(here) else f"**{cell}**")
        lines.append(f"| {code} | " + " | ".join(cells) + " |")
    return lines


def alarms(outcomes: list[Outcome]) -> list[str]:
    """Return the table of right code."""
    lines = ["| right code | dtype | PASS | INCONCLUSIVE | FAIL |", "|---|---|---|---|---|"]
    for code in RIGHT:
        for dtype in ("float64", "float32"):
            seen = Counter(
                o.verdict for o in outcomes if o.job.code == code and o.job.dtype == dtype
            )
            wrong = f"**{seen['FAIL']}**" if seen["FAIL"] else "0"
            lines.append(
                f"| {code} | {dtype} | {seen['PASS']} | {seen['INCONCLUSIVE']} | {wrong} |"
            )
    return lines


def coverage(pairs: list[tuple[float, float]]) -> str:
    """Return the sentence on the bounds."""
    covered = sum(error <= bound for error, bound in pairs) / len(pairs)
    ratios = [bound / error for error, bound in pairs if error > 0]
    worst = max(error / bound for error, bound in pairs)
    return (
        f"Of {len(pairs)} elements of dx, offsets 0 to 1e6, {100 * covered:.2f} % have a numeric "
        f"derivative whose error (against the exact one) is within its bound; the largest error is "
        f"{worst:.2f} of its bound, the median bound {statistics.median(ratios):.0f} times the error."
    )


def times() -> list[str]:
    """Return the table of seconds, each alone on the machine, right code."""
    lines = ["| shape | check_layer_norm | check_gradients |", "|---|---|---|"]
    for shape in ((4, 8), (32, 768), (64, 4096)):
        cells = []
        for checker in CHECKERS:
            job = Job(checker, "plain", shape, "float64", 0.0, FIRST_SEED)
            cells.append(f"{statistics.median(run(job).seconds for _ in range(3)):.2f} s")
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return lines


CHECKERS = ("check_layer_norm", "check_gradients")
COLUMNS = [f"{checker}, {shape}" for checker in CHECKERS for shape in SHAPES]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 seeds, 10 for right code")
    quick = parser.parse_args().quick
    todo = list(jobs(2 if quick else 20, 10 if quick else 200))
    start = time.perf_counter()
    clock = times()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        bounds = [p for some in pool.map(cover, range(FIRST_SEED, FIRST_SEED + 80)) for p in some]
        outcomes = list(track(pool.map(run, todo, chunksize=4), "checking", len(todo)))
    wrong = [o for o in outcomes if o.job.code in MISTAKES]
    right = [o for o in outcomes if o.job.code in RIGHT]
    minutes = math.ceil((time.perf_counter() - start) / 60)
    origin = (
        f"Generated by `benchmarks/checker.py` on {dt.datetime.now(dt.UTC):%Y-%m-%d}: {processor()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}; "
        f"{minutes} minutes, seeds from {FIRST_SEED} on, which the checkers were not made on; "
        "without the oracle."
    )
    lines = [
        "# What the gradient checker finds",
        "",
        origin,
        "",
        "x ~ N(0, 1), gamma = 1 + .1 N, beta = .1 N, eps 1e-5.",
        "",
        "## The 13 mistakes of `stablenorm.analysis.mistakes`, float64",
        "",
        *finds(wrong),
        "",
        "## Right code, (4, 8), `check_layer_norm`, offsets "
        + ", ".join(f"{o:g}" for o in OFFSETS),
        "",
        *alarms(right),
        "",
        "INCONCLUSIVE is said where the numeric derivative, or the dtype, is too coarse to judge.",
        "",
        "## The bound of the numeric derivative",
        "",
        coverage(bounds),
        "",
        "## Seconds a check, right code, alone on the machine",
        "",
        *clock,
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if not quick:
        PAGE.write_text(text, encoding="utf8")
    return int(any(o.verdict != "FAIL" for o in wrong) or any(o.verdict == "FAIL" for o in right))


if __name__ == "__main__":
    sys.exit(main())
