"""Nothing crashes, hangs or lies: odd numbers, dtypes and records, huge terms, little memory, hostile control words."""

import itertools
import math
import sys
from functools import partial

import numpy as np
import pytest
from calls import bf, f2, f4, f8
from interpreter import python, run_python
from norms import NORMS, SECOND_ORDER, assert_contract, assert_nearest, assert_same, compute
from numpy.dtypes import StringDType
from test_native import PLACE, Control, known

import stablenorm as sn
from stablenorm.memory import set_idle_limit
from stablenorm.records import Cache, Norm, Statistics

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
FEW = X[0].copy(), X[1].copy()

# ---- integers: a cast to C's int gave 0 threads, scratch memory for none, and a write behind it ----


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [2**31, 2**32, 2**33 - 1, 2**63, 10**5000, 0, -(2**63)], ids=hash)
def test_a_number_of_threads_is_in_range_where_it_is_set(count):
    before = sn.get_num_threads()
    with pytest.raises(ValueError, match=r"count must be at (least 1|most 2147483647), got "):
        sn.set_num_threads(count)
    assert sn.get_num_threads() == before
    sn.set_num_threads(2**31 - 1)
    assert sn.layer_norm(np.ones((300, 64), np.float32)).shape == (300, 64)


@pytest.mark.parametrize("count", ["4294967296", "9" * 5000, "two"], ids=len)
def test_threads_of_the_environment_are_in_range(count):
    code = "import numpy, stablenorm; stablenorm.layer_norm(numpy.ones((300, 64)))"
    last = run_python(code, STABLENORM_NUM_THREADS=count).stderr.splitlines()[-1]
    assert last.startswith("ValueError: STABLENORM_NUM_THREADS must be an integer from 1 to 21474")


def test_an_idle_limit_is_in_range_where_it_is_set():
    before = set_idle_limit(2**20)
    with pytest.raises(ValueError, match=f"nbytes must be at most {sys.maxsize}"):
        set_idle_limit(10**30)
    assert set_idle_limit(before) == 2**20


@pytest.mark.parametrize("axis", [10**30, (-(10**30),), (0, 10**5000), -(2**63)], ids=hash)
def test_an_axis_of_any_size_is_out_of_range(axis):
    with pytest.raises(ValueError, match="axis must name axes of x, which has 2 dimensions, got"):
        sn.layer_norm(X, axis=axis)
    y, cache = sn.layer_norm_forward(X, *FEW)
    with pytest.raises(ValueError, match="sum_axes must name axes of x, which has 2"):
        sn.layer_norm_backward(y, cache, sum_axes=axis)


def test_as_many_axes_as_arrays_may_have(backend):
    x = X[:2].reshape((1,) * 60 + (2, 2, 2, 2))
    for axis in (None, -1, (0, 63)):
        y, cache = sn.layer_norm_forward(x, axis=axis, backend=backend)
        assert sn.layer_norm_backward(y, cache).dx.shape == x.shape
    y = sn.layer_norm(x, axis=None, backend=backend)
    assert y.tobytes() == sn.layer_norm(X[:2].reshape(-1), backend=backend).tobytes()


# ---- dtypes: a new kind of dtype has no number of its own, and was read as bfloat16 ----


def of_odd_dtypes():
    kinds = "V24", "V2", "M8[s]", "O", "g", "c8", "i4", "S2"
    arrays = {kind: np.zeros(X.shape, kind) for kind in kinds}
    arrays["structured"] = np.zeros(X.shape, [("high", "f4")])
    arrays["string"] = np.full(X.shape, "1", StringDType())
    if sys.platform == "linux":
        from numpy_quaddtype import QuadPrecDType  # noqa: PLC0415  # it is for Linux alone

        arrays["quad"] = np.ones(X.shape, QuadPrecDType())
    return arrays


@pytest.mark.parametrize(("kind", "odd"), of_odd_dtypes().items())
def test_other_dtypes_are_refused_in_every_argument(kind, odd):
    (y, cache), few = sn.layer_norm_forward(X, *FEW), odd[0]
    backward, jvp = (
        partial(sn.layer_norm_backward, cache=cache),
        partial(sn.layer_norm_jvp, cache=cache),
    )
    calls = {
        "x": lambda: sn.layer_norm(odd), "gamma": lambda: sn.layer_norm(X, few),
        "beta": lambda: sn.layer_norm(X, None, few), "out": lambda: sn.layer_norm(X, out=odd),
        "residual": lambda: sn.layer_norm_forward(X, residual=odd),
        "where": lambda: sn.layer_norm_forward(X, where=odd),
        "dy": lambda: backward(odd), "dsum": lambda: backward(y, dsum=odd),
        "out.dgamma": lambda: backward(y, out=(None, few, None)),
        "tx": lambda: jvp(odd), "tgamma": lambda: jvp(X, tgamma=few),
        "ddx": lambda: sn.layer_norm_double_backward(odd, y, cache),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} must (be|have dtype) .*, got ") as caught:
            call()
        if kind in "gO" and name in {"x", "dy", "gamma", "tx"}:
            assert f"pass np.asarray({name}, np.float64)" in str(caught.value)


