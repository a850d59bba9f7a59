"""The report of a gradient check: text, table, JSON, picture; all that may be in it."""

import json
import math
import sys
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from stablenorm.check import GradientReport
from stablenorm.check.report import (
    ArgumentResult,
    Difference,
    Finding,
    Identity,
    Secant,
)

# Four steps of a plain difference: truncation in step^2, noise in 1/step.
CURVE = tuple(Secant(2.0**-k, 1.0 + 4.0**-k, 1e-15 * 2.0**k) for k in range(2, 6))


def differences(shape, wrong):
    return tuple(
        Difference(place, 1.5 if wrong(place) else 1.0 + 1e-13, 1.0, 1e-12)
        for place in np.ndindex(*shape)
    )


RIGHT = ArgumentResult(
    "gamma", "PASS", 4, 4, 0, 0, (1,), 1.0, 1.0, 1e-13, 1e-15, 3e-12,
    differences=differences((4,), lambda _: False), curve=CURVE, shape=(4,),
)  # fmt: skip
WRONG = ArgumentResult(
    "x", "FAIL", 24, 24, 0, 4, (1, 2, 0), 1.5, 1.0, 1e-12, 1e-15, 3e-11, pattern="row 5",
    differences=differences((2, 3, 4), lambda p: p[:2] == (1, 2)), curve=CURVE, shape=(2, 3, 4),
)  # fmt: skip
NOT_GIVEN = ArgumentResult("beta", "NOT CHECKED", message="the argument is None")
UNCLEAR = replace(RIGHT, verdict="INCONCLUSIVE", message="too noisy", resolution=0.1)
FINDINGS = (
    Finding("contract", "x is not modified by the forward", "PASS"),
    Finding("contract", "dy is not modified", "FAIL", "dy[0, 1] was 1.0, then 2.0"),
    Finding("contract", "the same bits in every run", "NOTE", "they differ by 1 ulp"),
    Finding("closed form", "y", "PASS", resolution=2e-16),
)
IDENTITIES = (Identity("sum(dx) = 0", 1e-3, 1e-15, False), Identity("Euler", 0.0, 1e-15, True))
REPORT = GradientReport(
    (WRONG, RIGHT, NOT_GIVEN), 100, IDENTITIES, FINDINGS, ("gamma is applied twice.",), 3, 12.34
)
PASSED = GradientReport((RIGHT,), 10, (), FINDINGS[:1])


def variants():
    """Yield reports with nothing in them, or everything, or what is not finite."""
    nan, inf = math.nan, math.inf
    odd = replace(
        WRONG,
        actual=nan,
        numeric=inf,
        bound_numeric=inf,
        resolution=inf,
        curve=(Secant(1, nan, inf),),
    )
    huge = replace(WRONG, actual=1e308, numeric=-1e308, bound_numeric=1e300)
    point = replace(RIGHT, index=(), differences=(Difference((), 1.0, 1.0, 0.0),), shape=())
    return {
        "all": REPORT,
        "passed": PASSED,
        "nothing": GradientReport((), 0),
        "not given": GradientReport((NOT_GIVEN,), 0),
        "unclear": GradientReport((UNCLEAR,), 1),
        "odd": GradientReport((odd,), 1),
        "huge": GradientReport((huge,), 1),
        "a scalar": GradientReport((point,), 1),
        "a probe": GradientReport((replace(WRONG, index=None, probes=3),), 1),
        "bare": GradientReport((replace(WRONG, differences=(), curve=()),), 1),
        "long": replace(REPORT, diagnosis=("word " * 80, "$x_1$ [bold]brackets[/bold] % \\ {}")),
    }


VARIANTS = variants()


