"""
On a CUDA device: the kernels' times beside PyTorch, torch.compile, Liger-Kernel and quack: `make gpu`.

First every output is checked (gpu_checks.py), seven problems under compute-sanitizer where it is. Keeps
benchmarks/results/gpu.json, and writes the measurements of docs/how-to/gpu.md; with `--render` from the file alone. Exit
status 1 if a check failed, 2 if there is no CUDA device.
"""

from __future__ import annotations

import importlib
import itertools
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu_checks import capture, check_all
from page import DOCS, keep, origin, origin_line, put, table
from peers import load_all

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.formats import parse
from stablenorm.testing import Case
from stablenorm.timing import PASSES

SHAPES = (
    (8192, 1024), (8192, 4096), (4096, 8192), (65_536, 768), (1024, 65_536), (8192, 4095),
    (16, 4096), (1_000_000, 64), (16_384, 2048),
)  # fmt: skip
WARM_UPS, REPEATS = 10, 50
# Clocks that the device spins for before a call is timed: longer than the host takes to ask for one.
CLOCKS = 1_000_000
SPIN = """
extern "C" __global__ void spin(long long clocks) {
    for (const long long begin = clock64(); clock64() - begin < clocks;) {}
}"""

Call = Callable[[], Any]
# Given a problem with arrays of CuPy's and a direction, the call to time. A forward returns y, or a
# tuple that begins with it; a backward dx, dgamma and dbeta.
Peer = Callable[[Case, str], Call]


def load_peers() -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can be loaded, and why the others cannot."""
    loaders = {"PyTorch": _torch, "torch.compile": _compiled, "Liger-Kernel": _liger}
    differentiable = {name: partial(_through_autograd, load) for name, load in loaders.items()}
    return load_all({**differentiable, "quack": _quack})


def _through_autograd(load: Callable[[Any], Callable[..., Any]]) -> Peer:
    """Time a differentiable function; its backward is the graph's, gradients not accumulated."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        msg = "this PyTorch has no CUDA"
        raise RuntimeError(msg)
    function = load(torch)

    def peer(case: Case, direction: str) -> Call:
        leaves = [torch.from_dlpack(leaf).requires_grad_() for leaf in case[:3]]
        if direction == "forward":
            return lambda: function(*leaves)
        y, dy = function(*leaves), torch.from_dlpack(case.dy)
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return peer


def _torch(torch: Any) -> Callable[..., Any]:
    return lambda x, *parameters: torch.layer_norm(x, parameters[0].shape, *parameters, 1e-5)


def _compiled(torch: Any) -> Callable[..., Any]:
    # Beyond its limit of recompilations it falls back to eager, in silence.
    torch._dynamo.config.recompile_limit = 1000
    compiled: Callable[..., Any] = torch.compile(_torch(torch), dynamic=False)
    return compiled


def _liger(_: Any) -> Callable[..., Any]:
    module: Any = importlib.import_module("liger_kernel.ops.layer_norm")
    return lambda *parameters: module.LigerLayerNormFunction.apply(*parameters, 1e-5)


def _quack() -> Peer:
    """Time the two functions of quack, which take gamma and beta in float32 alone."""
    torch: Any = importlib.import_module("torch")
    norms: Any = importlib.import_module("quack.rmsnorm")

    def peer(case: Case, direction: str) -> Call:
        x, dy = torch.from_dlpack(case.x), torch.from_dlpack(case.dy)
        gamma, beta = (torch.from_dlpack(array).float() for array in case[1:3])
        forward = partial(norms.layernorm_fwd, x, gamma, beta, 1e-5, True, True)
        _, rstd, mean = forward()
        backward = partial(norms.layernorm_bwd, x, gamma, dy, rstd, mean)
        return forward if direction == "forward" else backward

    return peer


def time_calls(cupy: Any, candidates: dict[str, list[Call]]) -> dict[str, float]:
    """
    Return the median seconds of each candidate, a list of the same call on several sets of arrays.

    The sets take turns, so that the arrays of a call have left the cache since they were last used.
    """
    turns = {name: itertools.cycle(calls) for name, calls in candidates.items()}
    for name in list(candidates) * WARM_UPS:
        next(turns[name])()
    begin, end = (cupy.cuda.Event() for _ in range(2))
    spin = cupy.RawKernel(SPIN, "spin")
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for name in list(candidates) * REPEATS:
        call = next(turns[name])
        cupy.cuda.Device().synchronize()
        # The call waits behind it, so that its time holds nothing of the host's.
        spin((1,), (1,), (np.int64(CLOCKS),))
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples[name].append(1e-3 * cupy.cuda.get_elapsed_time(begin, end))
    return {name: float(np.median(times)) for name, times in samples.items()}


