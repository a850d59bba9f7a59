"""
What the gradient checkers of this package find: mistakes, false alarms, errors of the estimates.

Writes benchmarks/results/checker.json and docs/evidence/gradient-checkers.md; with `--quick`, a few seeds,
prints only. Two processes; some ten minutes.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from checker_page import write_page
from page import processor
from rich.progress import track

from stablenorm import exact_layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.check import check_gradients, check_layer_norm
from stablenorm.testing.mistakes import MISTAKES, VARIANTS, forward

RESULTS = Path(__file__).parent / "results" / "checker.json"
SHAPES = ((4, 8), (32, 768))
OFFSETS = (0.0, 1.0, 1e2, 1e4, 1e6)
# Not the seeds that the checkers were made on.
FIRST_SEED = 5000
# In float32 it is no mistake.
NONE_IN_FLOAT32 = "rstd rounded to f32"


class Job(NamedTuple):
    """One check: which checker, of what, where."""

    checker: str
    code: str
    shape: tuple[int, int]
    dtype: str
    offset: float
    seed: int


CODE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{name: (forward, mistake.backward) for name, mistake in MISTAKES.items()},
    **VARIANTS,
    "stablenorm": (layer_norm_forward, layer_norm_backward),
}


def make_args(job: Job) -> list[Any]:
    """Draw x ~ N + offset, gamma = 1 + .1 N, beta = .1 N."""
    rng = np.random.default_rng(job.seed)
    n = job.shape[1]
    x = job.offset + rng.standard_normal(job.shape)
    drawn = (x, 1 + 0.1 * rng.standard_normal(n), 0.1 * rng.standard_normal(n))
    return [a.astype(job.dtype) for a in drawn]


def run(job: Job) -> dict[str, Any]:
    """Check once: the verdict, whether the right argument alone is blamed, and named."""
    args, (front, back) = make_args(job), CODE[job.code]
    if job.checker == "check_layer_norm":
        report = check_layer_norm(front, back, *args, rng=job.seed)
    else:
        names = ("x", "gamma", "beta")
        report = check_gradients(front, back, args, names=names, rng=job.seed)
    blamed = [r.name for r in report.arguments if r.verdict == "FAIL"]
    mistake = MISTAKES.get(job.code)
    return {
        **job._asdict(),
        "right": mistake is None,
        "verdict": report.verdict,
        "located": blamed == ([mistake.argument] if mistake else []),
        "named": list(report.diagnosis) == ([mistake.diagnosis] if mistake else []),
    }


def cover(seed: int) -> list[tuple[float, float]]:
    """Return true and estimated error of every numeric derivative by x of one layer norm."""
    offset = (*OFFSETS, 10.0, 1e3, 1e5)[seed % 8]
    args = make_args(Job("", "plain", (4, 8 + seed % 9), "float64", offset, seed))
    seen: list[Any] = []
    gradients: Any = importlib.import_module("stablenorm.check.gradients")
    judge = gradients.judge

    def overhear(comparer: Any, comparisons: Any) -> Any:
        """Note the estimates: a report has only the sum of both sides' bounds."""
        seen.append((comparer.loss, comparisons))
        return judge(comparer, comparisons)

    gradients.judge = overhear
    try:
        check_gradients(*CODE["plain"], args, rng=seed, max_elements=200)
    finally:
        gradients.judge = judge
    loss, comparisons = seen[0]
    x, gamma, beta = args
    exact = exact_layer_norm(x, gamma, beta, dy=loss.cotangent()).rounded("dx", np.float64)
    elements = [c for c in comparisons if c.place is not None]
    return [
        (abs(c.derivative.numeric - float(exact[c.place])), c.derivative.bound) for c in elements
    ]


def jobs(*, quick: bool) -> Iterator[Job]:
    """Yield all checks: mistakes, then right code at each offset."""
    # By shape: a check at (32, 768) takes five times as long.
    seeds, counts = (2, (2, 1)) if quick else (20, (10, 2))
    for number in range(seeds):
        seed = FIRST_SEED + number
        for code in MISTAKES:
            for shape in SHAPES:
                yield Job("check_layer_norm", code, shape, "float64", 0.0, seed)
                if shape == SHAPES[0] or number < 5:
                    yield Job("check_gradients", code, shape, "float64", 0.0, seed)
            if code != NONE_IN_FLOAT32:
                yield Job("check_layer_norm", code, (4, 8), "float32", 0.0, seed)
    for code in (*VARIANTS, "stablenorm"):
        for dtype in ("float64", "float32"):
            for offset in OFFSETS:
                for shape, count in zip(SHAPES, counts, strict=True):
                    for number in range(count):
                        yield Job(
                            "check_layer_norm", code, shape, dtype, offset, FIRST_SEED + number
                        )


def main() -> int:
    """Measure, write; 1 if a mistake was missed or right code was called wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few seeds, prints only")
    quick = parser.parse_args().quick
    todo = list(jobs(quick=quick))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        covered = [p for some in pool.map(cover, range(FIRST_SEED, FIRST_SEED + 80)) for p in some]
        records = list(track(pool.map(run, todo, chunksize=4), "checking", len(todo)))
    found = {
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "machine": f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"NumPy {np.__version__}",
        "first_seed": FIRST_SEED,
        "elements": len(covered),
        "covered": sum(error <= bound for error, bound in covered),
        "worst": max(error / bound for error, bound in covered),
        "median": statistics.median(bound / error for error, bound in covered if error > 0),
        "records": records,
    }
    bad = [r for r in records if r["right"] == (r["verdict"] == "FAIL")]
    for record in bad:
        print(f"WRONG: {record}", file=sys.stderr)
    if quick:
        print(json.dumps({key: found[key] for key in ("covered", "elements", "worst")}))
    else:
        RESULTS.write_text(json.dumps(found) + "\n", encoding="utf-8")
        write_page()
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
