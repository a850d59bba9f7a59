"""
Arrays in files, read in blocks of rows: .npy, .npz members, .safetensors tensors.

The memory taken does not depend on the size of the file. Mapping the file would count each page
read as the process's own, and kill a process whose file is truncated while it reads.
"""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import as_rows
from stablenorm.cli.files import _DAMAGED, InputError
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


class Member(NamedTuple):
    """
    One array of a file.

    `offset` is where its data begins in the file itself; None within an archive. `order` is "C" or
    "F".
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str
    offset: int | None

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.name} in {self.path}" if self.name else str(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def list_members(path: Path) -> list[Member]:
    """Return the arrays of a file: those that a layer norm takes, and others."""
    if not path.exists():
        msg = f"FILE must be an .npy, .npz or .safetensors file, got {path}, which is not there"
        raise InputError(msg)
    if path.is_dir():
        msg = f"FILE must be an .npy, .npz or .safetensors file, got {path}, a directory"
        raise InputError(msg)
    try:
        if zipfile.is_zipfile(path):
            return _list_npz(path)
        with path.open("rb") as file:
            if file.read(6) == b"\x93NUMPY":
                file.seek(0)
                return [_npy_member(file, path)]
            return _list_safetensors(file, path)
    except OSError as error:
        msg = f"{path} must be readable, got: {error.strerror or error}"
        raise InputError(msg) from None


def read_small(path: Path, name: str) -> float | None:
    """Return the one number `name` of an .npz file, such as eps; None if there is none."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            value = archive[name] if name in archive.files else None
    except _DAMAGED:
        return None
    if value is None or value.size != 1 or value.dtype.kind not in "fiu":
        return None
    return float(value.reshape(()))


def check_member(member: Member) -> None:
    """Refuse what no layer norm takes."""
    if not is_supported(member.dtype):
        held = "objects" if member.dtype.hasobject else str(member.dtype)
        msg = f"{member.label} must be float16, bfloat16, float32 or float64, got {held}"
        raise InputError(msg)
    if not member.shape:
        msg = f"{member.label} must have at least one axis, got a single number"
        raise InputError(msg)
    if 0 in member.shape:
        msg = f"{member.label} must have at least one row and one element, got shape {member.shape}"
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
    in_order = axes == tuple(range(leading, len(member.shape))) and (
        member.order == "C" or len(member.shape) == 1
    )
    try:
        if not in_order:
            yield _gathered(member, axes, progress)
        elif member.offset is None:
            with (
                zipfile.ZipFile(member.path) as archive,
                archive.open(f"{member.name}.npy") as stream,
            ):
                _read_header(stream)
                yield _streamed(member, stream, leading, progress)
        else:
            with member.path.open("rb") as file:
                file.seek(member.offset)
                yield _streamed(member, file, leading, progress)
    except _DAMAGED as error:
        raise _damaged(member, error) from None


