"""Figures: colours that everybody tells apart, and a Matplotlib figure that needs no window."""

from typing import Any

# The palette of Okabe and Ito.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of that many inches; nothing but `savefig` draws it."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        msg = 'Matplotlib is needed to plot: pip install "stablenorm[plot]"'
        raise ImportError(msg) from error
    return Figure(figsize=(width, height), layout="constrained")
