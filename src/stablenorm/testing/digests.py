"""
Fixed inputs, and digests of what is made of them: two machines compare a few lines of text.

The inputs are made of integers, so that any language can make the same floats. Array number a of input
number m (x, gamma, beta, dy; both counted from 0) takes its elements, row by row, from SplitMix64
(Steele, Lea and Flood, OOPSLA 2014) seeded with 4 m + a. Of each 64-bit output z, the p + 1 upper bits
less ``2**p`` are an integer k, where p is the number of bits of the dtype's significand: 11, 8, 24 or
53. An element is ``k 2**(1 - p)``, between -2 and 2, and eps is 1e-5. But where the name of an input
begins with another word than "plain", x is

========= =========================================================================
offset    ``2**(p - 1) + z mod 8``: the mean has all but three of the bits
last-bit  ``1 + (z mod 2) 2**(1 - p)``, eps 0
tiny      ``z mod 16`` times the smallest subnormal, eps 0: dx overflows
exponents ``k 2**(e - p)`` with ``e = emin + 1 + z mod (emax - emin)``
signs     1, -1, 1, ..., eps 0: y is a sum of two floats, often a tie
pairs     as in "plain", but row 1 is row 0 again, with the opposite dy
constant  3
========= =========================================================================

A name goes on with the dtype, or those of x, of gamma and beta, and of dy; then rows and n.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format
from stablenorm.testing.families import Case
from stablenorm.types import Array

_FORMATS = {"f16": FLOAT16, "bf16": BFLOAT16, "f32": FLOAT32, "f64": FLOAT64}


def digest_inputs() -> dict[str, Case]:
    """
    Return the inputs by name: x, gamma, beta, eps and dy of each.

    They are the same for ever; another input would have another name.

    Examples
    --------
    >>> from stablenorm.testing import digest_inputs
    >>> digest_inputs()["constant f32 3x3"].gamma
    array([...], dtype=float32)
    """
    return {name: _make(4 * m, *name.split()) for m, name in enumerate(published_digests())}


def published_digests() -> dict[str, tuple[str, ...]]:
    """
    Return the digests of y, dx, dgamma and dbeta, by the name of the input.

    They are of the exact results, computed by integers and rounded once to nearest, ties to even.

    Examples
    --------
    >>> from stablenorm.testing import published_digests
    >>> published_digests()["constant f32 3x3"]
    ('24b4164b4b5e', '7695a30fde0a', '15ec7bf0b507', '35276260bebb')
    """
    # A line for each input; new ones go to the end, as their numbers are part of what they are.
    lines = Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
    return {line[:27].rstrip(): tuple(line[28:].split()) for line in lines}


def digest(array: Array) -> str:
    """
    Return the first 12 hexadecimal digits of the SHA-256 of an array's bytes.

    They are the bytes of a little-endian machine, and every NaN is the quiet one with its sign bit clear.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm.testing import digest
    >>> digest(np.zeros(2, np.float32))
    'af5570f5a181'
    """
    array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    size = array.dtype.itemsize
    return hashlib.sha256(array.view(f"u{size}").astype(f"<u{size}").tobytes()).hexdigest()[:12]


def _make(seed: int, kind: str, dtypes: str, shape: str) -> Case:
    of_x, of_gamma, of_dy = (_FORMATS[name] for name in (3 * dtypes.split("/"))[:3])
    rows, n = map(int, shape.split("x"))
    z, p, emin = _splitmix(seed, rows, n), of_x.digits, of_x.emin
    exponents = (z % (of_x.emax - emin)).astype(np.int64) + emin + 1
    x = {
        "offset": 2.0 ** (p - 1) + z % 8,
        "last-bit": 1 + 2.0 ** (1 - p) * (z % 2),
        "tiny": np.ldexp(z % 16, emin - p + 1),
        "exponents": _plain(z, of_x, exponents),
        "signs": np.resize([1.0, -1.0], (rows, n)),
        "constant": np.full((rows, n), 3.0),
    }.get(kind, _plain(z, of_x))
    gamma, beta = (_plain(_splitmix(seed + a, n), of_gamma).astype(of_gamma.dtype) for a in (1, 2))
    dy = _plain(_splitmix(seed + 3, rows, n), of_dy)
    if kind == "pairs":
        x[1], dy[1] = x[0], -dy[0]
    eps = 0.0 if kind in {"last-bit", "tiny", "signs"} else 1e-5
    return Case(x.astype(of_x.dtype), gamma, beta, eps, dy.astype(of_dy.dtype))


def _splitmix(seed: int, *shape: int) -> Array:
    """Return the first outputs of SplitMix64."""
    z: Array = np.arange(1, math.prod(shape) + 1, dtype=np.uint64).reshape(shape)
    z = z * 0x9E3779B97F4A7C15 + seed
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    z ^= z >> 31
    return z


def _plain(z: Array, form: Format, exponent: Any = 1) -> Array:
    """Return ``k 2**(exponent - p)`` in float64, which holds it."""
    k = (z >> 63 - form.digits).astype(np.int64) - 2**form.digits
    scaled: Array = np.ldexp(k.astype(np.float64), exponent - form.digits)
    return scaled
