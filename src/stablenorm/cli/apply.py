"""`stablenorm apply`: the norm of the array in a file, however large, into another file."""

import argparse
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import stablenorm
from stablenorm.arrays import normalize_axes, normalized_shape
from stablenorm.cli import files, parts
from stablenorm.cli.files import Member, choose, list_members
from stablenorm.cli.parts import InputError
from stablenorm.formats import BFLOAT16, check_dtype
from stablenorm.functional import FUNCTIONS, layer_norm, rms_norm
from stablenorm.reference.partial import PARTIAL, merged, rounded
from stablenorm.scale.files import (
    DEPTH,
    NOTHING,
    Box,
    Finished,
    Journal,
    Target,
    box_lengths,
    boxes,
    count_rows,
    part_of,
    rename_whole,
    stream,
    write_whole,
)
from stablenorm.scale.sums import backward_parts, decided, exact_parts
from stablenorm.types import Array

# Memory of a block: x, or x, dy and dx, of (rows, n) each.
_Slot = dict[str, Array]
# Of dgamma and dbeta, those that are computed.
_Sums = dict[str, Array]
_NORMS: dict[str, Callable[..., Array]] = {"layer": layer_norm, "rms": rms_norm}

_PARAMETERS = {"gamma", "beta"}

_EXAMPLES = """\
examples:
  stablenorm apply x.npy --out y.npy
  stablenorm apply x.npy --gamma g.npy --beta b.npy --out y.npy
  stablenorm apply x.zarr --kind rms --gamma g.npy --out y.zarr
  stablenorm apply x.npy --gamma g.npy --out y.npy --resume   after an interrupt
  stablenorm apply x.npy --gamma g.npy --backward dy.npy --out dx.npy

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
# Bytes of all blocks in memory at once, and where some of it is Zarr, which takes two more copies of a
# chunk to pack and unpack it. Python takes 117 MB of the 256 with kernels that lie on the disk, and 200
# once it has compiled them: then 24 MiB took 257 MB, and of Zarr 272; 12 MiB of it 251 (2026-11-23).
_MOST, _MOST_OF_ZARR = 18 << 20, 12 << 20
# Elements of dgamma with --backward, at most: sums of several blocks are held, 32 bytes for each.
_WIDEST = 1 << 15
# Seconds between two records in the journal: as much is lost when the process is killed.
_PERIOD_S = 10.0


def add(commands: Any) -> None:
    """Add `apply` to the commands."""
    parser = parts.add_command(
        commands,
        run,
        "normalize the array in a file, however large, into another file",
        "Compute the layer norm, or RMS norm, of an array in a file, or its gradients, and write them "
        "to other files. All may be larger than memory.",
        _EXAMPLES,
    )
    about = "x: an .npy, .npz, .safetensors or .zarr file"
    parser.add_argument("file", type=Path, metavar="FILE", help=about)
    about = "where y, or dx, goes: an .npy or a new .zarr"
    parts.add_output(parser, "--out", (".npy", ".zarr"), about, required=True)
    for name in sorted(_PARAMETERS):
        about = f"an .npy file; default: {name} of FILE, if it has one"
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=about)
    about = "dy; compute dx, and of a gamma and beta dx.dgamma.npy and dx.dbeta.npy beside a dx.npy"
    parser.add_argument("--backward", type=Path, metavar="FILE", help=about)
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

    # Of x and dy, and of what is written: y, or dx, dgamma and dbeta.
    inputs: dict[str, Member]
    outputs: dict[str, Path]
    # Lengths of the axes that blocks are cut in, of a block, and of the others: n elements.
    lead: tuple[int, ...]
    lengths: tuple[int, ...]
    normalized: tuple[int, ...]
    # Bytes of all blocks in memory at once.
    room: int
    # What the functions are called with.
    keywords: dict[str, Any]
    kind: str


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm apply` is asked."""
    try:
        job = _checked(arguments)
        _compute(job, arguments.resume)
    except (TypeError, ValueError) as error:
        # What the package refuses is the user's input, said in the package's words.
        raise InputError(str(error)) from None
    x, norm = job.inputs["x"], "RMS norm" if job.kind == "rms" else "layer norm"
    norm = f"gradients of the {norm}" if "dy" in job.inputs else norm
    about = f": {norm} of {x.label}, {x.native} {x.shape}, n = {math.prod(job.normalized)}"
    parts.print_lines(about, bold=", ".join(path.name for path in job.outputs.values()))
    return 0


