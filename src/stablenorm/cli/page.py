"""The page of `stablenorm run --html`: the sections that the terminal shows, with pictures, in one file."""

import datetime as dt
import io
import os
import platform
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import numpy as np

import stablenorm
from stablenorm.figures import COLORS, new_figure
from stablenorm.text import Section, prose

INK, _GRAY = "#333333", "#777777"
# The style sheet says what each color is on light and on dark paper.
_VARIABLES = {"ours": COLORS[0], "plain": COLORS[1], "ink": INK, "muted": _GRAY}
_STYLE: Any = {
    "svg.fonttype": "none", "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlecolor": INK, "text.color": INK, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": _GRAY, "grid.alpha": 0.3, "axes.edgecolor": _GRAY,
    "axes.labelcolor": _GRAY, "xtick.color": _GRAY, "ytick.color": _GRAY, "xtick.minor.size": 0,
    "ytick.minor.size": 0, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def make_page(title: str, about: str, abstract: str, sections: Sequence[Section]) -> bytes:
    """Return the page. Everything is escaped, so that nothing in a file is markup."""
    # Loaded when a page is wanted: no other command needs it.
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    origin = (
        f"{about}. {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC. stablenorm {stablenorm.__version__}, NumPy "
        f"{np.__version__}, Python {platform.python_version()}. {platform.machine()}, "
        f"{os.cpu_count()} processors, {platform.system()}."
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"prose": prose, "svg": _as_svg}
    here = resources.files(__package__)
    template, style = (here.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    text = environment.from_string(template).render(
        style=style, title=title, origin=origin, abstract=abstract, sections=sections
    )
    # The name of a file may be no Unicode.
    return text.encode("utf-8", "replace")


def _as_svg(draw: Callable[[Any], None], label: str) -> str:
    """Return what `draw` draws on a figure as SVG, in the page's colors and numbers."""
    import matplotlib as mpl  # noqa: PLC0415

    # The salt makes the ids of what is referred to, so that no two pictures share one.
    with mpl.rc_context(_STYLE | {"svg.hashsalt": label}):
        # The page makes the 720 units of a width pixels, and scrolls where there are fewer.
        figure = new_figure(10, 5)
        draw(figure)
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda v, _: prose(f"{v:g}" if v < 1e4 else f"{v:.0e}"))
        entries = figure.axes[0].get_legend_handles_labels()
        figure.legend(*entries, loc="outside lower center", ncols=3, frameon=False)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r'<g id="[^"]*"', "<g", file.getvalue())
    for variable, color in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return f'<svg role="img" aria-label="{label}" ' + text.partition("<svg ")[2]
