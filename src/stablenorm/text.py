"""What all reports do alike: lines of a width, plain data, JSON."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np


def wrapped(line: str, width: int = 100) -> list[str]:
    """
    Break a line at spaces, its rest indented by four more; what has no spaces is left whole.

    100: wide enough for two floats of 17 digits and what they are, narrow enough for a terminal, a
    log and a message of pytest.
    """
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def plain(value: Any) -> Any:
    """
    Return dicts, lists, str, int, float, bool and None for records, arrays and what is in them.

    What JSON has no number for is a string, in words that float() reads. A record's `z` is added.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    names = getattr(value, "_fields", ())
    if is_dataclass(value):
        names = tuple(field.name for field in fields(value))
    if names:
        names += ("z",) if hasattr(value, "z") else ()
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def to_json(held: dict[str, Any], path: Any = None) -> str:
    """Return plain data as JSON text, and write it to a file if one is named."""
    text = json.dumps(held, indent=1, allow_nan=False) + "\n"
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
