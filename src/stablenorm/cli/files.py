"""
Arrays in files: .npy, members of .npz, tensors of .safetensors; whole, or in blocks of rows.

The memory that blocks take does not depend on the size of the file. Mapping the file would count each
page read as the process's own, and kill a process whose file is truncated while it reads.
"""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import as_rows
from stablenorm.cli.parts import InputError
from stablenorm.formats import is_supported
from stablenorm.types import Array, bfloat16

# The types of .safetensors that a layer norm takes. Read here and not by the package of that name:
# its NumPy side has no BF16, and hands out slices of a map.
_SAFETENSORS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": bfloat16,
}
# Its own limit for the header: a larger one is another kind of file.
_LONGEST_HEADER = 100_000_000
# Bytes of a block: enough for the call that reads it to cost nothing, few beside the 80 MB that
# Python with NumPy takes.
_BLOCK = 1 << 21
# Bytes of a cache line: of rows that do not lie one after the other, none is read twice.
_LINE = 64
# All that reading a damaged file raises: zipfile has NotImplementedError for a compression or a
# version that it does not know and RuntimeError for an encrypted member, zlib an error of its own.
_DAMAGED = (
    *(ValueError, TypeError, EOFError, KeyError, AttributeError, RuntimeError, RecursionError),
    *(NotImplementedError, zipfile.BadZipFile, zlib.error),
)


class Member(NamedTuple):
    """One array of a file; `offset` is where its data begins, None within an archive."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    offset: int | None

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.name} in {self.path}" if self.name else str(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def bundled_file() -> contextlib.AbstractContextManager[Path]:
    """Give the path of the bundled data: the input of a layer norm of a real model."""
    return resources.as_file(resources.files("stablenorm") / "data" / "minilm_layer0_output.npz")


def list_members(path: Path) -> dict[str, Member]:
    """Return the arrays of a file by name: those that a layer norm takes, and others."""
    if not path.is_file():
        what = "a directory" if path.is_dir() else "which is not there"
        msg = f"FILE must be an .npy, .npz or .safetensors file, got {path}, {what}"
        raise InputError(msg)
    with _whole(path), path.open("rb") as file:
        if zipfile.is_zipfile(file):
            members = list(_archived(path))
        else:
            file.seek(0)
            is_npy = file.read(6) == b"\x93NUMPY"
            file.seek(0)
            members = [Member(path, "", *_header(file), file.tell())] if is_npy else []
            members = members or list(_tensors(file, path))
    for member in members:
        if member.offset is not None and member.offset + member.nbytes > path.stat().st_size:
            raise _truncated(member)
    if not members:
        msg = f"{path} must hold an array, got none"
        raise InputError(msg)
    return {member.name: member for member in members}


def load(member: Member) -> Array:
    """Read all of an array."""
    if member.dtype.hasobject:
        msg = f"{member.label} must hold plain numbers, got pickled objects, which are not loaded"
        raise InputError(msg)
    with _whole(member.label):
        if member.offset is None:
            # Never allow_pickle: unpickling runs code that the file chooses.
            with np.load(member.path, allow_pickle=False) as archive:
                array = archive[member.name].view(member.dtype)
        else:
            count = math.prod(member.shape)
            flat = np.fromfile(member.path, member.dtype, count, offset=member.offset)
            array = flat.reshape(member.shape, order="F" if member.is_fortran else "C")
    return _native(array)


def load_number(member: Member) -> float:
    """Read an array that is one number, such as eps."""
    value = load(member)
    if value.size != 1 or not (value.dtype.kind in "fiu" or value.dtype == bfloat16):
        msg = f"{member.label} must be one number, got shape {value.shape} of {value.dtype}"
        raise InputError(msg)
    return float(value.reshape(()))


def check_member(member: Member) -> None:
    """Refuse what no layer norm takes."""
    msg = ""
    if not is_supported(member.dtype):
        held = "objects" if member.dtype.hasobject else str(member.dtype)
        msg = f"must be float16, bfloat16, float32 or float64, got {held}"
    elif not member.shape:
        msg = "must have at least one axis, got a single number"
    elif 0 in member.shape:
        msg = f"must have at least one row and one element, got shape {member.shape}"
    if msg:
        msg = f"{member.label} {msg}"
        raise InputError(msg)


@contextlib.contextmanager
def open_rows(
    member: Member, axes: tuple[int, ...], progress: Callable[[int], None]
) -> Iterator[Iterator[Array]]:
    """
    Give the rows of a member, block by block.

    `progress` is called with the number of rows of each block when the next one is asked for.
    """
    leading = len(member.shape) - len(axes)
    is_c = not member.is_fortran or len(member.shape) == 1
    with _whole(member.label), contextlib.ExitStack() as stack:
        if axes != tuple(range(leading, len(member.shape))) or not is_c:
            yield _gathered(member, as_rows(load(member), axes), progress)
            return
        if member.offset is None:
            archive = stack.enter_context(zipfile.ZipFile(member.path))
            file: Any = stack.enter_context(archive.open(f"{member.name}.npy"))
            _header(file)
        else:
            file = stack.enter_context(member.path.open("rb"))
            file.seek(member.offset)
        yield _streamed(member, file, leading, progress)


def _streamed(
    member: Member, file: Any, leading: int, progress: Callable[[int], None]
) -> Iterator[Array]:
    """Read blocks of rows one after the other."""
    rows, n = math.prod(member.shape[:leading]), math.prod(member.shape[leading:])
    step = max(1, _BLOCK // (n * member.dtype.itemsize))
    for start in range(0, rows, step):
        wanted = min(step, rows - start) * n * member.dtype.itemsize
        data = file.read(wanted)
        if len(data) < wanted:
            raise _truncated(member)
        block = np.frombuffer(data, member.dtype).reshape(-1, n)
        yield _native(block)
        progress(len(block))
    if member.offset is None and file.read(1):
        # An archive compares its checksum when its end is reached.
        msg = "more bytes than the header says"
        raise ValueError(msg)


def _gathered(member: Member, rows: Any, progress: Callable[[int], None]) -> Iterator[Array]:
    """Gather rows that do not lie one after the other: all of the array has to be in memory."""
    count, n = rows.shape
    step = max(_BLOCK // (n * member.dtype.itemsize), _LINE // member.dtype.itemsize)
    for start in range(0, count, step):
        yield np.ascontiguousarray(rows[start : start + step])
        progress(min(step, count - start))


def _native(array: Array) -> Array:
    """Put bytes in the order of this machine: a format of the file, not of the numbers."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


