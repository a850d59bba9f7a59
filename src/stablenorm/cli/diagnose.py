"""`stablenorm diagnose`: what a layer norm would lose on the data in a file."""

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm.arrays import normalize_axes, normalized_shape
from stablenorm.cli import parts
from stablenorm.cli.files import BUNDLED, choose, list_members, load_number, read_rows
from stablenorm.diagnosis import diagnose_blocks
from stablenorm.diagnosis.results import lines_of
from stablenorm.formats import check_dtype, parse
from stablenorm.types import Array

EXAMPLES = """\
examples:
  stablenorm diagnose                         the bundled data
  stablenorm diagnose a.npy                   all axes but the last are rows
  stablenorm diagnose a.npy --dtype bfloat16  as if it were of that dtype
  stablenorm diagnose mine.npz --member hidden --top 3
  stablenorm diagnose a.npy --kind rms        an RMS norm
  stablenorm diagnose model.safetensors       lists the tensors
  stablenorm diagnose a.npy --json found.json --plot found.png

Files are read in blocks: a file larger than memory takes no more memory than a small one. Only an
array in Fortran order, or one whose normalized axes are not its last ones, has to fit in memory.

how to read it:
  bits of y lost    log2 of the RMS error of y over a row, in rounding errors;
                    0: as good as correctly rounded; all: nothing of y is left
  condition number  how many times larger a relative error of x is in y, or dx

exit status: 0 done; 2 the file cannot be read, or it holds several arrays and --member is needed.
"""


SUMMARY = "say what a layer norm would lose on the data in a file, and on which rows"
ABOUT = (
    "Read the array in a file once. Say how well conditioned its layer norm is, how many bits "
    "of y each common method loses, and which rows are the worst."
)
OPTIONS = {
    "file": "an .npy, .npz or .safetensors file; default: the bundled data",
    "--kind": "of the norm; default: layer",
    "--member": "which array of an .npz or .safetensors file; default: x, or the only one",
    "--axis": "normalized; default: -1",
    "--eps": "default: eps of the .npz file, if it has one, or 1e-5",
    "--dtype": "judge the data as; default: its own",
    "--top": "worst rows to describe; default: 10",
    "--json": "write all figures to this file",
    "--plot": "draw the losses into this file",
}


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm diagnose` is asked."""
    path = arguments.file or BUNDLED
    members = list_members(path)
    member = choose(members, path, arguments.member)
    eps = arguments.eps
    if eps is None:
        eps = load_number(members["eps"]) if "eps" in members else 1e-5
    try:
        check_dtype(member.label, np.empty(0, member.dtype))
        axes = normalize_axes(tuple(arguments.axis), len(member.shape))
        rows = math.prod(member.shape) // math.prod(normalized_shape(member.shape, axes))
    except (TypeError, ValueError) as error:
        raise parts.InputError(str(error)) from None
    with parts.progress_bar("reading") as progress:
        diagnosis = diagnose_blocks(
            _counted(read_rows(member, axes), rows, progress),
            shape=member.shape,
            dtype=parse(arguments.dtype or member.dtype.name),
            axis=axes,
            eps=eps,
            top=arguments.top,
            kind=arguments.kind,
        )
    parts.write_whole(arguments.json, lambda file: file.write(diagnosis.to_json().encode()))
    parts.write_plot(arguments.plot, diagnosis.plot)
    first, *others = lines_of(diagnosis, parts.columns())
    parts.print_lines(f"{member.label}: {member.dtype}, axis {list(diagnosis.axis)}")
    parts.print_lines("", *others, bold=first)
    return 0


def _counted(blocks: Iterator[Array], rows: int, progress: Any) -> Iterator[Array]:
    """Tell `progress` how many rows are done when the next block is asked for."""
    done = 0
    for block in blocks:
        yield block
        done += len(block)
        progress(done, rows)
