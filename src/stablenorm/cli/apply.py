"""`stablenorm apply`: the norm of the array in a file, however large, into another file."""

import argparse
import functools
import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.api import FUNCTIONS, layer_norm, rms_norm
from stablenorm.arrays import normalize_axes, normalized_shape
from stablenorm.cli import files, parts
from stablenorm.cli.files import Member, choose, list_members
from stablenorm.cli.parts import InputError
from stablenorm.files import DEPTH, same_file, stream, whole_file
from stablenorm.formats import check_dtype
from stablenorm.functional.row_parts import backward_parts
from stablenorm.reference.partial import PARTIAL, merged, rounded
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
  stablenorm apply model.safetensors --member hidden --kind rms --out y.npy
  stablenorm apply x.npy --gamma g.npy --backward dy.npy --out dx.npy

Files are read, normalized and written in blocks, with all cores: a file larger than memory takes no
more memory than a small one, at most 256 MB. Axes that are normalized have to be the last ones.

The result is written beside y.npy, under another name, and takes its own when it is whole: killed at
any moment, y.npy is the old file or the whole new one.

exit status: 0 done; 2 a file cannot be read or written, one line says why; 130 interrupted.
"""

# Bytes of a block: of rows that few cores hold in their caches from reading to writing, and enough
# for a call to cost nothing.
_BLOCK = 1 << 21
# Bytes of all blocks in memory at once. Python takes 117 MB of the 256 with kernels that lie on the
# disk, and 200 once it has compiled them: then 24 MiB took 257 MB (2026-11-23).
_MOST = 18 << 20
# Elements of dgamma with --backward, at most: sums of several blocks are held, 32 bytes for each.
_WIDEST = 1 << 15


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
    about = "x: an .npy, .npz or .safetensors file"
    parser.add_argument("file", type=Path, metavar="FILE", help=about)
    parts.add_output(parser, "--out", (".npy",), "where y, or dx, goes", required=True)
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
    about = "nearest: every element of y correctly rounded; default: fast"
    parser.add_argument("--rounding", choices=parts.ROUNDINGS, default="fast", help=about)


class _Job(NamedTuple):
    """What is to be computed, checked."""

    # Of x and dy, and of what is written: y, or dx, dgamma and dbeta.
    inputs: dict[str, Member]
    outputs: dict[str, Path]
    rows: int
    normalized: tuple[int, ...]
    # What the functions are called with.
    keywords: dict[str, Any]
    kind: str


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm apply` is asked."""
    try:
        job = _checked(arguments)
        _compute(job)
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
        if arguments.rounding != "fast":
            msg = (
                "--backward must be in the default rounding, got --rounding nearest; call "
                "layer_norm_backward in memory, or on a Dask array"
            )
            raise InputError(msg)
    x = inputs["x"]
    check_dtype(x.label, np.empty(0, x.dtype))
    axes = normalize_axes(tuple(arguments.axis), len(x.shape))
    normalized = normalized_shape(x.shape, axes)
    for member in inputs.values():
        _check_streamed(member, x, axes)
    keywords = _keywords(arguments, members, normalized)
    # The checks of the call itself, on no rows.
    of_no_rows = np.zeros((0,) * axes[0] + normalized, x.native)
    FUNCTIONS[arguments.kind][0](of_no_rows, **keywords, axis=axes)
    n, rows = math.prod(normalized), math.prod(x.shape[: axes[0]])
    _check_size(x, n, sum(each.dtype.itemsize for each in inputs.values()), "dy" in inputs)
    outputs = _outputs(arguments, keywords)
    return _Job(inputs, outputs, rows, normalized, keywords, arguments.kind)


def _keywords(
    arguments: argparse.Namespace, members: dict[str, Member], normalized: tuple[int, ...]
) -> dict[str, Any]:
    """Return what the norm is called with: options, and gamma, beta and eps of files."""
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
    return keywords


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


def _check_size(x: Member, n: int, itemsize: int, is_backward: bool) -> None:
    """Raise unless two rows of all that is held fit into the memory there is for blocks."""
    itemsize += x.dtype.itemsize * is_backward
    if 2 * n * itemsize > _MOST:
        msg = (
            f"a row of {x.label} must have at most {_MOST // (2 * itemsize)} elements to be streamed, "
            f"got {n}; call layer_norm in memory, or on a Dask array"
        )
        raise InputError(msg)
    if is_backward and n > _WIDEST:
        msg = (
            f"a row of x must have at most {_WIDEST} elements for --backward, got {n}; "
            "layer_norm_backward takes longer ones, of Dask arrays too"
        )
        raise InputError(msg)


