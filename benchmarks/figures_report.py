"""
The picture of docs/how-to/report.md: a report on the bundled data, as two screens show it.

Chromium draws it, without a window: dark at the width of a telephone, and light beside it. Half a
minute, nearly all of it the report.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import figures

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Pixels: a telephone, the text of the report with its margins, and the top of both.
TELEPHONE, SCREEN, HEIGHT, GAP = 390, 800, 1100, 16
PAIR = """<!doctype html><meta charset="utf-8"><title>Two screens</title>
<body style="margin:0;display:flex;gap:{gap}px;background:#d8d4cb">
<iframe style="border:0;width:{telephone}px;height:{height}px;color-scheme:dark" src="report.html"></iframe>
<iframe style="border:0;width:{screen}px;height:{height}px;color-scheme:light" src="report.html"></iframe>
"""


def main() -> None:
    """Write a report, and take the picture."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"figures_report: one of {', '.join(BROWSERS)} is needed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = ["-m", "stablenorm", "report", "--out", str(folder / "report.html")]
        subprocess.run([sys.executable, *report], check=True)
        pair = folder / "pair.html"
        pair.write_text(
            PAIR.format(gap=GAP, telephone=TELEPHONE, screen=SCREEN, height=HEIGHT), encoding="utf8"
        )
        picture = figures.FIGURES / "report_views.png"
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            f"--user-data-dir={folder / 'browser'}", f"--screenshot={picture}",
            f"--window-size={TELEPHONE + GAP + SCREEN},{HEIGHT}", pair.as_uri(),
        ]  # fmt: skip
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
