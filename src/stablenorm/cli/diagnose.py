"""`stablenorm diagnose`: what a layer norm would lose on the data in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from stablenorm.arrays import normalize_axes, normalized_shape
from stablenorm.cli.files import InputError, bundled_file
from stablenorm.cli.parts import (
    DTYPES,
    Help,
    add_outputs,
    check_outputs,
    progress_bar,
    write_json,
    write_plot,
)
from stablenorm.cli.stream import (
    Member,
    check_member,
    list_members,
    open_rows,
    read_small,
)
from stablenorm.cli.tables import print_table
from stablenorm.diagnosis import Diagnosis, diagnose_blocks
from stablenorm.diagnosis.report import lines_of
from stablenorm.formats import parse
from stablenorm.report import Table, shape_text
from stablenorm.types import check_count, check_eps

_EXAMPLES = """\
examples:
  stablenorm diagnose                       the bundled data: input of a layer norm
  stablenorm diagnose a.npy                 all axes but the last are rows
  stablenorm diagnose a.npy --dtype bfloat16    as if it were of that dtype
  stablenorm diagnose mine.npz --member hidden --top 3
  stablenorm diagnose model.safetensors     lists the tensors
  stablenorm diagnose a.npy --json found.json --plot found.png

Files are read in blocks: a file larger than memory takes no more memory than a small one. Only an
array in Fortran order, or one whose normalized axes are not its last ones, has to fit in memory.

how to read it:
  bits of y lost    log2 of the RMS error of y over a row, in rounding errors of the dtype. \
0: as good as correctly rounded. All of them: nothing of y is left.
  condition number  how many times larger a relative error of x is in y, or in dx

exit status: 0 done; 2 the file cannot be read, or it holds several arrays and --member is needed.
"""


def add(commands: Any) -> None:
    """Add `diagnose` to the commands."""
    parser = commands.add_parser(
        "diagnose",
        help="say what a layer norm would lose on the data in a file, and on which rows",
        description=(
            "Read the array in a file once. Say how well conditioned its layer norm is, how many "
            "bits of y each common method loses, and which rows are the worst."
        ),
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.set_defaults(job=run)
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="an .npy, .npz or .safetensors file; default: the bundled data",
    )
    parser.add_argument(
        "--member",
        metavar="NAME",
        help="which array of an .npz or .safetensors file; default: x, or the only one",
    )
    parser.add_argument(
        "--axis", nargs="+", type=int, default=[-1], metavar="K", help="normalized; default: -1"
    )
    parser.add_argument(
        "--eps", type=float, help="default: eps of the .npz file, if it has one, or 1e-5"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="judge the data as; default: its own")
    parser.add_argument(
        "--top", type=int, default=10, metavar="K", help="worst rows to describe; default: 10"
    )
    add_outputs(parser, plot="draw the losses")


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm diagnose` is asked."""
    check_outputs(arguments)
    if arguments.file is not None:
        return _run(arguments, arguments.file)
    with bundled_file() as bundled:
        return _run(arguments, bundled)


def _run(arguments: argparse.Namespace, path: Path) -> int:
    members = list_members(path)
    member = _choose(members, arguments.member)
    if member is None:
        _print_members(members)
        msg = f"{path} holds {len(members)} arrays: choose one with --member NAME"
        raise InputError(msg)
    check_member(member)
    diagnosis = _diagnose(arguments, member)
    write_json(arguments.json, diagnosis.to_json().encode())
    write_plot(arguments.plot, lambda file, kind: diagnosis.plot(file, format=kind))
    _print_diagnosis(member, diagnosis)
    return 0


def _choose(members: list[Member], name: str | None) -> Member | None:
    """Return the member of that name; without one, x, or the only one, or None."""
    named = {member.name: member for member in members}
    if name is None:
        return members[0] if len(members) == 1 else named.get("x")
    if name not in named:
        held = ", ".join(list(named)[:8]) if members[0].name else "one array, without a name"
        more = f" and {len(named) - 8} more" if len(named) > 8 else ""
        msg = f"--member must name an array of {members[0].path}, got {name}; it holds {held}{more}"
        raise InputError(msg)
    return named[name]


def _diagnose(arguments: argparse.Namespace, member: Member) -> Diagnosis:
    """Read the member, and diagnose what is in it."""
    try:
        axes = normalize_axes(tuple(arguments.axis), len(member.shape))
        lengths = normalized_shape(member.shape, axes)
        eps = check_eps(_eps(arguments, member))
        top = check_count("top", arguments.top, least=0)
    except ValueError as error:
        raise InputError(str(error)) from None
    rows = int(np.prod(member.shape, dtype=object)) // int(np.prod(lengths, dtype=object))
    done = 0
    with progress_bar("reading") as progress:

        def more(count: int) -> None:
            nonlocal done
            done += count
            progress(done, rows)

        with open_rows(member, axes, more) as blocks:
            return diagnose_blocks(
                blocks,
                shape=member.shape,
                dtype=parse(arguments.dtype or member.dtype.name),
                axis=axes,
                eps=eps,
                top=top,
            )


def _eps(arguments: argparse.Namespace, member: Member) -> float:
    if arguments.eps is not None:
        return float(arguments.eps)
    held = read_small(member.path, "eps") if member.offset is None else None
    return 1e-5 if held is None else held


def _print_diagnosis(member: Member, diagnosis: Diagnosis) -> None:
    """Print where the data came from, then the diagnosis."""
    console = Console()
    first, *others = lines_of(diagnosis, console.width)
    # Not as markup: a file may have brackets in its name.
    console.print(Text(f"{member.label}: {member.dtype}, axis {list(diagnosis.axis)}"))
    console.print(Text(first, style="bold"))
    console.print(Text("\n".join(others)))


def _print_members(members: list[Member]) -> None:
    """Print what a file holds."""
    rows = [
        (
            member.name,
            shape_text(member.shape) or "one number",
            str(member.dtype),
            f"{member.nbytes / 1e6:.1f}",
        )
        for member in members
    ]
    print_table(Console(), Table("Arrays", ("member", "shape", "dtype", "MB"), rows))