def _outputs(arguments: argparse.Namespace, keywords: dict[str, Any]) -> dict[str, Path]:
    """Return the files to write; none of them is among those that are read, by whatever name."""
    out = arguments.out
    outputs = {"out": out}
    if arguments.backward:
        for name in sorted(_PARAMETERS & keywords.keys()):
            outputs[f"d{name}"] = out.with_name(f"{out.stem}.d{name}.npy")
    given = arguments.file, arguments.gamma, arguments.beta, arguments.backward
    for name, path in outputs.items():
        if any(each is not None and same_file(each, path) for each in given):
            what = "--out" if name == "out" else name
            msg = f"{what} must be a file of its own, got {path}, which is read"
            raise InputError(msg)
        if path.is_dir():
            msg = f"{name} must be a new name, got the directory {path}; remove it first"
            raise InputError(msg)
    return outputs


# ---- what is done ----


def _compute(job: _Job) -> None:
    """Write the results block by block; each has its name when it is whole."""
    x, total, sums = job.inputs["x"], job.rows, dict[str, Array]()
    header = {
        "descr": np.lib.format.dtype_to_descr(x.native),
        "fortran_order": False,
        "shape": x.shape,
    }
    with ExitStack() as stack:
        file = stack.enter_context(whole_file(job.outputs["out"], x.nbytes))
        np.lib.format.write_array_header_1_0(file, header)
        readers = {
            name: stack.enter_context(files.opened(member)) for name, member in job.inputs.items()
        }

        def read(rows: slice, slot: _Slot) -> None:
            for name, reader in readers.items():
                reader(rows.start, slot[name][: rows.stop - rows.start])

        def write(rows: slice, slot: _Slot) -> None:
            # y is where x was: no more memory is read and written than has to be.
            block = slot.get("dx", slot["x"])[: rows.stop - rows.start]
            file.write(block.view(np.uint8).reshape(-1).data)

        progress = stack.enter_context(parts.progress_bar("normalizing"))
        slots, step = _slots(job)
        blocks = (slice(i, min(i + step, total)) for i in range(0, total, step))
        computed = functools.partial(_computed, job)
        with closing(stream(blocks, slots, read, computed, write)) as done:
            for rows, found in done:
                for name, each in found.items():
                    sums[name] = merged(sums[name], each) if name in sums else each
                progress(rows.stop, total)
        for name in job.outputs.keys() - {"out"}:
            parameter = job.keywords[name[1:]]
            # Without rows there is no sum.
            found = sums.get(name, np.zeros(parameter.size, PARTIAL))
            result = rounded(found, parameter.dtype)[0].reshape(parameter.shape)
            np.save(stack.enter_context(whole_file(job.outputs[name])), result)


def _computed(job: _Job, block: slice, slot: _Slot) -> _Sums:
    """Make y of a block, or dx and the sums."""
    rows = {name: each[: block.stop - block.start] for name, each in slot.items()}
    parameters = {
        name: job.keywords[name].reshape(-1) for name in _PARAMETERS & job.keywords.keys()
    }
    keywords = job.keywords | parameters
    if "dy" not in rows:
        _NORMS[job.kind](rows["x"], out=rows["x"], **keywords)
        return {}
    # Nobody needs y: dx overwrites it.
    _, cache = FUNCTIONS[job.kind][0](rows["x"], out=rows["dx"], **keywords)
    both = zip(
        ("dgamma", "dbeta"), backward_parts(rows["dy"], cache, dx=rows["dx"])[1:], strict=True
    )
    return {name: each for name, each in both if each is not None}


def _slots(job: _Job) -> tuple[list[_Slot], int]:
    """Return the memory of the blocks that are on their way at once, and the rows of each."""
    n, dtypes = math.prod(job.normalized), {k: m.native for k, m in job.inputs.items()}
    if "dy" in dtypes:
        dtypes["dx"] = job.inputs["x"].native
    row_bytes = n * sum(dtype.itemsize for dtype in dtypes.values())
    largest = n * max(dtype.itemsize for dtype in dtypes.values())
    rows = max(1, min(_BLOCK // largest, _MOST // (2 * row_bytes)))
    count = max(1, min(DEPTH, _MOST // (rows * row_bytes)))
    return [
        {name: np.empty((rows, n), dtype) for name, dtype in dtypes.items()} for _ in range(count)
    ], rows
