"""
Run a CUDA kernel on the host: build its source with g++ and launch it, without a GPU.

`build` compiles the text of a `.cu` source with fibers.cpp, `launch` runs one of its kernels: any
grid, any schedule by seed, every access to memory checked. `LaunchError` says what a device would
have let pass in silence: an access out of bounds, a race, a barrier that some threads do not reach.
"""

import ctypes
import fcntl
import functools
import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

HERE = Path(__file__).parent
# -Og: compiling takes most of the time of the tests. -fno-strict-aliasing: kernels look at the bits
# of floats through pointers. -ftrivial-auto-var-init: a variable that was never written holds 0xFE
# bytes, not luck. Instrumented as for the sanitizers; fibers.cpp takes their place.
RUNTIME_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-pipe", f"-I{HERE}")
KERNEL_FLAGS = (
    *RUNTIME_FLAGS, "-Og", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas",
    "-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern", "-fsanitize=thread",
    "-fsanitize=alignment", "--param=tsan-instrument-func-entry-exit=0",
)  # fmt: skip

READ, WRITE = 1, 2


class LaunchError(RuntimeError):
    """The kernel did what a device may let pass or punish: the message says which thread did what."""


class Tensor(NamedTuple):
    """Memory that a kernel may touch: `rights` is READ, WRITE or both."""

    name: str
    address: int
    nbytes: int
    rights: int


class Traffic(NamedTuple):
    """The traffic of a launch with one tensor: bytes loaded and stored, stores to each of its bytes."""

    tensor: Tensor
    loaded: int
    stored: int
    writes: np.ndarray


# struct Region of fibers.cpp.
REGION = [(name, np.uint64) for name in ("begin", "bytes", "rights", "writes", "loaded", "stored")]


def _why_not() -> str:
    """Say what is missing to run kernels on this machine; "" if nothing is."""
    if not Path("/proc/self/exe").exists():
        return "the host shim needs Linux"
    if shutil.which("g++") is None:
        return "the host shim needs g++"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True)
    # The first with _Float16 on x86-64.
    return "" if int(version.stdout.split(".")[0]) >= 12 else "the host shim needs g++ 12 or later"


# Marks tests that run kernels.
needs_shim = pytest.mark.skipif(bool(why := _why_not()), reason=why or "-")


def _made(folder, text, *options):
    """Compile C++ text into a library; several processes that ask for it compile it once."""
    parts = [text, (HERE / "cuda_shim.h").read_text(), *options]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    path = folder / f"{digest}.so"
    with (folder / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            written, made, linked = (path.with_suffix(end) for end in (".cpp", ".o", ".part"))
            written.write_text(text)
            # In two steps: with its option, g++ would link ThreadSanitizer itself.
            for step in ([*options, "-c", written, "-o", made], ["-shared", made, "-o", linked]):
                process = subprocess.run(
                    ["g++", *step], capture_output=True, text=True, check=False
                )
                if process.returncode:
                    msg = f"g++ did not compile the kernel:\n{process.stderr[:4000]}"
                    raise RuntimeError(msg)
            linked.replace(path)
    return path


@functools.cache
def build(source, folder, entry, defines=()):
    """Build the kernel `entry` of `source`, in `folder`, with options for the compiler."""
    # Dynamic shared memory becomes memory of the block.
    source = re.sub(
        r"extern\s+__shared__\s+__align__\(\d+\)\s+([\w\s]+?)\s+(\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(shim_shared());",
        source,
    )
    text = f"""#include "cuda_shim.h"
{source}
extern "C" __attribute__((no_sanitize("thread"))) void shim_call(const unsigned char* bytes) {{
    {entry}(*reinterpret_cast<const Parameters*>(bytes));
}}
"""
    runtime = _made(folder, (HERE / "fibers.cpp").read_text(), *RUNTIME_FLAGS)
    if not hasattr(ctypes.CDLL(None), "shim_launch"):
        # Once in a process: the libraries of all kernels find its functions.
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(_made(folder, text, *KERNEL_FLAGS, *(f"-D{each}" for each in defines))))


def launch(kernel, grid, block, shared_bytes, parameters, tensors, *, seed=0, cooperative=False):
    """
    Run one grid to its end, on memory of this process; return the traffic of each tensor.

    `seed` decides the schedule: drawn if it is even, one block as far as possible if it is odd. All
    blocks run at once if `cooperative`, otherwise a few at a time, as a busy device may do. Without
    `tensors` only shared memory and barriers are checked.
    """
    given = tensors or ()
    writes = [np.zeros(tensor.nbytes, np.uint8) for tensor in given]
    pairs = zip(given, writes, strict=True)
    regions = np.array([(*each[1:], counts.ctypes.data, 0, 0) for each, counts in pairs], REGION)
    run = ctypes.CDLL(None).shim_launch
    run.restype = ctypes.c_char_p
    failed = run(
        kernel.shim_call, parameters, grid, block,
        ctypes.c_size_t(shared_bytes), ctypes.c_uint64(seed), int(cooperative),
        None if tensors is None else regions.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(len(given)),
    )  # fmt: skip
    if failed is not None:
        raise LaunchError(re.sub(r"tensor (\d+)", lambda m: given[int(m[1])].name, failed.decode()))
    both = zip(given, regions["loaded"], regions["stored"], writes, strict=True)
    return [Traffic(*each) for each in both]
