"""The kernels: whatever the calling thread is set to, flushing subnormals or rounding upward, not a bit differs."""

import ctypes
import platform
import sys

import ml_dtypes
import numpy as np
import pytest
from interpreter import python
from norms import assert_same, compute

pytest.importorskip("stablenorm.native", exc_type=ImportError)

# Enough to be shared by threads.
MANY = 1100, 64

# Where the control word is in C's fenv_t, and its bits: to flush results and to take subnormal
# operands as zero; to round upward.
PLACES = {
    ("linux", "x86_64"): (28, 1 << 15 | 1 << 6, 2 << 13),
    ("linux", "aarch64"): (0, 1 << 24, 1 << 22),
    ("darwin", "x86_64"): (4, 1 << 15 | 1 << 6, 2 << 13),
    ("darwin", "arm64"): (8, 1 << 24, 1 << 22),
}
PLACE = PLACES.get((sys.platform, platform.machine()))

pytestmark = pytest.mark.skipif(PLACE is None, reason="the layout of fenv_t is not known here")


class Control:
    """The control word of this thread."""

    def __init__(self):
        try:
            self.library = ctypes.PyDLL(None)
            assert self.library.fegetenv
        except AttributeError:
            self.library = ctypes.PyDLL("libm.so.6")

    def environment(self):
        held = ctypes.create_string_buffer(256)
        self.library.fegetenv(held)
        return held

    def word(self):
        return ctypes.c_uint32.from_buffer(self.environment(), PLACE[0])

    def settings(self):
        # The last six bits of x86's are no settings, but what has happened so far.
        return self.word().value & ~63 | self.word().value & PLACE[1]

    def set_bits(self, bits):
        held = self.environment()
        ctypes.c_uint32.from_buffer(held, PLACE[0]).value |= bits
        self.library.fesetenv(held)


@pytest.fixture(params=["flush", "upward"])
def control(request):
    """Set this thread so on demand; afterwards it is as before."""
    control = Control()
    before = control.environment()
    control.bits = PLACE[1] if request.param == "flush" else PLACE[2]
    yield control
    control.library.fesetenv(before)


F2, BF, F4, F8 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


def hostile(rng, shape, x_dtype, dtype, eps=0.0):
    """Return x, gamma, beta, eps, dy with elements below the normal numbers."""
    x, dy = rng.standard_normal((2, *shape))
    gamma, beta = rng.standard_normal((2, shape[-1]))
    tiny = {F2: 1e-6, BF: 1e-40, F4: 1e-40, F8: 1e-50}
    x, dy = (v * tiny[x_dtype] for v in (x, dy))
    gamma[::2] *= tiny[dtype]
    beta[::2] *= tiny[dtype]
    return x.astype(x_dtype), gamma.astype(dtype), beta.astype(dtype), eps, dy.astype(x_dtype)


def check(control, case):
    expected = compute(case, backend="native").values()
    default = control.environment()
    control.set_bits(control.bits)
    before = control.settings()
    try:
        actual = compute(case, backend="native").values()
        after = control.settings()
    finally:
        control.library.fesetenv(default)
    assert after == before
    assert before & control.bits == control.bits
    assert_same(actual, expected)


KINDS = [(F2, F2), (BF, BF), (F4, F4), (F8, F8), (BF, F4)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("x_dtype", "dtype"), KINDS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("eps", [0.0, 1e-50])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 5), MANY])
def test_not_a_bit_differs(control, rng, x_dtype, dtype, eps, shape):
    check(control, hostile(rng, shape, x_dtype, dtype, eps))


STARTED = """
import numpy as np
import stablenorm, test_control_word as t
case = t.hostile(np.random.default_rng(0), t.MANY, t.F4, t.F4)
stablenorm.set_num_threads(1)
expected = t.compute(case).values()
control = t.Control()
control.set_bits(t.PLACE[{which}])
stablenorm.set_num_threads(3)
for _ in range(20):
    t.assert_same(t.compute(case).values(), expected)
"""


@pytest.mark.parametrize("which", [1, 2])
def test_helpers_that_such_a_thread_starts(which):
    """A thread begins with the control word of the one that starts it."""
    assert python(STARTED.format(which=which)) == ""
