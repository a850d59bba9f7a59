"""`stablenorm bench`, `complexity` and `report`: that they count, say and write what is true."""

import html
import json
import re
import tracemalloc
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from stablenorm import backends, cost, report
from stablenorm.backends import BACKENDS
from stablenorm.cli import bench, main
from stablenorm.cli import problem as reading
from stablenorm.cost import _measure, count_cost
from stablenorm.memory import get_idle_limit, set_idle_limit
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.timing import Timing, measure_copy

pytestmark = pytest.mark.usefixtures("plain_terminal")
X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


def call_once(calls, *, step=None, **_):
    """Call each once, instead of timing it."""
    for call in calls.values():
        call()
        if step is not None:
            step()
    return {name: Timing(1e-3 * k, 0.9e-3 * k, 2e-3 * k, 5, 1) for k, name in enumerate(calls, 1)}


@pytest.fixture
def untimed(monkeypatch):
    """The commands, not their figures."""
    monkeypatch.setattr(bench, "measure_interleaved", call_once)
    monkeypatch.setattr(bench, "measure_copy", partial(measure_copy, nbytes=2**16))
    monkeypatch.setattr(backends, "_default", lambda: "numpy")
    monkeypatch.setattr(report, "_BYTES", 2**14)
    monkeypatch.setattr(_measure, "measure_interleaved", call_once)
    monkeypatch.setattr(_measure, "_BACKENDS", dict.fromkeys(_measure._BACKENDS, "numpy"))


@pytest.mark.usefixtures("untimed")
def test_bench_writes_every_combination():
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


def test_bytes_held_are_what_tracemalloc_sees(request):
    # Memory of an earlier result would not be new.
    request.addfinalizer(partial(set_idle_limit, get_idle_limit()))
    set_idle_limit(0)
    shape, rng = (2000, 768), np.random.default_rng(0)
    x, dy = rng.standard_normal((2, *shape))
    kept = plain_forward(x, x[0], x[1])[1]
    calls = partial(plain_forward, x, x[0], x[1]), partial(plain_backward, dy, kept)
    for direction, call in zip(cost.DIRECTIONS, calls, strict=True):
        call()
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        held = count_cost("plain NumPy", direction, shape, "float64", "layer").held
        # Left out: a few numbers per row and column.
        assert held <= peak + 2**14 <= 1.06 * held + 2**20, direction


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_complexity_predicts_by_the_roofline(kind):
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    shape = ("--shape", "4", "16", "768", "--kind", kind)
    assert main(["complexity", *shape, "--json", "c.json", "--plot", "c.png"]) == 0
    found = json.loads(Path("c.json").read_text("utf8"))
    for line in found["lines"]:
        counted = count_cost(line["program"], line["direction"], (64, 768), "float32", kind)
        assert line["cost"] == counted._asdict()
        threads = "all_threads" if line["program"] == "fused CPU kernel" else "one_thread"
        roof = found[threads]
        assert line["predicted"] == max(counted.moved / roof["copy"], counted.flops / roof["flops"])
    assert Path("c.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("untimed")
def test_a_report_is_whole_and_fetches_nothing():
    name = "<script>alert(1)<b> & $x$ [bold] `code` \"'.npz"
    np.savez(name, x=X)
    assert main(["report", name, "--kind", "rms"]) == 0
    source = Path("stablenorm-report.html").read_text("utf8")
    assert name in html.unescape(source)
    # It is XML as well.
    tags = [
        (each.tag.rpartition("}")[2], dict(each.items())) for each in ET.fromstring(source).iter()
    ]
    count = [tag for tag, _ in tags].count
    assert count("table") == count("caption") > 4
    assert (count("svg"), count("script"), count("h1")) == (2, 0, 1)
    fetched = [value for _, attributes in tags for key, value in attributes.items()
               if key.rpartition("}")[2] in {"src", "href", "action"}]  # fmt: skip
    assert all(value.startswith(("#", "data:")) for value in fetched)
    assert not re.search(r"url\((?!#)|@import|@font-face", source)


@pytest.mark.usefixtures("untimed")
def test_a_failed_check_is_said_and_is_the_exit_status(monkeypatch, capsys):
    compute = reading.compute

    def spoiled(problem):
        results = compute(problem)
        return results | {"y": results["y"] + np.float32(1e-3)}

    monkeypatch.setattr(reading, "compute", spoiled)
    np.savez("in.npz", x=X)
    assert main(["report", "in.npz"]) == 1
    assert "A CHECK FAILED" in capsys.readouterr().out
    assert 'class="fail"' in Path("stablenorm-report.html").read_text("utf8")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench --shape 3 0", "--shape: must be >= 1, got 0"),
        ("bench --shape 1000000 1000000", "--shape must fit in memory, got 1000000 1000000"),
        ("bench --backend fast", "invalid choice: 'fast'"),
        ("complexity --shape 1000000 1000000", "--shape must fit in memory"),
        ("report nan.npz", "must be finite to be checked, got nan at [0, 0]; stablenorm diagnose"),
        ("report --out report.png", "must be a .html or .htm file"),
        ("report --out there.html", "must be a new name, got the directory there.html; remove"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, command, words):
    np.savez("nan.npz", x=X * np.nan)
    Path("there.html").mkdir()
    assert main(command.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["nan.npz", "there.html"]