# ---- what is asked ----


def _checked(arguments: argparse.Namespace) -> _Job:
    """Return what is to be done, or raise: nothing has been written yet."""
    members = list_members(arguments.file)
    inputs = {"x": choose(members, arguments.file, arguments.member)}
    if path := arguments.backward:
        inputs["dy"] = choose(list_members(path), path, None, "dy")
    x = inputs["x"]
    check_dtype(x.label, np.empty(0, x.dtype))
    axes = normalize_axes(tuple(arguments.axis), len(x.shape))
    normalized = normalized_shape(x.shape, axes)
    for member in inputs.values():
        _check_streamed(member, x, axes)
    keywords = {
        "eps": arguments.eps,
        "gamma_offset": arguments.gamma_offset,
        "rounding": arguments.rounding,
    }
    if arguments.eps is None:
        keywords["eps"] = files.load_number(members["eps"]) if "eps" in members else 1e-5
    for name in sorted(_PARAMETERS):
        found = members.get(name)
        if path := getattr(arguments, name):
            found = choose(list_members(path), path, None, name)
        if found is not None:
            more = "; layer_norm in memory takes one for each sample"
            keywords[name] = files.load_beside(name, found, normalized, more)
    # The checks of the call itself, on no rows.
    of_no_rows = np.zeros((0,) * axes[0] + normalized, x.native)
    FUNCTIONS[arguments.kind][0](of_no_rows, **keywords, axis=axes)
    outputs = _outputs(arguments, keywords)
    if outputs["out"].suffix == ".zarr" and x.native == BFLOAT16.dtype:
        msg = f"--out must be an .npy file for bfloat16, which Zarr lacks, got {outputs['out']}"
        raise InputError(msg)
    if "dy" in inputs and math.prod(normalized) > _WIDEST:
        msg = (
            f"a row of x must have at most {_WIDEST} elements for --backward, got {normalized}; "
            "layer_norm_backward takes longer ones, of Dask arrays too"
        )
        raise InputError(msg)
    to_zarr = outputs["out"].suffix == ".zarr"
    some_zarr = to_zarr or any(member.chunks for member in inputs.values())
    room = _MOST_OF_ZARR if some_zarr else _MOST
    lead, lengths = _blocks(inputs, len(axes), room, to_zarr)
    return _Job(inputs, outputs, lead, lengths, normalized, room, keywords, arguments.kind)


def _check_streamed(member: Member, x: Member, axes: tuple[int, ...]) -> None:
    check_dtype(member.label, np.empty(0, member.dtype))
    if member.shape != x.shape:
        msg = f"{member.label} must have shape {x.shape}, that of x, got {member.shape}"
        raise InputError(msg)
    if not files.are_adjacent(member, axes):
        msg = (
            f"{member.label} must have its normalized axes last, in C order, to be streamed, got axis "
            f"{list(axes)} of {len(x.shape)}{', in Fortran order' * member.is_fortran}; save "
            "np.ascontiguousarray(np.moveaxis(x, axis, -1)), or call layer_norm(x, axis=axis)"
        )
        raise InputError(msg)


def _outputs(arguments: argparse.Namespace, keywords: dict[str, Any]) -> dict[str, Path]:
    """Return the files to write; they are not to be among those that are read."""
    out = arguments.out
    outputs = {"out": out}
    if arguments.backward:
        for name in sorted(_PARAMETERS & keywords.keys()):
            outputs[f"d{name}"] = out.with_name(f"{out.stem}.d{name}.npy")
    given = arguments.file, arguments.gamma, arguments.beta, arguments.backward
    found = [each.resolve() for each in given if each]
    for name, path in outputs.items():
        # Where it lies until it is whole, too.
        taken = [path.resolve(), part_of(path).resolve()]
        if not set(found).isdisjoint(taken):
            what = "--out" if name == "out" else name
            msg = f"{what} must be a file of its own, got {path}, which is read or written"
            raise InputError(msg)
        found += taken
    return outputs