# ---- records: a cache with a list in it ended the process ----

OTHERS = [
    None, -1, 3.5, 10**40, math.nan, "x", (), [1.0], {}, object(), (1,), (10**30,), "cuda", "nearest",
    np.zeros(6), np.zeros(5), np.zeros(12)[::2], np.zeros(6, ">f8"), np.zeros(6, "f4"), np.zeros(6, "O"),
    np.zeros(49, "u1")[1:].view("f8"), np.ma.zeros(6), np.zeros((6, 8)), np.zeros((8, 6), "f4"), np.zeros(8),
    np.ones((6, 1), bool), Norm(), Statistics(None, None, np.ones(6)), tuple.__new__(Statistics, (1, 2)),
]  # fmt: skip


def edited(cache):
    """Yield the cache with each field of each record replaced by each of these, and records of other lengths."""
    _, norm, _, statistics, *_ = cache
    for other in OTHERS:
        yield from (cache._replace(**{name: other}) for name in Cache._fields)
        for name in Norm._fields:
            yield cache._replace(norm=norm._replace(**{name: other}))
        for name in Statistics._fields:
            yield cache._replace(statistics=statistics._replace(**{name: other}))
    for length in range(6):
        yield tuple.__new__(Cache, cache[:length])
        yield cache._replace(statistics=tuple.__new__(Statistics, statistics[:length]))
        yield cache._replace(norm=tuple.__new__(Norm, norm[:length]))


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [f4, f8])
def test_an_edited_cache_gives_a_result_or_says_what_is_wrong(kind, rounding, dtype, backend):
    x, gamma, beta = (v.astype(dtype) for v in (X, *FEW))
    y, cache = NORMS[kind][0](x, gamma, beta, rounding=rounding, backend=backend)
    backward, (jvp, double_backward) = NORMS[kind][1], SECOND_ORDER[kind]
    for record in edited(cache):
        calls = [partial(backward, y, record), lambda one=record: (one.mean, one.rstd)]
        if rounding == "fast":
            calls += [partial(jvp, x, record), partial(double_backward, x, y, record)]
        for call in calls:
            if len(record) < len(Cache._fields) and call is calls[1]:
                continue
            try:
                call()
            except (TypeError, ValueError) as error:
                words = "cache", "gamma", "beta", "eps", "rounding", "format string"
                assert any(word in str(error) for word in words), (record, error)  # noqa: PT017


# ---- huge terms that cancel: rounding errors beyond float32's range were infinite results ----


@pytest.mark.parametrize("dtypes", [(f4, f4), (bf, bf), (f2, f4), (f4, f2), (f4, f8), (f2, f2)])
def test_results_are_infinite_where_the_exact_ones_are(dtypes, rng):
    x_dtype, dtype = dtypes
    largest = {f2: 65504.0, f4: 3e38, bf: 3e38, f8: 1e60}
    sizes = [*itertools.product((1, 2, 3, 17), (0.0, 1e-5)), (3, 1e-310), (3, 1e300)]
    for kind, (n, eps) in itertools.product(NORMS, sizes):
        x = rng.standard_normal((9, 2))[:, np.arange(n) % 2] * largest[x_dtype] ** rng.uniform(
            -1, 0.5, (9, 1)
        )
        gamma, beta = rng.uniform(-1, 1, (2, n)) * largest[dtype]
        dy = rng.standard_normal((9, n)) * largest[x_dtype] ** rng.uniform(0, 0.95, (9, 1))
        x[:2], dy[2:4] = x[:2, :1], dy[2:4, :1]
        x, dy = (np.clip(v, -largest[x_dtype], largest[x_dtype]) for v in (x, dy))
        beta[1::2] = -gamma[1::2]
        case = (
            x.astype(x_dtype),
            gamma.astype(dtype),
            beta.astype(dtype),
            eps,
            dy.astype(x_dtype),
        )
        exact = NORMS[kind][2](*case)
        for rounding in ("fast", "nearest"):
            results = compute(case, kind, rounding=rounding, backend="native")
            for name, array in results.items():
                rounded = exact.rounded(name, array.dtype).astype(float)
                finite = np.isfinite(rounded)
                assert np.isfinite(array.astype(float))[finite].all(), (
                    name,
                    n,
                    kind,
                    eps,
                    rounding,
                )
            (assert_contract if rounding == "fast" else assert_nearest)(
                exact, results, (n, kind, eps)
            )
        over = case[4].copy()
        _, cache = NORMS[kind][0](*case[:4], backend="native")
        expected = NORMS[kind][1](case[4], cache, wrt=("x",)).dx
        assert_same(
            [NORMS[kind][1](over, cache, wrt=("x",), out=(over, None, None)).dx], [expected]
        )


