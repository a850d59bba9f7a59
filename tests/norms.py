"""Both norms by their names, what a call of them gives, and how the oracle judges it."""

import itertools

import numpy as np
from rationals import NAMES

from stablenorm import (
    exact_layer_norm,
    exact_rms_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from stablenorm.backends import BACKENDS
from stablenorm.testing.families import FAMILIES

NORMS = {
    "layer": (layer_norm_forward, layer_norm_backward, exact_layer_norm),
    "rms": (rms_norm_forward, rms_norm_backward, exact_rms_norm),
}
FINITE = [name for name, family in FAMILIES.items() if family.finite]


def compute(case, kind="layer", *, dsum=None, accumulate=None, **how):
    """Return y, dx, dgamma and dbeta by name; these two alone where they are added to what was there."""
    forward, backward, _ = NORMS[kind]
    y, cache = forward(*case[:4], **how)
    more = {} if dsum is None else {"dsum": dsum}
    if accumulate is not None:
        out = None, *(each.copy() for each in accumulate)
        y, more = None, more | {"wrt": ("gamma", "beta"), "out": out, "accumulate": True}
    found = zip(NAMES, (y, *backward(case[4], cache, **more)), strict=True)
    return {name: array for name, array in found if array is not None}


def bits(array):
    return array.view(f"u{array.itemsize}")


def assert_same(found, expected, where=None):
    """Of pairs of arrays, or of None, the dtype and every bit."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None), where
        if one is not None:
            assert one.dtype == other.dtype, where
            assert one.tobytes() == other.tobytes(), where


def assert_contract(exact, found, where=None):
    for name, result in exact.check_contract(**found).items():
        assert result.passed, (name, result, where)


def assert_nearest(exact, found, where=None):
    """Of zeros the sign too."""
    for name, array in found.items():
        wrong = np.argwhere(bits(array) != bits(exact.rounded(name, array.dtype)))
        assert not wrong.size, (name, array.dtype, len(wrong), wrong[0], where)


def assert_right(
    case, kind="layer", *, backends=tuple(BACKENDS), roundings=("fast", "nearest"),
    names=NAMES, gamma_offset=0.0, **more,
):  # fmt: skip
    """Hold each element against the exact one: the contract, and every bit of "nearest"."""
    exact, judged = NORMS[kind][2](*case, gamma_offset=gamma_offset, **more), set()
    for backend, rounding in itertools.product(backends, roundings):
        how = {"backend": backend, "rounding": rounding, "gamma_offset": gamma_offset}
        keys = {
            (name, rounding, array.tobytes()): array
            for name, array in compute(case, kind, **how, **more).items()
            if name in names
        }
        # The same bits need no second verdict, and the oracle is what takes the time.
        new = {key[0]: array for key, array in keys.items() if key not in judged}
        judged |= keys.keys()
        judge = assert_nearest if rounding == "nearest" else assert_contract
        judge(exact, new, (how, more, case))
