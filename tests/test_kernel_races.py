"""layer_norm.cu on threads under ThreadSanitizer: clean, and not without its fences and barriers."""

import layer_norm_host as host
import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cuda import plan as _cuda_plan
from stablenorm.cuda.plan import DTYPE_CODES, GRID_BARRIER, TICKETS

host_shim = host.host_shim
pytestmark = pytest.mark.skipif(
    bool(host_shim.why_not_threads()), reason=host_shim.why_not_threads()
)
FLOAT32 = np.dtype(np.float32)
# Three chunks each: a block for each, so that partial sums pass from block to block, or a cluster of
# two. Rows of a warp, in registers; rows that are read in a loop, one a turn; rows of two blocks.
WARP, LOOPED, SHARED = (40, 129), (33, 1100), (33, 1000)
GRID = 3


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Two warps a block: every thread is one of the operating system's."""
    for name in ("_BLOCK", "_LONGEST_BLOCK", "_WIDE_LANE_BLOCK"):
        monkeypatch.setattr(_cuda_plan, name, 64)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, worker_id):
    """Where kernels are kept: one folder for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / "kernels"
    path.mkdir(exist_ok=True)
    return path


def run_backward(folder, shape, mode, *, text=None, fault=0):
    """Return the gradients expected, the memory after two launches, and the report."""
    rng = np.random.default_rng(5)
    x, dy = rng.standard_normal((2, *shape)).astype(FLOAT32)
    gamma = rng.standard_normal(shape[1]).astype(FLOAT32)
    _, cache = layer_norm_forward(x, gamma, gamma, backend="numpy")
    limits = {"shared_limit": 8 << 10, "cluster_limit": 2} if shape is SHARED else {}
    plan = _cuda_plan.plan_backward(*shape, FLOAT32, FLOAT32, _cuda_plan.DOUBLE, **limits)
    looped = "-DLN_VECTORS=0" in plan.defines
    assert (plan.chunks, plan.block, plan.cluster) == (GRID, 64, 1 + (shape is SHARED))
    assert looped == (shape is LOOPED)
    if mode == GRID_BARRIER:
        # What is summed here is so little that the plan would leave it to one block.
        plan = plan._replace(segments=GRID, workspace_bytes=plan.workspace_bytes * 2)
    arrays = {
        "x": x,
        "dy": dy,
        "gamma": gamma,
        "mean": cache.statistics.mean,
        "mean_lo": cache.statistics.mean_lo,
        "rstd": cache.statistics.rstd,
        "out": np.zeros_like(x),
        "dgamma": np.zeros_like(gamma),
        "dbeta": np.zeros_like(gamma),
        "partials": np.zeros(plan.workspace_bytes, np.uint8),
        "counters": np.zeros(_cuda_plan.COUNTERS, np.uint32),
    }
    names = list(_cuda_plan.PARAMETER_NAMES)
    values = {f"{name}_stride": shape[1] for name in ("x", "dy", "out")}
    params = _cuda_plan.pack_parameters(
        plan,
        *shape,
        **values,
        gamma_type=DTYPE_CODES[FLOAT32],
        beta_type=DTYPE_CODES[FLOAT32],
        final_mode=mode,
        unused=fault,
    )
    # The bytes of the partial sums come first in the workspace, those of the segments follow.
    behind = int.from_bytes(params[8 * names.index("segment_sums") :][:8], "little")
    pointers = [(8 * names.index(name), name, 0) for name in arrays]
    pointers.append((8 * names.index("segment_sums"), "partials", behind))
    source = host.source() if text is None else text
    program = host_shim.build_threads(
        source,
        folder,
        entries=[plan.entry],
        defines=[define.removeprefix("-D") for define in plan.defines],
    )
    launched = plan.entry, GRID * plan.cluster, plan.block, plan.shared_bytes
    job = host_shim.Job(*launched, params, arrays, pointers, launches=2, cluster=plan.cluster)
    memory, report = host_shim.launch_threads(program, job)
    return layer_norm_backward(dy, cache), memory, report


# How blocks meet does not depend on how their rows were read: once for those read in a loop.
@pytest.mark.parametrize(
    ("shape", "mode"),
    [(WARP, TICKETS), (WARP, GRID_BARRIER), (LOOPED, TICKETS), (SHARED, TICKETS)],
    ids=["warp-tickets", "warp-barrier", "looped-tickets", "shared-tickets"],
)
def test_clean(shape, mode, folder):
    expected, memory, report = run_backward(folder, shape, mode)
    assert report == ""
    for name, array in expected._asdict().items():
        actual = memory["out" if name == "dx" else name]
        assert actual.tobytes() == array.tobytes(), name


# What orders nothing once it is left out, and where that shows.
FAULTS = {
    "the fence of a release": (
        "#define LN_RELEASE_FENCE() __threadfence()",
        "#define LN_RELEASE_FENCE() (FAULT ? (void)0 : __threadfence())",
    ),
    "the fence of an acquire": (
        "#define LN_ACQUIRE_FENCE() __threadfence()",
        "#define LN_ACQUIRE_FENCE() (FAULT ? (void)0 : __threadfence())",
    ),
    "the barrier before the slots are read": (
        """sums of all slots before they are read.
    __syncthreads();""",
        """sums of all slots before they are read.
    if (!FAULT) __syncthreads();""",
    ),
    "the barrier before they are written again": (
        """reads before the next sums are written.
    __syncthreads();""",
        """reads before the next sums are written.
    if (!FAULT) __syncthreads();""",
    ),
    "the barrier of the blocks that share a row": (
        "    }\n    cluster_barrier();\n}",
        "    }\n    if (!FAULT) cluster_barrier();\n}",
    ),
}


@pytest.mark.parametrize(
    ("fault", "mode"),
    [(fault, TICKETS) for fault in FAULTS] + [(fault, GRID_BARRIER) for fault in list(FAULTS)[:2]],
)
def test_what_is_taken_out_is_a_race(fault, mode, folder):
    text, number = host.with_faults(FAULTS), 1 + list(FAULTS).index(fault)
    shape = SHARED if "share" in fault else WARP
    _, _, report = run_backward(folder, shape, mode, text=text, fault=number)
    assert "data race" in report
