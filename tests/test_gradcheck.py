"""The checker passes what is right, fails what is wrong, and says so where it cannot tell."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm.gradcheck import (
    _check,
    assert_gradients,
    check_gradients,
    check_layer_norm,
    row_identities,
)

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def forward(x, gamma, beta, eps=1e-5):
    """Two passes in the dtype given, nothing clever: what most people write."""
    centered = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((centered * centered).mean(-1, keepdims=True) + x.dtype.type(eps))
    xhat = centered * rstd
    y = xhat if gamma is None else gamma * xhat
    return y if beta is None else y + beta, (xhat, rstd, gamma)


def backward(dy, cache):
    xhat, rstd, gamma = cache
    g = dy if gamma is None else gamma * dy
    dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    leading = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(leading), dy.sum(leading)


def data(seed, shape=(4, 8), offset=0.0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = offset + rng.standard_normal(shape)
    gamma = rng.choice([-1.0, 1.0], shape[-1]) * (0.5 + rng.random(shape[-1]))
    return tuple(a.astype(dtype) for a in (x, gamma, rng.standard_normal(shape[-1])))


def exact(x, gamma, dy, eps=1e-5):
    """Return dx from re-centred rows; its error, u times a few, is far below what is measured."""
    centered = x - x.mean(-1, keepdims=True)
    centered -= centered.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps)
    q = gamma * dy
    q = q - q.mean(-1, keepdims=True)
    xhat = centered * rstd
    return rstd * (q - xhat * np.mean(q * xhat, -1, keepdims=True))


# Operations with known derivatives: forward, backward, shapes of the arguments.
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return p, p


OPERATIONS = {
    "sin": (lambda x: (np.sin(x), x), lambda dy, x: (dy * np.cos(x),), [(3, 5)]),
    "cubic": (
        lambda x: (x**3 - 2 * x, x),
        lambda dy, x: [dy * (3 * x**2 - 2)],
        [(7,)],
    ),
    "matmul": (
        lambda a, b: (a @ b, (a, b)),
        lambda dy, c: (dy @ c[1].T, c[0].T @ dy),
        [(3, 5), (5, 4)],
    ),
    "softmax": (
        softmax,
        lambda dy, p: (p * (dy - (dy * p).sum(-1, keepdims=True)),),
        [(4, 6)],
    ),
    "scalar": (lambda x: (x.sum(), x.shape), lambda dy, shape: (np.full(shape, dy),), [(2, 3)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_right_gradients_pass(name):
    function, gradient, shapes = OPERATIONS[name]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        report = check_gradients(
            function, gradient, [rng.standard_normal(shape) for shape in shapes], rng=rng
        )
        assert report.verdict == "PASS", f"seed {seed}\n{report}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_percent_on_one_element_fails_there(name, rng):
    function, gradient, shapes = OPERATIONS[name]
    wrong = len(shapes) - 1
    spoiled = (1,) * len(shapes[wrong])

    def spoil(dy, cache):
        gradients = [np.array(g) for g in gradient(dy, cache)]
        gradients[wrong][spoiled] *= 1.01
        return gradients

    args = [rng.standard_normal(shape) for shape in shapes]
    report = check_gradients(function, spoil, args, rng=rng)
    result = report.arguments[wrong]
    assert report.verdict == "FAIL"
    assert result.failing == 1
    assert result.index == spoiled
    assert [r.verdict for r in report.arguments[:-1]] == ["PASS"] * wrong


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(4, 8), (2, 13), (3, 2)])
def test_right_layer_norm_never_fails(offset, shape):
    for seed in range(20):
        report = check_layer_norm(forward, backward, *data(seed, shape, offset), rng=seed)
        assert report.verdict != "FAIL", f"seed {seed}\n{report}"
        # With two elements, dx is of the order of eps and drowns under an offset.
        assert report.passed or shape[-1] == 2, f"seed {seed}\n{report}"


def test_numeric_bound_covers_the_true_error(monkeypatch):
    # The bound of each numeric derivative, seen where the report is made of them.
    seen = []
    judge = _check.judge
    monkeypatch.setattr(
        _check, "judge", lambda t, l, c, p: (seen.append((t, l, c)), judge(t, l, c, p))[1]
    )
    excess, z = [], []
    for offset in (0.0, 1.0, 1e2, 1e3, 1e4, 1e5, 1e6):
        for seed in range(9):
            x, gamma, beta = data(seed, (4, 8 + seed), offset)
            seen.clear()
            check_layer_norm(forward, backward, x, gamma, beta, rng=seed, max_elements=200)
            _, loss, comparisons = seen[0]
            expected = exact(x, gamma, loss.cotangent())
            for comparison in comparisons:
                found = comparison.derivative
                error = abs(found.numeric - expected[comparison.place])
                z.append(error / found.bound)
                if error > 0:
                    excess.append(found.bound / error)
    assert len(z) > 3000
    assert np.mean(np.array(z) <= 1) >= 0.999
    # A bound that is never exceeded because it is useless would be no bound.
    assert np.median(excess) <= 100


def replace(values, position, changed):
    return tuple(changed if i == position else v for i, v in enumerate(values))


def no_mean_g(dy, cache):
    xhat, rstd, gamma = cache
    g = gamma * dy
    wrong = rstd * (g - xhat * (g * xhat).mean(-1, keepdims=True))
    return replace(backward(dy, cache), 0, wrong)


def no_xhat_term(dy, cache):
    _, rstd, gamma = cache
    g = gamma * dy
    return replace(backward(dy, cache), 0, rstd * (g - g.mean(-1, keepdims=True)))


def gamma_twice(dy, cache):
    _, dgamma, dbeta = backward(dy, cache)
    return backward(cache[2] * dy, cache)[0], dgamma, dbeta


def gamma_after(dy, cache):
    xhat, rstd, gamma = cache
    right = backward(dy, cache)
    return replace(right, 0, gamma * backward(dy, (xhat, rstd, None))[0])


def dgamma_without_rstd(dy, cache):
    xhat, rstd, _ = cache
    return replace(backward(dy, cache), 1, (dy * xhat / rstd).sum(0))


def last_row_dropped(dy, cache):
    dx = backward(dy, cache)[0].copy()
    dx[-1] = 0
    return replace(backward(dy, cache), 0, dx)


def one_sign(dy, cache):
    dx = backward(dy, cache)[0].copy()
    dx[0, 0] *= -1
    return replace(backward(dy, cache), 0, dx)


def one_percent(dy, cache):
    dx = backward(dy, cache)[0].copy()
    dx[0, 0] *= 1.01
    return replace(backward(dy, cache), 0, dx)


def scaled_rstd(factor):
    """Make a backward from a wrong rstd; xhat = centered * rstd takes part in it."""

    def wrong(dy, cache):
        xhat, rstd, gamma = cache
        change = factor(rstd, xhat.shape[-1])
        return replace(
            backward(dy, cache), 0, backward(dy, (xhat * change, rstd * change, gamma))[0]
        )

    return wrong


def n_minus_one_in_mean_g(dy, cache):
    xhat, rstd, gamma = cache
    g, n = gamma * dy, dy.shape[-1]
    mean = g.sum(-1, keepdims=True) / (n - 1)
    wrong = rstd * (g - mean - xhat * (g * xhat).mean(-1, keepdims=True))
    return replace(backward(dy, cache), 0, wrong)


def mean_in_bfloat16(dy, cache):
    # The mean of n standard normal elements, n = 8 to 768, is about 0.1: 8 bits of that.
    xhat, rstd, gamma = cache
    return replace(backward(dy, cache), 0, backward(dy, (xhat + 1e-4, rstd, gamma))[0])


BUGS = {
    "no mean(g)": (no_mean_g, 0),
    "no xhat term": (no_xhat_term, 0),
    "gamma twice": (gamma_twice, 0),
    "gamma after the projection": (gamma_after, 0),
    "dgamma without rstd": (dgamma_without_rstd, 1),
    "last row dropped": (last_row_dropped, 0),
    "one sign": (one_sign, 0),
    "one percent": (one_percent, 0),
    "n - 1 in var": (scaled_rstd(lambda _, n: np.sqrt((n - 1) / n)), 0),
    "n - 1 in mean(g)": (n_minus_one_in_mean_g, 0),
    "eps outside the root": (
        scaled_rstd(lambda r, _: 1 / (np.sqrt(1 - 1e-5 * r * r) + 1e-5 * r)),
        0,
    ),
    "eps omitted": (scaled_rstd(lambda r, _: 1 / np.sqrt(1 - 1e-5 * r * r)), 0),
    "rstd in float32": (scaled_rstd(lambda r, _: np.float32(r) / r), 0),
    "mean in bfloat16": (mean_in_bfloat16, 0),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("shape", [(4, 8), (32, 768)])
def test_wrong_layer_norm_fails_at_the_right_argument(bug, shape):
    wrong, position = BUGS[bug]
    for seed in range(5 if shape == (4, 8) else 1):
        args = data(seed, shape)
        report = check_gradients(forward, wrong, args, rng=seed)
        assert report.verdict == "FAIL", f"seed {seed}\n{report}"
        verdicts = [result.verdict for result in report.arguments]
        expected = ["PASS"] * 3
        expected[position] = "FAIL"
        assert verdicts == expected


@pytest.mark.parametrize("bug", ["no mean(g)", "no xhat term", "eps omitted", "rstd in float32"])
def test_identities_alone_find_it(bug):
    for seed in range(20):
        x, gamma, beta = data(seed, (32, 768))
        y, cache = forward(x, gamma, beta)
        dy = np.random.default_rng(seed).standard_normal(x.shape)
        gradients = BUGS[bug][0](dy, cache)
        identities = row_identities(x, gamma, beta, 1e-5, dy, y, *gradients)
        assert not all(identity.passed for identity in identities)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e3])
def test_identities_hold_for_right_code_in_its_own_dtype(dtype, offset):
    for seed in range(5):
        x, gamma, beta = data(seed, (16, 48), offset, dtype)
        y, cache = forward(*(a.astype(np.float64) for a in (x, gamma, beta)))
        dy = np.random.default_rng(seed).standard_normal(x.shape).astype(dtype)
        gradients = backward(dy.astype(np.float64), cache)
        rounded = [a.astype(dtype) for a in (y, *gradients)]
        identities = row_identities(x, gamma, beta, 1e-5, dy, *rounded)
        assert len(identities) == 3
        assert all(identity.passed for identity in identities), identities


def test_an_offset_does_not_break_the_identities_themselves():
    # Right gradients, in float64 from re-centred rows: all that can be wrong is the check.
    x, gamma, _ = data(3, (4, 8), 1e8)
    dy = data(4)[0]
    identities = row_identities(x, gamma, None, 1e-5, dy, None, exact(x, gamma, dy), None, None)
    assert [identity.passed for identity in identities] == [True, True]
    assert max(identity.error for identity in identities) < 1e-14 * 8


def test_identities_without_gamma_or_beta():
    x, gamma, _ = data(0)
    dy = data(1)[0]
    y, cache = forward(x, None, None)
    dx = backward(dy, cache)[0]
    assert len(row_identities(x, None, None, 1e-5, dy, y, dx, None, None)) == 2
    y, cache = forward(x, gamma, None)
    dx, dgamma, _ = backward(dy, cache)
    euler = row_identities(x, gamma, None, 1e-5, dy, y, dx, dgamma, None)[2]
    assert euler.passed
    assert not row_identities(x, gamma, None, 1e-5, dy, y, dx, dgamma * 1.001, None)[2].passed


def test_identities_leave_out_what_cannot_be_judged():
    x, _, _ = data(0)
    dy = data(1)[0]
    x[1, 3] = np.nan
    x[2] = 0.1
    with np.errstate(all="ignore"):
        dx = backward(dy, forward(x, None, None, 0.0)[1])[0]
    identities = row_identities(x, None, None, 0.0, dy, None, dx, None, None)
    assert [identity.passed for identity in identities] == [True, True]
    dx[0, 0] = np.nan
    identities = row_identities(x, None, None, 0.0, dy, None, dx, None, None)
    assert [identity.passed for identity in identities] == [False, False]


def test_identities_on_several_normalized_axes():
    x, _, _ = data(0, (3, 4, 5))
    gamma = data(1, (4, 5))[0]
    dy = data(2, (3, 4, 5))[0]
    flat = [a.reshape(-1, 20) for a in (x, gamma, dy)]
    y, cache = forward(flat[0], flat[1][0], None)
    dx, dgamma, _ = backward(flat[2], cache)
    identities = row_identities(
        x,
        gamma,
        None,
        1e-5,
        dy,
        y.reshape(x.shape),
        dx.reshape(x.shape),
        dgamma.reshape(4, 5),
        None,
    )
    assert [identity.passed for identity in identities] == [True] * 3


@pytest.mark.parametrize("gradient", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_low_precision_gradients_against_a_float64_forward(gradient):
    def rounded(dy, cache):
        return tuple(a.astype(gradient) for a in backward(dy, cache))

    def spoiled(dy, cache):
        dx, dgamma, dbeta = rounded(dy, cache)
        dx = dx.astype(np.float64)
        # Fifty roundings of the dtype, on the element that shows it best.
        worst = np.unravel_index(np.abs(dx).argmax(), dx.shape)
        dx[worst] *= 1 + 50 * float(ml_dtypes.finfo(gradient).eps) / 2
        return dx.astype(gradient), dgamma, dbeta

    for seed in range(5):
        report = check_gradients(forward, rounded, data(seed), rng=seed)
        assert report.passed, str(report)
        report = check_gradients(forward, spoiled, data(seed), rng=seed)
        assert [result.verdict for result in report.arguments] == ["FAIL", "PASS", "PASS"]


def test_float32_throughout():
    for seed in range(20):
        report = check_layer_norm(forward, backward, *data(seed, dtype=np.float32), rng=seed)
        assert report.passed, f"seed {seed}\n{report}"
        # Finer than this no difference of float32 values is; coarser, and it would not be said.
        assert 1e-6 < report.arguments[0].resolution < 1e-3


@pytest.mark.parametrize(
    ("dtype", "offset"), [(np.float32, 1e5), (np.float16, 0.0), (ml_dtypes.bfloat16, 0.0)]
)
def test_too_noisy_to_judge_is_said(dtype, offset):
    for seed in range(5):
        report = check_gradients(
            forward, backward, data(seed, offset=offset, dtype=dtype), rng=seed
        )
        assert report.verdict == "INCONCLUSIVE", f"seed {seed}\n{report}"
        assert report.arguments[0].resolution > 1e-3
        assert report.arguments[0].message


def test_float16_inside_a_float64_forward_is_not_a_wrong_gradient():
    def rough(x):
        return np.sin(x).astype(np.float16).astype(np.float64), x

    for seed in range(10):
        x = np.random.default_rng(seed).standard_normal((3, 5))
        report = check_gradients(rough, lambda dy, x: (dy * np.cos(x),), [x], rng=seed)
        assert report.verdict == "INCONCLUSIVE", f"seed {seed}\n{report}"


def test_a_forward_that_is_not_finite_nearby_is_inconclusive():
    def root(x):
        with np.errstate(invalid="ignore"):
            return np.sqrt(x), x

    report = check_gradients(
        root, lambda dy, x: (dy / (2 * np.sqrt(x)),), [np.array([1e-12, 1.0])], rng=0
    )
    assert report.verdict == "INCONCLUSIVE"
    assert "not finite nearby" in str(report)


def test_large_tensors_are_sampled():
    calls = 0

    def counted(*args):
        nonlocal calls
        calls += 1
        return forward(*args)

    done = []
    args = data(0, (4, 17, 384))
    report = check_gradients(
        counted, backward, args, rng=0, progress=lambda *state: done.append(state)
    )
    assert report.passed, str(report)
    # 22 a derivative, and 12 more for each of the 36 elements, for the noise of the complex step.
    assert report.forward_calls == calls < 45 * 22 + 36 * 12
    assert [result.checked for result in report.arguments] == [12, 12, 12]
    assert [result.probes for result in report.arguments] == [3, 3, 3]
    assert done == [(i + 1, 45) for i in range(45)]


def test_probes_find_what_sampling_misses():
    def wrong(dy, cache):
        dx = backward(dy, cache)[0].copy()
        # One row in 68, in no element that is sampled on purpose.
        dx[1, 7] *= 1.001
        return replace(backward(dy, cache), 0, dx)

    found = 0
    for seed in range(2):
        report = check_gradients(forward, wrong, data(seed, (4, 17, 384)), rng=seed)
        found += report.arguments[0].verdict == "FAIL"
    assert found == 2


def test_none_is_not_checked():
    x, gamma, _ = data(0)
    report = check_gradients(
        forward, lambda dy, c: (*backward(dy, c)[:2], None), [x, gamma, None], rng=0
    )
    assert report.passed
    assert [result.verdict for result in report.arguments] == ["PASS", "PASS", "NOT CHECKED"]
    report = check_gradients(forward, lambda *_: (None, None, None), data(0), rng=0)
    assert report.verdict == "INCONCLUSIVE"


def test_nothing_given_is_changed():
    args = data(0)
    kept = [a.copy() for a in args]

    def spoiling_forward(x, gamma, beta):
        result = forward(x.copy(), gamma.copy(), beta.copy())
        for a in (x, gamma, beta):
            a[...] = np.nan
        return result

    # Reported, and the caller's arrays are out of reach.
    assert check_gradients(spoiling_forward, backward, args, rng=0).verdict == "FAIL"
    for a, before in zip(args, kept, strict=True):
        np.testing.assert_array_equal(a, before)
        a.flags.writeable = False
    assert check_layer_norm(forward, backward, *args, rng=0).passed


def test_zero_gradients_pass_and_their_opposite_fails():
    # n = 1: y = beta whatever x is.
    args = data(0, (5, 1))
    assert check_layer_norm(forward, backward, *args, rng=0).passed
    report = check_gradients(forward, lambda dy, c: (dy, *backward(dy, c)[1:]), args, rng=0)
    assert report.arguments[0].verdict == "FAIL"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([np.zeros(3)], "must have shape (2, 3), that of its argument, got (3,)"),
        ([np.zeros((2, 3), dtype=int)], "must be float16, bfloat16, float32 or float64, got int64"),
        ([np.full((2, 3), np.nan)], "must be finite, got nan at (0, 0) (6 such)"),
        ([np.zeros((2, 3))] * 2, "must return 1 gradients, one for each argument, got 2"),
        (np.zeros((2, 3)), "must return a tuple, NamedTuple or list of gradients, got ndarray"),
        ([np.zeros((2, 3), dtype=object)], "got object"),
    ],
)
def test_faulty_gradients_fail_with_a_sentence(returned, message):
    report = check_gradients(lambda x: (x, None), lambda *_: returned, [np.ones((2, 3))])
    assert report.verdict == "FAIL"
    assert message in str(report)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ([], {}, ValueError, "args must be a tuple or list of at least one array"),
        (np.ones(3), {}, ValueError, "args must be a tuple or list of at least one array"),
        ([np.ones(3)], {"names": ["a", "b"]}, ValueError, "names must have one name for each of 1"),
        ([np.ones(3)], {"scales": []}, ValueError, "scales must have one entry for each of 1"),
        ([np.ones(3)], {"scales": [-1]}, ValueError, r"scales\[0\] must be finite and > 0"),
        ([np.arange(3)], {}, TypeError, r"args\[0\] must be float16, .* got int64"),
        ([np.array([1, np.nan])], {}, ValueError, "must be finite"),
    ],
)
def test_wrong_use_raises(args, options, error, message):
    with pytest.raises(error, match=message):
        check_gradients(lambda x: (x, None), lambda dy, _: (dy,), args, **options)


def test_layer_norm_errors():
    with pytest.raises(ValueError, match="eps must be finite and >= 0, got -1"):
        check_layer_norm(forward, backward, eps=-1)
    x = np.ones((2, 3))
    with pytest.raises(
        ValueError, match=r"dx must have the shape of x, ending in \(3,\), got \(3,"
    ):
        row_identities(x, None, None, 0.1, x, x, np.ones(3), None, None)
    with pytest.raises(ValueError, match=r"dgamma must have shape \(3,\), got \(2,\)"):
        row_identities(x, np.ones(3), None, 0.1, x, x, x, np.ones(2), None)


def test_assert_gradients_raises_the_report(rng):
    x = rng.standard_normal(5)
    assert_gradients(lambda x: (np.sin(x), x), lambda dy, x: (dy * np.cos(x),), [x], rng=0)
    with pytest.raises(AssertionError, match=r"angle: FAIL.*\n.*backward .*numeric"):
        assert_gradients(
            lambda x: (np.sin(x), x), lambda dy, x: (-dy * np.cos(x),), [x], names=["angle"]
        )


def test_the_same_rng_gives_the_same_report():
    args = data(0)
    first, second = (str(check_layer_norm(forward, backward, *args, rng=7)) for _ in range(2))
    assert first == second


def test_scales_are_the_row_spread_not_the_magnitude(rng):
    # exp(x - max): a step in proportion to |x| would leave the function behind.
    function, gradient, _ = OPERATIONS["softmax"]
    x = 1e5 + rng.standard_normal((4, 6))
    report = check_gradients(function, gradient, [x], rng=0)
    assert report.passed, str(report)
    assert report.arguments[0].resolution < 1e-6
    # A spread that misleads can be replaced.
    x = np.array([[0.0, 0.0, 1e9], [1.0, 2.0, 3.0]])
    report = check_gradients(function, gradient, [x], scales=[1.0], rng=0)
    assert report.passed, str(report)
