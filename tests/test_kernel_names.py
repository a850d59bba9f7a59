"""Names of compiled functions: what machine code on disk is linked by."""

import gc
import importlib
from collections import Counter

import numpy as np
import pytest

numba = pytest.importorskip("numba")


def test_no_two_compiled_functions_have_one_name():
    """Of two of one name and types, the first that is loaded from disk would do for both."""
    from numba.core.dispatcher import Dispatcher  # noqa: PLC0415  # skipped where Numba is missing

    importlib.import_module("stablenorm.cpu")
    # Not isinstance, which asks the objects: some are proxies of what is no more.
    gc.unfreeze()
    functions = {made.py_func for made in gc.get_objects() if issubclass(type(made), Dispatcher)}
    gc.freeze()
    ours = [f for f in functions if f.__module__.startswith("stablenorm.cpu.")]
    names = Counter((f.__module__, f.__qualname__) for f in ours)
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []


FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)


@pytest.mark.parametrize(
    ("maker", "arguments"),
    [
        ("total_job", (FLOAT32,)),
        ("_forward_job", (FLOAT16, FLOAT16, FLOAT16)),
        ("_backward_job", (FLOAT32, FLOAT32, FLOAT32, False)),
    ],
)
def test_what_threads_make_at_the_same_time_is_compiled_once(maker, arguments):
    """`functools.cache` lets all of them in until the first has come back."""
    make = getattr(importlib.import_module("stablenorm.cpu.jobs"), maker)
    assert make.__wrapped__(*arguments) is make.__wrapped__(*arguments) is make(*arguments)


def test_another_function_of_the_same_name_is_itself():
    compiling = importlib.import_module("stablenorm.cpu.compiling")

    def made(number):
        def answer():
            return number

        return compiling.compiled(answer, numba.int64())

    assert (made(1)(), made(2)()) == (1, 2)
    assert made(1) is not made(2)
