"""Files in, files out: what `stablenorm run` reads, refuses and writes."""

from __future__ import annotations

import os
import zipfile
import zlib
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stablenorm.report import Problem
from stablenorm.types import Array

_NAMES = ("x", "gamma", "beta", "dy", "eps", "y", "dx", "dgamma", "dbeta")

# All that reading a damaged archive raises: zipfile has NotImplementedError for a compression or
# a version that it does not know and RuntimeError for an encrypted member, zlib an error of its own.
_DAMAGED = (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


class InputError(Exception):
    """What the user gave cannot be used; the text is the one line to show."""


def read_problem(path: Path | None, eps: float | None, seed: int) -> Problem:
    """Read an .npz file or a directory of .npy files; None reads the bundled data."""
    if path is None:
        with bundled_file() as bundled:
            arrays = _read_npz(bundled)
            source = f"bundled data ({bundled.name})"
    else:
        arrays = _read_directory(path) if path.is_dir() else _read_npz(path)
        source = str(path)
    if "x" not in arrays:
        held = ", ".join(sorted(arrays)) or "nothing of that kind"
        msg = f"{source} must hold an array named x, got {held}"
        raise InputError(msg)
    x, dy = arrays["x"], arrays.get("dy")
    origin = "dy of the file"
    if dy is None:
        origin = f"dy not given: random N(0, 1), seed {seed}"
        dy = np.random.default_rng(seed).standard_normal(x.shape).astype(x.dtype)
    return Problem(
        source,
        x,
        arrays.get("gamma"),
        arrays.get("beta"),
        _eps(arrays.get("eps"), eps),
        dy,
        origin,
        {
            name: arrays[name]
            for name in ("y", "dx", "dgamma", "dbeta")
            # What is no real number cannot be compared; the file may call anything y.
            if name in arrays and (arrays[name].dtype.kind in "fiu" or _is_bfloat16(arrays[name]))
        },
    )


def bundled_file() -> AbstractContextManager[Path]:
    """Give the path of the bundled data: the input of a layer norm of a real model."""
    return resources.as_file(resources.files("stablenorm") / "data" / "minilm_layer0_output.npz")


def check_finite(problem: Problem) -> None:
    """Refuse what has no exact result: NaN, infinity, no rows, 0/0."""
    for name in ("x", "gamma", "beta", "dy"):
        array = getattr(problem, name)
        if array is not None and not np.isfinite(array.astype(np.float64)).all():
            where = np.argwhere(~np.isfinite(array.astype(np.float64)))[0]
            msg = f"{name} must be finite to be checked, got {array[tuple(where)]} at {[*map(int, where)]}"
            raise InputError(msg)
    if problem.x.size == 0:
        msg = f"x must have at least one row, got shape {problem.x.shape}"
        raise InputError(msg)
    rows = problem.x.reshape(-1, problem.x.shape[-1])
    constant = np.flatnonzero((rows == rows[:, :1]).all(axis=-1))
    if problem.eps == 0 and constant.size:
        msg = (
            f"eps must be > 0 where a row of x is constant, got 0 and row {constant[0]}; pass --eps"
        )
        raise InputError(msg)


def check_target(option: str, path: Path | None, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that could not be written, before any work is done for it."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        msg = f"{option} must be a {' or '.join(suffixes)} file, got {path}"
        raise InputError(msg)
    if not path.parent.is_dir():
        msg = f"{option} must be in an existing directory, got {path}"
        raise InputError(msg)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        msg = f"{option} must be a file that can be written, got {path}"
        raise InputError(msg)


def write_beside(path: Path, write: Any) -> None:
    """Call ``write(file)`` on a new file beside `path`, then rename: all of it or nothing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            write(file)
        beside.replace(path)
    except OSError as error:
        msg = f"{path} must be writeable, got: {error.strerror or error}"
        raise InputError(msg) from None
    finally:
        beside.unlink(missing_ok=True)


def _read_npz(path: Path) -> dict[str, Array]:
    if not path.exists():
        msg = f"FILE must be an .npz file or a directory of .npy files, got {path}, which is not there"
        raise InputError(msg)
    try:
        is_zip = zipfile.is_zipfile(path)
    except OSError as error:
        msg = f"{path} must be readable, got: {error.strerror or error}"
        raise InputError(msg) from None
    if not is_zip:
        msg = f"{path} must be an .npz archive, got something else, or a truncated one"
        raise InputError(msg)
    try:
        # Never allow_pickle: unpickling runs code that the file chooses.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            held = [name for name in _NAMES if name in archive.files]
            return {name: _array(archive[name], f"{name} in {path}") for name in held}
    except _DAMAGED as error:
        raise _unreadable(path, error) from None


def _read_directory(path: Path) -> dict[str, Array]:
    arrays = {}
    for name in _NAMES:
        file = path / f"{name}.npy"
        if file.exists():
            try:
                arrays[name] = _array(np.load(file, allow_pickle=False), str(file))
            except _DAMAGED as error:
                raise _unreadable(file, error) from None
    return arrays


def _unreadable(path: Path, error: Exception) -> InputError:
    if "pickle" in str(error).lower():
        return InputError(
            f"{path} must hold plain arrays, got pickled objects, which are not loaded"
        )
    return InputError(f"{path} must hold whole .npy arrays, got a damaged one: {str(error)[:120]}")


def _array(value: Any, where: str) -> Array:
    """Take what was loaded; two raw bytes an element are bfloat16, as NumPy saves that."""
    if not isinstance(value, np.ndarray):
        msg = f"{where} must be an array, got {type(value).__name__}"
        raise InputError(msg)
    if value.dtype == np.dtype("V2"):
        return value.view(ml_dtypes.bfloat16)
    # Bytes in the order of this machine: a format of the file, not of the numbers.
    return value.astype(value.dtype.newbyteorder("="), copy=False)


def _is_bfloat16(value: Array) -> bool:
    return value.dtype == np.dtype(ml_dtypes.bfloat16)


def _eps(held: Array | None, given: float | None) -> float:
    if given is not None:
        return given
    if held is None:
        return 1e-5
    if held.size != 1 or not (held.dtype.kind in "fiu" or _is_bfloat16(held)):
        msg = f"eps must be one number, got shape {held.shape} of {held.dtype}"
        raise InputError(msg)
    return float(held.reshape(()))
