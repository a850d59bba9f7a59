"""How the report writes numbers: three digits, powers of ten where they would be long."""

from __future__ import annotations

import math

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MINUS = "\N{MINUS SIGN}"


def number(value: float, digits: int = 3) -> str:
    """Write a number with so many digits, a power of ten where it would be long."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{_MINUS}∞"
    if value == 0:
        return "0"
    # Rounded first: 9.996 is 10.0 in three digits.
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if -4 < int(exponent) < 5:
        return f"{value:.{max(0, digits - 1 - int(exponent))}f}".replace("-", _MINUS)
    return f"{mantissa.replace('-', _MINUS)} \N{MULTIPLICATION SIGN} {power(int(exponent))}"


def power(exponent: int) -> str:
    """Write a power of ten."""
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def count(value: int) -> str:
    """Write a count, its thousands apart by a narrow space that does not break."""
    return f"{value:,}".replace(",", "\u202f")


def size(nbytes: float) -> str:
    """Write a number of bytes in the unit that fits."""
    return _in_units(nbytes, (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1)))


def seconds(value: float) -> str:
    """Write a time in the unit that fits."""
    return _in_units(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def shape(lengths: tuple[int, ...]) -> str:
    """Write a shape as one says it."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, lengths))


def _in_units(value: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, one = next((u for u in units if value >= u[1]), units[-1])
    return f"{value / one:.3g} {unit}"
