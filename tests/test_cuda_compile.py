"""layer_norm.cu through NVIDIA's compiler, without a GPU; and what is kept of it on disk."""

import re
import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from stablenorm.cuda import compile as compile_
from stablenorm.cuda.compile import OPTIONS, sources
from stablenorm.cuda.plan import choose_kernel

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with the extra `cuda`")
try:
    compile_._nvrtc()
except ImportError as error:
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
# Half a second to a second each. Per dtype of x and dy, pairs and architecture the lengths at the
# edges of the plan's table, where a thread holds most: a few lanes, warps, a block, columns in a loop.
BACKWARD = {
    ("float16", "float16", False, 90): (129,),
    ("bfloat16", "bfloat16", False, 90): (8, 4096, 4097),
    ("float32", "float32", False, 90): (96, 256, 2048, 4096, 4097),
    ("float64", "float64", True, 90): (64, 512, 1024, 1025),
    ("float32", "float32", False, 80): (4096,),
    ("float64", "float64", True, 80): (1024,),
    ("float32", "float32", False, 100): (2048,),
    ("float32", "float32", False, 120): (4096,),
    ("float64", "float64", True, 120): (512,),
    # In a loop, since dtypes are mixed.
    ("bfloat16", "bfloat16", True, 120): (129,),
    ("bfloat16", "float32", False, 90): (129,),
}
FORWARD = {
    ("bfloat16", "bfloat16", False, 90): (4096,),
    ("float32", "float32", False, 90): (4096, 4097),
    ("float64", "float64", True, 90): (1024,),
    ("float32", "float32", False, 80): (2048,),
    ("float32", "float32", False, 100): (2048,),
    ("float16", "float16", False, 120): (4096,),
}
CASES = [
    pytest.param(
        forward,
        *key,
        n,
        id="-".join(map(str, ("backward", "forward")[forward : forward + 1] + key + (n,))),
    )
    for forward, table in ((True, FORWARD), (False, BACKWARD))
    for key, lengths in table.items()
    for n in lengths
]


class Compiled(NamedTuple):
    """What the compiler says of one kernel."""

    registers: int
    spilled: int
    stack: int
    ptx: str


