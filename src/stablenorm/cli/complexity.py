"""`stablenorm complexity`: flops and bytes of a norm, and the times that they allow."""

import argparse
from math import prod
from typing import Any

from stablenorm.backends import choose
from stablenorm.cli import parts
from stablenorm.cost import count_kept, measure_costs
from stablenorm.figures import new_figure
from stablenorm.formats import parse
from stablenorm.report.figures import draw_costs
from stablenorm.report.sections import cost_section

_ROUNDS = 11
_EXAMPLES = """\
examples:
  stablenorm complexity                               one shape, float32
  stablenorm complexity --shape 8 2048 1024 --dtype bfloat16
  stablenorm complexity --kind rms                    an RMS norm
  stablenorm complexity --threads 1 --json cost.json --plot cost.png

how to read it:
  flops      + - * / and square roots; a fused multiply-add is two
  moved      bytes that memory must move where arrays are beyond the caches
  held       new bytes at the worst moment, results included
  roofline   the longer of moved / copy and flops / arithmetic: a lower bound
  measured   median time; ratio: measured / roofline

exit status: 0 done, 2 it cannot be run (one line says why).
"""


def add(commands: Any) -> None:
    """Add `complexity` to the commands."""
    parser = parts.add_command(
        commands,
        run,
        "count flops and bytes, and measure times beside the roofline of this machine",
        "Count the flops and bytes of three programs, forward and backward: the plain formula in "
        "NumPy, the reference, and the fused CPU kernel. Measure how fast this machine copies and "
        "calculates, and how long the three take. The last axis is normalized.",
        _EXAMPLES,
    )
    parts.add_shape(parser, "of x; default: 32 512 768", default=[32, 512, 768])
    parser.add_argument("--dtype", choices=parts.DTYPES, default="float32", help="default: float32")
    parts.add_kind(parser)
    parts.add_threads(parser)
    parts.add_json(parser)
    parts.add_plot(parser, "draw the roofline")


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm complexity` is asked."""
    rows, n = prod(arguments.shape[:-1]), arguments.shape[-1]
    # x, dy, y, dx, two copies and the numbers as drawn; what plain NumPy keeps, and its temporaries.
    s = parse(arguments.dtype).itemsize
    parts.check_memory(arguments.shape, 7 * s + 4 + 6 * max(s, 4))
    choose("native")
    threads = parts.use_threads(arguments.threads)
    with parts.step_bar(_ROUNDS * (6 + 2 * len({1, threads}))) as step:
        what = (rows, n), arguments.dtype, threads
        how = {"kind": arguments.kind, "rounds": _ROUNDS}
        measured = measure_costs(*what, **how, step=lambda: step("programs and copies"))

    def plot(file: Any, **options: str) -> None:
        figure = new_figure(8, 5)
        draw_costs(figure, measured)
        figure.suptitle(f"{rows} rows of {n}, {measured.dtype}")
        figure.savefig(file, dpi=120, **options)

    kept = count_kept(measured.matrix, measured.dtype, measured.kind)
    content = measured._asdict() | {"kept": kept}
    parts.write_json(arguments.json, content)
    parts.write_plot(arguments.plot, plot)
    parts.print_sections(cost_section(measured))
    return 0
