"""What users of other layer norms reported, and what another one returned: it must come out right here."""

from importlib import resources

import numpy as np
import pytest
from norms import assert_contract, compute

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.published import PUBLISHED


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.source}: {row.title}")
def test_published_rows_keep_the_contract(row, rng, dtype, backend):
    if not row.fits(dtype):
        pytest.skip(f"{dtype} cannot hold {row.source}")
    dy = rng.standard_normal(row.x.shape).astype(dtype)
    case = *row.arguments(dtype), dy
    found = compute(case, backend=backend)
    assert_contract(exact_layer_norm(*case), found)
    # And what the thread expects, in its dtypes.
    if row.y is not None and dtype.itemsize > 2:
        # Printed to that many digits, and rounded to dtype; |y| < 2.
        atol = 0.5 * 10.0**-row.digits + np.finfo(dtype).eps
        expected = np.broadcast_to(row.y, row.x.shape)
        np.testing.assert_allclose(found["y"], expected, rtol=0, atol=atol)


def test_real_data_agrees_with_another_implementation():
    """The bundled file's y, dx, dgamma, dbeta: float64, by someone else's autodiff."""
    with resources.files("stablenorm").joinpath("data/minilm_layer0_output.npz").open("rb") as file:
        data = dict(np.load(file, allow_pickle=False))
    x, gamma, beta, dy = (data[k].astype(np.float64) for k in ("x", "gamma", "beta", "dy"))
    y, cache = layer_norm_forward(x, gamma, beta, float(data["eps"]))
    actual = dict(zip(("dx", "dgamma", "dbeta"), layer_norm_backward(dy, cache), strict=True))
    for name, array in {"y": y, **actual}.items():
        # The file is good to about 1e-13 of the largest.
        atol = 1e-12 * np.abs(data[name]).max()
        np.testing.assert_allclose(array, data[name], rtol=0, atol=atol)
