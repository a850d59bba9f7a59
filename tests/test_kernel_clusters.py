"""layer_norm.cu on the host where several blocks share a row: contract, bits, schedules, faults."""

import functools

import layer_norm_host as host
import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cuda import plan as _cuda_plan
from stablenorm.oracle import exact_layer_norm

pytestmark = pytest.mark.skipif(bool(host.host_shim.why_not()), reason=host.host_shim.why_not())

Setting, FAST, SLOW = host.Setting, host.FAST, host.SLOW
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
# What a block may ask for, in bytes, on compute capability 9.0 and 12.0.
SHARED = {FAST: 227 << 10, SLOW: 99 << 10}
OUTPUTS = ("y", "dx", "dgamma", "dbeta")


@pytest.fixture(scope="session")
def folder(tmp_path_factory, worker_id):
    """Where kernels are kept: one folder for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / "kernels"
    path.mkdir(exist_ok=True)
    return path


def ordinary(rows, n, dtype):
    rng = np.random.default_rng([rows, n])
    x, dy = (rng.standard_normal((rows, n)).astype(dtype) for _ in range(2))
    gamma = (1 + 0.1 * rng.standard_normal(n)).astype(dtype)
    beta = (0.1 * rng.standard_normal(n)).astype(dtype)
    return x, gamma, beta, 1e-5, dy


def on_host(folder, case, setting=host.PLAIN, **options):
    """Return y and the gradients by name, and what the backward loaded and stored."""
    x, gamma, beta, eps, dy = case
    shared = {"shared_limit": options.pop("shared_limit", LITTLE)}
    options = {"cluster_limit": 8, **options}
    kept = host.forward(folder, x, gamma, beta, eps, setting, **options).arrays
    y = kept.pop("out")
    outcome = host.backward(folder, dy, x, gamma, kept, setting, **shared, **options)
    return {"y": y, **dict(zip(OUTPUTS[1:], outcome.arrays.values(), strict=True))}, outcome.records


def on_reference(case):
    x, gamma, beta, eps, dy = case
    y, cache = layer_norm_forward(x, gamma, beta, eps, backend="numpy")
    return dict(zip(OUTPUTS, (y, *layer_norm_backward(dy, cache)), strict=True))


def assert_same(expected, actual, recipe):
    for name in OUTPUTS:
        np.testing.assert_array_equal(
            expected[name].astype(np.float64),
            actual[name].astype(np.float64),
            err_msg=f"{recipe}, {name}",
        )


# ---- rows that one block cannot hold ----

# The blocks of the forward and of the backward. 1 of 4097 float32: in shared memory.
LONG = [
    (4097, F32, FAST, 2, 1),
    (8193, F32, FAST, 2, 2),
    (65535, F32, FAST, 8, 8),
    (32768, F16, FAST, 4, 4),
    (65536, BF16, FAST, 8, 8),
    (8193, F64, FAST, 4, 8),
    (8192, F32, SLOW, 2, 2),
]


@pytest.mark.parametrize(
    ("n", "dtype", "capability", "forward", "backward"),
    LONG,
    ids=[f"{n}-{dtype}-{capability[0]}" for n, dtype, capability, *_ in LONG],
)
def test_long_rows(n, dtype, capability, forward, backward, folder):
    which = _cuda_plan.arithmetic(capability, np.empty(0, dtype))
    limits = {"shared_limit": SHARED[capability], "cluster_limit": 8}
    plans = (
        _cuda_plan.plan_forward(3, n, dtype, which, **limits),
        _cuda_plan.plan_backward(3, n, dtype, dtype, which, **limits),
    )
    assert tuple(plan.cluster for plan in plans) == (forward, backward)
    case = ordinary(3 if n < 10_000 else 2, n, dtype)
    limit = SHARED[capability]
    actual, (record,) = on_host(folder, case, capability=capability, shared_limit=limit)
    # In a loop over columns dy would be read three times and x twice.
    x, dy = case[0], case[4]
    assert (record.traffic["x"].loaded, record.traffic["dy"].loaded) == (x.nbytes, dy.nbytes)
    if capability == FAST and dtype != F64:
        assert_same(on_reference(case), actual, f"{dtype}, {n}")
        return
    for output, result in exact_layer_norm(*case).check_contract(**actual).items():
        # Pairs of float32 promise 1 ulp of float32.
        assert result.passed or (dtype == F32 and result.worst_ulp <= 1), (output, result)


# ---- the same on small blocks: rows of a thousand elements, and all there is to vary ----

# Rows of float32 that 2 and 4 blocks of 64 threads hold in the backward.
SMALL = {2: 1000, 4: 2000}
# Too little shared memory for the sums over rows.
LITTLE = 8 << 10


@pytest.fixture
def small(monkeypatch):
    """Blocks of 64 threads, and segments however little there is to add up."""
    monkeypatch.setattr(_cuda_plan, "_LONGEST_BLOCK", 64)
    # A row to a block, as in the clusters of a device.
    monkeypatch.setattr(_cuda_plan, "_BLOCK", 32)
    monkeypatch.setattr(_cuda_plan, "_ONE_SEGMENT_BYTES", 0)


SETTINGS = {
    "one cluster": Setting(resident=8),
    "two clusters": Setting(resident=20, seed=1),
    "all clusters": Setting(resident=1000, seed=2, launches=2),
    "misaligned, strided": Setting(resident=24, seed=3, offset=1, gap=3),
    "another schedule": Setting(resident=1000, seed=4),
}


@functools.cache
def plain(folder, cluster):
    return on_host(folder, ordinary(70, SMALL[cluster], F32))[0]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cluster", SMALL)
def test_the_bits_are_those_of_the_reference(cluster, folder):
    plan = _cuda_plan.plan_backward(
        70, SMALL[cluster], F32, F32, 0, shared_limit=LITTLE, cluster_limit=8
    )
    assert (plan.cluster, plan.chunks, plan.segments) == (cluster, 5, 5)
    expected = on_reference(ordinary(70, SMALL[cluster], F32))
    assert_same(expected, plain(folder, cluster), f"{cluster} blocks")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("setting", SETTINGS)
def test_same_bits(setting, folder):
    case = ordinary(70, SMALL[2], F32)
    actual, _ = on_host(folder, case, SETTINGS[setting])
    assert_same(plain(folder, 2), actual, setting)


@pytest.mark.usefixtures("small")
def test_pairs_of_float32_and_no_bit_of_the_grid(folder):
    case = ordinary(70, SMALL[2], F32)
    actual, _ = on_host(folder, case, capability=SLOW)
    for output, result in exact_layer_norm(*case).check_contract(**actual).items():
        assert result.worst_ulp <= 1, (output, result)
    again, _ = on_host(folder, case, SETTINGS["two clusters"], capability=SLOW)
    assert_same(actual, again, "two clusters")


@pytest.mark.usefixtures("small")
def test_rows_of_another_scale_have_it_in_every_block(folder):
    """The largest element, which decides it, is another block's."""
    case = list(ordinary(20, SMALL[2], F32))
    case[0] *= np.float32(2.0**-60)
    case[0][:, 999] = 2.0**60
    actual, _ = on_host(folder, case, capability=SLOW)
    for output, result in exact_layer_norm(*case).check_contract(**actual).items():
        assert result.worst_ulp <= 1 or result.worst_excess <= 16, (output, result)


