"""Text of all reports: numbers, lines of a width, plain data, JSON."""

import json
import math
import os
import secrets
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def number(value: float) -> str:
    """Write three digits; of 1000 to 99 999, all digits before the point."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e5 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Write three digits and the unit, with the prefix that fits."""
    prefix = next((p for p, size in _PREFIXES.items() if value >= size), "")
    return f"{value / _PREFIXES[prefix]:.3g} {prefix}{unit}"


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape as a product; the shape of a number, which has no axes, is "()"."""
    return " x ".join(map(str, shape)) or "()"


def described(result: Any) -> str:
    """Say what a function returned."""
    kind = type(result).__name__
    if isinstance(result, np.ndarray):
        return f"one array of shape {shape_text(result.shape)}"
    if isinstance(result, Mapping):
        return f"{kind} of {', '.join(map(str, result))}"
    return f"{kind} of {len(result)}" if isinstance(result, (tuple, list)) else kind


def printable(text: str, keep: str = "\n\t") -> str:
    """Escape characters that a terminal would obey or cannot show, except those in `keep`."""
    shown = (c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def wrapped(line: str, width: int = 100) -> list[str]:
    """
    Break a line at spaces and indent its rest by four more; long words are left whole.

    100: wide enough for two floats of 17 digits and their names, narrow enough for a terminal, a
    log and a message of pytest.
    """
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return filled(line, width, indent)


def filled(line: str, width: int, indent: str = "") -> list[str]:
    """Break a line at spaces."""
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write rows of cells as lines: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def plain(value: Any) -> Any:
    """
    Return records and arrays as dicts, lists, str, int, float, bool and None.

    NaN and infinities, which JSON lacks, become strings that float() reads. A record's `z` is added.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if is_dataclass(value) or hasattr(value, "_asdict"):
        fields = vars(value) if is_dataclass(value) else value._asdict()
        value = fields | ({"z": value.z} if hasattr(value, "z") else {})
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def to_json(data: dict[str, Any], path: Any = None) -> str:
    """Return plain data as JSON text, and write it to a file if one is named."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))
    return text


def write_whole(path: Any, write: Callable[[Any], object]) -> None:
    """Call ``write(file)`` on a new file beside `path`, if one is named, then rename it."""
    if path is None:
        return
    # A new name each time: if `path` is a link, its target is never written.
    beside = Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(4)}.part")
    with beside.open("xb") as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
