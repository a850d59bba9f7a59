"""What a gradient check found: numbers and a verdict; `text` and `plot` show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stablenorm.text import plain, to_json

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
FindingVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOTE"]
ArgumentVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT CHECKED"]


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
        "contract", "closed form", "hard inputs" or "smoothness".
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
    verdict: FindingVerdict
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
        There: the estimated error of `numeric`, and how far rounding can take `actual` off.
    resolution : float
        The smallest error that would have been seen in every element compared, relative to the
        element or to the RMS of this gradient, whichever is larger; by the closed form of
        `check_layer_norm` where that is finer.
    message : str
        Why nothing could be compared, or why no verdict is possible; empty otherwise.
    method : str
        How `numeric` was obtained: "secants" or "closed form".
    pattern : str
        Where it differs: "element (0, 2)", "row 3", "column 5", "everywhere", "5 of 32
        elements"; "2 of the 12 elements compared" where not all are; empty for a PASS.
    differences : tuple of Difference
        Every element that was compared.
    curve : tuple of Secant
        At `index`, or the probe: what plain secants say at each step, for the curve of error
        against step. In units of the argument's scale.
    shape : tuple of int
        That of the argument.
    """

    name: str
    verdict: ArgumentVerdict
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
    shape: tuple[int, ...] = ()

    @property
    def judged(self) -> bool:
        """Whether anything was compared."""
        return self.checked + self.probes > 0

    @property
    def z(self) -> float:
        """The difference in units of both bounds together; more than 1 is a failure."""
        return ratio(abs(self.actual - self.numeric), self.bound_numeric + self.bound_actual)

    def __str__(self) -> str:
        """Give one line, or three with the worst element."""
        from stablenorm.check.text import argument_lines  # noqa: PLC0415 - it shows what is here

        return "\n".join(argument_lines(self))


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
        What the other layers saw: the contract, the closed form, hard inputs, kinks.
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

    @property
    def resolution(self) -> float:
        """The smallest relative error that all judged arguments would have shown; inf if none."""
        seen = [result.resolution for result in self.arguments if result.judged]
        return max(seen, default=float("inf"))

    def as_dict(self) -> dict[str, Any]:
        """
        Return everything as plain dicts, lists, str, int, float, bool and None.

        Returns
        -------
        dict
            The attributes by name, with `verdict`, `passed`, `resolution`, and `z` where there
            is one. What JSON has no number for is a string, "nan", "inf" or "-inf", so that
            ``float(value)`` reads every number back.
        """
        held = {"verdict": self.verdict, "passed": self.passed, "resolution": self.resolution}
        return plain(held | vars(self))

    def to_json(self, path: Any = None) -> str:
        """Return `as_dict` as JSON text, and write it to the file `path` if one is named."""
        return to_json(self.as_dict(), path)

    def plot(self, path: Any, *, format: str | None = None) -> None:
        """
        Draw error against step.

        Parameters
        ----------
        path : str, path-like or binary file
            Where to write the picture.
        format : {"png", "svg", "pdf"}, optional
            Default: by the ending of `path`.

        Raises
        ------
        ImportError
            If Matplotlib is not there.

        Notes
        -----
        For each argument: how far a plain central difference at each step is from the
        extrapolated value, at the element with the largest z. It falls with the square of the
        step, until rounding takes over: the V. Errors are relative to the gradient's size there.
        """
        from stablenorm.check.plot import plot_report  # noqa: PLC0415 - it shows what is here

        plot_report(self, path, format)

    def __str__(self) -> str:
        """Give verdict, diagnosis, a line for each argument, what failed, and the cost."""
        from stablenorm.check.text import as_text  # noqa: PLC0415 - it shows what is here

        return as_text(self)


def ratio(difference: float, bound: float) -> float:
    """Divide; a difference of zero is within any bound, zero included."""
    if difference == 0:
        return 0.0
    return difference / bound if bound else float("inf")
