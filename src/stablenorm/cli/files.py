"""
Arrays in files: .npy, members of .npz, tensors of .safetensors; whole, or in blocks of rows.

The memory that blocks take does not depend on the size of the file. Mapping the file would count each
page read as the process's own, and kill a process whose file is truncated while it reads.
"""

import contextlib
import itertools
import json
import math
import operator
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import as_rows
from stablenorm.cli import parts
from stablenorm.cli.parts import InputError
from stablenorm.formats import check_dtype
from stablenorm.text import Table, printable, quantity, shape_text
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
_KINDS = "an .npy, .npz or .safetensors file"


class Member(NamedTuple):
    """One array of a file; `offset` is where its data begins in the file, or in that of an archive."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    offset: int
    # Whether it is a member of an archive, else its data lies in the file as it is.
    in_archive: bool = False

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{printable(self.name, '')} in {self.path}" if self.name else str(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def native(self) -> np.dtype[Any]:
        """Its dtype in the byte order of this machine."""
        return self.dtype.newbyteorder("=")


def list_members(path: Path) -> dict[str, Member]:
    """Return the arrays of a file by name: those that a layer norm takes, and others."""
    members: list[Member] = []
    if not path.is_file():
        msg = f"FILE must be {_KINDS}, got {path}, {parts.what_is(path)}"
        raise InputError(msg)
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
                            found = *_header(stream), stream.tell()
                            members.append(Member(path, entry[:-4], *found, in_archive=True))
        else:
            file.seek(8)
            members = list(_tensors(path, file, int.from_bytes(begin, "little")))
    if not members:
        msg = f"{path} must hold an array, got none"
        raise InputError(msg)
    return {member.name: member for member in members}


def choose(members: dict[str, Member], path: Path, name: str | None, default: str = "x") -> Member:
    """Return the member of that name; without one, that of the default name, or the only one."""
    if name is None and (len(members) == 1 or default in members):
        return members.get(default, next(iter(members.values())))
    if name in members:
        return members[name]
    rows = [
        (
            printable(one.name, ""),
            shape_text(one.shape) or "1",
            str(one.dtype),
            quantity(one.nbytes, "B"),
        )
        for one in members.values()
    ]
    parts.print_table(Table("Arrays", ("member", "shape", "dtype", "size"), rows))
    given = f", got {name}" if name else ""
    msg = f"{path} holds {len(members)} arrays: choose one with --member NAME{given}"
    raise InputError(msg)


def load(member: Member) -> Array:
    """Read all of an array."""
    # Never unpickled: that runs code that the file chooses.
    if member.dtype.hasobject:
        msg = f"{member.label} must hold plain numbers, got pickled objects, which are not loaded"
        raise InputError(msg)
    # As one row.
    flat = np.empty((1, math.prod(member.shape)), member.dtype.newbyteorder("="))
    with opened(member) as read:
        read(0, flat)
    return flat.reshape(member.shape, order="F" if member.is_fortran else "C")


def load_number(member: Member) -> float:
    """Read an array that is one number, such as eps."""
    # Before it is read: a small archive can hold gigabytes of zeros.
    is_number = member.dtype.kind in "fiu" or member.dtype == bfloat16
    if math.prod(member.shape) != 1 or not is_number:
        msg = f"{member.label} must be one number, got shape {member.shape} of {member.dtype}"
        raise InputError(msg)
    return float(load(member).reshape(()))


def load_beside(name: str, member: Member, shape: tuple[int, ...]) -> Array:
    """Read gamma, beta or dy, of the size that x asks for."""
    check_dtype(name, np.empty(0, member.dtype))
    if math.prod(member.shape) != math.prod(shape):
        place = f"{member.shape} in {member.path}"
        msg = f"{name} must have shape {shape} to match x, got {place}"
        raise InputError(msg)
    return load(member)


def are_adjacent(member: Member, axes: tuple[int, ...]) -> bool:
    """Tell whether rows over these axes lie one after the other, and so can be read in blocks."""
    return not member.is_fortran and axes == tuple(range(axes[0], len(member.shape)))


def read_rows(member: Member, axes: tuple[int, ...]) -> Iterator[Array]:
    """Yield the rows of a member, (some, n), block by block."""
    if 0 in member.shape:
        return
    n = math.prod(member.shape[i] for i in axes)
    rows, count = max(1, _BLOCK // (n * member.dtype.itemsize)), math.prod(member.shape) // n
    if are_adjacent(member, axes):
        with opened(member) as read:
            for start in range(0, count, rows):
                block = np.empty((min(rows, count - start), n), member.native)
                read(start, block)
                yield block
        return
    # Rows that do not lie one after the other: all of the array has to be in memory. As many rows as
    # there are elements in a cache line, or each line would be read again for the next row.
    whole, step = as_rows(load(member), axes), max(32, rows)
    for start in range(0, count, step):
        yield np.ascontiguousarray(whole[start : start + step])


@contextlib.contextmanager
def opened(member: Member) -> Iterator[Callable[[int, Array], None]]:
    """
    Give ``read(start, out)``, which fills `out`, (rows, n) in the byte order of this machine, from a row on.

    What is wrong with the file is said in one line.
    """
    with contextlib.ExitStack() as stack:
        with _whole(member.label):
            if member.in_archive:
                archive = stack.enter_context(zipfile.ZipFile(member.path))
                file: Any = stack.enter_context(archive.open(f"{member.name}.npy"))
            else:
                file = stack.enter_context(member.path.open("rb", buffering=0))
                if os.fstat(file.fileno()).st_size < member.offset + member.nbytes:
                    raise _truncated(member)

        def read(start: int, out: Array) -> None:
            with _whole(member.label):
                _fill(member, file, start * out.strides[0], out)
                if not member.dtype.isnative:
                    out.byteswap(inplace=True)

        yield read


def _fill(member: Member, file: Any, start: int, out: Array) -> None:
    """Read what begins at byte `start` of the data of a member."""
    if file.tell() != member.offset + start:
        file.seek(member.offset + start)
    left = out.view(np.uint8).reshape(-1).data
    while left:
        if not (count := file.readinto(left)):
            raise _truncated(member)
        left = left[count:]
    # An archive compares its checksum when its end is reached.
    if member.in_archive and start + out.nbytes == member.nbytes and file.read(1):
        msg = "more bytes than the header says"
        raise ValueError(msg)


def _truncated(member: Member) -> InputError:
    return InputError(
        f"{member.label} must hold {member.nbytes} bytes of data, as its header says, got fewer: "
        "truncated"
    )


# ---- headers ----


def _header(stream: Any) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Return shape, dtype and whether the order is Fortran's of what follows in an .npy stream."""
    version = np.lib.format.read_magic(stream)
    # Versions 2 and 3 differ in the encoding of field names, which a layer norm has none of.
    read: Any = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape, is_fortran, dtype = read(stream)
    if min(shape, default=0) < 0 or max(shape, default=0) > sys.maxsize or dtype.subdtype:
        msg = f"shape {shape} of {dtype}"
        raise ValueError(msg)
    # NumPy saves bfloat16 as two raw bytes per element.
    return shape, bfloat16 if dtype == np.dtype("V2") else dtype, is_fortran


def _tensors(path: Path, file: Any, length: int) -> Iterator[Member]:
    """Read the header of .safetensors, of `length` bytes."""
    if not 2 <= length <= min(path.stat().st_size - 8, _LONGEST_HEADER):
        msg = f"{path} must be {_KINDS}, got another, or a truncated one"
        raise InputError(msg)
    tensors = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    taken = sorted(tuple(entry["data_offsets"]) for entry in tensors.values())
    if any(later < end for (_, end), (later, _) in itertools.pairwise(taken)):
        msg = "the places of two tensors overlap"
        raise ValueError(msg)
    for name, entry in tensors.items():
        shape = tuple(map(operator.index, entry["shape"]))
        begin, end = map(operator.index, entry["data_offsets"])
        # Others are listed, and refused by their name if they are asked for.
        dtype = np.dtype(_SAFETENSORS.get(entry["dtype"], "V1"))
        member = Member(path, name, shape, dtype, False, 8 + length + begin)
        fits = member.nbytes == end - begin or entry["dtype"] not in _SAFETENSORS
        if min(shape, default=0) < 0 or begin < 0 or not fits:
            msg = f"the place of {printable(name, '')} does not fit its shape"
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
