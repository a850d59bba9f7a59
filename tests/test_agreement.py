"""Every backend gives the bits of the reference, except where float64 cannot decide them."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.backends import BACKENDS
from stablenorm.testing.families import FAMILIES, make_case

NARROW = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
CASES = [
    pytest.param(name, dtype, n, id=f"{name}-{dtype}-{n}")
    for name, family in FAMILIES.items()
    for dtype, kind in NARROW.items()
    for n in (1, 5, 33, 129, 768)
    if family.applies(kind, n)
]
# Families made to cancel: there the second term of the contract decides the last bits.
CANCELLING = {
    "y": {"F07", "F32"},
    "dx": {"F07", "F08", "F20", "F21", "F28", "F28b"},
}


def compute(case, backend):
    y, cache = layer_norm_forward(case.x, case.gamma, case.beta, case.eps, backend=backend)
    return {"y": y, "dx": layer_norm_backward(case.dy, cache).dx}


@pytest.mark.parametrize(("name", "dtype", "n"), CASES)
@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - {"numpy"}))
def test_bits_of_the_reference(name, dtype, n, backend):
    case = make_case(name, NARROW[dtype], n, max(5, FAMILIES[name].smallest_rows))
    expected, actual = compute(case, "numpy"), compute(case, backend)
    for output, families in CANCELLING.items():
        if name not in families:
            recipe = f"make_case({name!r}, {dtype!r}, n={n}), {output}"
            # As float64: NumPy does not know the NaN of bfloat16.
            np.testing.assert_array_equal(
                expected[output].astype(np.float64),
                actual[output].astype(np.float64),
                err_msg=recipe,
            )
