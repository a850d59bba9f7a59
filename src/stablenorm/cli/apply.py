"""`stablenorm apply`: the norm of the array in a file, however large, into another file."""

import argparse
import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import stablenorm
from stablenorm.arrays import normalize_axes, normalized_shape
from stablenorm.cli import parts
from stablenorm.cli.files import (
    Member,
    are_adjacent,
    choose,
    list_members,
    load,
    load_number,
    opened,
    zarr_package,
)
from stablenorm.cli.parts import InputError
from stablenorm.formats import BFLOAT16, check_dtype
from stablenorm.functional import layer_norm, rms_norm
from stablenorm.scale.files import (
    DEPTH,
    Box,
    Journal,
    NpyTarget,
    ZarrTarget,
    box_lengths,
    boxes,
    count_rows,
    part_of,
    rename_whole,
    stream,
)
from stablenorm.types import Array

_NORMS: dict[str, Callable[..., Any]] = {"layer": layer_norm, "rms": rms_norm}

_EXAMPLES = """\
examples:
  stablenorm apply x.npy --out y.npy
  stablenorm apply x.npy --gamma g.npy --beta b.npy --out y.npy
  stablenorm apply x.zarr --kind rms --gamma g.npy --out y.zarr
  stablenorm apply x.npy --gamma g.npy --out y.npy --resume   after an interrupt

Files are read, normalized and written in blocks, with all cores: a file larger than memory takes no
more memory than a small one, at most 256 MB. Axes that are normalized have to be the last ones.

The result is written to y.npy.part, and renamed when it is whole. y.npy.part.journal says how much of
it is finished. With --resume the same command goes on from there, if there is such a journal; a changed
file or option is noticed. The bytes are those of a run that was never interrupted.

exit status: 0 done; 2 a file cannot be read or written, one line says why; 130 interrupted.
"""

# Bytes of a block: of rows that few cores hold in their caches from reading to writing, and enough
# for a call to cost nothing.
_BLOCK = 1 << 21
# Bytes of all blocks in memory at once, where Python with the kernels takes 170 MB of the 256.
_MOST = 40 << 20
# Bytes of a box of Zarr, or of a row, at most: several copies are made to pack and unpack a chunk.
_LARGEST = 1 << 24
# Seconds between two records in the journal: as much is lost when the process is killed.
_PERIOD_S = 10.0


def add(commands: Any) -> None:
    """Add `apply` to the commands."""
    parser = parts.add_command(
        commands,
        run,
        "normalize the array in a file, however large, into another file",
        "Compute the layer norm, or RMS norm, of an array in a file, and write it to another file. The "
        "files may be larger than memory.",
        _EXAMPLES,
    )
    about = "x: an .npy, .npz, .safetensors or .zarr file"
    parser.add_argument("file", type=Path, metavar="FILE", help=about)
    about = "where y goes, a new .zarr or an .npy"
    parts.add_output(parser, "--out", (".npy", ".zarr"), about, required=True)
    for name in ("gamma", "beta"):
        about = f"an .npy file; default: {name} of FILE, if it has one"
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=about)
    parts.add_member(parser)
    parts.add_kind(parser)
    parts.add_axis(parser)
    parser.add_argument(
        "--eps", type=parts.eps, help="default: eps of FILE, if it has one, or 1e-5"
    )
    about = "added to gamma, such as 1 for a gamma stored less one; default: 0"
    parser.add_argument("--gamma-offset", type=float, default=0.0, metavar="G", help=about)
    about = "nearest: every element correctly rounded; default: fast"
    parser.add_argument("--rounding", choices=parts.ROUNDINGS, default="fast", help=about)
    about = "go on with a run of this command that was interrupted, if there is one"
    parser.add_argument("--resume", action="store_true", help=about)


