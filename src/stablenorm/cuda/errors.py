"""Errors of CUDA and of CuPy, with their cure."""

from __future__ import annotations

# CUDA's names of errors after which its context is lost: every later call of the process fails.
_LOST = (
    "ILLEGALADDRESS", "LAUNCHFAILURE", "LAUNCHFAILED", "LAUNCHTIMEOUT", "ECCUNCORRECTABLE",
    "MISALIGNEDADDRESS", "ILLEGALINSTRUCTION", "HARDWARESTACKERROR", "INVALIDADDRESSSPACE",
    "INVALIDPC", "DEVICELOST", "DEVICEUNAVAILABLE", "DEVICESUNAVAILABLE", "NVLINKUNCORRECTABLE",
    "CONTEXTISDESTROYED", "ASSERT", "CONTAINED", "UNKNOWN",
)  # fmt: skip


def not_loaded(error: Exception, name: str) -> ImportError:
    """Return the error to raise where a library of the extra `cuda` cannot be imported."""
    return ImportError(
        f'{name} is needed for backend="cuda" and cannot be loaded ({first_line(error)}): '
        'pip install "stablenorm[cuda]"'
    )


def explained(error: Exception, device: int) -> Exception:
    """Return the error to raise for one of CUDA or CuPy: with its cure where there is one."""
    line = first_line(error)
    name = line.partition(":")[0].upper().replace("_", "") if _is_cuda(error) else ""
    if isinstance(error, MemoryError) or any(
        word in name for word in ("MEMORYALLOCATION", "OUTOFMEMORY", "LAUNCHOUTOFRESOURCES")
    ):
        return MemoryError(
            f"too little memory on CUDA device {device} ({line}); let go of arrays and "
            "call cupy.get_default_memory_pool().free_all_blocks(), or pass fewer rows at a time"
        )
    if any(word in name for word in ("INSUFFICIENTDRIVER", "UNSUPPORTEDPTX", "NOBINARYFORGPU")):
        return RuntimeError(
            f"the NVIDIA driver is too old for what was compiled ({line}); update it"
        )
    if any(word in name for word in _LOST):
        return RuntimeError(
            f"CUDA device {device} is lost to this process ({line}): every later call on "
            "it fails, here or elsewhere; start a new process, and if it happens again look into "
            "nvidia-smi and the system's log"
        )
    return error


def first_line(error: Exception) -> str:
    """Return the first line of what an error says; its kind too, but for CUDA's, which name it."""
    text = str(error) if _is_cuda(error) else f"{type(error).__name__}: {error}"
    return (text.splitlines() or [type(error).__name__])[0]


def _is_cuda(error: Exception) -> bool:
    return type(error).__name__ in ("CUDARuntimeError", "CUDADriverError")
