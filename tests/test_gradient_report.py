"""The report of a gradient check: text, JSON, picture; all that may be in it."""

import json
import math
import sys
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from stablenorm.check import ArgumentResult, Difference, Finding, GradientReport, Identity, Secant

# Four steps of a plain difference: truncation in step^2, noise in 1/step.
CURVE = tuple(Secant(2.0**-k, 1.0 + 4.0**-k, 1e-15 * 2.0**k) for k in range(2, 6))
DIFFERENCES = tuple(Difference((i,), 1.0 + 1e-13, 1.0, 1e-12) for i in range(4))
RIGHT = ArgumentResult(
    "gamma", "PASS", 4, 4, 0, 0, (1,), 1.0, 1.0, 1e-13, 1e-15, 3e-12,
    differences=DIFFERENCES, curve=CURVE,
)  # fmt: skip
WRONG = ArgumentResult(
    "x", "FAIL", 24, 24, 0, 4, (1, 2, 0), 1.5, 1.0, 1e-12, 1e-15, 3e-11, pattern="row 5",
    differences=DIFFERENCES, curve=CURVE,
)  # fmt: skip
NOT_GIVEN = ArgumentResult("beta", "NOT CHECKED", message="the argument is None")
UNCLEAR = replace(RIGHT, verdict="INCONCLUSIVE", message="too noisy", resolution=np.float64(0.1))
FINDINGS = (
    Finding("contract", "x is not modified by the forward", "PASS"),
    Finding("contract", "dy is not modified", "FAIL", "dy[0, 1] was 1.0, then 2.0"),
    Finding("contract", "the same bits in every run", "NOTE", "they differ by 1 ulp"),
    Finding("closed form", "y", "PASS"),
)
IDENTITIES = (Identity("sum(dx) = 0", 1e-3, 1e-15, False), Identity("Euler", 0.0, 1e-15, True))
REPORT = GradientReport(
    (WRONG, RIGHT, NOT_GIVEN), 100, IDENTITIES, FINDINGS, ("gamma is applied twice.",), 3, 12.34
)
PASSED = GradientReport((RIGHT,), 10, (), FINDINGS[:1])
ODD = replace(
    WRONG, actual=math.nan, numeric=math.inf, bound_numeric=math.inf, resolution=math.inf,
    curve=(Secant(1, math.nan, math.inf),),
)  # fmt: skip
DOUBT = Finding("smoothness", "no kink", "INCONCLUSIVE", "one at x[3]")
OPEN = "INCONCLUSIVE: "
# With nothing in them, or everything, or what is not finite; and how the text begins.
REPORTS = {
    "passed": (PASSED, "PASS: an error of 3.0e-12, relative, would have been seen"),
    "nothing": (GradientReport((), 0), f"{OPEN}nothing was compared"),
    "not given": (GradientReport((NOT_GIVEN,), 0), f"{OPEN}nothing was compared"),
    "unclear": (GradientReport((UNCLEAR,), 1), f"{OPEN}no verdict on the gradient of gamma"),
    "doubt": (replace(PASSED, findings=(DOUBT,)), f"{OPEN}smoothness"),
    "others": (
        replace(PASSED, findings=FINDINGS, identities=IDENTITIES),
        "FAIL: identities and contract",
    ),
    "odd": (GradientReport((ODD, ODD), 1), "FAIL: wrong gradient of x and x"),
    "a probe": (GradientReport((replace(WRONG, index=None, probes=3, actual=1e308),), 1), "FAIL"),
    "long": (replace(REPORT, diagnosis=("word " * 80, "$x_1$ [bold]b[/bold] % \\ {}")), "FAIL"),
}


def test_the_verdict_comes_first_then_the_diagnosis_then_the_rest():
    assert str(REPORT).splitlines() == [
        "FAIL: wrong gradient of x",
        "  gamma is applied twice.",
        "  x: FAIL (row 5): 24 of 24 elements, 4 differ, resolution 3.0e-11",
        "      at [1, 2, 0]: backward 1.5, numeric 1",
        "      differ by 5.00e-01, z = 5e+11; bounds: backward 1.00e-15, numeric 1.00e-12",
        "  gamma: PASS: 4 of 4 elements, resolution 3.0e-12",
        "  beta: NOT CHECKED: the argument is None",
        "  identities: 1 FAIL, 1 PASS",
        "    FAIL: sum(dx) = 0: off by 1.00e-03, bound 1.00e-15",
        "  contract: 1 PASS, 1 FAIL, 1 NOTE",
        "    FAIL: dy is not modified: dy[0, 1] was 1.0, then 2.0",
        "    NOTE: the same bits in every run: they differ by 1 ulp",
        "  closed form: 1 PASS",
        "  100 forward and 3 backward calls, 12.3 s",
    ]


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_has_lines_and_json(name, tmp_path):
    report, headline = REPORTS[name]
    lines = str(report).splitlines()
    assert lines[0].startswith(headline)
    assert max(map(len, lines)) <= 100
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == text
    held = json.loads(text, parse_constant=pytest.fail)
    assert held == report.as_dict()
    assert (held["verdict"], held["passed"]) == (report.verdict, report.passed)
    assert float(held["resolution"]) == report.resolution
    for result, argument in zip(report.arguments, held["arguments"], strict=True):
        np.testing.assert_equal(float(argument["actual"]), result.actual)
        assert argument["index"] == (None if result.index is None else list(result.index))


def test_the_picture_says_what_is_in_it(monkeypatch, tmp_path):
    for name in ("long", "odd", "nothing"):
        REPORTS[name][0].plot(tmp_path / "report.png")
        assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    file = BytesIO()
    REPORT.plot(file, format="svg")
    # Letters are drawn as paths, with the words beside them as comments.
    words = file.getvalue().decode()
    for text in ("FAIL: gamma is applied twice.", "relative error", "dx: backward is off"):
        assert text in words, text
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "stablenorm\[plot\]"'):
        REPORT.plot(tmp_path / "report.png")
