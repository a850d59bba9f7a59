"""layer_norm.cu on the host: contract, bits, bounds, races and schedules, without a GPU."""

import functools

import host_shim
import layer_norm_host as host
import ml_dtypes
import numpy as np
import pytest
from layer_norm_host import Setting

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cuda.plan import choose_kernel, cut
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.families import FAMILIES, make_case

pytestmark = pytest.mark.skipif(bool(host_shim.why_not()), reason=host_shim.why_not())

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {"bfloat16": BF16}
# Each length is another pair of kernels to compile, a second each: a few lanes a row, a warp,
# warps, columns in a loop. float16 differs from bfloat16 in its conversions alone.
LENGTHS = {"float16": (129,), "bfloat16": (129,), "float32": (5, 129), "float64": (129,)}
LOOPED = {"bfloat16": 4099, "float32": 4099, "float64": 1027}
# A cheap one for each way of losing digits in a long sum.
LONG = ("F01", "F03", "F07", "F14", "F27")
# Made to cancel: there the second term of the contract decides the last bits.
CANCELLING = {
    "y": {"F07", "F32"},
    "dgamma": {"F07"},
    "dx": {"F07", "F08", "F20", "F21", "F28", "F28b"},
}
OUTPUTS = ("y", "dx", "dgamma", "dbeta")


def ordinary(rows, n, dtype, gamma_dtype=None):
    rng = np.random.default_rng([rows, n])
    gamma_dtype = dtype if gamma_dtype is None else gamma_dtype
    return (
        rng.standard_normal((rows, n)).astype(dtype),
        (1 + 0.1 * rng.standard_normal(n)).astype(gamma_dtype),
        (0.1 * rng.standard_normal(n)).astype(gamma_dtype),
        1e-5,
        rng.standard_normal((rows, n)).astype(dtype),
    )


def on_reference(case):
    x, gamma, beta, eps, dy = case
    y, cache = layer_norm_forward(x, gamma, beta, eps, backend="numpy")
    return dict(zip(OUTPUTS, (y, *layer_norm_backward(dy, cache)), strict=True))


def assert_same(expected, actual, names=OUTPUTS):
    for name in names:
        # As float64: NumPy does not know the NaN of bfloat16.
        one, other = (side[name].astype(np.float64) for side in (expected, actual))
        np.testing.assert_array_equal(one, other, err_msg=name)


def assert_contract(case, actual):
    for output, result in exact_layer_norm(*case).check_contract(**actual).items():
        assert result.passed, (output, result)


# ---- the contract and the bits of the reference, on every family ----

CASES = [
    pytest.param(name, dtype, n, id=f"{name}-{dtype}-{n}")
    for table in (LENGTHS, {dtype: (n,) for dtype, n in LOOPED.items()})
    for dtype, lengths in table.items()
    for n in lengths
    for name, family in FAMILIES.items()
    if family.applies(DTYPES[dtype], n) and (table is LENGTHS or name in LONG)
]


@pytest.mark.parametrize(("name", "dtype", "n"), CASES)
def test_families(name, dtype, n, builds):
    family = FAMILIES[name]
    case = make_case(name, DTYPES[dtype], n, max(2, family.smallest_rows))
    actual = host.both(builds, case)
    if family.finite:
        assert_contract(case, actual)
    if dtype != "float64":
        compared = [output for output in OUTPUTS if name not in CANCELLING.get(output, ())]
        assert_same(on_reference(case), actual, compared)


@pytest.mark.parametrize("name", ["F01", "F14", "F15", "F17"])
def test_a_float64_dy_after_a_forward_in_float64_arithmetic(name, builds):
    """The backward in pairs takes the words of the statistics that there are."""
    x, gamma, beta, eps, dy = make_case(name, DTYPES["float32"], 129, 3)
    kept = host.forward(builds, x, gamma, beta, eps).arrays
    kept.pop("out")
    dy = dy.astype(np.float64)
    actual = host.backward(builds, dy, x, gamma, kept).arrays
    expected = on_reference((x, gamma, beta, eps, dy))
    for one, other in zip(actual.values(), list(expected.values())[1:], strict=True):
        np.testing.assert_array_max_ulp(one, other, maxulp=1)


