"""
The counts of the GPU kernel, held against a run of its own source on the host that counts.

The host shim counts operations that the kernel names and bytes that it loads and stores, tensor by
tensor. A rounding or a widening that one instruction of a GPU does, and the host does by hand, is
taken out first; so is the second xhat of an element, which any compiler shares with the first.
"""

from pathlib import Path

import layer_norm_host as host
import ml_dtypes
import numpy as np
import pytest

import stablenorm._complexity as job
from stablenorm.analysis.complexity import count_all

SHIM = Path(__file__).parent / "shim"

pytestmark = pytest.mark.skipif(bool(host.host_shim.why_not()), reason=host.host_shim.why_not())

# Not the kernel's: what the host does in the place of one conversion; and what compilers share.
_NOT_COUNTED = {
    "__fmul_rn(__uint_as_float(rest), 0x1p112f)": "__uint_as_float(rest) * 0x1p112f",
    "__fadd_rn(__uint_as_float(size), 0.5f)": "__uint_as_float(size) + 0.5f",
    "add_to_dgamma(dgamma[i * SUM_STRIDE], of.row, cotangent, element)": (
        "add_product(dgamma[i * SUM_STRIDE], cotangent, xhat)"
    ),
}
BLOCKS = 3


def _source():
    text = host.source()
    for there, instead in _NOT_COUNTED.items():
        assert text.count(there) == 1, there
        text = text.replace(there, instead)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory, worker_id):
    base = tmp_path_factory.getbasetemp()
    # Workers share what one of them has built.
    path = (base if worker_id == "master" else base.parent) / "shim"
    path.mkdir(exist_ok=True)
    return path


def _seen(record, inputs, outputs):
    done, traffic = record.operations, record.traffic
    workspace = traffic.get("partials", (0, 0))
    return {
        "single": done["add"] + done["mul"],
        "fused": done["fma"],
        "divisions": done["div"] + done["sqrt"],
        "read": sum(traffic[name][0] for name in inputs) + workspace[0],
        "written": sum(traffic[name][1] for name in outputs) + workspace[1],
    }


def _run(folder, shape, dtype, limit, cluster_limit=1):
    rng = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    x, dy = (rng.standard_normal(shape).astype(kind) for _ in range(2))
    gamma, beta = (rng.uniform(0.5, 1.5, shape[1]).astype(kind) for _ in range(2))
    setting = host.PLAIN._replace(resident=BLOCKS)
    options = {"text": _source(), "count": True, "cluster_limit": cluster_limit}
    forward = host.forward(folder, x, gamma, beta, 1e-5, setting, **options)
    kept = {name: forward.arrays[name] for name in host.STATISTICS[:3]}
    backward = host.backward(folder, dy, x, gamma, kept, setting, shared_limit=limit, **options)
    return {
        "forward": _seen(forward.records[0], ("x", "gamma", "beta"), ("out", *kept)),
        "backward": _seen(
            backward.records[0], ("x", "dy", "gamma", *kept), ("out", "dgamma", "dbeta")
        ),
    }


def _counted(shape, dtype, direction, limit, cluster_limit=1):
    launch = job.launch_gpu(
        direction, shape, dtype, shared_limit=limit, blocks=BLOCKS, cluster_limit=cluster_limit
    )
    cost = count_all("fused GPU", direction, shape, dtype, launch=launch)
    return {
        name: getattr(cost, name) for name in ("single", "fused", "divisions", "read", "written")
    }


# Rows of a lane, of some lanes, of a warp, of a block in one vector and in more, too long for
# registers; one chunk, some of them in one segment, and many in eight.
CASES = [
    ("float32", (3, 4)),
    ("float16", (300, 5)),
    ("float32", (4200, 5)),
    ("bfloat16", (70, 300)),
    ("float32", (37, 1031)),
    ("bfloat16", (5, 7000)),
    ("float16", (50, 4000)),
    ("float32", (37, 5000)),
]
DEFAULT, ASKED = 48 << 10, 227 << 10


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_counts_of_the_gpu_kernel_are_those_of_a_run(folder, dtype, shape):
    seen = _run(folder, shape, dtype, DEFAULT)
    for direction, found in seen.items():
        assert _counted(shape, dtype, direction, DEFAULT) == found, direction


def test_counts_with_sums_in_shared_memory_are_those_of_a_run(folder):
    shape, dtype = (37, 5000), "float32"
    assert _counted(shape, dtype, "backward", ASKED) != _counted(shape, dtype, "backward", DEFAULT)
    found = _run(folder, shape, dtype, ASKED)["backward"]
    assert _counted(shape, dtype, "backward", ASKED) == found


# One chunk; chunks in one segment; in eight, whose sums the last blocks write and read again.
@pytest.mark.parametrize("shape", [(3, 9000), (20, 9001), (150, 9000)])
def test_counts_of_clusters_are_those_of_a_run(folder, shape):
    seen = _run(folder, shape, "float32", DEFAULT, 8)
    for direction, found in seen.items():
        assert _counted(shape, "float32", direction, DEFAULT, 8) == found, direction
        assert _counted(shape, "float32", direction, DEFAULT) != found, direction


def test_memory_moves_what_no_kernel_can_do_without():
    rows, n = shape = (4096, 1024)
    for direction, arrays in (("forward", 2), ("backward", 3)):
        launch = job.launch_gpu(direction, shape, "float16")
        cost = count_all("fused GPU", direction, shape, "float16", launch=launch)
        parameters = 2 * n * 2 if direction == "forward" else 3 * n * 2
        assert cost.memory == arrays * rows * n * 2 + 24 * rows + parameters


def test_float64_and_an_unknown_launch_are_not_counted():
    launch = job.launch_gpu("forward", (3, 4), "float64")
    assert count_all("fused GPU", "forward", (3, 4), "float64", launch=launch) is None
    assert count_all("fused GPU", "forward", (3, 4), "float32") is None
