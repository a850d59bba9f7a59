"""The stage "bench" of `make gpu` run without a GPU: arrays of a fake CuPy, kernels on the host."""

import contextlib
import sys
import types
from pathlib import Path

import fake_cupy as fake
import numpy as np
import pytest

from stablenorm import cuda, layer_norm_backward, layer_norm_forward
from stablenorm.cuda import workspace as _cuda_workspace

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    bool(fake.load_shim().why_not()), reason=fake.load_shim().why_not() or "-"
)


class Array(fake.ndarray):
    """With what the benchmark does to arrays of CuPy's, beyond what the package does."""

    @property
    def data(self):
        def memset(value, nbytes):
            assert nbytes == self.nbytes
            self.host.view(np.uint8)[...] = value

        return types.SimpleNamespace(ptr=super().data.ptr, memset=memset)

    def astype(self, dtype):
        return Array(self.host.astype(dtype))

    def detach(self):
        return self

    def __getitem__(self, index):
        return Array(self.host[index])


class Graph:
    def __init__(self, steps):
        self.steps = steps

    def upload(self):
        pass

    def launch(self):
        for step in self.steps:
            step()


class Stream(fake.Stream):
    """Writes launches down while it is captured, instead of doing them."""

    def __init__(self, cupy, **_):
        super().__init__(7)
        self.cupy, self.steps = cupy, []

    def __enter__(self):
        self.before, self.cupy.cuda.stream = self.cupy.cuda.stream, self

    def __exit__(self, *_):
        self.cupy.cuda.stream = self.before

    def begin_capture(self):
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        return Graph(self.steps)


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shim"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def bench(monkeypatch, builds):
    """Return the module gpu_bench on a fake device, few cases and calls, and what it would time."""
    cupy = fake.make_module()
    cupy.ndarray, rng = Array, np.random.default_rng(0)
    device = type("Device", (fake.Device,), {"synchronize": lambda _: None})
    empty = cupy.empty

    cupy.empty = lambda *given, **named: Array(empty(*given, **named).host)
    cupy.empty_like = lambda a: cupy.empty(a.shape, a.dtype)
    cupy.random = types.SimpleNamespace(
        standard_normal=lambda shape, dtype: Array(rng.standard_normal(shape, dtype))
    )
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
    cupy.cuda.Device = device
    cupy.cuda.Event = lambda: types.SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    cupy.cuda.get_elapsed_time = lambda *_: 2.0
    cupy.cuda.Stream = lambda **_: Stream(cupy)
    cupy.cuda.runtime.getDeviceProperties = lambda _: {"l2CacheSize": 1}
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(_cuda_workspace, "_kept", type(_cuda_workspace._kept)())
    driver, _ = fake.make_driver(builds, multiprocessors=2)

    def launch(*given):
        stream = cupy.cuda.get_current_stream()
        if stream.capturing:
            stream.steps.append(lambda: driver.launch(*given))
        else:
            driver.launch(*given)

    monkeypatch.setattr(cuda, "_driver", lambda: driver._replace(launch=launch))
    # Imported here, with this CuPy, and forgotten afterwards.
    monkeypatch.delitem(sys.modules, "gpu_bench", raising=False)
    import gpu_bench  # noqa: PLC0415

    del sys.modules["gpu_bench"]

    def finish(plan, _):
        import gpu_variants  # noqa: PLC0415

        source, entry = fake.whole_source() + gpu_variants.FINISH, "layer_norm_finish"
        defines = [define.removeprefix("-D") for define in plan.defines]
        return entry, fake.load_shim().build(source, builds, entries=[entry], defines=defines)

    monkeypatch.setattr(gpu_bench, "load_finish", finish)
    monkeypatch.setattr(gpu_bench, "BENCH_SHAPES", ((70, 33),))
    monkeypatch.setattr(gpu_bench, "BENCH_DTYPES", ("float32",))
    monkeypatch.setattr(gpu_bench, "WARM_UPS", 1)
    monkeypatch.setattr(gpu_bench, "REPEATS", 2)
    return gpu_bench


def solved(problem, direction):
    """Return what a peer that is right has on the device."""
    x, gamma, beta, dy = (problem[k].get() for k in ("x", "gamma", "beta", "dy"))
    y, cache = layer_norm_forward(x, gamma, beta, backend="numpy")
    if direction == "forward":
        return Array(y), "statistics"
    return tuple(map(Array, layer_norm_backward(dy, cache)))


def right(problem, direction):
    made = solved(problem, direction)
    return lambda: made


def wrong(problem, direction):
    found = solved(problem, direction)
    found[-1 if direction == "backward" else 0].host[0] += 1
    return lambda: found


def cannot(*_):
    msg = "not this shape"
    raise ValueError(msg)


def test_the_bench_times_what_agrees(bench, monkeypatch):
    peers = {"right": right, "wrong": wrong, "cannot": cannot}
    monkeypatch.setattr(bench, "load_peers", lambda: (peers, {"absent": "no such module"}))
    missing, forward, backward = bench.bench(set())
    assert missing == {"label": "missing", "missing": {"absent": "no such module"}}
    ours = ["stablenorm", "stablenorm, graph"]
    assert list(forward["times"]) == [*ours, "right"]
    assert list(backward["times"]) == [*ours, "stablenorm, two launches", "right"]
    for record in (forward, backward):
        assert record["passed"]
        assert record["times"]["stablenorm"] == (2e-3, 2e-3, 2e-3)
        assert record["refused"]["cannot"] == "not this shape"
        assert record["refused"]["wrong"].startswith("does not agree with float64: ")
        assert record["ulps"]["stablenorm"] == record["ulps"]["stablenorm, graph"] < 1
        assert record["ulps"]["wrong"] > 1
    assert list(bench.bench({"missing", forward["label"], backward["label"]})) == []


def test_the_bench_fails_where_ours_are_wrong(bench, monkeypatch):
    monkeypatch.setattr(bench, "load_peers", lambda: ({"right": right}, {}))
    # A graph that is replayed and does nothing leaves NaN behind.
    monkeypatch.setattr(Graph, "launch", lambda _: None)
    with contextlib.closing(bench.bench(set())) as records:
        forward = next(records)
    assert not forward["passed"]
    assert list(forward["times"]) == ["stablenorm", "right"]
    assert "stablenorm, graph" in forward["refused"]
