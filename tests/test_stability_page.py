"""docs/explanation/stability.md: its tables are what was measured, and ours still measures so."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "stability.md"
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "stability.json").read_text("utf8"))
# The half of a float32's last place, over the largest element, which may be just above a power of 2.
ROUNDED = 2.0**-24


@pytest.fixture
def stability(monkeypatch):
    """The benchmark's modules, by name."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module
    for name in {n for n in sys.modules if n.startswith(("stability", "page", "peers"))} - before:
        sys.modules.pop(name)


def test_the_tables_are_the_figures_kept(stability):
    page, readme = PAGE.read_text("utf8"), (ROOT / "README.md").read_text("utf8")
    for text in stability("stability").parts(RESULTS).values():
        assert text in page
    assert stability("stability").readme_block(RESULTS) in readme


# Of the experiments with a float32 result that does not cancel.
RELATIVE = ("offset", "saved", "range", "outlier_size", "cotangent", "rows", "published")


@pytest.mark.parametrize("name", RELATIVE)
def test_ours_was_rounded_and_somebody_was_not(name):
    table = RESULTS["tables"][name]
    assert max(table["stablenorm"].values()) <= ROUNDED
    # A hazard that costs nobody ten roundings would not belong on the page.
    others = [v for who, cells in table.items() if who != "stablenorm" for v in cells.values()]
    assert any(not value <= 10 * ROUNDED for value in others)


# The exact values of these take a second; of the others, more.
@pytest.mark.parametrize("name", ["offset", "constant", "cotangent", "contained"])
def test_ours_measures_today_what_the_page_says(stability, name):
    table = next(t for t in stability("stability_cases").tables() if t.name == name)
    # The reference: it need not be compiled, and its bits are those of the kernels.
    ours = stability("stability_cases").load_ours("numpy")
    # The first column and the hardest. Correctly rounded: the same error, to its last digit,
    # on every machine.
    for column in (next(iter(table.columns)), list(table.columns)[-1]):
        expected = RESULTS["tables"][name]["stablenorm"][column]
        assert table.cell(ours, table.columns[column]) == expected


def test_the_experiment_sees_a_formula_that_fails(stability):
    table = next(t for t in stability("stability_cases").tables() if t.name == "offset")
    plain = stability("peers").LOADERS["plain NumPy"](0)
    assert table.cell(plain, table.columns["10^6 + N"]) > 1000 * ROUNDED
