"""Names of compiled functions: what machine code on disk is linked by."""

import gc
import importlib
from collections import Counter

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
