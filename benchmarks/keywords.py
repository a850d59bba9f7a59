"""
The cost of keywords, and of calls of other layouts, beside the plain call: `make keywords`, and at the end of `make bench`.

Times each call, the plain call beside it, and NumPy around plain calls that gives the same result; and axis 1 beside
the last axis, plain NumPy and, where it is installed, PyTorch. Writes benchmarks/results/keywords.json, the last part
of docs/evidence/performance.md, a table of CONTRIBUTING.md and a sentence of README.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from cases import BEYOND, IN_CACHE
from page import DOCS, ROOT, digits, keep, medians, origin, origin_line, put, seconds, table
from peers import EPS, load_peers

import stablenorm as sn
from stablenorm.timing import make_problem

THREADS = 2
# The shape of x with samples; the 64k elements of a sample are 10 us of work.
SAMPLES = (64, 64, 1024)
# Channels before positions: (batch, channels, positions), float32.
IMAGES = (16, 512, 768), (1, 512, 128)
KERNELS, FUNCTIONAL = "in the kernels", "around plain calls"

Call = Callable[[], Any]


class Comparison(NamedTuple):
    """A call, the plain call, and NumPy around plain calls with the same result; None if there is none."""

    title: str
    call: Call
    plain: Call | None
    around: Call | None = None
    # The place of the feature, for the table of CONTRIBUTING.md.
    place: str = ""


def backward_of(x: Any, gamma: Any, beta: Any, dy: Any, **options: Any) -> Any:
    """Return the call of the backward that follows a forward of these arguments."""
    _, cache = sn.layer_norm_forward(x, gamma, beta, **options)
    return partial(sn.layer_norm_backward, dy, cache)


def residual(shape: tuple[int, ...]) -> list[Comparison]:
    """Return `residual=` and `dsum=` beside NumPy's addition."""
    x, gamma, beta, dy, *_ = make_problem(shape, "float32")
    other = x[::-1].copy()
    pull = backward_of(x, gamma, beta, dy)

    def added() -> None:
        dx = pull().dx
        dx += other

    forward = lambda: sn.layer_norm_forward(x, gamma, beta, residual=other)
    apart = lambda: sn.layer_norm_forward(x + other, gamma, beta)
    backward = partial(pull, dsum=other)
    return [
        Comparison(f"forward of {shape}, `residual=`", forward, None, apart, KERNELS),
        Comparison(f"backward of {shape}, `dsum=`", backward, None, added, KERNELS),
    ]


