"""The story of one norm: what was computed, how fast, how exact; each figure is measured here and now."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import numpy as np

from stablenorm import timing
from stablenorm.api import FUNCTIONS
from stablenorm.check import GradientReport, check_layer_norm, check_rms_norm
from stablenorm.cost import DIRECTIONS, PROGRAMS, count_cost, count_kept
from stablenorm.formats import format_of
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.text import number, quantity, shape_text
from stablenorm.threads import get_num_threads
from stablenorm.types import Array

# By the kind of the norm: forward, backward, oracle, check.
NORMS: dict[str, Any] = {
    "layer": (*FUNCTIONS["layer"], exact_layer_norm, check_layer_norm),
    "rms": (*FUNCTIONS["rms"], exact_rms_norm, check_rms_norm),
}
# The promises of each rounding.
_CONTRACTS = {
    "fast": "within 0.501 ulp",
    "nearest": "none misrounded",
    "fast float64": "within 0.501 ulp, dx 0.75, dgamma and dbeta 0.51",
}
# The oracle takes about a second for these, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 50_000
# The gradient check calls the forward 500 times, at 0.15 us an element.
_CHECK_ELEMENTS = 4_096
# Elements of the harder data: four columns of them take the oracle half a second.
_HARDER_ELEMENTS = 8_000
# Elements to be timed: plain NumPy takes 0.1 s for them.
_TIMED_ELEMENTS = 2**20
# y, dx and, where there are parameters, dgamma and dbeta.
_Results = dict[str, Array]
OURS, PLAIN, ONE_PASS = "stablenorm", "plain NumPy", "E[x^2] - E[x]^2"


_KERNEL = "fused CPU kernel"
_FUSED = (
    "each way is one kernel that moves every array once between memory and caches; how, and for a GPU: "
    'docs/explanation/fusing.md, the page "One fused GPU kernel"'
)


class Part(NamedTuple):
    """A part of the story: its name, its sentences, and a table of cells with the heads first."""

    name: str
    text: tuple[str, ...]
    table: Sequence[tuple[str, ...]] = ()


class Story(NamedTuple):
    """The verdict, the parts, what --verbose adds, and what the page draws."""

    verdict: str
    passed: bool
    parts: list[Part]
    more: list[Part]
    # By output, errors in ulp of ours and of plain NumPy; by column and method, correct digits.
    errors: dict[str, tuple[Array, Array]]
    harder: dict[str, dict[str, int]]


class Problem(NamedTuple):
    """One norm to compute."""

    x: Array
    gamma: Array | None
    beta: Array | None
    eps: float
    dy: Array
    rounding: str
    kind: str

    def compute(self) -> tuple[_Results, str]:
        """Return y, dx and, where there are parameters, their gradients; and the backend."""
        forward, backward, *_ = NORMS[self.kind]
        y, cache = forward(*self[:4], rounding=self.rounding)
        return _named(y, *backward(self.dy, cache)), cache.backend

    def sample(self, elements: int) -> tuple[Problem, Array]:
        """Return a problem of so many elements, and its rows: evenly spaced, the first and the last included."""
        x, dy = (array.reshape(-1, self.x.shape[-1]) for array in (self.x, self.dy))
        count = min(len(x), max(1, elements // x.shape[1]))
        rows = np.unique(np.linspace(0, len(x) - 1, count).astype(np.intp))
        return self._replace(x=x[rows], dy=dy[rows]), rows


def _named(*results: Array | None) -> _Results:
    names = zip(("y", "dx", "dgamma", "dbeta"), results, strict=True)
    return {name: array for name, array in names if array is not None}


def tell(problem: Problem, results: _Results, backend: str, about: str) -> Story:
    """Measure and judge a norm whose results are these, of this backend."""
    threads = get_num_threads()
    kernels = "C++ kernels" if backend == "native" else f"the backend {backend!r}"
    about += f"; on {kernels}, {threads} thread{'s' * (threads != 1)}, rounding {problem.rounding!r}"
    passed, accuracy, errors = _judge(problem, results)
    harder = _measure_harder(problem)
    verdict, gradients = _check(problem, results)
    timed, copied = _time(problem)
    parts = [
        Part("data", (about,)),
        Part("time", timed),
        accuracy,
        _show_harder(problem, harder),
        Part("gradients", gradients if verdict == "FAIL" else gradients[:1]),
        _count(problem, copied),
        Part("fused", (_FUSED,)),
        Part("next", _next_commands()),
    ]
    more = [Part("gradient check", gradients[1:]), _count_programs(problem)]
    wrong = ["the accuracy"] * (not passed) + ["the gradients"] * (verdict == "FAIL")
    if wrong:
        words = f"FAIL: {' and '.join(wrong)} of {', '.join(results)} did not pass."
    else:
        end = {"PASS": ", and the gradients are right."}.get(verdict, "; the gradients were not judged.")
        limit = _CONTRACTS.get(f"{problem.rounding} {problem.x.dtype}", _CONTRACTS[problem.rounding])
        words = f"PASS: {', '.join(results)} are as exact as promised ({limit}){end}"
    return Story(words, not wrong, parts, more, errors, harder)


def _time(problem: Problem) -> tuple[tuple[str, ...], str]:
    """Time both directions, plain NumPy and a copy of x in turns; return sentences, and the time of the copy."""
    part, _ = problem.sample(_TIMED_ELEMENTS)
    x, gamma, beta, eps, dy, rounding, kind = part
    forward, backward, *_ = NORMS[kind]
    cache, plain_cache = (f(x, gamma, beta, eps, **more)[1] for f, more in
                          ((forward, {"rounding": rounding}), (plain_forward, {"kind": kind})))  # fmt: skip
    calls = {
        "forward": partial(forward, x, gamma, beta, eps, rounding=rounding),
        "backward": partial(backward, dy, cache),
        "plain forward": partial(plain_forward, x, gamma, beta, eps, kind),
        "plain backward": partial(plain_backward, dy, plain_cache, kind),
        "copy": partial(np.copyto, np.empty_like(x), x),
    }
    took = {k: t.median for k, t in timing.measure_interleaved(calls, rounds=7, limit=1).items()}
    texts = [
        f"{way} {quantity(took[way], 's')}, plain NumPy {quantity(took[f'plain {way}'], 's')} "
        f"({took[f'plain {way}'] / took[way]:.2g} times as long)"
        for way in timing.PASSES
    ]
    of = "" if x.size == problem.x.size else f", on {len(x)} rows"
    return (f"{'; '.join(texts)}{of}",), f"{quantity(took['copy'], 's')}{of}"


def _judge(problem: Problem, results: _Results) -> tuple[bool, Part, dict[str, tuple[Array, Array]]]:
    """Return whether the outputs keep the contract, a table of their errors, and these in ulp."""
    part, sample = problem.sample(_ORACLE_ELEMENTS)
    *inputs, rounding, kind = part
    rows = problem.x.size // part.x.shape[1]
    # dgamma and dbeta are sums over all rows, so a sample of rows has sums of its own.
    judged = results if len(sample) == rows else part.compute()[0]
    judged = judged | {name: results[name].reshape(rows, -1)[sample] for name in ("y", "dx")}
    exact = NORMS[kind][2](*inputs)
    contract, ours = exact.check_contract(**judged), exact.ulp_errors(**judged)
    y, cache = plain_forward(*part[:4], kind)
    plain = _named(y, *plain_backward(part.dy, cache, kind))
    plain = exact.ulp_errors(**{name: plain[name].astype(a.dtype) for name, a in judged.items()})
    most = most_digits(problem.x.dtype)
    cells, all_passed = [("", f"digits of {most}", "plain NumPy", "ulp", "plain NumPy", "misrounded", "contract")], True
    for name, array in judged.items():
        wrong, total = round(contract[name].misrounded * ours[name].size), ours[name].size
        passed = contract[name].passed and (rounding == "fast" or not wrong)
        all_passed &= passed
        both = ours[name], plain[name]
        digits = (str(count_digits(ulps, array)) for ulps in both)
        worst, worst_plain = (ulps.max(initial=0.0) for ulps in both)
        errors = f"{worst:.3f}", number(worst_plain), f"{wrong} of {total}"
        cells.append((name, *digits, *errors, "PASS" if passed else "FAIL"))
    which = "all" if len(sample) == rows else f"{len(sample)} of"
    text = (
        f"the worst element of each output, against exact integers on {which} {rows} rows; digits are "
        "relative to the largest element; an ulp is the last place of the element itself, so that near "
        "0 many ulp may be off while the digits are there",
    )
    return all_passed, Part("right?", text, cells), {n: (ours[n], plain[n]) for n in judged}


def most_digits(dtype: Any) -> int:
    """Return the decimal digits that a dtype holds."""
    return int(format_of(dtype).digits * math.log10(2))


def count_digits(ulps: Array, like: Array) -> int:
    """Return the correct digits of the worst element, relative to the largest; `like` is nearly exact."""
    most = most_digits(like.dtype)
    if ulps.max(initial=0.0) <= 0.5:
        return most
    size = np.abs(like)
    with np.errstate(all="ignore"):
        error = (ulps * np.spacing(size).astype(float)).max() / size.max().astype(float)
        # NaN, too, has no digit.
        return int(np.nan_to_num(-np.log10(error)).clip(0, most))


def _measure_harder(problem: Problem) -> dict[str, dict[str, int]]:
    """Return by column the digits of y that methods keep: rows of std 1 with a mean, or larger ones for RMS norm."""
    part, _ = problem.sample(_HARDER_ELEMENTS)
    x, gamma, beta, eps, _, rounding, kind = part
    wide, is_layer = x.astype(float), kind == "layer"
    with np.errstate(all="ignore"):
        wide = wide - is_layer * wide.mean(axis=1, keepdims=True)
        wide = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True))
    # A row of std 0 stays constant.
    wide = np.nan_to_num(wide, posinf=0.0, neginf=0.0)
    found = {}
    for power in (0, 2, 4, 6) if is_layer else (0, 10, 20, 30):
        with np.errstate(all="ignore"):
            hard = (wide + (power > 0) * 10.0**power if is_layer else wide * 10.0**power).astype(x.dtype)
        if not np.isfinite(hard).all():
            continue
        y = NORMS[kind][0](hard, gamma, beta, eps, rounding=rounding)[0]
        tried = {OURS: y, PLAIN: plain_forward(hard, gamma, beta, eps, kind)[0]}
        if is_layer:
            tried[ONE_PASS] = _one_pass(hard, gamma, beta, eps)
        exact = NORMS[kind][2](hard, gamma, beta, eps)
        name = f"{'mean' if is_layer else 'size'} {10**power * (power > 0 or not is_layer):{',' if power < 9 else '.0e'}}"
        found[name.replace(",", " ")] = {
            method: count_digits(exact.ulp_errors(y=array)["y"], y) for method, array in tried.items()
        }
    return found


def _one_pass(x: Array, gamma: Array | None, beta: Array | None, eps: float) -> Array:
    """Return y by E[x^2] - E[x]^2, in the precision of `plain_forward`."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.result_type(x, np.float32))
        mean = wide.mean(axis=-1, keepdims=True)
        var = (wide * wide).mean(axis=-1, keepdims=True) - mean * mean
        y = (wide - mean) / np.sqrt(var + wide.dtype.type(eps))
        y = y * (1 if gamma is None else gamma) + (0 if beta is None else beta)
        return y.astype(x.dtype)


