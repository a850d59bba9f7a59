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
import sys
import zipfile
from collections.abc import Iterator
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
    """One array of a file; its data begins at `offset` of the file or, in an archive, of its entry."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    offset: int
    in_archive: bool = False

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{printable(self.name, '')} in {self.path}" if self.name else str(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def list_members(path: Path) -> dict[str, Member]:
    """Return the arrays of a file by name: those that a layer norm takes, and others."""
    if not path.is_file():
        msg = f"FILE must be {_KINDS}, got {path}, {parts.what_is(path)}"
        raise InputError(msg)
    with _whole(path), path.open("rb") as file:
        members = list(_headers(path, file))
        for one in members:
            # NumPy's own limit, which it applies to the axes that are not empty.
            most = math.prod(filter(None, one.shape)) * one.dtype.itemsize
            if min(one.shape, default=0) < 0 or most > sys.maxsize or one.dtype.subdtype:
                msg = f"shape {one.shape} of {one.dtype}"
                raise ValueError(msg)
    if not members:
        msg = f"{path} must hold an array, got none"
        raise InputError(msg)
    return {member.name: member for member in members}


def choose(members: dict[str, Member], path: Path, name: str | None) -> Member:
    """Return the member of that name; without one, x, or the only one."""
    if name is None and (len(members) == 1 or "x" in members):
        return members.get("x", next(iter(members.values())))
    if name in members:
        return members[name]
    rows = [
        (printable(m.name, ""), shape_text(m.shape) or "1", str(m.dtype), quantity(m.nbytes, "B"))
        for m in members.values()
    ]
    parts.print_table(Table("Arrays", ("member", "shape", "dtype", "size"), rows))
    given = f", got {name}" if name else ""
    msg = f"{path} holds {len(members)} arrays: choose one with --member NAME{given}"
    raise InputError(msg)


def load(member: Member) -> Array:
    """Read all of an array."""
    (flat,) = _blocks(member, max(1, math.prod(member.shape)))
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
        msg = f"{name} must have shape {shape} to match x, got {member.shape} in {member.path}"
        raise InputError(msg)
    return load(member)


def read_rows(member: Member, axes: tuple[int, ...]) -> Iterator[Array]:
    """Yield the rows of a member, (some, n), block by block."""
    if 0 in member.shape:
        return
    n = math.prod(member.shape[i] for i in axes)
    rows = max(1, _BLOCK // (n * member.dtype.itemsize))
    if not member.is_fortran and axes == tuple(range(axes[0], len(member.shape))):
        yield from (block.reshape(-1, n) for block in _blocks(member, rows * n))
        return
    # Rows that do not lie one after the other: all of the array has to be in memory. As many rows as
    # there are elements in a cache line, or each line would be read again for the next row.
    whole, step = as_rows(load(member), axes), max(32, rows)
    for start in range(0, len(whole), step):
        yield np.ascontiguousarray(whole[start : start + step])


def _blocks(member: Member, count: int) -> Iterator[Array]:
    """Yield the elements of a member in the byte order of this machine, so many at a time."""
    # Never unpickled: that runs code that the file chooses.
    if member.dtype.hasobject:
        msg = f"{member.label} must hold plain numbers, got pickled objects, which are not loaded"
        raise InputError(msg)
    with _whole(member.label), contextlib.ExitStack() as stack:
        if member.in_archive:
            archive = stack.enter_context(zipfile.ZipFile(member.path))
            stream: Any = stack.enter_context(archive.open(f"{member.name}.npy"))
            stream.read(member.offset)
        else:
            stream = stack.enter_context(member.path.open("rb"))
            stream.seek(member.offset)
            if member.path.stat().st_size < member.offset + member.nbytes:
                raise _truncated(member)
        left = math.prod(member.shape)
        for taken in [min(count, left - i) for i in range(0, left, count)] or [0]:
            raw = stream.read(taken * member.dtype.itemsize)
            if len(raw) < taken * member.dtype.itemsize:
                raise _truncated(member)
            yield np.frombuffer(raw, member.dtype).astype(
                member.dtype.newbyteorder("="), copy=False
            )
        # An archive compares its checksum when its end is reached.
        if member.in_archive and stream.read(1):
            msg = "more bytes than the header says"
            raise ValueError(msg)


def _truncated(member: Member) -> InputError:
    return InputError(
        f"{member.label} must hold {member.nbytes} bytes of data, as its header says, got fewer: "
        "truncated"
    )


# ---- headers ----


def _headers(path: Path, file: Any) -> Iterator[Member]:
    """Read the header of each array of a file."""
    begin = file.read(8)
    if begin.startswith(np.lib.format.MAGIC_PREFIX):
        file.seek(0)
        yield _header(path, "", file)
    elif zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for entry in archive.namelist():
                if entry.endswith(".npy"):
                    with archive.open(entry) as stream:
                        yield _header(path, entry[:-4], stream)._replace(in_archive=True)
    else:
        file.seek(8)
        yield from _tensors(path, file, int.from_bytes(begin, "little"))


def _header(path: Path, name: str, stream: Any) -> Member:
    """Read the header of .npy."""
    version = np.lib.format.read_magic(stream)
    # Versions 2 and 3 differ in the encoding of field names, which a layer norm has none of.
    read: Any = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape, is_fortran, dtype = read(stream)
    # NumPy saves bfloat16 as two raw bytes per element.
    dtype = bfloat16 if dtype == np.dtype("V2") else dtype
    return Member(path, name, shape, dtype, is_fortran, stream.tell())


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
        if begin < 0 or (member.nbytes != end - begin and entry["dtype"] in _SAFETENSORS):
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