# ---- long rows: scratch memory was taken for each thread, 28 times a float32 row ----

LIMITED = """
import pathlib, resource
import numpy as np, stablenorm as sn
x = np.ones((1, 1 << 22), np.float32)
x[0, ::2] = -1
gamma, row = np.ones(x.shape[1], np.float32), x.nbytes
y, cache = sn.layer_norm_forward(x[:, :1024].copy(), gamma[:1024], gamma[:1024], rounding="{rounding}")
sn.layer_norm_backward(y, cache)
sn.set_num_threads(16), sn.memory.set_idle_limit(0)
def under(rows, call):
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + rows * row + (4 << 20), -1))
    done = call()
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return done
y, cache = under({forward} + 1, lambda: sn.layer_norm_forward(x, gamma, gamma, rounding="{rounding}"))
under({backward} + 3, lambda: sn.layer_norm_backward(y, cache))
try:
    under(2, lambda: sn.layer_norm(x, gamma, gamma, out=y, rounding="{rounding}"))
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(("rounding", "forward", "backward"), [("fast", 5, 9), ("nearest", 16, 32)])
def test_scratch_memory_of_a_long_row(rounding, forward, backward):
    """In rows of float32; results, one row of y and three of gradients, come on top."""
    said = python(LIMITED.format(rounding=rounding, forward=forward, backward=backward))
    assert said.startswith(tuple("123456789"))
    assert "bytes of scratch memory are needed for rows of 4194304 elements" in said


# ---- the caller's control word and error state ----

MASK = np.arange(48).reshape(6, 8) % 5 != 0
FORWARDS = {
    "plain": {}, "axis": {"axis": 0}, "residual": {"residual": X[::-1]}, "offset": {"gamma_offset": 0.3},
    "rows": {"where": MASK[:, :1]}, "elements": {"where": MASK}, "samples": {"gamma": X},
}  # fmt: skip
BACKWARDS = {
    "plain": {}, "dsum": {"dsum": X[::-1]}, "sum_axes": {"sum_axes": 0}, "dtype": {"dy": (X / 3).astype(np.float16)},
    "accumulate": {"accumulate": True, "out": (None, *FEW)}, "jvp": None, "double backward": None,
}  # fmt: skip


def all_results(how, then, kind, x, backend):
    """Return the bytes of all results of a forward, of its cache and of what follows it."""
    forward, backward, _ = NORMS[kind]
    keywords = dict(zip(("gamma", "beta"), FEW, strict=True)) | FORWARDS[how]
    if how == "axis":
        keywords |= {"gamma": X[:, 0].copy(), "beta": X[:, 1].copy()}
    y, cache = forward(x, eps=1e-30, backend=backend, **keywords)
    jvp, double_backward = SECOND_ORDER[kind]
    if then == "jvp":
        made = [jvp(X, cache)]
    elif then == "double backward":
        made = double_backward(X, X[::-1], cache)
    else:
        asked = {"dy": X[::-1], "cache": cache} | BACKWARDS[then]
        asked |= (
            {"out": tuple(v if v is None else v.copy() for v in asked["out"])}
            if "out" in asked
            else {}
        )
        made = backward(**asked)
    return [v.tobytes() for v in (y, cache.mean, cache.rstd, *made) if v is not None]


PAIRS = [(how, "plain") for how in FORWARDS] + [("plain", then) for then in [*BACKWARDS][1:]]


@known
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("how", "then"), [*PAIRS, ("elements", "jvp"), ("elements", "double backward")]
)
def test_no_keyword_depends_on_the_control_word_or_error_state(how, then, kind, backend):
    for x in (X, X * np.float32(1e-39)):
        expected = all_results(how, then, kind, x, backend)
        # Downward and toward zero are the other two values of the bits that round upward.
        upward = PLACE[2]
        for bits in (PLACE[1], upward, upward // 2, upward | upward // 2):
            with Control(bits), np.errstate(all="raise"):
                actual = all_results(how, then, kind, x, backend)
            assert actual == expected, (bits, x)
