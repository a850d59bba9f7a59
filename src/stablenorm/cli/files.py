"""Arrays in files: .npy, members of .npz, tensors of .safetensors."""

import io
import itertools
import json
import operator
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cli.parts import InputError, check_file, check_memory, print_lines, refusing
from stablenorm.formats import is_supported
from stablenorm.output import columns, printable, quantity, shape_text
from stablenorm.records import Array, bfloat16

# The types of .safetensors that a layer norm takes. The package of that name has no BF16 for NumPy.
_SAFETENSORS: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": bfloat16}
_KINDS = "an .npy, .npz or .safetensors file"


class Member(NamedTuple):
    """One array of a file: its name in messages, its header, and the function that reads it."""

    label: str
    # An array without memory, of the shape and dtype that the file promises.
    like: Array
    read: Callable[[], Array]

    def load(
        self, shape: tuple[int, ...] | None = None, arrays: int = 1, row: int = 0, column: int = 0
    ) -> Array:
        """
        Read the array, in the byte order of this machine; refuse another shape than `shape`.

        Refuse it as well if memory is too small for `arrays` of its size, `row` bytes a row, and `column`
        bytes an element of the last axis.
        """
        # Check the header before the data is read: a small archive can hold gigabytes of zeros.
        label, like, read = self
        if not is_supported(like.dtype):
            # An object and a longdouble may hold more digits than a float32.
            wide, is_number = 64 if like.dtype.char in "gO" else 32, like.dtype.kind in "biufO"
            cure = f"; save np.asarray(x, np.float{wide})" * is_number
            cure += "; save x.real and x.imag, each by itself" * (like.dtype.kind == "c")
            msg = f"{label} must be float16, bfloat16, float32 or float64, got {like.dtype}{cure}"
            raise InputError(msg)
        if shape not in (None, like.shape):
            wanted, came = shape_text(shape or ()), shape_text(like.shape)
            msg = f"{label} must have shape {wanted} to match x, got {came}"
            raise InputError(msg)
        if not like.shape:
            msg = f"{label} must have at least one axis, got a single number"
            raise InputError(msg)
        rows, n = like[..., :1].size, like.shape[-1]
        check_memory(arrays * like.nbytes + row * rows + column * n)
        with _whole(label):
            # NumPy saves bfloat16 as two raw bytes per element.
            array = read().view(like.dtype).reshape(like.shape)
            return array.astype(like.dtype.newbyteorder("="), copy=False)


def _whole(label: object) -> Any:
    # zipfile, zlib, json and NumPy raise a dozen kinds of errors for a damaged file.
    return refusing(Exception, prefix=f"{label} must be whole, got a damaged one: ")


def list_members(path: Path) -> dict[str, Member]:
    """Return all arrays of a file by name, whether or not a layer norm takes them; x for .npy."""
    check_file(path, _KINDS)
    with _whole(path), path.open("rb") as file:
        members = dict(_members(path, file))
    if not members:
        msg = f"{path} must hold an array, got none"
        raise InputError(msg)
    return members


def choose(members: dict[str, Member], path: Path, name: str | None) -> Member:
    """Return the member of that name; without one, x, or the only one."""
    if name is None and (len(members) == 1 or "x" in members):
        return members.get("x", next(iter(members.values())))
    if name in members:
        return members[name]
    table = [("member", "shape", "dtype", "size")]
    for name_of, (_, a, _) in members.items():
        size = quantity(a.nbytes, "B")
        table.append((printable(name_of, ""), shape_text(a.shape), str(a.dtype), size))
    print_lines(*columns(table))
    came = f", got {name}" * bool(name)
    msg = f"{path} holds {len(members)} arrays: choose one with --member NAME{came}"
    raise InputError(msg)


def read_eps(members: dict[str, Member], eps: float | None) -> float:
    """Return `eps` or, if it is None, eps of the file, 1e-5 if that has none."""
    if eps is not None or "eps" not in members:
        return 1e-5 if eps is None else eps
    label, like, read = members["eps"]
    if like.size != 1 or like.dtype.kind not in "fiu":
        msg = f"{label} must be one number, got {shape_text(like.shape)} of {like.dtype}"
        raise InputError(msg)
    with _whole(label):
        return float(read().reshape(()))


