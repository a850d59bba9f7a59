"""The page of `stablenorm run --html`: the sections that the terminal shows, with a picture, in one file."""

import datetime as dt
import io
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

import stablenorm
from stablenorm.figures import COLORS, new_figure
from stablenorm.text import Section, prose
from stablenorm.types import Array

_INK, _GRAY = "#333333", "#777777"
# The style sheet says what each color is on light and on dark paper.
_VARIABLES = {"ours": COLORS[0], "plain": COLORS[1], "ink": _INK, "muted": _GRAY}
_STYLE: Any = {
    "svg.fonttype": "none", "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlecolor": _INK, "text.color": _INK, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": _GRAY, "grid.alpha": 0.3, "axes.edgecolor": _GRAY,
    "axes.labelcolor": _GRAY, "xtick.color": _GRAY, "ytick.color": _GRAY, "xtick.minor.size": 0,
    "ytick.minor.size": 0, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
# Below this, in ulp, an element counts as exact; a logarithmic axis must start somewhere.
_LEAST = 1e-3


def make_page(title: str, about: str, verdict: str, sections: Sequence[Section]) -> bytes:
    """Return the page. Everything is escaped, so that nothing in a file is markup."""
    # Loaded when a page is wanted: no other command needs it.
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    origin = (
        f"{about}. {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC. stablenorm {stablenorm.__version__}, NumPy "
        f"{np.__version__}, Python {platform.python_version()}. {platform.machine()}, "
        f"{os.cpu_count()} processors, {platform.system()}."
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"prose": prose, "svg": _draw_errors}
    here = resources.files(__package__)
    template, style = (here.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    text = environment.from_string(template).render(
        style=style, title=title, origin=origin, verdict=verdict, sections=sections
    )
    # The name of a file may be no Unicode.
    return text.encode("utf-8", "replace")


def _draw_errors(errors: Mapping[str, tuple[Array, Array]], label: str) -> str:
    """Draw, for each output, the share of elements with at least a given error: ours and the plain formula's."""
    import matplotlib as mpl  # noqa: PLC0415

    # NaN and inf are drawn here: beyond all numbers.
    beyond = 100 * max(
        float(e.max(initial=1.0, where=np.isfinite(e))) for both in errors.values() for e in both
    )
    at, lines = np.geomspace(_LEAST, beyond, 400), -(-len(errors) // 2)
    looks = (COLORS[0], "-", "stablenorm"), (COLORS[1], "--", "plain formula")
    with mpl.rc_context(_STYLE | {"svg.hashsalt": label}):
        # The page makes the 720 units of a width pixels, and scrolls where there are fewer.
        figure = new_figure(10, 3.2 * lines)
        for place, (name, both) in enumerate(errors.items(), 1):
            axes = figure.add_subplot(lines, 2, place)
            for error, (color, style, what) in zip(both, looks, strict=True):
                ordered = np.sort(np.where(np.isfinite(error), error, beyond), axis=None)
                share = 100 * (1 - np.searchsorted(ordered, at) / ordered.size)
                axes.loglog(at, np.maximum(share, 1e-9), style, color=color, lw=2, label=what)
            axes.axvline(0.5, color=_INK, lw=1, ls=":", label="0.5 ulp")
            axes.set(xlim=(_LEAST, beyond), ylim=(1e-3, 150), title=name)
            axes.set(xlabel="error, ulp", ylabel="elements, %")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda v, _: prose(f"{v:g}" if v < 1e4 else f"{v:.0e}"))
        entries = axes.get_legend_handles_labels()
        figure.legend(*entries, loc="outside lower center", ncols=3, frameon=False)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r'<g id="[^"]*"', "<g", file.getvalue())
    for variable, color in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return f'<svg role="img" aria-label="{label}" ' + text.partition("<svg ")[2]
