"""`stablenorm report`: a page that is whole, says what is true, and survives any input."""

import argparse
import importlib.util
import itertools
import os
import re
from html.parser import HTMLParser

import ml_dtypes
import numpy as np
import pytest

import stablenorm.report._findings as job
from stablenorm import backends
from stablenorm.cli import report as command
from stablenorm.cli.files import InputError, read_problem
from stablenorm.cost import _measure
from stablenorm.oracle import exact_layer_norm
from stablenorm.report import STEPS, _figures, _gather, gather, page
from stablenorm.report._numbers import number
from stablenorm.timing import Timing

X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
SVG = _figures.svg
_VOID = {"meta", "link", "input", "br", "img"}


def at_once(calls, **_):
    """Call each once, instead of timing it: the page, not its figures."""
    for call in calls.values():
        call()
    return {name: Timing(1e-3 * k, 0.9e-3 * k, 2e-3 * k, 5, 1) for k, name in enumerate(calls, 1)}


def shorten(patch):
    """Make pages quickly: nothing is compiled or timed, few elements are moved."""
    patch.setattr(backends, "_default", lambda: "numpy")
    patch.setattr(_gather, "_FAR", 2**14)
    patch.setattr(job, "_measure_time", lambda _: ({}, {}))
    patch.setattr(job, "_DIFFERENCE_SAMPLE", 24)
    patch.setattr(_measure, "measure_interleaved", at_once)
    patch.setattr(_measure, "_BACKENDS", dict.fromkeys(_measure._BACKENDS, "numpy"))
    patch.setattr(_measure, "_compiled", lambda: lambda *_: None)


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    shorten(monkeypatch)
    monkeypatch.setattr(
        _gather, "_measure", lambda *_: "the fused kernel cannot be loaded: planted"
    )
    monkeypatch.setattr(_figures, "svg", lambda _draw, _height, label, **_: {"wide": label})
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _drawn(monkeypatch):
    """Draw the pictures as well, which takes a second."""
    monkeypatch.setattr(_figures, "svg", SVG)
    monkeypatch.setattr(_figures, "WIDTHS", {"narrow": 344})


