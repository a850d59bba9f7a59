"""
On a CUDA device: check the kernels, time them beside the peers, write docs/how-to/gpu.md: `make gpu`.

Every output is first checked: against the exact oracle, for all dtypes, layouts and special values,
and bit by bit between runs, grids, streams and graphs. Then it is timed. Exit status 0 if all is
right, 1 if a check failed, 2 if there is no CUDA device. `--check` leaves out the timing and the page:
for compute-sanitizer, say.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import ml_dtypes
import numpy as np
from gpu_peers import load_peers
from page import DOCS, origin, origin_line, put, table

from stablenorm import cuda, layer_norm_backward, layer_norm_forward
from stablenorm.cuda import CudaWorkspace, driver
from stablenorm.formats import FORMATS
from stablenorm.oracle import exact_layer_norm

DTYPES = {each.dtype.name: each.dtype for each in FORMATS}
# Around every boundary of the launch plan: lanes, vectors, warps, blocks, columns in a loop.
LENGTHS = (
    1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 768, 1000, 1023, 1024, 1025,
    2048, 2049, 4095, 4096, 4097, 8192, 65_536,
)  # fmt: skip
# None, one, a tail of a warp, of a chunk, of 132 multiprocessors; and a few chunks a block.
ROWS = (0, 1, 3, 33, 131, 133, 1000, 4097)
VARIANTS = (
    "plain", "no gamma", "gamma float32", "one element later", "row stride", "mean 1e4",
    "subnormal", "a NaN row",
)  # fmt: skip
# Elements that the exact oracle judges in about a second; larger cases take their first rows.
JUDGED = 2**15
MOST = 2**22

SHAPES = (
    (8192, 1024), (8192, 4096), (4096, 8192), (65_536, 768), (1024, 65_536), (8192, 4095),
    (16, 4096), (1_000_000, 64),
)  # fmt: skip
WARM_UPS, REPEATS = 25, 100
# Arrays as large as x that must be moved: read x, write y; read dy and x, write dx.
PASSES = {"forward": 2, "backward": 3}

Call = Callable[[], Any]


class Case(NamedTuple):
    """One problem of the correctness sweep."""

    rows: int
    n: int
    dtype: str
    variant: str


def make_cases() -> list[Case]:
    """Return every length and dtype with two numbers of rows and two variants, in rotation."""
    cases = []
    for k, (n, dtype, _) in enumerate(itertools.product(LENGTHS, DTYPES, range(2))):
        rows = ROWS[(5 * k + 3 * (k // 8)) % len(ROWS)]
        cases.append(Case(min(rows, MOST // n), n, dtype, VARIANTS[(k + k // 8) % len(VARIANTS)]))
    return cases


def draw(case: Case) -> dict[str, Any]:
    """Draw the arrays of a case, on the host."""
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    dtype, shape = DTYPES[case.dtype], (case.rows, case.n)
    x, dy = (rng.standard_normal(shape) for _ in range(2))
    if case.variant == "mean 1e4":
        x += 1e4
    if case.variant == "subnormal":
        kind: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        x *= float(kind.smallest_normal)
    if case.variant == "a NaN row":
        x[-1:] = np.nan
    of_gamma = np.dtype(np.float32) if case.variant == "gamma float32" else dtype
    made: dict[str, Any] = {
        "x": x.astype(dtype),
        "gamma": None,
        "beta": None,
        "dy": dy.astype(dtype),
    }
    if case.variant != "no gamma":
        made |= {name: rng.standard_normal(case.n).astype(of_gamma) for name in ("gamma", "beta")}
    return made


def to_device(cupy: Any, array: Any, variant: str) -> Any:
    """Copy an array to the device, in the layout of the variant."""
    if array is None:
        return None
    held = cupy.asarray(array)
    if array.ndim == 1 or variant not in ("one element later", "row stride"):
        return held
    rows, n = array.shape
    if variant == "one element later":
        view = cupy.empty(array.size + 1, array.dtype)[1:].reshape(rows, n)
    else:
        view = cupy.empty((rows, n + 3), array.dtype)[:, :n]
    view[...] = held
    return view


def run(arrays: dict[str, Any], backend: str | None = None) -> dict[str, Any]:
    """Return y and the gradients that there are."""
    x, gamma, beta, dy = (arrays[name] for name in ("x", "gamma", "beta", "dy"))
    y, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    gradients = layer_norm_backward(dy, cache)._asdict()
    return {"y": y} | {name: array for name, array in gradients.items() if array is not None}


def check(cupy: Any, case: Case) -> str:
    """Return what is wrong with the results of a case, or ""."""
    arrays = draw(case)
    on_device = {name: to_device(cupy, array, case.variant) for name, array in arrays.items()}
    actual = {name: array.get() for name, array in run(on_device).items()}
    if case.variant == "a NaN row" and case.rows:
        # The others must be those of the case without it.
        clean = {**arrays, "x": arrays["x"][:-1], "dy": arrays["dy"][:-1]}
        expected = run({name: to_device(cupy, array, "") for name, array in clean.items()})
        same = all(actual[k][:-1].tobytes() == expected[k].get().tobytes() for k in ("y", "dx"))
        isolated = same and np.isnan(actual["y"][-1].astype(np.float64)).all()
        return "" if isolated else "a NaN leaves its row"
    if case.rows == 0:
        return "" if not any(a.any() for a in actual.values()) else "sums over no rows are not 0"
    # dgamma and dbeta need all rows; y and dx are judged in the first ones.
    some = max(1, JUDGED // case.n)
    if some < case.rows:
        expected = run(arrays, "numpy")
        for name in actual.keys() & {"dgamma", "dbeta"}:
            # The order of summation is another one: a unit in the last place of float64 inputs.
            if not np.allclose(actual[name].astype(float), expected[name].astype(float), 2**-7):
                return f"{name} is not that of the CPU"
        actual = {name: actual[name][:some] for name in ("y", "dx")}
        arrays |= {name: arrays[name][:some] for name in ("x", "dy")}
    exact = exact_layer_norm(arrays["x"], arrays["gamma"], arrays["beta"], 1e-5, arrays["dy"])
    results = exact.check_contract(**actual)
    return "; ".join(f"{name}: {result}" for name, result in results.items() if not result.passed)


def check_invariance(cupy: Any, shape: tuple[int, int] = (4097, 1001)) -> Iterator[tuple[str, str]]:
    """Yield what must change no bit, and whether it does, or ""."""
    arrays = draw(Case(*shape, "bfloat16", "plain"))
    held = {name: cupy.asarray(array) for name, array in arrays.items()}

    def bits(found: Any = None) -> list[bytes]:
        return [array.get().tobytes() for array in found or run(held).values()]

    def verdict(others: Iterator[list[bytes]]) -> str:
        return "" if all(other == expected for other in others) else "other bits"

    expected = bits()
    yield "50 runs", verdict(bits() for _ in range(50))
    read = driver.read_facts
    for facts in ({"multiprocessors": 1}, {"multiprocessors": 7}, {"cooperative": False}):
        with patch.object(driver, "read_facts", lambda device, f=facts: read(device)._replace(**f)):
            yield f"on a device with {facts}", verdict(bits() for _ in range(2))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    found = []
    for stream in streams * 5:
        with stream:
            found.append(run(held))
    cupy.cuda.Device().synchronize()
    yield "two streams at once", verdict(bits(one.values()) for one in found)
    results, replay, kept = _capture(cupy, held)
    for array in results:
        array[...] = 0
    replay()
    cupy.cuda.Device().synchronize()
    yield "a graph", verdict(bits(results) for _ in kept[:1])


def _capture(cupy: Any, held: dict[str, Any], direction: str = "both") -> tuple[Any, Call, Any]:
    """Return y and the gradients, the replay of a graph that writes them, and what must outlive it."""
    x, gamma, beta, dy = (held[name] for name in ("x", "gamma", "beta", "dy"))
    y, out = cupy.empty_like(x), tuple(map(cupy.empty_like, (x, gamma, beta)))
    stream, work = cupy.cuda.Stream(non_blocking=True), CudaWorkspace()
    _, cache = layer_norm_forward(x, gamma, beta, out=y)
    cupy.cuda.Device().synchronize()

    def step() -> Any:
        made = cache
        if direction != "backward":
            made = layer_norm_forward(x, gamma, beta, out=y)[1]
        if direction != "forward":
            layer_norm_backward(dy, made, out=out)
        return made

    with stream, work:
        step()
        stream.begin_capture()
        kept = work, step(), held
        graph = stream.end_capture()
    stream.synchronize()
    return (y, *out), graph.launch, kept


def measure(cupy: Any, candidates: dict[str, list[Call]]) -> dict[str, float]:
    """
    Return the median seconds of each candidate, a list of the same call on several sets of arrays.

    The sets take turns, so that the arrays of a call have left the cache since they were last used.
    """
    turns = {name: itertools.cycle(calls) for name, calls in candidates.items()}
    for name in list(candidates) * WARM_UPS:
        next(turns[name])()
    begin, end = (cupy.cuda.Event() for _ in range(2))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for name in list(candidates) * REPEATS:
        call = next(turns[name])
        cupy.cuda.Device().synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples[name].append(1e-3 * cupy.cuda.get_elapsed_time(begin, end))
    return {name: float(np.median(found)) for name, found in samples.items()}


def measure_ceiling(cupy: Any) -> float:
    """Return the bytes per second of reading two arrays and writing one, 1 GiB each."""
    a, b, c = (cupy.ones(2**28, np.float32) for _ in range(3))
    add = cupy.ElementwiseKernel("float32 a, float32 b", "float32 c", "c = a + b", "triad")
    return 3 * 2**30 / measure(cupy, {"triad": [lambda: add(a, b, c)]})["triad"]


def bench(cupy: Any, ceiling: float) -> tuple[list[list[str]], dict[str, str]]:
    """Return the rows of the table of times, and which peers are missing, and why."""
    peers, missing = load_peers()
    cache_bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["l2CacheSize"]
    lines = [["", "x", "dtype", "us", "us in a graph", "of ceiling", *peers]]
    for dtype, shape, direction in itertools.product(("bfloat16", "float32"), SHAPES, PASSES):
        nbytes = PASSES[direction] * math.prod(shape) * DTYPES[dtype].itemsize
        sets = max(3, min(16, math.ceil(3 * cache_bytes / nbytes)))
        problems = [_draw_on_device(cupy, shape, DTYPES[dtype]) for _ in range(sets)]
        captured = [_capture(cupy, problem, direction) for problem in problems]
        candidates: dict[str, list[Call]] = {
            "eager": [_eager(problem, direction) for problem in problems],
            "graph": [replay for _, replay, _ in captured],
        }
        for name, peer in peers.items():
            try:
                candidates[name] = [peer(problem, direction) for problem in problems]
                candidates[name][0]()
            except Exception as error:  # noqa: BLE001  # they raise whatever they like
                candidates.pop(name, None)
                missing[f"{name}, {direction} {shape} {dtype}"] = str(error)[:200]
        times = measure(cupy, candidates)
        best = times["graph"]
        ours = f"{1e6 * times['eager']:.0f}", f"{1e6 * best:.0f}", f"{nbytes / best / ceiling:.2f}"
        others = [f"{times[name] / best:.2f}" if name in times else "-" for name in peers]
        lines.append([direction, f"{shape}", dtype, *ours, *others])
        print(lines[-1], file=sys.stderr)
        del candidates, captured, problems
        cupy.get_default_memory_pool().free_all_blocks()
    return lines, missing


def _draw_on_device(cupy: Any, shape: tuple[int, int], dtype: np.dtype[Any]) -> dict[str, Any]:
    x, dy = (cupy.random.standard_normal(shape, dtype=np.float32).astype(dtype) for _ in range(2))
    gamma, beta = cupy.random.standard_normal((2, shape[1]), dtype=np.float32).astype(dtype)
    return {"x": x, "gamma": gamma, "beta": beta, "dy": dy}


def _eager(held: dict[str, Any], direction: str) -> Call:
    y, cache = layer_norm_forward(held["x"], held["gamma"], held["beta"])
    if direction == "forward":
        return lambda: layer_norm_forward(held["x"], held["gamma"], held["beta"], out=y)
    out = layer_norm_backward(held["dy"], cache)
    return lambda: layer_norm_backward(held["dy"], cache, out=out)


def page(cupy: Any, checked: int) -> str:
    """Measure, and return the part of docs/how-to/gpu.md that is measured."""
    ceiling = measure_ceiling(cupy)
    lines, missing = bench(cupy, ceiling)
    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    versions = {"CuPy": cupy.__version__, "driver": str(cupy.cuda.runtime.driverGetVersion())}
    text = [
        f"Ran on {name}, compute capability {device.compute_capability}: all {checked} checks passed. "
        + origin_line("make gpu", origin(versions)),
        f"Medians of {REPEATS} calls by CUDA events, with arrays that have left the cache.",
        f"The ceiling is {ceiling / 1e9:.0f} GB/s: two reads and one write in the same run.",
        "The last columns are a peer's time over ours in a graph.",
        table(lines[0], lines[1:]),
        *(f"Not timed: {peer}: {why}" for peer, why in list(missing.items())[:5]),
    ]
    return "\n\n".join(text)


def check_all(cupy: Any, cases: Sequence[Case]) -> tuple[int, list[str]]:
    """Return how many checks ran, and what failed."""
    found = [(" ".join(map(str, case)), check(cupy, case)) for case in cases]
    found += check_invariance(cupy)
    return len(found), [f"{label}: {wrong}" for label, wrong in found if wrong]


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="do not measure; the page stays")
    options = parser.parse_args(argv)
    try:
        cuda.check_usable()
    except (ImportError, RuntimeError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    cupy: Any = importlib.import_module("cupy")
    count, failed = check_all(cupy, make_cases())
    print(*(f"FAILED {each}" for each in failed), f"{count} checks, {len(failed)} failed", sep="\n")
    if not failed and not options.check:
        put(DOCS / "how-to" / "gpu.md", {"gpu": page(cupy, count)})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
