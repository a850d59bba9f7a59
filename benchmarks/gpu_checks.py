"""
On a CUDA device: check every output of the kernels, against the exact oracle and bit by bit.

The families of `stablenorm.testing` in all dtypes and layouts, around every boundary of the launch plan;
then the bits between runs, grids, streams and graphs. `make gpu` begins with it; alone, as under
compute-sanitizer, it is `python benchmarks/gpu_checks.py`; with `--few`, seven small problems. Exit status 0 if all is right, 1 if a check
failed, 2 if there is no CUDA device.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from stablenorm import cuda, layer_norm_backward, layer_norm_forward
from stablenorm.cuda import driver, find_plan
from stablenorm.formats import DTYPES, parse
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing import FAMILIES, Case, make_case

# Around every boundary of the launch plan: lanes, vectors, warps, blocks, columns in a loop.
LENGTHS = (
    1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 768, 1000, 1023, 1024, 1025,
    2048, 2049, 4095, 4096, 4097, 8192, 16_384, 65_536,
)  # fmt: skip
# One, a tail of a warp, of a chunk, of 132 multiprocessors; and a few chunks a block.
ROWS = (1, 3, 33, 131, 133, 1000, 4097)
LAYOUTS = ("plain", "no gamma", "gamma float32", "one element later", "row stride")
# Elements that the exact oracle judges in about two seconds.
MOST = 2**16
# Problems for compute-sanitizer: every kernel with full and with ragged rows.
FEW = (
    ("float32", 64), ("bfloat16", 129), ("float32", 1024), ("bfloat16", 1027), ("bfloat16", 8192),
    ("float32", 5001), ("float64", 129),
)  # fmt: skip
# Shapes of the check of bits: a few chunks of rows for each of 132 multiprocessors; blocks that share rows.
MANY = (1037, 257), (1037, 8192)


class Problem(NamedTuple):
    """One problem of the sweep."""

    family: str
    dtype: str
    n: int
    rows: int
    layout: str


def make_problems() -> list[Problem]:
    """Return every length and dtype twice; families, numbers of rows and layouts in rotation."""
    rows, layouts = itertools.cycle(ROWS), itertools.cycle(LAYOUTS)
    families = itertools.cycle(family for family in FAMILIES.values() if family.finite)
    problems = []
    for n, dtype, _ in itertools.product(LENGTHS, DTYPES, range(2)):
        count = min(next(rows), MOST // n)
        family = next(f for f in families if not f.why_not(parse(dtype), n, count))
        problems.append(Problem(family.name, dtype, n, count, next(layouts)))
    return [*problems, Problem("F01", "bfloat16", 257, 1037, "plain")]


def to_device(cupy: Any, case: Any, layout: str) -> Case:
    """Copy the arrays of a case to the device, x and dy in this layout."""
    x, gamma, beta, eps, dy = case

    def placed(array: Any) -> Any:
        rows, n = array.shape
        if layout == "one element later":
            view = cupy.empty(array.size + 1, array.dtype)[1:].reshape(rows, n)
        elif layout == "row stride":
            view = cupy.empty((rows, n + 3), array.dtype)[:, :n]
        else:
            return cupy.asarray(array)
        view[...] = cupy.asarray(array)
        return view

    if gamma is not None:
        gamma, beta = cupy.asarray(gamma), cupy.asarray(beta)
    return Case(placed(x), gamma, beta, eps, placed(dy))


def run(case: Case) -> dict[str, Any]:
    """Return y and the gradients that there are."""
    y, cache = layer_norm_forward(*case[:4])
    gradients = layer_norm_backward(case.dy, cache)._asdict()
    return {"y": y} | {name: array for name, array in gradients.items() if array is not None}


def draw(problem: Problem) -> Any:
    """Return the case of a problem, in host memory."""
    family, dtype, n, rows, layout = problem
    case: Any = make_case(family, parse(dtype), n, rows)
    if layout == "no gamma":
        case = case._replace(gamma=None, beta=None)
    if layout == "gamma float32":
        case = case._replace(gamma=case.gamma.astype(np.float32))
    return case


def judge(case: Any, actual: dict[str, Any]) -> str:
    """Return what breaks the contract in results in host memory, or ""."""
    results = exact_layer_norm(*case).check_contract(**actual)
    return "; ".join(f"{name}: {result}" for name, result in results.items() if not result.passed)


def check_problems(cupy: Any, problems: list[Problem]) -> list[tuple[str, str]]:
    """Return each problem's label and what is wrong with its results, judged by all processors."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        judged = []
        for problem in problems:
            case = draw(problem)
            results = run(to_device(cupy, case, problem.layout)).items()
            actual = {name: array.get() for name, array in results}
            judged.append((" ".join(map(str, problem)), pool.submit(judge, case, actual)))
        return [(label, verdict.result()) for label, verdict in judged]