@pytest.mark.usefixtures("small")
def test_what_is_not_finite_stays_in_its_row(folder):
    case = list(ordinary(20, SMALL[2], F32))
    clean = on_reference(case)
    case[0] = case[0].copy()
    case[0][3, 5] = np.nan
    actual, _ = on_host(folder, case)
    others = np.arange(20) != 3
    for name in ("y", "dx"):
        assert np.isnan(actual[name][3]).all()
        assert actual[name][others].tobytes() == clean[name][others].tobytes()
    assert actual["dbeta"].tobytes() == clean["dbeta"].tobytes()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("wrt", [("x",), ("gamma",), ("x", "beta")])
def test_what_is_asked_for(wrt, folder):
    x, gamma, beta, eps, dy = ordinary(70, SMALL[2], F32)
    kept = host.forward(folder, x, gamma, beta, eps, cluster_limit=8).arrays
    kept.pop("out")
    limits = {"shared_limit": LITTLE, "cluster_limit": 8}
    actual = host.backward(folder, dy, x, gamma, kept, wrt=wrt, **limits).arrays
    names = {"x": ("out", "dx"), "gamma": ("dgamma",) * 2, "beta": ("dbeta",) * 2}
    assert actual.keys() == {names[name][0] for name in wrt}
    for name in wrt:
        given, kind = names[name]
        assert actual[given].tobytes() == plain(folder, 2)[kind].tobytes()


