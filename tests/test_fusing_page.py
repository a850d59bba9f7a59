"""docs/explanation/fusing.md: its tables are what the counts give, its names are in the source."""

import importlib
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "fusing.md"
KERNELS = ROOT / "src" / "stablenorm" / "cuda"
DRAWING = ROOT / "docs" / "figures" / "fusing_steps.svg"


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("fusing_counts")
    sys.modules.pop("fusing_counts")


def test_the_tables_are_what_is_counted_today(counts):
    # A change of the launch plan changes them: benchmarks/fusing_counts.py writes them again.
    page = PAGE.read_text("utf8")
    assert counts.fill(page) == page


def test_the_plain_form_is_counted_operation_by_operation(counts):
    # g; g xhat, its mean, the mean of g; dx in four; dy xhat, and the two sums over rows.
    passes = counts.count_passes()
    reads = [1, 2, 1, 1, 1, 1, 2, 1, 2, 1, 1]
    assert [p.reads for p in passes] == reads
    assert [p.writes for p in passes] == [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0]


def test_the_last_stage_moves_what_cannot_be_avoided(counts):
    last = counts.count_stages()[-1]
    assert (last.launches, last.reads, last.writes) == (1, 2, 1)


def test_the_order_of_float32_additions_shows(counts):
    distinct, spread = counts.count_orders(orders=50)
    assert distinct > 1
    # Two orders of 256 additions cannot be further apart than twice their bound.
    assert 0 < spread <= 2 * 255 * 2.0**-24


def test_the_functions_of_the_page_are_in_the_source():
    table = PAGE.read_text("utf8").partition("## Where to find it")[2]
    rows = re.findall(r"^\| .* \| (`.*`) \|$", table, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    names |= {"LN_RELEASE_FENCE", "LN_ACQUIRE_FENCE", "__ldcg", "add_to"}
    text = "".join(path.read_text("utf8") for path in sorted(KERNELS.glob("layer_norm*.cu*")))
    assert len(names) > 15
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


def test_the_drawing_stands_still_where_less_motion_is_asked_for():
    style = ET.parse(DRAWING).getroot().findtext("{*}style")
    before, _, moving = style.partition("@media (prefers-reduced-motion: no-preference)")
    # Whatever moves, and whatever is hidden at first, is within that question.
    assert "animation" in moving
    assert "opacity" in moving
    assert "animation" not in before
    assert "opacity" not in before


def test_the_pictures_are_there():
    pictures = re.findall(r"\]\(\.\./figures/(\S+)\)", PAGE.read_text("utf8"))
    assert len(pictures) == 5
    assert all((ROOT / "docs" / "figures" / name).stat().st_size for name in pictures)
