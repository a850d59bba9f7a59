"""The four floating-point formats, once. Only the oracle has a table of its own."""

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray


class Format(NamedTuple):
    """A format: its normal numbers have a magnitude of 2**emin up to less than 2**(emax + 1)."""

    dtype: np.dtype[Any]
    # Bits of the significand, the leading one included.
    digits: int
    emin: int
    emax: int

    @property
    def decimals(self) -> int:
        """The decimal digits that every number has."""
        return int(self.digits * math.log10(2))

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2.0 - 2.0 ** (1 - self.digits)) * 2.0**self.emax


FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = FORMATS = (
    Format(np.dtype(np.float16), 11, -14, 15),
    Format(np.dtype(ml_dtypes.bfloat16), 8, -126, 127),
    Format(np.dtype(np.float32), 24, -126, 127),
    Format(np.dtype(np.float64), 53, -1022, 1023),
)

DTYPES = tuple(form.dtype.name for form in FORMATS)
NATIVE = frozenset(form.dtype for form in FORMATS)
# By what an array of either byte order has: dtype.type.
_BY_TYPE = {form.dtype.type: form for form in FORMATS}


def format_of(dtype: np.dtype[Any]) -> Format:
    """Return the format of one of the four dtypes."""
    return _BY_TYPE[dtype.type]


def is_supported(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is one of the four, in either byte order."""
    return dtype.type in _BY_TYPE


def check_dtype(name: str, array: NDArray[Any]) -> None:
    """Raise TypeError unless `array` holds one of the four floating types."""
    if not is_supported(array.dtype):
        kind = array.dtype.char
        is_argument = name.isidentifier() and name != "dtype"
        # An object and a longdouble may hold more digits than a float32.
        known = dict.fromkeys("?bhilqBHILQ", "float32") | dict.fromkeys("gO", "float64")
        cure = (
            f"; pass np.asarray({name}, np.{known[kind]})" if is_argument and kind in known else ""
        )
        msg = f"{name} must be float16, bfloat16, float32 or float64, got {array.dtype}{cure}"
        raise TypeError(msg)


def parse(dtype: DTypeLike) -> np.dtype[Any]:
    """Return a dtype as `numpy.dtype` does, which itself does not know the name bfloat16."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return BFLOAT16.dtype
    return np.dtype(dtype)


def count_digits(ulps: NDArray[Any], results: NDArray[Any]) -> int:
    """Return the correct decimal digits of the worst of some results, relative to the largest, given errors in ulp."""
    most, sizes = format_of(results.dtype).decimals, np.abs(results)
    if ulps.max(initial=0.0) <= 0.5:
        return most
    with np.errstate(all="ignore"):
        worst = (ulps * np.spacing(sizes).astype(float)).max() / sizes.astype(float).max()
        # NaN has no digit.
        return int(np.nan_to_num(-np.log10(worst)).clip(0, most))
