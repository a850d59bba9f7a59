"""The compiled backend: starting, caching, failing, what it allocates."""

import os
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interpreter import python

import stablenorm
from stablenorm import layer_norm_backward, layer_norm_forward

pytest.importorskip("numba")

PACKAGE = Path(stablenorm.__file__).parent


# ---- without Numba ----

WITHOUT = """
import sys, warnings
{how}
import numpy as np
from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward

x, gamma = np.arange(12, dtype=np.float32).reshape(3, 4) ** 2, np.arange(4, dtype=np.float16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        y, cache = layer_norm_forward(x, gamma)
        gradients = layer_norm_backward(x, cache)
        layer_norm(x)
(warning,) = caught
assert warning.category is RuntimeWarning and warning.filename == "<string>", warning
print(warning.message)
expected, of_numpy = layer_norm_forward(x, gamma, backend="numpy")
assert cache.backend == "numpy" and y.tobytes() == expected.tobytes()
assert gradients.dx.tobytes() == layer_norm_backward(x, of_numpy).dx.tobytes()
try:
    layer_norm(x, backend="numba")
except ImportError as error:
    print(error)
"""

FINDER = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            raise ModuleNotFoundError("No module named 'numba'", name="numba")
sys.meta_path.insert(0, Finder())
"""

DISABLED = "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'"


@pytest.mark.parametrize(
    ("how", "package", "reason"),
    [
        (FINDER, None, "ModuleNotFoundError: No module named 'numba'"),
        ("sys.modules['numba'] = None", None, "ModuleNotFoundError: "),
        ("", "raise OSError('libLLVM: no such file')", "OSError: libLLVM: no such file"),
        ("", "import numpy; numpy.no_such_name", "AttributeError: module 'numpy' has no"),
        ("", "", "ImportError: cannot import name"),
        (DISABLED, None, "ImportError: NUMBA_DISABLE_JIT switches its compiler off; unset it"),
    ],
    ids=["missing", "None", "broken library", "NumPy too new", "empty", "NUMBA_DISABLE_JIT"],
)
def test_without_numba_it_warns_once_and_works(tmp_path, how, package, reason):
    environment = {}
    if package is not None:
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text(package)
        paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    warning, error = python(WITHOUT.format(how=how), **environment).splitlines()
    assert "need Numba, which cannot be loaded" in warning
    assert 'needed for backend="numba"' in error
    for text in (warning, error):
        assert reason in text
        assert "pip install --upgrade numba" in text


# ---- starting, and the cache on disk ----


FOUND = """
import sys
import ml_dtypes
import numpy as np
from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cpu import compiling
for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
    # Many and few rows, of two lengths.
    for shape in ((300, 5), (300, 200), (3, 5), (3, 200)):
        x, gamma = np.ones(shape, dtype), np.ones(shape[-1], dtype)
        y, cache = layer_norm_forward(x, gamma, gamma)
        layer_norm_backward(y, cache)
stats = {d.py_func.__qualname__: d.stats for d in compiling._DISPATCHERS}
compiled = [name for name, found in stats.items() if found.cache_misses]
compiled += [made.__name__ for made in compiling._C_FUNCTIONS if not made.cache_hits]
compiled += ["all that could be"] * ("numba.np.npyimpl" in sys.modules)
print(len(stats) + len(compiling._C_FUNCTIONS), *compiled)
"""


def test_a_second_process_compiles_nothing():
    """
    What refers to another compiled function by a variable is never found on disk again.

    Nor is what could be compiled imported.
    """
    python(FOUND)
    count, *compiled = python(FOUND).split()
    assert int(count) > 15
    assert compiled == []


# ---- memory ----


def peak(function):
    function()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(8192, 64), (512, 4096), (16, 65_537)])
def test_what_is_allocated(rng, name, shape):
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    rows, n = shape
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    gamma, beta = (np.ones(n, dtype) for _ in range(2))
    out, (_, cache) = np.empty_like(x), layer_norm_forward(x, gamma, beta)
    threads = stablenorm.get_num_threads()
    # Beside 64 bytes per row, what does not grow with the rows: gamma and beta in float64, and of
    # each thread a stage of 2 KiB; in the backward, four words per column.
    shared, stages = 16 * (n + 16) + 4096, 4096 * threads
    room = 64 * rows + shared + stages
    assert peak(lambda: layer_norm_forward(x, gamma, beta, out=out)) < room
    assert peak(lambda: layer_norm_forward(x, gamma, beta)) < room + x.nbytes
    # dgamma and dbeta of each of at most 64 tiles, each a compensated float64 sum.
    tiles = min(64, max(8, 2**17 // n))
    scratch = shared + stages + 8192 + threads * 32 * (n + 16)
    sums = tiles * 2 * 16 * (n + 16) + scratch
    given = (np.empty_like(x), np.empty_like(gamma), np.empty_like(beta))
    assert peak(lambda: layer_norm_backward(dy, cache, out=given)) < sums
    assert peak(lambda: layer_norm_backward(dy, cache)) < sums + x.nbytes + 8 * n
    assert peak(lambda: layer_norm_backward(dy, cache, wrt="x", out=given)) < scratch + 8 * rows
