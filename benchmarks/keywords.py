"""
The cost of keywords, and of calls of other layouts, beside the plain call: `make keywords`, and at the end of `make bench`.

Times each call beside the plain one, and beside the same thing written around plain calls. Writes
benchmarks/results/keywords.json, the last part of docs/evidence/performance.md and a table of CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from cases import BEYOND, IN_CACHE
from page import DOCS, ROOT, digits, keep, medians, origin, origin_line, put, seconds, table

import stablenorm as sn
from stablenorm.timing import make_problem

THREADS = 2
# 64k elements of a sample are 10 us of work.
SAMPLES = (64, 64, 1024)
KERNELS, FUNCTIONAL = "in the kernels", "`functional`"

Call = Callable[[], Any]


class Way(NamedTuple):
    """A call, the plain call beside it, and the same thing written around plain calls; None if there is none."""

    what: str
    call: Call
    plain: Call | None
    around: Call | None = None
    # The place of the feature, for the table of CONTRIBUTING.md.
    where: str = ""


def residual(shape: tuple[int, ...]) -> list[Way]:
    """Return NumPy's addition and the norm, together and apart, both ways."""
    x, gamma, beta, dy, *_ = make_problem(shape, "float32")
    other = x[::-1].copy()
    _, cache = sn.layer_norm_forward(x, gamma, beta)

    def added() -> None:
        dx: Any = sn.layer_norm_backward(dy, cache).dx
        dx += other

    together = lambda: sn.layer_norm_forward(x, gamma, beta, residual=other)
    apart = lambda: sn.layer_norm_forward(x + other, gamma, beta)
    back = lambda: sn.layer_norm_backward(dy, cache, dsum=other)
    return [
        Way(f"forward of {shape}, `residual=`", together, None, apart, KERNELS),
        Way(f"backward of {shape}, `dsum=`", back, None, added, KERNELS),
    ]


