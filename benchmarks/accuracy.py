"""
The error of every element, over the families of hard inputs: `make accuracy`.

The exact oracle judges the families of `stablenorm.testing`, with both roundings. The tables go to
benchmarks/results/accuracy.json and docs/evidence/accuracy.md; `--render` reads the file instead of
measuring. The exit status is 1 if an element breaks the contract; the page is written all the same, and
says so. Five minutes.
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
# Families for which a row of 65 536 is harder than one of 768: means, offsets, overflow, cancellation.
TELLING = ("F01", "F04", "F09", "F13", "F16", "F18", "F20", "F28b", "F31")
ORACLES = {"layer": exact_layer_norm, "rms": exact_rms_norm}
FINITE = [family for family in FAMILIES.values() if family.finite]


class Job(NamedTuple):
    """A family in a dtype and a shape, and the outputs to judge."""

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
    # In ulp, and so is the largest error within it.
    limit: float
    passed: bool
    within: float
    # Elements that cancel and exceed the limit, and the largest share of c S that one of them used.
    beyond: int
    share: float
    # Elements that are not the nearest float, and those under rounding="nearest", both CPU backends together.
    wrong: int
    nearest: int


def run(case: Any, job: Job, **options: Any) -> dict[str, Any]:
    """Return the outputs of a job; None for gradients that are not judged."""
    forward, backward = FUNCTIONS[job.kind]
    y, cache = forward(case.x, case.gamma, case.beta, case.eps, **options)
    wrt: list[Any] = [name[1:] for name in job.outputs if name != "y"]
    gradients = backward(case.dy, cache, wrt=wrt)
    return dict(zip(OUTPUTS, (y, *gradients), strict=True))


def judge(job: Job) -> list[Judged]:
    """Judge the outputs of one job."""
    case = make_case(job.family, parse(job.dtype), job.n, job.rows)
    exact = ORACLES[job.kind](*case)
    ours = run(case, job)
    runs = [run(case, job, rounding="nearest", backend=name) for name in ("native", "numpy")]
    judged = []
    for name in job.outputs:
        contract = exact.check_contract(**{name: ours[name]})[name]
        errors = exact.ulp_errors(**{name: ours[name]})[name]
        inside = errors <= contract.limit_ulp
        wrong, missed = round(contract.misrounded * errors.size), 0
        for outputs in runs:
            # Equal bits have the same verdict: most calls of the oracle are saved.
            if outputs[name].tobytes() == ours[name].tobytes():
                missed += wrong
            else:
                again = exact.check_contract(**{name: outputs[name]})[name]
                missed += round(again.misrounded * errors.size)
        judged.append(Judged(
            job, name, contract.limit_ulp, contract.passed,
            float(np.max(errors, where=inside, initial=0)), contract.second_term,
            contract.worst_excess, wrong, missed,
        ))  # fmt: skip
    return judged


def jobs() -> Iterable[Job]:
    """Yield every family in every dtype, in other lengths, and with sums over many rows."""
    sums = ("dgamma", "dbeta")
    for dtype in KINDS:
        for family in FINITE:
            yield from (Job(family.name, dtype, n, ROWS, OUTPUTS) for n in (N, *LENGTHS))
            yield Job(family.name, dtype, N, ROWS, OUTPUTS, "rms")
            if family.name in TELLING:
                yield Job(family.name, dtype, LONG, 1, ("y", "dx"))
            # The families with several marked elements need 10 columns.
            yield Job(family.name, dtype, 10, MANY, sums)


def measure() -> dict[str, Any]:
    """Judge all jobs whose family has such a case, two processes at a time."""
    possible = [
        job for job in jobs() if not FAMILIES[job.family].why_not(parse(job.dtype), job.n, job.rows)
    ]
    with ProcessPoolExecutor(2) as pool:
        judged = [j for outputs in pool.map(judge, possible, chunksize=4) for j in outputs]
    failed = [str(j) for j in judged if j.nearest or not j.passed]
    return {"origin": origin(), "tables": make_tables(judged), "failed": failed}


def verdicts(
    judged: Sequence[Judged], heads: Sequence[str], key: Callable[[Judged], tuple[Any, ...]]
) -> str:
    """Return a table of errors and counts, one line for each group of outputs with the same key."""
    groups: dict[tuple[Any, ...], list[Judged]] = {}
    for j in judged:
        groups.setdefault(key(j), []).append(j)
    lines = []
    for words, group in groups.items():
        beyond = sum(j.beyond for j in group)
        lines.append((
            *words, f"{max(j.within for j in group):.3f}", beyond or "",
            f"{max(j.share for j in group):.2g}" if beyond else "", sum(j.wrong for j in group),
            sum(j.nearest for j in group),
            "yes" if all(j.passed for j in group) else "**NO**",
        ))  # fmt: skip
    head = ("worst error, ulp", "cancel beyond the limit", "largest share of c S",
            "not the nearest float", "with nearest", "contract kept")  # fmt: skip
    return table((*heads, *head), lines)


def family_table(main: Sequence[Judged]) -> str:
    """Return a table of the worst error in each dtype, one line a family."""
    lines = []
    for family in FINITE:
        own = [j for j in main if j.job.family == family.name]
        errors = [max((j.within for j in own if j.job.dtype == d), default=None) for d in KINDS]
        words = ["" if error is None else f"{error:.3f}" for error in errors]
        lines.append((f"{family.title} <small>{family.name}</small>", *words))
    return table(("x", *KINDS), lines)


def make_tables(judged: Sequence[Judged]) -> dict[str, str]:
    """Return the tables of the page, by name."""
    main = [j for j in judged if j.job.n == N and j.job.kind == "layer"]
    rms = [j for j in judged if j.job.kind == "rms"]
    others = sorted((j for j in judged if j.job.n != N), key=lambda j: (j.job.rows, j.job.n))
    of_output = lambda j: (j.job.dtype, j.output, f"{j.limit:g}")
    of_size = lambda j: (j.job.n, j.job.rows, j.job.dtype)
    heads = "dtype", "output", "limit"
    return {
        "main": verdicts(main, heads, of_output),
        "rms": verdicts(rms, heads, of_output),
        "others": verdicts(others, ("n", "rows", "dtype"), of_size),
        "families": family_table(main),
    }


def page(results: dict[str, Any]) -> str:
    """Return docs/evidence/accuracy.md."""
    tables = results["tables"]
    return f"""# Accuracy

