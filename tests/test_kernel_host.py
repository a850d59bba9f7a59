"""layer_norm.cu on the host: contract, bits, bounds and schedules, without a GPU."""

import functools
from typing import NamedTuple

import layer_norm_host as host
import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.analysis.families import FAMILIES, make_case
from stablenorm.cuda import plan as _cuda_plan
from stablenorm.oracle import exact_layer_norm

pytestmark = pytest.mark.skipif(bool(host.host_shim.why_not()), reason=host.host_shim.why_not())

Setting, FAST, SLOW = host.Setting, host.FAST, host.SLOW
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# Each length is another pair of kernels to compile, half a second each: a few lanes; a warp; warps
# of one row; columns in a loop. float16 differs from bfloat16 in its conversions alone.
LENGTHS = {"float16": (129,), "bfloat16": (5, 129), "float32": (5, 129, 1000), "float64": (129,)}
LOOPED = {"bfloat16": 9001, "float32": 5003, "float64": 2057}
# A cheap one for each way of losing digits in a long sum.
LONG = ("F01", "F03", "F07", "F14", "F27")
# Made to cancel: there the second term of the contract decides the last bits.
CANCELLING = {"y": {"F07", "F32"}, "dx": {"F07", "F08", "F20", "F21", "F28", "F28b"}}