def keywords() -> Iterator[Comparison]:
    """Yield the other keywords, forward and backward together."""
    x, gamma, beta, dy, *_ = make_problem(SAMPLES, "float32")
    counts = np.ones(SAMPLES[:2], bool)
    # The last quarter of each sample is padding.
    counts[:, 3 * SAMPLES[1] // 4 :] = False
    scales, shifts = (np.repeat(p[None, None], SAMPLES[0], axis=0) for p in (gamma, beta))
    totals = [np.zeros_like(gamma), np.zeros_like(beta)]

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
        """Gather the rows that count, normalize them, and scatter the results."""
        y, dx = np.zeros_like(x), np.zeros_like(x)
        y[counts], cache = sn.layer_norm_forward(x[counts], gamma, beta)
        dx[counts] = sn.layer_norm_backward(dy[counts], cache).dx

    def accumulated() -> None:
        _, cache = sn.layer_norm_forward(x, gamma, beta)
        sn.layer_norm_backward(dy, cache, out=(None, *totals), accumulate=True)

    def added() -> None:
        """Add afterwards, which rounds twice."""
        _, cache = sn.layer_norm_forward(x, gamma, beta)
        gradients: Any = sn.layer_norm_backward(dy, cache)
        for total, gradient in zip(totals, gradients[1:], strict=True):
            np.add(total, gradient, out=total)

    _, cache = sn.layer_norm_forward(x, gamma, beta)
    plain, pull = both(gamma, beta), lambda: sn.layer_norm_backward(dy, cache)
    offset = both(gamma, beta, gamma_offset=1.0)
    rows = both(gamma, beta, where=counts[..., None])
    jvp = lambda: sn.layer_norm_jvp(dy, cache)
    second = lambda: sn.layer_norm_double_backward(x, dy, cache)
    comparisons = (
        Comparison("`gamma_offset=1.0`", offset, plain, both(gamma + 1, beta), FUNCTIONAL),
        Comparison(
            "gamma and beta per sample", both(scales, shifts), plain, by_samples, FUNCTIONAL
        ),
        Comparison("`sum_axes=1`", both(gamma, beta, sums=1), plain, by_samples, FUNCTIONAL),
        Comparison("`where=`, a quarter of the rows is padding", rows, plain, by_rows, FUNCTIONAL),
        Comparison("`accumulate=True`", accumulated, plain, added, FUNCTIONAL),
        Comparison("`where=`, elements", both(gamma, beta, where=x > -1), plain),
        Comparison("`layer_norm_jvp`, beside the backward", jvp, pull),
        Comparison("`layer_norm_double_backward`, beside the backward", second, pull),
    )
    for comparison in comparisons:
        yield comparison._replace(title=f"{SAMPLES}: {comparison.title}")


def deviations() -> Iterator[Comparison]:
    """Yield calls that deviate a little from the plain one, beside what a user would write instead."""
    norm = sn.layer_norm
    x, gamma, beta, dy, *_ = make_problem((1, 1, 64), "float32")
    plain = lambda: norm(x, gamma, beta)
    eps: Any = np.float32(1e-5)
    pull = backward_of(x, gamma, beta, dy)
    added = partial(pull, out=(None, gamma.copy(), beta.copy()), accumulate=True)
    yield Comparison('(1, 1, 64), backward, `wrt="x"`', partial(pull, wrt="x"), pull)
    yield Comparison("(1, 1, 64), backward, `accumulate=True`", added, pull)
    yield Comparison("(1, 1, 64), `axis=(-1,)`", lambda: norm(x, gamma, beta, axis=(-1,)), plain)
    yield Comparison("(1, 1, 64), `eps=0`", lambda: norm(x, gamma, beta, 0), plain)
    yield Comparison("(1, 1, 64), `eps=np.float32(1e-5)`", lambda: norm(x, gamma, beta, eps), plain)

    x2, gamma2, beta2, dy2, *_ = make_problem((256, 1024), "float32")
    wide, shift = np.ones(1024), np.zeros(1024)
    pull2, wide_pull = (backward_of(x2, g, b, dy2) for g, b in ((gamma2, beta2), (wide, shift)))
    title = "(256, 1024), gamma and beta of float64"
    plain2 = lambda: norm(x2, gamma2, beta2)
    yield Comparison(f"{title}, forward", lambda: norm(x2, wide, shift), plain2)
    yield Comparison(f"{title}, backward", wide_pull, pull2)

    gaps = make_problem((256, 2048), "float32")[0][:, ::2]
    yield Comparison(
        "(256, 1024), every second element: over a copy first",
        lambda: norm(gaps, gamma2, beta2),
        lambda: norm(np.ascontiguousarray(gaps), gamma2, beta2),
    )
    x3, gamma3, beta3, *_ = make_problem((4096, 1024), "float64")
    nan, huge = x3.copy(), x3.copy()
    nan[7, 7] = np.nan
    huge[7] *= 1e300
    plain3 = lambda: norm(x3, gamma3, beta3)
    with_nan, with_huge = (partial(norm, x, gamma3, beta3) for x in (nan, huge))
    yield Comparison("(4096, 1024) float64, one row with NaN", with_nan, plain3)
    yield Comparison("the same, one row of 1e300", with_huge, plain3)

    x4, gamma4, beta4, dy4, *_ = make_problem((65536, 256), "float32")
    hard = x4.copy()
    hard[7] = 1
    hard[7, ::2] = np.nextafter(np.float32(1), np.float32(2))
    hard_pull, pull4 = (backward_of(x, gamma4, beta4, dy4, rounding="nearest") for x in (hard, x4))
    title = "(65536, 256), nearest, one row of two neighbouring floats, backward"
    yield Comparison(title, hard_pull, pull4)


def over_axis_1(shape: tuple[int, ...], torch: Any) -> dict[str, dict[str, Call]]:
    """Return the calls over axis 1 by direction and name; results lie in memory as x does."""
    batch, n, positions = shape
    last = make_problem((batch, positions, n), "float32")
    x, dy = (np.ascontiguousarray(array.swapaxes(1, 2)) for array in (last.x, last.dy))
    gamma, beta = last.gamma, last.beta
    columns, shifts = gamma[:, None], beta[:, None]

    def forward() -> Any:
        """Normalize as one writes it in NumPy."""
        centered = x - x.mean(axis=1, keepdims=True)
        rstd = 1 / np.sqrt((centered * centered).mean(axis=1, keepdims=True) + np.float32(EPS))
        xhat = centered * rstd
        return columns * xhat + shifts, (xhat, rstd)

    _, (xhat, rstd) = forward()

    def backward() -> Any:
        g = columns * dy
        mean_g, slope = (v.mean(axis=1, keepdims=True) for v in (g, g * xhat))
        return rstd * (g - mean_g - xhat * slope), (dy * xhat).sum(axis=(0, 2)), dy.sum(axis=(0, 2))

    of_last = last.x, gamma, beta, last.dy
    calls: dict[str, dict[str, Call]] = {
        "forward": {
            "axis=1": lambda: sn.layer_norm_forward(x, gamma, beta, axis=1),
            "as many rows along the last axis": lambda: sn.layer_norm_forward(*of_last[:3]),
            "plain NumPy": forward,
        },
        "backward": {
            "axis=1": backward_of(x, gamma, beta, dy, axis=1),
            "as many rows along the last axis": backward_of(*of_last),
            "plain NumPy": backward,
        },
    }
    if torch:
        # Axes are exchanged before and after, as its users write it.
        views = last._replace(x=x.swapaxes(1, 2), dy=dy.swapaxes(1, 2))
        theirs = torch.make(views, EPS)
        for direction, call in (("forward", theirs.forward), ("backward", theirs.backward)):
            calls[direction]["PyTorch"] = lambda f=call: f()[0].transpose(1, 2).contiguous()  # type: ignore[misc]
    return calls


def measure_axis_1() -> list[Any]:
    """Return shape, direction and the seconds of each call over axis 1, by name."""
    peers, _ = load_peers(["PyTorch"], THREADS)
    return [
        (shape, direction, dict(zip(calls, medians(calls), strict=True)))
        for shape in IMAGES
        for direction, calls in over_axis_1(shape, peers[0] if peers else None).items()
    ]


def measure() -> dict[str, Any]:
    """Time all comparisons in turns; return title, place, and seconds of call, plain and around; and axis 1."""
    sn.set_num_threads(THREADS)
    ways = []
    residuals = (way for shape in IN_CACHE[2:] + BEYOND for way in residual(shape))
    for title, *calls, place in chain(residuals, keywords(), deviations()):
        present: Any = {i: call for i, call in enumerate(calls) if call is not None}
        times = dict(zip(present, medians(present), strict=True))
        ways.append((title, place, *map(times.get, range(3))))
    return {"origin": origin(), "ways": ways, "axis_1": measure_axis_1()}


def page(results: dict[str, Any]) -> str:
    """Return the last part of docs/evidence/performance.md."""
    lines = [
        (title, seconds(call), *("-" if t is None else digits(t, 3) for t in
         (plain and call / plain, around and around / call)))
        for title, _, call, plain, around in results["ways"]
    ]  # fmt: skip
    names = list(results["axis_1"][0][2])
    axis_1 = [
        (f"{direction} of {tuple(shape)}", *(seconds(times[name]) for name in names))
        for shape, direction, times in results["axis_1"]
    ]
    return f"""float32 unless stated otherwise, {THREADS} threads, new arrays for the results. A ratio compares medians of calls
that were timed in turns. "Over the plain call": the time of the call over that of a plain call on an x of this shape.
"Time around plain calls / time here": the same result computed by NumPy around plain calls, over the time of the call.

Over axis 1, results in the order of x; PyTorch normalizes the last axis, so axes are exchanged before and after:

{table(("", *names), axis_1)}

{table(("call", "time", "over the plain call", "time around plain calls / time here"), lines)}

{origin_line("make keywords", results["origin"])}
"""


def readme_sentence(results: dict[str, Any]) -> str:
    """Return README's line on axis 1: times of the large shape, forward and backward together."""
    shape = tuple(results["axis_1"][0][0])
    both = [times for s, _, times in results["axis_1"] if tuple(s) == shape]
    took = {name: sum(times[name] for times in both) for name in both[0]}
    ours = took.pop("axis=1")
    last = took.pop("as many rows along the last axis")
    others = " and ".join(f"{name} takes {digits(t / ours)} times" for name, t in took.items())
    return (
        f"- `axis=1` of {shape} takes {digits(ours / last)} times as long as as many rows along the last axis. "
        f"Over axis 1, {others} as long as stablenorm."
    )


def developers_table(results: dict[str, Any]) -> str:
    """Return the table of CONTRIBUTING.md: the place and the gain of each feature."""
    return table(
        ("feature", "time around plain calls / time here", "where it is"),
        [
            (title, digits(around / call, 3), place)
            for title, place, call, _, around in results["ways"]
            if place and ("of (" not in title or str(BEYOND[-1]) in title)
        ],
    )


if __name__ == "__main__":
    results = keep("keywords", __doc__, measure)
    put(DOCS / "evidence" / "performance.md", {"keywords": page(results)})
    put(ROOT / "CONTRIBUTING.md", {"keywords": developers_table(results)})
    put(ROOT / "README.md", {"axis": readme_sentence(results)})