class _Job(NamedTuple):
    """What is to be computed, checked."""

    out: Path
    inputs: dict[str, Member]
    axes: tuple[int, ...]
    # Lengths of the other axes, in which blocks are cut, and of a block.
    lead: tuple[int, ...]
    lengths: tuple[int, ...]
    # As flat as the rows.
    parameters: dict[str, Array | None]
    options: dict[str, Any]
    kind: str

    @property
    def n(self) -> int:
        """Return the elements of a row."""
        x = self.inputs["x"]
        return math.prod(x.shape[axis] for axis in self.axes)


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm apply` is asked."""
    try:
        job = _checked(arguments)
        _compute(job, arguments.resume)
    except (TypeError, ValueError) as error:
        # What the package refuses is the user's input, said in the package's words.
        raise InputError(str(error)) from None
    x, kind = job.inputs["x"], "RMS norm" if job.kind == "rms" else "layer norm"
    about = f": {kind} of {x.label}, {x.native} {x.shape}, axis {list(job.axes)}"
    parts.print_lines(about, bold=arguments.out.name)
    return 0


def _checked(arguments: argparse.Namespace) -> _Job:
    """Return what is to be done, or raise: nothing has been written yet."""
    out = arguments.out
    given = [arguments.file, arguments.gamma, arguments.beta]
    if any(each and each.exists() and out.exists() and out.samefile(each) for each in given):
        msg = f"--out must not be a file that is read, got {out}"
        raise InputError(msg)
    members = list_members(arguments.file)
    x = choose(members, arguments.file, arguments.member)
    check_dtype(x.label, np.empty(0, x.dtype))
    axes = normalize_axes(tuple(arguments.axis), len(x.shape))
    shape = normalized_shape(x.shape, axes)
    if not are_adjacent(x, axes):
        msg = (
            f"{x.label} must have its normalized axes last, in C order, to be streamed, got axis "
            f"{list(axes)} of {len(x.shape)}{', in Fortran order' * x.is_fortran}; save "
            "np.ascontiguousarray(np.moveaxis(x, axis, -1)), or call layer_norm(x, axis=axis)"
        )
        raise InputError(msg)
    parameters = {name: _parameter(name, arguments, members) for name in ("gamma", "beta")}
    options = {
        "eps": arguments.eps,
        "gamma_offset": arguments.gamma_offset,
        "rounding": arguments.rounding,
    }
    if options["eps"] is None:
        options["eps"] = load_number(members["eps"]) if "eps" in members else 1e-5
    # The checks of the call itself, on no rows.
    of_no_rows = np.zeros((0,) * axes[0] + shape, x.native)
    _NORMS[arguments.kind](of_no_rows, **parameters, **options, axis=axes)
    if out.suffix == ".zarr" and x.native == BFLOAT16.dtype:
        msg = f"--out must be an .npy file for bfloat16, which Zarr does not have, got {out}"
        raise InputError(msg)
    lead, lengths = _blocks(x, len(axes), out.suffix == ".zarr")
    flat = {name: None if p is None else p.reshape(-1) for name, p in parameters.items()}
    return _Job(out, {"x": x}, axes, lead, lengths, flat, options, arguments.kind)


def _parameter(
    name: str, arguments: argparse.Namespace, members: dict[str, Member]
) -> Array | None:
    """Return gamma or beta, of the file that was named, or of that of x."""
    if path := getattr(arguments, name):
        return load(choose(list_members(path), path, None))
    return load(members[name]) if name in members else None


def _blocks(x: Member, normalized: int, to_zarr: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of the axes that blocks are cut in, and those of a block."""
    lead = x.shape[: len(x.shape) - normalized] if to_zarr else x.lead(normalized)
    row_bytes = math.prod(x.shape[len(x.shape) - normalized :]) * x.dtype.itemsize
    chunks = x.chunks[: len(lead)] or (1,) * len(lead)
    lengths = box_lengths(lead, chunks, max(1, _BLOCK // row_bytes))
    if (nbytes := math.prod(lengths) * row_bytes) > _LARGEST:
        whole = math.prod(min(pair) for pair in zip(lead, chunks, strict=True))
        what = "whole rows of a chunk" if whole > 1 else "a row"
        msg = (
            f"{x.label} must take at most {_LARGEST >> 20} MiB for {what} to be streamed, got "
            f"{nbytes >> 20} MiB; call layer_norm in memory, or on a Dask array"
        )
        raise InputError(msg)
    return lead, lengths


def _compute(job: _Job, resume: bool) -> None:
    """Write the result block by block, and rename it when it is whole."""
    everything = list(boxes(job.lead, job.lengths))
    journal = Journal(job.out, _about(job))
    with contextlib.ExitStack() as stack:
        readers = {
            name: stack.enter_context(opened(member, job.lead))
            for name, member in job.inputs.items()
        }
        blocks = journal.read() if resume else 0
        if not blocks:
            journal.remove()
        target = stack.enter_context(contextlib.closing(_target(job, fresh=not blocks)))
        progress = stack.enter_context(parts.progress_bar("normalizing"))

        def read(box: Box, slot: dict[str, Array]) -> None:
            for name, reader in readers.items():
                reader(box, slot[name][: count_rows(box)])

        def write(box: Box, slot: dict[str, Array]) -> None:
            target.write(box, slot["out"][: count_rows(box)])

        def record() -> None:
            target.sync()
            journal.record(blocks)

        done, recorded = sum(map(count_rows, everything[:blocks])), time.monotonic()
        found = stream(everything[blocks:], _slots(job), read, _operation(job), write)
        try:
            with contextlib.closing(found):
                for box, _ in found:
                    blocks, done = blocks + 1, done + count_rows(box)
                    progress(done, math.prod(job.lead))
                    if time.monotonic() - recorded > _PERIOD_S:
                        record()
                        recorded = time.monotonic()
        except (KeyboardInterrupt, OSError) as error:
            # On a full disk, the last record stands.
            with contextlib.suppress(OSError):
                record()
            cure = f"{blocks} of {len(everything)} blocks are finished, --resume goes on from there"
            if isinstance(error, OSError):
                msg = f"{error.strerror or error} ({error.filename or part_of(job.out)}); {cure}"
                raise InputError(msg) from None
            msg = f"interrupted: {cure}"
            raise KeyboardInterrupt(msg) from None
        except BaseException:
            # No cure of the file could make this result the right one.
            target.discard()
            journal.remove()
            raise
        target.sync()
        rename_whole(job.out)
        journal.remove()


def _operation(job: _Job) -> Callable[[Box, dict[str, Array]], None]:
    """Return what is computed of a block."""
    call = functools.partial(_NORMS[job.kind], **job.parameters, **job.options)

    def forward(box: Box, slot: dict[str, Array]) -> None:
        rows = slot["x"][: count_rows(box)]
        # In its place: no more memory is read and written than has to be.
        call(rows, out=rows)

    return forward


def _slots(job: _Job) -> list[dict[str, Array]]:
    """Return the memory of the blocks that are on their way at once."""
    shape, x = (math.prod(job.lengths), job.n), job.inputs["x"]
    count = max(1, min(DEPTH, _MOST // (math.prod(shape) * x.dtype.itemsize)))
    slots = []
    for _ in range(count):
        slot = {name: np.empty(shape, member.native) for name, member in job.inputs.items()}
        slots.append(slot | {"out": slot["x"]})
    return slots


def _target(job: _Job, fresh: bool) -> NpyTarget | ZarrTarget:
    """Open what the result is written to."""
    x = job.inputs["x"]
    # Of no memory: its shape and dtype alone count.
    like = np.broadcast_to(np.zeros((), x.native), x.shape)
    if job.out.suffix == ".npy":
        return NpyTarget(job.out, job.lead, like, fresh)
    # If it is missing, one line says so.
    zarr_package()
    chunks = x.chunks or (*job.lengths, *x.shape[len(job.lead) :])
    return ZarrTarget(job.out, like, chunks, fresh)


def _about(job: _Job) -> dict[str, Any]:
    """Return all that the result depends on: what --resume compares."""
    about: dict[str, Any] = {"version of stablenorm": stablenorm.__version__}
    for name, member in job.inputs.items():
        files = [member.path]
        if member.store == "zarr":
            files = [each for each in member.path.rglob("*") if each.is_file()]
        stats = [each.stat() for each in files]
        stamp = sum(each.st_size for each in stats), max(each.st_mtime_ns for each in stats)
        about[name] = [len(files), *stamp, *map(str, member[1:])]
    for name, array in job.parameters.items():
        about[name] = None
        if array is not None:
            about[name] = [str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest()]
    return about | {"options": [job.kind, job.axes, job.lengths, job.options]}
