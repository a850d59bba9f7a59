"""
`layer_norm.cu` compiled by NVRTC to machine code of one device, and kept on disk.

Machine code, not PTX, so that no driver has to know the compiler's PTX version; and never through
CuPy, whose compiler options end with ``-ftz=true``, which flushes subnormals (cupy issue 9576).
No GPU and no driver is needed to compile.
"""

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The compiler may change no operation. These are its defaults but for the contraction to fma; for functions
# without an annotation, lambdas among them, which NVRTC 13.0 takes for the host's; and for the warning that a
# configuration needs not every constant.
OPTIONS = (
    "--std=c++17", "--ftz=false", "--fmad=false", "--prec-div=true", "--prec-sqrt=true",
    "--device-as-default-execution-space", "--diag-suppress=177",
)  # fmt: skip

_FOLDER = Path(__file__).parent


@functools.cache
def source(name: str = "layer_norm.cu") -> str:
    """Return the text of layer_norm.cu, each header in the place of the line that includes it."""
    text = (_FOLDER / name).read_text()
    return re.sub('#include "(.*)"', lambda found: source(found[1]), text)


def cubin(defines: Sequence[str], capability: tuple[int, int]) -> bytes:
    """Return the machine code for these definitions: from disk, or compiled and then kept there."""
    version = nvrtc_version()
    options = (f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *OPTIONS, *defines)
    # All that decides the machine code.
    key = hashlib.sha256(repr((version, options, source())).encode()).hexdigest()
    # Without a home, expanduser leaves "~": nothing can be written there, nothing is.
    user = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    path = Path(os.environ.get("STABLENORM_CACHE_DIR") or Path(user, "stablenorm"), f"{key}.cubin")
    with contextlib.suppress(OSError):
        return path.read_bytes()
    known = _checked(_nvrtc().nvrtcGetSupportedArchs())
    if 10 * capability[0] + capability[1] not in known:
        msg = (
            f"NVRTC {version[0]}.{version[1]} must compile for compute capability {capability[0]}."
            f"{capability[1]}, and does so for {', '.join(f'{one / 10:.1f}' for one in known)}; "
            "install nvidia-cuda-nvrtc and cuda-bindings that do, older or newer, or pass NumPy arrays"
        )
        raise RuntimeError(msg)
    code = compiled(source(), options)["CUBIN"]
    # A folder that cannot be written is no error.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: other processes may be reading, or writing the same.
        made = path.with_suffix(f".{os.getpid()}")
        made.write_bytes(code)
        made.replace(path)
    return code


def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC, which is that of the CUDA toolkit it comes from."""
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return major, minor


def compiled(text: str, options: Sequence[str]) -> dict[str, bytes]:
    """Compile a text; return the log, the machine code and its PTX by NVRTC's names of them."""
    nvrtc, words = _nvrtc(), [option.encode() for option in options]
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"layer_norm.cu", 0, [], []))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(words), words)[0]
        results = {}
        for name in ("ProgramLog",) if failed else ("ProgramLog", "CUBIN", "PTX"):
            results[name] = bytes(_checked(getattr(nvrtc, f"nvrtcGet{name}Size")(program)))
            _checked(getattr(nvrtc, f"nvrtcGet{name}")(program, results[name]))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if failed:
        # A mistake of ours, so all that was said is passed on.
        said = results["ProgramLog"].decode(errors="replace").strip("\0\n")
        msg = f"NVRTC did not compile layer_norm.cu with {' '.join(options)}:\n{said}"
        raise RuntimeError(msg)
    return results


def not_loaded(error: Exception, name: str) -> ImportError:
    """Return the error to raise where a library of the extra `cuda` cannot be imported."""
    return ImportError(
        f'{name} is needed for backend="cuda" and cannot be loaded ({first_line(error)}): '
        'pip install "stablenorm[cuda]"'
    )


def first_line(error: Exception) -> str:
    """Return the kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415  # only where there is CUDA

        # The library itself is loaded by the first call.
        nvrtc.nvrtcVersion()
    except Exception as error:
        # ImportError, or what its loader raises where a library is missing.
        raise not_loaded(error, "NVRTC") from error
    return nvrtc


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call of NVRTC gave beside its status."""
    status, *values = result
    if status:
        msg = f"NVRTC failed: {status.name}; pip install --upgrade nvidia-cuda-nvrtc cuda-bindings"
        raise RuntimeError(msg)
    return values[0] if len(values) == 1 else values
