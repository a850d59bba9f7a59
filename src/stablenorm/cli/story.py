"""The story of one norm: how fast, how exact, on harder data too; each figure is measured here and now."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm import timing
from stablenorm.api import FUNCTIONS
from stablenorm.check import check_gradients, check_layer_norm, check_rms_norm
from stablenorm.cost import count_cost, count_kept
from stablenorm.formats import count_digits
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.output import number, quantity
from stablenorm.records import Array
from stablenorm.testing.plain import harder_rows, plain_backward, plain_forward
from stablenorm.threads import get_num_threads

# By the kind of the norm: forward, backward, oracle, check.
NORMS: dict[str, Any] = {
    "layer": (*FUNCTIONS["layer"], exact_layer_norm, check_layer_norm),
    "rms": (*FUNCTIONS["rms"], exact_rms_norm, check_rms_norm),
}
# The promises of each rounding.
_CONTRACTS = {
    "fast": "within 0.501 ulp",
    "fast float64": "within 0.501 ulp, dx 0.75, dgamma and dbeta 0.51",
    "nearest": "none misrounded",
}
# The oracle takes about a second for these, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 50_000
# Four times these, for y alone, take half a second.
_HARDER_ELEMENTS = 8_000
# The gradient check calls the forward 500 times, at 0.15 us an element.
_CHECK_ELEMENTS = 4_096
# Plain NumPy takes 0.1 s for these.
_TIMED_ELEMENTS = 2**20
_KERNEL = "fused CPU kernel"
_FUSED = (
    "each way is one kernel that moves every array once between memory and caches; how, and for a GPU: "
    'the page "Fusing it into one kernel"'
)


class Part(NamedTuple):
    """A part of the story: its name, its sentences, and a table of cells with the heads first."""

    name: str
    text: Sequence[str]
    table: Sequence[Sequence[str]] = ()


class Story(NamedTuple):
    """The verdict and the parts; for the pictures errors in ulp by output, and digits by method."""

    passed: bool
    verdict: str
    parts: list[Part]
    errors: dict[str, dict[str, Array]]
    digits: dict[str, list[int]]


class Problem(NamedTuple):
    """One norm to compute."""

    x: Array
    gamma: Array | None
    beta: Array | None
    eps: float
    dy: Array
    rounding: str
    kind: str

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return y of these rows, and the cache."""
        return NORMS[self.kind][0](x, *self[1:4], rounding=self.rounding)  # type: ignore[no-any-return]

    def compute(self) -> dict[str, Array]:
        """Return y, dx and, where there are parameters, their gradients."""
        y, cache = self.forward(self.x)
        return named(y, NORMS[self.kind][1](self.dy, cache))

    def sample(self, elements: int) -> tuple[Problem, Array]:
        """Return a problem of so many elements, and its rows: evenly spaced, the first and the last included."""
        x, dy = (array.reshape(-1, self.x.shape[-1]) for array in (self.x, self.dy))
        count = min(len(x), max(1, elements // x.shape[1]))
        rows = np.unique(np.linspace(0, len(x) - 1, count).astype(np.intp))
        return self._replace(x=x[rows], dy=dy[rows]), rows


def named(y: Array, gradients: Sequence[Array | None]) -> dict[str, Array]:
    """Return the outputs that there are by name."""
    both = zip(("y", "dx", "dgamma", "dbeta"), (y, *gradients), strict=True)
    return {name: array for name, array in both if array is not None}


def tell(problem: Problem, results: dict[str, Array], about: str, *, verbose: bool) -> Story:
    """Measure and judge a norm whose results are these."""
    threads, (right, errors) = get_num_threads(), _judge(problem, results)
    harder, digits = _try_harder(problem)
    verdict, gradients = _check(problem, results)
    kernels = "C++ kernels" if "native" in timing.usable_backends() else "no kernels"
    about += f"; {kernels}, {threads} thread{'s' * (threads != 1)}, rounding {problem.rounding}"
    times, costs = _measure(problem)
    parts = [
        Part("data", [about]),
        times,
        right,
        harder,
        Part("gradients", gradients if verbose or verdict == "FAIL" else gradients[:1]),
        costs,
        Part("fused", [_FUSED]),
        Part("next", _next_commands()),
    ]
    passed = verdict != "FAIL" and not any("FAIL" in row for row in right.table)
    limit = _CONTRACTS.get(f"{problem.rounding} {problem.x.dtype}", _CONTRACTS[problem.rounding])
    end = {"PASS": ", and the gradients are right", "FAIL": ""}.get(
        verdict, "; no gradient was judged"
    )
    words = f"PASS: {', '.join(results)} are as exact as promised ({limit}){end}."
    return Story(passed, words if passed else "A CHECK FAILED.", parts, errors, digits)


def _measure(problem: Problem) -> list[Part]:
    """Time both directions, plain NumPy and a copy in turns; count operations and bytes."""
    part, _ = problem.sample(_TIMED_ELEMENTS)
    plain = timing.make_plain(part, part.kind)
    calls: dict[str, timing.Call] = {
        "forward": partial(part.forward, part.x),
        "backward": partial(NORMS[part.kind][1], part.dy, part.forward(part.x)[1]),
        **{f"plain {way}": call for way, call in plain.items()},
        "copy": partial(np.copyto, np.empty_like(part.x), part.x),
    }
    took = {k: t.median for k, t in timing.measure_interleaved(calls, rounds=7, limit=1).items()}
    kind, (rows, n), dtype, times, counted = part.kind, part.x.shape, part.x.dtype, [], []
    for way in timing.PASSES:
        one, other = took[way], took[f"plain {way}"]
        times.append(
            f"{way} {quantity(one, 's')}, plain NumPy {quantity(other, 's')}: {other / one:.2g} times as long"
        )
        flops, moved, _ = (
            v / part.x.size for v in count_cost(_KERNEL, way, (rows, n), dtype, kind)
        )
        counted.append(f"{way} {number(flops)} flops and {number(moved)} bytes an element")
    ours, _, theirs, _ = count_kept((rows, n), dtype, kind).values()
    counted += [
        f"a copy of x, {2 * part.x.itemsize} bytes an element, takes {quantity(took['copy'], 's')}",
        f"kept for the backward: {quantity(ours, 'B')} and x, by plain NumPy {quantity(theirs, 'B')}",
    ]
    on = f" ({rows} of the rows)" * (part.x.size < problem.x.size)
    return [Part("time", ["; ".join(times) + on]), Part("cost", ["; ".join(counted) + on])]


def _judge(problem: Problem, results: dict[str, Array]) -> tuple[Part, dict[str, dict[str, Array]]]:
    """Compare the outputs with the exact ones; return a table, and the errors in ulp."""
    part, sample = problem.sample(_ORACLE_ELEMENTS)
    *inputs, rounding, kind = part
    rows = problem.x.size // part.x.shape[1]
    # dgamma and dbeta are sums over all rows, so a sample of rows has sums of its own.
    judged = results if len(sample) == rows else part.compute()
    judged = judged | {name: results[name].reshape(rows, -1)[sample] for name in ("y", "dx")}
    exact = NORMS[kind][2](*inputs)
    y, cache = plain_forward(*part[:4], kind)
    plain = named(y, plain_backward(part.dy, cache, kind))
    contract, ours = exact.check_contract(**judged), exact.ulp_errors(**judged)
    theirs = exact.ulp_errors(**{name: plain[name].astype(a.dtype) for name, a in judged.items()})
    heads = "", "contract", "digits", "plain NumPy", "ulp", "plain NumPy", "misrounded"
    table: list[Sequence[str]] = [heads]
    errors = {}
    for name, array in judged.items():
        errors[name] = {"stablenorm": ours[name], "plain NumPy": theirs[name]}
        digits = (str(count_digits(error, array)) for error in errors[name].values())
        worst, worst_plain = (error.max(initial=0.0) for error in errors[name].values())
        wrong = round(contract[name].misrounded * array.size)
        passed = contract[name].passed and (rounding == "fast" or not wrong)
        cells = f"{worst:.3f}", number(worst_plain), f"{wrong} of {array.size}"
        table.append((name, "PASS" if passed else "FAIL", *digits, *cells))
    which = "all" if len(sample) == rows else f"{len(sample)} of"
    text = (
        f"the worst element of each output, against exact integers on {which} {rows} rows; digits are "
        "relative to the largest element; an ulp is the last place of the element itself, so that near "
        "0 many ulp may be off while the digits are there"
    )
    return Part("right?", [text], table), errors


def _try_harder(problem: Problem) -> tuple[Part, dict[str, list[int]]]:
    """Return the digits of y that methods keep on harder copies of the rows."""
    part, _ = problem.sample(_HARDER_ELEMENTS)
    kind, copies = part.kind, harder_rows(part.x, part.kind)
    methods: dict[str, Callable[[Array], Array]] = {
        "stablenorm": lambda x: part.forward(x)[0],
        "plain NumPy": lambda x: plain_forward(x, *part[1:4], kind)[0],
        "E[x^2] - E[x]^2": lambda x: plain_forward(x, *part[1:4], "one-pass")[0],
    }
    if kind == "rms":
        methods.popitem()
    digits: dict[str, list[int]] = {method: [] for method in methods}
    for x in copies.values():
        exact = NORMS[kind][2](x, *part[1:4])
        ours = part.forward(x)[0]
        for method, compute in methods.items():
            ulps = exact.ulp_errors(y=compute(x))["y"]
            digits[method].append(count_digits(ulps, ours))
    what = "mean" if kind == "layer" else "size"
    table = [(what, *copies), *((method, *map(str, kept)) for method, kept in digits.items())]
    return Part(
        "harder", [f"digits of y left on the same rows, with std 1 and such a {what}"], table
    ), digits


def _check(problem: Problem, results: dict[str, Array]) -> tuple[str, list[str]]:
    """Check gradients by finite differences and the closed form; return the verdict, a sentence, the report."""
    if not all(np.isfinite(array).all() for array in results.values()):
        return "", ["not checked: an output overflows, and nothing can be compared"]
    # Use float64: its finite differences show the smallest errors.
    sample = problem.sample(_CHECK_ELEMENTS)[0][:3]
    arrays = [None if array is None else array.astype(np.float64) for array in sample]
    forward, backward, _, check = NORMS[problem.kind]
    forward = partial(forward, rounding=problem.rounding)
    report = check(forward, backward, *arrays, problem.eps, rng=0)
    if report.verdict != "FAIL":
        forward = partial(forward, eps=problem.eps)
        report = check_gradients(forward, backward, arrays, names=["x", "gamma", "beta"], rng=0)
    text = (
        f"{report.verdict}: finite differences in float64, on {len(sample[0])} rows, would have seen an "
        f"error of {report.resolution:.0e} of a gradient"
    )
    return report.verdict, [text, *str(report).splitlines()]


def _next_commands() -> list[str]:
    """Return three commands, called as this one was."""
    # A command that is found on the path has an absolute name.
    called = "stablenorm" if Path(sys.argv[0]).is_absolute() else sys.argv[0]
    example = Path("examples", "my_norm.py")
    commands = {
        f"{called} check {example if example.exists() else example.name}": "your code",
        f"{called} run x.npy": "your data: np.save('x.npy', x)",
        f"{called} diagnose x.npy": "what others lose on it",
    }
    longest = max(map(len, commands))
    return [f"{command:{longest}}  # {what}" for command, what in commands.items()]