def test_a_float64_gamma_calls_for_pairs(builds):
    case = ordinary(5, 129, DTYPES["float32"], np.float64)
    actual = host.both(builds, case)
    assert actual["dgamma"].dtype == np.float64
    assert_contract(case, actual)


@pytest.mark.parametrize("eps", [1e-300, 1e300])
def test_an_eps_of_any_size_beside_a_float64_gamma(eps, builds):
    """Where it is all of var + eps, rstd has a scale of its own until it is kept."""
    x, gamma, beta, _, dy = ordinary(3, 129, DTYPES["float32"], np.float64)
    x[1] = 2
    case = x, gamma, beta, eps, dy
    assert_contract(case, host.both(builds, case))


# ---- shapes, dtypes of gamma and beta, what is asked for ----


@pytest.mark.parametrize(
    ("rows", "n", "dtype"),
    [(300, 5, "float32"), (1, 129, "float32"), (131, 129, "bfloat16"), (3, 65536, "float32"), (40, 1000, "float32")],
)  # fmt: skip
def test_shapes(rows, n, dtype, builds):
    case = ordinary(rows, n, DTYPES[dtype])
    assert_same(on_reference(case), host.both(builds, case))


@pytest.mark.parametrize(
    ("gamma_dtype", "beta_dtype"),
    [("float32", "float32"), ("bfloat16", "float16"), (None, "float32"), ("float32", None), (None, None)],
)  # fmt: skip
def test_gamma_and_beta_have_their_own_dtypes(gamma_dtype, beta_dtype, builds):
    x, gamma, beta, eps, dy = ordinary(33, 129, DTYPES["float16"], np.float64)
    gamma = None if gamma_dtype is None else gamma.astype(DTYPES[gamma_dtype])
    beta = None if beta_dtype is None else beta.astype(DTYPES[beta_dtype])
    case = x, gamma, beta, eps, dy
    expected, actual = on_reference(case), host.both(builds, case)
    names = [name for name in OUTPUTS if expected[name] is not None]
    assert_same(expected, actual, names)
    assert [actual[name].dtype for name in names] == [expected[name].dtype for name in names]


@pytest.mark.parametrize("wrt", [("x",), ("gamma",), ("beta",), ("x", "beta"), ("gamma", "beta")])
def test_what_is_asked_for(wrt, builds):
    x, gamma, beta, eps, dy = ordinary(131, 129, DTYPES["float32"])
    kept = host.forward(builds, x, gamma, beta, eps).arrays
    kept.pop("out")
    some = host.backward(builds, dy, x, gamma, kept, wrt=wrt).arrays
    names = {"x": ("out", "dx"), "gamma": ("dgamma",) * 2, "beta": ("dbeta",) * 2}
    assert some.keys() == {names[name][0] for name in wrt}
    full = plain(builds, "warps a row")
    for given, kind in (names[name] for name in wrt):
        assert some[given].tobytes() == full[kind].tobytes()


# ---- what must not change a bit ----

SETTINGS = {
    "one block": Setting(resident=1),
    "two blocks, last first": Setting(resident=2, seed=1),
    "all blocks": Setting(resident=1000, seed=3),
    "the last block adds up": Setting(resident=1000, cooperative=False, seed=4),
    "the last of three blocks": Setting(resident=3, cooperative=False, seed=5),
    "misaligned": Setting(offset=1, seed=6),
    "strided, misaligned": Setting(gap=1, offset=1, resident=2, seed=8),
    "twice": Setting(launches=2, seed=9),
    "twice, the last block": Setting(launches=2, resident=7, cooperative=False, seed=10),
}
INVARIANT = {
    "warps a row": (131, 129, "float32"),
    "a block a row": (40, 1000, "float32"),
    "float64": (50, 129, "float64"),
    "columns in a loop": (33, 4099, "float32"),
}


