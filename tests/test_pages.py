"""Generated pages: each carries the hash of the script that wrote it, and the script is still that."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STAMP = re.compile(r"<!-- written by benchmarks/(\S+) (\w+) -->")
STAMPS = [
    (page.relative_to(ROOT), *found)
    for page in PAGES
    for found in sorted(set(STAMP.findall(page.read_text("utf8"))))
]

# Written before there were stamps; the next run of their scripts gives them one.
OLDER = {"docs/how-to/gpu.md"}


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("page")
    sys.modules.pop("page")


@pytest.mark.parametrize(("page", "script", "stamp"), STAMPS)
def test_a_page_is_as_old_as_its_script(writer, page, script, stamp):
    assert (ROOT / "benchmarks" / script).exists()
    if writer.fingerprint(script) != stamp:
        pytest.fail(f"benchmarks/{script} changed since it wrote {page}: run it again")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_generated_has_a_stamp(page):
    text = page.read_text("utf8")
    if str(page.relative_to(ROOT)) in OLDER:
        return
    assert STAMP.search(text) or not re.search(r":begin -->|(Measured|Generated) by `", text)


def test_words_are_not_what_a_script_does(writer, monkeypatch, tmp_path):
    monkeypatch.setattr(writer, "HERE", tmp_path)
    script, other = tmp_path / "one.py", tmp_path / "two.py"
    other.write_text("HEIGHT = 2\n")
    script.write_text('"""Some words."""\nfrom two import HEIGHT\n\nprint(HEIGHT + 1)\n')
    before = writer.fingerprint("one.py")
    script.write_text('"""Others."""\n\n# Why.\nfrom two import HEIGHT\nprint(HEIGHT + 1)\n')
    assert writer.fingerprint("one.py") == before
    other.write_text("HEIGHT = 3\n")
    assert writer.fingerprint("one.py") != before
    other.write_text("HEIGHT = 2\n")
    script.write_text("from two import HEIGHT\nprint(HEIGHT + 2)\n")
    assert writer.fingerprint("one.py") != before


def test_a_part_without_a_place_is_an_error(writer, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- speed:begin -->\n")
    with pytest.raises(ValueError, match="speed:end"):
        writer.put(page, {"speed": "text"}, "bench.py")
