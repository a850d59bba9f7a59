"""layer_norm.cu on the host: contract, bits, bounds, races and schedules, without a GPU."""

import fake_cupy as fake
import host_shim
import numpy as np
import pytest
from fake_cupy import both, on_device
from norms import CANCELLING, assert_contract, draw

from stablenorm.cuda import plan
from stablenorm.cuda.plan import choose_kernel, cut
from stablenorm.formats import parse
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.families import FAMILIES, make_case

pytestmark = host_shim.needs_shim

# Each length is another pair of kernels to compile, a second each: a few lanes a row, a warp, warps of
# three kinds. Of few families: odd rows by such warps, rows that blocks share, longer ones, and float16, other than
# bfloat16 in conversions alone.
LENGTHS = {"bfloat16": (129, 784), "float32": (5, 129), "float64": (129,)}
LENGTHS_OF_FEW = {"float16": (129,), "float32": (1027, 3072, 4099), "float64": (1027,)}
# A cheap one for each way of losing digits in a long sum, the ends of the range, and what is not finite.
FEW = ("F01", "F03", "F07", "F14", "F16", "F27", "F36")


def ordinary(rows, n, dtype, *of_parameters):
    """Return x, gamma, beta, eps, dy; gamma and beta may have dtypes of their own, None for none."""
    names = dtype, *(of_parameters or (dtype, dtype)), dtype
    drawn = zip(draw(np.random.default_rng([rows, n]), (rows, n), np.float64), names, strict=True)
    x, gamma, beta, dy = (name and array.astype(parse(name)) for array, name in drawn)
    return x, gamma, beta, 1e-5, dy


def assert_same(expected, actual, but=()):
    assert expected.keys() == actual.keys()
    for name in expected.keys() - but:
        assert expected[name].dtype == actual[name].dtype
        # Compare as float64: NumPy does not know the NaN of bfloat16.
        one, other = (side[name].astype(np.float64) for side in (expected, actual))
        np.testing.assert_array_equal(one, other, err_msg=name)


CASES = [
    pytest.param(name, dtype, n, id=f"{name}-{dtype}-{n}")
    for table in (LENGTHS, LENGTHS_OF_FEW)
    for dtype, lengths in table.items()
    for n in lengths
    for name, family in FAMILIES.items()
    # The device does no row twice: an infinity may stand for the rounding errors of terms beyond 2**48 times the range.
    if name != "F41" or dtype == "float64"
    if family.applies(parse(dtype), n) and (table is LENGTHS or name in FEW)
]


@pytest.mark.usefixtures("launches", "short_parts")
@pytest.mark.parametrize(("name", "dtype", "n"), CASES)
def test_families(name, dtype, n):
    family = FAMILIES[name]
    case = make_case(name, parse(dtype), n, max(2, family.smallest_rows))
    actual = both(case)
    if family.finite:
        assert_contract(exact_layer_norm(*case), actual)
    if dtype != "float64":
        cancelling = {output for output, families in CANCELLING.items() if name in families}
        assert_same(both(case, np.asarray), actual, cancelling)


ORDINARY = [
    (300, 5, "float32"), (1, 129, "float32"), (131, 129, "bfloat16"), (3, 17_001, "float32"), (40, 1000, "float32"),
    (33, 129, "float16", "bfloat16", "float32"), (33, 129, "float16", None, None),
]  # fmt: skip


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("problem", ORDINARY, ids=str)
def test_shapes_and_dtypes(problem):
    case = ordinary(*problem)
    assert_same(both(case, np.asarray), both(case))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("scale", [1.0, 2.0**250, 2.0**400])
def test_the_dtype_of_x_chooses_the_arithmetic(scale):
    """Whatever that of gamma and beta, whose products may have any size up to 2**400."""
    x, gamma, beta, eps, dy = ordinary(9, 40, "float64")
    case = x.astype(np.float32), gamma * scale, beta, eps, dy.astype(np.float32)
    assert_contract(exact_layer_norm(*case), both(case))


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
    "some blocks, drawn": ({"resident": 3, "seed": 4}, on_device),
    "strided, misaligned": ({"resident": 2, "seed": 8}, strided),
    "little shared memory": ({"shared": 99 << 10, "seed": 6}, on_device),
    "no copies of whole rows": ({"defines": ("SHIM_BULK=0",), "seed": 7}, on_device),
}
# Rows, n, dtype; whether a fast kernel does the backward, with warps of three kinds, and the parts of a row.
INVARIANT = {
    "a few lanes a row": (800, 5, "float32", True, False, 1),
    "a warp a row": (131, 129, "float32", True, False, 1),
    "warps of three kinds": (40, 1000, "float32", True, True, 1),
    "odd rows by such warps": (9, 1027, "bfloat16", True, True, 1),
    "two blocks a row": (24, 1536, "bfloat16", True, True, 2),
    "four blocks a row": (24, 3072, "float32", True, True, 4),
    "columns in a loop": (9, 1027, "float64", False, False, 1),
}


@pytest.fixture
def short_parts(monkeypatch):
    """Let blocks share rows that are short enough for a test."""
    monkeypatch.setattr(plan, "_LONGEST_PART", 1027)