@pytest.fixture(scope="session")
def folder(tmp_path_factory, worker_id):
    """Where kernels are kept: one folder for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / "kernels"
    path.mkdir(exist_ok=True)
    return path


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


class Results(NamedTuple):
    y: np.ndarray
    dx: np.ndarray
    dgamma: np.ndarray
    dbeta: np.ndarray


def on_host(folder, case, setting=host.PLAIN, **options):
    y, gradients = host.both(folder, case, setting, **options)
    return Results(y, *gradients)


def on_reference(case):
    x, gamma, beta, eps, dy = case
    y, cache = layer_norm_forward(x, gamma, beta, eps, backend="numpy")
    return Results(y, *layer_norm_backward(dy, cache))


def assert_same(expected, actual, names, recipe):
    for name in names:
        # As float64: NumPy does not know the NaN of bfloat16.
        np.testing.assert_array_equal(
            getattr(expected, name).astype(np.float64),
            getattr(actual, name).astype(np.float64),
            err_msg=f"{recipe}, {name}",
        )


# ---- the contract and the bits of the reference, on every family ----

CASES = [
    pytest.param(name, dtype, n, id=f"{name}-{dtype}-{n}")
    for dtype, lengths in LENGTHS.items()
    for n in lengths
    for name, family in FAMILIES.items()
    if family.applies(DTYPES[dtype], n) and (n <= 129 or name in LONG)
] + [
    pytest.param(name, dtype, n, id=f"{name}-{dtype}-{n}")
    for dtype, n in LOOPED.items()
    for name in LONG
]


@pytest.mark.parametrize(("name", "dtype", "n"), CASES)
def test_families(name, dtype, n, folder):
    family = FAMILIES[name]
    case = make_case(name, DTYPES[dtype], n, max(2, family.smallest_rows))
    actual = on_host(folder, case)
    recipe = f"make_case({name!r}, {dtype!r}, n={n})"
    if family.finite:
        check_contract(case, actual, recipe)
    if dtype != "float64":
        compared = [output for output, names in CANCELLING.items() if name not in names]
        assert_same(on_reference(case), actual, compared, recipe)


def check_contract(case, actual, recipe):
    for output, result in exact_layer_norm(*case).check_contract(**actual._asdict()).items():
        assert result.passed, f"{recipe}, {output}: {result}"


# ---- pairs of float32, where float64 is slow ----

PAIRS = [
    pytest.param(name, dtype, n, id=f"{name}-{dtype}-{n}")
    for dtype, n in (("bfloat16", 129), ("float32", 129), ("float32", 5003))
    for name, family in FAMILIES.items()
    if family.applies(DTYPES[dtype], n) and family.finite and (n <= 129 or name in LONG)
]


@pytest.mark.parametrize(("name", "dtype", "n"), PAIRS)
def test_families_in_pairs_of_float32(name, dtype, n, folder):
    case = make_case(name, DTYPES[dtype], n, max(2, FAMILIES[name].smallest_rows))
    actual = on_host(folder, case, capability=SLOW)
    recipe = f"make_case({name!r}, {dtype!r}, n={n}) in pairs of float32"
    if dtype != "float32":
        check_contract(case, actual, recipe)
        return
    for output, result in exact_layer_norm(*case).check_contract(**actual._asdict()).items():
        # 1 ulp; where an element cancels almost completely, the contract's second term with the
        # 48 bits of a pair less the 4 that its operations lose (a product of pairs errs by up to
        # 5 u**2, a sum by 3 u**2: Joldes, Muller and Popescu, ACM TOMS 44 (2017)).
        # Measured at n = 129: 1.04 (y of F32), 0.67 (dx of F21), 0.43 (dx of F28b), 0.21 (dx of F07).
        assert result.worst_ulp <= 1 or result.worst_excess <= 16, f"{recipe}, {output}: {result}"


@pytest.mark.parametrize("rows", [40, 400])
def test_dgamma_of_subnormal_rows_in_pairs_of_float32(rows, folder, monkeypatch):
    """Terms of about 2**-141: with a low word of the same range each row would lose up to 2**-150."""
    x, gamma, beta, eps, dy = make_case("F17", np.dtype(np.float32), 129, rows)
    # Each row many times, so that what it loses always has the same sign; and ordinary rows that
    # dy leaves out, which must not decide the scale of a sum that they are no part of.
    x, dy = (np.repeat(a[: rows // 10], 10, axis=0) for a in (x, dy))
    x[::7], dy[::7] = np.arange(129), 0
    case = x, gamma, beta, eps, dy
    # As many segments as for large data, if there are as many chunks.
    monkeypatch.setattr(_cuda_plan, "_ONE_SEGMENT_BYTES", 0)
    plan = _cuda_plan.plan_backward(*x.shape, x.dtype, x.dtype, _cuda_plan.FLOAT_PAIRS)
    assert (plan.chunks, plan.segments) == {40: (3, 3), 400: (23, 8)}[rows]
    for setting in (host.PLAIN, Setting(resident=2, cooperative=0, seed=1)):
        actual = on_host(folder, case, setting, capability=SLOW)
        results = exact_layer_norm(*case).check_contract(**actual._asdict())
        assert results.pop("dgamma").worst_ulp <= 0.51
        assert all(result.passed for result in results.values())


@pytest.mark.parametrize("name", ["F01", "F14", "F15", "F17"])
def test_a_float64_dy_after_a_forward_in_pairs_of_float32(name, folder):
    """The statistics have the scale of their rows; dx, which is float32, has none."""
    x, gamma, beta, eps, dy = make_case(name, np.dtype(np.float32), 129, 3)
    statistics = host.forward(folder, x, gamma, beta, eps, capability=SLOW).arrays
    statistics.pop("out")
    dy = dy.astype(np.float64)
    actual = host.backward(folder, dy, x, gamma, statistics, capability=SLOW).arrays
    _, cache = layer_norm_forward(x, gamma, beta, eps, backend="numpy")
    for one, other in zip(actual.values(), layer_norm_backward(dy, cache), strict=True):
        np.testing.assert_array_max_ulp(one, other, maxulp=1)


# ---- where a block may have more shared memory than every device grants ----

# KiB that a block may ask for on sm_90 and sm_120; sm_80 has enough for the same kernels as sm_90
# (tests/test_cuda_plan.py). On sm_120 columns in a loop begin at 4609.
SHARED = [
    ("float32", 5001, 227, FAST),
    ("bfloat16", 8192, 227, FAST),
    ("float32", 4500, 99, SLOW),
]


@pytest.mark.parametrize(("dtype", "n", "kib", "capability"), SHARED)
def test_sums_in_shared_memory(dtype, n, kib, capability, folder):
    case = ordinary(17, n, DTYPES[dtype])
    x, gamma, beta, eps, dy = case
    statistics = host.forward(folder, x, gamma, beta, eps, capability=capability).arrays
    statistics.pop("out")
    options = {"capability": capability, "shared_limit": kib << 10}
    outcome = host.backward(folder, dy, x, gamma, statistics, **options)
    # In a loop over columns dy would be read three times and x twice.
    traffic = outcome.records[0].traffic
    assert (traffic["x"].loaded, traffic["dy"].loaded) == (x.nbytes, dy.nbytes)
    actual = Results(None, *outcome.arrays.values())
    if capability == FAST:
        assert_same(on_reference(case), actual, Results._fields[1:], f"{dtype}, {n}, {kib} KiB")
    else:
        for name, expected in zip(Results._fields[1:], on_reference(case)[1:], strict=True):
            np.testing.assert_array_max_ulp(getattr(actual, name), expected, maxulp=1)
    again = Setting(resident=2, cooperative=0, offset=1, gap=3, launches=2, seed=1)
    other = host.backward(folder, dy, x, gamma, statistics, again, **options)
    for name, array in outcome.arrays.items():
        assert array.tobytes() == other.arrays[name].tobytes(), name


# ---- shapes, dtypes of gamma and beta, what is asked for ----


@pytest.mark.parametrize(
    ("rows", "n", "dtype"),
    [
        (1, 1, "float32"),
        (300, 1, "float32"),
        (3, 2, "bfloat16"),
        (70, 33, "float32"),
        (1, 129, "float32"),
        (131, 129, "bfloat16"),
        (9, 256, "float32"),
        (2, 1024, "float32"),
    ],
)
def test_shapes(rows, n, dtype, folder):
    case = ordinary(rows, n, DTYPES[dtype])
    assert_same(on_reference(case), on_host(folder, case), Results._fields, f"{rows, n}")


def test_the_longest_rows(folder):
    case = ordinary(2, 65536, np.dtype(np.float32))
    assert_same(on_reference(case), on_host(folder, case), ("y", "dx"), "(2, 65536)")


@pytest.mark.parametrize(
    ("gamma_dtype", "beta_dtype"),
    [("float32", "float32"), ("bfloat16", "float16"), (None, "float32"), ("float32", None), (None, None)],
)  # fmt: skip
def test_gamma_and_beta_have_their_own_dtypes(gamma_dtype, beta_dtype, folder):
    x, gamma, beta, eps, dy = ordinary(33, 129, np.dtype(np.float16), np.float64)
    gamma = None if gamma_dtype is None else gamma.astype(DTYPES[gamma_dtype])
    beta = None if beta_dtype is None else beta.astype(DTYPES[beta_dtype])
    case = x, gamma, beta, eps, dy
    expected, actual = on_reference(case), on_host(folder, case)
    names = [name for name in Results._fields if getattr(expected, name) is not None]
    assert_same(expected, actual, names, f"gamma {gamma_dtype}, beta {beta_dtype}")
    for name in names:
        assert getattr(actual, name).dtype == getattr(expected, name).dtype


def test_a_float64_gamma_calls_for_pairs(folder):
    x, gamma, beta, eps, dy = ordinary(5, 129, np.dtype(np.float16), np.float64)
    case = x, gamma, beta, eps, dy
    actual = on_host(folder, case)
    assert actual.dgamma.dtype == np.float64
    check_contract(case, actual, "float16 x, float64 gamma")


@pytest.mark.parametrize("wrt", [("x",), ("gamma",), ("beta",), ("x", "beta"), ("gamma", "beta")])
def test_what_is_asked_for(wrt, folder):
    x, gamma, beta, eps, dy = ordinary(131, 129, np.dtype(np.float32))
    statistics = host.forward(folder, x, gamma, beta, eps).arrays
    statistics.pop("out")
    full = host.backward(folder, dy, x, gamma, statistics).arrays
    some = host.backward(folder, dy, x, gamma, statistics, wrt=wrt).arrays
    assert some.keys() == {{"x": "out", "gamma": "dgamma", "beta": "dbeta"}[name] for name in wrt}
    for name, array in some.items():
        assert array.tobytes() == full[name].tobytes()


# ---- what must not change a bit ----

SETTINGS = {
    "one block": Setting(resident=1),
    "two blocks": Setting(resident=2, seed=1),
    "five blocks": Setting(resident=5, seed=2),
    "all blocks": Setting(resident=1000, seed=3),
    "tickets": Setting(resident=1000, cooperative=0, seed=4),
    "tickets of three blocks": Setting(resident=3, cooperative=0, seed=5),
    "misaligned": Setting(offset=1, seed=6),
    "strided": Setting(gap=3, seed=7),
    "strided, misaligned": Setting(gap=1, offset=1, resident=2, seed=8),
    "twice": Setting(launches=2, seed=9),
    "twice by tickets": Setting(launches=2, resident=7, cooperative=0, seed=10),
}
INVARIANT = {
    "a warp a row": (131, 129, "float32"),
    "a block a row": (40, 1000, "float32"),
    "float64": (50, 129, "float64"),
    # Too long for the blocks of 64 threads of `loop_early`, which changes them for good: the last.
    "columns in a loop": (33, 1103, "float32"),
}


@pytest.fixture
def loop_early(monkeypatch):
    """Small blocks, whose rows are too long for registers early, and segments and a grid barrier."""
    changed = {"_BLOCK": 64, "_LONGEST_BLOCK": 64, "_ONE_SEGMENT_BYTES": 0}

    def when(name):
        for constant in changed if name == "columns in a loop" else ():
            monkeypatch.setattr(_cuda_plan, constant, changed[constant])

    return when


@functools.cache
def plain(folder, name, capability):
    rows, n, dtype = INVARIANT[name]
    return on_host(folder, ordinary(rows, n, DTYPES[dtype]), capability=capability)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", INVARIANT)
def test_same_bits(name, setting, folder, loop_early):
    rows, n, dtype = INVARIANT[name]
    loop_early(name)
    actual = on_host(folder, ordinary(rows, n, DTYPES[dtype]), SETTINGS[setting])
    assert_same(plain(folder, name, FAST), actual, Results._fields, f"{name}, {setting}")


@pytest.mark.parametrize("setting", ["tickets", "strided, misaligned", "twice"])
def test_same_bits_in_pairs_of_float32(setting, folder):
    case = ordinary(131, 129, np.dtype(np.float32))
    actual = on_host(folder, case, SETTINGS[setting], capability=SLOW)
    assert_same(plain(folder, "a warp a row", SLOW), actual, Results._fields, setting)


def test_the_settings_take_every_way_of_adding_up(loop_early):
    modes = set()
    for name, (rows, n, dtype) in INVARIANT.items():
        loop_early(name)
        which = _cuda_plan.DOUBLE_PAIRS if dtype == "float64" else _cuda_plan.DOUBLE
        plan = _cuda_plan.plan_backward(rows, n, DTYPES[dtype], DTYPES[dtype], which)
        assert ("-DLN_VECTORS=0" in plan.defines) == (name == "columns in a loop")
        for setting in SETTINGS.values():
            grid = _cuda_plan.grid_blocks(plan, rows, setting.resident)
            modes.add((_cuda_plan.final_mode(plan, grid, setting.cooperative), plan.segments > 1))
    barrier, tickets = _cuda_plan.GRID_BARRIER, _cuda_plan.TICKETS
    assert modes == {(barrier, True), (tickets, True), (tickets, False)}


def test_rows_do_not_depend_on_the_batch(folder):
    x, gamma, beta, eps, dy = ordinary(70, 129, np.dtype(np.float32))
    full = on_host(folder, (x, gamma, beta, eps, dy))
    for rows in (slice(0, 1), slice(13, 30)):
        part = on_host(folder, (x[rows], gamma, beta, eps, dy[rows]))
        assert part.y.tobytes() == full.y[rows].tobytes()
        assert part.dx.tobytes() == full.dx[rows].tobytes()


@pytest.mark.parametrize(
    ("value", "n"), [(np.nan, 129), (np.inf, 129), (-np.inf, 129), (np.inf, 5003)]
)
def test_what_is_not_finite_stays_in_its_row(value, n, folder):
    x, gamma, beta, eps, dy = ordinary(7, n, np.dtype(np.float32))
    clean = on_host(folder, (x, gamma, beta, eps, dy))
    x = x.copy()
    x[3, n - 1] = value
    actual = on_host(folder, (x, gamma, beta, eps, dy))
    others = np.arange(7) != 3
    for name in ("y", "dx"):
        assert np.isnan(getattr(actual, name)[3]).all()
        assert getattr(actual, name)[others].tobytes() == getattr(clean, name)[others].tobytes()
    assert np.isnan(actual.dgamma).all()
    assert actual.dbeta.tobytes() == clean.dbeta.tobytes()


# ---- traffic ----


def test_rows_in_registers_are_read_once(folder):
    x, gamma, beta, eps, dy = ordinary(131, 1000, np.dtype(np.float32))
    forward = host.forward(folder, x, gamma, beta, eps)
    forward.arrays.pop("out")
    backward = host.backward(folder, dy, x, gamma, forward.arrays)
    for outcome, names in ((forward, ["x"]), (backward, ["x", "dy"])):
        traffic = outcome.records[0].traffic
        for name in names:
            assert traffic[name].loaded == x.nbytes
        assert traffic["out"].stored == x.nbytes


# ---- the tests can fail ----

# What is replaced in the backward, by what; and a shape (rows, n) in which it must show.
FAULTS = {
    "a tail without its guard": ("if (i < count) set(", "if (FAULT || i < count) set("),
    "half of the lanes": (
        "return __shfl_xor_sync(ALL_LANES, a, lanes)",
        "return __shfl_xor_sync(FAULT ? 0xffffu : ALL_LANES, a, lanes)",
    ),
    "chunks left out": ("chunk += teams())", "chunk += teams() + FAULT)"),
    "a grid in the sums": (
        "total = {0, 0};\n    // Four loads",
        "total = {FAULT ? (Word)gridDim.x : 0, 0};\n    // Four loads",
    ),
    "a ticket not left as it was": ("atomicInc(ticket, of - 1)", "atomicInc(ticket, of - !FAULT)"),
    "a lost barrier": (
        """__syncthreads();
        const int first = warp / ROW_WARPS * ROW_WARPS;
        for (int i = 0""",
        """if (!FAULT) __syncthreads();
        const int first = warp / ROW_WARPS * ROW_WARPS;
        for (int i = 0""",
    ),
}
SHOWN = {
    "a tail without its guard": (5, 33),
    "half of the lanes": (5, 33),
    "a lost barrier": (5, 1000),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, folder):
    assert finds(folder, SHOWN.get(fault, (131, 33)), 1 + list(FAULTS).index(fault))


def test_no_fault_is_found_in_the_source_itself(folder):
    assert not any(finds(folder, shape, 0) for shape in [(131, 33), (5, 1000)])


def finds(folder, shape, fault):
    """Tell whether running the backward shows that it is not what layer_norm.cu says."""
    x, gamma, beta, eps, dy = ordinary(*shape, np.dtype(np.float32))
    _, cache = layer_norm_forward(x, gamma, beta, eps, backend="numpy")
    statistics = {name: getattr(cache.statistics, name) for name in ("mean", "mean_lo", "rstd")}
    setting, text = Setting(resident=3, cooperative=0, launches=2), host.with_faults(FAULTS)
    try:
        outcome = host.backward(folder, dy, x, gamma, statistics, setting, text=text, fault=fault)
    except (host.host_shim.LaunchError, AssertionError):
        return True
    actual, expected = outcome.arrays.values(), layer_norm_backward(dy, cache)
    return any(a.tobytes() != b.tobytes() for a, b in zip(expected, actual, strict=True))
