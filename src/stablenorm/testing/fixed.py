"""
Fixed inputs: with digests of their results, or with an element next to a midpoint.

The page "Hard inputs, the oracle" says how both are made.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import FORMATS, Format, parse
from stablenorm.records import Array
from stablenorm.testing.families import Case

_HERE = Path(__file__).parent
_FORMATS = dict(zip(("f16", "bf16", "f32", "f64"), FORMATS, strict=True))


def digest_inputs() -> dict[str, Case]:
    """Return the inputs by name, each a `Case`. They never change: a new one has a new name."""
    return {name: _make(4 * m, *name.split()) for m, name in enumerate(published_digests())}


def published_digests() -> dict[str, tuple[str, ...]]:
    """
    Return the digests of y, dx, dgamma and dbeta, by the name of the input.

    Each is the digest of an exact result, computed in integers and rounded once to nearest, ties to even.
    """
    # A line for each input. New inputs go to the end: the number of its line seeds an input.
    lines = (_HERE / "digests.txt").read_text("utf-8").splitlines()
    return {line[:27].rstrip(): tuple(line[28:].split()) for line in lines}


def digest(array: Array) -> str:
    """
    Return the first 12 hexadecimal digits of the SHA-256 of an array's bytes.

    The bytes are those of a little-endian machine; every NaN is the quiet one with its sign bit clear.
    """
    array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    size = array.dtype.itemsize
    return hashlib.sha256(array.view(f"u{size}").astype(f"<u{size}").tobytes()).hexdigest()[:12]


def _make(seed: int, kind: str, dtypes: str, shape: str) -> Case:
    of_x, of_gamma, of_dy = (_FORMATS[name] for name in (3 * dtypes.split("/"))[:3])
    rows, n = map(int, shape.split("x"))
    z, p, emin = _splitmix(seed, rows, n), of_x.digits, of_x.emin
    x = {
        "offset": 2.0 ** (p - 1) + z % 8,
        "last-bit": 1 + 2.0 ** (1 - p) * (z % 2),
        "tiny": np.ldexp(z % 16, emin - p + 1),
        "exponents": _plain(z, of_x, (z % (of_x.emax - emin)).astype(np.int64) + emin + 1),
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
    """Return ``k 2**(exponent - p)``, exactly, in float64; k is an integer of p bits drawn from z."""
    k = (z >> 63 - form.digits).astype(np.int64) - 2**form.digits
    scaled: Array = np.ldexp(k.astype(np.float64), exponent - form.digits)
    return scaled


class NearMidpoint(NamedTuple):
    """
    An input of a layer norm, and one element of an output, next to a midpoint.

    `x` and `dy` are (rows, n), `gamma` and `beta` (n,). The element of `output` ("y", "dx", "dgamma"
    or "dbeta") at the index `where` is `expected` if rounded correctly, ties to even. The exact value
    lies `distance` ulp above the midpoint, or below it if negative; 0.0 is a tie.
    """

    x: Array
    gamma: Array
    beta: Array
    eps: float
    dy: Array
    output: str
    where: tuple[int, ...]
    expected: Any
    distance: float


def near_midpoints() -> list[NearMidpoint]:
    """
    Return the stored elements: of all four outputs, in all four dtypes, and in mixtures.

    Elements of the same input follow one another and share its arrays.
    """
    elements = []
    for stored in json.loads((_HERE / "midpoints.json").read_text("utf-8")):
        pairs = (stored[name] for name in ("x", "gamma", "beta", "dy"))
        x, gamma, beta, dy = (np.array(numbers, parse(dtype)) for dtype, numbers in pairs)
        dtypes = {"y": x.dtype, "dx": x.dtype, "dgamma": gamma.dtype, "dbeta": beta.dtype}
        case = Case(x, gamma, beta, stored["eps"], dy)
        for output, where, number, distance in stored["elements"]:
            expected = dtypes[output].type(number)
            elements.append(NearMidpoint(*case, output, tuple(where), expected, distance))
    return elements
