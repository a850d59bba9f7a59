"""The report of a gradient check: numbers, a verdict, and both as text."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from stablenorm.figures import draw_sizes
from stablenorm.output import plain, to_json, wrapped
from stablenorm.records import Shape

# Replaces a bound of 0, by which nothing can be divided.
TINIEST = 2.0**-1074
_NO_ARGUMENT = "there is none"
# Layers whose notes everybody reads; those of other layers are figures.
_TOLD = "contract", "the forward", "smoothness"
_LAYERS = {
    "contract": "what every pair of functions must do",
    "closed form": "our own formulas, element by element",
    "hard inputs": "data on which formulas differ",
    "smoothness": "where there is a derivative",
}
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
    errors : array or None
        What the backward returned less the right gradient, in float64 and of the argument's shape; NaN
        where nothing was compared.
    """

    name: str
    verdict: Verdict
    checked: int = 0
    total: int = 0
    probes: int = 0
    failing: int = 0
    index: Shape | None = None
    actual: float = math.nan
    numeric: float = math.nan
    bound_numeric: float = math.nan
    bound_actual: float = math.nan
    resolution: float = math.inf
    message: str = ""
    method: str = "secants"
    pattern: str = ""
    errors: Any = field(default=None, compare=False, repr=False)

    @property
    def judged(self) -> bool:
        """Whether anything was compared."""
        return self.checked + self.probes > 0

    @property
    def z(self) -> float:
        """The difference in units of both bounds together; more than 1 is a failure."""
        bound = self.bound_numeric + self.bound_actual
        return abs(self.actual - self.numeric) / max(bound, TINIEST)

    @property
    def seen(self) -> str:
        """How much was compared, and how small an error would have been seen."""
        line = f"{self.checked} of {self.total} elements"
        line += f" and {self.probes} random directions" * (self.probes > 0)
        return line + f"; an error of {self.resolution:.0e} would have been seen"

    def __str__(self) -> str:
        """Say in words what was found; of a wrong gradient, also the worst element."""
        message = f": {self.message}" * bool(self.message)
        if not self.judged:
            return f"{self.name}: {'wrong' if self.verdict == 'FAIL' else 'not judged'}{message}"
        if self.verdict == "PASS":
            return f"{self.name}: right ({self.seen})"
        if self.verdict != "FAIL":
            return f"{self.name}: not judged{message}"
        place = "along a random direction" if self.index is None else f"at {list(self.index)}"
        values = f"{place} yours is {self.actual:.8g}, right is {self.numeric:.8g}"
        return f"{self.name}: wrong {self.pattern or 'along a random direction'}; {values}"

    def figures(self) -> list[str]:
        """Return the lines of --verbose."""
        if not self.judged:
            return []
        line = f"{self.name}: {self.verdict}, {self.failing} differ, by {self.method}"
        worst = f"backward {self.actual:.17g}, numeric {self.numeric:.17g}"
        bounds = f"bounds: backward {self.bound_actual:.2e}, numeric {self.bound_numeric:.2e}"
        line += f", resolution {self.resolution:.1e}"
        return [line, f"  worst: {worst}", f"  z = {self.z:.3g}; {bounds}"]


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
    formula, right : dict of str
        In `check_layer_norm`, by the names "x", "gamma", "beta" and "y": the formula that the code
        computes where it is wrong, read back from its results, and the right one.
    traceback : str
        The exception of the code, if it raised one, from its own lines on.
    left : str
        Why parameters of the code were not judged, if it has more than its arguments.
    """

    arguments: tuple[ArgumentResult, ...]
    forward_calls: int
    findings: tuple[Finding, ...] = ()
    diagnosis: tuple[str, ...] = ()
    backward_calls: int = 0
    seconds: float = 0.0
    about: str = ""
    formula: dict[str, str] = field(default_factory=dict)
    right: dict[str, str] = field(default_factory=dict)
    traceback: str = ""
    left: str = ""

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
        figures = dict(plain(properties | vars(self)))
        for argument in figures["arguments"]:
            del argument["errors"]
        return figures

    @property
    def errors(self) -> dict[str, Any]:
        """The errors of the gradients that were compared, arrays by the names of the arguments."""
        return {r.name: r.errors for r in self.arguments if r.errors is not None}

    def plot(self, name: str) -> Any:
        """
        Return a Matplotlib figure of the errors of one gradient, which shows where it is wrong.

        Raises KeyError if that gradient was not compared, ImportError without Matplotlib.
        """
        return draw_sizes(f"errors of the gradient of {name}", self.errors[name])

    def to_json(self, path: Any = None) -> str:
        """Return `as_dict` as JSON text, and write it to the file `path` if one is named."""
        return to_json(self.as_dict(), path)

    @property
    def unjudged(self) -> str:
        """Why not all gradients were judged; empty if all were, or have no argument."""
        why = dict[str, list[str]]()
        for r in self.arguments:
            if r.verdict == "NOT CHECKED" and r.message != _NO_ARGUMENT:
                why.setdefault(r.message, []).append(f"d{r.name}")
        said = [
            f"{' and '.join(n)} {'were' if n[1:] else 'was'} not judged: {w}"
            for w, n in why.items()
        ]
        return "; ".join([*said, *[self.left] * bool(self.left)])

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        names = [result.name for result in self.arguments if result.verdict == self.verdict]
        listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
        if self.passed:
            right = ", ".join(f"d{name}" for name in names)
            return f"PASS for {right} alone" if self.unjudged else "PASS"
        if self.traceback:
            return f"{self.verdict}: {self.diagnosis[0].partition(':')[0] if self.diagnosis else 'the code raises'}"
        if names:
            wrong = self.verdict == "FAIL"
            return f"{self.verdict}: {'wrong gradient of' if wrong else 'no verdict on the gradient of'} {listed}"
        layers = dict.fromkeys(f.layer for f in self.findings if f.verdict == self.verdict)
        return f"{self.verdict}: {' and '.join(layers) or 'nothing was compared'}"

    def text(self, *, verbose: bool = False) -> str:
        """
        Return the report as lines: the verdict, formulas, causes, a line for each gradient.

        With `verbose`, all figures follow, each with a word of explanation.
        """
        unjudged = self.unjudged if self.passed else self.left
        lines = [unjudged] * bool(unjudged)
        lines += [f.message for f in self.findings if f.layer == "precision"]
        # Each formula with its own cause would repeat what is common: first formulas, then causes.
        for name, yours in self.formula.items():
            label = f"your {name if name == 'y' else 'd' + name}  ".ljust(10)
            lines.append(label + yours)
            lines += ["right".ljust(len(label)) + self.right[name]] * bool(self.right[name])
        failed = [
            f.message if f.layer == "contract" else f"{f.name}: {f.message}"
            for f in self.findings
            if f.verdict in ("FAIL", "INCONCLUSIVE")
        ]
        lines += [f"{'cause':10}{said}" for said in self.diagnosis or failed[:1]]
        lines += self.traceback.splitlines()
        for result in self.arguments:
            # Nothing that was said above is said again.
            is_said = result.message and (self.traceback or result.message in unjudged)
            lines += (
                []
                if self.traceback and is_said
                else [str(result).partition(": the")[0] if is_said else str(result)]
            )
        lines += [said for said in failed[not self.diagnosis :] if said not in lines]
        lines += [
            f"note: {f.message}" for f in self.findings if f.verdict == "NOTE" and f.layer in _TOLD
        ]
        if verbose:
            lines += ["", "figures (docs: Checking gradients):", self.about]
            lines += [line for result in self.arguments for line in result.figures()]
            lines.append(
                "z: the difference in units of both bounds together; more than 1 is a mistake"
            )
            lines.append(
                "resolution: the smallest relative error that would have been seen everywhere"
            )
            for layer in dict.fromkeys(finding.layer for finding in self.findings):
                seen = [finding for finding in self.findings if finding.layer == layer]
                counts = Counter(finding.verdict for finding in seen)
                total = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
                lines.append(f"{layer} ({_LAYERS.get(layer, 'tests')}): {total}")
                shown = (f for f in seen if f.verdict != "PASS")
                lines += [f"  {f.verdict}: {f.name}: {f.message}".removesuffix(": ") for f in shown]
            calls = f"{self.forward_calls} forward and {self.backward_calls} backward calls"
            # Below a second, the time interests nobody, and equal checks give equal texts.
            lines.append(calls + f", {self.seconds:.1f} s" * (self.seconds >= 1))
        # Formulas, causes and tracebacks keep their lines.
        trace = filter(str.strip, self.traceback.splitlines())
        kept = tuple(f"  {first}" for first in ("your ", "right ", "cause ", *trace))
        indented = [self.headline, *("  " + line for line in lines)]
        parts = ([line] if line.startswith(kept) else wrapped(line) or [""] for line in indented)
        return "\n".join(part for lines in parts for part in lines)

    def __str__(self) -> str:
        """Return `text`."""
        return self.text()