def _show_harder(problem: Problem, harder: dict[str, dict[str, int]]) -> Part:
    """Return the digits as a table: a line for each method."""
    change = "scaled to std 1, with a mean" if problem.kind == "layer" else "scaled to such a size"
    methods = next(iter(harder.values()), {})
    rows = [(name, *(str(column[name]) for column in harder.values())) for name in methods]
    return Part("harder", (f"digits of y left on the same rows, {change}",), [("", *harder), *rows])


def _check(problem: Problem, results: _Results) -> tuple[str, tuple[str, ...]]:
    """Check gradients by finite differences and the closed form; return the verdict, a sentence and the report."""
    if not all(np.isfinite(array).all() for array in results.values()):
        return "INCONCLUSIVE", ("not checked: an output overflows, and nothing can be compared",)
    forward, backward, _, check = NORMS[problem.kind]
    forward = partial(forward, rounding=problem.rounding)
    # Use float64: its finite differences show the smallest errors.
    sample = problem.sample(_CHECK_ELEMENTS)[0][:3]
    arrays = (None if array is None else array.astype(np.float64) for array in sample)
    report: GradientReport = check(forward, backward, *arrays, problem.eps, rng=0)
    text = (
        f"{report.verdict}: finite differences in float64, on {len(sample[0])} rows, would have seen an "
        f"error of {report.resolution:.0e} of a gradient"
    )
    return report.verdict, (text, *str(report).splitlines())


