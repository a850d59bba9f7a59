"""Functions in C++ that the tests call: compiled with the headers of the kernels, once for a test run."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

fcntl = pytest.importorskip("fcntl")

HERE = Path(__file__).parent
NATIVE = HERE.parent / "src" / "stablenorm" / "native"
# The flags of CMakeLists.txt.
FLAGS = "-std=c++17 -shared -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi"


def functions_of(name, folder):
    """Return a function that calls those of tests/NAME.cpp, by their names: arrays go as addresses."""
    compiler = shutil.which("c++")
    if compiler is None or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("there is no C++ compiler, or the kernels are not for this processor")
    flags = ["-mavx2", "-mfma", "-mf16c"] if platform.machine() == "x86_64" else []
    library = folder / f"{name}.so"
    source = HERE / f"{name}.cpp"
    command = [compiler, *FLAGS.split(), *flags, "-I", NATIVE, source, "-o", library]
    with (folder / f"{name}.lock").open("w") as lock:
        # One of the processes of a test run compiles it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    kinds = {int: ctypes.c_ssize_t, float: ctypes.c_double}

    def as_c(value):
        kind = kinds.get(type(value))
        return kind(value) if kind else ctypes.c_void_p(np.asarray(value).ctypes.data)

    return lambda function, *arguments: getattr(loaded, function)(*map(as_c, arguments))