@functools.cache
def plain(builds, name):
    rows, n, dtype = INVARIANT[name]
    return host.both(builds, ordinary(rows, n, DTYPES[dtype]))


# A second each.
OF_LOOPS = ("one block", "the last of three blocks", "strided, misaligned")


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for name in INVARIANT
        for setting in (OF_LOOPS if name == "columns in a loop" else SETTINGS)
    ],
)
def test_same_bits(name, setting, builds):
    rows, n, dtype = INVARIANT[name]
    actual = host.both(builds, ordinary(rows, n, DTYPES[dtype]), SETTINGS[setting])
    assert_same(plain(builds, name), actual)


def test_the_invariant_shapes_have_several_chunks_and_both_paths():
    vectors = set()
    for rows, n, dtype in INVARIANT.values():
        kernel = choose_kernel(False, n, *[DTYPES[dtype]] * 2, dtype == "float64")
        vectors.add(kernel.vectors > 0)
        assert cut(rows, kernel.slots).number >= 3
    assert vectors == {True, False}


def test_rows_do_not_depend_on_the_batch(builds):
    x, gamma, beta, eps, dy = ordinary(131, 129, DTYPES["float32"])
    full = plain(builds, "warps a row")
    for rows in (slice(0, 1), slice(13, 30)):
        part = host.both(builds, (x[rows], gamma, beta, eps, dy[rows]))
        for name in ("y", "dx"):
            assert part[name].tobytes() == full[name][rows].tobytes()


@pytest.mark.parametrize(("value", "n"), [(np.nan, 129), (-np.inf, 129), (np.inf, 4099)])
def test_what_is_not_finite_stays_in_its_row(value, n, builds):
    case = ordinary(7, n, DTYPES["float32"])
    clean = host.both(builds, case)
    case[0][3, n - 1] = value
    actual = host.both(builds, case)
    others = np.arange(7) != 3
    for name in ("y", "dx"):
        assert np.isnan(actual[name][3]).all()
        assert actual[name][others].tobytes() == clean[name][others].tobytes()
    assert np.isnan(actual["dgamma"]).all()
    assert actual["dbeta"].tobytes() == clean["dbeta"].tobytes()


def test_rows_in_registers_are_read_once(builds):
    x, gamma, beta, eps, dy = ordinary(40, 1000, DTYPES["float32"])
    forward = host.forward(builds, x, gamma, beta, eps)
    forward.arrays.pop("out")
    backward = host.backward(builds, dy, x, gamma, forward.arrays)
    loaded = [forward.traffic["x"], backward.traffic["x"], backward.traffic["dy"]]
    assert [traffic.loaded for traffic in loaded] == [x.nbytes] * 3
    assert forward.traffic["out"].stored == backward.traffic["out"].stored == x.nbytes


# ---- the tests can fail ----