class Reader(HTMLParser):
    """Reads a page, and complains where browsers would silently repair it."""

    def __init__(self, source):
        super().__init__()
        self.open, self.ids, self.tags, self.faults, self.words = [], [], [], [], []
        self.feed(source)
        self.close()
        self.faults += [f"{tag} never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if len({name for name, _ in attrs}) < len(attrs):
            self.faults.append(f"an attribute twice in {tag}")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.faults.append(f"</{tag}> closes {self.open[-1:]}")
        else:
            self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def make(**arrays):
    """The page of these arrays."""
    np.savez("in.npz", **arrays)
    return make_of("in.npz")


def make_of(name):
    facts = gather(read_problem(command.Path(name), None, 0), lambda _: None)
    return facts, page(facts)


def run(*argv):
    """The command, as `main` calls it."""
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    arguments = parser.parse_args(["report", *argv])
    return arguments.job(arguments)


def cells(source, caption):
    """The rows of the table of that caption, as lists of words."""
    one = re.search(rf"<caption>{re.escape(caption)}</caption>(.*?)</table>", source, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", one.group(1), re.DOTALL)
    return [
        [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in rows
    ]


# The page as HTML.


@pytest.fixture(scope="module")
def bundled():
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        steps = []
        facts = gather(read_problem(None, None, 0), steps.append)
        return facts, page(facts), steps


def test_every_tag_is_closed_in_order_and_no_id_is_used_twice(bundled):
    reader = Reader(bundled[1])
    assert reader.faults == []
    assert len(set(reader.ids)) == len(reader.ids)


def test_the_page_needs_nothing_else_and_runs_nothing(bundled):
    tags = Reader(bundled[1]).tags
    assert "script" not in {tag for tag, _ in tags}
    for tag, attributes in tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:")), tag
    assert not re.search(r"url\((?!#)|@import|@font-face", bundled[1])
    assert "default-src 'none'" in bundled[1]


def test_headings_descend_in_order_and_pictures_and_tables_have_names(bundled):
    tags = Reader(bundled[1]).tags
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert dict(tags)["html"] == {"lang": "en"}
    assert all(attributes["aria-label"] for tag, attributes in tags if tag == "svg")
    count = [tag for tag, _ in tags].count
    assert count("table") == count("caption") > 4
    links = {a["href"][1:] for tag, a in tags if tag == "a"}
    assert links == {a["id"] for tag, a in tags if tag == "h2"}


def test_every_section_says_how_its_numbers_were_obtained(bundled):
    assert 6 < len(bundled[2]) <= STEPS
    sections = re.findall(r"<section.*?</section>", bundled[1], re.DOTALL)
    assert len(sections) == len(re.findall("<h2", bundled[1]))
    for one in sections:
        assert one.count('class="method"') + one.count('class="absent"') > 0, one[:80]


# What it says.


def test_the_errors_are_those_of_the_oracle(bundled):
    facts, source, _ = bundled
    problem = facts.problem
    exact = exact_layer_norm(problem.x, problem.gamma, problem.beta, problem.eps, problem.dy)
    ours = {name: output.array for name, output in facts.findings.outputs.items()}
    ours = {name: a.reshape(problem.x.shape) if a.ndim > 1 else a for name, a in ours.items()}
    errors = exact.ulp_errors(**ours)
    shown = {row[0]: row for row in cells(source, "Against the exact result")[1:]}
    for name, error in errors.items():
        assert shown[name][3] == f"{float(error.max()):.3f}"
        assert shown[name][6] == "PASS"


def test_the_row_that_stands_out_is_named():
    x = np.array(np.random.default_rng(1).standard_normal((9, 32)))
    x[6] += 1e5
    lines = cells(make(x=x)[1], "Over the rows of x")
    found = {line[0]: line for line in lines}
    assert found["mean"][-1] == "6"
    assert found["|mean| / standard deviation"][-1] == "6"


def test_a_failed_check_is_said_and_is_the_exit_status(monkeypatch, capsys):
    def spoiled(problem):
        results = _run_compute(problem)
        results["y"] = results["y"] + np.float32(1e-3)
        return results

    _run_compute = _gather.compute
    monkeypatch.setattr(_gather, "compute", spoiled)
    np.savez("in.npz", x=X)
    assert run("in.npz") == 1
    assert "A CHECK FAILED" in capsys.readouterr().out
    source = (command.Path("stablenorm-report.html")).read_text(encoding="utf-8")
    assert 'class="fail"' in source
    assert "A check failed" in source


def test_what_a_file_holds_is_never_markup():
    name = "<script>alert(1)<b> & $x$ [bold] `code` \"'.npz"
    np.savez(name, x=X)
    _, source = make_of(name)
    reader = Reader(source)
    assert reader.faults == []
    assert "script" not in {tag for tag, _ in reader.tags}
    assert "<script>alert(1)<b> & $x$ [bold] `code` \"'.npz" in "".join(reader.words)
    # A name that is no Unicode, with a control character in it.
    np.savez(name := os.fsdecode(b"x\xe9\x07.npz"), x=X)
    assert b"x\xef\xbf\xbd\xef\xbf\xbd" in make_of(name)[1].encode()


# Any input.


@pytest.mark.usefixtures("_drawn")
@pytest.mark.parametrize("kind", ["bfloat16", "float64"])
def test_every_dtype(kind):
    x = X.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    facts, source = make(x=x)
    assert facts.passed
    assert Reader(source).faults == []
    assert f"in {kind}:" in source


@pytest.mark.usefixtures("_drawn")
def test_rows_with_nan_are_left_out_and_said():
    x = X.copy()
    x[2, 1] = np.nan
    facts, source = make(x=x)
    assert facts.judged == 5
    assert facts.passed
    assert "1 rows that hold NaN or infinity, or are constant with eps = 0, are left out" in source
    found = {line[0]: line for line in cells(source, "Over the rows of x")}
    assert found["rows with NaN or infinity"][3] == "1"


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": np.full((2, 3), np.nan)}, "no row of x and dy has an exact result"),
        ({"x": X, "gamma": np.array([1, 2, np.inf, 4, 5.0])}, "gamma is not finite"),
        ({"x": X, "dy": np.full_like(X, np.inf)}, "no row of x and dy has an exact result"),
        ({"x": np.ones((2, 3)), "eps": 0.0}, "no row of x and dy has an exact result"),
    ],
)
def test_what_cannot_be_computed_says_why_in_its_place(arrays, reason):
    _, source = make(**arrays)
    reader = Reader(source)
    assert reader.faults == []
    assert source.count(f'<p class="absent">Not computed: {reason}') >= 2


@pytest.mark.usefixtures("_drawn")
def test_an_overflow_of_the_results_leaves_the_exact_part():
    x = np.array([[1e-40, 2e-40, 4e-40, -1e-40]], np.float32)
    facts, source = make(x=x, eps=0.0, dy=np.array([[1e3, -2e3, 1, 2]], np.float32))
    assert facts.findings.gradients is None
    assert "overflow, so that finite differences have nothing to compare" in source
    assert cells(source, "Against the exact result")


@pytest.mark.usefixtures("_drawn")
@pytest.mark.parametrize("x", [np.ones((1, 1)), np.arange(4.0), X[:1, :1], 1e300 * X.astype(float)])
def test_odd_shapes_and_sizes(x):
    facts, source = make(x=x)
    assert Reader(source).faults == []
    assert facts.passed


@pytest.mark.usefixtures("_drawn")
def test_of_many_rows_a_part_is_judged_and_said(monkeypatch):
    monkeypatch.setattr(_gather, "_ELEMENTS", 500)
    x = np.random.default_rng(0).standard_normal((1000, 5)).astype(np.float32)
    facts, source = make(x=x)
    assert facts.judged == 100
    assert "100 rows are taken, evenly spaced" in source
    assert "Each line is 11 rows" in source


def test_rows_are_summed_up_alike_whatever_the_block(monkeypatch):
    x = np.random.default_rng(0).standard_normal((100, 7)) + 5
    monkeypatch.setattr(_gather, "_BLOCK", 20)
    found = _gather.summarize(x)
    np.testing.assert_allclose(found.mean, x.mean(axis=1), rtol=1e-15)
    np.testing.assert_allclose(found.std, x.std(axis=1), rtol=1e-14)
    np.testing.assert_array_equal(found.high, x.max(axis=1))


def test_a_summary_of_the_largest_numbers_does_not_overflow():
    top = np.finfo(np.float64).max
    found = _gather.summarize(np.array([[top, -top, top, -top], [5.0, 5.0, 5.0, 5.0]]))
    assert found.std[0] == top
    assert found.std[1] == 0
    assert found.constant.tolist() == [False, True]


# Bad input: one line each.


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((0, 4))}, "x must have at least one row"),
        ({"x": np.arange(4)}, "x must be float16, bfloat16, float32 or float64, got int64"),
        ({"x": X, "gamma": np.ones(3, np.float32)}, r"gamma must have shape \(5,\)"),
        ({"x": X, "dy": X[:3]}, "dy must"),
    ],
)
def test_an_input_that_cannot_be_used_is_one_line(arrays, words):
    np.savez("in.npz", **arrays)
    with pytest.raises(InputError, match=words) as raised:
        run("in.npz")
    assert "\n" not in str(raised.value)
    assert not command.Path("stablenorm-report.html").exists()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("report.png", "must be a .html or .htm file"),
        ("there.html", "file that can be written"),
    ],
)
def test_a_page_that_could_not_be_written_is_refused_before_any_work(monkeypatch, out, words):
    monkeypatch.setattr(command, "gather", None)
    command.Path("there.html").mkdir()
    with pytest.raises(InputError, match=words):
        run("--out", out)


