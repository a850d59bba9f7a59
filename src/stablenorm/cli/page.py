"""The page of `run --html`: the story with its pictures, by a template that escapes everything."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from stablenorm.cli import parts
from stablenorm.cli.story import Story
from stablenorm.figures import as_svg, draw_lines
from stablenorm.output import printable
from stablenorm.records import Array


def make_page(title: str, told: Story) -> bytes:
    """Return the page; no text from a file can act as markup."""
    from jinja2 import Environment  # noqa: PLC0415  # of the extra `plot`

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    origin = ", ".join(f"{key} {value}" for key, value in parts.origin().items())
    _, columns, *_ = (part.table[0] for part in told.parts if part.table)
    kept = {method: (columns[1:], digits) for method, digits in told.digits.items()}
    axes = {"xlabel": columns[0], "ylabel": "correct digits", "ylim": (-0.2, None)}
    pictures = {
        "right?": [_draw_errors(*item) for item in told.errors.items()],
        "harder": [as_svg(draw_lines("y on harder data", kept, **axes))],
    }
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by stablenorm run --html: {origin}"
    words = {"title": printable(title), "made": made, "pictures": pictures}
    return template.render(words, told=told).encode()


def _draw_errors(name: str, errors: dict[str, Array]) -> str:
    """Draw the share of elements with at least a given error."""
    shares, lines = np.geomspace(1e-5, 1, 400), {}
    for method, error in errors.items():
        # Errors below 0.001 ulp are drawn there: the axis is logarithmic.
        drawn = np.nan_to_num(error, nan=np.inf, posinf=np.inf).clip(1e-3)
        lines[method] = np.quantile(drawn, 1 - shares, method="higher"), 100 * shares
    scales = {"xscale": "log", "yscale": "log", "xlim": (1e-3, None)}
    figure = draw_lines(name, lines, **scales, xlabel="error, ulp", ylabel="% of elements")
    return as_svg(figure)