@pytest.mark.parametrize("name", INVARIANT)
@pytest.mark.usefixtures("short_parts")
def test_same_bits(name, use):
    """Nor does the shim find a race, or a barrier or a fence left out (test_host_shim.py)."""
    rows, n, dtype, *kind = INVARIANT[name]
    kernel = choose_kernel(n, False, *[parse(dtype)] * 3)
    assert [kernel.n > 0, kernel.row_warps > 0, kernel.parts] == kind
    assert cut(rows, kernel)[0] >= 3
    use()
    case = ordinary(rows, n, dtype)
    expected = both(case)
    for options, place in SETTINGS.values():
        use(**options)
        # Each launch takes the counter as the one before left it.
        assert_same(expected, both(case, place))


def test_no_thread_falls_two_turns_behind(use, monkeypatch):
    """Lanes that wait for an empty stage but fetch nothing once did, and waited for ever."""
    monkeypatch.setattr(plan, "_CHUNKS", 2)
    use(resident=1, seed=2, shared=99 << 10)
    case = ordinary(200, 1000, "float32")
    assert_same(both(case, np.asarray), both(case))


def test_rows_are_read_once(launches):
    case = ordinary(40, 1000, "float32")
    both(case)
    forward, backward = (launch.traffic for launch in launches)
    assert backward["x"][0] == backward["dy"][0] == case[0].nbytes
    # Every thread of a forward asks for the first element of its row as well.
    firsts = 40 * launches[0].kernel.row_threads * 4
    assert forward["x"][0] == case[0].nbytes + firsts
    assert forward["out"][1] == backward["out"][1] == case[0].nbytes


OWNERS = """static_assert(STAGES % ROW_SUM_WARPS == 0 && STAGES % ASKING_WARPS == 0,
    "a stage has one owner of each kind");"""
FAULTS = {
    "a stage of a forward read before its turn": (129, [("wait_copies<STAGES - 1>();\n        double held", "double held")]),
    "a stage of a backward read before its turn": (129, [("wait_copies<STAGES - 2>();", "")]),
    "a full stage not awaited": (1000, [("barrier_wait(&full[s], round & 1);", "")]),
    "row sums not awaited": (1000, [("barrier_wait(&ready[s], parity);", "")]),
    "an empty stage not awaited": (1000, [("if (round > 0) barrier_wait(&empty[s], (round - 1) & 1);", "")]),
    "no multiple of the row warps": (1000, [("STAGES = LN_STAGES;", "STAGES = LN_STAGES - 1;"), (OWNERS, "")]),
    "a chunk flushed early": (129, [("const bool ends = at.advance();", "const bool ends = at.advance() || at.left == 1;")]),
    "a predicate dropped at the tail of a forward": (129, [("e = i < count ? e - center : 0.0;", "e = e - center;")]),
    "a predicate dropped at the tail of a backward": (129, [("i < count ? row.centered(lift(x.e[i])) : 0.0", "row.centered(lift(x.e[i]))")]),
    "a predicate dropped at the tail of row sums": (1027, [("const bool there = WHOLE || q * VECTOR + i < N;", "const bool there = true;")]),
    "a warp's reads not ordered before its arrival": (1000, [("__syncwarp();\n        if (v", "if (v")]),
    "a part's sums read before their turn": (3072, [("while (__double_as_longlong(words[i]) == 0);", "while (false);")]),
    "a part's sums emptied before all lanes have them": (3072, [("__syncwarp();\n        unrolled<3>", "unrolled<3>")]),
    "a part's sums not emptied in order": (3072, [("});\n        __threadfence();", "});")]),
    "one box for two turns": (3072, [("turn % (2 * ROW_SUM_WARPS)", "turn % ROW_SUM_WARPS")]),
    "a sum of 0 taken for an empty box": (3072, [("words[i] == 0.0 ? -0.0 : words[i]", "words[i]")]),
    "parts in another order": (3072, [("int lanes = 1; lanes < PARTS; lanes *= 2", "int lanes = PARTS / 2; lanes > 0; lanes /= 2")]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("short_parts")
def test_planted_faults_are_found(fault, use, monkeypatch):
    n, edits = FAULTS[fault]
    case = x, gamma, *_, dy = ordinary({129: 150, 3072: 24}.get(n, 70), n, "float32")
    if n == 3072:
        # A row of zeros; and g is nearly constant, so that dx shows the last bits of its mean.
        dy[:] = np.linspace(0.0, 1.0, len(x))[:, None] / gamma
    # Few chunks, so that they have several rows, and little memory, so that stages are used again soon.
    monkeypatch.setattr(plan, "_CHUNKS", 8 if n == 3072 else 2)
    use(resident=2, shared=99 << 10)
    expected = both(case)
    edited = "layer_norm_forward" if "of a forward" in fault else "layer_norm_backward"
    use(edits=edits, edited=edited, resident=2, shared=99 << 10, seed=1)
    with pytest.raises((AssertionError, host_shim.LaunchError)):
        assert_same(expected, both(case))