def test_the_verdict_comes_first_then_the_diagnosis_then_the_rest():
    lines = str(REPORT).splitlines()
    assert lines[0] == "FAIL: wrong gradient of x"
    assert lines[1] == "  gamma is applied twice."
    assert lines[2] == "  x: FAIL (row 5): 24 of 24 elements, 4 differ, resolution 3.0e-11"
    assert lines[3] == "      at [1, 2, 0]: backward 1.5, numeric 1"
    assert lines[4].startswith(
        "      differ by 5.00e-01, z = 5e+11; bounds: backward 1.00e-15, num"
    )
    assert lines[5] == "  gamma: PASS: 4 of 4 elements, resolution 3.0e-12"
    assert lines[6] == "  beta: NOT CHECKED: the argument is None"
    assert lines[7:9] == [
        "  identities: 1 of 2 pass",
        "    FAIL: sum(dx) = 0: off by 1.00e-03, bound 1.00e-15",
    ]
    # Notes are counted only, where something is wrong.
    assert lines[9:11] == [
        "  contract: 1 of 2 pass, 1 note",
        "    FAIL: dy is not modified: dy[0, 1] was 1.0, then 2.0",
    ]
    assert lines[11:] == ["  closed form: 1 pass", "  100 forward and 3 backward calls, 12.3 s"]


def test_a_pass_is_short_and_says_what_it_would_have_seen():
    first, *_, last = lines = str(PASSED).splitlines()
    assert first == "PASS: an error of 3.0e-12, relative, would have been seen"
    assert (len(lines), last) == (4, "  10 forward and 0 backward calls")
    noted = str(replace(PASSED, findings=FINDINGS[2:3])).splitlines()
    assert noted[2] == "  contract: 1 note"
    assert noted[3] == "    NOTE: the same bits in every run: they differ by 1 ulp"


def test_what_has_no_spaces_is_not_cut():
    path = "/a/path" * 30
    assert path in str(replace(REPORT, diagnosis=(f"see {path} there",)))


def test_headlines_without_a_wrong_gradient():
    only = replace(PASSED, findings=FINDINGS, identities=IDENTITIES)
    assert str(only).startswith("FAIL: identities and contract\n")
    assert str(VARIANTS["unclear"]).startswith(
        "INCONCLUSIVE: no verdict on the gradient of gamma\n"
    )
    assert str(VARIANTS["nothing"]).startswith("INCONCLUSIVE: nothing was compared\n")
    doubt = Finding("smoothness", "no kink", "INCONCLUSIVE", "one at x[3]")
    assert str(replace(PASSED, findings=(doubt,))).startswith("INCONCLUSIVE: smoothness\n")


def test_resolution_is_the_coarsest_of_what_was_judged():
    assert REPORT.resolution == 3e-11
    assert PASSED.resolution == 3e-12
    assert VARIANTS["not given"].resolution == math.inf
    # Not checked is not judged: its resolution of infinity says nothing.
    assert GradientReport((RIGHT, NOT_GIVEN), 1).resolution == 3e-12


@pytest.mark.parametrize("name", VARIANTS)
def test_every_report_has_lines_json_and_a_picture(name, tmp_path):
    report = VARIANTS[name]
    assert max(map(len, str(report).splitlines())) <= 100
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == text
    held = json.loads(text, parse_constant=pytest.fail)
    assert held == report.as_dict()
    assert (held["verdict"], held["passed"]) == (report.verdict, report.passed)
    assert float(held["resolution"]) == report.resolution
    for result, argument in zip(report.arguments, held["arguments"], strict=True):
        np.testing.assert_equal(float(argument["actual"]), result.actual)
        assert argument["index"] == (None if result.index is None else list(result.index))
        assert len(argument["differences"]) == len(result.differences)
        assert len(argument["curve"]) == len(result.curve)


def test_json_takes_numbers_of_numpy():
    result = replace(RIGHT, actual=np.float64(2), checked=np.int64(4), index=(np.intp(1),))
    report = GradientReport((result,), np.int64(3), seconds=np.float32(0.5))
    held = json.loads(report.to_json())
    assert (held["arguments"][0]["actual"], held["arguments"][0]["checked"]) == (2.0, 4)
    assert held["seconds"] == 0.5


def test_the_picture_says_what_is_in_it():
    file = BytesIO()
    REPORT.plot(file, format="svg")
    # Letters are drawn as paths, with the words beside them as comments.
    words = file.getvalue().decode()
    for text in (
        "FAIL: gamma is applied twice.",
        "relative error",
        "step, in units of the argument's own scale",
        "dx: bound",
        "dx: backward is off",
    ):
        assert text in words, text


def test_without_matplotlib_the_cure_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "stablenorm\[plot\]"'):
        REPORT.plot(tmp_path / "report.png")
