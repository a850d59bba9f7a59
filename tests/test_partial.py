"""Sums over parts of the rows: merged in any order, they have the bits, or the accuracy, of the whole call."""

import functools
import itertools
import pickle
from fractions import Fraction

import numpy as np
import pytest
from rationals import nearest

import stablenorm
from stablenorm import exact_layer_norm, exact_rms_norm, layer_norm_forward, rms_norm_forward
from stablenorm.backends import BACKENDS
from stablenorm.functional import calls
from stablenorm.functional.row_parts import backward_parts, decided, exact_parts
from stablenorm.reference import partial
from stablenorm.reference.partial import PARTIAL, merged, rounded
from stablenorm.testing.families import FAMILIES, Case, make_case
from stablenorm.types import bfloat16

FINITE = [name for name, family in FAMILIES.items() if family.finite]
FORWARDS = {"layer": layer_norm_forward, "rms": rms_norm_forward}
ORACLES = {"layer": exact_layer_norm, "rms": exact_rms_norm}
NAMES = ("dgamma", "dbeta")


def cut(rows, rng):
    """Return slices of all rows in order, some of one row or of none."""
    ends = np.sort(rng.integers(0, rows + 1, rng.integers(1, 6)))
    ends = [0, min(1, rows), *ends, max(rows - 1, 0), rows]
    return itertools.starmap(slice, itertools.pairwise(sorted(ends)))


def blocks_of(case, rng, kind="layer", backends=tuple(BACKENDS), **options):
    """Return dy and the cache of parts of a case, each of one of the backends."""
    blocks = []
    for rows in cut(len(case.x), rng):
        options["backend"] = backends[rng.integers(len(backends))]
        _, cache = FORWARDS[kind](case.x[rows], *case[1:4], **options)
        blocks.append((case.dy[rows], cache))
    return blocks


def merged_all(parts, rng):
    """Merge in any order, as they may come from other processes."""
    parts = list(parts)
    while len(parts) > 1:
        one, other = (parts.pop(rng.integers(len(parts))) for _ in range(2))
        parts.append(pickle.loads(pickle.dumps(merged(one, other))))
    return parts[0]


def finish(blocks, rng):
    """Return dgamma and dbeta of all blocks, and how many of their elements were undecided."""
    parts = [backward_parts(*block, wrt=("gamma", "beta")) for block in blocks]
    dtypes = [parameter.dtype for parameter in blocks[0][1].norm[:2]]
    totals = [merged_all(each, rng) for each in list(zip(*parts, strict=True))[1:]]
    both = [rounded(total, dtype) for total, dtype in zip(totals, dtypes, strict=True)]
    undecided = tuple(where for _, where in both)
    exact = zip(*(exact_parts(*block, undecided) for block in blocks), strict=True)
    exact = [merged_all(each, rng) for each in exact]
    found = [decided(*each, sums) for each, sums in zip(both, exact, strict=True)]
    return found, sum(np.count_nonzero(where) for where in undecided)


def whole_call(case, kind="layer", **options):
    _, cache = FORWARDS[kind](*case[:4], **options)
    return calls.backward(case.dy, cache, calls.NAMES, None, kind=kind)[1:]


def assert_same(found, expected):
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes(), name


@pytest.mark.parametrize("name", FINITE)
def test_families(name, dtype, rng):
    if not FAMILIES[name].applies(dtype, 7):
        return
    case = make_case(name, dtype, 7, max(6, FAMILIES[name].smallest_rows))
    kind, offset = ("layer", 0.0) if rng.random() < 0.7 else ("rms", 1.0)
    found, _ = finish(blocks_of(case, rng, kind, gamma_offset=offset, rounding="nearest"), rng)
    assert_same(found, whole_call(case, kind, gamma_offset=offset, rounding="nearest"))
    backend = sorted(BACKENDS)[rng.integers(2)]
    found, undecided = finish(blocks_of(case, rng, kind, (backend,), gamma_offset=offset), rng)
    exact = ORACLES[kind](*case, gamma_offset=offset)
    results = exact.check_contract(**dict(zip(NAMES, found, strict=True)))
    assert all(result.passed for result in results.values()), results
    assert undecided == 0