def check_bits(cupy: Any, shape: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """Yield what must change no bit, and whether it does, or ""."""
    case = to_device(cupy, make_case("F01", parse("bfloat16"), *shape[::-1]), "plain")

    def bits(results: Any = None) -> list[bytes]:
        return [array.get().tobytes() for array in results or run(case).values()]

    def verdict(others: Iterable[list[bytes]]) -> str:
        return "" if all(other == expected for other in others) else f"other bits of {shape}"

    expected = bits()
    yield "50 runs", verdict(bits() for _ in range(50))
    read = driver.read_facts
    for facts in ({"multiprocessors": 1}, {"multiprocessors": 7}):
        with patch.object(driver, "read_facts", lambda device, f=facts: read(device)._replace(**f)):
            find_plan.cache_clear()
            yield f"on a device with {facts}", verdict(bits() for _ in range(2))
    find_plan.cache_clear()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    at_once = []
    for stream in streams * 5:
        with stream:
            at_once.append(run(case).values())
    cupy.cuda.Device().synchronize()
    yield "two streams at once", verdict(map(bits, at_once))
    results, replay = capture(cupy, case)
    for array in results:
        array[...] = 0
    replay()
    cupy.cuda.Device().synchronize()
    yield "a graph", verdict([bits(results)])


def capture(cupy: Any, case: Case, direction: str = "both") -> tuple[Any, Callable[[], Any]]:
    """Return y and the gradients, and the replay of a graph that writes them."""
    x, gamma, beta, eps, dy = case
    y, out = cupy.empty_like(x), tuple(map(cupy.empty_like, (x, gamma, beta)))
    stream = cupy.cuda.Stream(non_blocking=True)
    _, cache = layer_norm_forward(x, gamma, beta, eps, out=y)
    cupy.cuda.Device().synchronize()

    def step() -> Any:
        made = cache
        if direction != "backward":
            made = layer_norm_forward(x, gamma, beta, eps, out=y)[1]
        if direction != "forward":
            layer_norm_backward(dy, made, out=out)
        return made

    with stream:
        step()
        stream.begin_capture()
        made = step()
        graph = stream.end_capture()
    stream.synchronize()

    def replay() -> Any:
        # The arrays must outlive the graph.
        return graph.launch(), made, case

    return (y, *out), replay


def check_all() -> Any:
    """Return CuPy if all is right; else say what is not, and end."""
    try:
        cuda.check_usable()
    except (ImportError, RuntimeError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        sys.exit(2)
    cupy: Any = importlib.import_module("cupy")
    if "--few" in sys.argv:
        # Under compute-sanitizer.
        judged = check_problems(cupy, [Problem("F01", dtype, n, 33, "plain") for dtype, n in FEW])
    else:
        judged = check_problems(cupy, make_problems())
        judged += itertools.chain.from_iterable(check_bits(cupy, shape) for shape in MANY)
    failed = [f"FAILED {label}: {wrong}" for label, wrong in judged if wrong]
    print(*failed, f"{len(judged)} checks, {len(failed)} failed", sep="\n")
    if failed:
        sys.exit(1)
    return cupy


if __name__ == "__main__":
    check_all()
