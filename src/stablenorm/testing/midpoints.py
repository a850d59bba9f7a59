"""
Elements that lie next to the midpoint of two floats: what tells correct rounding from nearly correct.

Where the exact value of an element is within 1e-8 ulp of the midpoint of two neighbouring floats, an
error of 1e-8 ulp before the last rounding returns the wrong one of the two. Such elements are found
by a search. y, dx and dgamma are affine in each element of gamma or dy, so in its significand G the
element is ``(A + G B) ulp``, and the G that brings the fraction of ``A + G B`` to one half is found
as in Euclid's algorithm. The p bits of G reach about ``2**-p`` ulp: 1e-17 by a float64, 1e-8 by a
float32, 6e-5 by a float16 and 5e-4 by a bfloat16. Each dbeta is a float, half its ulp, and something
far smaller. Exact ties are of rows whose xhat is rational.

`near_midpoints` reads those that are kept in midpoints.json beside this module, a list of inputs.
Each has x, gamma, beta and dy as ``[dtype, shape, numbers]``, eps, and its elements as
``[output, where, expected, distance]``. All numbers but the distance are hexadecimal floats as C99
writes them, exact in the dtype.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import parse
from stablenorm.types import Array


class NearMidpoint(NamedTuple):
    """
    An input of a layer norm, and one element of an output that lies next to a midpoint.

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
    Return the elements that are kept: of all four outputs, in all four dtypes, and in mixtures.

    Elements of the same input follow one another and share its arrays.

    Examples
    --------
    >>> from stablenorm import layer_norm
    >>> from stablenorm.testing import near_midpoints
    >>> found = [each for each in near_midpoints() if each.output == "y"]
    >>> actual = [layer_norm(*each[:4], backend="numpy")[each.where] for each in found]
    >>> any(y != each.expected for y, each in zip(actual, found))  # 0.501 ulp is not 0.5
    True
    """
    found = []
    for kept in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")):
        x, gamma, beta, dy = (_read(*kept[name]) for name in ("x", "gamma", "beta", "dy"))
        made_as = {"y": x, "dx": x, "dgamma": gamma, "dbeta": beta}
        case = x, gamma, beta, float.fromhex(kept["eps"]), dy
        for output, where, expected, distance in kept["elements"]:
            value = _read(made_as[output].dtype.name, (), expected)[()]
            found.append(NearMidpoint(*case, output, tuple(where), value, distance))
    return found


def _read(dtype: str, shape: Sequence[int], numbers: str) -> Array:
    array = np.array([float.fromhex(number) for number in numbers.split()])
    return array.astype(parse(dtype)).reshape(shape)