def tie(dtype, rng):
    """Of rows (-1, 1) with eps = 0, xhat is that: sums of integers, and one half of an ulp."""
    digits = {2: 8 if dtype == bfloat16 else 11, 4: 24, 8: 53}[np.dtype(dtype).itemsize]
    x = np.array([-1.0, 1.0]) * rng.choice([1, -1, 3], (11, 1))
    dy = np.zeros((11, 2))
    dy[3:6] = rng.integers(-3, 4, (3, 2))
    dy[6:9] = -dy[3:6]
    dy[9], dy[10] = 2.0 ** (digits - 1), [0.5, 1.5]
    ones = np.ones(2, dtype)
    return Case(x, ones, ones, 0.0, dy)


def test_ties_are_asked_again(dtype, backend, rng):
    case = tie(dtype, rng)
    found, undecided = finish(blocks_of(case, rng, backends=(backend,), rounding="nearest"), rng)
    assert undecided
    exact = exact_layer_norm(*case)
    assert_same(found, [exact.rounded(name, dtype) for name in NAMES])


@pytest.mark.parametrize("narrow", [np.float16, bfloat16, np.float32])
def test_parameters_of_other_dtypes(narrow, dtype, rng):
    """Integers, of which more than one column ties; dgamma of one dtype, dbeta of another."""
    x, dy = rng.integers(-2, 3, (2, 40, 6)).astype(dtype)
    x[:, 0], dy[:, 1] = 1, 3
    case = Case(x, np.ones(6, narrow), np.ones(6), 0.0 if x.std(axis=1).all() else 0.5, dy)
    found, _ = finish(blocks_of(case, rng, rounding="nearest"), rng)
    assert_same(found, whole_call(case, rounding="nearest"))
    exact = exact_layer_norm(*case)
    # A float64 beta makes this double-double, of which 16 bits have no kernels for another test.
    for backend in ("numpy",) if dtype.itemsize == 2 else sorted(BACKENDS):
        found, _ = finish(blocks_of(case, rng, backends=(backend,)), rng)
        for result in exact.check_contract(**dict(zip(NAMES, found, strict=True))).values():
            assert result.passed, result


@pytest.mark.parametrize("size", [1.7e308, 2.0**-1060, 1.0])
def test_what_cancels_between_parts_leaves_the_rest(size, backend, rng):
    x, dy = rng.standard_normal((2, 12, 5))
    dy[:4], dy[8:] = size, -size
    x[8:] = x[:4]
    dy[4:8] *= 2.0**-1050
    case = Case(x, np.ones(5), np.ones(5), 1e-5, dy)
    for _ in range(3):
        found, _ = finish(blocks_of(case, rng, backends=(backend,), rounding="nearest"), rng)
        assert_same(found, whole_call(case, rounding="nearest"))
        assert found[1].any()
        assert np.isfinite(found[0]).all()
        found, _ = finish(blocks_of(case, rng, backends=(backend,)), rng)
        results = exact_layer_norm(*case).check_contract(**dict(zip(NAMES, found, strict=True)))
        assert all(result.passed for result in results.values()), results


