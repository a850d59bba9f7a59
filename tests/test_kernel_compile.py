"""layer_norm.cu through NVIDIA's compiler, without a GPU: registers, spills, instructions."""

import re
import shutil
import subprocess
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from stablenorm.cuda import plan as _cuda_plan
from stablenorm.cuda.compile import OPTIONS, sources

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with the extra `cuda`")
try:
    nvrtc.nvrtcVersion()
except Exception as error:  # noqa: BLE001  # its loader raises what it likes
    pytest.skip(f"NVRTC cannot be loaded: {error}", allow_module_level=True)

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# Registers of a multiprocessor, of every architecture compiled for here (CUDA programming guide,
# table of technical specifications).
REGISTERS = 65536
# KiB of shared memory that a block may ask for (the same table), by architecture.
SHARED = {80: 163, 90: 227, 100: 227, 120: 99}
# Half a second to a second each. Per dtype the lengths at the edges of the plan's table, where a
# thread holds most: a few lanes or a warp with all their vectors, a block, one whose sums are in
# shared memory (5001 and 8192; on sm_120 4500), a cluster of such blocks (to 65536; on sm_120 8192
# in registers again; float64 to 16384), columns in a loop (65537; on sm_80 from 8193 on).
# float64 where it is fast, sm_80, 90 and 100; pairs of float32 on sm_120.
BACKWARD = {
    ("float16", 0, 90): (512,),
    ("bfloat16", 0, 90): (8, 512, 4096, 8192, 65536),
    ("float32", 0, 90): (96, 256, 2048, 5001, 65536, 65537),
    ("float64", 1, 90): (96, 512, 2048, 16384),
    ("bfloat16", 2, 120): (4096,),
    ("float32", 2, 120): (256, 4500, 8192, 65536),
    ("float32", 0, 80): (8192, 65536),
    ("float32", 0, 100): (256, 8193),
    ("float64", 1, 80): (512,),
    ("bfloat16", 0, 100): (4096,),
    ("float64", 1, 120): (512,),
    # In a loop, since its gamma or dy would be float64.
    ("bfloat16", 1, 120): (129,),
}
FORWARD = {
    ("bfloat16", 0, 90): (512, 65537),
    ("float32", 0, 90): (65536,),
    ("float64", 1, 90): (512, 32768),
    ("float16", 2, 120): (4096,),
    ("float32", 2, 120): (16384,),
    ("float32", 0, 80): (2048,),
    ("float32", 0, 100): (2048,),
}


class Case(NamedTuple):
    """One compilation."""

    direction: str
    dtype: str
    which: int
    n: int
    architecture: int

    def plan(self):
        dtype, rows = DTYPES[self.dtype], 4096
        limits = {
            "shared_limit": SHARED[self.architecture] << 10,
            "cluster_limit": _cuda_plan.largest_cluster(divmod(self.architecture, 10)),
        }
        if self.direction == "forward":
            return _cuda_plan.plan_forward(rows, self.n, dtype, self.which, **limits)
        return _cuda_plan.plan_backward(rows, self.n, dtype, dtype, self.which, **limits)


def parameter(case):
    return pytest.param(case, id="-".join(map(str, case)))


CASES = [
    parameter(Case(direction, dtype, which, n, architecture))
    for direction, table in (("forward", FORWARD), ("backward", BACKWARD))
    for (dtype, which, architecture), lengths in table.items()
    for n in lengths
]


class Compiled(NamedTuple):
    """What the compiler says of one kernel."""

    registers: int
    spilled: int
    stack: int
    ptx: str


