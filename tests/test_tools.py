"""`stablenorm bench`, the page of `run` and the costs: that they count, say and write what is true."""

import html
import json
import re
import tracemalloc
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from stablenorm import backends, cost, timing
from stablenorm.api import FUNCTIONS
from stablenorm.backends import BACKENDS
from stablenorm.cli import main
from stablenorm.cost import count_cost, count_kept
from stablenorm.memory import get_idle_limit, set_idle_limit
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.timing import Timing, measure_copy

pytestmark = pytest.mark.usefixtures("plain_terminal")
X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


def call_once(calls, **_):
    """Call each once, instead of timing it."""
    for call in calls.values():
        call()
    return {name: Timing(1e-3 * k, 0.9e-3 * k, 2e-3 * k) for k, name in enumerate(calls, 1)}


def test_bench_writes_every_combination(monkeypatch):
    """The commands, not their figures."""
    monkeypatch.setattr(timing, "measure_interleaved", call_once)
    monkeypatch.setattr(timing, "measure_copy", partial(measure_copy, nbytes=2**16))
    monkeypatch.setattr(backends, "_default", lambda: "numpy")
    dtypes = "--dtype", "float32", "--dtype", "bfloat16"
    shapes = "--shape", "2", "3", "8", "--shape", "16"
    roundings = "--rounding", "fast", "--rounding", "nearest"
    assert main(["bench", *shapes, *dtypes, *roundings, "--json", "r.json"]) == 0
    held = json.loads(Path("r.json").read_text())
    # Shapes, dtypes, directions, roundings, and fresh or out=.
    assert len(held["rows"]) == 2 * 2 * 2 * 2 * 2 * len(BACKENDS)
    for row in held["rows"]:
        nbytes = (2 if row["direction"] == "forward" else 3) * np.prod(row["shape"])
        nbytes *= 2 if row["dtype"] == "bfloat16" else 4
        assert row["bytes_per_second"] == pytest.approx(nbytes / row["seconds"])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_bytes_held_and_kept_are_what_tracemalloc_sees(kind, dtype, request):
    # Memory of an earlier result would not be new.
    request.addfinalizer(partial(set_idle_limit, get_idle_limit()))
    set_idle_limit(0)
    shape = 2000, 768
    x, dy = np.random.default_rng(0).standard_normal((2, *shape)).astype(dtype)
    norm, pull = FUNCTIONS[kind]
    kept = plain_forward(x, x[0], x[1], kind=kind)[1]
    calls = {"plain NumPy": (partial(plain_forward, x, x[0], x[1], kind=kind),
                             partial(plain_backward, dy, kept, kind))}  # fmt: skip
    for program, name in (("reference", "numpy"), ("fused CPU kernel", "native")):
        if name in BACKENDS:
            forward = partial(norm, x, x[0], x[1], backend=name)
            cache = forward()[1]
            calls[program] = forward, partial(pull, dy, cache)
            assert cache.statistics.nbytes == next(iter(count_kept(shape, dtype, kind).values()))
    for program, pair in calls.items():
        for direction, call in zip(cost.DIRECTIONS, pair, strict=True):
            call()
            tracemalloc.start()
            call()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            held = count_cost(program, direction, shape, dtype, kind).held
            # Left out: a few numbers per row and column.
            assert held <= peak + 2**14 <= 1.06 * held + 2**18, (program, direction)


def test_a_page_is_whole_and_fetches_nothing(capsys):
    name = "<script>alert(1)<b> & $x$ [bold] `code` \"'.npz"
    np.savez(name, x=X)
    assert main(["run", name, "--kind", "rms", "--html", "page.html"]) == 0
    source = Path("page.html").read_text("utf8")
    assert name in html.unescape(source)
    # It is XML as well.
    elements = list(ET.fromstring(source).iter())
    count = [each.tag.rpartition("}")[2] for each in elements].count
    assert (count("svg"), count("script"), count("h1"), count("pre")) == (1, 0, 1, 1)
    fetched = [value for each in elements for key, value in each.items()
               if key.rpartition("}")[2] in {"src", "href", "action"}]  # fmt: skip
    assert all(value.startswith(("#", "data:")) for value in fetched)
    assert not re.search(r"url\((?!#)|@import|@font-face", source)
    # The terminal and the page show the same.
    shown = capsys.readouterr().out
    assert Path("page.html").resolve().as_uri() in shown
    words = "bits of y lost, of 24", "Against the exact result", "Counted: 6 rows of 5, float32"
    assert all(each in shown and each in source for each in words)
