"""Any shape, axes, layouts and dtypes: the bits of the plain call, on both backends, and right."""

import itertools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stablenorm import Gradients, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm

KINDS = f2, bf, f4, f8 = [
    np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
]

# Of x, dy, gamma, beta; None for a parameter that is not given. Not every mixture there is, for
# each of which a kernel would have to be compiled first.
MIXTURES = [
    *((kind,) * 4 for kind in KINDS),
    (f2, f2, f4, f4),
    (bf, bf, f4, f4),
    (f4, f4, None, None),
    # A float64 gamma beside narrower arrays; test_contracts.py has the same mixtures.
    (f4, f8, f8, bf),
]


def reordered(a, order):
    return np.ascontiguousarray(a.transpose(order)).transpose(np.argsort(order))


def strided(a):
    wide = np.zeros([2 * length + 1 for length in a.shape], a.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in a.shape)]
    view[...] = a
    return view


def reversed_everywhere(a):
    back = (slice(None, None, -1),) * a.ndim
    return a[back].copy()[back]


def misaligned(a):
    view = np.zeros(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def swapped(a):
    # bfloat16 has no other byte order.
    return a if a.dtype == ml_dtypes.bfloat16 else a.astype(a.dtype.newbyteorder())


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


# Each has the shape and the values of its argument.
LAYOUTS = {
    "C": np.array,
    "Fortran": np.asfortranarray,
    "last axis first": lambda a: reordered(a, (*range(1, a.ndim), 0)[::-1]),
    "strided": strided,
    "reversed": reversed_everywhere,
    "misaligned": misaligned,
    "other byte order": swapped,
    "read-only": read_only,
    # Of values that are the same along the first axis, as `make` sees to.
    "broadcast": lambda a: np.broadcast_to(a[:1].copy(), a.shape),
}
WRITABLE = ["C", "Fortran", "last axis first", "strided", "reversed", "misaligned"]


class Call(NamedTuple):
    """A recipe: what Hypothesis prints of a call that fails."""

    seed: int
    shape: tuple[int, ...]
    axis: int | tuple[int, ...]
    # Of x, dy, gamma, beta; as `MIXTURES`.
    dtypes: tuple[Any, ...]
    layouts: tuple[str, ...]
    # Of y and dx; None if they are not given.
    outs: tuple[str | None, str | None]
    offset: float
    eps: float


@st.composite
def calls(draw, dtypes):
    ndim = draw(st.integers(1, 4))
    numbers = draw(st.permutations(range(ndim)))[: draw(st.integers(1, ndim))]
    # Lengths around the eight lanes of the kernels, a few long, and rows that are none.
    lengths = st.sampled_from([1, 1, 2, 3, 4, 5, 7, 9, 17])
    rows = st.sampled_from([0, 1, 1, 2, 3, 5])
    shape = tuple(draw(lengths if i in numbers else rows) for i in range(ndim))
    signed = tuple(i - ndim if draw(st.booleans()) else i for i in numbers)
    layout = st.sampled_from(sorted(LAYOUTS))
    return Call(
        draw(st.integers(0, 2**32 - 1)),
        shape,
        signed[0] if len(signed) == 1 and draw(st.booleans()) else signed,
        draw(dtypes),
        tuple(draw(layout) for _ in range(4)),
        tuple(draw(st.none() | st.sampled_from(WRITABLE)) for _ in range(2)),
        draw(st.sampled_from([0.0, 1.0, 100.0])),
        draw(st.sampled_from([0.0, 1e-5, 1.0])),
    )


def make(call):
    """Return x, dy, gamma, beta as plain arrays in C order, and the sorted axes."""
    given_axes = call.axis if isinstance(call.axis, tuple) else (call.axis,)
    axes = tuple(sorted(i % len(call.shape) for i in given_axes))
    lengths = tuple(call.shape[i] for i in axes)
    rng = np.random.default_rng(call.seed)
    arrays = []
    shapes = (call.shape, call.shape, lengths, lengths)
    for shape, dtype, layout in zip(shapes, call.dtypes, call.layouts, strict=True):
        values = call.offset * (not arrays) + rng.standard_normal(shape)
        if layout == "broadcast":
            values[...] = values[:1]
        arrays.append(None if dtype is None else values.astype(dtype))
    return arrays, axes


def lay_out(array, layout):
    return None if array is None else LAYOUTS[layout](array)


def as_given(call, backend):
    """Return y, dx, dgamma, dbeta of the call as it is, and check that no input was changed."""
    plain, _ = make(call)
    arrays = [lay_out(*both) for both in zip(plain, call.layouts, strict=True)]
    x, dy, gamma, beta = arrays
    y_out, dx_out = (
        None if layout is None else lay_out(np.zeros_like(plain[0]), layout) for layout in call.outs
    )
    y, cache = layer_norm_forward(
        x, gamma, beta, call.eps, axis=call.axis, out=y_out, backend=backend
    )
    gradients = layer_norm_backward(dy, cache, out=Gradients(dx_out, None, None))
    assert y_out is None or y is y_out
    assert dx_out is None or gradients.dx is dx_out
    alone = layer_norm(x, gamma, beta, call.eps, axis=call.axis, backend=backend)
    assert_same_bits(y, alone)
    for array, before in zip(arrays, plain, strict=True):
        assert array is None or array.astype(before.dtype).tobytes() == before.tobytes()
    return y, *gradients


def in_rows(array, axes):
    last = tuple(range(array.ndim - len(axes), array.ndim))
    moved = np.ascontiguousarray(np.moveaxis(array, axes, last))
    n = int(np.prod(moved.shape[last[0] :]))
    return moved.reshape(moved.size // n, n)


def in_plain_rows(call, backend):
    """Return the same of the (rows, n) arrays in C order, and these arrays."""
    (x, dy, gamma, beta), axes = make(call)
    x, dy = in_rows(x, axes), in_rows(dy, axes)
    gamma, beta = (None if v is None else v.ravel() for v in (gamma, beta))
    y, cache = layer_norm_forward(x, gamma, beta, call.eps, backend=backend)
    return (y, *layer_norm_backward(dy, cache)), (x, dy, gamma, beta)


def have_same_bits(expected, actual):
    """The sign and the payload of a NaN mean nothing."""
    one, other = (v.astype(np.float64) for v in (expected, actual))
    nan = np.isnan(one)
    return (nan == np.isnan(other)).all() and one[~nan].tobytes() == other[~nan].tobytes()


def assert_same_bits(expected, actual):
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    assert have_same_bits(expected, actual)


def check(call):
    results, arrays = {}, None
    for backend in ("numpy", "numba"):
        expected, arrays = in_plain_rows(call, backend)
        actual = as_given(call, backend)
        axes = make(call)[1]
        for name, one, other in zip(("y", "dx", "dgamma", "dbeta"), expected, actual, strict=True):
            if one is None:
                assert other is None
                continue
            rows = in_rows(other, axes) if name in ("y", "dx") else other.ravel()
            assert_same_bits(one, rows)
        results[backend] = dict(zip(("y", "dx", "dgamma", "dbeta"), expected, strict=True))
    # The exact arithmetic of a row takes milliseconds.
    if backends_differ(results, arrays) or arrays[0].size <= 40:
        check_oracle(results, arrays, call.eps)


def backends_differ(results, arrays):
    """
    Tell whether y or dx, of at most 32 bits, differs in a bit between the backends.

    It may where it cancels almost completely. The others differ by a few roundings of float64.
    """
    differ = False
    narrow = all(v is None or v.dtype.itemsize < 8 for v in arrays)
    for name, expected in results["numpy"].items():
        actual = results["numba"][name]
        if expected is None:
            assert actual is None
        elif name in ("y", "dx") and narrow:
            differ |= not have_same_bits(expected, actual)
        else:
            one, other = (v.astype(np.float64) for v in (expected, actual))
            u = float(ml_dtypes.finfo(expected.dtype).eps)
            # Each within 0.75 ulp of the exact one: 2 ulp, of at most u each, apart, unless it
            # cancels: then c = 2**-44 of a sum of at most 85 rows of such size.
            size = np.abs(arrays[1].astype(np.float64)).max(initial=1) * 85
            np.testing.assert_allclose(one, other, rtol=2 * u, atol=2.0**-44 * size)
    return differ


def check_oracle(results, arrays, eps):
    x, dy, gamma, beta = arrays
    exact = exact_layer_norm(x, gamma, beta, eps, dy)
    for found in results.values():
        given_arrays = {name: v for name, v in found.items() if v is not None}
        for name, result in exact.check_contract(**given_arrays).items():
            assert result.passed, (name, result)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls(st.sampled_from(MIXTURES)))
def test_any_call(call):
    check(call)


def test_every_layout_over_all_axes():
    """Arrays without a (rows, n) view, of which one row is all there is, were refused."""
    for layout, out in itertools.product(LAYOUTS, (None, *WRITABLE)):
        check(Call(1, (3, 4), (0, 1), (f4,) * 4, (layout,) * 4, (out, out), 1.0, 1e-5))