def measure_ceiling(cupy: Any) -> float:
    """Return the bytes per second of a copy of 1 GiB."""
    a, b = (cupy.ones(2**28, np.float32) for _ in range(2))
    return 2 * 2**30 / time_calls(cupy, {"copy": [lambda: cupy.copyto(b, a)]})["copy"]


def sanitize() -> None:
    """Run a few problems under memcheck and racecheck, where compute-sanitizer is installed."""
    for tool in ("memcheck", "racecheck"):
        if program := shutil.which("compute-sanitizer"):
            script = [sys.executable, str(Path(__file__).with_name("gpu_checks.py")), "--few"]
            subprocess.run([program, "--tool", tool, "--error-exitcode", "1", *script], check=True)


def bench(cupy: Any) -> tuple[list[list[Any]], dict[str, str]]:
    """Return of each problem the bytes and the median seconds, and which peers are missing, and why."""
    peers, missing = load_peers()
    cache_bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["l2CacheSize"]
    lines = []
    for dtype, shape, direction in itertools.product(("bfloat16", "float32"), SHAPES, PASSES):
        nbytes = PASSES[direction] * math.prod(shape) * parse(dtype).itemsize
        sets = max(3, min(16, math.ceil(3 * cache_bytes / nbytes)))
        problems = [draw(cupy, shape, dtype) for _ in range(sets)]
        candidates: dict[str, list[Call]] = {
            "eager": [eager(problem, direction) for problem in problems],
            "graph": [capture(cupy, problem, direction)[1] for problem in problems],
        }
        for name, peer in peers.items():
            try:
                candidates[name] = [peer(problem, direction) for problem in problems]
                candidates[name][0]()
            except Exception as error:  # noqa: BLE001  # they raise whatever they like
                candidates.pop(name, None)
                missing[f"{name}, {direction} {shape} {dtype}"] = str(error)[:200]
        lines.append([direction, shape, dtype, nbytes, time_calls(cupy, candidates)])
        print(*lines[-1], file=sys.stderr)
        del candidates, problems
        cupy.get_default_memory_pool().free_all_blocks()
    return lines, missing


def draw(cupy: Any, shape: tuple[int, int], dtype: str) -> Case:
    """Draw the arrays of a problem, on the device."""
    draws = (shape, shape[1:], shape[1:], shape)
    drawn = (cupy.random.standard_normal(shape, dtype=np.float32) for shape in draws)
    x, gamma, beta, dy = (array.astype(parse(dtype)) for array in drawn)
    return Case(x, gamma, beta, 1e-5, dy)


def eager(case: Case, direction: str) -> Call:
    """Return our call, with results written into arrays given."""
    y, cache = layer_norm_forward(*case[:4])
    if direction == "forward":
        return lambda: layer_norm_forward(*case[:4], out=y)
    out = layer_norm_backward(case.dy, cache)
    return lambda: layer_norm_backward(case.dy, cache, out=out)


def measure() -> dict[str, Any]:
    """Check, then return all that the page holds."""
    cupy = check_all()
    sanitize()
    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    versions = {"CuPy": cupy.__version__, "driver": str(cupy.cuda.runtime.driverGetVersion())}
    named = f"{name}, compute capability {device.compute_capability}"
    head = {"origin": origin(versions), "device": named, "ceiling": measure_ceiling(cupy)}
    times, missing = bench(cupy)
    return head | {"times": times, "missing": missing}


def page(report: dict[str, Any]) -> str:
    """Return the part of docs/how-to/gpu.md that is measured."""
    ceiling = report["ceiling"]
    peers = dict.fromkeys(name for *_, times in report["times"] for name in list(times)[2:])
    lines = []
    for direction, shape, dtype, nbytes, times in report["times"]:
        best = times["graph"]
        ours = f"{1e6 * times['eager']:.0f}", f"{1e6 * best:.0f}", f"{nbytes / best / ceiling:.2f}"
        others = [f"{times[name] / best:.2f}" if name in times else "-" for name in peers]
        lines.append([direction, tuple(shape), dtype, *ours, *others])
    text = [
        f"Ran on {report['device']}: all checks passed. "
        + origin_line("make gpu", report["origin"]),
        f"Medians of {REPEATS} calls by CUDA events, with arrays that have left the cache.",
        f"The ceiling is {ceiling / 1e9:.0f} GB/s, that of a copy of 1 GiB in the same run.",
        "The last columns are a peer's time over ours in a graph.",
        table(["", "x", "dtype", "us", "us in a graph", "of ceiling", *peers], lines),
        *(f"Not timed: {peer}: {why}" for peer, why in list(report["missing"].items())[:5]),
    ]
    return "\n\n".join(text)


def main() -> None:
    """Measure or read, write the page."""
    put(DOCS / "how-to" / "gpu.md", {"gpu": page(keep("gpu", __doc__, measure))})


if __name__ == "__main__":
    main()
