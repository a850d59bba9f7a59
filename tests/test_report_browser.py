"""The report in Chromium, driven headless: at two widths, light and dark, without a complaint."""

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stablenorm._files import read_problem
from stablenorm.report_page import _gather, gather, page

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_BROWSER = next(filter(None, map(shutil.which, _BROWSERS)), None)
pytestmark = pytest.mark.skipif(_BROWSER is None, reason=f"none of {', '.join(_BROWSERS)} is here")

_VIEWS = [(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")]

# Run in the page around the report's frame; the report itself is not changed by it.
_PROBE = r"""
const rgb = text => text.match(/[\d.]+/g).slice(0, 3).map(Number);
const light = color => color.map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => {
  const [x, y] = [light(a), light(b)].sort((p, q) => p - q);
  return (y + 0.05) / (x + 0.05);
};
function probe(frame) {
  const view = frame.contentWindow, page = view.document, root = page.documentElement;
  const shown = e => e.getClientRects().length > 0;
  const style = e => view.getComputedStyle(e);
  const paper = rgb(style(root).backgroundColor);
  const drawn = [...page.querySelectorAll("svg")].filter(shown);
  const outside = [], crossing = [], faint = [];
  for (const picture of drawn) {
    const edge = picture.getBoundingClientRect();
    const words = [...picture.querySelectorAll("text")];
    const boxes = words.map(word => word.getBoundingClientRect());
    boxes.forEach((box, i) => {
      if (box.left < edge.left - 1 || box.right > edge.right + 1 ||
          box.top < edge.top - 1 || box.bottom > edge.bottom + 1)
        outside.push(words[i].textContent);
      boxes.slice(0, i).forEach((other, j) => {
        if (box.left < other.right - 1 && other.left < box.right - 1 &&
            box.top < other.bottom - 4 && other.top < box.bottom - 4)
          crossing.push(words[j].textContent + " / " + words[i].textContent);
      });
    });
  }
  const clipped = [...page.querySelectorAll("h1, h2, p, li, caption, figcaption, code, a, label")]
    .filter(e => shown(e) && !e.closest(".scroll"))
    .filter(e => e.getBoundingClientRect().right > view.innerWidth + 1 ||
                 (style(e).display !== "inline" && e.scrollWidth > e.clientWidth + 1))
    .map(e => e.textContent);
  for (const e of page.querySelectorAll("p, h1, h2, a, th, td, caption, figcaption, svg text"))
    if (shown(e)) {
      const color = rgb(e.ownerSVGElement ? style(e).fill : style(e).color);
      const ratio = contrast(color, paper);
      // AA of WCAG 2 for text of any size.
      if (ratio < 4.5) faint.push([e.textContent.slice(0, 40), ratio]);
    }
  for (const e of page.querySelectorAll("svg rect, svg circle, svg polyline, svg .range"))
    if (shown(e)) {
      const filled = e.matches("rect, circle:not(.hollow)");
      const ratio = contrast(rgb(filled ? style(e).fill : style(e).stroke), paper);
      // And for what is no text.
      if (ratio < 3) faint.push([e.outerHTML.slice(0, 60), ratio]);
    }
  return {
    paper, drawn: drawn.length, outside, crossing, clipped, faint,
    width: view.innerWidth, needed: root.scrollWidth,
    empty: drawn.filter(e => e.clientWidth < 200 || e.clientHeight < 80).length,
    loaded: view.performance.getEntriesByType("resource").map(entry => entry.name),
    unfocused: [...page.querySelectorAll(".scroll")].filter(e => e.tabIndex !== 0).length,
  };
}
function measure() {
  const frames = [...document.querySelectorAll("iframe")];
  const found = frames.map(probe);
  // The choice of colors: the dark one of a frame that is light, and back.
  const chosen = frames[0].contentWindow.document;
  chosen.getElementById("theme-dark").click();
  const style = frames[0].contentWindow.getComputedStyle(chosen.documentElement);
  found[0].chosen = rgb(style.backgroundColor);
  document.getElementById("found").textContent = JSON.stringify(found);
}
"""


def _page_tests():
    """Return the module beside this one: tests are no package."""
    name = "report_page_for_browser"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, Path(__file__).with_name("test_report_page.py")
        )
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_shorten = _page_tests().shorten


@pytest.fixture(scope="module")
def small_report():
    """The report on the bundled data, its timings short."""
    with pytest.MonkeyPatch.context() as patch:
        _shorten(patch)
        return page(gather(read_problem(None, None, 0), lambda _: None))


def _browse(directory, frames):
    """Show pages in frames of given widths and color schemes; return what is found in each."""
    held = "".join(
        f'<iframe style="border:0;height:9000px;width:{width}px;color-scheme:{scheme}" '
        f'srcdoc="{html.escape(text)}"></iframe>'
        for text, width, scheme in frames
    )
    outer = directory / "outer.html"
    outer.write_text(
        f'<!DOCTYPE html><html><head><meta charset="utf-8"></head><body>{held}<pre id="found"></pre>'
        f"<script>{_PROBE}; onload = measure;</script></body></html>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            _BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={directory / 'profile'}",
            "--enable-logging=stderr",
            "--v=0",
            "--window-size=1400,2000",
            "--dump-dom",
            outer.as_uri(),
        ],
        # The path of a socket has 104 bytes at most, and TMPDIR may have as many.
        env={**os.environ, "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    complaints = re.findall(r".*CONSOLE.*", done.stderr)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(html.unescape(found.group(1))), complaints


@pytest.fixture(scope="module")
def views(small_report, tmp_path_factory):
    frames = [(small_report, width, scheme) for width, scheme in _VIEWS]
    found, complaints = _browse(tmp_path_factory.mktemp("browser"), frames)
    return dict(zip(_VIEWS, found, strict=True)), complaints


def test_the_console_stays_empty(views):
    assert views[1] == []


@pytest.mark.parametrize("view", _VIEWS)
def test_nothing_is_loaded(views, view):
    assert views[0][view]["loaded"] == []


@pytest.mark.parametrize("view", _VIEWS)
def test_the_page_never_scrolls_sideways(views, view):
    found = views[0][view]
    assert found["width"] == view[0]
    assert found["needed"] <= found["width"]
    assert found["clipped"] == []


@pytest.mark.parametrize("view", _VIEWS)
def test_pictures_have_a_size_and_their_words_are_whole_and_apart(views, view):
    found = views[0][view]
    assert found["drawn"] == 6
    assert found["empty"] == 0
    assert found["outside"] == []
    assert found["crossing"] == []


@pytest.mark.parametrize("view", _VIEWS)
def test_everything_stands_out_from_the_paper(views, view):
    found = views[0][view]
    assert found["faint"] == []
    assert (sum(found["paper"]) > 600) == (view[1] == "light")


def test_tables_can_be_scrolled_by_keyboard(views):
    assert all(found["unfocused"] == 0 for found in views[0].values())


def test_the_reader_can_choose_dark(views):
    found = views[0][390, "light"]
    assert sum(found["paper"]) > 600
    assert sum(found["chosen"]) < 200


def test_the_probe_sees_what_it_is_there_to_see(small_report, tmp_path):
    """Faults planted: a long word, a remote picture, words that leave and cross, pale letters."""
    faults = {
        "long": '<p style="white-space:nowrap">' + "long" * 200 + "</p>",
        "remote": '<img src="http://localhost:9/none.png" alt="">',
        "words": '<svg width="300" height="100"><text x="290" y="50">leaves</text>'
        '<text x="10" y="50">these</text><text x="15" y="52">cross</text></svg>',
        "pale": '<p style="color:#bbb">pale</p>',
    }
    # Styles of elements need a page without the policy; the picture needs the policy.
    free = re.sub(r"<meta http-equiv[^>]*>", "", small_report)
    frames = [
        (
            (small_report if name == "remote" else free).replace("</main>", f"{fault}</main>"),
            390,
            "light",
        )
        for name, fault in faults.items()
    ]
    found, complaints = _browse(tmp_path, frames)
    long, _, words, pale = found
    assert long["needed"] > 390
    assert len(long["clipped"]) == 1
    assert any("Content Security Policy" in line for line in complaints)
    assert words["outside"] == ["leaves"]
    assert words["crossing"] == ["these / cross"]
    assert [text for text, _ in pale["faint"]] == ["pale"]


@pytest.mark.parametrize("kind", ["nan", "one", "huge"])
def test_unusual_data_make_a_page_as_well(kind, tmp_path, monkeypatch):
    _shorten(monkeypatch)
    monkeypatch.setattr(_gather, "_cost", lambda *_: "not here")
    x = {
        "nan": np.full((3, 8), np.nan, np.float32),
        "one": np.ones((1, 1)),
        "huge": 1e300 * np.random.default_rng(0).standard_normal((300, 5)),
    }[kind]
    name = tmp_path / ("a-very-long-name-without-a-space-" * 4 + "<b>&.npz")
    np.savez(name, x=x)
    text = page(gather(read_problem(name, None, 0), lambda _: None))
    (found,), complaints = _browse(tmp_path, [(text, 390, "dark")])
    assert complaints == []
    assert found["needed"] <= 390
    for fault in ("outside", "crossing", "clipped", "faint"):
        assert found[fault] == [], fault