# What is replaced in the backward, by what; and where that shows.
LANES, WARPS = (300, 5), (40, 1000)
FAULTS = {
    "a tail without its guard": (
        LANES, "if (i < count) set(", "if (FAULT || i < count) set("),
    "half of the lanes": (
        LANES, "return __shfl_xor_sync(ALL_LANES,", "return __shfl_xor_sync(FAULT ? 0xffffu : ALL_LANES,"),
    "chunks left out": (
        WARPS, "chunk += gridDim.x)", "chunk += gridDim.x + FAULT)"),
    "a grid in the sums": (
        WARPS, "= {0.0, 0.0};\n            // Four", "= {FAULT ? (double)blocks : 0.0, 0.0};\n            // Four"),
    "a ticket not left as it was": (
        WARPS, "gridDim.x - 1) == gridDim.x - 1 ?", "gridDim.x - !FAULT) == gridDim.x - 1 ?"),
    "no barrier between the warps of a row": (
        WARPS, "__syncthreads();\n        turn ^= 1;", "if (!FAULT) __syncthreads();\n        turn ^= 1;"),
    "no second set of slots": (
        WARPS, "turn ^= 1;", "turn ^= FAULT ? 0 : 1;"),
    # Of these no schedule need show anything: they are races.
    "no fence before the arrival": (
        WARPS, "#define LN_RELEASE_FENCE() __threadfence()",
        "#define LN_RELEASE_FENCE() (FAULT ? (void)0 : __threadfence())"),
    "no fence after the arrival": (
        WARPS, "#define LN_ACQUIRE_FENCE() __threadfence()",
        "#define LN_ACQUIRE_FENCE() (FAULT ? (void)0 : __threadfence())"),
    "no barrier before the sums of the slots are read": (
        LANES, "all slots before they are read.\n    __syncthreads();",
        "all slots before they are read.\n    if (!FAULT) __syncthreads();"),
    "no barrier before they are written again": (
        LANES, "the next sums are written.\n    __syncthreads();",
        "the next sums are written.\n    if (!FAULT) __syncthreads();"),
    "no barrier before the sums of the runs are read": (
        WARPS, "before the first warp reads them.\n        __syncthreads();",
        "before the first warp reads them.\n        if (!FAULT) __syncthreads();"),
    "no barrier before the block's fence": (
        WARPS, "first barrier of grid_barrier.\n    __syncthreads();",
        "first barrier of grid_barrier.\n    if (!FAULT) __syncthreads();"),
    "no barrier after the block's flag": (
        WARPS, "before what the block does then.\n    __syncthreads();",
        "before what the block does then.\n    if (!FAULT) __syncthreads();"),
    "no barrier before the next group": (
        WARPS, "reads before the next group is written.\n        __syncthreads();",
        "reads before the next group is written.\n        if (!FAULT) __syncthreads();"),
    "no barrier before the grid's": (
        WARPS, "before the fence of its first thread.\n    __syncthreads();",
        "before the fence of its first thread.\n    if (!FAULT) __syncthreads();"),
    "no barrier after the grid's": (
        WARPS, "before what the others read.\n    __syncthreads();",
        "before what the others read.\n    if (!FAULT) __syncthreads();"),
}  # fmt: skip
TEXT = {name: words[1:] for name, words in FAULTS.items()}


def finds(builds, shape, fault, cooperative):
    """Tell whether running the backward shows that it is not what layer_norm.cu says."""
    x, gamma, beta, eps, dy = ordinary(*shape, DTYPES["float32"])
    _, cache = layer_norm_forward(x, gamma, beta, eps, backend="numpy")
    kept = {name: getattr(cache.statistics, name) for name in ("mean", "mean_lo", "rstd")}
    setting, text = Setting(2, cooperative, launches=2), host.with_faults(TEXT)
    try:
        made = host.backward(builds, dy, x, gamma, kept, setting, text=text, fault=fault).arrays
    except (host_shim.LaunchError, AssertionError):
        return True
    expected = layer_norm_backward(dy, cache)
    return any(a.tobytes() != b.tobytes() for a, b in zip(expected, made.values(), strict=True))


# Under a cooperative launch and without.
OF_GRIDS = ("no barrier before the grid's", "no barrier after the grid's")
OF_BOTH = ("no fence before the arrival", "no fence after the arrival")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, builds):
    number, shape = 1 + list(FAULTS).index(fault), FAULTS[fault][0]
    together = (True,) if fault in OF_GRIDS else (False, True) if fault in OF_BOTH else (False,)
    assert all(finds(builds, shape, number, each) for each in together)


def test_no_fault_is_found_in_the_source_itself(builds):
    assert not any(
        finds(builds, shape, 0, together) for shape in (LANES, WARPS) for together in (0, 1)
    )
