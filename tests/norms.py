"""Both norms by their names, what a call of them gives, and how the oracle judges it."""

import itertools

import numpy as np
from rationals import NAMES

import stablenorm as sn
from stablenorm.backends import BACKENDS
from stablenorm.oracle import exact_double_backward
from stablenorm.testing.families import FAMILIES

NORMS = {
    "layer": (sn.layer_norm_forward, sn.layer_norm_backward, sn.exact_layer_norm),
    "rms": (sn.rms_norm_forward, sn.rms_norm_backward, sn.exact_rms_norm),
}
SECOND_ORDER = {
    "layer": (sn.layer_norm_jvp, sn.layer_norm_double_backward),
    "rms": (sn.rms_norm_jvp, sn.rms_norm_double_backward),
}
FINITE = [name for name, family in FAMILIES.items() if family.finite]
# Made to cancel: there the second term of the contract decides the last bits.
CANCELLING = {
    "y": {"F07", "F32"},
    "dgamma": {"F07"},
    "dx": {"F07", "F08", "F20", "F21", "F28", "F28b"},
}
OF_FORWARD = {"gamma_offset", "residual", "where"}


def draw(rng, shape, dtype=np.float32):
    """Return x, gamma, beta and dy from N(0, 1)."""
    arrays = (rng.standard_normal(each) for each in (shape, shape[-1], shape[-1], shape))
    return [each.astype(dtype) for each in arrays]


def compute(case, kind="layer", *, backend=None, rounding="fast", accumulate=None, **given):
    """
    Return the results by their names in the oracle, whose keywords `given` are.

    With tx, ty of the jvp as well; with ddx, those of the double backward alone.
    """
    (forward, backward, _), (jvp, double_backward) = NORMS[kind], SECOND_ORDER[kind]
    of_forward = {name: given.pop(name) for name in OF_FORWARD & given.keys()}
    y, cache = forward(*case[:4], backend=backend, rounding=rounding, **of_forward)
    if "ddx" in given:
        results = double_backward(given.pop("ddx"), case[4], cache, **given)
        return dict(zip(("ddy", "dx", "dgamma"), results, strict=True))
    found = {"y": y}
    if "tx" in given:
        tangents = [given.pop(name, None) for name in ("tx", "tgamma", "tbeta")]
        found["ty"] = jvp(tangents[0], cache, *tangents[1:])
    if accumulate is not None:
        out = None, *(None if each is None else each.copy() for each in accumulate)
        given |= {"out": out, "accumulate": True}
    found |= zip(NAMES[1:], backward(case[4], cache, **given), strict=True)
    return {name: array for name, array in found.items() if array is not None}


def exactly(case, kind="layer", **given):
    """Return the oracle of the same call."""
    if "ddx" in given:
        x, gamma, _, eps, dy = case
        return exact_double_backward(given.pop("ddx"), dy, x, gamma, eps, kind=kind, **given)
    return NORMS[kind][2](*case, **given)


def bits(array):
    return array.view(f"u{array.itemsize}")


def assert_same(found, expected, where=None):
    """Compare pairs of arrays, or of None: the dtype and every bit."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None), where
        if one is not None:
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), where


def assert_contract(exact, found, where=None):
    for name, result in exact.check_contract(**found).items():
        assert result.passed, (name, result, where)


def assert_nearest(exact, found, where=None):
    """Compare every bit, also the sign of zeros."""
    for name, array in found.items():
        wrong = np.argwhere(bits(array) != bits(exact.rounded(name, array.dtype)))
        assert not wrong.size, (name, array.dtype, len(wrong), wrong[0], where)


# The judge of the results of each rounding.
JUDGES = {"fast": assert_contract, "nearest": assert_nearest}


def assert_right(
    case, kind="layer", *, backends=tuple(BACKENDS), roundings=("fast", "nearest"), **given
):
    """
    Hold each element against the exact one: the contract, and every bit of "nearest".

    Return the results of each backend and rounding.
    """
    exact, judged, results = exactly(case, kind, **given), set(), {}
    for backend, rounding in itertools.product(backends, roundings):
        how = {"backend": backend, "rounding": rounding}
        found = results[backend, rounding] = compute(case, kind, **how, **given)
        keys = {(name, rounding, each.tobytes()): name for name, each in found.items()}
        # The same bits need no second verdict, and the oracle is what takes the time.
        new = {name: found[name] for key, name in keys.items() if key not in judged}
        judged |= keys.keys()
        JUDGES[rounding](exact, new, (how, given, case))
    return results
