"""Judge a kernel on hard inputs of all lengths and layouts: its digits, not its mathematics."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import parse
from stablenorm.output import columns
from stablenorm.records import Array
from stablenorm.testing.asserts import Judged, Report, described, examine, explain, judge_output
from stablenorm.testing.attribution import LEAST
from stablenorm.testing.families import FAMILIES, Case, make_case
from stablenorm.testing.limits import Arithmetic, Limits, Statistics

# Rows around which kernels branch: one element, a warp, four, a block of 1024, and the widths of models.
LENGTHS = (1, 2, 3, 31, 32, 33, 127, 128, 129, 1000, 1023, 1024, 1025, 4096, 5120, 16384)
LAYOUTS = "contiguous", "rows apart", "one element off", "columns apart"
OUTPUTS = "y", "dx", "dgamma", "dbeta"
# A running sum in float32 of as many equal terms shows its order: 2**17 is a second of this check.
_MANY = 2**17


class Problem(NamedTuple):
    """One input: a family, a dtype, the shape of x, and how x and dy lie in memory."""

    family: str
    dtype: str
    n: int
    rows: int
    layout: str

    def case(self) -> Case:
        """Return the arrays."""
        if self.family == "many rows":
            ones = np.ones((self.rows, self.n), self.dtype)
            return Case(ones, ones[0], ones[0], 1e-5, ones * ones.dtype.type(0.1))
        return make_case(self.family, parse(self.dtype), self.n, self.rows)

    def __str__(self) -> str:
        """Return the problem in words."""
        return f"{self.family}, {self.dtype}, {self.rows} x {self.n}, {self.layout}"


@dataclass(frozen=True)
class Verdict:
    """
    The verdict on one problem.

    Attributes
    ----------
    problem : Problem
        The input.
    ulps, shares : dict of str to float
        For each output, the largest error in ulp, and the largest part of a limit. Outputs of which
        no element has a limit are left out: they are beyond the declared arithmetic.
    declined : str
        What the kernel raised; empty if it took the input.
    wrong : str
        What is wrong with what it returned, if it cannot be judged.
    """

    problem: Problem
    ulps: dict[str, float]
    shares: dict[str, float]
    declined: str = ""
    wrong: str = ""

    @property
    def share(self) -> float:
        """The largest part of a limit; infinite for what cannot be judged."""
        return math.inf if self.wrong else max(self.shares.values(), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether no limit is exceeded."""
        return self.share <= 1


@dataclass(frozen=True)
class JudgeReport:
    """
    The verdicts of `judge`.

    Attributes
    ----------
    verdicts : tuple of Verdict
        One for each problem.
    same : dict of str to str
        For "twice" and "alone or in a batch": "the same bits", or where they differ.
    about : str
        The declared arithmetic in words.
    mistakes : dict of str to list of str
        The mistakes that `explain` names, and the families on which it does.
    worst : str
        The problem that is closest to its limit, or farthest beyond it: the report of `explain`, and a
        test to paste.
    """

    verdicts: tuple[Verdict, ...]
    same: dict[str, str]
    about: str
    mistakes: dict[str, list[str]]
    worst: str

    @property
    def passed(self) -> bool:
        """Whether no limit is exceeded, and something was judged."""
        return all(v.passed for v in self.verdicts) and any(v.shares for v in self.verdicts)

    def __str__(self) -> str:
        """Return the report as text."""
        failed = [v for v in self.verdicts if not v.passed]
        declined = [v for v in self.verdicts if v.declined]
        beyond = [v for v in self.verdicts if not (v.shares or v.declined or v.wrong)]
        head = (
            f"{'PASS' if self.passed else 'FAIL'}: {len(self.verdicts)} inputs, {len(failed)} fail"
        )
        counts = {"declined": declined, "beyond the declared arithmetic": beyond}
        head += "".join(f", {len(them)} {words}" for words, them in counts.items() if them)
        bits = [f"{words}: {said}" for words, said in self.same.items()]
        reasons = dict.fromkeys(f"declined: {v.declined}" for v in declined)
        named = [f"{name} ({', '.join(them)})" for name, them in self.mistakes.items()]
        lines = [
            head,
            self.about,
            "",
            *columns(self.table()),
            "",
            *named,
            *bits,
            *list(reasons)[:3],
        ]
        return "\n".join([*lines, "", self.worst])

    def table(self) -> list[list[str]]:
        """Return the cells of the table: for each family and output the worst ulp, and the share of a limit."""
        shown = [name for name in OUTPUTS if any(name in v.shares for v in self.verdicts)]
        rows = [["worst ulp, share of the limit", *shown]]
        for family in dict.fromkeys(v.problem.family for v in self.verdicts):
            own = [v for v in self.verdicts if v.problem.family == family]
            words = f"{family} {FAMILIES[family].title}" if family in FAMILIES else family
            failed = "FAIL " * any(not v.passed for v in own)
            # The table has room for four outputs in 100 columns.
            rows.append(
                [shorten(failed + words, 34, placeholder=" .."), *(_cell(own, n) for n in shown)]
            )
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return vars(self) | {"passed": self.passed}


