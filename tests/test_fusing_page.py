"""docs/explanation/fusing.md: its tables are what the counts give, its names are in the source."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "fusing.md"


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("fusing")
    sys.modules.pop("fusing")


def test_the_tables_are_what_is_counted_today(counts):
    # A change of the launch plan changes them: benchmarks/fusing.py writes them again.
    page = PAGE.read_text("utf8")
    assert [name for name, part in counts.tables().items() if part not in page] == []


def test_the_plain_form_is_counted_operation_by_operation(counts):
    # g; g xhat, its mean, the mean of g; dx in four; dy xhat, and the two sums over rows.
    passes = counts.count_passes()
    assert [p.reads for p in passes] == [1, 2, 1, 1, 1, 1, 2, 1, 2, 1, 1]
    assert [p.writes for p in passes] == [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0]


def test_the_functions_of_the_page_are_in_the_source():
    table = PAGE.read_text("utf8").partition("## Where to find it")[2]
    rows = re.findall(r"^\| .* \| (`.*`) \|$", table, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    sources = sorted((ROOT / "src").rglob("layer_norm*.cu*"))
    text = "".join(path.read_text("utf8") for path in sources)
    assert len(names) > 12
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []
