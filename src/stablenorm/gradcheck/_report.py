"""What a gradient check found, in numbers and in one line an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]


class Identity(NamedTuple):
    """
    One equation that the gradients of layer normalization satisfy exactly, and how well they do.

    `error` is the absolute residual of the row that is worst in proportion to its bound, `bound`
    what rounding explains there; `passed` holds over all rows.
    """

    name: str
    error: float
    bound: float
    passed: bool


class Finding(NamedTuple):
    """
    One thing that a layer of the check looked at, beside the derivatives themselves.

    Attributes
    ----------
    layer : str
        "contract", "invariance", "identities", "hard inputs", "smoothness" or "oracle".
    name : str
        What was to hold, as a sentence: "x is not modified by the forward".
    verdict : {"PASS", "FAIL", "INCONCLUSIVE", "NOTE"}
        NOTE: worth knowing, wrong only for code that claims it. It does not count.
    message : str
        What was seen, in one line; empty for a PASS.
    resolution : float or None
        The smallest relative error that it would have seen, where that can be said.
    """

    layer: str
    name: str
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE", "NOTE"]
    message: str = ""
    resolution: float | None = None


class Difference(NamedTuple):
    """One element compared: where, both values, both bounds together."""

    place: tuple[int, ...]
    actual: float
    numeric: float
    bound: float

    @property
    def z(self) -> float:
        """The difference in units of the bound; more than 1 is a failure."""
        return ratio(abs(self.actual - self.numeric), self.bound)


class Secant(NamedTuple):
    """One point of the curve of error against step: a plain secant, not extrapolated."""

    step: float
    numeric: float
    noise: float


@dataclass(frozen=True)
class ArgumentResult:
    """
    What was found for one argument of the forward.

    Attributes
    ----------
    name : str
        The argument's name.
    verdict : {"PASS", "FAIL", "INCONCLUSIVE", "NOT CHECKED"}
        NOT CHECKED: the argument or its gradient is None.
    checked, total : int
        Elements compared one by one, of how many.
    probes : int
        Random directions compared besides, each through all elements at once.
    failing : int
        Elements and probes that differ by more than both bounds.
    index : tuple of int or None
        The element with the largest `z`; None if that was a probe, or nothing was compared.
    actual, numeric : float
        There: the derivative that the backward returned, and the one by finite differences.
    bound_numeric, bound_actual : float
        There: how wrong `numeric` can be, and how far rounding can take `actual` off.
    resolution : float
        The smallest error that would have been seen in every element compared, relative to the
        element or to the RMS of this gradient, whichever is larger.
    message : str
        Why nothing could be compared, or why no verdict is possible; empty otherwise.
    method : str
        How `numeric` was obtained: "secants" or "complex step".
    pattern : str
        Where it differs: "element", "row 3", "column 5", "everywhere", ...; empty for a PASS.
    differences : tuple of Difference
        Every element that was compared.
    curve : tuple of Secant
        At `index`, or the probe: what plain secants say at each step, for the curve of error
        against step. In units of the argument's scale.
    """

    name: str
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT CHECKED"]
    checked: int = 0
    total: int = 0
    probes: int = 0
    failing: int = 0
    index: tuple[int, ...] | None = None
    actual: float = float("nan")
    numeric: float = float("nan")
    bound_numeric: float = float("nan")
    bound_actual: float = float("nan")
    resolution: float = float("inf")
    message: str = ""
    method: str = "secants"
    pattern: str = ""
    differences: tuple[Difference, ...] = ()
    curve: tuple[Secant, ...] = ()

    @property
    def z(self) -> float:
        """The difference in units of both bounds together; more than 1 is a failure."""
        return ratio(abs(self.actual - self.numeric), self.bound_numeric + self.bound_actual)

    def __str__(self) -> str:
        """Give one line, or two with the worst element."""
        head = f"{self.name}: {self.verdict}"
        if self.checked + self.probes == 0:
            return f"{head}: {self.message}"
        seen = f"{self.checked} of {self.total} elements"
        if self.probes:
            seen += f" and {self.probes} probes"
        line = f"{head}: {seen}, resolution {self.resolution:.1e}"
        if self.message:
            line += f"; {self.message}"
        if self.verdict == "PASS":
            return line
        place = "a probe" if self.index is None else f"element {self.index}"
        return (
            f"{line}\n    {self.failing} differ; worst {place}: backward {self.actual:.17g},"
            f" numeric {self.numeric:.17g}\n    difference {abs(self.actual - self.numeric):.2e},"
            f" bounds: numeric {self.bound_numeric:.2e}, backward {self.bound_actual:.2e},"
            f" z = {self.z:.3g}"
        )


@dataclass(frozen=True)
class GradientReport:
    """
    The outcome of `check_gradients` or `check_layer_norm`.

    Attributes
    ----------
    arguments : tuple of ArgumentResult
        One for each argument, in order.
    identities : tuple of Identity
        Filled by `check_layer_norm` alone.
    forward_calls, backward_calls : int
        How often each was called.
    findings : tuple of Finding
        What the other layers saw: the contract, invariances, hard inputs, the oracle.
    diagnosis : tuple of str
        What is wrong, named; one sentence each.
    seconds : float
        How long it took.
    """

    arguments: tuple[ArgumentResult, ...]
    forward_calls: int
    identities: tuple[Identity, ...] = ()
    findings: tuple[Finding, ...] = ()
    diagnosis: tuple[str, ...] = ()
    backward_calls: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """FAIL if anything is wrong, PASS if all that was compared is right and fine enough."""
        verdicts: list[str] = [result.verdict for result in self.arguments]
        verdicts += [finding.verdict for finding in self.findings if finding.verdict != "PASS"]
        if "FAIL" in verdicts or not all(identity.passed for identity in self.identities):
            return "FAIL"
        # A check in which nothing was compared has shown nothing.
        if "INCONCLUSIVE" in verdicts or "PASS" not in verdicts:
            return "INCONCLUSIVE"
        return "PASS"

    @property
    def passed(self) -> bool:
        """Whether the verdict is PASS."""
        return self.verdict == "PASS"

    def __str__(self) -> str:
        """Give the verdict, then a line for each argument and each identity."""
        lines = [f"{self.verdict}: backward against numeric, {self.forward_calls} forward calls"]
        lines += [f"  {result}" for result in self.arguments]
        for identity in self.identities:
            word = "PASS" if identity.passed else "FAIL"
            lines.append(
                f"  {identity.name}: {word}: error {identity.error:.2e}, bound {identity.bound:.2e}"
            )
        return "\n".join(lines)


def ratio(difference: float, bound: float) -> float:
    """Divide; a difference of zero is within any bound, zero included."""
    if difference == 0:
        return 0.0
    return difference / bound if bound else float("inf")