def _cell(verdicts: list[Verdict], name: str) -> str:
    shares = [v.shares[name] for v in verdicts if name in v.shares]
    if not shares:
        return "-"
    ulps, share = max(v.ulps[name] for v in verdicts if name in v.ulps), max(shares)
    if not np.isfinite(ulps):
        return "not finite"
    whole = 10 <= ulps < 1e4
    size = f"{ulps:.{0 if whole else 2}{'f' if whole else 'g'}}"
    part = f"{100 * share:.{0 if share >= 0.1 else 1}f}%" if share < 10 else f"{share:.3g}x"
    part = part if len(part) <= 6 else f"{share:.0e}x"
    # The power is enough for more than tenfold: four outputs fit in a line.
    return f"{size} {part:>6}"


def judge(
    forward: Callable[..., Any], backward: Callable[..., Any] | None = None, *, kind: str = "layer",
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"), families: Sequence[str] | None = None,
    lengths: Sequence[int] = LENGTHS, full: bool = False, parameters: Sequence[str] | None = None,
    convert: Callable[[Array], Any] | None = None,
    back: Callable[[Any], Array] = np.asarray,
    progress: Callable[[int, int], object] | None = None, **declared: Any,
) -> JudgeReport:  # fmt: skip
    """
    Judge a kernel on hard inputs, by limits that follow from its arithmetic.

    Parameters
    ----------
    forward : function
        ``forward(x, gamma, beta, eps)`` returns y, or y and a cache.
    backward : function, optional
        ``backward(dy, cache)`` returns dx, dgamma and dbeta; None for one that it does not compute.
    kind : {"layer", "rms"}, default: "layer"
        Which norm.
    dtypes : sequence of str, default: float32, bfloat16 and float16
        The dtypes of all arrays.
    families : sequence of str, optional
        Names of hard inputs; default: all finite ones.
    lengths : sequence of int, default: 1 to 16 384
        Lengths of rows; the default ones are around those at which kernels branch.
    full : bool, default: False
        Whether every family meets every length, dtype and layout; otherwise every pair of these occurs.
    parameters : sequence of str, optional
        Those of "gamma" and "beta" that the kernel takes; the others are None. Default: both, and gamma
        alone for an RMS norm.
    convert, back : function, optional
        From a NumPy array to the kernel's own, and back. Default: NumPy's arrays, and `numpy.asarray`.
    progress : function, optional
        Called with the numbers of inputs done and of all.
    **declared : Any
        How the kernel computes: see `Arithmetic`.

    Returns
    -------
    JudgeReport
        The verdicts; its text is a table and the worst input.

    Notes
    -----
    An input that the kernel declines by an exception is no failure. Of rows longer than 1025 there is
    one, or as few as the family needs.

    Examples
    --------
    >>> from stablenorm import layer_norm
    >>> judge(layer_norm, dtypes=["float32"], families=["F01"]).passed
    True
    """
    takes = parameters or (("gamma", "beta") if kind == "layer" else ("gamma",))
    run = _Kernel(forward, backward, convert or (lambda array: array), back, tuple(takes))
    arithmetic = Arithmetic(**declared)
    families = families or [name for name, family in FAMILIES.items() if family.finite]
    problems = list(_problems(dtypes, families, lengths, full))
    if backward is None:
        problems = [problem for problem in problems if problem.family != "many rows"]
    verdicts = []
    for done, problem in enumerate(problems):
        verdicts.append(_judge(run, problem, kind, arithmetic))
        if progress:
            progress(done + 1, len(problems))
    mistakes = dict[str, list[str]]()
    for family in families:
        own = [v for v in verdicts if v.problem.family == family and v.shares]
        for mistake in _explain(run, _worst(own), kind, declared)[0].mistakes if own else ():
            mistakes.setdefault(mistake, []).append(family)
    about = described(arithmetic.for_data(np.empty(0, parse(dtypes[0]))))
    worst = _pasted(run, _worst(verdicts), kind, declared)
    return JudgeReport(tuple(verdicts), _same_bits(run, dtypes), about, mistakes, worst)


