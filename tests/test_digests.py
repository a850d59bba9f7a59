"""Fixed inputs and kept results: broken by one bit of an input, of an exact result, or of the kernels."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from norms import compute
from rationals import NAMES, nearest, textbook, unit

from stablenorm import exact_layer_norm
from stablenorm.backends import BACKENDS
from stablenorm.cli import main
from stablenorm.cli import run as command
from stablenorm.testing import digest, digest_inputs, near_midpoints, published_digests


@pytest.mark.parametrize("name", published_digests())
def test_the_digests_are_those_of_the_exact_results(name):
    case = digest_inputs()[name]
    exact, dtypes = exact_layer_norm(*case), [case[i].dtype for i in (0, 0, 1, 2)]
    found = tuple(digest(exact.rounded(*each)) for each in zip(NAMES, dtypes, strict=True))
    assert found == published_digests()[name]


@pytest.mark.skipif("native" not in BACKENDS, reason="the digests are those of the kernels")
def test_the_kernels_have_the_same_bits_by_default_as_in_the_version_before():
    kept = Path(__file__).with_name("digests_fast.txt").read_text("utf-8").splitlines()
    cases = digest_inputs()
    found = {name: " ".join(map(digest, compute(case).values())) for name, case in cases.items()}
    assert [f"{name:27} {each}" for name, each in found.items()] == kept


def test_all_nan_are_one_and_the_order_of_bytes_is_fixed():
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert digest(nan[:1]) == digest(nan[1:])
    assert digest(np.ones(1, "<f4")) == digest(np.ones(1, ">f4")) != digest(np.zeros(1, "f4"))


@pytest.mark.usefixtures("plain_terminal")
def test_run_prints_them_and_says_whether_they_are_the_same(capsys, monkeypatch):
    assert main(["run", "--digests"]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    expected = [[*name.split(), *each] for name, each in published_digests().items()]
    assert [line.split() for line in lines] == expected
    assert verdict == "All are as published."
    monkeypatch.setattr(command, "digest", lambda _: 12 * "0")
    assert main(["run", "--digests"]) == 1
    assert capsys.readouterr().out.endswith(" LINES DIFFER from those published.\n")


# ---- next to midpoints ----


def by_input(cases):
    """Yield the arguments of each input, and its elements, which follow one another."""
    for _, group in itertools.groupby(cases, lambda case: id(case.x)):
        first, *others = group
        yield first[:5], (first, *others)


def test_the_answers_are_those_of_the_formulas():
    for given, cases in by_input(near_midpoints()):
        # More digits than any input spans.
        results = textbook(*given, digits=400)
        for case in cases:
            exact = results[case.output][case.where]
            assert case.expected == nearest(exact, case.expected.dtype)
            place = exact / unit(exact, case.expected.dtype)
            distance = place - math.floor(place) - Fraction(1, 2)
            assert abs(distance - Fraction(case.distance)) <= 1e-15 * abs(case.distance) + 1e-300


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_fast_misrounds_some_of_each_output_and_nearest_none(backend, rounding):
    missed = []
    for given, cases in by_input(near_midpoints()):
        results = compute(given, backend=backend, rounding=rounding)
        wrong = [case for case in cases if results[case.output][case.where] != case.expected]
        missed += [(case.output, case.expected.dtype.name) for case in wrong]
    # In NumPy the wrong sums of float64 are among rows that integers do.
    kinds = {*itertools.product(NAMES, ("float32", "float64"))} - {("dbeta", "float64")}
    assert kinds <= set(missed) if rounding == "fast" else missed == []