def _streamed(
    member: Member, file: Any, leading: int, progress: Callable[[int], None]
) -> Iterator[Array]:
    """Read blocks of rows one after the other."""
    rows = math.prod(member.shape[:leading])
    n = math.prod(member.shape[leading:])
    step = max(1, _BLOCK // (n * member.dtype.itemsize))
    for start in range(0, rows, step):
        wanted = min(step, rows - start) * n * member.dtype.itemsize
        data = file.read(wanted)
        if len(data) < wanted:
            raise _truncated(member)
        block = np.frombuffer(data, member.dtype).reshape(-1, n)
        # Bytes in the order of this machine: a format of the file, not of the numbers.
        yield block.astype(member.dtype.newbyteorder("="), copy=False)
        progress(len(block))
    if member.offset is None and file.read(1):
        # An archive compares its checksum when its end is reached.
        msg = "more bytes than the header says"
        raise ValueError(msg)


def _gathered(
    member: Member, axes: tuple[int, ...], progress: Callable[[int], None]
) -> Iterator[Array]:
    """Gather rows that do not lie one after the other: all of the array has to be in memory."""
    if member.offset is None:
        with np.load(member.path, allow_pickle=False) as archive:
            array = archive[member.name].view(member.dtype)
    else:
        count = math.prod(member.shape)
        flat = np.fromfile(member.path, member.dtype, count, offset=member.offset)
        array = flat.reshape(member.shape, order="F" if member.order == "F" else "C")
    rows = as_rows(array, axes)
    count, n = rows.shape
    step = max(_BLOCK // (n * member.dtype.itemsize), _LINE // member.dtype.itemsize)
    for start in range(0, count, step):
        block = np.ascontiguousarray(rows[start : start + step])
        yield block.astype(member.dtype.newbyteorder("="), copy=False)
        progress(len(block))


# ---- headers ----


def _list_npz(path: Path) -> list[Member]:
    members = []
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                if entry.endswith(".npy"):
                    with archive.open(entry) as stream:
                        header = _read_header(stream)
                    members.append(Member(path, entry[:-4], *header, None))
    except _DAMAGED as error:
        msg = f"{path} must be a whole .npz archive, got a damaged one: {str(error)[:120]}"
        raise InputError(msg) from None
    if not members:
        msg = f"{path} must hold an array, got none"
        raise InputError(msg)
    return members


def _npy_member(file: Any, path: Path) -> Member:
    try:
        header = _read_header(file)
    except _DAMAGED as error:
        msg = f"{path} must be a whole .npy file, got a damaged one: {str(error)[:120]}"
        raise InputError(msg) from None
    member = Member(path, "", *header, file.tell())
    _check_size(member)
    return member


def _read_header(stream: Any) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    """Return shape, dtype and order of what follows in an .npy stream."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        msg = f"version {version} of .npy is not known"
        raise ValueError(msg)
    # Versions 2 and 3 differ in the encoding of field names, which a layer norm has none of.
    read: Any = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    if dtype == np.dtype("V2"):
        # As NumPy saves bfloat16: two raw bytes an element.
        dtype = bfloat16
    return shape, dtype, "F" if is_fortran else "C"


def _list_safetensors(file: Any, path: Path) -> list[Member]:
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    size = path.stat().st_size
    if path.suffix != ".safetensors" and not 2 <= length <= size - 8:
        msg = f"{path} must be an .npy, .npz or .safetensors file, got something else"
        raise InputError(msg)
    try:
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            msg = "its header does not fit"
            raise ValueError(msg)  # noqa: TRY301  # said with the others below
        held = json.loads(file.read(length))
        members = [
            _tensor(path, name, entry, 8 + length)
            for name, entry in held.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = (
            f"{path} must be an .npy, .npz or .safetensors file, got another, or a damaged one: "
            f"{str(error)[:120]}"
        )
        raise InputError(msg) from None
    for member in members:
        _check_size(member)
    if not members:
        msg = f"{path} must hold a tensor, got none"
        raise InputError(msg)
    return members


def _tensor(path: Path, name: str, entry: Any, base: int) -> Member:
    shape = tuple(int(length) for length in entry["shape"])
    begin, end = (int(place) for place in entry["data_offsets"])
    # Others are listed, and refused by their name if they are asked for.
    dtype = _SAFETENSORS.get(entry["dtype"], np.dtype(f"V{_width(entry, begin, end, shape)}"))
    if min(shape, default=0) < 0 or begin < 0 or math.prod(shape) * dtype.itemsize != end - begin:
        msg = f"the place of {name} does not fit its shape"
        raise ValueError(msg)
    return Member(path, name, shape, dtype, "C", base + begin)


def _width(entry: Any, begin: int, end: int, shape: tuple[int, ...]) -> int:
    """Return the bytes of an element of a type that is not ours."""
    count = math.prod(shape)
    if entry["dtype"] in _SAFETENSORS or not count:
        return 1
    return max((end - begin) // count, 1)


def _check_size(member: Member) -> None:
    if (member.offset or 0) + member.nbytes > member.path.stat().st_size:
        raise _truncated(member)


def _truncated(member: Member) -> InputError:
    return InputError(
        f"{member.label} must hold {member.nbytes} bytes of data, as its header says, got fewer: "
        "truncated"
    )


def _damaged(member: Member, error: Exception) -> InputError:
    return InputError(f"{member.label} must be whole, got a damaged one: {str(error)[:120]}")
