"""
Problems for the device, and whether ours solves them: the stage "correctness" of `make gpu`.

As a script (rows, n, dtype) it runs one forward and one backward and nothing else, on memory of
exactly the size needed: what the sanitizers and the profiler look at.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from gpu_cases import Case
from gpu_variants import late, through, with_facts

from stablenorm import cuda, layer_norm_backward, layer_norm_forward
from stablenorm.cli.bench_measure import type_of
from stablenorm.cuda import CudaWorkspace
from stablenorm.cuda.plan import FLOAT_PAIRS, arithmetic
from stablenorm.oracle import exact_layer_norm

# Elements that the exact oracle judges in a second; larger ones are compared with the reference.
_JUDGED = 2**15
_NAMES = ("y", "dx", "dgamma", "dbeta")

Arrays = dict[str, Any]
_finfo: Any = ml_dtypes.finfo


def make(case: Case) -> Arrays:
    """Draw the arrays of a case, on the host."""
    # Of its own, and the same in every process.
    rng = np.random.default_rng(zlib.crc32(case.label.encode()))
    dtype = type_of(case.dtype)
    shape = (case.rows, case.n)
    x, dy = (rng.standard_normal(shape) for _ in range(2))
    if case.variant == "mean 1e4":
        x += 1e4
    if case.variant == "subnormal":
        # float16 has no more than ten bits of them.
        x *= float(_finfo(dtype).smallest_normal)
    if case.variant == "a NaN row" and case.rows:
        x[case.rows // 2] = np.nan
    if case.variant == "an Inf" and case.rows:
        x[-1, case.n // 2] = np.inf
    narrow = np.dtype(np.float32) if case.variant == "gamma float32" else dtype
    gamma, beta = (rng.standard_normal(case.n).astype(narrow) for _ in range(2))
    nothing = case.variant == "no gamma"
    return {
        "x": x.astype(dtype),
        "gamma": None if nothing else gamma,
        "beta": None if nothing else beta,
        "dy": dy.astype(dtype),
    }


def upload(arrays: Arrays, variant: str) -> Arrays:
    """Copy them to the device, in the layout of the variant."""
    found: Arrays = {}
    for name, array in arrays.items():
        if array is None or array.ndim == 1 or variant not in ("one element later", "row stride"):
            found[name] = None if array is None else cupy.asarray(array)
        elif variant == "one element later":
            room = cupy.empty(array.size + 1, array.dtype)
            found[name] = room[1:].reshape(array.shape)
            found[name][...] = cupy.asarray(array)
        else:
            room = cupy.full((array.shape[0], array.shape[1] + 3), np.nan, array.dtype)
            found[name] = room[:, 1:-2]
            found[name][...] = cupy.asarray(array)
    return found


def pulled(arrays: Arrays, **options: Any) -> tuple[Any, ...]:
    """Return y, dx, dgamma and dbeta."""
    y, cache = layer_norm_forward(arrays["x"], arrays["gamma"], arrays["beta"], **options)
    return y, *layer_norm_backward(arrays["dy"], cache)


def check(case: Case) -> dict[str, Any]:
    """Run a case on the device into results filled with NaN; say whether all is as promised."""
    arrays = make(case)
    given = upload(arrays, case.variant)
    y: Any
    y, dx = (cupy.full(given["x"].shape, np.nan, given["x"].dtype) for _ in range(2))
    y, cache = layer_norm_forward(given["x"], given["gamma"], given["beta"], out=y)
    gradients: Any = layer_norm_backward(given["dy"], cache, out=(dx, None, None))
    actual = {
        name: None if array is None else array.get()
        for name, array in zip(_NAMES, (y, *gradients), strict=True)
    }
    wrong = judge(case, arrays, actual)
    return {"passed": not wrong, **({"wrong": wrong} if wrong else {})}


def judge(case: Case, arrays: Arrays, actual: Arrays) -> list[str]:
    """Return what breaks the contract, or differs from the reference where there is no contract."""
    finite = case.variant not in ("a NaN row", "an Inf")
    if finite and 0 < case.rows * case.n <= _JUDGED:
        exact = exact_layer_norm(arrays["x"], arrays["gamma"], arrays["beta"], 1e-5, arrays["dy"])
        found = exact.check_contract(**{k: v for k, v in actual.items() if v is not None})
        single = _single(case)
        return [
            f"{name}: {one.worst_ulp:.3f} ulp at {one.worst_index}"
            for name, one in found.items()
            # On devices without fast float64, float32 is promised to one ulp.
            if not (one.passed or (single and one.worst_ulp <= 1))
        ]
    expected = dict(zip(_NAMES, pulled(arrays, backend="numpy"), strict=True))
    return [name for name in _NAMES if not _alike(case, actual[name], expected[name])]


def _single(case: Case) -> bool:
    capability = cuda._driver().facts(cupy.cuda.Device().id).capability
    return case.dtype == "float32" and arithmetic(capability, np.float32(0)) == FLOAT_PAIRS


def _alike(case: Case, actual: Any, expected: Any) -> bool:
    if actual is None or expected is None:
        return actual is expected
    one, other = (a.astype(np.float64) for a in (actual, expected))
    # The reference rounds correctly but for sums in another order: one unit in the last place.
    step = float(_finfo(type_of(case.dtype)).eps)
    same = np.isclose(one, other, rtol=step, atol=step * _scale(other), equal_nan=True)
    return bool(same.all())


def _scale(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max(initial=0.0)) * 2.0**-20


def bits(arrays: Any) -> list[bytes]:
    """Return what the host sees of arrays on the device."""
    return [array.get().tobytes() for array in arrays if array is not None]


def _large() -> Arrays:
    return upload(make(Case(4097, 1001, "bfloat16", "plain")), "plain")


def _runs() -> dict[str, Any]:
    arrays = _large()
    expected = bits(pulled(arrays))
    return {"passed": all(bits(pulled(arrays)) == expected for _ in range(200))}


def _streams() -> dict[str, Any]:
    arrays = _large()
    expected = bits(pulled(arrays))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    found = []
    for turn in range(100):
        with streams[turn % 2]:
            found.append(pulled(arrays))
    cupy.cuda.Device().synchronize()
    return {"passed": all(bits(one) == expected for one in found)}


def _grids() -> dict[str, Any]:
    """As if the device had 1, 7 or all of its multiprocessors, with a barrier and with tickets."""
    arrays, driver = _large(), cuda._driver()
    expected, real = bits(pulled(arrays)), driver.facts
    passed = True
    whole = real(cupy.cuda.Device().id)
    for count in (1, 7, whole.multiprocessors):
        for cooperative in (False, whole.cooperative):
            few = whole._replace(multiprocessors=count, cooperative=cooperative)
            with through(with_facts(driver, few)):
                passed = passed and bits(pulled(arrays)) == expected
    return {"passed": passed}


def _clusters() -> dict[str, Any]:
    """As if the device had room for 1, 3 or any number of the clusters that share a row."""
    arrays, driver = upload(make(Case(200, 16_385, "bfloat16", "plain")), "plain"), cuda._driver()
    expected = bits(pulled(arrays))
    passed = all(bits(pulled(arrays)) == expected for _ in range(20))
    for count in (1, 3, None):
        with through(driver._replace(clusters=lambda *_, count=count: count)):
            passed = passed and bits(pulled(arrays)) == expected
    return {"passed": passed}


def _late() -> dict[str, Any]:
    """With blocks that arrive late where blocks meet: at a barrier, and with tickets."""
    arrays, driver = _large(), cuda._driver()
    expected, whole = bits(pulled(arrays)), driver.facts(cupy.cuda.Device().id)
    passed = True
    for cooperative in {False, whole.cooperative}:
        facts = whole._replace(cooperative=cooperative)
        with through(late(with_facts(driver, facts))):
            passed = passed and all(bits(pulled(arrays)) == expected for _ in range(20))
    return {"passed": passed}


def _graph() -> dict[str, Any]:
    arrays, work = _large(), CudaWorkspace()
    expected = bits(pulled(arrays))
    out = tuple(cupy.empty_like(arrays[name]) for name in ("x", "gamma", "beta"))
    y = cupy.empty_like(arrays["x"])

    def step() -> Any:
        _, cache = layer_norm_forward(arrays["x"], arrays["gamma"], arrays["beta"], out=y)
        layer_norm_backward(arrays["dy"], cache, out=out)
        return cache

    stream, passed = cupy.cuda.Stream(non_blocking=True), True
    cupy.cuda.Device().synchronize()
    with stream, work:
        step()
        stream.begin_capture()
        kept = step()
        graph = stream.end_capture()
        for _ in range(100):
            graph.launch()
            stream.synchronize()
            passed = passed and bits((y, *out)) == expected
    del kept
    return {"passed": passed}


def _layouts() -> dict[str, Any]:
    host = make(Case(4097, 1001, "bfloat16", "plain"))
    expected = bits(pulled(upload(host, "plain")))
    variants = ("one element later", "row stride")
    return {"passed": all(bits(pulled(upload(host, v))) == expected for v in variants)}


INVARIANCES: dict[str, Callable[[], dict[str, Any]]] = {
    "same bits in 200 runs": _runs,
    "same bits on two streams at once": _streams,
    "same bits on any grid": _grids,
    "same bits with any number of clusters": _clusters,
    "same bits with blocks that arrive late": _late,
    "same bits in 100 replays of a graph": _graph,
    "same bits in any layout": _layouts,
}


def main() -> None:
    """Run one problem, on memory without a pool, so that a sanitizer sees its bounds."""
    rows, n = map(int, sys.argv[1:3])
    dtypes = sys.argv[3:] or ["float16", "float32", "float64"]
    cupy.cuda.set_allocator(None)
    for dtype in dtypes:
        arrays = upload(make(Case(rows, n, dtype, "plain")), "plain")
        _, cache = layer_norm_forward(arrays["x"], arrays["gamma"], arrays["beta"])
        cupy.cuda.Device().synchronize()
        cupy.cuda.nvtx.RangePush("profiled")
        gradients: Any = layer_norm_backward(arrays["dy"], cache)
        cupy.cuda.Device().synchronize()
        cupy.cuda.nvtx.RangePop()
        if not all(np.isfinite(a.get().astype(np.float64)).all() for a in gradients):
            sys.exit(1)


if __name__ == "__main__":
    main()
