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

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import FORMATS, format_of, parse
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.families import Case, make_case
from stablenorm.types import Array

Element = tuple[str, tuple[int, ...]]

FILE = Path(__file__).with_suffix(".json")
# Parts of an ulp are counted in so many bits; an element is known to twice as many.
_BITS = 192


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
    for kept in json.loads(FILE.read_text("utf-8")):
        x, gamma, beta, dy = (_read(*kept[name]) for name in ("x", "gamma", "beta", "dy"))
        case = Case(x, gamma, beta, float.fromhex(kept["eps"]), dy)
        for output, where, expected, distance in kept["elements"]:
            value = _read(_dtype_of(output, case).name, (), expected)[()]
            found.append(NearMidpoint(*case, output, tuple(where), value, distance))
    return found


def _read(dtype: str, shape: Sequence[int], numbers: str) -> Array:
    array = np.array([float.fromhex(number) for number in numbers.split()])
    return array.astype(parse(dtype)).reshape(shape)


def _dtype_of(output: str, case: Case) -> np.dtype[Any]:
    made_as = {"y": case.x, "dx": case.x, "dgamma": case.gamma, "dbeta": case.beta}
    return made_as[output].dtype


# ---- the search ----


def search(
    case: Case,
    output: str,
    where: tuple[int, ...],
    argument: str,
    place: tuple[int, ...],
    limit: float,
) -> Case | None:
    """
    Change one float of `argument`, at `place`, so that the element is within `limit` ulp of a midpoint.

    The float keeps its exponent and becomes positive. A limit of 0 asks for a tie. None if no
    significand will do.
    """
    array, dtype = getattr(case, argument), _dtype_of(output, case)
    digits, top = format_of(array.dtype).digits, math.frexp(float(array[place]))[1]

    def _changed(significand: int) -> Case:
        copy = array.copy()
        copy[place] = math.ldexp(significand, top - digits)
        return case._replace(**{argument: copy})

    # From the largest significand down: the binade of the result, and so its ulp, is that of the first.
    least, most = 2 ** (digits - 1), 2**digits - 1
    last, first = (_value(_changed(significand), output, where) for significand in (least, most))
    ulp, unit = _ulp(first, dtype), 2**_BITS
    # In units of the ulp, modulo 1; wider by what the roundings come to, lest a tie be missed.
    wide = math.floor(limit * unit) + 2 * most
    low = unit // 2 - wide - math.floor(first / ulp * unit)
    step = math.floor((last - first) / (most - least) / ulp * unit)
    steps = _first_within(step, unit, low, 2 * wide)
    if steps is None or steps > most - least or _exponent(first) > format_of(dtype).emax:
        return None
    found = _changed(most - steps)
    return found if abs(_distance(found, output, where)) <= limit else None


