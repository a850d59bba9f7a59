"""
On a CUDA device: correctness, sanitizers, speed beside the peers, memory traffic: `make gpu`.

Works through its stages, each ten minutes at most, and writes every record as soon as there is
one: interrupted or out of time, it goes on from there when called again. The figures go to
benchmarks/results/gpu/ and between the markers of docs/how-to/gpu.md. Exit status 0 if all is done and
right, 1 if a check failed, 2 if there is no CUDA device, 3 if a stage has more to do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_page import STAGES, insert, section

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
PAGE = ROOT / "docs" / "how-to" / "gpu.md"
# Of ten minutes, so that the last case of a stage has time to end.
_LIMIT = 540.0

Stage = Callable[[set[str]], Iterator[dict[str, Any]]]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--stage", choices=STAGES, action="append", help="only this one")
    parser.add_argument("--again", action="store_true", help="forget what these stages have done")
    parser.add_argument(
        "--seconds", type=float, default=_LIMIT, help=f"for each stage; default: {_LIMIT:.0f}"
    )
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write the figures into")
    return parser.parse_args(argv)


def why_not() -> str | None:
    """Say what is missing to run on a device."""
    from stablenorm import cuda  # noqa: PLC0415  # what it needs is the question

    try:
        cuda.check_usable()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


def load(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the records of every stage; a line cut short is one that was not written."""
    found: dict[str, list[dict[str, Any]]] = {}
    for stage in STAGES:
        path = folder / f"{stage}.jsonl"
        found[stage] = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                found[stage].append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def work(name: str, stage: Stage, folder: Path, seconds: float) -> tuple[bool, bool]:
    """Go on with a stage; return whether it is finished and whether all it checked is right."""
    folder.mkdir(parents=True, exist_ok=True)
    before = load(folder)[name]
    done = {record["label"] for record in before}
    right = all(record.get("passed", True) for record in before)
    start = time.monotonic()
    # Written anew, so that what a cut off line left behind is no part of the next one.
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in before), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        for record in stage(done):
            file.write(json.dumps(record) + "\n")
            file.flush()
            right = right and record.get("passed", True)
            state = "" if record.get("passed", True) else "  FAILED"
            print(f"{name}: {record['label']}{state}", file=sys.stderr)
            if time.monotonic() - start > seconds:
                return False, right
    return True, right


def main(argv: Sequence[str] | None = None) -> int:
    """Work, print, write."""
    options = arguments(argv)
    finished = right = True
    if not options.render:
        reason = why_not()
        if reason is not None:
            print(f"gpu: {reason}", file=sys.stderr)
            return 2
        # They import CuPy.
        from gpu_stages import make_stages  # noqa: PLC0415

        for name, stage in make_stages().items():
            if options.stage and name not in options.stage:
                continue
            if options.again:
                (options.results / f"{name}.jsonl").unlink(missing_ok=True)
            more = work(name, stage, options.results, options.seconds)
            finished, right = finished and more[0], right and more[1]
    written = section(load(options.results))
    options.page.write_text(
        insert(options.page.read_text(encoding="utf-8"), written), encoding="utf-8"
    )
    print(written)
    return 1 if not right else 0 if finished else 3


if __name__ == "__main__":
    sys.exit(main())