def compile_kernel(case, *, text=None, options=OPTIONS):
    (name, main), *headers = sources().items()
    main = main if text is None else text.encode()
    _, program = nvrtc.nvrtcCreateProgram(
        main,
        name.encode(),
        len(headers),
        [header for _, header in headers],
        [header.encode() for header, _ in headers],
    )
    words = [
        f"--gpu-architecture=sm_{case.architecture}".encode(),
        b"--ptxas-options=-v",
        *(option.encode() for option in (*options, *case.plan().defines)),
    ]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
    log = text_of(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    assert not failed, f"{case}: {log}"
    ptx = text_of(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    nvrtc.nvrtcDestroyProgram(program)
    return parse(log, ptx)


def text_of(program, size_of, get):
    _, size = size_of(program)
    held = bytes(size)
    get(program, held)
    return held.decode().strip("\0")


def parse(log, ptx):
    stack, stores, loads = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    ).groups()
    registers = re.search(r"Used (\d+) registers", log)[1]
    return Compiled(int(registers), int(stores) + int(loads), int(stack), ptx)


# What no build may contain: flushed subnormals, approximate operations, sums that depend on who
# comes first.
FORBIDDEN = re.compile(r"\S*(?:\.ftz|\.approx|div\.full|\b(?:atom|red)\.\S*\.f(?:16|32|64))\S*")


@pytest.mark.parametrize("case", CASES)
def test_registers_and_instructions(case):
    compiled, plan = compile_kernel(case), case.plan()
    # Not one byte: quack's configuration table (version 0.6.5) records a factor of 9 where its
    # accumulators spill on Blackwell. An array in the stack frame is no better.
    assert (compiled.spilled, compiled.stack) == (0, 0)
    # As many blocks as the plan counts on must fit a multiprocessor.
    least_blocks = int(dict(define.split("=") for define in plan.defines)["-DLN_LEAST_BLOCKS"])
    assert compiled.registers * plan.block * least_blocks <= REGISTERS
    assert plan.shared_bytes <= SHARED[case.architecture] << 10
    assert FORBIDDEN.findall(compiled.ptx) == []
    # Stores into another block's shared memory, and the barrier that orders them; nothing of it
    # where blocks know no others.
    words = ("mapa.shared::cluster", "st.shared::cluster", "barrier.cluster.arrive.release",
             "barrier.cluster.wait.acquire", ".explicitcluster")  # fmt: skip
    assert [word in compiled.ptx for word in words] == [plan.cluster > 1] * len(words)
    if case.direction == "backward":
        # Through the cache that all multiprocessors share: a block may hold stale partial sums
        # in its own.
        assert re.search(r"ld\.global\.cg\S*", compiled.ptx)


def test_the_table_has_clusters_and_what_has_none():
    sizes = {(case.values[0].architecture, case.values[0].plan().cluster) for case in CASES}
    assert sizes == {(80, 1), (90, 1), (90, 8), (100, 1), (100, 2), (120, 1), (120, 2)}


# ---- the test can fail ----

SMALL = Case("forward", "float32", 2, 96, 120)


def test_flushed_subnormals_are_found():
    compiled = compile_kernel(SMALL, options=[*OPTIONS, "--ftz=true"])
    assert any(".ftz" in instruction for instruction in FORBIDDEN.findall(compiled.ptx))


def test_approximate_operations_and_float_atomics_are_found():
    text = """
    extern "C" __global__ void wrong(float* x) {
        atomicAdd(x, rsqrtf(x[threadIdx.x]));
        x[1] = __fdividef(x[2], x[3]);
    }
    """
    found = " ".join(FORBIDDEN.findall(compile_kernel(SMALL, text=text).ptx))
    assert "rsqrt.approx" in found
    assert "div.approx" in found
    assert re.search(r"(atom|red)\.\S*f32", found)


def test_spills_are_found():
    # 96 numbers alive at once, where 64 registers of 32 bits are allowed.
    text = """
    extern "C" __global__ void __launch_bounds__(1024, 1) wide(double* x) {
        double held[96];
        #pragma unroll
        for (int i = 0; i < 96; ++i) held[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 96; ++i) x[(95 - i) * 1024 + threadIdx.x] = held[i];
    }
    """
    assert compile_kernel(SMALL, text=text).spilled > 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc comes with the CUDA toolkit")
def test_nvcc_agrees(tmp_path):
    case = Case("backward", "float32", 0, 2048, 90)
    plan = case.plan()
    path = tmp_path / "layer_norm.cu"
    for name, content in sources().items():
        (tmp_path / name).write_bytes(content)
    options = [option for option in OPTIONS if option != "--std=c++17"]
    process = subprocess.run(
        [
            "nvcc",
            "-std=c++17",
            "-arch=sm_90",
            "-cubin",
            "-Xptxas=-v",
            *options,
            *plan.defines,
            path,
            "-o",
            tmp_path / "layer_norm.cubin",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "warning" not in process.stderr
    compiled = parse(process.stderr, "")
    assert (compiled.spilled, compiled.stack) == (0, 0)
    assert compiled.registers * plan.block <= REGISTERS