def _first_within(step: int, modulus: int, low: int, width: int) -> int | None:
    """Return the least k >= 0 with ``(k step - low) mod modulus <= width``, if there is one."""
    low, step = low % modulus, step % modulus
    if low == 0 or low + width >= modulus:
        return 0
    if 2 * step > modulus:
        return _first_within(modulus - step, modulus, modulus - low - width, width)
    if step == 0:
        return None
    if -low % step <= width:
        return -(-low // step)
    # No multiple of the step is in [low, low + width]: how often must the modulus be passed first?
    laps = _first_within(modulus, step, -low - width, width)
    return None if laps is None else -(-(low + laps * modulus) // step)


def _value(case: Case, output: str, where: tuple[int, ...]) -> Fraction:
    return exact_layer_norm(*case).value(output, where, 2 * _BITS)


def _distance(case: Case, output: str, where: tuple[int, ...]) -> float:
    """Return how far above the nearest midpoint an element lies, in ulp."""
    value = _value(case, output, where)
    place = value / _ulp(value, _dtype_of(output, case))
    return float(place - math.floor(place) - Fraction(1, 2))


def _ulp(value: Fraction, dtype: np.dtype[Any]) -> Fraction:
    form = format_of(dtype)
    return Fraction(2) ** (max(_exponent(value), form.emin) - form.digits + 1)


def _exponent(value: Fraction) -> int:
    """Return the exponent of the largest power of 2 that is not above the magnitude."""
    size = abs(value)
    top = size.numerator.bit_length() - size.denominator.bit_length()
    return top - (size < Fraction(2) ** top)


# ---- how the file was made ----

_FAMILIES = ("F01", "F03", "F07", "F12", "F17", "F18", "F28b", "F31")
# Rows whose variance is a square: with eps = 0, xhat is rational, and there are ties.
_SQUARES = ((1, 3), (5, 1, 5, 1), (1, 2, 3, 4, 5, 6, 7))
# Of x, of gamma and beta, of dy.
_DTYPES = [3 * (form.dtype.name,) for form in FORMATS] + [
    *(("float16", "float32", "float16"), ("bfloat16", "float32", "bfloat16")),
    *(("float32", "float64", "float32"), ("float32", "float32", "float64")),
]


def make() -> Iterator[dict[str, Any]]:
    """Search what midpoints.json holds, input by input."""
    for k, names in itertools.product(range(13), _DTYPES):
        of_x, of_gamma, of_dy = map(parse, names)
        x, gamma, beta, eps, dy = make_case(_FAMILIES[k % 8], of_x, (5, 8, 12, 16)[k % 4], rng=k)
        # At the end, dx and dgamma are subnormal.
        dy = np.ldexp(dy, format_of(of_x).emin + 1 if k == 12 else 0).astype(of_dy)
        yield _search_all(Case(x, gamma.astype(of_gamma), beta.astype(of_gamma), eps, dy))
    for form in FORMATS:
        for row in _SQUARES:
            _, gamma, beta, _, dy = make_case("F01", form.dtype, len(row))
            # Coarser by 2**4 to 2**6 than what is added to them.
            dy[0] *= 16
            x = np.array([row, row[::-1]]).astype(form.dtype)
            yield _search_all(Case(x, gamma, 64 * beta, 0.0, dy), 0)
        case = _add_up(make_case("F01", form.dtype, 12, 4))
        yield _keep(case, [("dbeta", (j,)) for j in range(12)])


def _search_all(case: Case, share: float = 2.0**-3) -> dict[str, Any]:
    """Search a y of each column by gamma, a dx of row 0 by its dy, and each dgamma by row 1 of dy."""
    columns, found = range(case.x.shape[1]), list[Element]()
    tries: list[tuple[*Element, *Element]]
    tries = [("y", (i, j), "gamma", (j,)) for i in (0, 1) for j in columns]
    tries += [("dx", (0, j), "dy", (0, k)) for j in columns for k in columns]
    tries += [("dgamma", (j,), "dy", (1, j)) for j in columns]
    for output, where, argument, place in tries:
        # Another one would spoil what was found.
        if any(name == output and (name == "dx" or w[-1] == where[-1]) for name, w in found):
            continue
        # With an eighth, one try in eight succeeds.
        limit = share * 2.0 ** -format_of(getattr(case, argument).dtype).digits
        if changed := search(case, output, where, argument, place, limit):
            case = changed
            found.append((output, where))
    return _keep(case, found)


def _add_up(case: Case) -> Case:
    """Make each dbeta of a float, half its ulp and something far smaller, in any order; two ties."""
    form, columns = format_of(case.dy.dtype), np.arange(case.x.shape[1])
    rng = np.random.default_rng(0)
    dy = np.zeros(case.x.shape)
    dy[0] = 256 * case.dy[0].astype(np.float64)
    exponent = np.frexp(dy[0])[1] - form.digits - 1
    dy[1] = np.ldexp(np.sign(dy[0]), exponent)
    # From an eighth of that down to a subnormal.
    smaller = exponent - 3 + (form.emin - form.digits + 4 - exponent) * columns // columns[-1]
    dy[2] = np.ldexp(rng.choice([-1.0, 1.0], columns.size), smaller) * (columns > 1)
    return case._replace(dy=rng.permuted(dy, axis=0).astype(case.dy.dtype))


def _keep(case: Case, found: list[Element]) -> dict[str, Any]:
    """Return one input of the file, with the exact answers."""
    exact, elements = exact_layer_norm(*case), []
    for output, where in found:
        expected = exact.rounded(output, _dtype_of(output, case))[where]
        elements.append((output, where, _write(expected), _distance(case, output, where)))
    arrays = {name: array for name, array in case._asdict().items() if name != "eps"}
    kept = {name: (a.dtype.name, a.shape, _write(a)) for name, a in arrays.items()}
    return {**kept, "eps": case.eps.hex(), "elements": elements}


def _write(array: Any) -> str:
    numbers = np.ravel(array).astype(np.float64).tolist()
    return " ".join(re.sub(r"\.?0*p", "p", number.hex()) for number in numbers)
