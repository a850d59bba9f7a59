"""The page of `stablenorm run --html`: what the terminal shows, below a picture of the errors, in one file."""

import io
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape

import numpy as np
from rich import get_console

from stablenorm.cli.parts import origin
from stablenorm.figures import COLORS, new_figure
from stablenorm.text import printable
from stablenorm.types import Array

# Colors are the browser's own, light or dark as the reader's system is. Nothing is fetched, no script runs.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }}
body {{ max-width: 60rem; margin: auto; padding: 1rem; overflow-wrap: anywhere; }}
figure {{ margin: 2rem 0; }}
svg {{ width: 100%; height: auto; fill: currentColor; }}
pre {{ font: 0.9rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{origin}</p>
<figure>
{picture}
<figcaption>The share of elements whose error is at least as large as the horizontal axis says. Where a
line ends above the lowest share, the rest are NaN or infinite and should not be.</figcaption>
</figure>
<pre>{shown}</pre>
</body>
</html>
"""


def make_page(title: str, errors: Mapping[str, tuple[Array, Array]]) -> bytes:
    """Return the page. Everything is escaped, so that nothing in a file is markup."""
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by stablenorm run --html: "
    made += ", ".join(f"{what} {which}" for what, which in origin().items())
    shown = get_console().export_html(code_format="{code}", inline_styles=True)
    text = {"title": escape(printable(title)), "origin": escape(made), "shown": shown}
    return _PAGE.format(picture=_draw_errors(errors), **text).encode()


def _draw_errors(errors: Mapping[str, tuple[Array, Array]]) -> str:
    """Draw, for each output, the share of elements with at least a given error: ours and the plain formula's."""
    shares, lines = np.geomspace(1e-5, 1, 400), -(-len(errors) // 2)
    looks = ("stablenorm", COLORS[0], "-"), ("plain formula", COLORS[1], "--")
    figure = new_figure(10, 3.2 * lines)
    for place, (name, both) in enumerate(errors.items(), 1):
        axes = figure.add_subplot(lines, 2, place, title=name, xscale="log", yscale="log")
        for error, (what, color, style) in zip(both, looks, strict=True):
            at = np.quantile(np.nan_to_num(error, nan=np.inf), 1 - shares, method="higher")
            axes.plot(at, 100 * shares, style, color=color, lw=2, label=what)
        axes.axvline(0.5, color="black", lw=1, ls=":", label="0.5 ulp")
        # Below 0.001 ulp an element counts as exact; a logarithmic axis must start somewhere.
        axes.set(xlim=(1e-3, None), xlabel="error, ulp", ylabel="elements, %")
        axes.grid(alpha=0.3)
    entries = axes.get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=3, frameon=False)
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    # Black is what the page writes with.
    svg = file.getvalue().replace("#000000", "currentColor")
    return svg[svg.index("<svg") :]
