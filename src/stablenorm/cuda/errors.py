"""What can be wrong with a CUDA device, its driver or its compiler: one line each, with the cure."""

from __future__ import annotations

from collections.abc import Sequence

_INSTALL = 'pip install "stablenorm[cuda]"'

# CUDA's names of errors after which its context is lost: every later call of the process fails.
_LOST = (
    "ILLEGALADDRESS", "LAUNCHFAILURE", "LAUNCHFAILED", "LAUNCHTIMEOUT", "ECCUNCORRECTABLE",
    "MISALIGNEDADDRESS", "ILLEGALINSTRUCTION", "HARDWARESTACKERROR", "INVALIDADDRESSSPACE",
    "INVALIDPC", "DEVICELOST", "DEVICEUNAVAILABLE", "DEVICESUNAVAILABLE", "NVLINKUNCORRECTABLE",
    "CONTEXTISDESTROYED", "ASSERT", "CONTAINED", "UNKNOWN",
)  # fmt: skip


def cupy_missing(error: Exception) -> ImportError:
    """CuPy cannot be imported."""
    return ImportError(
        f'CuPy is needed for backend="cuda" and cannot be loaded ({_line(error)}): {_INSTALL}'
    )


def compiler_missing(error: Exception) -> ImportError:
    """NVRTC, or what binds it, is not there."""
    return ImportError(
        f'NVRTC is needed for backend="cuda" and cannot be loaded ({_line(error)}): {_INSTALL}'
    )


def no_device(error: Exception | None) -> RuntimeError:
    """CUDA finds no device, or no driver."""
    reason = "it finds none" if error is None else _line(error)
    return RuntimeError(
        f'backend="cuda" needs a CUDA device, and CUDA says: {reason}; see whether nvidia-smi '
        "lists one and CUDA_VISIBLE_DEVICES hides it, or pass NumPy arrays"
    )


def driver_too_old(driver: int, compiler: tuple[int, int]) -> RuntimeError:
    """The driver knows only an earlier CUDA than the one that the compiler is of."""
    major = driver // 1000
    return RuntimeError(
        f"the NVIDIA driver must support CUDA {compiler[0]}, which NVRTC {compiler[0]}."
        f"{compiler[1]} compiles for, and supports {major}.{driver % 1000 // 10}; update the "
        f"driver, or install NVRTC and cuda-bindings of CUDA {major}"
    )


def unknown_device(
    capability: tuple[int, int], known: Sequence[int], version: tuple[int, int]
) -> RuntimeError:
    """The compiler makes no machine code for this device: it is too old or too new."""
    number = 10 * capability[0] + capability[1]
    cure = (
        "the device is older than this compiler: install nvidia-cuda-nvrtc and cuda-bindings of "
        f"CUDA {version[0] - 1}, or pass NumPy arrays"
        if number < min(known)
        else "pip install --upgrade nvidia-cuda-nvrtc cuda-bindings"
    )
    return RuntimeError(
        f"NVRTC {version[0]}.{version[1]} must compile for compute capability {capability[0]}."
        f"{capability[1]}, and does so for {', '.join(f'{one / 10:.1f}' for one in known)}; {cure}"
    )


def not_compiled(log: str, options: Sequence[str]) -> RuntimeError:
    """The source was refused: a mistake of ours, so all that was said is passed on."""
    return RuntimeError(f"NVRTC did not compile layer_norm.cu with {' '.join(options)}:\n{log}")


def no_block_fits(threads: int) -> RuntimeError:
    """Not one block finds room on a multiprocessor."""
    return RuntimeError(
        f"a block of layer_norm.cu needs {threads} threads and their registers, and none fits a "
        "multiprocessor of this device; pass NumPy arrays, and report the device"
    )


def misaligned(name: str, address: int, itemsize: int) -> ValueError:
    """An element would have to be read from an address that devices cannot read it from."""
    return ValueError(
        f"{name} must begin at a multiple of its {itemsize} bytes an element, got address "
        f"{address:#x}; copy its bytes to an array of their own"
    )


def no_workspace() -> RuntimeError:
    """A graph is being captured outside any workspace."""
    return _needs_workspace("the partial sums need memory that outlives the call")


def small_workspace(needed: int, held: int) -> RuntimeError:
    """A graph is being captured with a workspace that would have to grow."""
    return _needs_workspace(f"the workspace must hold {needed} bytes, and it holds {held}")


def _needs_workspace(why: str) -> RuntimeError:
    return RuntimeError(
        f"while a CUDA graph is captured, {why}: call once before capturing, inside "
        "`with work:` of a stablenorm.cuda.CudaWorkspace, and capture inside it too"
    )


def needs_copy(name: str) -> RuntimeError:
    """A graph is being captured and an argument would have to be copied first."""
    return RuntimeError(
        f"while a CUDA graph is captured, {name} must have rows that are contiguous along the "
        "normalized axes, got others, which take a copy that would not outlive this call; "
        "pass cupy.ascontiguousarray of it, made before capturing"
    )


def other_devices(name: str, device: int, expected: int) -> ValueError:
    """Arguments are on several devices."""
    return ValueError(
        f"{name} must be on device {expected}, like x, got device {device}; copy it there: "
        f"with cupy.cuda.Device({expected}): {name} = cupy.array({name})"
    )


def explained(error: Exception, device: int) -> Exception:
    """Return the error to raise for one of CUDA or CuPy: with its cure where there is one."""
    if isinstance(error, MemoryError):
        return MemoryError(
            f"too little memory on CUDA device {device} ({_line(error)}); let go of arrays and "
            "call cupy.get_default_memory_pool().free_all_blocks(), or pass fewer rows at a time"
        )
    name = _line(error).partition(":")[0].upper().replace("_", "")
    if "INSUFFICIENTDRIVER" in name or "UNSUPPORTEDPTX" in name or "NOBINARYFORGPU" in name:
        return RuntimeError(
            f"the NVIDIA driver is too old for what was compiled ({_line(error)}); update it"
        )
    if "MEMORYALLOCATION" in name or "OUTOFMEMORY" in name or "LAUNCHOUTOFRESOURCES" in name:
        return explained(MemoryError(_line(error)), device)
    if any(word in name for word in _LOST):
        return RuntimeError(
            f"CUDA device {device} is lost to this process ({_line(error)}): every later call on "
            "it fails, here or elsewhere; start a new process, and if it happens again look into "
            "nvidia-smi and the system's log"
        )
    return error


def _line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}" if not is_cuda(error) else str(error)
    return (text.splitlines() or [type(error).__name__])[0]


def is_cuda(error: Exception) -> bool:
    """Tell whether CUDA itself raised it."""
    return type(error).__name__ in ("CUDARuntimeError", "CUDADriverError")