# ---- headers ----


def _archived(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.namelist():
            if entry.endswith(".npy"):
                with archive.open(entry) as stream:
                    yield Member(path, entry[:-4], *_header(stream), None)


def _header(stream: Any) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Return shape, dtype and whether the order is Fortran's of what follows in an .npy stream."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        msg = f"version {version} of .npy is not known"
        raise ValueError(msg)
    # Versions 2 and 3 differ in the encoding of field names, which a layer norm has none of.
    read: Any = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    # NumPy saves bfloat16 as two raw bytes per element.
    return shape, bfloat16 if dtype == np.dtype("V2") else dtype, is_fortran


def _tensors(file: Any, path: Path) -> Iterator[Member]:
    length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
    if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        msg = f"{path} must be an .npy, .npz or .safetensors file, got another, or a truncated one"
        raise InputError(msg)
    for name, entry in json.loads(file.read(length)).items():
        if name == "__metadata__":
            continue
        shape = tuple(int(length) for length in entry["shape"])
        begin, end = (int(place) for place in entry["data_offsets"])
        # Others are listed, and refused by their name if they are asked for.
        dtype = _SAFETENSORS.get(entry["dtype"], np.dtype("V1"))
        member = Member(path, name, shape, dtype, False, 8 + length + begin)
        fits = member.nbytes == end - begin or entry["dtype"] not in _SAFETENSORS
        if min(shape, default=0) < 0 or begin < 0 or not fits:
            msg = f"the place of {name} does not fit its shape"
            raise ValueError(msg)
        if 8 + length + end > size:
            raise _truncated(member)
        yield member


@contextlib.contextmanager
def _whole(label: object) -> Iterator[None]:
    """Say in one line what reading a damaged file raises."""
    try:
        yield
    except OSError as error:
        msg = f"{label} must be readable, got: {error.strerror or error}"
        raise InputError(msg) from None
    except _DAMAGED as error:
        msg = f"{label} must be whole, got a damaged one: {str(error)[:120]}"
        raise InputError(msg) from None


def _truncated(member: Member) -> InputError:
    return InputError(
        f"{member.label} must hold {member.nbytes} bytes of data, as its header says, got fewer: "
        "truncated"
    )
