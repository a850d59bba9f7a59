"""layer_norm.cu on the host: contract, bits, bounds, races and schedules, without a GPU."""

import cuda_fixtures as device
import host_shim
import ml_dtypes
import numpy as np
import pytest
from norms import assert_contract

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cuda.plan import choose_kernel, cut
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.families import FAMILIES, make_case

# Fixtures are found by their names in this module.
cupy, use, launches = device.cupy, device.use, device.launches
fake, both, on_device, OUTPUTS = device.fake, device.both, device.on_device, device.OUTPUTS
pytestmark = device.needs_shim

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {"bfloat16": BF16}
# Each length is another pair of kernels to compile, a second each: a few lanes a row, a warp,
# warps. Of few families: columns in a loop, and float16, other than bfloat16 in conversions alone.
LENGTHS = {"bfloat16": (129,), "float32": (5, 129), "float64": (129,)}
LENGTHS_OF_FEW = {"float16": (129,), "float32": (4099,), "float64": (1027,)}
# A cheap one for each way of losing digits in a long sum, and the ends of the range.
FEW = ("F01", "F03", "F07", "F14", "F16", "F27")
# Made to cancel: there the second term of the contract decides the last bits.
CANCELLING = {
    "y": {"F07", "F32"},
    "dgamma": {"F07"},
    "dx": {"F07", "F08", "F20", "F21", "F28", "F28b"},
}


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


def assert_same(expected, actual, names=OUTPUTS):
    for name in names:
        # As float64: NumPy does not know the NaN of bfloat16.
        one, other = (side[name].astype(np.float64) for side in (expected, actual))
        np.testing.assert_array_equal(one, other, err_msg=name)


# ---- the contract and the bits of the reference, on every family ----

CASES = [
    pytest.param(name, dtype, n, id=f"{name}-{dtype}-{n}")
    for table in (LENGTHS, LENGTHS_OF_FEW)
    for dtype, lengths in table.items()
    for n in lengths
    for name, family in FAMILIES.items()
    if family.applies(DTYPES[dtype], n) and (table is LENGTHS or name in FEW)
]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("name", "dtype", "n"), CASES)
def test_families(name, dtype, n):
    family = FAMILIES[name]
    case = make_case(name, DTYPES[dtype], n, max(2, family.smallest_rows))
    actual = both(case)
    if family.finite:
        assert_contract(exact_layer_norm(*case), actual)
    if dtype != "float64":
        compared = [output for output in OUTPUTS if name not in CANCELLING.get(output, ())]
        assert_same(both(case, np.asarray), actual, compared)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", ["F01", "F14", "F15", "F17"])
def test_a_float64_dy_after_a_forward_in_float64_arithmetic(name):
    """The backward in pairs takes the words of the statistics that there are."""
    x, gamma, beta, eps, dy = make_case(name, DTYPES["float32"], 129, 3)
    case = x, gamma, beta, eps, dy.astype(np.float64)
    actual, expected = both(case), both(case, np.asarray)
    for output in OUTPUTS:
        np.testing.assert_array_max_ulp(actual[output], expected[output], maxulp=1)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("eps", [1e-300, 1e-5, 1e300])
def test_a_float64_gamma_calls_for_pairs_with_an_eps_of_any_size(eps):
    x, gamma, beta, _, dy = ordinary(3, 129, DTYPES["float32"], np.float64)
    x[1] = 2
    case = x, gamma, beta, eps, dy
    actual = both(case)
    assert actual["dgamma"].dtype == np.float64
    assert_contract(exact_layer_norm(*case), actual)


# ---- shapes, dtypes of gamma and beta ----


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("rows", "n", "dtype"),
    [(300, 5, "float32"), (1, 129, "float32"), (131, 129, "bfloat16"), (3, 65536, "float32"), (40, 1000, "float32")],
)  # fmt: skip
def test_shapes(rows, n, dtype):
    case = ordinary(rows, n, DTYPES[dtype])
    assert_same(both(case, np.asarray), both(case))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("gamma_dtype", "beta_dtype"),
    [("bfloat16", "float32"), (None, None)],
)
def test_gamma_and_beta_have_their_own_dtypes(gamma_dtype, beta_dtype):
    x, gamma, beta, eps, dy = ordinary(33, 129, DTYPES["float16"], np.float64)
    gamma = None if gamma_dtype is None else gamma.astype(DTYPES[gamma_dtype])
    beta = None if beta_dtype is None else beta.astype(DTYPES[beta_dtype])
    case = x, gamma, beta, eps, dy
    expected, actual = both(case, np.asarray), both(case)
    names = [name for name in OUTPUTS if expected[name] is not None]
    assert_same(expected, actual, names)
    assert [actual[name].dtype for name in names] == [expected[name].dtype for name in names]


# ---- what must not change a bit ----


def strided(array):
    """Put a matrix on the device one element off alignment, its rows one element apart."""
    if array.ndim == 1:
        return on_device(array)
    rows, n = array.shape
    words = np.full(rows * (n + 1) + 17, np.nan, array.dtype)
    begin = -words.ctypes.data % 16 // array.itemsize + 1
    view = words[begin : begin + rows * (n + 1)].reshape(rows, n + 1)[:, :n]
    view[...] = array
    return fake.ndarray(view)


