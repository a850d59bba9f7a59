"""The report of a gradient check: numbers, a verdict, and both as text."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stablenorm.text import plain, to_json, wrapped

# Replaces a bound of 0, by which nothing can be divided.
TINIEST = 2.0**-1074
# NOTE is for findings alone, NOT CHECKED for arguments alone.
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOTE", "NOT CHECKED"]


class Finding(NamedTuple):
    """
    Result of one test beside the derivatives.

    `layer` is "contract", "closed form", "hard inputs" or "smoothness"; `name` says what was to hold,
    `message` what was seen, in one line. A NOTE does not count for the verdict.
    """

    layer: str
    name: str
    verdict: Verdict
    message: str = ""


@dataclass(frozen=True)
class ArgumentResult:
    """
    The findings on one argument of the forward, called `name`.

    Attributes
    ----------
    verdict : {"PASS", "FAIL", "INCONCLUSIVE", "NOT CHECKED"}
        The last: the argument or its gradient is None.
    checked, total, probes, failing : int
        Elements compared one by one, and of how many; random directions besides, each through all
        elements at once; how many of both differ by more than both bounds.
    index : tuple of int or None
        The element with the largest `z`; None if that was a probe, or nothing was compared.
    actual, numeric, bound_numeric, bound_actual : float
        There: the derivative that the backward returned, the one by finite differences, its
        estimated error, and how far rounding can take `actual` off.
    resolution : float
        The smallest error that would have been seen in every element compared, relative to the
        element or to the RMS of this gradient, whichever is larger.
    message : str
        Why nothing could be compared, or why no verdict is possible; empty otherwise.
    method : {"secants", "closed form"}
        How `numeric` was obtained: by a closed form only in `check_layer_norm`.
    pattern : str
        Where it differs: "element (0, 2)", "row 3", "column 5", "everywhere", "5 of 32
        elements"; "2 of the 12 elements compared" where not all are; empty for a PASS.
    """

    name: str
    verdict: Verdict
    checked: int = 0
    total: int = 0
    probes: int = 0
    failing: int = 0
    index: tuple[int, ...] | None = None
    actual: float = math.nan
    numeric: float = math.nan
    bound_numeric: float = math.nan
    bound_actual: float = math.nan
    resolution: float = math.inf
    message: str = ""
    method: str = "secants"
    pattern: str = ""

    @property
    def judged(self) -> bool:
        """Whether anything was compared."""
        return self.checked + self.probes > 0

    @property
    def z(self) -> float:
        """The difference in units of both bounds together; more than 1 is a failure."""
        bound = self.bound_numeric + self.bound_actual
        return abs(self.actual - self.numeric) / max(bound, TINIEST)

    def __str__(self) -> str:
        """Return one line; for FAIL and INCONCLUSIVE two more, with the worst element."""
        message = f": {self.message}" * bool(self.message)
        line = f"{self.name}: {self.verdict}" + f" ({self.pattern})" * bool(self.pattern)
        if not self.judged:
            return line + message
        line += f": {self.checked} of {self.total} elements"
        line += f" and {self.probes} probes" * (self.probes > 0)
        line += f", {self.failing} differ" * (self.failing > 0)
        line += f", by {self.method}" * (self.method != "secants")
        line += f", resolution {self.resolution:.1e}{message}"
        if self.verdict == "PASS":
            return line
        place = "along a probe" if self.index is None else f"at {list(self.index)}"
        line += f"\n    {place}: backward {self.actual:.17g}, numeric {self.numeric:.17g}\n    "
        line += f"differ by {abs(self.actual - self.numeric):.2e}, z = {self.z:.3g}; bounds: "
        return line + f"backward {self.bound_actual:.2e}, numeric {self.bound_numeric:.2e}"


@dataclass(frozen=True)
class GradientReport:
    """
    The outcome of `check_gradients` or `check_layer_norm`.

    Attributes
    ----------
    arguments : tuple of ArgumentResult
        One for each argument, in order.
    forward_calls, backward_calls, seconds : int, int, float
        How often each was called, and how long it took.
    findings : tuple of Finding
        Results of the other layers: the contract, kinks and, in `check_layer_norm`, the closed
        form and hard inputs.
    diagnosis : tuple of str
        What is wrong, named; one sentence each.
    about : str
        The shapes and dtypes of the arguments.
    """

    arguments: tuple[ArgumentResult, ...]
    forward_calls: int
    findings: tuple[Finding, ...] = ()
    diagnosis: tuple[str, ...] = ()
    backward_calls: int = 0
    seconds: float = 0.0
    about: str = ""

    @property
    def verdict(self) -> Verdict:
        """FAIL if anything is wrong, PASS if all that was compared is right and fine enough."""
        verdicts = {r.verdict for r in self.arguments} | {f.verdict for f in self.findings}
        if "FAIL" in verdicts:
            return "FAIL"
        # A check in which nothing was compared has shown nothing.
        judged = any(result.verdict == "PASS" for result in self.arguments)
        return "INCONCLUSIVE" if "INCONCLUSIVE" in verdicts or not judged else "PASS"

    @property
    def passed(self) -> bool:
        """Whether the verdict is PASS."""
        return self.verdict == "PASS"

    @property
    def resolution(self) -> float:
        """The smallest relative error that all judged arguments would have shown; inf if none."""
        return max((r.resolution for r in self.arguments if r.judged), default=math.inf)

    def as_dict(self) -> dict[str, Any]:
        """
        Return everything as plain dicts, lists, str, int, float, bool and None, by name.

        `verdict`, `passed`, `resolution` are among them, and `z` where there is one. What JSON has
        no number for is a string that float() reads: "nan", "inf".
        """
        properties = {name: getattr(self, name) for name in ("verdict", "passed", "resolution")}
        return dict(plain(properties | vars(self)))

    def to_json(self, path: Any = None) -> str:
        """Return `as_dict` as JSON text, and write it to the file `path` if one is named."""
        return to_json(self.as_dict(), path)

    def __str__(self) -> str:
        """Return verdict, diagnosis, a line for each argument, the failed findings, and the cost."""
        lines = [*self.diagnosis, *self.about.splitlines()]
        lines += [line for result in self.arguments for line in str(result).splitlines()]
        for layer in dict.fromkeys(finding.layer for finding in self.findings):
            seen = [finding for finding in self.findings if finding.layer == layer]
            counts = Counter(finding.verdict for finding in seen)
            lines.append(f"{layer}: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}")
            shown = (f for f in seen if f.verdict != "PASS")
            lines += [f"  {f.verdict}: {f.name}: {f.message}".removesuffix(": ") for f in shown]
        calls = f"{self.forward_calls} forward and {self.backward_calls} backward calls"
        # Below a second, the time interests nobody, and equal checks give equal texts.
        lines.append(calls + f", {self.seconds:.1f} s" * (self.seconds >= 1))
        names = [result.name for result in self.arguments if result.verdict == self.verdict]
        of = "wrong gradient of " if self.verdict == "FAIL" else "no verdict on the gradient of "
        if not names:
            names = list(dict.fromkeys(f.layer for f in self.findings if f.verdict == self.verdict))
            of = "" if names else "nothing was compared"
        headline = f": {of}{' and '.join(filter(None, [', '.join(names[:-1]), *names[-1:]]))}"
        if self.passed:
            headline = f": an error of {self.resolution:.1e}, relative, would have been seen"
            headline *= math.isfinite(self.resolution)
        indented = "\n  ".join([self.verdict + headline, *lines]).splitlines()
        return "\n".join(part for line in indented for part in wrapped(line))
