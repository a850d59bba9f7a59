"""Broken where a thread that flushes subnormals or rounds upward changes a bit of the kernels' results."""

import ctypes
import platform
import sys

import pytest
from calls import bf, f2, f4, f8
from interpreter import python
from norms import assert_same, compute

pytest.importorskip("stablenorm.native", exc_type=ImportError)

# Enough to be shared by threads.
MANY = 1100, 64

# The place of the control word in C's fenv_t, and its bits: to flush results and to take subnormal operands as zero; to
# round upward.
PLACES = {
    ("linux", "x86_64"): (28, 1 << 15 | 1 << 6, 2 << 13),
    ("linux", "aarch64"): (0, 1 << 24, 1 << 22),
    ("darwin", "x86_64"): (4, 1 << 15 | 1 << 6, 2 << 13),
    ("darwin", "arm64"): (8, 1 << 24, 1 << 22),
}
PLACE = PLACES.get((sys.platform, platform.machine()))

pytestmark = pytest.mark.skipif(PLACE is None, reason="the layout of fenv_t is not known here")


class Control:
    """The control word of this thread, which is set to `bits` inside a with statement."""

    def __init__(self, bits):
        # The C library has these functions, or libm.
        self.library, self.bits = ctypes.PyDLL(None), bits
        if not hasattr(self.library, "fegetenv"):
            self.library = ctypes.PyDLL("libm.so.6")

    def environment(self):
        held = ctypes.create_string_buffer(256)
        self.library.fegetenv(held)
        return held, ctypes.c_uint32.from_buffer(held, PLACE[0])

    def settings(self):
        # The last six bits of x86's are no settings, but what has happened so far.
        word = self.environment()[1].value
        return word & ~63 | word & PLACE[1]

    def __enter__(self):
        self.before = self.environment()[0]
        held, word = self.environment()
        word.value |= self.bits
        self.library.fesetenv(held)
        assert self.settings() & self.bits == self.bits
        self.inside = self.settings()

    def __exit__(self, *_):
        after = self.settings()
        self.library.fesetenv(self.before)
        assert after == self.inside


def hostile(rng, shape, x_dtype, dtype, eps=0.0):
    """Return x, gamma, beta, eps, dy with elements below the normal numbers."""
    x, dy = rng.standard_normal((2, *shape))
    gamma, beta = rng.standard_normal((2, shape[-1]))
    tiny = {f2: 1e-6, bf: 1e-40, f4: 1e-40, f8: 1e-50}
    x, dy = ((v * tiny[x_dtype]).astype(x_dtype) for v in (x, dy))
    if x_dtype == f8:
        # Rows that integers do.
        x[1:2], x[2:3] = x[1:2] * 1e-265, x[2:3] * 1e300
    gamma[::2], beta[::2] = gamma[::2] * tiny[dtype], beta[::2] * tiny[dtype]
    return x, gamma.astype(dtype), beta.astype(dtype), eps, dy


KINDS = [(f2, f2), (bf, bf), (f4, f4), (f8, f8), (bf, f4)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("which", [1, 2], ids=["flush", "upward"])
@pytest.mark.parametrize(("x_dtype", "dtype"), KINDS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("eps", [0.0, 1e-50])
@pytest.mark.parametrize("shape", [(1, 1, 64), (9, 33), MANY])
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_not_a_bit_differs(which, rng, x_dtype, dtype, eps, shape, rounding):
    case = hostile(rng, shape, x_dtype, dtype, eps)
    expected = compute(case, rounding=rounding, backend="native").values()
    with Control(PLACE[which]):
        actual = compute(case, rounding=rounding, backend="native").values()
    assert_same(actual, expected)


STARTED = """
import numpy as np
import stablenorm, test_control_word as t
case = t.hostile(np.random.default_rng(0), t.MANY, t.f4, t.f4)
stablenorm.set_num_threads(1)
expected = t.compute(case).values()
with t.Control(t.PLACE[{which}]):
    stablenorm.set_num_threads(3)
    for _ in range(20):
        t.assert_same(t.compute(case).values(), expected)
"""


@pytest.mark.parametrize("which", [1, 2])
def test_helpers_that_such_a_thread_starts(which):
    """A thread begins with the control word of the one that starts it."""
    assert python(STARTED.format(which=which)) == ""
