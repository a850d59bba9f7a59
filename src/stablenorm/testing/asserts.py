"""Judge arrays that a layer or RMS norm returned: limits for each element, and where the digits went."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.differences import name_pattern
from stablenorm.formats import check_dtype, format_of
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.output import shape_text
from stablenorm.records import Array
from stablenorm.testing.accounts import Account, account_of_rows, account_of_sums, percent
from stablenorm.testing.attribution import Row, in_sums
from stablenorm.testing.causes import digits
from stablenorm.testing.limits import FAILURE, Arithmetic, Limits, Statistics, half_ulp

_ORACLES = {"layer": exact_layer_norm, "rms": exact_rms_norm}


class Judged(NamedTuple):
    """
    One output beside its limits, arrays of its shape.

    Errors are signed and limits absolute; a limit is infinite where the declared arithmetic promises
    nothing. `ulp` is that of the output's dtype at the exact value.
    """

    name: str
    dtype: Any
    actual: Array
    exact: Array
    error: Array
    limit: Array
    ulp: Array

    @property
    def shares(self) -> Array:
        """
        The errors as parts of their limits, both less the last rounding; 0 where the limit is infinite.

        So 0 is correctly rounded, and 1 is as far off as the declared arithmetic may be.
        """
        last = self.ulp / 2
        with np.errstate(all="ignore"):
            beyond = np.maximum(np.abs(self.error) - last, 0)
            shares = beyond / (self.limit - last)
        return np.where(np.isfinite(self.limit) & (beyond > 0), shares, 0.0)

    @property
    def passed(self) -> bool:
        """Whether no element exceeds its limit."""
        return not (self.shares > 1).any()

    @property
    def beyond(self) -> float:
        """The part of the elements for which the declared arithmetic promises nothing."""
        return float(np.mean(~np.isfinite(self.limit))) if self.limit.size else 0.0

    @property
    def worst(self) -> tuple[int, ...]:
        """The place of the largest share of a limit."""
        return tuple(map(int, np.unravel_index(np.argmax(self.shares), self.shares.shape)))


@dataclass(frozen=True)
class Report:
    """
    What `explain` found.

    Attributes
    ----------
    outputs : dict of str to Judged
        The judged outputs by name.
    accounts : dict of str to Account
        For each output, where the digits went: `shares` of its squared error by what they come from,
        of the worst row for y and dx; its text is a sentence with the advice.
    about : str
        The input and the declared arithmetic.
    """

    outputs: Mapping[str, Judged]
    accounts: Mapping[str, Account]
    about: str

    @property
    def passed(self) -> bool:
        """Whether no element of any output exceeds its limit."""
        return all(judged.passed for judged in self.outputs.values())

    @property
    def mistakes(self) -> list[str]:
        """The mistakes that the accounts name."""
        named = (mistake for account in self.accounts.values() for mistake in account.mistakes)
        return list(dict.fromkeys(named))

    def __str__(self) -> str:
        """Return the report as text."""
        lines = [self.about]
        for name, judged in self.outputs.items():
            lines += [_line(judged), *_element(judged), f"    {self.accounts[name]}"]
        return "\n".join(lines)


def _line(judged: Judged) -> str:
    share, beyond = float(judged.shares.max(initial=0.0)), judged.beyond
    above, pattern = f"  {judged.name}: ", f": {name_pattern(judged.shares > 1)}"
    if beyond == 1:
        return above + "beyond the declared arithmetic, which promises nothing here"
    left_out = f"; {percent(beyond)} of the elements are beyond the declared arithmetic" * (
        beyond > 0
    )
    if judged.passed:
        ulps = np.abs(judged.error / judged.ulp)[np.isfinite(judged.limit)].max(initial=0.0)
        return above + f"PASS, at most {digits(ulps)} ulp, {percent(share)} of a limit" + left_out
    count = int((judged.shares > 1).sum())
    plural = "elements exceed their limits" if count > 1 else "elements exceeds its limit"
    return (
        above
        + f"FAIL, {count} of {judged.error.size} {plural}"
        + pattern * (not pattern[2].isdigit())
        + left_out
    )


def _element(judged: Judged) -> list[str]:
    if judged.passed:
        return []
    at = judged.worst
    value, exact, error, limit, ulp = (float(a[at]) for a in judged[2:])
    place = ", ".join(map(str, at))
    kind, decimals = np.dtype(judged.dtype).name, format_of(judged.dtype).decimals
    given = judged.dtype.type(value)
    return [
        f"    {judged.name}[{place}] is {given!s}, exactly {exact:.{decimals + 4}g}",
        f"    off by {digits(abs(error) / ulp)} ulp of {kind}; the limit is {digits(limit / ulp)}",
    ]


def explain(
    y: Any, x: Any, gamma: Any = None, beta: Any = None, eps: float = 1e-5, *, dy: Any = None,
    dx: Any = None, dgamma: Any = None, dbeta: Any = None, kind: str = "layer", **declared: Any,
) -> Report:  # fmt: skip
    """
    Hold the results of a norm against limits that follow from its arithmetic, and say where digits went.

    Parameters
    ----------
    y : array or None
        What the kernel returned, of the shape of `x`.
    x : array of shape (..., n)
        The rows, finite: float16, bfloat16, float32 or float64.
    gamma, beta : array of shape (n,), optional
        Scale and shift.
    eps : float, default: 1e-5
        Added to the variance.
    dy : array of the shape of x, optional
        The cotangent of y; needed for dx, dgamma and dbeta.
    dx, dgamma, dbeta : array, optional
        The gradients that the kernel returned. The dtype of each output is its own.
    kind : {"layer", "rms"}, default: "layer"
        Which norm.
    **declared : Any
        How the kernel computes: `statistics`, `elementwise`, `cast`, `sums`, `centered`, `bound`.
        `Arithmetic` describes them.

    Returns
    -------
    Report
        Verdict, errors and limits of each output, and a sentence on each.

    Raises
    ------
    TypeError, ValueError
        If a dtype, a shape or a word is wrong, or an input is not finite.

    Examples
    --------
    >>> from stablenorm.testing import explain, plain_forward
    >>> x = np.float32([[10000.001, 10000.002, 10000.003, 10000.005] * 4])
    >>> print(explain(plain_forward(x)[0], x).accounts["y"])
    row 0, off by ... ulp of its largest element: all of it is the mean, off by up to 0.25 ulp of a
    float32: rounded once, and then too short. Keep the mean in two floats, or subtract the mean of
    x - mean too.
    """
    data = {"x": x, "gamma": gamma, "beta": beta, "dy": dy}
    results = {"y": y, "dx": dx, "dgamma": dgamma, "dbeta": dbeta}
    outputs, limits = examine(results, data, eps, kind, Arithmetic(**declared))
    with np.errstate(all="ignore"):
        accounts = _accounts(outputs, limits, eps)
    shape = shape_text(np.shape(x))
    about = f"{kind} norm, x {shape} {limits.form.dtype}, eps {eps:g}; {described(limits.declared)}"
    return Report(outputs, accounts, about)


def examine(
    results: Mapping[str, Any], data: Mapping[str, Any], eps: float, kind: str, declared: Arithmetic
) -> tuple[dict[str, Judged], Limits]:
    """Return the judged results, None left out, and their limits; the arguments are those of `explain`."""
    arrays = {name: None if a is None else np.asarray(a) for name, a in data.items()}
    x, gamma, beta, dy = (arrays[name] for name in ("x", "gamma", "beta", "dy"))
    if kind not in _ORACLES:
        msg = f"kind must be layer or rms, got {kind!r}"
        raise ValueError(msg)
    oracle = _ORACLES[kind]
    if x is None:
        msg = "x must be an array, got None"
        raise TypeError(msg)
    check_dtype("x", x)
    exact = oracle(x, gamma, beta, eps, dy)
    limits = Limits(x, gamma, beta, dy, Statistics.of(exact), declared.for_data(x), kind)
    with np.errstate(all="ignore"):
        judged = {
            name: judge_output(name, np.asarray(output), exact.floats(name), limits)
            for name, output in results.items()
            if output is not None
        }
    return judged, limits


def described(a: Arithmetic) -> str:
    """Return the declared arithmetic in words."""
    order = "any order" if a.sums == "any" else f"at most {a.sums} additions"
    chance = f"probable ({FAILURE:g})" if a.bound == "probable" else "worst case"
    casts = ", xhat rounded before gamma" * (a.cast == "xhat") + ", x * a + b" * (not a.centered)
    element = f", elements {a.elementwise}" * (a.elementwise != a.statistics)
    return f"declared: statistics {a.statistics}{element}{casts}, sums in {order}; {chance}"


def judge_output(name: str, output: Array, exact: Array, limits: Limits) -> Judged:
    """Return a result beside its exact values and its limits; ValueError or TypeError if it has another shape or dtype."""
    check_dtype(name, output)
    if output.shape != exact.shape:
        msg = f"{name} must have shape {exact.shape}, got {output.shape}"
        raise ValueError(msg)
    form, wide = format_of(output.dtype), output.astype(np.float64)
    shaped = exact.reshape(limits.xhat.shape) if name in {"y", "dx"} else exact
    limit = getattr(limits, name)(shaped, output.dtype).reshape(exact.shape)
    error = np.where(wide == exact, 0.0, wide - exact)
    # An infinity is right if a value within the limit rounds to it; NaN is not.
    reaches = np.isinf(wide) & (exact * np.sign(wide) + limit >= form.largest)
    error = np.where(reaches, 0.0, np.where(np.isnan(wide) & ~np.isnan(exact), np.inf, error))
    return Judged(name, output.dtype, wide, exact, error, limit, 2 * half_ulp(exact, form))


def assert_layer_norm(
    y: Any, x: Any, gamma: Any = None, beta: Any = None, eps: float = 1e-5, *, dy: Any = None,
    dx: Any = None, dgamma: Any = None, dbeta: Any = None, **declared: Any,
) -> None:  # fmt: skip
    """
    Raise AssertionError unless every element is as right as the arithmetic of the kernel allows.

    There is no atol and no rtol. The parameters are those of `explain`, and so is the text.

    Raises
    ------
    AssertionError
        With the worst element, its exact value, its error and limit in ulp, and where the digits went.
    TypeError, ValueError
        If a dtype, a shape or a word is wrong, or an input is not finite.

    See Also
    --------
    explain : The same, with a report in place of the error.

    Examples
    --------
    >>> from stablenorm import layer_norm
    >>> from stablenorm.testing import assert_layer_norm
    >>> x = np.random.default_rng(0).standard_normal((4, 768), np.float32)
    >>> assert_layer_norm(layer_norm(x), x)
    """
    _assert(explain(y, x, gamma, beta, eps, dy=dy, dx=dx, dgamma=dgamma, dbeta=dbeta, **declared))


def assert_rms_norm(
    y: Any, x: Any, gamma: Any = None, beta: Any = None, eps: float = 1e-5, **others: Any
) -> None:
    """
    Raise AssertionError unless an RMS norm is as right as its arithmetic allows.

    The parameters are those of `explain`.

    Raises
    ------
    AssertionError, TypeError, ValueError
        As `assert_layer_norm` does.
    """
    _assert(explain(y, x, gamma, beta, eps, kind="rms", **others))


def _assert(report: Report) -> None:
    if not report.passed:
        raise AssertionError(str(report))


def _accounts(outputs: Mapping[str, Judged], limits: Limits, eps: float) -> dict[str, Account]:
    """Account for the errors of each output."""
    accounts, of_y = dict[str, Account](), dict[int, Row]()
    for name, one in outputs.items():
        if not limits.rows:
            accounts[name] = Account("there are no rows", {}, {})
        elif name in {"y", "dx"}:
            shape = limits.xhat.shape
            error, exact, shares = (a.reshape(shape) for a in (one.error, one.exact, one.shares))
            worst = int(np.argmax(shares.max(axis=-1)))
            accounts[name], rows = account_of_rows(
                name, error, exact, limits, one.dtype, worst, eps, of_y
            )
            of_y |= {row.place: row for row in rows if name == "y"}
        else:
            is_gamma = name == "dgamma"
            known = in_sums(list(of_y.values()), limits) * is_gamma
            accounts[name] = account_of_sums(
                one.error,
                one.exact,
                one.actual,
                limits,
                one.dtype,
                known,
                limits.before if is_gamma else 1.0,
            )
    return accounts
