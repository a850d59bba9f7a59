"""The page of `run --html`: the story with its pictures, by a template that escapes everything."""

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from stablenorm.cli import parts
from stablenorm.cli.story import Story
from stablenorm.figures import COLORS, new_figure
from stablenorm.text import printable
from stablenorm.types import Array


def make_page(title: str, told: Story) -> bytes:
    """Return the page; no text from a file can act as markup."""
    from jinja2 import Environment  # noqa: PLC0415  # of the extra `plot`

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by stablenorm run --html: "
    made += ", ".join(f"{key} {value}" for key, value in parts.origin().items())
    pictures = {
        "right?": [_draw_errors(*item) for item in told.errors.items()],
        "harder": [_draw_digits(told.harder)] * bool(told.harder),
    }
    words = {"title": printable(title), "made": made, "pictures": pictures}
    return template.render(**words, **told._asdict()).encode()


def _draw_errors(name: str, both: tuple[Array, Array]) -> str:
    """Draw the share of elements with at least a given error: ours and the plain formula's."""
    shares = np.geomspace(1e-5, 1, 400)
    figure = new_figure(5, 3)
    axes = figure.subplots()
    looks = ("stablenorm", COLORS[0], "-"), ("plain NumPy", COLORS[1], "--")
    for error, (label, color, style) in zip(both, looks, strict=True):
        # Errors below 0.001 ulp are drawn there: the axis is logarithmic.
        drawn = np.nan_to_num(error, nan=np.inf, posinf=np.inf).clip(1e-3)
        at = np.quantile(drawn, 1 - shares, method="higher")
        axes.plot(at, 100 * shares, style, color=color, lw=2, label=label)
    axes.axvline(0.5, color="black", lw=1, ls=":", label="0.5 ulp")
    labels: dict[str, Any] = {"title": name, "xlabel": "error, ulp", "ylabel": "% of elements"}
    axes.set(xscale="log", yscale="log", xlim=(1e-3, None), **labels)
    return _as_svg(figure, axes)


def _draw_digits(harder: dict[str, dict[str, int]]) -> str:
    """Draw the digits that each method keeps."""
    figure = new_figure(5, 3)
    axes = figure.subplots()
    styles = "-", "--", "-."
    for i, method in enumerate(next(iter(harder.values()))):
        kept = [column[method] for column in harder.values()]
        axes.plot(list(harder), kept, styles[i], marker="o", color=COLORS[i], lw=2, label=method)
    axes.set(title="y on harder data", ylabel="correct digits", ylim=(-0.2, None))
    return _as_svg(figure, axes)


def _as_svg(figure: Any, axes: Any) -> str:
    import matplotlib as mpl  # noqa: PLC0415  # of the extra `plot`

    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    file = io.StringIO()
    # Text stays text: it can be read by a screen reader, and has the page's size.
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True)
    # Black becomes the page's text color.
    svg = file.getvalue().replace("#000000", "currentColor")
    return svg[svg.index("<svg") :]
