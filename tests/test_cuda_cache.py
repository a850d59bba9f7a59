"""Machine code on disk: found again, made anew when anything that decides it changes or is damaged."""

import sys

import pytest

from stablenorm.cuda import compile as compile_

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
try:
    compile_._nvrtc()
except ImportError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

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


def test_subnormals_are_never_flushed_and_no_fast_math_is_asked_for():
    """CuPy appends -ftz=true to what it compiles (cupy 9576), so nothing of ours goes through it."""
    assert not [o for o in compile_.OPTIONS if "fast" in o or o.endswith("ftz=true")]
    subnormal = b'extern "C" __global__ void f(float* p) { p[0] = __fmul_rn(p[0], 0.5f); }'
    options = ("--gpu-architecture=compute_90", *compile_.OPTIONS)
    assert ".ftz" not in ptx(subnormal, options)
    # As CuPy would have it: the check can fail.
    assert ".ftz" in ptx(subnormal, (*options, "-ftz=true"))


def ptx(source, options):
    nvrtc = compile_._nvrtc()
    program = compile_._checked(nvrtc.nvrtcCreateProgram(source, b"f.cu", 0, [], []))
    words = [option.encode() for option in options]
    compile_._checked(nvrtc.nvrtcCompileProgram(program, len(words), words))
    text = bytes(compile_._checked(nvrtc.nvrtcGetPTXSize(program)))
    compile_._checked(nvrtc.nvrtcGetPTX(program, text))
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()
