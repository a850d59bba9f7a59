"""`RowMoments`: the mean and rstd of rows whose columns come in parts."""

import itertools
import pickle

import numpy as np
import pytest
from norms import NORMS

from stablenorm import RowMoments
from stablenorm.testing.families import make_case


def cuts(n, parts, rng):
    """Return `parts` slices that make up range(n); some may be empty."""
    inner = np.sort(rng.integers(0, n + 1, parts - 1)) if parts < n else np.arange(1, n)
    edges = [0, *inner.tolist(), n]
    return [slice(*both) for both in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", ["F01", "F03", "F07", "F09", "F12", "F16"])
@pytest.mark.parametrize("kind", NORMS)
def test_row_moments_are_those_of_the_cache(name, kind, dtype, rng):
    case = make_case(name, dtype, 60, 4)
    _, cache = NORMS[kind][0](case.x, eps=case.eps, backend="numpy")
    some = [RowMoments(kind) for _ in range(3)]
    for number, columns in enumerate(cuts(60, 7, rng)):
        some[number % 3].update(case.x[:, columns])
    first, second, third = some
    third.merge(pickle.loads(pickle.dumps(first)))
    second.merge(third)
    # Float64 data: both are nearly always rounded right; others: of float64 sums.
    bound = 0 if dtype == np.float64 else 2.0**-48
    mean, rstd = second.finish(case.eps)
    spread = np.abs(case.x.astype(float) - cache.mean).mean(axis=-1, keepdims=True)
    np.testing.assert_array_less(
        abs(mean - cache.mean), bound * spread + np.spacing(abs(cache.mean))
    )
    np.testing.assert_allclose(rstd, cache.rstd, rtol=bound + 2.0**-52)


def test_row_moments_take_leading_axes_and_parts_without_columns():
    x = np.arange(48.0).reshape(2, 3, 8)[:, ::-1]
    moments = RowMoments()
    for part in (x[..., :0], x[..., :5], x[..., 5:], x[..., 8:]):
        moments.update(part)
    mean, rstd = moments.finish()
    np.testing.assert_array_equal(mean, x.mean(axis=-1, keepdims=True))
    np.testing.assert_allclose(rstd, (x.var(axis=-1, keepdims=True) + 1e-5) ** -0.5)


def test_row_moments_refuse_in_one_line():
    some = RowMoments()
    with pytest.raises(ValueError, match="must have columns, got none yet; call update"):
        some.finish()
    some.update(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"leading shape \(2,\), got \(3,\)"):
        some.update(np.ones((3, 3)))
    with pytest.raises(TypeError, match=r"x must be float16, .* got int64"):
        some.update(np.ones((2, 3), int))
    with pytest.raises(ValueError, match="x must have columns"):
        some.update(np.float64(1.0))
    with pytest.raises(ValueError, match='kind must be "layer" or "rms"'):
        RowMoments("group")
    with pytest.raises(ValueError, match='other must be of kind "layer", got "rms"'):
        some.merge(RowMoments("rms"))
    with pytest.raises(TypeError, match="other must be a RowMoments, got int"):
        some.merge(1)
    with pytest.raises(ValueError, match="eps must be finite"):
        some.finish(-1.0)
