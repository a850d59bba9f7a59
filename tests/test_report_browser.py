"""The report in Chromium, without a window: at two widths, light and dark."""

import html
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from untimed import make_quick

from stablenorm.cli.problem import read_problem
from stablenorm.report import make_page
from stablenorm.report.findings import compute

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_BROWSER = next(filter(None, map(shutil.which, _BROWSERS)), None)
pytestmark = pytest.mark.skipif(_BROWSER is None, reason=f"none of {', '.join(_BROWSERS)} is here")

_VIEWS = [(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")]
# Run in the page around the report's frames; the reports themselves are not changed by it.
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
  const shown = e => e.getClientRects().length > 0, style = e => view.getComputedStyle(e);
  const paper = rgb(style(root).backgroundColor);
  const drawn = [...page.querySelectorAll("svg")].filter(shown);
  const outside = [], faint = [];
  for (const picture of drawn) {
    const edge = picture.getBoundingClientRect();
    for (const word of picture.querySelectorAll("text")) {
      const box = word.getBoundingClientRect();
      if (box.left < edge.left - 1 || box.right > edge.right + 1 ||
          box.top < edge.top - 1 || box.bottom > edge.bottom + 1) outside.push(word.textContent);
    }
  }
  for (const e of page.querySelectorAll("p, h1, h2, a, th, td, caption, figcaption, svg text"))
    if (shown(e)) {
      const ratio = contrast(rgb(e.ownerSVGElement ? style(e).fill : style(e).color), paper);
      // AA of WCAG 2 for text of any size.
      if (ratio < 4.5) faint.push([e.textContent.slice(0, 40), ratio]);
    }
  return {
    paper, outside, faint, drawn: drawn.filter(e => e.clientWidth > 200 && e.clientHeight > 80).length,
    width: view.innerWidth, needed: root.scrollWidth,
    loaded: view.performance.getEntriesByType("resource").map(entry => entry.name),
  };
}
function measure() {
  const found = [...document.querySelectorAll("iframe")].map(probe);
  document.getElementById("found").textContent = JSON.stringify(found);
}
"""


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
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
        "--v=0", f"--user-data-dir={directory / 'profile'}", "--window-size=1400,2000", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [_BROWSER, *options, outer.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
        # It puts a socket there, whose path has 104 bytes at most.
        env={**os.environ, "TMPDIR": "/tmp"},
    )  # fmt: skip
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(html.unescape(found.group(1))), re.findall(r".*CONSOLE.*", done.stderr)


def _page(path):
    problem = read_problem(path, None, 0)
    return make_page(problem, compute(problem), lambda _: None)[0]


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """What is found in the report in each view, in that of a hard file, and in a faulty page."""
    folder = tmp_path_factory.mktemp("browser")
    hard = folder / ("a-very-long-name-without-a-space-" * 4 + "<b>&.npz")
    np.savez(hard, x=np.zeros((3, 8), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        bundled, zeros = _page(None), _page(hard)
    long = f'<style>html{{background:#fff}}</style><p style="white-space:nowrap">{"long" * 200}'
    words = '<svg width="300" height="100"><text x="290" y="50">leaves</text></svg>'
    frames = {view: (bundled, *view) for view in _VIEWS}
    frames["hard"] = (zeros, 390, "dark")
    frames["faulty"] = (f'{long}{words}<p style="color:#bbb">pale', 390, "light")
    found, complaints = _browse(folder, frames.values())
    assert complaints == []
    return dict(zip(frames, found, strict=True))


@pytest.mark.parametrize("view", [*_VIEWS, "hard"])
def test_the_page_fits_and_can_be_read(views, view):
    found = views[view]
    width, scheme = (390, "dark") if view == "hard" else view
    assert found["needed"] <= found["width"] == width
    assert found["loaded"] == []
    assert found["drawn"] == 2
    assert found["outside"] == []
    assert found["faint"] == []
    assert (sum(found["paper"]) > 600) == (scheme == "light")


def test_the_probe_sees_what_it_is_there_to_see(views):
    """Faults planted: a long word, words that leave a picture, pale letters."""
    found = views["faulty"]
    assert found["needed"] > 390
    assert found["outside"] == ["leaves"]
    assert [text for text, _ in found["faint"]] == ["pale"]