def _members(path: Path, file: Any) -> Iterator[tuple[str, Member]]:
    """Read the header of each array of a file."""
    begin = file.read(512)
    file.seek(0)
    if begin.startswith(np.lib.format.MAGIC_PREFIX):
        like = _header(file, path.stat().st_size)
        yield "x", Member(str(path), like, partial(np.load, path))
    elif begin.startswith((b"PK\3\4", b"PK\5\6")):
        yield from _entries(path, file)
    elif b"\0" in begin[:8] and begin[8:9] == b"{":
        yield from _tensors(path, file)
    else:
        # Text has no control character below the tab; the first bytes of .npy alone have none either.
        is_text = min(begin, default=0) >= 9 and begin[:1].isascii()
        other = "a text file" if is_text else f"one that begins with {begin[:8]!r}"
        msg = f"{path} must be {_KINDS}, got {other if begin else 'an empty file'}"
        raise InputError(msg)


def _entries(path: Path, file: Any) -> Iterator[tuple[str, Member]]:
    """Read the header of each entry of .npz."""
    with zipfile.ZipFile(file) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        if len(set(names)) < len(names):
            msg = "two entries have one name"
            raise ValueError(msg)
        for name, entry in zip(names, archive.namelist(), strict=True):
            label = f"{printable(name, '')} in {path}"
            if name != entry:
                with _whole(label), archive.open(entry) as stream:
                    like = _header(stream, archive.getinfo(entry).file_size)
                # By the name of the entry: NumPy takes "x" for "x.npy" only where no entry is "x".
                read = partial(lambda entry: np.load(path)[entry], entry)
                yield name, Member(label, like, read)


def _header(stream: Any, size: int) -> Array:
    """Read the header of .npy, which has `size` bytes in all."""
    # A damaged header may promise 4 GB, and an archive unpack them; Python's parser raises MemoryError for
    # 6000 nested signs. The four dtypes need less than 2000 bytes.
    start = io.BytesIO(stream.read(5000))
    is_first = np.lib.format.read_magic(start) == (1, 0)
    # Versions 2 and 3 differ only in the encoding of field names, and the four dtypes have no fields.
    form: Any = np.lib.format
    read = form.read_array_header_1_0 if is_first else form.read_array_header_2_0
    shape, _, dtype = read(start)
    dtype = bfloat16 if dtype == np.dtype("V2") else dtype
    return _promised(shape, dtype, size - start.tell())


def _promised(shape: tuple[int, ...], dtype: Any, held: int) -> Array:
    """Return an array without memory, as a header promises; raise if fewer bytes are held."""
    like = np.broadcast_to(np.empty((), dtype), shape)
    # Objects are pickled, in any number of bytes.
    if held < like.nbytes and not like.dtype.hasobject:
        msg = f"the data ends after {held} of {like.nbytes} bytes"
        raise ValueError(msg)
    return like


def _tensors(path: Path, file: Any) -> Iterator[tuple[str, Member]]:
    """Read the header of .safetensors: its length in eight bytes, then JSON."""
    length = int.from_bytes(file.read(8), "little")
    there = path.stat().st_size - 8 - length
    # The format allows a header of 100 MB.
    if there < 0 or length > 10**8:
        msg = f"its header of {length} bytes is not there"
        raise ValueError(msg)
    tensors = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    taken = sorted(tuple(entry["data_offsets"]) for entry in tensors.values())
    if any(later < end for (_, end), (later, _) in itertools.pairwise(taken)):
        msg = "the places of two tensors overlap"
        raise ValueError(msg)
    for name, entry in tensors.items():
        begin, end = map(operator.index, entry["data_offsets"])
        # Tensors of other types are listed, but refused by `Member.load`.
        dtype = _SAFETENSORS.get(entry["dtype"], "V1")
        shape = tuple(map(operator.index, entry["shape"]))
        like = _promised(shape, dtype, there - begin)
        if begin < 0 or (like.nbytes != end - begin and dtype != "V1"):
            msg = f"the place of {printable(name, '')} does not fit its shape"
            raise ValueError(msg)
        read = partial(np.fromfile, path, dtype, like.size, offset=8 + length + begin)
        yield name, Member(f"{printable(name, '')} in {path}", like, read)