def compile_kernel(kernel, architecture, *, text=None, options=OPTIONS):
    (name, main), *headers = sources().items()
    _, program = nvrtc.nvrtcCreateProgram(
        main if text is None else text.encode(),
        name.encode(),
        len(headers),
        [header for _, header in headers],
        [header.encode() for header, _ in headers],
    )
    words = [
        f"--gpu-architecture=sm_{architecture}".encode(),
        b"--ptxas-options=-v",
        *(option.encode() for option in (*options, *kernel.defines)),
    ]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
    log = text_of(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    assert not failed, log
    assert "warning" not in log or options is not OPTIONS
    ptx = text_of(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    nvrtc.nvrtcDestroyProgram(program)
    stack, stores, loads = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    ).groups()
    registers = re.search(r"Used (\d+) registers", log)[1]
    return Compiled(int(registers), int(stores) + int(loads), int(stack), ptx)


def text_of(program, size_of, get):
    _, size = size_of(program)
    held = bytes(size)
    get(program, held)
    return held.decode().strip("\0")


# What no build may contain: flushed subnormals, approximate operations, sums that depend on who
# comes first.
FORBIDDEN = re.compile(r"\S*(?:\.ftz|\.approx|div\.full|\b(?:atom|red)\.\S*\.f(?:16|32|64))\S*")


@pytest.mark.parametrize(("forward", "x", "dy", "pairs", "architecture", "n"), CASES)
def test_registers_and_instructions(forward, x, dy, pairs, architecture, n):
    kernel = choose_kernel(forward, n, DTYPES[x], DTYPES[dy], pairs)
    compiled = compile_kernel(kernel, architecture)
    # Not one byte: quack's configuration table (version 0.6.5) records a factor of 9 where its
    # accumulators spill on Blackwell. An array in the stack frame is no better.
    assert (compiled.spilled, compiled.stack) == (0, 0)
    # As many blocks as the plan counts on must fit a multiprocessor.
    assert compiled.registers * kernel.block * kernel.least_blocks <= REGISTERS
    assert FORBIDDEN.findall(compiled.ptx) == []
    if not forward:
        # Through the cache that all multiprocessors share: a block may hold stale partial sums
        # in its own.
        assert re.search(r"ld\.global\.cg\S*", compiled.ptx)


# ---- the test can fail ----

SMALL = choose_kernel(True, 96, DTYPES["float32"], DTYPES["float32"], False), 120


def test_flushed_subnormals_are_found():
    compiled = compile_kernel(*SMALL, options=[*OPTIONS, "--ftz=true"])
    assert any(".ftz" in instruction for instruction in FORBIDDEN.findall(compiled.ptx))


def test_approximate_operations_and_float_atomics_are_found():
    text = """
    extern "C" __global__ void wrong(float* x) {
        atomicAdd(x, rsqrtf(x[threadIdx.x]));
        x[1] = __fdividef(x[2], x[3]);
    }
    """
    found = " ".join(FORBIDDEN.findall(compile_kernel(*SMALL, text=text).ptx))
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
    assert compile_kernel(*SMALL, text=text).spilled > 0


# ---- kept on disk ----

TOY = {"toy.cu": b'#include "toy.cuh"\nextern "C" __global__ void f(int* p) { *p = TOY_VALUE; }\n'}
HEADER = {"toy.cuh": b"#define TOY_VALUE LN_VALUE\n"}
DEFINES = ("-DLN_VALUE=3",)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Compile a toy into a folder of its own; a list grows by one each time it is compiled."""
    calls, real = [], compile_.compile_cubin

    def count(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setenv("STABLENORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_, "compile_cubin", count)
    monkeypatch.setattr(compile_, "sources", lambda: TOY | HEADER)
    return calls


def files(tmp_path):
    return sorted((tmp_path / "cache").iterdir())


def test_a_second_process_finds_what_the_first_one_compiled(made, tmp_path):
    code = compile_.cubin(DEFINES, (9, 0))
    # Machine code is an ELF file.
    assert code.startswith(b"\x7fELF")
    assert compile_.cubin(DEFINES, (9, 0)) == code
    assert len(made) == 1
    assert [path.suffix for path in files(tmp_path)] == [".cubin"]


def other_source(monkeypatch):
    monkeypatch.setattr(compile_, "sources", lambda: {"toy.cu": TOY["toy.cu"] + b"\n", **HEADER})


def other_header(monkeypatch):
    monkeypatch.setattr(compile_, "sources", lambda: TOY | {"toy.cuh": b"#define TOY_VALUE 4\n"})


def other_compiler(monkeypatch):
    monkeypatch.setattr(compile_, "nvrtc_version", lambda: (99, 1))


def other_options(monkeypatch):
    monkeypatch.setattr(compile_, "OPTIONS", (*compile_.OPTIONS, "--maxrregcount=64"))


@pytest.mark.parametrize("change", [other_source, other_header, other_compiler, other_options])
def test_whatever_decides_the_code_is_part_of_its_key(made, monkeypatch, change):
    compile_.cubin(DEFINES, (9, 0))
    change(monkeypatch)
    compile_.cubin(DEFINES, (9, 0))
    assert len(made) == 2


def test_definitions_and_devices_do_not_share_code(made):
    codes = {compile_.cubin(d, c) for d in (DEFINES, ("-DLN_VALUE=4",)) for c in ((8, 0), (12, 0))}
    assert len(codes) == len(made) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda held: held[:0],
        lambda held: held[:40],
        lambda held: held[:-1],
        lambda held: held[:100] + bytes([held[100] ^ 1]) + held[101:],
    ],
    ids=["empty", "cut short", "one byte short", "one bit"],
)
def test_a_damaged_file_is_compiled_anew_and_mended(made, tmp_path, damage):
    code = compile_.cubin(DEFINES, (9, 0))
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert compile_.cubin(DEFINES, (9, 0)) == code
    assert compile_.cubin(DEFINES, (9, 0)) == code
    assert len(made) == 2


def test_where_nothing_can_be_written_it_compiles_each_time(made, monkeypatch, tmp_path):
    # A file where the folder should be stops root as well.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STABLENORM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert compile_.cubin(DEFINES, (9, 0)) == compile_.cubin(DEFINES, (9, 0))
    assert len(made) == 2


def test_a_write_cut_short_leaves_nothing_behind(made, monkeypatch, tmp_path):
    def fail(*_):
        msg = "no space left on device"
        raise OSError(msg)

    with monkeypatch.context() as context:
        context.setattr(compile_.Path, "replace", fail)
        compile_.cubin(DEFINES, (9, 0))
    assert files(tmp_path) == []
    assert len(made) == 1


def test_the_folder_is_the_users_cache(monkeypatch):
    monkeypatch.delenv("STABLENORM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compile_.cache_folder() == compile_.Path("/somewhere/stablenorm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert compile_.cache_folder() == compile_.Path("/home/someone/.cache/stablenorm")


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("capability", "cure"),
    [
        ((5, 2), "install nvidia-cuda-nvrtc and cuda-bindings of CUDA"),
        ((99, 9), "pip install --up"),
    ],
)
def test_a_device_that_the_compiler_does_not_know_is_refused(capability, cure):
    known = (
        rf"must compile for compute capability {capability[0]}\.{capability[1]}, and does so for"
    )
    with pytest.raises(RuntimeError, match=f"{known}.*9.0.*{cure}"):
        compile_.cubin(DEFINES, capability)


@pytest.mark.usefixtures("made")
def test_a_source_that_is_refused_shows_what_the_compiler_said():
    with pytest.raises(RuntimeError, match=r"NVRTC did not compile.*\n.*LN_VALUE"):
        compile_.cubin((), (9, 0))


def test_without_the_compiler_the_install_line_is_named(monkeypatch):
    compile_._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r'NVRTC is needed.*pip install "stablenorm\[cuda\]"'):
        compile_.cubin(DEFINES, (9, 0))