def _worst(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict to show: the farthest from right of those whose error can be split."""
    # float32 shows more than 16 bits, a long row more than a short one, a number more than NaN.
    return max(
        verdicts,
        key=lambda v: (not v.passed, v.problem.n >= LEAST, math.isfinite(v.share), v.share),
    )


def _problems(
    dtypes: Sequence[str], families: Sequence[str], lengths: Sequence[int], full: bool
) -> Iterator[Problem]:
    for i, family in enumerate(families):
        for k, n in enumerate(lengths):
            # Every two of family, length, dtype and layout meet: k // 2 sets layouts apart from dtypes.
            every = [(dtype, layout) for dtype in dtypes for layout in LAYOUTS]
            one = dtypes[(i + k) % len(dtypes)], LAYOUTS[(i + k + k // 2) % len(LAYOUTS)]
            few = FAMILIES[family].smallest_rows
            rows = few if n > 1025 else max(2, few)
            for dtype, layout in every if full else [one]:
                if not FAMILIES[family].why_not(parse(dtype), n, rows):
                    yield Problem(family, dtype, n, rows, layout)
    for dtype in dtypes:
        yield Problem("F01", dtype, 33, 1000, "contiguous")
        yield Problem("many rows", dtype, 1, _MANY, "contiguous")


class _Kernel(NamedTuple):
    """The functions of a kernel, and what converts its arrays."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    convert: Callable[[Array], Any]
    back: Callable[[Any], Array]
    takes: tuple[str, ...]

    def case(self, problem: Problem) -> Any:
        """Return the arrays of a problem, None for a parameter that the kernel does not take."""
        case: Any = problem.case()
        return case._replace(**{name: None for name in ("gamma", "beta") if name not in self.takes})

    def __call__(self, case: Any, layout: str = "contiguous") -> dict[str, Array]:
        """Return the outputs by name."""
        x, dy = (self.convert(laid_out(a, layout)) for a in (case.x, case.dy))
        gamma, beta = (None if a is None else self.convert(a.copy()) for a in case[1:3])
        with np.errstate(all="ignore"):
            returned = self.forward(x, gamma, beta, case.eps)
            y, cache = returned if isinstance(returned, tuple) else (returned, None)
            results = [y]
            if self.backward is not None:
                results += self.backward(dy, cache)
            # A gradient may be None, or what says why it is missing.
            pairs = zip(OUTPUTS, results, strict=False)
            wanted = {"y", "dx", *(f"d{name}" for name in self.takes)}
            return {
                name: self.back(a) for name, a in pairs if name in wanted and hasattr(a, "shape")
            }


def laid_out(array: Array, layout: str) -> Array:
    """Return a copy of an array with a layout; NaN lies between its elements."""
    rows, n = array.shape
    # Three more columns: rows no longer begin at a multiple of 16 bytes.
    width = n + 3 if layout == "rows apart" else 2 * n if layout == "columns apart" else n
    begin = int(layout == "one element off")
    memory = np.full(begin + rows * width, np.nan, array.dtype)
    step = 2 if layout == "columns apart" else 1
    view = memory[begin:].reshape(rows, width)[:, : n * step : step]
    view[...] = array
    return view


def _judge(run: _Kernel, problem: Problem, kind: str, declared: Arithmetic) -> Verdict:
    case = run.case(problem)
    try:
        results = run(case, problem.layout)
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises
        text = " ".join(str(error).split())[:200]
        return Verdict(problem, {}, {}, declined=f"{type(error).__name__}: {text}")
    try:
        if problem.family == "many rows":
            judged = _of_many(results, case, kind, declared)
        else:
            x, gamma, beta, eps, dy = case
            data = {"x": x, "gamma": gamma, "beta": beta, "dy": dy}
            judged = examine(results, data, eps, kind, declared)[0]
    except (TypeError, ValueError) as error:
        return Verdict(problem, {}, {}, wrong=str(error))
    kept = {name: one for name, one in judged.items() if one.beyond < 1}
    ulps = {
        name: float(np.abs(one.error / one.ulp)[np.isfinite(one.limit)].max())
        for name, one in kept.items()
    }
    shares = {name: float(one.shares.max()) for name, one in kept.items()}
    return Verdict(problem, ulps, shares)


def _of_many(
    results: dict[str, Array], case: Case, kind: str, declared: Arithmetic
) -> dict[str, Judged]:
    """Judge dbeta alone, a sum of equal terms that one product gives exactly."""
    if "dbeta" not in results:
        return {}
    ones = np.ones((len(case.x), 1))
    statistics = Statistics(ones, ones, 0 * ones)
    limits = Limits(
        case.x, case.gamma, case.beta, case.dy, statistics, declared.for_data(case.x), kind
    )
    exact = np.array([float(len(case.dy) * Fraction(float(case.dy[0, 0])))])
    return {"dbeta": judge_output("dbeta", results["dbeta"], exact, limits)}


def _same_bits(run: _Kernel, dtypes: Sequence[str]) -> dict[str, str]:
    """Compare two runs, and one row alone with the same in a batch, bit by bit."""
    differ: dict[str, list[str]] = {"twice": [], "a row alone and in a batch": []}
    for dtype in dtypes:
        # Eight rows: a kernel may take rows in groups.
        case = run.case(Problem("F01", dtype, 1000, 8, "contiguous"))
        first, second, alone = dict[str, Array](), dict[str, Array](), dict[str, Array]()
        # The kernel may decline this input.
        with suppress(Exception):
            first, second = run(case), run(case)
            alone = run(case._replace(x=case.x[:1], dy=case.dy[:1]))
        for name, array in first.items() if alone else ():
            if array.tobytes() != second[name].tobytes():
                differ["twice"].append(f"{dtype} {name}")
            # dgamma and dbeta are other sums there.
            if name in {"y", "dx"} and array[:1].tobytes() != alone[name].tobytes():
                differ["a row alone and in a batch"].append(f"{dtype} {name}")
    return {
        words: f"other bits of {', '.join(names)}" if names else "the same bits"
        for words, names in differ.items()
    }


def _explain(
    run: _Kernel, verdict: Verdict, kind: str, declared: dict[str, Any]
) -> tuple[Report, list[str]]:
    """Return the report on a problem that the kernel took, and the names of its gradients."""
    problem = verdict.problem
    (x, gamma, beta, eps, dy), results = run.case(problem), run(run.case(problem), problem.layout)
    y = results.pop("y")
    report = explain(y, x, gamma, beta, eps, dy=dy, **results, kind=kind, **declared)
    return report, list(results)


def _pasted(run: _Kernel, worst: Verdict, kind: str, declared: dict[str, Any]) -> str:
    """Return the report on the worst problem, and lines of Python that repeat it."""
    problem = worst.problem
    head = f"closest to its limit: {problem}" if worst.passed else f"the worst: {problem}"
    if worst.wrong or worst.declined or problem.family == "many rows":
        return f"{head}\n  {worst.wrong or worst.declined}".rstrip()
    report, gradients = _explain(run, worst, kind, declared)
    options = "".join(f", {name}={value!r}" for name, value in declared.items())
    given = "".join(f", {name}={name}" for name in ("dy", *gradients)) * bool(gradients)
    made = f'"{problem.family}", "{problem.dtype}", {problem.n}, {problem.rows}'
    lines = [
        f"x, gamma, beta, eps, dy = make_case({made})",
        *(f"{name} = None" for name in ("gamma", "beta") if name not in run.takes),
        f"{'y, cache' if gradients else 'y'} = forward(x, gamma, beta, eps)",
        *["dx, dgamma, dbeta = backward(dy, cache)"] * bool(gradients),
        f"assert_{kind}_norm(y, x, gamma, beta, eps{given}{options})",
    ]
    body = str(report).split("\n", 1)[1]
    return "\n".join([head, body, "to paste into a test:", *(f"    {line}" for line in lines)])
