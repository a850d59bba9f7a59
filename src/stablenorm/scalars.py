"""Numbers that a caller gives, checked."""

import math
import operator
import sys
from textwrap import shorten
from typing import Any

import numpy as np


def check_eps(eps: Any) -> float:
    """Return `eps` as a float; TypeError if it is no number, ValueError if not finite and >= 0."""
    value = eps if type(eps) is float else real("eps", eps)
    if not 0.0 <= value < math.inf:
        msg = f"eps must be finite and >= 0, got {eps}"
        raise ValueError(msg)
    return value


def real(name: str, value: Any) -> float:
    """Return a number as a float; TypeError if it is none, or complex. Too large an int is inf."""
    if type(value) is float:
        return value
    try:
        if isinstance(value, (str, bytes)) or np.iscomplexobj(value):
            raise TypeError  # noqa: TRY301 - what float() would take, or warn of
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        msg = f"{name} must be a real number, got {shorten(repr(value), 60)}"
        raise TypeError(msg) from None


def shown(number: int) -> str:
    """Write an int of any length; Python writes no more than 4300 digits."""
    return str(number) if abs(number) < 10**20 else f"an int of {number.bit_length()} bits"


def check_count(
    name: str, value: Any, *, least: int, most: int = sys.maxsize, cure: str = ""
) -> int:
    """Return `value` as an int; TypeError if it is none, ValueError if it is not from `least` to `most`."""
    cure = cure and f"; {cure}"
    try:
        number = operator.index(value)
    except TypeError:
        msg = f"{name} must be an int, got {value!r:.60}{cure}"
        raise TypeError(msg) from None
    if number < least:
        msg = f"{name} must be at least {least}, got {shown(number)}{cure}"
        raise ValueError(msg)
    if number > most:
        msg = f"{name} must be at most {most}, got {shown(number)}{cure}"
        raise ValueError(msg)
    return number
