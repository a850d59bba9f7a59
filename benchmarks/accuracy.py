"""
How far every element is from the exact one, over the families of hard inputs: `make accuracy`.

Runs the families of `stablenorm.testing` through the package, with both roundings, judges all by the
exact oracle, keeps its tables in benchmarks/results/accuracy.json, and writes docs/evidence/accuracy.md;
with `--render` from the file alone. Exit status 1 if an element breaks the contract; the page is then
written all the same, and says so. Five minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from page import keep, origin, origin_line, table, write

from stablenorm.api import FUNCTIONS
from stablenorm.formats import parse
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.testing import FAMILIES, make_case

KINDS = ("float16", "bfloat16", "float32", "float64")
OUTPUTS = ("y", "dx", "dgamma", "dbeta")
N, ROWS = 768, 4
LENGTHS = (1, 2, 3, 17)
LONG, MANY = 65_536, 10_000
# Families in which a row of 65 536 differs from one of 768: means, offsets, overflow, cancellation.
TELLING = ("F01", "F04", "F09", "F13", "F16", "F18", "F20", "F28b", "F31")
ORACLES = {"layer": exact_layer_norm, "rms": exact_rms_norm}
FINITE = [family for family in FAMILIES.values() if family.finite]


class Job(NamedTuple):
    """A family in a dtype, and which of its outputs are judged."""

    family: str
    dtype: str
    n: int
    rows: int
    outputs: tuple[str, ...]
    kind: str = "layer"


class Judged(NamedTuple):
    """One output of a job against the contract."""

    job: Job
    output: str
    # The limit; the worst element within it, in ulp; how many cancel beyond it, and the largest
    # share of c S that one of those used; how many are not the nearest float.
    limit: float
    passed: bool
    within: float
    beyond: int
    share: float
    wrong: int
    # The same of rounding="nearest", both CPU backends together.
    nearest: int


def run(case: Any, job: Job, **options: Any) -> dict[str, Any]:
    """Return these outputs of stablenorm."""
    forward, backward = FUNCTIONS[job.kind]
    y, cache = forward(case.x, case.gamma, case.beta, case.eps, **options)
    asked: list[Any] = [d[1:] for d in job.outputs if d != "y"]
    gradients = backward(case.dy, cache, wrt=asked)
    return dict(zip(OUTPUTS, (y, *gradients), strict=True))


def judge(job: Job) -> list[Judged]:
    """Judge one job."""
    case = make_case(job.family, parse(job.dtype), job.n, job.rows)
    exact = ORACLES[job.kind](*case)
    ours = run(case, job)
    others = [run(case, job, rounding="nearest", backend=name) for name in ("native", "numpy")]
    found = []
    for name in job.outputs:
        contract = exact.check_contract(**{name: ours[name]})[name]
        errors = exact.ulp_errors(**{name: ours[name]})[name]
        inside = errors <= contract.limit_ulp
        wrong = round(contract.misrounded * errors.size)
        bits, missed = ours[name].tobytes(), 0
        for each in others:
            # The same bits are judged already.
            if each[name].tobytes() == bits:
                missed += wrong
            else:
                again = exact.check_contract(**{name: each[name]})[name]
                missed += round(again.misrounded * errors.size)
        judged = Judged(
            job, name, contract.limit_ulp, contract.passed,
            float(np.max(errors, where=inside, initial=0)), contract.second_term,
            contract.worst_excess, wrong, missed,
        )  # fmt: skip
        found.append(judged)
    return found


def jobs() -> Iterable[Job]:
    """Every family in every dtype; other lengths; sums over many rows."""
    sums = ("dgamma", "dbeta")
    for dtype in KINDS:
        for family in FINITE:
            yield from (Job(family.name, dtype, n, ROWS, OUTPUTS) for n in (N, *LENGTHS))
            yield Job(family.name, dtype, N, ROWS, OUTPUTS, "rms")
            if family.name in TELLING:
                yield Job(family.name, dtype, LONG, 1, ("y", "dx"))
            # No longer than the families with several marked elements need.
            yield Job(family.name, dtype, 10, MANY, sums)


def measure() -> dict[str, Any]:
    """Judge the jobs that exist, two processes at a time."""
    every = [
        job for job in jobs() if not FAMILIES[job.family].why_not(parse(job.dtype), job.n, job.rows)
    ]
    with ProcessPoolExecutor(2) as pool:
        judged = [judged for each in pool.map(judge, every, chunksize=4) for judged in each]
    failed = [str(each) for each in judged if each.nearest or not each.passed]
    return {"origin": origin(), "tables": tables(judged), "failed": failed}


def verdicts(
    found: Sequence[Judged], heads: Sequence[str], key: Callable[[Judged], tuple[Any, ...]]
) -> str:
    """For each group: the worst, those that cancel, what they used, those not the nearest float."""
    groups: dict[tuple[Any, ...], list[Judged]] = {}
    for judged in found:
        groups.setdefault(key(judged), []).append(judged)
    lines = []
    for words, here in groups.items():
        beyond = sum(j.beyond for j in here)
        lines.append((
            *words, f"{max(j.within for j in here):.3f}", beyond or "",
            f"{max(j.share for j in here):.2g}" if beyond else "", sum(j.wrong for j in here),
            sum(j.nearest for j in here),
            "yes" if all(j.passed for j in here) else "**NO**",
        ))  # fmt: skip
    head = ("worst error, ulp", "cancel beyond the limit", "largest share of c S",
            "not the nearest float", "with nearest", "contract kept")  # fmt: skip
    return table((*heads, *head), lines)


def family_table(main: Sequence[Judged]) -> str:
    """One line a family: the worst error in each dtype."""
    lines = []
    for family in FINITE:
        here = [j for j in main if j.job.family == family.name]
        ours = [max((j.within for j in here if j.job.dtype == d), default=None) for d in KINDS]
        words = ["" if worst is None else f"{worst:.3f}" for worst in ours]
        lines.append((f"{family.title} <small>{family.name}</small>", *words))
    return table(("x", *KINDS), lines)


def tables(every: Sequence[Judged]) -> dict[str, str]:
    """Return what is kept: the tables of the page."""
    main = [j for j in every if j.job.n == N and j.job.kind == "layer"]
    rms = [j for j in every if j.job.kind == "rms"]
    others = sorted((j for j in every if j.job.n != N), key=lambda j: (j.job.rows, j.job.n))
    of_output = lambda j: (j.job.dtype, j.output, f"{j.limit:g}")
    of_size = lambda j: (j.job.n, j.job.rows, j.job.dtype)
    heads = "dtype", "output", "limit"
    return {
        "main": verdicts(main, heads, of_output),
        "rms": verdicts(rms, heads, of_output),
        "others": verdicts(others, ("n", "rows", "dtype"), of_size),
        "families": family_table(main),
    }


def page(found: dict[str, Any]) -> str:
    """docs/evidence/accuracy.md."""
    made, kept = found["origin"], found["tables"]
    return f"""# Accuracy

