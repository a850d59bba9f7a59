"""The stage "bench" of `make gpu`: ours beside the peers, CUDA events, cold cache, interleaved."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
from gpu_agreement import admit, named, solve
from gpu_cases import BENCH_DTYPES, BENCH_SHAPES, PASSES, buffer_sets
from gpu_gates import OURS, OURS_GRAPH, OURS_TWICE, summarize
from gpu_peers import load_peers
from gpu_variants import load_finish, separate, through

from stablenorm import cuda, layer_norm_backward, layer_norm_forward
from stablenorm._types import Gradients
from stablenorm.cli.bench_measure import Problem, type_of
from stablenorm.cuda import CudaWorkspace

WARM_UPS, REPEATS = 25, 100
_CEILING_BYTES = 2**30
# Of a few rows, hundreds of sets would be needed to fill the cache: those stay warm for everyone.
_MOST_SETS = 16
Call = Callable[[], Any]


def measure_ceilings() -> dict[str, float]:
    """Bytes a second of a copy, and of reading two arrays and writing one, 1 GiB each."""
    count = _CEILING_BYTES // 4
    a, b, c = (cupy.ones(count, np.float32) for _ in range(3))
    add = cupy.ElementwiseKernel("float32 a, float32 b", "float32 c", "c = a + b", "triad")
    calls: dict[str, Call] = {"copy": lambda: cupy.copyto(c, a), "triad": lambda: add(a, b, c)}
    found = measure({name: [call] for name, call in calls.items()})
    moved = {"copy": 2, "triad": 3}
    return {k: moved[k] * _CEILING_BYTES / summarize(v)[0] for k, v in found.items()}


def measure(candidates: dict[str, list[Call]]) -> dict[str, list[float]]:
    """
    Time candidates in turn; each is a list of the same call on several sets of arrays.

    The sets go round, so that the arrays of a call have left the cache since they were last used.
    """
    turns = {name: itertools.cycle(calls) for name, calls in candidates.items()}
    for name in candidates:
        for _ in range(WARM_UPS):
            next(turns[name])()
    events = [cupy.cuda.Event() for _ in range(2)]
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(REPEATS):
        for name in candidates:
            call = next(turns[name])
            cupy.cuda.Device().synchronize()
            events[0].record()
            call()
            events[1].record()
            events[1].synchronize()
            samples[name].append(1e-3 * cupy.cuda.get_elapsed_time(*events))
    return samples


def bench(done: set[str]) -> Iterator[dict[str, Any]]:
    """
    Every shape, dtype and direction; one record each, with the times of all candidates.

    Only what agrees with float64 is timed; a record has passed if ours do.
    """
    peers, missing = load_peers()
    if missing and "missing" not in done:
        yield {"label": "missing", "missing": missing}
    cache_bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["l2CacheSize"]
    for shape, dtype, direction in itertools.product(BENCH_SHAPES, BENCH_DTYPES, PASSES):
        label = f"{direction} {shape[0]}x{shape[1]} {dtype}"
        if label in done:
            continue
        sets = buffer_sets(shape, dtype, cache_bytes)
        problems = [_problem(shape, dtype) for _ in range(min(sets, _MOST_SETS))]
        replays, kept = _graph(problems, direction)
        candidates = {OURS: [_ours(p, direction) for p in problems], OURS_GRAPH: replays}
        if direction == "backward":
            candidates[OURS_TWICE] = [_twice(p) for p in problems]
        refused = {}
        for name, peer in peers.items():
            try:
                candidates[name] = [peer(problem, direction) for problem in problems]
            except Exception as error:  # noqa: BLE001  # they raise whatever they like
                refused[name] = str(error).partition("\n")[0][:200]
        # Compiled here, and refused here what cannot do this shape, or does it wrong.
        verdict = admit(
            solve(_on_host(problems[0]), direction),
            {
                k: functools.partial(_results, problems[0], direction, v[0])
                for k, v in candidates.items()
            },
            OURS,
        )
        candidates = {k: v for k, v in candidates.items() if k not in verdict.refused}
        times = {name: summarize(samples) for name, samples in measure(candidates).items()}
        del kept, candidates, problems
        cupy.get_default_memory_pool().free_all_blocks()
        case = {"shape": shape, "dtype": dtype, "direction": direction}
        passed = not any(name.startswith(OURS) for name in verdict.refused)
        refused |= verdict.refused
        found = {"times": times, "ulps": verdict.ulps, "refused": refused, "passed": passed}
        yield {"label": label, **case, **found}


def _problem(shape: tuple[int, int], dtype: str) -> dict[str, Any]:
    kind = type_of(dtype)
    drawn = cupy.random.standard_normal((2, *shape), dtype=np.float32)
    gamma, beta = cupy.random.standard_normal((2, shape[1]), dtype=np.float32)
    arrays = {"x": drawn[0], "dy": drawn[1], "gamma": gamma, "beta": beta}
    made = {name: array.astype(kind) for name, array in arrays.items()}
    y, cache = layer_norm_forward(made["x"], made["gamma"], made["beta"])
    dx = cupy.empty_like(made["x"])
    sums = cupy.empty_like(made["gamma"]), cupy.empty_like(made["beta"])
    return {**made, "y": y, "cache": cache, "out": (dx, *sums)}


def _ours(problem: dict[str, Any], direction: str) -> Call:
    x, gamma, beta, y, out = (problem[k] for k in ("x", "gamma", "beta", "y", "out"))
    if direction == "forward":
        return lambda: layer_norm_forward(x, gamma, beta, out=y)
    return lambda: layer_norm_backward(problem["dy"], problem["cache"], out=out)


def _twice(problem: dict[str, Any]) -> Call:
    call, driver = _ours(problem, "backward"), separate(cuda._driver(), load_finish)

    def twice() -> Any:
        with through(driver):
            return call()

    return twice


def _on_host(problem: dict[str, Any]) -> Problem:
    x, gamma, beta, dy, y = (problem[k].get() for k in ("x", "gamma", "beta", "dy", "y"))
    return Problem(x, gamma, beta, dy, y, Gradients(None, None, None))


def _results(problem: dict[str, Any], direction: str, call: Call) -> dict[str, Any]:
    """Call once and return the results on the host."""
    ours = (problem["y"],) if direction == "forward" else problem["out"]
    for array in ours:
        # All ones is a NaN: what a replay does not write is seen.
        array.data.memset(0xFF, array.nbytes)
    returned = call()
    cupy.cuda.Device().synchronize()
    # A replay returns nothing: it writes where the call that was captured wrote.
    found = named(ours if returned is None else returned, direction)
    return {name: _to_host(array) for name, array in found.items()}


def _to_host(array: Any) -> Any:
    held = array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array.detach())
    return held.get()


def _graph(problems: list[dict[str, Any]], direction: str) -> tuple[list[Call], list[Any]]:
    """Capture each call; return the replays, and what must live as long as they."""
    stream, replays, kept = cupy.cuda.Stream(non_blocking=True), [], []
    cupy.cuda.Device().synchronize()
    for problem in problems:
        call, work = _ours(problem, direction), CudaWorkspace()
        with stream, work:
            call()
            stream.begin_capture()
            kept.append((call(), work))
            graph = stream.end_capture()
            graph.upload()
        stream.synchronize()
        # On the current stream of the caller, where the events are.
        replays.append(graph.launch)
    return replays, kept
