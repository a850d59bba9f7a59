"""Accounts of the error of an output: which parts it has, what is wrong with each, in a sentence."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import format_of
from stablenorm.records import Array
from stablenorm.testing import causes as why
from stablenorm.testing.attribution import LEAST, SURE, Row, noise_of, split_rows, split_sums
from stablenorm.testing.causes import ADVICE, Cause, digits
from stablenorm.testing.limits import Limits, half_ulp

# Below a twentieth of the squared error, nothing is won by mending a part.
SMALL = 0.05
NAMES = {
    "mean": "the mean",
    "rest": "roundings of single elements",
    "xhat": "the mean in xhat",
    "statistics": "the statistics of its rows",
    "last": "the last rounding",
    "order": "the sum over rows",
    "factor": "a common factor",
}


class Account(NamedTuple):
    """
    What the error of one output is made of.

    `where` says which row is meant, `shares` are the parts of the squared error, by name, and `causes`
    what is known of them; `hidden` says what the output cannot show.
    """

    where: str
    shares: Mapping[str, float]
    causes: Mapping[str, Cause | None]
    hidden: str = ""

    @property
    def mistakes(self) -> list[str]:
        """The names of the mistakes in parts that count."""
        named = ((part, cause) for part, cause in self.causes.items() if cause and cause.name)
        counts = ((p, c) for p, c in named if self.shares.get(p, 0.0) >= SMALL)
        return [f"{NAMES.get(part, part)}: {cause.name}" for part, cause in counts]

    def __str__(self) -> str:
        """Return a sentence, the largest part first, and the advice."""
        words, advice = list[str](), list[str]()
        for part, share in sorted(self.shares.items(), key=lambda item: -item[1]):
            if share >= SMALL:
                much = "all of it" if share > 0.995 else f"{percent(share)} of it"
                cause = self.causes.get(part) or Cause("", "")
                name = "the rest" if part == "rest" and cause.words else NAMES.get(part, part)
                words.append(f"{much} is {name}" + f", {cause.words}" * bool(cause.words))
                advice += [cause.advice] * bool(cause.advice and cause.advice not in advice)
        said = "; ".join(words) + "." if words else "nothing is lost." * bool(self.shares)
        return " ".join(filter(None, [self.where, said, *advice, self.hidden]))


def account_of_rows(
    name: str, error: Array, exact: Array, limits: Limits, dtype: Any, worst: int, eps: float,
    of_y: Mapping[int, Row],
) -> tuple[Account, list[Row]]:  # fmt: skip
    """Account for the errors of y or dx, (rows, n); return the split rows too."""
    noise = noise_of(name, exact, limits, dtype)
    rows = split_rows(name, error, noise, limits, worst, of_y)
    if not rows or rows[0].place != worst:
        short = "rows are too short to split their errors" * (limits.n < LEAST)
        return Account(short or f"row {worst} is not finite", {}, {}), rows
    weight = limits.gamma if name == "y" else limits.rstd[worst] * limits.terms_of_dx()[2][worst]
    causes = {
        "rstd": why.cause_of_rstd(rows, limits, eps),
        "mean" if name == "y" else "xhat": why.cause_of_mean(rows, limits),
        "rest": why.cause_of_rest(rows[0], limits, noise, weight),
    }
    for part in ("mean(g)", "mean(g xhat)") if name == "dx" else ():
        causes[part] = why.cause_of_means(part, rows, limits)
    ulp = 2 * half_ulp(np.abs(exact[worst]).max(), format_of(dtype))
    where = f"row {worst}, off by {digits(np.abs(error[worst]).max() / ulp)} ulp of its largest element:"
    hidden = ""
    if format_of(dtype).digits < limits.s.digits and rows[0].shares == {"rest": 1.0}:
        seen = SURE * rows[0].numbers.get("rstd", (0.0, 1.0))[1]
        hidden = f"Not visible in {np.dtype(dtype).name}: errors of rstd below {seen:.0e}, and alike of the mean."
    return Account(where, rows[0].shares, causes, hidden), rows


def account_of_sums(
    error: Array, exact: Array, actual: Array, limits: Limits, dtype: Any, known: Array, factor: Any
) -> Account:
    """Account for the errors of dgamma or dbeta, sums of dy times a factor."""
    if not np.isfinite(error + exact).all():
        return Account("not finite", {}, {})
    row = split_sums(error, exact, known, dtype, limits.u * np.abs(limits.dy * factor).sum(axis=0))
    number = row.numbers.get("factor", (0.0, 0.0))[0]
    causes = {
        "factor": Cause(f"{number:+.1e}", ADVICE["factor"]),
        "order": why.cause_of_order(actual, row, format_of(dtype), limits.rows),
        "statistics": Cause("", ADVICE["statistics"]),
    }
    return Account("", row.shares, causes)


def percent(share: float) -> str:
    """Write a share in percent, two digits; a multiple of the whole from ten times on."""
    return (
        f"{digits(share)} times" if share >= 10 else f"{100 * share:.{0 if share >= 0.1 else 1}f} %"
    )
