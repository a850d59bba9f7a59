"""The fixed inputs and their digests: made alike for ever, and the exact results rounded once."""

import numpy as np
import pytest

from stablenorm import exact_layer_norm
from stablenorm.backends import BACKENDS
from stablenorm.cli import main
from stablenorm.cli import run as command
from stablenorm.testing import digest, digest_inputs, published_digests
from stablenorm.testing.digests import _splitmix

NAMES = tuple(published_digests())


def test_the_integers_are_those_of_others():
    # As Rosetta Code lists them for this seed.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert _splitmix(1234567, 3).tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_digests_are_those_of_the_exact_results(name):
    case = digest_inputs()[name]
    exact, dtypes = exact_layer_norm(*case), [case[i].dtype for i in (0, 0, 1, 2)]
    outputs = zip(("y", "dx", "dgamma", "dbeta"), dtypes, strict=True)
    found = tuple(digest(exact.rounded(*each)) for each in outputs)
    assert found == published_digests()[name]


def test_all_nan_are_one_and_the_order_of_bytes_is_fixed():
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert digest(nan[:1]) == digest(nan[1:])
    assert digest(np.ones(1, "<f4")) == digest(np.ones(1, ">f4")) != digest(np.zeros(1, "f4"))


@pytest.mark.usefixtures("plain_terminal")
def test_run_prints_them_and_says_whether_they_are_the_same(capsys, monkeypatch):
    assert main(["run", "--digests"]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    expected = []
    for rounding in ("nearest", "fast") if "native" in BACKENDS else ("nearest",):
        expected.append([f'rounding="{rounding}"'])
        expected += [[*name.split(), *each] for name, each in published_digests(rounding).items()]
    assert [line.split() for line in lines] == expected
    assert verdict == "All are as published."
    monkeypatch.setattr(command, "digest", lambda _: 12 * "0")
    assert main(["run", "--digests"]) == 1
    assert capsys.readouterr().out.endswith(" LINES DIFFER from those published.\n")