def _blocks(
    inputs: dict[str, Member], normalized: int, room: int, to_zarr: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of the axes that blocks are cut in, and those of a block."""
    x = inputs["x"]
    # Where there are chunks, they say it: the first ones that there are.
    chunked = next((each for each in inputs.values() if each.chunks), None)
    split = len(x.shape) - normalized
    lead, n = x.shape[:split], math.prod(x.shape[split:])
    if chunked is None and not to_zarr:
        lead = (math.prod(lead),)
    chunks = chunked.chunks[:split] if chunked else (1,) * len(lead)
    sizes = [n * each.dtype.itemsize for each in inputs.values()]
    lengths = box_lengths(lead, chunks, max(1, _BLOCK // max(sizes)))
    # Of one array: with dy, a block has dx too.
    most = room // 3 if "dy" in inputs else room // 3 * 2
    held = [math.prod(each.chunks) * each.dtype.itemsize for each in inputs.values()]
    if (nbytes := max(math.prod(lengths) * max(sizes), *held)) > most:
        what = "the rows of a chunk" if chunked else "a row"
        msg = (
            f"{x.label} must have at most {most >> 20} MiB in {what} to be streamed, got "
            f"{nbytes >> 20} MiB; call layer_norm in memory, or on a Dask array"
        )
        raise InputError(msg)
    return lead, lengths


# ---- what is done ----


def _compute(job: _Job, resume: bool) -> None:
    """Write the result block by block, and rename it when it is whole."""
    out, total = job.outputs["out"], math.prod(job.lead)
    journal = Journal(out, _about(job))
    with ExitStack() as stack:
        readers = {
            name: stack.enter_context(files.opened(member, job.lead))
            for name, member in job.inputs.items()
        }
        target = stack.enter_context(closing(_target(job)))
        # From here on it is of this process alone, and so is the journal.
        finished = journal.read() if resume and target.is_begun else NOTHING
        if not finished.blocks:
            journal.remove()
        target.begin(fresh=not finished.blocks)
        progress = stack.enter_context(parts.progress_bar("normalizing"))
        passed = functools.partial(_passed, job, readers, _slots(job))
        recorded = time.monotonic()
        try:
            with closing(passed(target, finished.blocks)) as blocks:
                for box, found in blocks:
                    # All three or none, whenever an interrupt comes.
                    finished = _added(finished, box, found)
                    progress(finished.rows, total)
                    if time.monotonic() - recorded > _PERIOD_S:
                        target.sync()
                        journal.record(finished)
                        recorded = time.monotonic()
            _write_sums(job, finished.sums, functools.partial(passed, None, 0), progress)
            target.sync()
        except (KeyboardInterrupt, OSError) as error:
            # On a full disk, the last record stands.
            with suppress(OSError):
                target.sync()
                journal.record(finished)
            cure = f"{finished.rows} of {total} rows are finished, --resume goes on from there"
            if isinstance(error, OSError):
                msg = f"{error.strerror or error} ({error.filename or part_of(out)}); {cure}"
                raise InputError(msg) from None
            msg = f"interrupted: {cure}"
            raise KeyboardInterrupt(msg) from None
        except BaseException:
            # No cure of the file could make this result the right one.
            target.discard()
            journal.remove()
            raise
        rename_whole(out)
        journal.remove()


def _target(job: _Job) -> Target:
    """Open where the result goes."""
    out, x = job.outputs["out"], job.inputs["x"]
    chunks: tuple[int, ...] = ()
    if out.suffix == ".zarr":
        # If it is missing, one line says so.
        files.zarr_package()
        chunks = x.chunks or (*job.lengths, *job.normalized)
    # Of no memory.
    like = np.broadcast_to(np.zeros((), x.native), x.shape)
    return Target(out, job.lead, like, chunks)


def _passed(
    job: _Job,
    readers: dict[str, Callable[[Box, Array], None]],
    slots: list[_Slot],
    target: Target | None,
    start: int,
    undecided: _Sums | None = None,
) -> Generator[tuple[Box, _Sums]]:
    """Read, compute and, given a target, write the blocks from number `start` on."""

    def read(box: Box, slot: _Slot) -> None:
        for name, reader in readers.items():
            reader(box, slot[name][: count_rows(box)])

    def write(box: Box, slot: _Slot) -> None:
        # y is where x was: no more memory is read and written than has to be.
        if target is not None:
            target.write(box, slot.get("dx", slot["x"])[: count_rows(box)])

    blocks = itertools.islice(boxes(job.lead, job.lengths), start, None)
    return stream(blocks, slots, read, functools.partial(_computed, job, undecided or {}), write)


def _computed(job: _Job, undecided: _Sums, box: Box, slot: _Slot) -> _Sums:
    """Make y of a block, or dx and the sums; or, exactly, such sums as are undecided."""
    rows = {name: each[: count_rows(box)] for name, each in slot.items()}
    parameters = {
        name: job.keywords[name].reshape(-1) for name in _PARAMETERS & job.keywords.keys()
    }
    keywords = job.keywords | parameters
    if "dy" not in rows:
        _NORMS[job.kind](rows["x"], out=rows["x"], **keywords)
        return {}
    # Nobody needs y: dx overwrites it.
    _, cache = FUNCTIONS[job.kind][0](rows["x"], out=rows["dx"], **keywords)
    if undecided:
        columns = undecided.get("dgamma"), undecided.get("dbeta")
        found: Any = exact_parts(rows["dy"], cache, columns)
    else:
        found = backward_parts(rows["dy"], cache, dx=rows["dx"])[1:]
    both = zip(("dgamma", "dbeta"), found, strict=True)
    return {name: each for name, each in both if each is not None}


def _added(before: Finished, box: Box, found: _Sums) -> Finished:
    """Return what is finished with one block more."""
    sums = {
        name: merged(before.sums[name], each) if before.sums else each
        for name, each in found.items()
    }
    return Finished(before.blocks + 1, before.rows + count_rows(box), sums)


def _write_sums(
    job: _Job,
    sums: _Sums,
    again: Callable[[_Sums], Generator[tuple[Box, _Sums]]],
    progress: Callable[..., None],
) -> None:
    """Round and write dgamma and dbeta; `again` computes the exact sums of what is undecided."""
    values, undecided = {}, {}
    for name in job.outputs.keys() - {"out"}:
        parameter = job.keywords[name[1:]]
        # Without rows there is no sum.
        total = sums.get(name, np.zeros(parameter.size, PARTIAL))
        values[name], undecided[name] = rounded(total, parameter.dtype)
    if any(map(np.any, undecided.values())):
        # The sums of these columns, exactly: of all blocks, read once more.
        exact = NOTHING
        with closing(again(undecided)) as blocks:
            for box, found in blocks:
                exact = _added(exact, box, found)
                progress(exact.rows, math.prod(job.lead), "deciding")
        for name, each in exact.sums.items():
            values[name] = decided(values[name], undecided[name], each)
    for name, each in values.items():
        shaped = each.reshape(job.keywords[name[1:]].shape)
        write_whole(job.outputs[name], functools.partial(np.save, arr=shaped))


def _slots(job: _Job) -> list[_Slot]:
    """Return the memory of the blocks that are on their way at once."""
    shape, x = (math.prod(job.lengths), math.prod(job.normalized)), job.inputs["x"]
    dtypes = {name: member.native for name, member in job.inputs.items()}
    if "dy" in dtypes:
        dtypes["dx"] = x.native
    nbytes = math.prod(shape) * sum(dtype.itemsize for dtype in dtypes.values())
    return [
        {name: np.empty(shape, dtype) for name, dtype in dtypes.items()}
        for _ in range(max(1, min(DEPTH, job.room // nbytes)))
    ]


def _about(job: _Job) -> dict[str, Any]:
    """Return all that the result depends on: what --resume compares."""
    about: dict[str, Any] = {"version of stablenorm": stablenorm.__version__}
    for name, member in job.inputs.items():
        held = [member.path]
        if member.store == "zarr":
            held = [each for each in member.path.rglob("*") if each.is_file()]
        stats = [each.stat() for each in held]
        # The time of the last change, not that of the last writing: nobody can set it back.
        stamp = sum(each.st_size for each in stats), max(each.st_ctime_ns for each in stats)
        about[name] = [len(held), *stamp, *map(str, member[1:])]
    keywords = dict(job.keywords)
    for name in sorted(_PARAMETERS):
        if (array := keywords.pop(name, None)) is not None:
            about[name] = [str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest()]
    return about | {
        "options": [job.kind, job.normalized, job.lengths, sorted(job.inputs), keywords]
    }
