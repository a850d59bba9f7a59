"""The stages of `make gpu`: each takes the labels that are done and yields records of the rest."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy
import gpu_problem
from gpu_bench import bench, measure_ceilings
from gpu_cases import SANITIZED, correctness_cases, count_bytes
from gpu_occupancy import occupancy
from gpu_profile import METRICS, read_profile

from stablenorm import cuda

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# What is profiled: one large case of each regime of the plan.
PROFILED = (((65_536, 768), "bfloat16"), ((8192, 4096), "bfloat16"), ((1024, 65_536), "float32"))
# Long enough for a case on the slowest of the tools, which is a thousand times slower than without.
_PATIENCE = 300

Stage = Callable[[set[str]], Iterator[dict[str, Any]]]


def make_stages() -> dict[str, Stage]:
    """Return them in the order in which they run."""
    return {
        "probe": probe,
        "correctness": correctness,
        "sanitizer": sanitizer,
        "bench": bench,
        "profile": profile,
    }


def probe(done: set[str]) -> Iterator[dict[str, Any]]:
    """Device, driver, versions, what its memory can do, and how many blocks fit it."""
    if "device" not in done:
        yield _device()
    yield from occupancy(cuda._driver(), cupy.cuda.Device().id, done)


def _device() -> dict[str, Any]:
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    ceilings = measure_ceilings()
    return {
        "label": "device",
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "gpu": properties["name"].decode(),
        "capability": device.compute_capability,
        "multiprocessors": properties["multiProcessorCount"],
        "cache_bytes": properties["l2CacheSize"],
        "versions": _versions(),
        **ceilings,
    }


def _versions() -> dict[str, str]:
    names = {
        "stablenorm": "stablenorm",
        "NumPy": "numpy",
        "cuda-bindings": "cuda-bindings",
        "NVRTC": "nvidia-cuda-nvrtc",
        "PyTorch": "torch",
        "Liger-Kernel": "liger-kernel",
        "fla": "fla-core",
        "quack": "quack-kernels",
    }
    found = {"CuPy": cupy.__version__, "CUDA driver": str(cupy.cuda.runtime.driverGetVersion())}
    for name, package in names.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def correctness(done: set[str]) -> Iterator[dict[str, Any]]:
    """The sweep against the reference on the host, and that no bit ever changes."""
    for case in correctness_cases():
        if case.label not in done:
            yield {"label": case.label, **gpu_problem.check(case)}
    for label, check in gpu_problem.INVARIANCES.items():
        if label not in done:
            yield {"label": label, **check()}


def sanitizer(done: set[str]) -> Iterator[dict[str, Any]]:
    """NVIDIA's compute-sanitizer, one process a tool and a shape."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        if "all" not in done:
            yield {"label": "all", "skipped": "compute-sanitizer is not installed"}
        return
    for tool in TOOLS:
        for rows, n in SANITIZED:
            label = f"{tool} {rows}x{n}"
            if label in done:
                continue
            # kns: part of the mangled name. (Older ones call the option --kernel-regex.)
            command = [program, "--tool", tool, "--error-exitcode", "9"]
            command += ["--kernel-name", "kns=layer_norm"]
            command += [sys.executable, str(HERE / "gpu_problem.py")]
            passed, said = _run([*command, str(rows), str(n)])
            yield {"label": label, "passed": passed, **({} if passed else {"said": said})}


def _run(command: list[str]) -> tuple[bool, str]:
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {_PATIENCE} s"
    return done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def profile(done: set[str]) -> Iterator[dict[str, Any]]:
    """Bytes that one backward moves to and from memory, and how many launches it is."""
    program = shutil.which("ncu")
    if program is None:
        if "all" not in done:
            yield {"label": "all", "skipped": "ncu is not installed"}
        return
    for (rows, n), dtype in PROFILED:
        label = f"backward {rows}x{n} {dtype}"
        if label in done:
            continue
        command = [program, "--csv", "--print-units", "base"]
        command += ["--clock-control", "none", "--cache-control", "all"]
        command += ["--metrics", ",".join(METRICS), "--nvtx", "--nvtx-include", "profiled/"]
        child = [sys.executable, str(HERE / "gpu_problem.py"), str(rows), str(n), dtype]
        ended = subprocess.run([*command, *child], check=False, capture_output=True, text=True)
        if ended.returncode:
            lines = (ended.stdout + ended.stderr).strip().splitlines()
            # Often: the counters are for administrators alone.
            said = next((line for line in lines if "ERR_" in line), (lines or ["failed"])[-1])
            yield {"label": label, "skipped": f"ncu: {said[:200]}"}
            continue
        least = count_bytes((rows, n), dtype, "backward")
        yield {"label": label, "least": least, **read_profile(ended.stdout)}
