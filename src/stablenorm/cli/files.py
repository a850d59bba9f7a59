"""
Arrays in files: .npy, members of .npz, tensors of .safetensors; whole, or in blocks of rows.

The memory that blocks take does not depend on the size of the file. Mapping the file would count each
page read as the process's own, and kill a process whose file is truncated while it reads.
"""

import contextlib
import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import as_rows
from stablenorm.cli.parts import InputError
from stablenorm.types import Array, bfloat16

# The bundled data: the input of a layer norm of a real model.
BUNDLED = Path(__file__).parent.parent / "data" / "minilm_layer0_output.npz"
# The types of .safetensors that a layer norm takes. Read here and not by the package of that name:
# its NumPy side has no BF16, and hands out slices of a map.
_SAFETENSORS: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": bfloat16}
# Its own limit for the header: a larger one is another kind of file.
_LONGEST_HEADER = 100_000_000
# Bytes of a block: enough for the call that reads it to cost nothing, few beside the 80 MB that
# Python with NumPy takes.
_BLOCK = 1 << 21


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


def list_members(path: Path) -> dict[str, Member]:
    """Return the arrays of a file by name: those that a layer norm takes, and others."""
    if not path.is_file():
        what = "a directory" if path.is_dir() else "which is not there"
        msg = f"FILE must be an .npy, .npz or .safetensors file, got {path}, {what}"
        raise InputError(msg)
    members: list[Member] = []
    with _whole(path), path.open("rb") as file:
        begin = file.read(8)
        if begin.startswith(np.lib.format.MAGIC_PREFIX):
            file.seek(0)
            members = [Member(path, "", *_header(file), file.tell())]
        elif zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                for entry in archive.namelist():
                    if entry.endswith(".npy"):
                        with archive.open(entry) as stream:
                            members.append(Member(path, entry[:-4], *_header(stream), None))
        else:
            file.seek(8)
            members = list(_tensors(path, file, int.from_bytes(begin, "little")))
    if not members:
        msg = f"{path} must hold an array, got none"
        raise InputError(msg)
    return {member.name: member for member in members}


def load(member: Member) -> Array:
    """Read all of an array."""
    # Never unpickled: that runs code that the file chooses.
    if member.dtype.hasobject:
        msg = f"{member.label} must hold plain numbers, got pickled objects, which are not loaded"
        raise InputError(msg)
    with _opened(member) as file:
        flat = _read(member, file, math.prod(member.shape))
        return flat.reshape(member.shape, order="F" if member.is_fortran else "C")


def load_number(member: Member) -> float:
    """Read an array that is one number, such as eps."""
    value = load(member)
    if value.size != 1 or not (value.dtype.kind in "fiu" or value.dtype == bfloat16):
        msg = f"{member.label} must be one number, got shape {value.shape} of {value.dtype}"
        raise InputError(msg)
    return float(value.reshape(()))


def read_rows(member: Member, axes: tuple[int, ...]) -> Iterator[Array]:
    """Yield the rows of a member, (some, n), block by block."""
    leading = len(member.shape) - len(axes)
    n = math.prod(member.shape[i] for i in axes)
    count, row_bytes = math.prod(member.shape) // n, n * member.dtype.itemsize
    if not member.is_fortran and axes == tuple(range(leading, len(member.shape))):
        step = max(1, _BLOCK // row_bytes)
        with _opened(member) as file:
            for start in range(0, count, step):
                yield _read(member, file, min(step, count - start) * n).reshape(-1, n)
        return
    # Rows that do not lie one after the other: all of the array has to be in memory. As many rows as
    # there are elements in a cache line, or each line would be read again for the next row.
    rows, step = as_rows(load(member), axes), max(32, _BLOCK // row_bytes)
    for start in range(0, count, step):
        yield np.ascontiguousarray(rows[start : start + step])


@contextlib.contextmanager
def _opened(member: Member) -> Iterator[Any]:
    """Give the file at the data of a member; say in one line what is wrong with it."""
    with _whole(member.label):
        if member.offset is not None:
            with member.path.open("rb") as file:
                file.seek(member.offset)
                yield file
            return
        with zipfile.ZipFile(member.path) as archive, archive.open(f"{member.name}.npy") as stream:
            _header(stream)
            yield stream
            # An archive compares its checksum when its end is reached.
            if stream.read(1):
                msg = "more bytes than the header says"
                raise ValueError(msg)


def _read(member: Member, file: Any, count: int) -> Array:
    """Read so many elements, in the byte order of this machine."""
    data = file.read(count * member.dtype.itemsize)
    if len(data) < count * member.dtype.itemsize:
        msg = (
            f"{member.label} must hold {member.nbytes} bytes of data, as its header says, got "
            "fewer: truncated"
        )
        raise InputError(msg)
    array = np.frombuffer(data, member.dtype)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


# ---- headers ----


def _header(stream: Any) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Return shape, dtype and whether the order is Fortran's of what follows in an .npy stream."""
    version = np.lib.format.read_magic(stream)
    # Versions 2 and 3 differ in the encoding of field names, which a layer norm has none of.
    read: Any = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape, is_fortran, dtype = read(stream)
    # NumPy saves bfloat16 as two raw bytes per element.
    return shape, bfloat16 if dtype == np.dtype("V2") else dtype, is_fortran


def _tensors(path: Path, file: Any, length: int) -> Iterator[Member]:
    """Read the header of .safetensors, of `length` bytes."""
    if not 2 <= length <= min(path.stat().st_size - 8, _LONGEST_HEADER):
        msg = f"{path} must be an .npy, .npz or .safetensors file, got another, or a truncated one"
        raise InputError(msg)
    for name, entry in json.loads(file.read(length)).items():
        if name != "__metadata__":
            shape = tuple(int(each) for each in entry["shape"])
            begin, end = (int(place) for place in entry["data_offsets"])
            # Others are listed, and refused by their name if they are asked for.
            dtype = np.dtype(_SAFETENSORS.get(entry["dtype"], "V1"))
            member = Member(path, name, shape, dtype, False, 8 + length + begin)
            fits = member.nbytes == end - begin or entry["dtype"] not in _SAFETENSORS
            if min(shape, default=0) < 0 or begin < 0 or not fits:
                msg = f"the place of {name} does not fit its shape"
                raise ValueError(msg)
            yield member


@contextlib.contextmanager
def _whole(label: object) -> Iterator[None]:
    """Say in one line what reading a damaged file raises."""
    try:
        yield
    except (InputError, OSError, MemoryError):
        raise
    # zipfile, zlib, json and NumPy have a dozen kinds of errors for what is damaged.
    except Exception as error:
        msg = f"{label} must be whole, got a damaged one: {str(error)[:120]}"
        raise InputError(msg) from error
