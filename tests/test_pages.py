"""Generated pages: each carries the hash of its script, and holds what the script kept or counts."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS, DOCS = ROOT / "benchmarks", ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
STAMP = re.compile(r"<!-- written by benchmarks/(\S+) (\w+) -->")
STAMPS = [
    (page.relative_to(ROOT), *found)
    for page in PAGES
    for found in sorted(set(STAMP.findall(page.read_text("utf8"))))
]
# Written before there were stamps; the next run of its script, on a GPU, gives it one.
OLDER = {"docs/how-to/gpu.md"}


@pytest.fixture
def script(monkeypatch):
    """Import a script of the benchmarks, which import one another by their bare names."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in {path.stem for path in BENCHMARKS.glob("*.py")} - before:
        sys.modules.pop(name, None)


def read(page):
    return (DOCS / page).read_text("utf8")


def results(name):
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text("utf8"))


@pytest.mark.parametrize(("page", "name", "stamp"), STAMPS)
def test_a_page_is_as_old_as_its_script(script, page, name, stamp):
    assert (BENCHMARKS / name).exists()
    if script("page").fingerprint(name) != stamp:
        pytest.fail(f"benchmarks/{name} changed since it wrote {page}: run it again")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_generated_has_a_stamp(page):
    text = page.read_text("utf8")
    if str(page.relative_to(ROOT)) in OLDER:
        return
    assert STAMP.search(text) or not re.search(r":begin -->|(Measured|Generated) by `", text)


def test_words_are_not_what_a_script_does(script, monkeypatch, tmp_path):
    writer = script("page")
    monkeypatch.setattr(writer, "HERE", tmp_path)
    one, other = tmp_path / "one.py", tmp_path / "two.py"
    other.write_text("HEIGHT = 2\n")
    one.write_text('"""Some words."""\nfrom two import HEIGHT\n\nprint(HEIGHT + 1)\n')
    before = writer.fingerprint("one.py")
    one.write_text('"""Others."""\n\n# Why.\nfrom two import HEIGHT\nprint(HEIGHT + 1)\n')
    assert writer.fingerprint("one.py") == before
    other.write_text("HEIGHT = 3\n")
    assert writer.fingerprint("one.py") != before
    other.write_text("HEIGHT = 2\n")
    one.write_text("from two import HEIGHT\nprint(HEIGHT + 2)\n")
    assert writer.fingerprint("one.py") != before


def test_a_part_without_a_place_is_an_error(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- speed:begin -->\n")
    with pytest.raises(ValueError, match="speed:end"):
        script("page").put(page, {"speed": "text"}, "bench.py")


# docs/explanation/fusing.md: counted, and named as in the source.


def test_the_tables_are_what_is_counted_today(script):
    # A change of the launch plan changes them: benchmarks/fusing.py writes them again.
    page = read("explanation/fusing.md")
    assert [name for name, part in script("fusing").tables().items() if part not in page] == []


def test_the_plain_form_is_counted_operation_by_operation(script):
    # g; g xhat, its mean, the mean of g; dx in four; dy xhat, and the two sums over rows.
    passes = script("fusing").count_passes()
    assert [p.reads for p in passes] == [1, 2, 1, 1, 1, 1, 2, 1, 2, 1, 1]
    assert [p.writes for p in passes] == [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0]


def test_the_functions_of_the_page_are_in_the_source():
    table = read("explanation/fusing.md").partition("## Where to find it")[2]
    rows = re.findall(r"^\| .* \| (`.*`) \|$", table, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    sources = sorted((ROOT / "src").rglob("layer_norm*.cu*"))
    text = "".join(path.read_text("utf8") for path in sources)
    assert len(names) > 12
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


# docs/explanation/stability.md: what was measured, and ours still measures so.

# The half of a float32's last place, over the largest element, which may be just above a power of 2.
ROUNDED = 2.0**-24
# Of the experiments with a float32 result that does not cancel.
RELATIVE = ("offset", "saved", "range", "outlier_size", "cotangent", "rows", "published")


def test_the_tables_are_the_figures_kept(script):
    page, readme = read("explanation/stability.md"), (ROOT / "README.md").read_text("utf8")
    for text in script("stability").parts(results("stability")).values():
        assert text in page
    assert script("stability").readme_block(results("stability")) in readme


@pytest.mark.parametrize("name", RELATIVE)
def test_ours_was_rounded_and_somebody_was_not(name):
    table = results("stability")["tables"][name]
    assert max(table["stablenorm"].values()) <= ROUNDED
    # A hazard that costs nobody ten roundings would not belong on the page.
    others = [v for who, cells in table.items() if who != "stablenorm" for v in cells.values()]
    assert any(not value <= 10 * ROUNDED for value in others)


# The exact values of these take a second; of the others, more.
@pytest.mark.parametrize("name", ["offset", "constant", "cotangent", "contained"])
def test_ours_measures_today_what_the_page_says(script, name):
    table = next(t for t in script("stability_cases").tables() if t.name == name)
    # The reference: it need not be compiled, and its bits are those of the kernels.
    ours = script("stability_cases").load_ours("numpy")
    # The first column and the hardest. Correctly rounded: the same error, to its last digit,
    # on every machine.
    for column in (next(iter(table.columns)), list(table.columns)[-1]):
        expected = results("stability")["tables"][name]["stablenorm"][column]
        assert table.cell(ours, table.columns[column]) == expected


def test_the_experiment_sees_a_formula_that_fails(script):
    table = next(t for t in script("stability_cases").tables() if t.name == "offset")
    plain = script("peers").LOADERS["plain NumPy"](0)
    assert table.cell(plain, table.columns["10^6 + N"]) > 1000 * ROUNDED


# docs/evidence/gradient-checkers.md: the comparison, as far as it needs no peer.


@pytest.fixture
def shootout(script, monkeypatch):
    module = script("shootout")
    # The tests of check_layer_norm have the offsets; here they would take two minutes.
    counts = {"float64, (4, 8)": {"0": {"PASS": 1}}}
    monkeypatch.setattr(module, "measure_offsets", lambda _: counts)
    return module


def test_the_comparison_runs_without_peers(shootout, script, monkeypatch):
    monkeypatch.setattr(script("shootout_tools"), "LOADERS", {"torch": lambda: 1 / 0})
    monkeypatch.setattr(shootout, "SETTINGS", shootout.SETTINGS[:1])
    run = shootout.run(1, ["mean(g) missing", "eps omitted", "plain"])
    assert run["missing"] == {"torch": "ZeroDivisionError: division by zero"}
    verdicts = {}
    for cell in run["cells"]:
        verdicts[cell["tool"]] = verdicts.get(cell["tool"], "") + cell["verdicts"]
    # What the original of a rule lets pass, the rule lets pass.
    assert verdicts == {
        "check_layer_norm": "ffa",
        "check_gradients": "ffa",
        "Theano's rule": "faa",
        "rel < 1e-7": "ffa",
        "complex step": "ffa",
    }


def test_a_false_alarm_of_ours_is_an_error(shootout):
    found = results("shootout")
    assert shootout.false_alarms(found) == []
    cell = next(c for c in found["cells"] if (c["tool"], c["case"]) == ("check_gradients", "plain"))
    cell["verdicts"] += "f"
    assert shootout.false_alarms(found) == [cell]


def test_the_page_of_the_comparison_is_that_of_its_results(shootout):
    page = read("evidence/gradient-checkers.md")
    assert page.startswith(shootout.page(results("shootout")))
