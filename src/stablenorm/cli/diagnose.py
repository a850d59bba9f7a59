"""
Say whether a layer norm loses digits on the data in a file, and the cure.

First comes a verdict; then rows that lose digits, and what common methods lose.

examples:
  stablenorm diagnose                         the bundled data
  stablenorm diagnose a.npy                   all axes but the last are rows
  stablenorm diagnose a.npy --dtype bfloat16  judged as data of that dtype
  stablenorm diagnose mine.npz --member hidden --top 3
  stablenorm diagnose a.npy --kind rms        an RMS norm
  stablenorm diagnose model.safetensors       lists the tensors
  stablenorm diagnose a.npy --json loss.json

how to read it:
  bits of y lost  log2 of the RMS error of y over a row, in rounding errors;
                  0: as good as correctly rounded; all: nothing of y is left
  usual formula   the first line of the table: a mean, then a variance

exit status: 0 done; 2 the file cannot be read, or it holds several arrays and
--member is needed.
"""

import argparse

from stablenorm.cli import parts
from stablenorm.cli.files import choose, list_members, read_eps
from stablenorm.diagnosis import diagnose, lines_of

OPTIONS = {
    "file": "an .npy, .npz or .safetensors file; default: the bundled data",
    "--kind": "kind of the norm; default: layer",
    "--member": "array of an .npz or .safetensors file; default: x, or the only one",
    "--axis": "axes normalized together, None: all; default: -1",
    "--eps": "default: eps of the .npz file, if it has one, or 1e-5",
    "--dtype": "judge the data as of this dtype; default: its own",
    "--top": "worst rows to describe; default: 10",
    "--json": "write all figures to this file",
}


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm diagnose` is asked."""
    path, axis, kind = arguments.file, arguments.axis, arguments.kind
    members = list_members(path)
    member, eps = choose(members, path, arguments.member), read_eps(members, arguments.eps)
    # The package refuses the user's input in its own words.
    with parts.refusing(TypeError, ValueError):
        chosen = None if axis == [None] else tuple(axis)
        asked = {"axis": chosen, "dtype": arguments.dtype, "top": arguments.top, "kind": kind}
        diagnosis = diagnose(
            member.load(row=160), eps, **asked, progress=parts.progress("measuring")
        )
    diagnosis.to_json(arguments.json)
    first, *others = lines_of(diagnosis)
    axes = ", ".join(map(str, diagnosis.axis))
    parts.print_lines(
        *others, f"{member.label}: {member.like.dtype}, axis {axes}", bold=first + "\n"
    )
    return 0