@pytest.mark.parametrize("place", ["x", "dy", "both infinities", "constant"])
def test_what_is_not_finite_in_one_part(place, dtype, backend, rng):
    x, dy = rng.standard_normal((2, 10, 6)).astype(dtype)
    if place == "x":
        x[7, 2] = np.nan
    elif place == "dy":
        dy[7, 2], dy[1, 3] = np.nan, -np.inf
    elif place == "constant":
        x[7] = 3
    else:
        dy[[0, 9], 4] = np.inf, -np.inf
    ones = np.ones(6, dtype)
    case = Case(x, ones, ones, 0.0, dy)
    for options in ({"rounding": "nearest"}, {}):
        found, _ = finish(blocks_of(case, rng, backends=(backend,), **options), rng)
        expected = whole_call(case, backend=backend, **options)
        assert not all(np.isfinite(each).all() for each in expected)
        if options:
            assert_same(found, expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_the_same_bits_in_the_same_tree(rounding, dtype, backend, rng):
    x, dy = rng.standard_normal((2, 400, 65)).astype(dtype)
    gamma, found = np.ones(65, dtype), set()
    before = stablenorm.get_num_threads()
    try:
        for threads in (1, 3):
            stablenorm.set_num_threads(threads)
            parts = []
            for rows in (slice(300), slice(300, 301), slice(301, 400)):
                _, cache = layer_norm_forward(
                    x[rows], gamma, gamma, backend=backend, rounding=rounding
                )
                parts.append(backward_parts(dy[rows], cache))
            for which in (1, 2):
                one, two, three = (part[which] for part in parts)
                total = merged(merged(one, two), three)
                assert total.tobytes() == merged(three, merged(two, one)).tobytes()
                found.add((which, total.tobytes()))
    finally:
        stablenorm.set_num_threads(before)
    assert len(found) == 2


# ---- the numbers themselves ----


def fraction(part):
    """Return the value and the error of one element."""
    unit = Fraction(2) ** int(part["exponent"])
    return (Fraction(float(part["high"])) + Fraction(float(part["low"]))) * unit, Fraction(
        float(part["error"])
    ) * unit


def some_parts(rng, count):
    parts = np.zeros(count, PARTIAL)
    spread = rng.integers(-70, 70, count) * rng.integers(0, 2, count)
    parts["high"] = rng.standard_normal(count) * 2.0**spread * (rng.random(count) < 0.9)
    parts["low"] = (
        parts["high"] * 2.0 ** rng.integers(-80, -54, count) * rng.choice([0, 1, -1], count)
    )
    parts["error"] = 2.0 ** rng.integers(-110, 5, count) * rng.choice([0, 1], count)
    parts["exponent"] = rng.integers(-1, 2, count) * rng.choice([0, 1, 900, 3000], count)
    return parts


def test_merged_bounds_its_error(rng):
    a, b = some_parts(rng, 1500), some_parts(rng, 1500)
    # Some cancel, but for the last of their bits.
    b[::3] = a[::3]
    b["high"][::3] *= -1 - 2.0**-52 * rng.integers(-1, 2, len(b[::3]))
    b["low"][::3] *= -1
    total, exact = merged(a, b), 0
    for one, other, both in zip(a, b, total, strict=True):
        (v, e), (w, f), (found, error) = map(fraction, (one, other, both))
        lost = abs(v + w - found)
        assert lost + e + f <= error
        # No more than it must, by a little.
        assert error <= (e + f + abs(v + w) * Fraction(2) ** -100) * Fraction(
            1 + 2.0**-40
        ) + Fraction(2) ** -1000 * max(abs(v), abs(w), e, f)
        exact += error == 0
    assert exact > 150


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_without_exponents_is_merged_with_them(name, dtype, rng):
    if why_not := FAMILIES[name].why_not(dtype, 7, 8):
        pytest.skip(why_not)
    case = make_case(name, dtype, 7, 8, rng)
    blocks = blocks_of(case, rng, rounding="nearest")
    check_both_ways([np.stack(backward_parts(*each)[1:]) for each in blocks], dtype)


@pytest.mark.parametrize("top", [0, 1, 1010, 1024])
def test_merged_of_any_words_without_exponents_is_merged_with_them(top, dtype, rng):
    for _ in range(30):
        parts = np.zeros((rng.integers(1, 10), 7), PARTIAL)
        exponents = rng.integers(top - 9, top + 1, parts.shape)
        parts["high"] = np.ldexp(rng.uniform(-1, 1, parts.shape), exponents)
        parts["low"] = np.spacing(parts["high"]) * rng.uniform(-0.5, 0.5, parts.shape)
        parts["error"] = rng.choice([0, np.nan, 2.0 ** (top - 60), np.inf])
        check_both_ways(list(parts), dtype)


def check_both_ways(parts, dtype):
    """Compare word by word, and rounded; past the range of float64 there is but one way."""
    with np.errstate(all="ignore"):
        ways = merged(*parts), functools.reduce(partial._scaled_sum, parts)
        for name in ("high", "low", "error"):
            np.testing.assert_array_equal(
                *(np.ldexp(w[name], w["exponent"].astype("i4")) for w in ways)
            )
    for one, other in zip(*(rounded(way, np.dtype(dtype)) for way in ways), strict=True):
        assert one.tobytes() == other.tobytes()


def test_an_error_that_nobody_knows_stays_unknown(rng):
    a, b = some_parts(rng, 50), some_parts(rng, 50)
    a["error"], b["error"] = np.nan, 0
    total = merged(a, b)
    assert np.isnan(total["error"]).all()
    a["error"] = 0
    for word in ("high", "low", "exponent"):
        assert total[word].tobytes() == merged(a, b)[word].tobytes()
    assert not rounded(total, np.dtype("f4"))[1].any()


def test_an_infinite_error_leaves_all_open(dtype):
    parts = np.array([(1.0, 0.0, np.inf, 0), (np.inf, 0.0, 0.0, 0), (1.0, 0.0, 0.0, 0)], PARTIAL)
    exact = np.array([(2.0, 0.0, 0.0, 1)] * 3, PARTIAL)
    assert rounded(merged(parts, exact), np.dtype(dtype))[1].tolist() == [True, False, False]


def test_rounded_decides_what_the_error_allows(dtype, rng):
    parts = some_parts(rng, 600)
    parts["exponent"] = rng.choice([0, 0, -1, -140, -1074], 600)
    # Midpoints, and next to them.
    parts["high"] %= 2.0**12
    parts["low"] = (
        np.spacing(parts["high"]) * 2.0**-20 * (parts["high"] != 0) * rng.choice([0, 1, -1], 600)
    )
    short = parts["high"].astype(dtype)
    parts["high"][::2] = (short.astype(float) + np.spacing(short).astype(float) / 2)[::2]
    values, undecided = rounded(parts, np.dtype(dtype))
    dtype, seen = np.dtype(dtype), set()
    for part, value, open_ in zip(parts, values, undecided, strict=True):
        v, e = fraction(part)
        ends = [nearest(end, dtype) for end in (v - e, v, v + e)]
        if not open_:
            assert {float(end) for end in ends} == {float(value)}, part
        else:
            # But for the rounding of the sum with the bound.
            wider = e + Fraction(2) ** -101 * abs(v)
            assert len({nearest(end, dtype).tobytes() for end in (v - wider, v + wider)}) == 2
        assert not open_ or e
        seen.add((bool(open_), e == 0))
    assert seen == {(False, True), (False, False), (True, False)}


# ---- calls ----


def test_what_is_asked_for(rng):
    x, dy = rng.standard_normal((2, 4, 6))
    _, cache = layer_norm_forward(x, np.ones(6), rounding="nearest")
    expected = calls.backward(dy, cache, ("x",), None).dx
    dx = np.empty_like(x)
    found = backward_parts(dy, cache, dx=dx)
    assert found.dx is dx
    assert dx.tobytes() == expected.tobytes()
    assert found.dbeta is None
    assert backward_parts(dy, cache, "x", dsum=dy)[1:] == (None, None)
    assert backward_parts(dy, cache, "gamma").dx is None
    with pytest.raises(ValueError, match="wrt must name"):
        backward_parts(dy, cache, "y")
    with pytest.raises(ValueError, match="not for arrays on a CUDA device"):
        backward_parts(dy, cache._replace(backend="cuda"))


def test_nothing_undecided_costs_nothing(rng, monkeypatch):
    x = rng.standard_normal((4, 6))
    _, cache = layer_norm_forward(x, np.ones(6), np.ones(6), rounding="nearest")
    monkeypatch.setattr(calls, "backward", None)
    none = np.zeros(6, bool)
    first, second = exact_parts(x, cache, (none, None))
    assert second is None
    assert not merged(first, first).any()


def test_the_options_of_a_cache_take_part(backend, rng):
    """Rows that do not count, gamma for each sample, axes not last, save="recompute"."""
    x, dy = rng.integers(-3, 4, (2, 8, 3, 5)).astype(np.float32)
    where = rng.random((8, 3, 1)) < 0.7
    gamma, beta = rng.standard_normal((3, 5)).astype(np.float32), np.ones(5, np.float32)
    for option, parameters in (
        ({"where": where}, (gamma, beta)),
        ({"axis": (1, 2)}, (gamma, gamma)),
        ({"save": "recompute"}, (beta, beta)),
    ):
        for rounding in ("nearest", "fast"):
            if rounding == "nearest" and "save" in option:
                continue
            options = option | {"rounding": rounding, "backend": backend}
            _, cache = layer_norm_forward(x, *parameters, 0.5, **options)
            expected = calls.backward(dy, cache, ("gamma", "beta"), None)[1:]
            blocks = []
            for rows in cut(8, rng):
                part = options | ({"where": where[rows]} if "where" in options else {})
                blocks.append((dy[rows], layer_norm_forward(x[rows], *parameters, 0.5, **part)[1]))
            found, _ = finish(blocks, rng)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_max_ulp(one, other, 0 if rounding == "nearest" else 1)
