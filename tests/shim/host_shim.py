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
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

HERE = Path(__file__).parent
# -Og: compiling takes most of the time of the tests. -fno-strict-aliasing: kernels look at the bits
# of floats through pointers. -ftrivial-auto-var-init: a variable that was never written holds 0xFE
# bytes, not luck. Instrumented as for the sanitizers; fibers.cpp takes their place.
RUNTIME_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pipe", f"-I{HERE}")
KERNEL_FLAGS = (
    *RUNTIME_FLAGS, "-Og", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas",
    "-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern", "-fsanitize=thread",
    "-fsanitize=alignment", "--param=tsan-instrument-func-entry-exit=0",
)  # fmt: skip

# Words of atomic operations are read and written, and nobody looks for races there.
READ, WRITE, ATOMIC = 1, 2, 7


class LaunchError(RuntimeError):
    """The kernel did what a device may let pass or punish: the message says which thread did what."""


class Tensor(NamedTuple):
    """Memory that a kernel may touch: `rights` is READ, WRITE, both or ATOMIC."""

    name: str
    address: int
    nbytes: int
    rights: int


def _compile(*options, text=None):
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    if (done := run(["g++", *options], input=text)).returncode:
        msg = f"g++ did not compile the kernel:\n{done.stderr[:4000]}"
        raise RuntimeError(msg)


def _is_usable():
    try:
        # g++ 12 is the first with this type on x86-64.
        _compile("-fsyntax-only", "-x", "c++", "-", text="_Float16 half;")
    except (OSError, RuntimeError):
        return False
    return sys.platform == "linux"


# Marks tests that run kernels.
needs_shim = pytest.mark.skipif(
    not _is_usable(), reason="the host shim needs Linux and g++ 12 or later"
)


def _object(folder, text, *options):
    """Compile C++ text; several processes that ask for it compile it once."""
    parts = [text, (HERE / "cuda_shim.h").read_text(), *options]
    path = folder / (hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20] + ".o")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            _compile(*options, "-c", "-x", "c++", "-", "-o", part, text=text)
            part.replace(path)
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
    runtime = _object(folder, (HERE / "fibers.cpp").read_text(), *RUNTIME_FLAGS)
    kernel = _object(folder, text, *KERNEL_FLAGS, *(f"-D{define}" for define in defines))
    library = kernel.with_suffix(f".{os.getpid()}.so")
    # A step of its own: with its option, g++ would link ThreadSanitizer itself.
    _compile("-shared", kernel, runtime, "-o", library)
    return ctypes.CDLL(str(library))


def launch(kernel, grid, block, shared_bytes, parameters, tensors, *, seed=0, cooperative=False):
    """
    Run one grid to its end, on memory of this process; return for each tensor how often each of its bytes was
    loaded, and stored.

    `seed` decides the schedule: drawn if it is even, one block as far as possible if it is odd. All
    blocks run at once if `cooperative`, otherwise a few at a time, as a busy device may do. Without
    `tensors` only shared memory and barriers are checked.
    """
    traffic = [np.zeros((2, tensor.nbytes), np.uint32) for tensor in tensors]
    both = zip(tensors, traffic, strict=True)
    # An array of struct Region.
    regions = np.array(
        [(*tensor[1:], *(a.ctypes.data for a in counts)) for tensor, counts in both], np.uint64
    )
    kernel.shim_launch.restype = ctypes.c_char_p
    failed = kernel.shim_launch(
        kernel.shim_call, parameters, grid, block, shared_bytes, seed, int(cooperative),
        regions.ctypes.data_as(ctypes.c_void_p), len(tensors),
    )  # fmt: skip
    if failed is not None:
        named = re.sub(r"tensor (\d+)", lambda match: tensors[int(match[1])].name, failed.decode())
        raise LaunchError(named)
    return traffic
