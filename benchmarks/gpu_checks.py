"""
On a CUDA device: check every output of the kernels, against the exact oracle and bit by bit.

For all dtypes, layouts and special values; and between runs, grids, streams and graphs. `make gpu`
begins with it; alone, as under compute-sanitizer, it is `python benchmarks/gpu_checks.py`. Exit status
0 if all is right, 1 if a check failed, 2 if there is no CUDA device.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import ml_dtypes
import numpy as np

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
# Elements that the exact oracle judges in about two seconds.
MOST = 2**16
# Of the check of bits: a few chunks of rows for each of 132 multiprocessors.
MANY = 1037, 257

Arrays = dict[str, Any]


class Case(NamedTuple):
    """One problem of the sweep."""

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
    made: dict[str, Any] = {"x": x.astype(dtype), "dy": dy.astype(dtype)}
    if case.variant == "no gamma":
        return made | {"gamma": None, "beta": None}
    drawn = rng.standard_normal((2, case.n)).astype(of_gamma)
    return made | dict(zip(("gamma", "beta"), drawn, strict=True))


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


def run(arrays: Arrays) -> Arrays:
    """Return y and the gradients that there are."""
    x, gamma, beta, dy = (arrays[name] for name in ("x", "gamma", "beta", "dy"))
    y, cache = layer_norm_forward(x, gamma, beta)
    gradients = layer_norm_backward(dy, cache)._asdict()
    return {"y": y} | {name: array for name, array in gradients.items() if array is not None}


def check(cupy: Any, case: Case) -> str:
    """Return what is wrong with the results of a case, or ""."""
    arrays = draw(case)
    held = {name: to_device(cupy, array, case.variant) for name, array in arrays.items()}
    actual = {name: array.get() for name, array in run(held).items()}
    if case.variant == "a NaN row" and case.rows:
        if not np.isnan(actual["y"][-1].astype(np.float64)).all():
            return "a NaN leaves part of its row"
        # The others must be right without it; in the sums it is everywhere.
        arrays |= {name: arrays[name][:-1] for name in ("x", "dy")}
        actual = {name: actual[name][:-1] for name in ("y", "dx")}
    if not len(arrays["x"]):
        return "" if not any(a.any() for a in actual.values()) else "sums over no rows are not 0"
    return judge(arrays, actual)


def judge(arrays: Arrays, actual: Arrays) -> str:
    """Return what breaks the contract, or ""."""
    exact = exact_layer_norm(arrays["x"], arrays["gamma"], arrays["beta"], 1e-5, arrays["dy"])
    results = exact.check_contract(**actual)
    return "; ".join(f"{name}: {result}" for name, result in results.items() if not result.passed)


def check_bits(cupy: Any) -> Iterator[tuple[str, str]]:
    """Yield what must change no bit, and whether it does, or ""."""
    arrays = draw(Case(*MANY, "bfloat16", "plain"))
    held = {name: cupy.asarray(array) for name, array in arrays.items()}

    def bits(found: Any = None) -> list[bytes]:
        return [array.get().tobytes() for array in found or run(held).values()]

    def verdict(others: Iterable[list[bytes]]) -> str:
        return "" if all(other == expected for other in others) else "other bits"

    yield "many rows", judge(arrays, {name: array.get() for name, array in run(held).items()})
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
    results, replay = capture(cupy, held)
    for array in results:
        array[...] = 0
    replay()
    cupy.cuda.Device().synchronize()
    yield "a graph", verdict([bits(results)])


def capture(cupy: Any, held: Arrays, direction: str = "both") -> tuple[Any, Callable[[], Any]]:
    """Return y and the gradients, and the replay of a graph that writes them."""
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
        made = step()
        graph = stream.end_capture()
    stream.synchronize()

    def replay() -> Any:
        # What it holds must outlive the graph.
        return graph.launch(), work, made, held

    return (y, *out), replay


def check_all() -> Any:
    """Return CuPy if all is right; else say what is not, and end."""
    try:
        cuda.check_usable()
    except (ImportError, RuntimeError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        sys.exit(2)
    cupy: Any = importlib.import_module("cupy")
    found = [(" ".join(map(str, case)), check(cupy, case)) for case in make_cases()]
    found += check_bits(cupy)
    failed = [f"FAILED {label}: {wrong}" for label, wrong in found if wrong]
    print(*failed, f"{len(found)} checks, {len(failed)} failed", sep="\n")
    if failed:
        sys.exit(1)
    return cupy


if __name__ == "__main__":
    check_all()
