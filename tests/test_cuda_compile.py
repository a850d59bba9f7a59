"""layer_norm.cu through NVIDIA's compiler, without a GPU; and what is kept of it on disk."""

import ctypes
import io
import os
import re
import sys
from pathlib import Path

import pytest

from stablenorm.cuda import compile as compile_
from stablenorm.cuda.plan import choose_kernel
from stablenorm.formats import FORMATS

# Another NVRTC than the installed one, such as the oldest that pyproject.toml allows: the folder of its
# libraries. The one that is loaded first serves the whole process.
if folder := os.environ.get("STABLENORM_TEST_NVRTC"):
    for library in ("libnvrtc-builtins.so.13*", "libnvrtc.so.13"):
        ctypes.CDLL(str(next(Path(folder).glob(library))))
try:
    compile_.compiler()
except ImportError as error:
    pytest.skip(f"NVRTC comes with the extra `cuda`: {error}", allow_module_level=True)
from cuda.bindings import nvrtc

F16, BF16, F32, F64 = (form.dtype for form in FORMATS)
# Registers of a multiprocessor, of every architecture compiled for here (CUDA programming guide,
# table of technical specifications).
REGISTERS = 65536
# Half a second each: per direction (True: a forward), dtype and architecture the lengths at the edges of
# the plan's table, where a thread holds most: lanes, a warp, warps of three kinds, columns in a loop.
EDGES = {
    (False, BF16, 90): (8, 64, 768, 776, 2048, 4095, 4096, 4097, 8192),
    (False, F32, 90): (64, 384, 385, 768, 1023, 3000, 4095, 4096, 4097),
    (False, F64, 90): (64, 1025),
    (False, F32, 80): (384, 4096, 8192),
    (False, F16, 80): (3072, 3833),
    (False, F16, 100): (768, 4096, 16_384),
    (False, F32, 100): (4096, 8192),
    (False, F32, 120): (384, 4095, 4096, 16_384),
    (False, F64, 120): (512,),
    (True, F32, 90): (64, 4095, 4096, 16_384, 16_385),
    (True, BF16, 90): (768, 4096, 16_384),
    (True, BF16, 80): (4096,),
    (True, F32, 100): (4096,),
    (True, F64, 90): (1024,),
}
CASES = [
    pytest.param(n, forward, x, architecture, id=f"{x}-{forward}-{architecture}-{n}")
    for (forward, x, architecture), lengths in EDGES.items()
    for n in lengths
]
SHARED = {80: 163 << 10, 120: 99 << 10}

# Forbidden in every build: flushed subnormals, approximate operations, sums that depend on who
# comes first.
FORBIDDEN = re.compile(r"\S*(?:\.ftz|\.approx|div\.full|\b(?:atom|red)\.\S*\.f(?:16|32|64))\S*")


@pytest.mark.parametrize(("n", "forward", "x", "architecture"), CASES)
def test_registers_and_instructions(n, forward, x, architecture):
    shared = SHARED.get(architecture, 227 << 10)
    kernel = choose_kernel(n, forward, x, x, x, shared, n * x.itemsize % 16 == 0)
    program = compile_.program(kernel.defines, f"sm_{architecture}", ptxas_options="-v")
    program.compile("cubin", logs=(said := io.StringIO()))
    log, ptx = said.getvalue(), bytearray(nvrtc.nvrtcGetPTXSize(program.handle)[1])
    nvrtc.nvrtcGetPTX(program.handle, ptx)
    ptx = ptx.decode()
    assert "warning" not in log
    # No byte may spill: quack's table (0.6.5) records a factor of 9. A stack frame is no better.
    assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", log)
    # The blocks that the plan counts on must fit a multiprocessor.
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    assert registers * kernel.threads * kernel.least_blocks <= REGISTERS
    assert FORBIDDEN.findall(ptx) == []
    # 16 bytes at a time, where rows are aligned.
    assert n % 8 or re.search(r"ld\.global\S*\.v[248]|cp\.async\.(cg|bulk)", ptx)
    # Through the cache that all multiprocessors share: a block may hold stale partial sums in its own.
    assert forward or re.search(r"ld\.global\.cg\S*", ptx)


# ---- kept on disk ----

TOY = 'extern "C" __global__ void f(int* p) { *p = LN_VALUE; }'
DEFINES = ("LN_VALUE=3",)


def test_a_second_process_finds_what_the_first_one_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_, "source", lambda: TOY)
    code = compile_.cubin(DEFINES, "90")
    # Machine code is an ELF file.
    assert code.startswith(b"\x7fELF")
    (cached,) = (path for path in tmp_path.rglob("*") if path.is_file())
    cached.write_bytes(b"as it is on disk")
    assert compile_.cubin(DEFINES, "90") == b"as it is on disk"
    # A folder that cannot be written.
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert compile_.cubin(DEFINES, "90") == code


def test_an_architecture_that_the_compiler_does_not_know_is_named():
    with pytest.raises(RuntimeError, match=r"(?s)compute capability 99.0, got .*; install nvidia"):
        compile_.cubin(DEFINES, "990")


def test_without_the_compiler_the_install_line_is_named(monkeypatch):
    compile_.compiler.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match=r'NVRTC is needed.*pip install "stablenorm\[cuda\]"'):
        compile_.cubin(DEFINES, "90")
