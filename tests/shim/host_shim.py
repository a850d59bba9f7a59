"""
Run a CUDA kernel on the host: build its source with g++ and launch it, without a GPU.

`build` compiles a `.cu` source for fibers.cpp into a library, `launch` runs one of its kernels:
any grid, any schedule by seed, every access to memory checked; `LaunchError` says what a device
would have let pass in silence. `build_threads` and `launch_threads` do the same on threads of the
operating system under ThreadSanitizer, in a process of their own.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).parent
# -O1: compiling takes most of the time of the tests. -fno-strict-aliasing: kernels look at the bits
# of floats through pointers. -ftrivial-auto-var-init: a variable that was never written holds 0xFE
# bytes, not luck.
COMMON = (
    "-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fPIC", "-pipe", "-U_FORTIFY_SOURCE",
    "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern", f"-I{HERE}",
)  # fmt: skip
# Instrumented as for the sanitizers; fibers.cpp takes their place.
CHECKED = (
    "-fsanitize=thread", "-fsanitize=alignment", "--param=tsan-distinguish-volatile=1",
    "--param=tsan-instrument-func-entry-exit=0",
)  # fmt: skip
OPERATIONS = ("add", "mul", "fma", "div", "sqrt", "convert")

READ, WRITE, UNWRITTEN = 1, 2, 4


class LaunchError(RuntimeError):
    """The kernel did what a device may let pass or punish: the message says which thread did what."""


class Tensor(NamedTuple):
    """
    Memory that a kernel may touch: `address`, `nbytes`, `rights` (READ | WRITE | UNWRITTEN).

    With UNWRITTEN, reading a byte before this launch has written it is an error.
    """

    name: str
    address: int
    nbytes: int
    rights: int


class Traffic(NamedTuple):
    """What a launch did to one tensor: bytes loaded and stored, stores to each of its bytes."""

    loaded: int
    stored: int
    writes: np.ndarray


class Record(NamedTuple):
    """What a launch did: traffic by tensor, floating-point operations (0 without `count`)."""

    traffic: dict[str, Traffic]
    operations: dict[str, int]


class Kernel(NamedTuple):
    """A built source, and fibers.cpp, which runs it."""

    library: ctypes.CDLL
    runtime: ctypes.CDLL


class Job(NamedTuple):
    """A launch on threads: memory by name, and the fields of the parameters that point into it."""

    entry: str
    grid: int
    block: int
    shared_bytes: int
    params_bytes: bytes
    buffers: dict[str, np.ndarray]
    # (byte of the parameters, name of the buffer, byte of the buffer)
    pointers: Sequence[tuple[int, str, int]]
    launches: int = 1
    cluster: int = 1


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("rights", ctypes.c_uint64),
        ("writes", ctypes.c_void_p),
        ("loaded", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
    )


def why_not() -> str:
    """Say what is missing to run kernels on this machine; "" if nothing is."""
    if shutil.which("g++") is None:
        return "the host shim needs g++"
    if not Path("/proc/self/exe").exists():
        return "the host shim needs Linux"
    return ""


# ---- building ----


def entries_of(source: str) -> list[str]:
    """Return the names of the kernels written out as ``extern "C" __global__ void NAME(``."""
    bounds = r"(?:__(?:launch_bounds|cluster_dims)__\([^()]*\)\s+)*"
    pattern = rf'extern\s+"C"\s+__global__\s+void\s+{bounds}(\w+)\s*\('
    return re.findall(pattern, source)


def host_source(source: str, entries: Sequence[str]) -> str:
    """Return the source for g++: shared variables become memory of the block."""
    align = r"(?:__align__\(\d+\)\s+|alignas\(\d+\)\s+)?"
    source = re.sub(
        rf"extern\s+__shared__\s+{align}([\w:<>\s]+?)\s+(\w+)\s*\[\s*\]\s*;",
        r"\1* const \2 = reinterpret_cast<\1*>(shim::shim_dynamic_shared());",
        source,
    )
    source = re.sub(
        rf"(?:static\s+)?__shared__\s+{align}([\w:<>,\s]+?)\s+(\w+)((?:\s*\[[^\]]+\])*)\s*;",
        r"\1 (&\2)\3 = *reinterpret_cast<\1 (*)\3>"
        r"(shim::shim_static_shared(__LINE__, sizeof(\1\3)));",
        source,
    )
    ends = [f"SHIM_ENTRY({entry})" for entry in entries]
    return "\n".join([source, "SHIM_LIBRARY", *ends, ""])


def _once(folder: Path, parts: Sequence[str], suffix: str, make: Callable[[Path], None]) -> Path:
    """Return the file for these parts; several processes that ask for it make it once."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    path = folder / (digest + suffix)
    with (folder / (digest + ".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = folder / f"{digest}.part{suffix}"
            make(made)
            made.replace(path)
    return path


def _run_compiler(*arguments: str | Path) -> None:
    process = subprocess.run(
        ["g++", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if process.returncode:
        msg = f"g++ did not compile the kernel:\n{process.stderr[:4000]}"
        raise RuntimeError(msg)


def _compile(folder: Path, text: str, flags: Sequence[str]) -> Path:
    """Compile C++ text, with the headers beside this file, into an object file."""
    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]

    def make(made: Path) -> None:
        written = made.with_suffix(".cpp")
        written.write_text(text)
        _run_compiler(*COMMON, *flags, "-c", written, "-o", made)

    return _once(folder, [text, *COMMON, *flags, *headers], ".o", make)


def build(
    source: str,
    folder: Path,
    *,
    entries: Sequence[str] = (),
    defines: Sequence[str] = (),
    count: bool = False,
) -> Kernel:
    """Build `source` for fibers; `count` counts floating-point operations. Kept in `folder`."""
    return _built(source, folder, tuple(entries), tuple(defines), count)


@functools.cache
def _built(
    source: str, folder: Path, entries: tuple[str, ...], defines: tuple[str, ...], count: bool
) -> Kernel:
    flags = [*(f"-D{define}" for define in defines), *(["-DSHIM_COUNT"] if count else [])]
    text = host_source(source, entries or entries_of(source))
    runtime = _runtime(folder)
    compiled = _compile(folder, f'#include "cuda_shim.h"\n{text}', [*flags, *CHECKED])
    return Kernel(ctypes.CDLL(str(_library(folder, compiled))), runtime)


def _library(folder: Path, compiled: Path) -> Path:
    def make(made: Path) -> None:
        _run_compiler("-shared", compiled, "-o", made)

    return _once(folder, [compiled.name], ".so", make)


def _runtime(folder: Path) -> ctypes.CDLL:
    """Load fibers.cpp, whose functions the libraries of kernels then find: once in a process."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "shim_launch"):
        compiled = _compile(folder, (HERE / "fibers.cpp").read_text(), [])
        ctypes.CDLL(str(_library(folder, compiled)), ctypes.RTLD_GLOBAL)
    return process


def build_threads(
    source: str, folder: Path, *, entries: Sequence[str] = (), defines: Sequence[str] = ()
) -> Path:
    """Build `source` as a program on threads, under ThreadSanitizer."""
    sanitize = ["-fsanitize=thread"]
    text = host_source(source, entries or entries_of(source))
    flags = [*(f"-D{define}" for define in defines), *sanitize]
    kernel = _compile(folder, f'#include "cuda_shim.h"\n{text}', flags)
    runtime = _compile(folder, (HERE / "threads.cpp").read_text(), sanitize)

    def make(made: Path) -> None:
        # -rdynamic: the program looks its kernel up by name.
        _run_compiler(*sanitize, "-rdynamic", kernel, runtime, "-o", made, "-ldl", "-pthread")

    return _once(folder, [kernel.name, runtime.name], ".program", make)


# ---- launching ----


def dims(size: int | Sequence[int]) -> tuple[int, int, int]:
    """Return a grid or block size as three numbers."""
    size = (size,) if isinstance(size, int) else tuple(size)
    return (*size, *(1,) * (3 - len(size)))  # type: ignore[return-value]


def launch(
    kernel: Kernel,
    entry: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    shared_bytes: int,
    params_bytes: bytes,
    *,
    tensors: Sequence[Tensor] = (),
    schedule_seed: int = 0,
    cooperative: bool = False,
    cluster: int = 1,
) -> Record:
    """
    Run one grid to its end, on memory of this process.

    Parameters
    ----------
    kernel : Kernel
        From `build`.
    entry : str
        The name of the kernel.
    grid, block : int or sequence of int
        As for a device.
    shared_bytes : int
        Dynamic shared memory of a block.
    params_bytes : bytes
        The parameters as the device would get them: each at its natural alignment.
    tensors : sequence of Tensor, optional
        All that the kernel may touch; if empty, global memory is not checked.
    schedule_seed : int, default: 0
        0: first come, first served; 1: last first; others: drawn.
    cooperative : bool, default: False
        All blocks at once; otherwise a few at a time, as a busy device may do.
    cluster : int, default: 1
        Blocks that run together and reach one another's shared memory.

    Returns
    -------
    Record
        Bytes loaded and stored by tensor, and operations.

    Raises
    ------
    LaunchError
        On the first forbidden access, divergent barrier, shared-memory race or endless wait.
    """
    size = getattr(kernel.library, f"shim_size_{entry}")
    size.restype = ctypes.c_size_t
    if len(params_bytes) != size():
        msg = f"{entry} takes {size()} bytes of parameters, got {len(params_bytes)}"
        raise ValueError(msg)
    regions = (_Region * max(1, len(tensors)))()
    if int(np.prod(dims(grid))) % cluster:
        msg = f"the grid must be a multiple of the cluster, got {grid} and {cluster}"
        raise ValueError(msg)
    writes = [np.zeros(tensor.nbytes, np.uint8) for tensor in tensors]
    for region, tensor, counts in zip(regions, tensors, writes, strict=False):
        region.begin, region.bytes, region.rights = tensor.address, tensor.nbytes, tensor.rights
        region.writes = counts.ctypes.data
    flops = (ctypes.c_uint64 * len(OPERATIONS)).in_dll(kernel.runtime, "shim_flops")
    ctypes.memset(flops, 0, ctypes.sizeof(flops))
    message = ctypes.create_string_buffer(1024)
    failed = kernel.runtime.shim_launch(
        getattr(kernel.library, f"shim_call_{entry}"), kernel.library.shim_library, params_bytes, ctypes.c_size_t(len(params_bytes)),
        (ctypes.c_uint * 3)(*dims(grid)), (ctypes.c_uint * 3)(*dims(block)),
        ctypes.c_size_t(shared_bytes), cluster, ctypes.c_uint64(schedule_seed), int(cooperative),
        regions, ctypes.c_size_t(len(tensors)), message, ctypes.c_size_t(len(message)),
    )  # fmt: skip
    if failed:
        raise LaunchError(_with_names(message.value.decode(), tensors))
    traffic = {
        tensor.name: Traffic(region.loaded, region.stored, counts)
        for tensor, region, counts in zip(tensors, regions, writes, strict=False)
    }
    return Record(traffic, dict(zip(OPERATIONS, flops, strict=True)))


def _with_names(message: str, tensors: Sequence[Tensor]) -> str:
    return re.sub(r"tensor (\d+)", lambda found: tensors[int(found[1])].name, message)


def tensor(name: str, array: np.ndarray, rights: int) -> Tensor:
    """Return the memory of a contiguous array as a `Tensor`."""
    return Tensor(name, array.__array_interface__["data"][0], array.nbytes, rights)


# ---- threads ----


def why_not_threads() -> str:
    """Say what is missing to run kernels under ThreadSanitizer; "" if nothing is."""
    # Its shadow memory must not meet the randomly placed program.
    if shutil.which("setarch") is None:
        return "ThreadSanitizer needs setarch, to switch address randomization off"
    return why_not()


def launch_threads(program: Path, job: Job) -> tuple[dict[str, np.ndarray], str]:
    """Run `job` in a process of its own; return its memory and what ThreadSanitizer reported."""
    path = program.with_suffix(f".{os.getpid()}.job")
    path.write_bytes(_packed(job))
    try:
        process = subprocess.run(
            ["setarch", "-R", str(program), str(path)],
            capture_output=True, text=True, check=False, timeout=120,
            env={**os.environ, "TSAN_OPTIONS": "exitcode=66 history_size=2"},
        )  # fmt: skip
        content = path.read_bytes()
    finally:
        path.unlink()
    if process.returncode not in (0, 66):
        msg = f"the program on threads ended with {process.returncode}:\n{process.stderr[:2000]}"
        raise RuntimeError(msg)
    memory, start = {}, 0
    for name, buffer in job.buffers.items():
        words = np.frombuffer(content, np.uint8, buffer.nbytes, start)
        memory[name] = words.copy().view(buffer.dtype).reshape(buffer.shape)
        start += buffer.nbytes
    return memory, process.stderr


def _packed(job: Job) -> bytes:
    """Return what threads.cpp reads: its `Header`, the parameters, the buffers, the pointers."""
    names = list(job.buffers)
    header = struct.pack(
        "<64s8I5Q", job.entry.encode(), job.grid, 1, 1, job.block, 1, 1, job.cluster, 0,
        job.shared_bytes, job.launches, len(job.params_bytes), len(names), len(job.pointers),
    )  # fmt: skip
    buffers = [
        struct.pack("<Q", buffer.nbytes) + buffer.tobytes() for buffer in job.buffers.values()
    ]
    pointers = [struct.pack("<3Q", at, names.index(name), byte) for at, name, byte in job.pointers]
    return b"".join([header, job.params_bytes, *buffers, *pointers])
