"""Both norms by name, calls of them, and judges that compare the results with the oracle."""

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
# Families that cancel: the second term of the contract decides their last bits.
CANCELLING = {
    "y": {"F07", "F32"},
    "dgamma": {"F07"},
    "dx": {"F07", "F08", "F20", "F21", "F28", "F28b", "F41"},
}
OF_FORWARD = {"gamma_offset", "residual", "where"}


def draw(rng, shape, dtype=np.float32):
    """Return x, gamma, beta and dy from N(0, 1)."""
    arrays = (rng.standard_normal(size) for size in (shape, shape[-1], shape[-1], shape))
    return [array.astype(dtype) for array in arrays]


def compute(case, kind="layer", *, backend=None, rounding="fast", accumulate=None, **keywords):
    """
    Return the results by name; names and `keywords` are those of the oracle.

    With tx, the results include ty of the jvp; with ddx, they are those of the double backward.
    """
    (forward, backward, _), (jvp, double_backward) = NORMS[kind], SECOND_ORDER[kind]
    of_forward = {name: keywords.pop(name) for name in OF_FORWARD & keywords.keys()}
    y, cache = forward(*case[:4], backend=backend, rounding=rounding, **of_forward)
    if "ddx" in keywords:
        results = double_backward(keywords.pop("ddx"), case[4], cache, **keywords)
        return dict(zip(("ddy", "dx", "dgamma"), results, strict=True))
    results = {"y": y}
    if "tx" in keywords:
        tangents = [keywords.pop(name, None) for name in ("tx", "tgamma", "tbeta")]
        results["ty"] = jvp(tangents[0], cache, *tangents[1:])
    if accumulate is not None:
        out = None, *(None if array is None else array.copy() for array in accumulate)
        keywords |= {"out": out, "accumulate": True}
    results |= zip(NAMES[1:], backward(case[4], cache, **keywords), strict=True)
    return {name: array for name, array in results.items() if array is not None}


def exactly(case, kind="layer", **keywords):
    """Return the oracle of the same call."""
    if "ddx" in keywords:
        x, gamma, _, eps, dy = case
        return exact_double_backward(keywords.pop("ddx"), dy, x, gamma, eps, kind=kind, **keywords)
    return NORMS[kind][2](*case, **keywords)


def bits(array):
    return array.view(f"u{array.itemsize}")


def assert_same(actual, expected, where=None):
    """Compare pairs of arrays, or of None: the dtype and every bit."""
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None), where
        if one is not None:
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), where


# Float64 sums, and float64 data in NumPy, have the second term of the narrower dtypes: c is 2**50 times as large.
OF_FLOAT64 = 2.0**50


def is_in_float64(backend, keywords):
    """Tell whether a result of float64 data may be computed in float64 alone."""
    parts = np.ndim(keywords.get("where")) and np.shape(keywords["where"])[-1] > 1
    return backend == "numpy" or parts or bool({"accumulate", "tx", "ddx"} & keywords.keys())


def assert_contract(exact, results, where=None, in_float64=False):
    for name, result in exact.check_contract(**results).items():
        wide = in_float64 and results[name].dtype == np.float64
        # Each of a few subnormal terms is rounded to the last place of their sum.
        subnormal = wide and result.worst_ulp <= 4
        assert subnormal or result.worst_excess <= (OF_FLOAT64 if wide else 1.0), (
            name,
            result,
            where,
        )


def assert_nearest(exact, results, where=None, in_float64=False):  # noqa: ARG001
    """Compare every bit, also the sign of zeros."""
    for name, array in results.items():
        wrong = np.argwhere(bits(array) != bits(exact.rounded(name, array.dtype)))
        assert not wrong.size, (name, array.dtype, len(wrong), wrong[0], where)


# The judge of the results of each rounding.
JUDGES = {"fast": assert_contract, "nearest": assert_nearest}


def assert_right(
    case, kind="layer", *, backends=tuple(BACKENDS), roundings=("fast", "nearest"), **keywords
):
    """
    Hold each element against the exact one: the contract, and every bit of "nearest".

    Return the results of each backend and rounding.
    """
    exact, judged, results = exactly(case, kind, **keywords), set(), {}
    for backend, rounding in itertools.product(backends, roundings):
        options = {"backend": backend, "rounding": rounding}
        actual = results[backend, rounding] = compute(case, kind, **options, **keywords)
        keys = {(name, rounding, array.tobytes()): name for name, array in actual.items()}
        # The same bits need no second verdict: the oracle takes most of the time.
        new = {name: actual[name] for key, name in keys.items() if key not in judged}
        judged |= keys.keys()
        JUDGES[rounding](exact, new, (options, keywords, case), is_in_float64(backend, keywords))
    return results