{origin_line("make accuracy", made)}

Every element of y, dx, dgamma and dbeta is within a limit of the exact result for the given floats.
The limit is 0.501 ulp; for float64 it is 0.75 ulp for dx and 0.51 ulp for dgamma and dbeta. An element
that cancels almost completely may be further off, by a tiny multiple c of S, the sum of the magnitudes
of its terms ([the contract](../reference/accuracy-contract.md)).

This page tests the limit on {len(FINITE)} families of hard inputs against exact integer arithmetic: n = {N}, {ROWS}
rows, one draw for each family and dtype. Family F36, NaN and infinity, has no exact result; the tests check instead
that NaN does not leave its row.

## Verdict

{kept["main"]}

The columns "cancel beyond the limit" and "largest share of c S" are about elements that cancel. The first counts those
that exceed the limit. The second is the largest part of c S that any of them used; 1 would be all of it. In some families
most elements cancel (dy = y with eps 0; beta that cancels gamma xhat).

The column "with nearest" counts the elements that are not the nearest float under `rounding="nearest"`, in both CPU
backends together. The promise is that there are none.

## RMS norm

The same families, n = {N}, through `rms_norm_forward` and `rms_norm_backward`.

{kept["rms"]}

## Other lengths, and many rows

The same counts, over all outputs of all families that exist at this size. At n = {LONG} they are y and dx of \
{len(TELLING)} families, and at {MANY} rows dgamma and dbeta.

{kept["others"]}

## The nearest float, or nearly

0.501 ulp is not 0.5. Arithmetic in float64 that is rounded once can miss the nearest float32 if the exact
value lies within about 2^-29 ulp of the midpoint of two float32. This happens to a few in 10^9 elements of
ordinary data. [The contract](../reference/accuracy-contract.md) shows such an element and derives the share. With
`rounding="nearest"` it does not happen.

## All families

The worst error of all outputs, in ulp, for each dtype. Elements that cancel beyond the limit are left out.
[Numerical stability](../explanation/stability.md) measures what other libraries and the plain formula lose on such
inputs.

{kept["families"]}
"""


def main() -> int:
    """Measure or read, write, and report what failed."""
    found = keep("accuracy", __doc__, measure)
    write("accuracy", page(found))
    print(*found["failed"], sep="\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
