"""The picture of a diagnosis: how many rows lose how many bits, and how well rows are conditioned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_text import headline

if TYPE_CHECKING:
    from stablenorm.analysis.diagnosis import Diagnosis

# Okabe and Ito's, told apart by everybody; lines without color too, by their dashes and ends.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":", (0, (6, 2, 1, 2, 1, 2)), (0, (3, 1)))


def plot_diagnosis(diagnosis: Diagnosis, file: Any, format_: str | None) -> None:
    """Draw the diagnosis into a file, or an open one."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        msg = 'Matplotlib is needed to plot a diagnosis: pip install "stablenorm[plot]"'
        raise ImportError(msg) from error
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(headline(diagnosis), fontsize=12, fontweight="bold", parse_math=False)
    losses, powers = figure.subplots(2, 1, height_ratios=[3, 2])
    _draw_losses(losses, diagnosis)
    _draw_conditions(powers, diagnosis)
    figure.savefig(file, format=format_, dpi=150)


def _draw_losses(axes: Any, diagnosis: Diagnosis) -> None:
    """Draw, for each method, the share of rows that lose at least so many bits."""
    p = diagnosis.bits
    lost = diagnosis.summary.lost.values()
    for place, (title, counts) in enumerate(zip(diagnosis.methods.values(), lost, strict=True)):
        at_least = np.cumsum(_share(counts)[::-1])[::-1]
        axes.plot(
            at_least,
            ls=_DASHES[place % len(_DASHES)],
            color=_COLORS[place % len(_COLORS)],
            # The first ones wide, so that one beneath another is seen.
            lw=3.4 - 0.4 * place,
            label=title,
        )
    axes.set(xlim=(0, p), ylim=(0, 1.02), xlabel=f"bits of y lost, of {p}")
    axes.set_title("Share of rows that lose at least so many", fontsize=10, loc="left")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=4)


def _draw_conditions(axes: Any, diagnosis: Diagnosis) -> None:
    """Draw the share of rows by condition number, of y and of dx."""
    summary, p = diagnosis.summary, diagnosis.bits
    counts = {"y": summary.condition_y, "dx": summary.condition_dx}
    used = [int(np.flatnonzero(each).max(initial=0)) for each in counts.values()]
    last = max([*used, p])
    for place, (name, each) in enumerate(counts.items()):
        share = _share(each)[: last + 1]
        left = np.arange(len(share)) + 0.1 + 0.4 * place
        axes.bar(left, share, width=0.4, align="edge", color=_COLORS[place], label=name)
    axes.axvline(p, color="0.3", lw=1, ls="--")
    axes.annotate(
        f"2^{p}: no bit left if\nx itself was rounded",
        (p, 0.97),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color="0.3",
    )
    axes.set(
        xlim=(0, last + 1), ylim=(0, None), xlabel="condition number, from 2^k to 2^(k + 1): k"
    )
    axes.set_title("How much larger a relative error of x is in y and dx", fontsize=10, loc="left")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=4)


def _share(counts: Array) -> Array:
    return counts / max(int(counts.sum()), 1)