{origin_line("make accuracy", results["origin"])}

Every element of y, dx, dgamma and dbeta is within a limit of the exact result for the given floats.
The limit is 0.501 ulp; for float64 it is 0.75 ulp for dx and 0.51 ulp for dgamma and dbeta. An element
that cancels almost completely may be further off, by a tiny multiple c of S, the sum of the magnitudes
of its terms ([the contract](../reference/accuracy-contract.md)).

This page tests the limit on {len(FINITE)} families of hard inputs against exact integer arithmetic: n = {N}, {ROWS}
rows, one draw for each family and dtype. Family F36, NaN and infinity, has no exact result; the tests check instead
that NaN does not leave its row.

## Verdict

{tables["main"]}

The columns "cancel beyond the limit" and "largest share of c S" are about elements that cancel. The first counts those
that exceed the limit. The second is the largest part of c S that any of them used; 1 would be all of it. In some families
most elements cancel (dy = y with eps 0; beta that cancels gamma xhat).

The column "with nearest" counts the elements that are not the nearest float under `rounding="nearest"`, in both CPU
backends together. The promise is that there are none.

## RMS norm

The same families, n = {N}, through `rms_norm_forward` and `rms_norm_backward`.

{tables["rms"]}

## Other lengths, and many rows

The same counts, over all outputs of all families that exist at this size. At n = {LONG} the counts are over y and dx \
of {len(TELLING)} families, and at {MANY} rows over dgamma and dbeta.

{tables["others"]}

## The nearest float, or nearly

0.501 ulp is not 0.5. Arithmetic in float64 that is rounded once can miss the nearest float32 if the exact
value lies within about 2^-29 ulp of the midpoint of two float32. This happens to a few in 10^9 elements of
ordinary data. [The contract](../reference/accuracy-contract.md) shows such an element and derives the share. With
`rounding="nearest"` it does not happen.

## All families

The worst error of all outputs, in ulp, for each dtype. Elements that cancel beyond the limit are left out.
[Numerical stability](../explanation/stability.md) measures what other libraries and the plain formula lose on such
inputs.

{tables["families"]}
"""


def main() -> int:
    """Measure or read, write the page, and print the outputs that failed."""
    results = keep("accuracy", __doc__, measure)
    write("accuracy", page(results))
    print(*results["failed"], sep="\n")
    return int(bool(results["failed"]))


if __name__ == "__main__":
    sys.exit(main())
