"""Checks of a computed norm, each told in a section: the terminal and the page show the same ones."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stablenorm.api import FUNCTIONS
from stablenorm.check import check_layer_norm, check_rms_norm
from stablenorm.cost import DIRECTIONS, PROGRAMS, count_cost, count_kept
from stablenorm.diagnosis import diagnose
from stablenorm.diagnosis.results import method_rows, sentences
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.text import Section, Table, grouped, number, quantity, shape_text
from stablenorm.types import Array

# About a second for the oracle, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 50_000
# The gradient check calls the forward 500 times, at 0.15 us an element.
_CHECK_ELEMENTS = 4_096

_OUTPUTS = ("y", "dx", "dgamma", "dbeta")
# By the kind of the norm: forward, backward, oracle, check.
NORMS: dict[str, Any] = {
    "layer": (*FUNCTIONS["layer"], exact_layer_norm, check_layer_norm),
    "rms": (*FUNCTIONS["rms"], exact_rms_norm, check_rms_norm),
}
# The promises of each rounding.
_CONTRACTS = {
    "fast": "0.501 ulp (float64: 0.75 for dx, 0.51 for dgamma and dbeta), but for an element that "
    "cancels almost completely",
    "nearest": "none is misrounded",
}
# What comes of a problem: y, dx and, where there are parameters, dgamma and dbeta.
Results = dict[str, Array]


class Problem(NamedTuple):
    """One norm to compute."""

    x: Array
    gamma: Array | None
    beta: Array | None
    eps: float
    dy: Array
    rounding: str
    kind: str

    def sample(self, elements: int) -> tuple["Problem", Array]:
        """Return so many elements, as rows, and which: evenly spaced, the first and the last among them."""
        x, dy = (each.reshape(-1, self.x.shape[-1]) for each in (self.x, self.dy))
        count = min(len(x), max(1, elements // x.shape[1]))
        rows = np.unique(np.linspace(0, len(x) - 1, count).astype(np.intp))
        return self._replace(x=x[rows], dy=dy[rows]), rows


def compute(problem: Problem) -> Results:
    """Return y, dx and, where there are parameters, dgamma and dbeta."""
    x, gamma, beta, eps, dy, rounding, kind = problem
    forward, backward, *_ = NORMS[kind]
    y, cache = forward(x, gamma, beta, eps, rounding=rounding)
    results = zip(_OUTPUTS, (y, *backward(dy, cache)), strict=True)
    return {name: array for name, array in results if array is not None}


def _accuracy(problem: Problem, results: Results) -> Section:
    """Tell how far the outputs, and those of the plain formula, are from the exact result."""
    part, sample = problem.sample(_ORACLE_ELEMENTS)
    x, gamma, beta, eps, dy, rounding, kind = part
    rows = problem.x.size // x.shape[1]
    # dgamma and dbeta are sums over all rows, so a sample of rows has sums of its own.
    judged = dict(results) if len(sample) == rows else compute(part)
    judged |= {name: results[name].reshape(rows, -1)[sample] for name in ("y", "dx")}
    exact = NORMS[kind][2](x, gamma, beta, eps, dy)
    contract, ours = exact.check_contract(**judged), exact.ulp_errors(**judged)
    y, cache = plain_forward(x, gamma, beta, eps, kind)
    plain = dict(zip(_OUTPUTS, (y, *plain_backward(dy, cache, kind)), strict=True))
    plain = exact.ulp_errors(**{name: plain[name].astype(a.dtype) for name, a in judged.items()})
    worst, worst_plain = (
        {name: float(error.max(initial=0.0)) for name, error in errors.items()}
        for errors in (ours, plain)
    )
    cells, misrounded = [], []
    for name, array in results.items():
        wrong, total = round(contract[name].misrounded * ours[name].size), ours[name].size
        passed = contract[name].passed and (rounding == "fast" or not wrong)
        errors = f"{worst[name]:.3f}", number(worst_plain[name]), "PASS" if passed else "FAIL"
        cells.append((name, shape_text(array.shape), str(array.dtype), *errors))
        elements = "elements " * (name == "y")
        misrounded.append(f"{grouped(wrong)} of {grouped(total)} {elements}of {name}")
    columns = ("output", "shape", "dtype", "worst ulp", "plain formula", "contract")
    which = "all" if len(sample) == rows else f"{len(sample)} of"
    return Section(
        "Accuracy",
        f'Rounding "{rounding}". Misrounded: {", ".join(misrounded)}.',
        (Table("Against the exact result", columns, cells),),
        f"Exact results for {which} {rows} rows, in integers; dgamma and dbeta are judged as "
        "sums over these rows. Misrounded: not the exact element rounded to nearest, ties to even. "
        "ulp: units in the last place of the output's dtype; a correctly rounded element is within "
        f"0.5. Plain formula: the worst ulp of {'two passes' if kind == 'layer' else 'one pass'} in "
        f"float32 (float64 for float64). The contract: {_CONTRACTS[rounding]}.",
        "FAIL" if any(row[-1] == "FAIL" for row in cells) else "PASS",
        "On these data the formula that everybody writes is off by up to "
        f"{number(max(worst_plain.values()))} ulp, units in the last place; stablenorm by "
        f"{number(max(worst.values()))}, a correctly rounded result by at most 0.5.",
        {name: (ours[name], plain[name]) for name in results},
    )


def _losses(problem: Problem, _: Results) -> Section:
    """Tell how many bits common methods lose, and on which rows."""
    found = diagnose(problem.x, problem.eps, kind=problem.kind)
    columns = ("method", "median row", "worst row", "rows losing 4 or more")
    hardest = [(one.advice,) for one in found.worst[:6]]
    return Section(
        "Where others would lose digits",
        " ".join(f"{said[0].upper()}{said[1:]}." for said in sentences(found)),
        (
            Table(f"Bits of y lost, of {found.bits}", columns, method_rows(found)),
            Table("The rows that are hardest", ("the hardest first",), hardest),
        ),
        f"Predicted for all {found.summary.rows} rows from each method's own sums, in its precision. "
        "Bits lost: log2 of the RMS error of y over the row, in rounding errors of the dtype, without "
        f"gamma and beta. The condition number of y{', rms(x) / std,' * (found.kind == 'layer')} is how "
        "many times larger a relative error of x is in y.",
    )


def _gradients(problem: Problem, results: Results) -> Section:
    """Tell what finite differences, the closed form and identities say."""
    heading = "Gradient check"
    if not all(np.isfinite(array.astype(np.float64)).all() for array in results.values()):
        text = "Not checked: an output overflows, and nothing can be compared."
        return Section(heading, text, verdict="INCONCLUSIVE")
    forward, backward, _, check = NORMS[problem.kind]
    forward = partial(forward, rounding=problem.rounding)
    # In float64, where finite differences see most.
    few = problem.sample(_CHECK_ELEMENTS)[0][:3]
    arrays = (None if each is None else each.astype(np.float64) for each in few)
    report = check(forward, backward, *arrays, problem.eps, rng=0)
    rows = []
    for one in report.arguments:
        if one.judged:
            bound = one.bound_numeric + one.bound_actual
            sizes = map(number, (abs(one.actual - one.numeric), bound, one.resolution))
            rows.append((f"d{one.name}", f"{one.checked} of {one.total}", *sizes, one.verdict))
    columns = ("gradient", "compared", "worst error", "its own bound", "would have seen", "")
    held = (one for one in report.findings if one.layer == "identities")
    identities = [(one.name, one.message, one.verdict) for one in held]
    return Section(
        heading,
        f"Finite differences, the closed form and identities: {report.verdict}.",
        (
            Table("Against finite differences", columns, rows),
            Table("Identities of the rows", ("identity", "worst row", ""), identities),
        ),
        f"check_{problem.kind}_norm in float64, on some of the rows, with {report.forward_calls} calls. The "
        "bound is the estimated error of the difference plus the rounding of the backward. Would have "
        "seen: the smallest relative error that no compared element could have hidden.",
        report.verdict,
    )


def _cost(problem: Problem, _: Results) -> Section:
    """Tell flops and bytes of three programs, and the bytes between forward and backward."""
    n, dtype, kind = problem.x.shape[-1], str(problem.x.dtype), problem.kind
    rows = problem.x.size // n
    counted = []
    for program, direction in itertools.product(PROGRAMS, DIRECTIONS):
        cost = count_cost(program, direction, (rows, n), dtype, kind)
        per_element = (number(each / (rows * n)) for each in (cost.flops, cost.moved))
        counted.append((f"{program}, {direction}", *per_element, quantity(cost.held, "B")))
    kept = [(k, quantity(size, "B")) for k, size in count_kept((rows, n), dtype, kind).items()]
    columns = ("program", "flops per element", "bytes moved per element", "held")
    return Section(
        "Cost",
        "Flops and bytes of three programs that do the same algebra, by formulas.",
        (
            Table(f"Counted: {rows} rows of {n}, {dtype}", columns, counted),
            Table("Kept from forward to backward, beside x", ("what", "bytes"), kept),
        ),
        "Flops: + - * / and square roots; a fused multiply-add is two. Moved: what memory must move where "
        "arrays are beyond the caches. Held: new bytes at the worst moment, results included.",
    )


# In the order in which they are shown; by what a progress line calls them.
SECTIONS: dict[str, Callable[[Problem, Results], Section]] = {
    "exact results": _accuracy,
    "diagnosis": _losses,
    "gradient check": _gradients,
    "cost": _cost,
}