def test_the_page_replaces_its_predecessor_and_a_failure_leaves_it(monkeypatch, capsys):
    np.savez("in.npz", x=X)
    target = command.Path("stablenorm-report.html")
    target.write_text("before")
    assert run("in.npz") == 0
    after = target.read_text(encoding="utf-8")
    assert after.startswith("<!DOCTYPE html>")
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert target.absolute().as_uri() in said

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_page", broken)
    with pytest.raises(InputError, match="No space left"):
        run("in.npz")
    assert target.read_text(encoding="utf-8") == after
    assert sorted(p.name for p in command.Path().iterdir()) == ["in.npz", target.name]


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_what_is_not_installed_is_one_line_with_the_cure(monkeypatch, module):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else found(name)
    )
    with pytest.raises(InputError, match=re.escape('pip install "stablenorm[plot]"')):
        run()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-0.0, "0"),
        (9.996, "10.0"),
        (99999.6, "1.00 \N{MULTIPLICATION SIGN} 10⁵"),
        (-0.0012345, "\N{MINUS SIGN}0.00123"),
        (5e-324, "4.94 \N{MULTIPLICATION SIGN} 10⁻³²⁴"),
        (float("nan"), "NaN"),
        (float("-inf"), "\N{MINUS SIGN}∞"),
    ],
)
def test_numbers_are_written_to_three_digits(value, words):
    assert number(value) == words
