"""What is said of one row: a plain sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_methods import METHODS, title_of
from stablenorm.analysis._diagnose_sweep import working_dtype
from stablenorm.analysis.families import format_of

# From here on an offset is worth a word: two bits.
_OFFSET = 4.0

# Beside the two-pass.
_OTHERS = ("welford", "one-pass")


def advice(
    index: int, x: Array, mean: float, std: float, eps: float, names: Any, lost: Mapping[str, float]
) -> str:
    """Return the sentence on row `index`, whose elements are `x`."""
    return f"row {index}: {_about(x, mean, std, eps, set(names), lost)}"


def _about(
    x: Array, mean: float, std: float, eps: float, names: set[str], lost: Mapping[str, float]
) -> str:
    if "not finite" in names:
        places = np.flatnonzero(~np.isfinite(x.astype(np.float64)))
        many = "is" if places.size == 1 else "are"
        return (
            f"{places.size} of {x.size} elements {many} NaN or infinite, the first at "
            f"{places[0]}; y of the row is NaN in every layer norm"
        )
    if "undefined" in names:
        return f"constant ({float(x[0]):.6g}) and eps is 0: y is 0/0, NaN in every layer norm"
    if "constant" in names:
        return f"constant ({float(x[0]):.6g}), so y is 0 before beta; {_losses(x, lost)}"
    why = _reasons(x, mean, std, eps, names)
    return "; ".join([*why, _losses(x, lost)])


def _reasons(x: Array, mean: float, std: float, eps: float, names: set[str]) -> list[str]:
    """Say what is special about the numbers of the row."""
    working = np.dtype(working_dtype(x.dtype)).name
    wide = x.astype(np.float64)
    said = []
    if names & {"sum overflows", "squares overflow", "deviations overflow"}:
        what = "its sum overflows" if "sum overflows" in names else "squares overflow"
        said.append(f"max|x| = {np.abs(wide).max():.2g}, {what} in {working}")
    if "squares underflow" in names:
        said.append(f"std = {std:.2g}, squares underflow in {working}")
    if abs(mean) >= _OFFSET * std:
        said.append(f"|mean|/std = {abs(mean) / std:.2g}")
    if "dominating outlier" in names:
        away = np.abs(wide - mean)
        place = int(away.argmax())
        share = (away[place] / std) ** 2 / x.size
        # Never all of it.
        part = f"{share:.0%}" if share < 0.99 else "over 99%"
        said.append(f"element {place} ({wide[place]:.3g}) has {part} of the variance")
    if "var below eps" in names:
        said.append(f"var = {std * std:.2g} is below eps = {eps:.2g}")
    if "float16 overflows" in names and not said:
        said.append(f"mean = {mean:.2g}, std = {std:.2g}: its statistics overflow in float16")
    return said or [f"|mean|/std = {abs(mean) / std:.2g}"]


def _losses(x: Array, lost: Mapping[str, float]) -> str:
    p = format_of(x.dtype).p
    first = next(iter(METHODS))
    # Not those that keep fewer bits on every row, whatever is in it.
    worst = max(_OTHERS, key=lambda name: lost[name])
    said = [f"a {title_of(first, x.dtype)} loses {_bits(lost[first], p)} of y"]
    if round(lost[worst]) > round(lost[first]):
        said.append(f"{title_of(worst, x.dtype)}: {_bits(lost[worst], p)}")
    return "; ".join([*said, "stablenorm loses none"])


def _bits(lost: float, p: int) -> str:
    return f"{round(lost)} of {p} bits" if round(lost) else "no bit"