# ---- the tests can fail ----

# What is replaced in the backward, by what.
FAULTS = {
    "the first barrier left out": (
        "LN_INLINE void begin_cluster() { cluster_barrier(); }",
        "LN_INLINE void begin_cluster() { if (!FAULT) cluster_barrier(); }",
    ),
    "the barrier of a sum left out": (
        "    }\n    cluster_barrier();\n}",
        "    }\n    if (!FAULT) sum_barrier();\n}",
    ),
    "a barrier of the block in its place": (
        "LN_INLINE void cluster_barrier() { __cluster_sync(); }",
        """LN_INLINE void cluster_barrier() { __cluster_sync(); }
        LN_INLINE void sum_barrier() {
            if (FAULT) __syncthreads();
            else cluster_barrier();
        }""",
    ),
    "one buffer": ("WARPS + turn * 2 * CLUSTER", "WARPS + (FAULT ? 0 : turn * 2 * CLUSTER)"),
    "one slot for all": ("i * CLUSTER + rank()", "i * CLUSTER + (FAULT ? 0 : rank())"),
    "the next block only": (
        "if (threadIdx.x < CLUSTER) {",
        "if (FAULT ? threadIdx.x == 1 : threadIdx.x < CLUSTER) {",
    ),
    "the columns of the first block": (
        "return rank() * COLUMNS;",
        "return FAULT ? 0 : rank() * COLUMNS;",
    ),
    "a chunk for each block": (
        "chunk = team(); chunk",
        "chunk = FAULT ? blockIdx.x : team(); chunk",
    ),
    "one ticket for all ranks": (
        "1 + rank() * (MOST_SEGMENTS + 1)",
        "1 + (FAULT ? 0 : rank() * (MOST_SEGMENTS + 1))",
    ),
    "columns added up by every block": (
        "return CLUSTER == 1 || stop > p.n ? p.n : stop;",
        "return FAULT || stop > p.n ? p.n : stop;",
    ),
    "a rank that leaves": (
        "        const long long first = chunk * p.chunk_rows;",
        """        if (FAULT && rank() == 1 && chunk == 1) return;
        const long long first = chunk * p.chunk_rows;""",
    ),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_planted_fault_is_found(fault, folder):
    x, gamma, beta, eps, dy = ordinary(40, SMALL[2], F32)
    _, cache = layer_norm_forward(x, gamma, beta, eps, backend="numpy")
    kept = {name: getattr(cache.statistics, name) for name in ("mean", "mean_lo", "rstd")}
    number = 0 if fault is None else 1 + list(FAULTS).index(fault)
    options = {"fault": number, "shared_limit": LITTLE, "cluster_limit": 8}

    def run(seed):
        setting = Setting(resident=4, launches=2, seed=seed)
        text = host.with_faults(FAULTS)
        found = host.backward(folder, dy, x, gamma, kept, setting, text=text, **options)
        return [array.tobytes() for array in found.arrays.values()]

    expected = [array.tobytes() for array in layer_norm_backward(dy, cache)]
    try:
        same = run(0) == run(1) == expected
    except (host.host_shim.LaunchError, AssertionError):
        same = False
    assert same == (fault is None)