def keywords() -> Iterator[Way]:
    """Yield the other keywords, forward and backward in one."""
    x, gamma, beta, dy, *_ = make_problem(SAMPLES, "float32")
    counts = np.ones(SAMPLES[:2], bool)
    # Padding: a quarter at the end of each sample.
    counts[:, 3 * SAMPLES[1] // 4 :] = False
    scales, shifts = (np.repeat(p[None, None], SAMPLES[0], axis=0) for p in (gamma, beta))
    olds = [np.zeros_like(gamma), np.zeros_like(beta)]

    def both(*parameters: Any, sums: Any = None, **options: Any) -> Call:
        def run() -> Any:
            _, cache = sn.layer_norm_forward(x, *parameters, **options)
            return sn.layer_norm_backward(dy, cache, sum_axes=sums)

        return run

    def by_samples() -> None:
        for i in range(SAMPLES[0]):
            _, cache = sn.layer_norm_forward(x[i], scales[i, 0], shifts[i, 0])
            sn.layer_norm_backward(dy[i], cache)

    def by_rows() -> None:
        """Gather the rows that count, and scatter the results."""
        y, dx = np.zeros_like(x), np.zeros_like(x)
        y[counts], cache = sn.layer_norm_forward(x[counts], gamma, beta)
        dx[counts] = sn.layer_norm_backward(dy[counts], cache).dx

    def accumulated() -> None:
        _, cache = sn.layer_norm_forward(x, gamma, beta)
        sn.layer_norm_backward(dy, cache, out=(None, *olds), accumulate=True)

    def added() -> None:
        """Add afterwards, which rounds twice."""
        _, cache = sn.layer_norm_forward(x, gamma, beta)
        found: Any = sn.layer_norm_backward(dy, cache)
        for old, total in zip(olds, found[1:], strict=True):
            np.add(old, total, out=old)

    _, cache = sn.layer_norm_forward(x, gamma, beta)
    plain, pull = both(gamma, beta), lambda: sn.layer_norm_backward(dy, cache)
    offset = both(gamma, beta, gamma_offset=1.0)
    rows = both(gamma, beta, where=counts[..., None])
    second = lambda: sn.layer_norm_double_backward(x, dy, cache)
    ways = (
        Way("`gamma_offset=1.0`", offset, plain, both(gamma + 1, beta), FUNCTIONAL),
        Way("gamma and beta per sample", both(scales, shifts), plain, by_samples, KERNELS),
        Way("`sum_axes=1`", both(gamma, beta, sums=1), plain, by_samples, KERNELS),
        Way("`where=`, a quarter of the rows is padding", rows, plain, by_rows, FUNCTIONAL),
        Way("`accumulate=True`", accumulated, plain, added, KERNELS),
        Way("`where=`, elements", both(gamma, beta, where=x > -1), plain),
        Way("`layer_norm_jvp`, beside the backward", lambda: sn.layer_norm_jvp(dy, cache), pull),
        Way("`layer_norm_double_backward`, beside the backward", second, pull),
    )
    for each in ways:
        yield each._replace(what=f"{SAMPLES}: {each.what}")


def deviations() -> Iterator[Way]:
    """Yield calls that deviate a little from the plain one, beside what a user would write instead."""
    norm = sn.layer_norm
    x, gamma, beta, dy, *_ = make_problem((1, 1, 64), "float32")
    plain = lambda: norm(x, gamma, beta)
    eps: Any = np.float32(1e-5)
    back: Any = partial(sn.layer_norm_backward, dy, sn.layer_norm_forward(x, gamma, beta)[1])
    added = partial(back, out=(None, gamma.copy(), beta.copy()), accumulate=True)
    yield Way('(1, 1, 64), backward, `wrt="x"`', partial(back, wrt="x"), back)
    yield Way("(1, 1, 64), backward, `accumulate=True`", added, back)
    yield Way("(1, 1, 64), `axis=(-1,)`", lambda: norm(x, gamma, beta, axis=(-1,)), plain)
    yield Way("(1, 1, 64), `eps=0`", lambda: norm(x, gamma, beta, 0), plain)
    yield Way("(1, 1, 64), `eps=np.float32(1e-5)`", lambda: norm(x, gamma, beta, eps), plain)

    x2, gamma2, beta2, dy2, *_ = make_problem((256, 1024), "float32")
    wide, shift = np.ones(1024), np.zeros(1024)
    _, cache = sn.layer_norm_forward(x2, gamma2, beta2)
    _, other = sn.layer_norm_forward(x2, wide, shift)
    what = "(256, 1024), gamma and beta of float64"
    pull = lambda: sn.layer_norm_backward(dy2, cache)
    yield Way(f"{what}, forward", lambda: norm(x2, wide, shift), lambda: norm(x2, gamma2, beta2))
    yield Way(f"{what}, backward", lambda: sn.layer_norm_backward(dy2, other), pull)

    gaps = make_problem((256, 2048), "float32")[0][:, ::2]
    by_copies = lambda x: np.ascontiguousarray(
        norm(np.ascontiguousarray(x.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)
    )
    yield Way(
        "(256, 1024), every second element: over a copy first",
        lambda: norm(gaps, gamma2, beta2),
        lambda: norm(np.ascontiguousarray(gaps), gamma2, beta2),
    )
    for shape in ((8, 256, 56, 56), (8, 64, 32, 32)):
        images, what = (
            make_problem(shape, "float32")[0],
            "`axis=1`: over two copies around the call",
        )
        yield Way(f"{shape}, {what}", partial(norm, images, axis=1), partial(by_copies, images))

    x3, gamma3, beta3, *_ = make_problem((4096, 1024), "float64")
    nan, huge = x3.copy(), x3.copy()
    nan[7, 7] = np.nan
    huge[7] *= 1e300
    whole = lambda: norm(x3, gamma3, beta3)
    yield Way("(4096, 1024) float64, one row with NaN", lambda: norm(nan, gamma3, beta3), whole)
    yield Way("the same, one row of 1e300", lambda: norm(huge, gamma3, beta3), whole)

    small, scale, zero, dy4, *_ = make_problem((65536, 256), "float32")
    hard = small.copy()
    hard[7] = 1
    hard[7, ::2] = np.nextafter(np.float32(1), np.float32(2))
    first, second = (
        sn.layer_norm_forward(each, scale, zero, rounding="nearest")[1] for each in (hard, small)
    )
    yield Way(
        "(65536, 256), nearest, one row of two neighbouring floats, backward",
        lambda: sn.layer_norm_backward(dy4, first),
        lambda: sn.layer_norm_backward(dy4, second),
    )


def measure() -> dict[str, Any]:
    """Time all ways in turns: what, where, and seconds of the call, the plain one, and the way around."""
    sn.set_num_threads(THREADS)
    found = []
    pairs = (way for shape in IN_CACHE[2:] + BEYOND for way in residual(shape))
    for what, *calls, where in chain(pairs, keywords(), deviations()):
        there: Any = {i: call for i, call in enumerate(calls) if call is not None}
        times = dict(zip(there, medians(there), strict=True))
        found.append((what, where, *map(times.get, range(3))))
    return {"origin": origin(), "ways": found}


def page(found: dict[str, Any]) -> str:
    """The last part of docs/evidence/performance.md."""
    lines = [
        (what, seconds(call), *("-" if t is None else digits(t, 3) for t in
         (plain and call / plain, around and around / call)))
        for what, _, call, plain, around in found["ways"]
    ]  # fmt: skip
    return f"""float32 unless stated otherwise, {THREADS} threads, new arrays for the results. A ratio compares medians of calls
that were timed in turns. "Over the plain call": the time of the call over that of a plain call on an x of this shape.
"Around plain calls, over it": the same result computed by NumPy around plain calls, over the time of the call.

{table(("call", "time", "over the plain call", "around plain calls, over it"), lines)}

{origin_line("make keywords", found["origin"])}
"""


def developers_table(found: dict[str, Any]) -> str:
    """The table of CONTRIBUTING.md: what is in a kernel, and what is written around the plain call."""
    return table(
        ("feature", "around plain calls, over it", "where it is"),
        [
            (what, digits(around / call, 3), where)
            for what, where, call, _, around in found["ways"]
            if where and ("of (" not in what or str(BEYOND[-1]) in what)
        ],
    )


if __name__ == "__main__":
    kept = keep("keywords", __doc__, measure)
    put(DOCS / "evidence" / "performance.md", {"keywords": page(kept)})
    put(ROOT / "CONTRIBUTING.md", {"keywords": developers_table(kept)})
