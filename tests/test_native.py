"""No instruction set, number of threads, address in memory or control word changes a bit of the kernels."""

import ctypes
import platform
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from calls import MIXTURES, bf, f2, f4, f8
from interpreter import python, run_python
from norms import assert_same, compute

import stablenorm as sn
from stablenorm.testing import digest

native = pytest.importorskip("stablenorm.native", exc_type=ImportError)

HERE = Path(__file__).parent
NATIVE = HERE.parent / "src" / "stablenorm" / "native"
# The flags of CMakeLists.txt; with -O1 the cross-compiler took a minute.
# Digests of the means, of rstd and of the sums of test_statistics_and_sums, which no version changed.
BITS = ["58b7fe5e68e2", "e82aa4b00775", "c1a4adef91bd"]
FLAGS = "-std=c++17 -O0 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi"


def results(case, rounding, backend="native"):
    """Return the bytes of all results of a case, the statistics last."""
    x, dy, gamma, beta = case
    y, cache = sn.layer_norm_forward(x, gamma, beta, backend=backend, rounding=rounding)
    arrays = y, *sn.layer_norm_backward(dy, cache), cache.mean, cache.rstd
    return [array.tobytes() for array in arrays]


def make(rng, rows, n, dtypes):
    """
    Return rows of any offset and size, also nearly constant and constant ones; in float64, one out of range.

    The second half of the rows cancels the first in the sums, except for one row: only rounding errors are left.
    """
    x, dy = rng.standard_normal((2, rows, n)) * np.exp(2 * rng.standard_normal((2, rows, 1)))
    x += rng.standard_normal((rows, 1)) * 100
    x[::4] = 1 + x[::4] * 1e-6
    x[::7], dy[::5] = 3, 1
    half = (rows - 1) // 2
    x[half : 2 * half], dy[half : 2 * half] = x[:half], -dy[:half]
    if dtypes[0] == "float64":
        x[rows // 2] *= 2.0**300
    arrays = x, dy, *rng.standard_normal((2, n))
    return [array.astype(kind) for array, kind in zip(arrays, dtypes, strict=True)]


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("dtypes", [m for m in dict.fromkeys(MIXTURES) if None not in m])
def test_all_instructions_and_threads_give_the_same_bits(rng, dtypes, rounding, request):
    """With rounding="nearest" they are also the bits of the reference."""
    request.addfinalizer(partial(sn.set_num_threads, sn.get_num_threads()))
    request.addfinalizer(partial(native.use, native.INSTRUCTIONS[0]))
    shapes = [(3, 1), (9, 2), (70, 7), (200, 64), (65, 129), (9, 1000), (3, 5001)]
    for rows, n in shapes if rounding == "nearest" else [*shapes, (40, 1000), (300, 768)]:
        case = make(rng, rows, n, dtypes)
        native.use(native.INSTRUCTIONS[-1])
        sn.set_num_threads(1)
        expected = results(case, rounding)
        if rounding == "nearest" and rows * n < 10_000:
            # The reference takes microseconds an element.
            assert results(case, rounding, "numpy")[:4] == expected[:4]
        for instructions in native.INSTRUCTIONS:
            native.use(instructions)
            for threads in (1, 5):
                sn.set_num_threads(threads)
                assert results(case, rounding) == expected, (instructions, threads, rows, n)


def test_statistics_and_sums_have_the_bits_of_the_version_before():
    """Float64 shows the order of additions, which a rounded result hides: of lanes, blocks, parts and tiles."""
    rng, sums = np.random.default_rng(59), np.zeros((2, 1100, 3))
    x, dy = rng.standard_normal((2, 300, 1100), np.float32)
    _, cache = sn.layer_norm_forward(x, backend="native")
    wanted = "layer", ("gamma", "beta"), None, None, 2, sums
    assert native.plain_backward(dy, cache, *wanted) is not None
    assert [digest(v) for v in (cache.mean, cache.rstd, sums[..., :2])] == BITS


def test_arm64_gives_the_same_bits(tmp_path):
    """kernels.txt is what x86-64 prints, as `make sanitize` sees."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("aarch64-linux-gnu-g++ and qemu-aarch64 are needed")
    sources = [NATIVE / f"{name}.cpp" for name in ("tiles", "jobs", "pool", "memory")]
    command = [compiler, *FLAGS.split(), "-static", "-pthread", "-I", NATIVE, HERE / "kernels.cpp"]
    subprocess.run([*command, *sources, "-o", tmp_path / "kernels"], check=True)
    printed = subprocess.check_output([emulator, tmp_path / "kernels"], text=True)
    assert printed == (HERE / "kernels.txt").read_text()


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_at_any_address_have_the_same_bits(dtype, rounding, rng):
    """The last 12 bits of addresses decide whether rows are written from their ends, or past the caches."""
    for rows, n in ((9, 5), (9, 35), (9, 300), ((9 << 18) // 769, 769), (9 << 8, 1024)):
        x, dy, gamma, beta = make(rng, rows, n, (dtype,) * 4)
        options = {"rounding": rounding, "backend": "native"}
        y, cache = sn.layer_norm_forward(x, gamma, beta, **options)
        dx = sn.layer_norm_backward(dy, cache).dx
        few, of_few = sn.layer_norm_forward(x[5:7], gamma, beta, **options)
        assert few.tobytes() == y[5:7].tobytes()
        assert sn.layer_norm_backward(dy[5:7], of_few).dx.tobytes() == dx[5:7].tobytes()
        room = np.empty(x.nbytes + 4096, np.uint8)
        for behind in (-64, 0, 4, 16, 32, 64, 2048):
            start = (x.ctypes.data + behind - room.ctypes.data) % 4096
            out = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
            sn.layer_norm_forward(x, gamma, beta, out=out, **options)
            assert out.tobytes() == y.tobytes()
            sn.layer_norm_backward(dy, cache, out=(out, None, None))
            assert out.tobytes() == dx.tobytes()


def test_the_instructions_of_the_environment_are_used_or_refused():
    code = "import stablenorm.native"
    for name in native.INSTRUCTIONS:
        assert run_python(code, STABLENORM_INSTRUCTIONS=name).returncode == 0
    refused = run_python(code, STABLENORM_INSTRUCTIONS="mmx").stderr.splitlines()[-1]
    known = ", ".join(native.INSTRUCTIONS)
    said = f"STABLENORM_INSTRUCTIONS must be one of {known}, got 'mmx'"
    assert refused == f"ValueError: {said}"
    command = "from stablenorm.cli import main; raise SystemExit(main(['run']))"
    command = run_python(command, STABLENORM_INSTRUCTIONS="mmx")
    assert (command.returncode, command.stderr) == (2, f"stablenorm: {said}\n")


def test_a_missing_native_backend_says_so():
    code = (
        "import sys; sys.modules['stablenorm._core'] = None\n"
        "import numpy, stablenorm; stablenorm.layer_norm(numpy.ones((2, 3)), backend='native')"
    )
    message = run_python(code).stderr.splitlines()[-1]
    assert message.startswith("ImportError: stablenorm's kernels in C++ are not built (")
    assert message.endswith("install a wheel, or a C++17 compiler and then stablenorm")


# ---- threads that flush subnormals or round upward ----

# The place of the control word in C's fenv_t, its bits that flush subnormal results and operands to zero, and its bits
# that round upward.
PLACES = {
    ("linux", "x86_64"): (28, 1 << 15 | 1 << 6, 2 << 13),
    ("linux", "aarch64"): (0, 1 << 24, 1 << 22),
    ("darwin", "x86_64"): (4, 1 << 15 | 1 << 6, 2 << 13),
    ("darwin", "arm64"): (8, 1 << 24, 1 << 22),
}
PLACE = PLACES.get((sys.platform, platform.machine()))
known = pytest.mark.skipif(PLACE is None, reason="the layout of fenv_t is not known here")


class Control:
    """The control word of this thread; `bits` are set in it inside a with statement."""

    def __init__(self, bits):
        # The functions are in the C library or in libm.
        self.library, self.bits = ctypes.PyDLL(None), bits
        if not hasattr(self.library, "fegetenv"):
            self.library = ctypes.PyDLL("libm.so.6")

    def environment(self):
        buffer = ctypes.create_string_buffer(256)
        self.library.fegetenv(buffer)
        return buffer, ctypes.c_uint32.from_buffer(buffer, PLACE[0])

    def settings(self):
        # The last six bits on x86 are flags of past events, not settings.
        word = self.environment()[1].value
        return word & ~63 | word & PLACE[1]

    def __enter__(self):
        self.before = self.environment()[0]
        buffer, word = self.environment()
        word.value |= self.bits
        self.library.fesetenv(buffer)
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
        # Rows out of range, which go to integers.
        x[1:2], x[2:3] = x[1:2] * 1e-265, x[2:3] * 1e300
    gamma[::2], beta[::2] = gamma[::2] * tiny[dtype], beta[::2] * tiny[dtype]
    return x, gamma.astype(dtype), beta.astype(dtype), eps, dy


# Enough elements for threads to share.
MANY = 1100, 64
KINDS = [(f2, f2), (bf, bf), (f4, f4), (f8, f8), (bf, f4)]


@known
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("which", [1, 2], ids=["flush", "upward"])
@pytest.mark.parametrize(("x_dtype", "dtype"), KINDS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("eps", [0.0, 1e-50])
@pytest.mark.parametrize("shape", [(1, 1, 64), (9, 33), MANY])
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_a_hostile_control_word_changes_no_bit(which, rng, x_dtype, dtype, eps, shape, rounding):
    case = hostile(rng, shape, x_dtype, dtype, eps)
    expected = compute(case, rounding=rounding, backend="native").values()
    with Control(PLACE[which]):
        actual = compute(case, rounding=rounding, backend="native").values()
    assert_same(actual, expected)


STARTED = """
import numpy as np
import stablenorm, test_native as t
case = t.hostile(np.random.default_rng(0), t.MANY, t.f4, t.f4)
stablenorm.set_num_threads(1)
expected = t.compute(case).values()
with t.Control(t.PLACE[{which}]):
    stablenorm.set_num_threads(3)
    for _ in range(20):
        t.assert_same(t.compute(case).values(), expected)
"""


@known
@pytest.mark.parametrize("which", [1, 2])
def test_helpers_that_such_a_thread_starts(which):
    """A thread begins with the control word of the one that starts it."""
    assert python(STARTED.format(which=which)) == ""
