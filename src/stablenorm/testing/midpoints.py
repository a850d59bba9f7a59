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

    Returns
    -------
    list of NearMidpoint
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
    least, most = 2 ** (digits - 1), 2**digits - 1
    changed = [_changed(case, argument, place, math.ldexp(g, top - digits)) for g in (least, most)]
    first, last = (exact_layer_norm(*each).value(output, where, 2 * _BITS) for each in changed)
    # Made positive, as midpoints are the same on both sides of 0.
    first, last = (-first, -last) if last < 0 else (first, last)
    slope = (last - first) / (most - least)
    if slope == 0 or last == 0 or _exponent(last) > format_of(dtype).emax:
        return None
    # Below `begin` are other binades, with another ulp.
    edge = Fraction(2) ** (_exponent(last) + (slope < 0))
    begin = least + max(0, math.ceil((edge - first) / slope))
    # Positions modulo one ulp, as integers; wider by what their rounding comes to, lest a tie be missed.
    unit, ulp = 2**_BITS, _ulp(last, dtype)
    wide = math.floor(limit * unit) + 2 * most
    low = unit // 2 - wide - math.floor((first + slope * (begin - least)) / ulp * unit)
    more = _first_within(math.floor(slope / ulp * unit), unit, low, 2 * wide)
    if more is None or begin + more > most:
        return None
    found = _changed(case, argument, place, math.ldexp(begin + more, top - digits))
    return found if abs(_distance(found, output, where)) <= limit else None


def _changed(case: Case, argument: str, place: tuple[int, ...], value: float) -> Case:
    array = getattr(case, argument).copy()
    array[place] = value
    return case._replace(**{argument: array})


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


def _distance(case: Case, output: str, where: tuple[int, ...]) -> float:
    """Return how far above the nearest midpoint an element lies, in ulp."""
    value = exact_layer_norm(*case).value(output, where, 2 * _BITS)
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

_FAMILIES = ("F01", "F03", "F07", "F12", "F16", "F18", "F28b", "F31")
# Rows whose variance is a square: with eps = 0, xhat is rational, and there are ties.
_SQUARES = ((1, 3), (5, 1, 5, 1), (1, 2, 3, 4, 5, 6, 7))
# Dtypes of x, of gamma and beta, of dy.
_MIXED = [
    ("float16", "float32", "float16"),
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "float64", "float32"),
    ("float32", "float32", "float64"),
]


def make() -> Iterator[dict[str, Any]]:
    """Search what midpoints.json holds, input by input."""
    for form in FORMATS:
        yield _keep(*_add_up(make_case("F01", form.dtype, 12, 4)))
        for row in _SQUARES:
            _, gamma, beta, _, dy = make_case("F01", form.dtype, len(row))
            x = np.array([row, row[::-1]]).astype(form.dtype)
            # Coarser by 2**4 to 2**6 than what is added to them.
            dy[0] *= 16
            yield _keep(*_search_all(Case(x, gamma, 64 * beta, 0.0, dy), 0))
        for k, family in enumerate(3 * _FAMILIES):
            yield _keep(*_search_all(make_case(family, form.dtype, (5, 8, 12, 16)[k % 4], rng=k)))
        # dx and dgamma are subnormal.
        case = make_case("F01", form.dtype, 8)
        yield _keep(*_search_all(case._replace(dy=np.ldexp(case.dy, form.emin + 1))))
    for k, names in enumerate(6 * _MIXED):
        of_x, of_gamma, of_dy = map(parse, names)
        x, gamma, beta, eps, dy = make_case("F01", of_x, 8, rng=k)
        case = Case(x, gamma.astype(of_gamma), beta.astype(of_gamma), eps, dy.astype(of_dy))
        yield _keep(*_search_all(case))


def _search_all(case: Case, share: float = 2.0**-3) -> tuple[Case, list[Element]]:
    """Search each y of row 0 by gamma, then one dx of row 0 by its dy, then each dgamma by row 1."""
    columns = range(case.x.shape[1])
    tries: list[tuple[*Element, *Element]] = [("y", (0, j), "gamma", (j,)) for j in columns]
    tries += [("dx", (0, j), "dy", (0, k)) for j in columns for k in columns]
    tries += [("dgamma", (j,), "dy", (1, j)) for j in columns]
    found: list[Element] = []
    for output, where, argument, place in tries:
        # Another dy would spoil the dx that was found.
        if output == "dx" and any(name == "dx" for name, _ in found):
            continue
        # With an eighth, one try in eight succeeds.
        limit = share * 2.0 ** -format_of(getattr(case, argument).dtype).digits
        changed = search(case, output, where, argument, place, limit)
        if changed is not None:
            case = changed
            found.append((output, where))
    return case, found


def _add_up(case: Case) -> tuple[Case, list[Element]]:
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
    dy = rng.permuted(dy, axis=0).astype(case.dy.dtype)
    return case._replace(dy=dy), [("dbeta", (j,)) for j in columns.tolist()]


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
