"""On a CUDA device: what the host shim cannot show. `make gpu` sweeps far more, with figures."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cuda import CudaWorkspace

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


SHAPES = [(1, 1), (70, 7), (300, 33), (131, 768), (40, 1023), (33, 4097)]
SHAPES += [(3, 65_536)]


def problem(rng, shape, dtype):
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    gamma, beta = (rng.standard_normal(shape[-1]).astype(dtype) for _ in range(2))
    return x, gamma, beta, dy


def pulled(arrays, dy, **options):
    y, cache = layer_norm_forward(*arrays, **options)
    return y, *layer_norm_backward(dy, cache)


def bits(arrays):
    return [array.get().tobytes() for array in arrays]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_the_cpu(cupy, rng, dtype, shape):
    *arrays, dy = problem(rng, shape, dtype)
    expected = pulled(arrays, dy, backend="numpy")
    actual = pulled(map(cupy.asarray, arrays), cupy.asarray(dy))
    for name, one, other in zip(("y", "dx", "dgamma", "dbeta"), actual, expected, strict=True):
        if dtype == np.float64:
            np.testing.assert_allclose(one.get(), other, rtol=2**-52, atol=1e-30, err_msg=name)
        else:
            assert one.get().tobytes() == other.tobytes(), name


def test_subnormals_are_not_flushed(cupy, rng):
    x = (rng.standard_normal((5, 96)) * 2.0**-130).astype(np.float32)
    expected = layer_norm_forward(x, eps=0, backend="numpy")[0]
    assert layer_norm_forward(cupy.asarray(x), eps=0)[0].get().tobytes() == expected.tobytes()


def test_runs_streams_and_alignment_change_no_bit(cupy, rng):
    *arrays, dy = map(cupy.asarray, problem(rng, (4097, 1001), ml_dtypes.bfloat16))
    expected = bits(pulled(arrays, dy))
    for _ in range(50):
        assert bits(pulled(arrays, dy)) == expected
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    found = []
    for _ in range(10):
        for stream in streams:
            with stream:
                found.append(pulled(arrays, dy))
    cupy.cuda.Device().synchronize()
    assert all(bits(one) == expected for one in found)
    moved = []
    for array in (arrays[0], dy):
        room = cupy.empty(array.size + 1, array.dtype)
        moved.append(room[1:].reshape(array.shape))
        moved[-1][...] = array
    assert bits(pulled([moved[0], *arrays[1:]], moved[1])) == expected


def test_a_graph_is_captured_and_replayed(cupy, rng):
    x, gamma, beta, dy = map(cupy.asarray, problem(rng, (4096, 1024), np.float16))
    expected, work = bits(pulled((x, gamma, beta), dy)), CudaWorkspace()
    y, out = cupy.empty_like(x), tuple(map(cupy.empty_like, (x, gamma, beta)))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def step():
        _, cache = layer_norm_forward(x, gamma, beta, out=y)
        layer_norm_backward(dy, cache, out=out)
        return cache

    with stream, work:
        step()
        stream.begin_capture()
        # Kept: the graph writes the statistics and reads them.
        cache = step()
        graph = stream.end_capture()
        for _ in range(100):
            for array in (y, *out):
                array[...] = 0
            graph.launch()
            stream.synchronize()
            assert bits((y, *out)) == expected
    assert cache.backend == "cuda"


def test_bfloat16_comes_in_by_dlpack(cupy, rng):
    x = cupy.asarray(rng.standard_normal((5, 40)).astype(ml_dtypes.bfloat16))

    class Other:
        def __dlpack__(self, **options):
            return x.__dlpack__(**options)

        def __dlpack_device__(self):
            return x.__dlpack_device__()

    assert bits([layer_norm_forward(Other())[0]]) == bits([layer_norm_forward(x)[0]])
