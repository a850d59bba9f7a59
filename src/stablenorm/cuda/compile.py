"""
`layer_norm.cu` compiled by NVRTC to machine code of one device, which cuda.core keeps on disk.

Machine code, not PTX, so that no driver has to know the compiler's PTX version; and never through
CuPy, whose compiler options end with ``-ftz=true``, which flushes subnormals (cupy issue 9576).
No GPU and no driver is needed to compile.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# The compiler may change no operation. These are its defaults but for the contraction to fma; for functions
# without an annotation, lambdas among them, which NVRTC 13.0 takes for the host's; and for the warning that a
# configuration needs not every constant.
OPTIONS: dict[str, Any] = {
    "name": "layer_norm.cu", "std": "c++17", "ftz": False, "fma": False, "prec_div": True, "prec_sqrt": True,
    "device_as_default_execution_space": True, "diag_suppress": 177,
}  # fmt: skip

_FOLDER = Path(__file__).parent


@functools.cache
def source(name: str = "layer_norm.cu") -> str:
    """Return the text of layer_norm.cu, each header in the place of the line that includes it."""
    text = (_FOLDER / name).read_text()
    return re.sub('#include "(.*)"', lambda line: source(line[1]), text)


def cubin(defines: Sequence[str], capability: str) -> bytes:
    """Return the machine code for these definitions: from disk, or compiled and then kept there."""
    core, version = compiler()
    try:
        made = program(defines, f"sm_{capability}")
        # A folder that cannot be written is no error, nor is a user without one.
        with contextlib.suppress(OSError, RuntimeError):
            return bytes(made.compile("cubin", cache=core.utils.FileStreamProgramCache()).code)
        return bytes(made.compile("cubin").code)
    except Exception as error:
        said = str(error).strip("\0\n ")
        msg = (
            f"NVRTC {version[0]}.{version[1]} must compile layer_norm.cu for compute capability "
            f"{int(capability) / 10}, got {said}; install nvidia-cuda-nvrtc and "
            "cuda-bindings that do, older or newer, or pass NumPy arrays"
        )
        raise RuntimeError(msg) from error


def program(defines: Sequence[str], arch: str, **options: Any) -> Any:
    """Return layer_norm.cu with these definitions as a program for cuda.core to compile."""
    core, _ = compiler()
    asked = core.ProgramOptions(arch=arch, define_macro=list(defines), **OPTIONS, **options)
    return core.Program(source(), "c++", asked)


@functools.cache
def compiler() -> tuple[Any, tuple[int, ...]]:
    """Return cuda.core, and the version of NVRTC, which is that of the CUDA toolkit it comes from."""
    with needed("NVRTC"):
        import cuda.core.utils  # noqa: PLC0415  # only where there is CUDA
        from cuda.bindings import nvrtc  # noqa: PLC0415

        # The library itself is loaded by this call.
        _, *version = nvrtc.nvrtcVersion()
    return cuda.core, tuple(version)


@contextlib.contextmanager
def needed(name: str) -> Iterator[None]:
    """Raise ImportError with the cure where a library of the extra `cuda` cannot be loaded."""
    try:
        yield
    except Exception as error:
        # ImportError, or what loaders raise where a library of CUDA's is missing.
        msg = (
            f'{name} is needed for backend="cuda" and cannot be loaded ({first_line(error)}): '
            'pip install "stablenorm[cuda]"'
        )
        raise ImportError(msg) from error


def first_line(error: Exception) -> str:
    """Return the kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