SETTINGS = {
    "one block": ({"resident": 1}, on_device),
    "two blocks, one after the other": ({"resident": 2, "seed": 1}, on_device),
    "all blocks": ({"resident": 1000, "seed": 3}, on_device),
    "the last block adds up": ({"resident": 1000, "cooperative": False, "seed": 4}, on_device),
    "the last of three blocks": ({"resident": 3, "cooperative": False, "seed": 5}, on_device),
    "strided, misaligned": ({"resident": 2, "seed": 8}, strided),
}
INVARIANT = {
    "warps a row": (131, 129, "float32"),
    "a block a row": (40, 1000, "float32"),
    "columns in a loop": (33, 1027, "float64"),
}


@pytest.mark.parametrize("name", INVARIANT)
def test_same_bits(name, use):
    rows, n, dtype = INVARIANT[name]
    kernel = choose_kernel(n, *[DTYPES[dtype]] * 4, pairs=dtype == "float64")
    assert (kernel.vectors == 0) == (name == "columns in a loop")
    assert cut(rows, kernel.slots).number >= 3
    use()
    case = ordinary(rows, n, DTYPES[dtype])
    expected = both(case)
    for options, place in SETTINGS.values():
        use(**options)
        # Each launch takes the counter as the one before left it.
        assert_same(expected, both(case, place))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("value", "n"), [(np.nan, 129), (-np.inf, 129), (np.inf, 4099)])
def test_what_is_not_finite_stays_in_its_row(value, n):
    case = ordinary(7, n, DTYPES["float32"])
    clean = both(case)
    case[0][3, n - 1] = value
    actual = both(case)
    others = np.arange(7) != 3
    for name in ("y", "dx"):
        assert np.isnan(actual[name][3]).all()
        assert actual[name][others].tobytes() == clean[name][others].tobytes()
    assert np.isnan(actual["dgamma"]).all()
    assert actual["dbeta"].tobytes() == clean["dbeta"].tobytes()


def test_rows_in_registers_are_read_once(launches):
    case = ordinary(40, 1000, DTYPES["float32"])
    both(case)
    forward, backward = (launch.traffic for launch in launches)
    loaded = [forward["x"], backward["x"], backward["dy"]]
    assert [traffic.loaded for traffic in loaded] == [case[0].nbytes] * 3
    assert forward["out"].stored == backward["out"].stored == case[0].nbytes


# ---- the tests can fail ----

# What is replaced in the backward, by what; where that shows; and whether blocks wait for one another.
LANES, WARPS = (300, 5), (40, 1000)
FAULTS = {
    "a tail without its guard": (
        LANES, "if (i < count) result.e[i] = p[i]", "if (FAULT || i < count) result.e[i] = p[i]"),
    "a counter not left as it was": (
        WARPS, "0x80000000u - (gridDim.x - 1)", "0x80000000u - (gridDim.x - 1 - FAULT)"),
    "no barrier between the warps of a row": (
        WARPS, "__syncthreads();\n        turn ^= 1;", "if (!FAULT) __syncthreads();\n        turn ^= 1;"),
    "no second set of slots": (
        WARPS, "turn ^= 1;", "turn ^= FAULT ? 0 : 1;"),
    # Of these no schedule need show anything: they are races.
    "no fence before the arrival": (
        WARPS, "visible before its arrival is.\n        __threadfence();",
        "visible before its arrival is.\n        if (!FAULT) __threadfence();"),
    "no fence after the arrival": (
        WARPS, "visible from here on.\n        __threadfence();",
        "visible from here on.\n        if (!FAULT) __threadfence();"),
    "no barrier before the sums of the slots are read": (
        LANES, "all slots before they are read.\n    __syncthreads();",
        "all slots before they are read.\n    if (!FAULT) __syncthreads();"),
    "no barrier before they are written again": (
        LANES, "the next sums are written.\n    __syncthreads();",
        "the next sums are written.\n    if (!FAULT) __syncthreads();"),
    "no barrier before the block's fence": (
        WARPS, "before the fence of its first thread.\n    __syncthreads();",
        "before the fence of its first thread.\n    if (!FAULT) __syncthreads();"),
    "no barrier after the block's fence": (
        WARPS, "return __syncthreads_or(met);", "return FAULT ? p.barrier : __syncthreads_or(met);"),
}  # fmt: skip


def faulty():
    """Return the source with all faults in it, each where `planted` is its number: one compilation."""
    text = fake.source()
    for number, (name, (_, old, new)) in enumerate(FAULTS.items(), 1):
        assert text.count(old) == 1, name
        text = text.replace(old, new.replace("FAULT", f"(fault() == {number})"))
    # Not seen by the shim: `planted` is in no tensor.
    unseen = '__attribute__((noinline, no_sanitize("thread"))) inline int fault()'
    return f'extern "C" {{ int planted; }}\n{unseen} {{ return planted; }}\n{text}'


def finds(use, shape, fault, cooperative):
    """Tell whether running the backward twice shows that it is not what layer_norm.cu says."""
    x, gamma, beta, eps, dy = ordinary(*shape, DTYPES["float32"])
    expected = both((x, gamma, beta, eps, dy), np.asarray)
    use(resident=2, cooperative=cooperative, text=faulty(), fault=fault)
    _, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)), eps)
    try:
        made = [layer_norm_backward(on_device(dy), cache) for _ in range(2)]
    except (host_shim.LaunchError, AssertionError):
        return True
    return any(
        array.get().tobytes() != expected[name].tobytes()
        for each in made
        for name, array in zip(OUTPUTS[1:], each, strict=True)
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, use):
    number, shape = 1 + list(FAULTS).index(fault), FAULTS[fault][0]
    assert all(finds(use, shape, number, cooperative) for cooperative in (True, False))


def test_no_fault_is_found_in_the_source_itself(use):
    assert not any(
        finds(use, shape, 0, together) for shape in (LANES, WARPS) for together in (0, 1)
    )