def _count(problem: Problem, copied: str) -> Part:
    """Return flops, bytes and what is kept."""
    n, dtype, kind = problem.x.shape[-1], str(problem.x.dtype), problem.kind
    rows = problem.x.size // n
    costs = [count_cost(_KERNEL, way, (rows, n), dtype, kind) for way in DIRECTIONS]
    each = [
        f"{way} {number(cost.flops / (rows * n))} flops and {number(cost.moved / (rows * n))} bytes"
        for way, cost in zip(DIRECTIONS, costs, strict=True)
    ]
    ours, _, plain, _ = count_kept((rows, n), dtype, kind).values()
    text = (
        f"{', '.join(each)} an element; a copy of x, of {2 * problem.x.itemsize} bytes an element, takes "
        f"{copied} here; kept for the backward beside x: {quantity(ours, 'B')}, by plain NumPy "
        f"{quantity(plain, 'B')}",
    )
    return Part("cost", text)


def _count_programs(problem: Problem) -> Part:
    """Return flops and bytes of three programs."""
    n, dtype, kind = problem.x.shape[-1], str(problem.x.dtype), problem.kind
    rows = problem.x.size // n
    cells = [("", "flops per element", "bytes moved per element", "held")]
    for program, direction in itertools.product(PROGRAMS, DIRECTIONS):
        cost = count_cost(program, direction, (rows, n), dtype, kind)
        per_element = (number(count / (rows * n)) for count in (cost.flops, cost.moved))
        cells.append((f"{program}, {direction}", *per_element, quantity(cost.held, "B")))
    text = (
        "counted by formulas: + - * / and square roots, a fused multiply-add is two; bytes to and from "
        "memory if the arrays exceed the caches; held: new bytes at the worst moment, results included"
    )
    return Part("programs", (text,), cells)


def _next_commands() -> tuple[str, ...]:
    """Return three commands, as this one was called."""
    there, called = which("stablenorm"), sys.argv[0]
    if Path(called).stem != "stablenorm" or (there and Path(there).samefile(called)):
        called = "stablenorm"
    example = Path("examples", "my_norm.py")
    code = example if example.exists() else "my_norm.py"
    commands = {
        f"check {code}": "your code" + "; here is a mistake" * example.exists(),
        "run x.npy": "your data: np.save('x.npy', x)",
        "diagnose x.npy": "what others lose on it",
    }
    rows = [(f"{called} {command}", f"# {what}") for command, what in commands.items()]
    longest = max(len(command) for command, _ in rows)
    return tuple(f"{command:{longest}}  {what}" for command, what in rows)
