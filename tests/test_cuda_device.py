"""On a CUDA device: what the host shim cannot show. `make gpu` checks far more."""

import importlib

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm_forward

pytestmark = pytest.mark.cuda


@pytest.fixture
def cupy():
    module = pytest.importorskip("cupy", reason="needs CuPy", exc_type=ImportError)
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a CUDA device: {error}")
    if not count:
        pytest.skip("needs a CUDA device")
    return module


@pytest.fixture
def gpu(monkeypatch, pytestconfig):
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "benchmarks")
    return importlib.import_module("gpu")


@pytest.mark.parametrize("variant", ["plain", "subnormal", "one element later", "a NaN row"])
@pytest.mark.parametrize("shape", [(1, 1), (70, 7), (131, 768), (40, 1023), (33, 4097)], ids=str)
def test_the_contract(gpu, cupy, dtype, shape, variant):
    assert gpu.check(cupy, gpu.Case(*shape, dtype.name, variant)) == ""


def test_runs_grids_streams_and_graphs_change_no_bit(gpu, cupy):
    assert [found for found in gpu.check_invariance(cupy) if found[1]] == []


def test_bfloat16_comes_in_by_dlpack(cupy, rng):
    x = cupy.asarray(rng.standard_normal((5, 40)).astype(ml_dtypes.bfloat16))

    class Other:
        def __dlpack__(self, **options):
            return x.__dlpack__(**options)

        def __dlpack_device__(self):
            return x.__dlpack_device__()

    y, expected = (layer_norm_forward(given)[0].get() for given in (Other(), x))
    np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))
