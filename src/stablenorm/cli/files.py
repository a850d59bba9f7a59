"""Arrays in files: .npy, members of .npz, tensors of .safetensors."""

import contextlib
import itertools
import json
import math
import operator
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cli import parts
from stablenorm.cli.parts import InputError
from stablenorm.formats import check_dtype
from stablenorm.text import Table, printable, quantity, shape_text
from stablenorm.types import Array, bfloat16

# The bundled data: the input of a layer norm of a real model.
BUNDLED = Path(__file__).parent.parent / "data" / "minilm_layer0_output.npz"
# The types of .safetensors that a layer norm takes. The package of that name has no BF16 for NumPy.
_SAFETENSORS: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": bfloat16}
_KINDS = "an .npy, .npz or .safetensors file"


class Member(NamedTuple):
    """One array of a file: what its header says, and the function that reads it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Array]

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{printable(self.name, '')} in {self.path}" if self.name else str(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def load(self, wanted: tuple[int, ...] = ()) -> Array:
        """Read all of it, in the byte order of this machine; refuse one of another size than `wanted`."""
        # Looked at before it is read: a small archive can hold gigabytes of zeros.
        check_dtype(self.label, np.empty(0, self.dtype))
        if wanted and math.prod(wanted) != math.prod(self.shape):
            came = shape_text(self.shape)
            msg = f"{self.label} must have shape {shape_text(wanted)} to match x, got {came}"
            raise InputError(msg)
        parts.check_memory(f"{self.label} must fit in memory", self.nbytes, "save fewer rows")
        with _whole(self.label):
            array = self.read().reshape(self.shape)
            # NumPy saves bfloat16 as two raw bytes per element.
            array = array.view(bfloat16) if self.dtype == bfloat16 else array
            return array.astype(self.dtype.newbyteorder("="), copy=False)


def list_members(path: Path) -> dict[str, Member]:
    """Return the arrays of a file by name: those that a layer norm takes, and others."""
    if not path.is_file():
        msg = f"FILE must be {_KINDS}, got {path}, {parts.what_is(path)}"
        raise InputError(msg)
    with _whole(path), path.open("rb") as file:
        members = {one.name: one for one in _members(path, file)}
        for one in members.values():
            if min(one.shape, default=0) < 0 or one.nbytes > sys.maxsize:
                msg = f"shape {shape_text(one.shape)}"
                raise ValueError(msg)
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
    rows = [
        (printable(m.name, ""), shape_text(m.shape), str(m.dtype), quantity(m.nbytes, "B"))
        for m in members.values()
    ]
    parts.print_table(Table("Arrays", ("member", "shape", "dtype", "size"), rows))
    given = f", got {name}" if name else ""
    msg = f"{path} holds {len(members)} arrays: choose one with --member NAME{given}"
    raise InputError(msg)


def read_eps(members: dict[str, Member], given: float | None) -> float:
    """Return the eps that is given or, without it, that of the file; 1e-5 if it has none."""
    if given is not None or "eps" not in members:
        return 1e-5 if given is None else given
    eps = members["eps"]
    if math.prod(eps.shape) != 1 or eps.dtype.kind not in "fiu":
        msg = f"{eps.label} must be one number, got {shape_text(eps.shape)} of {eps.dtype}"
        raise InputError(msg)
    with _whole(eps.label):
        return float(eps.read().reshape(()))


# ---- headers ----


def _members(path: Path, file: Any) -> Iterator[Member]:
    """Read the header of each array of a file."""
    begin = file.read(8)
    file.seek(0)
    if begin.startswith(np.lib.format.MAGIC_PREFIX):
        yield _header(path, "", file)
    elif begin.startswith((b"PK\3\4", b"PK\5\6")):
        with zipfile.ZipFile(file) as archive:
            for entry in archive.namelist():
                if entry.endswith(".npy"):
                    with archive.open(entry) as stream:
                        yield _header(path, entry[:-4], stream)
    else:
        yield from _tensors(path, file)


def _header(path: Path, name: str, stream: Any) -> Member:
    """Read the header of .npy."""
    version = np.lib.format.read_magic(stream)
    # Versions 2 and 3 differ in the encoding of field names, which a layer norm has none of.
    read: Any = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape, _, dtype = read(stream)
    dtype = bfloat16 if dtype == np.dtype("V2") else dtype
    return Member(path, name, shape, dtype, lambda: np.load(path)[name or ...])


def _tensors(path: Path, file: Any) -> Iterator[Member]:
    """Read the header of .safetensors: its length in eight bytes, then JSON."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= path.stat().st_size - 8:
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
        # Others are listed, and refused if they are asked for.
        dtype = np.dtype(_SAFETENSORS.get(entry["dtype"], "V1"))
        read = partial(np.fromfile, path, dtype, math.prod(shape), offset=8 + length + begin)
        member = Member(path, name, shape, dtype, read)
        if begin < 0 or (member.nbytes != end - begin and dtype != "V1"):
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
