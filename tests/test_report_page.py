"""`stablenorm report`: a page that is whole, says what is true, and survives any input."""

import html
import importlib.util
import itertools
import os
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import ml_dtypes
import numpy as np
import pytest
from untimed import make_quick

import stablenorm.report.findings as job
from stablenorm import report
from stablenorm.cli import main
from stablenorm.cli import problem as reading
from stablenorm.cli import report as command
from stablenorm.cli.problem import read_problem
from stablenorm.oracle import exact_layer_norm
from stablenorm.report import STEPS, make_page
from stablenorm.report.sections import accuracy_section
from stablenorm.text import number, prose

X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, plain_terminal):  # noqa: ARG001
    make_quick(monkeypatch)


@pytest.fixture
def _undrawn(monkeypatch):
    """No pictures, which take a second."""
    monkeypatch.setattr(report, "as_svg", lambda _draw, label: label)


def page_of(path, step=lambda _: None, kind="layer"):
    """The report on a file, and what every element of it is: it is XML as well."""
    problem = read_problem(path, None, 0)._replace(kind=kind)
    source, passed = make_page(problem, job.compute(problem), step)
    assert passed
    elements = list(ET.fromstring(source).iter())
    return source, [(one.tag.rpartition("}")[2], dict(one.items())) for one in elements]


@pytest.mark.usefixtures("_undrawn")
def test_the_page_of_an_rms_norm_is_about_one():
    source, _ = page_of(None, kind="rms")
    for words in ("<h1>RMS normalization of", "check_rms_norm in float64", "rstd saved as float32"):
        assert words in source


def test_the_page_is_whole_needs_nothing_and_can_be_heard():
    steps = []
    source, tags = page_of(None, steps.append)
    assert len(steps) == STEPS
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert dict(tags)["html"] == {"lang": "en"}
    pictures = [attributes["aria-label"] for tag, attributes in tags if tag == "svg"]
    assert pictures == ["Accuracy", "Cost and time"]
    count = [tag for tag, _ in tags].count
    assert count("table") == count("caption") > 4
    links = {a["href"][1:] for tag, a in tags if tag == "a"}
    assert links == {a["id"] for tag, a in tags if tag == "h2"}
    assert source.count("<b>How obtained.</b>") == 4
    assert not count("script")
    for tag, attributes in tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            if name.rpartition("}")[2] in {"src", "href", "action"}:
                assert value.startswith(("#", "data:")), tag
    assert not re.search(r"url\((?!#)|@import|@font-face", source)
    assert "default-src 'none'" in source


# What it says.


def test_the_errors_are_those_of_the_oracle():
    np.savez("in.npz", x=X, gamma=X[0], beta=X[1])
    problem = read_problem(Path("in.npz"), None, 0)
    found = job.inspect(problem, job.compute(problem), lambda _: None)
    exact = exact_layer_norm(problem.x, problem.gamma, problem.beta, problem.eps, problem.dy)
    errors = exact.ulp_errors(**{name: output.array for name, output in found.outputs.items()})
    shown = {row[0]: row for row in accuracy_section(found).tables[0].rows}
    for name, error in errors.items():
        assert shown[name][3] == f"{float(error.max()):.3f}"
        assert shown[name][5] == "PASS"


@pytest.mark.usefixtures("_undrawn")
def test_a_failed_check_is_said_and_is_the_exit_status(monkeypatch, capsys):
    def spoiled(problem):
        results = compute(problem)
        return results | {"y": results["y"] + np.float32(1e-3)}

    compute = reading.compute
    monkeypatch.setattr(reading, "compute", spoiled)
    np.savez("in.npz", x=X)
    target = Path("stablenorm-report.html")
    target.write_text("before")
    assert main(["report", "in.npz"]) == 1
    said = capsys.readouterr().out
    assert "A CHECK FAILED" in said
    assert target.absolute().as_uri() in said
    assert said.count("\n") == 1
    source = target.read_text(encoding="utf-8")
    assert source.startswith("<!DOCTYPE html>")
    assert 'class="fail"' in source
    assert "A check failed" in source


@pytest.mark.usefixtures("_undrawn")
def test_what_a_file_holds_is_never_markup():
    name = "<script>alert(1)<b> & $x$ [bold] `code` \"'.npz"
    np.savez(name, x=X)
    source, tags = page_of(Path(name))
    assert not {"script", "b"} & {tag for tag, _ in tags[:20]}
    assert name in html.unescape(source)
    # A name that is no Unicode.
    name = Path(os.fsdecode(b"x\xe9.npz"))
    np.savez(name, x=X)
    assert "<h1>Layer normalization of x?.npz" in page_of(name)[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-0.25, "\N{MINUS SIGN}0.25"),
        (9999.6, "10000"),
        (2e5, "2 \N{MULTIPLICATION SIGN} 10\N{SUPERSCRIPT FIVE}"),
        (1e-12, "10\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_written_to_three_digits(value, words):
    assert prose(number(value)) == words


# Any input.


@pytest.mark.parametrize(
    "x",
    [
        X.astype(ml_dtypes.bfloat16),
        *(np.ones((1, 1)), np.arange(4.0), 1e300 * X.astype(float), 0 * X),
    ],
)
def test_every_dtype_and_odd_shapes_and_sizes(x, request):
    if x.size > 1:
        # The pictures are of errors, of which a single element, which is beta, has the oddest.
        request.getfixturevalue("_undrawn")
    np.savez("in.npz", x=x)
    assert f"in {x.dtype} (" in page_of(Path("in.npz"))[0]


def test_an_overflow_or_a_missing_kernel_leaves_the_rest(monkeypatch):
    def unmeasured(*_, **__):
        msg = "planted"
        raise ImportError(msg)

    monkeypatch.setattr(report, "measure_costs", unmeasured)
    x = np.array([[1e-40, 2e-40, 4e-40, -1e-40]], np.float32)
    np.savez("in.npz", x=x, eps=0.0, dy=np.array([[1e3, -2e3, 1, 2]], np.float32))
    source, _ = page_of(Path("in.npz"))
    assert "an output overflows, and nothing can be compared" in source
    assert "the fused kernel: planted" in source
    assert "Against the exact result" in source


# Bad input: one line each.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nan.npz"], "must be finite to be checked, got nan at [0, 0]; stablenorm diagnose names"),
        (["--out", "report.png"], "must be a .html or .htm file"),
        (["--out", "there.html"], "must be a new name, got the directory there.html; remove"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(command, "make_page", None)
    np.savez("nan.npz", x=X * np.nan)
    Path("there.html").mkdir()
    assert main(["report", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not Path("stablenorm-report.html").exists()


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_what_is_not_installed_is_one_line_with_the_cure(monkeypatch, capsys, module):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else found(name)
    )
    assert main(["report"]) == 2
    assert 'pip install "stablenorm[plot]"' in capsys.readouterr().err
