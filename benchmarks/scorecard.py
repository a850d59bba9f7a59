"""
A score card of libraries: worst ulp, share of the derived limit, what lost the digits: `make scorecard`.

Measures in the environment of the peers. Writes benchmarks/results/scorecard.json and
docs/evidence/scorecard.md; `--render` reads the file instead of measuring.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from page import DOCS, keep, origin, origin_line, put, table
from peers import LOADERS, OURS, load_peers
from stability_cases import Input, Results, run

from stablenorm.testing import FAMILIES, explain, make_case, plain_backward, plain_forward

# Mean 0, three offsets, like rows, outliers, huge values, small variances, a dy that cancels.
SHOWN = "F01", "F02", "F03", "F06", "F09", "F12", "F18", "F20", "F23", "F25", "F28", "F38"
OUTPUTS = "y", "dx", "dgamma", "dbeta"
N, ROWS = 768, 4
# Their arithmetic, as far as it is known: PyTorch's backward on a CPU scales before it centers.
DECLARED: dict[str, dict[str, Any]] = {
    "PyTorch": {"centered": False},
    OURS: {"statistics": "float64"},
}
# Their own threads on what the card shows.
ISSUES = {
    "PyTorch": "[98075](https://github.com/pytorch/pytorch/issues/98075), "
    "[188372](https://github.com/pytorch/pytorch/issues/188372)",
    "jax.nn.standardize": "[flax 1491](https://github.com/google/flax/issues/1491), "
    "[equinox 314](https://github.com/patrick-kidger/equinox/issues/314)",
    "ONNX Runtime": "[21935](https://github.com/microsoft/onnxruntime/issues/21935), "
    "[28463](https://github.com/microsoft/onnxruntime/issues/28463)",
}


def one_pass(at: Input) -> Results:
    """Return the results of the one-pass formula in NumPy."""
    y, cache = plain_forward(at.x, at.gamma, at.beta, at.eps, "one-pass")
    return dict(zip(OUTPUTS, (y, *plain_backward(at.dy, cache)), strict=True))


def measure() -> dict[str, Any]:
    """Return the figures of every library on every family."""
    peers, missing = load_peers(LOADERS)
    calls = {peer.name: partial(run, peer) for peer in peers} | {"NumPy, one pass": one_pass}
    cells: dict[str, Any] = {}
    for subject, call in calls.items():
        declared = DECLARED.get(subject, {})
        for family in SHOWN:
            x, gamma, beta, eps, dy = make_case(
                family, "float32", N, max(ROWS, FAMILIES[family].smallest_rows)
            )
            with np.errstate(all="ignore"):
                results: dict[str, Any] = dict(call(Input(x, gamma, beta, eps, dy)))
                report = explain(
                    results.pop("y"), x, gamma, beta, eps, dy=dy, **results, **declared
                )
            cells.setdefault(subject, {})[family] = {
                name: {
                    "ulp": float(np.abs(one.error / one.ulp).max()),
                    "share": None if one.beyond == 1 else float(one.shares.max()),
                    "said": str(report.accounts[name]),
                }
                for name, one in report.outputs.items()
            }
    versions = {peer.name: peer.version for peer in peers if peer.name != OURS}
    return {"origin": origin(versions) | {"missing": missing}, "cells": cells}


def figure(ulp: float, share: float | None) -> str:
    """Write a cell: the worst ulp and the share of the limit."""
    ulps = f"{ulp:.2g}" if np.isfinite(ulp) else "not finite"
    if share is None:
        return f"{ulps}, beyond"
    if not np.isfinite(share):
        return "**not finite**"
    part = f"{100 * share:.0f} %" if share <= 10 else f"{share:.2g} times"
    return f"{ulps}, {part}" if share <= 1 else f"**{ulps}, {part}**"


def render(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by the names of their markers."""
    cells = results["cells"]
    names = list(cells)
    parts = {}
    for output in OUTPUTS:
        own = [name for name in names if output in cells[name]["F01"]]
        rows = [
            [
                f"{FAMILIES[family].title} <small>{family}</small>",
                *(
                    figure(*[cells[name][family][output][k] for k in ("ulp", "share")])
                    for name in own
                ),
            ]
            for family in SHOWN
        ]
        parts[output] = table(["x", *own], rows)
    lines = []
    for name in names:
        # The family with a mean of 2**12: float32 keeps half of its digits.
        said = cells[name]["F03"]["y"]["said"]
        backward = cells[name]["F03"].get("dx", {}).get("said", "no backward")
        lines.append([name, said, backward, ISSUES.get(name, "")])
    parts["said"] = table(["library", "y", "dx", "threads"], lines)
    line, missing = origin_line("make scorecard", results["origin"]), results["origin"]["missing"]
    parts["origin"] = line + f" Not measured, the import failed: {', '.join(missing)}." * bool(
        missing
    )
    return parts


def main() -> None:
    """Measure or read, and write the page."""
    results = keep("scorecard", __doc__, measure)
    put(DOCS / "evidence" / "scorecard.md", render(results))


if __name__ == "__main__":
    main()
