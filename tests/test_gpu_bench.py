"""`make gpu` without a GPU: its cases, statistics, gates, page, and how it goes on after a stop."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def module(name):
    return importlib.import_module(name)


def record(shape, candidate, seconds, direction="backward", dtype="bfloat16"):
    return module("gpu_gates").Record(shape, dtype, direction, candidate, seconds, seconds, seconds)


def test_without_a_device_it_says_so_in_one_line_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert module("gpu").main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "CuPy is needed" in shown.err


def test_the_sweep_has_every_length_dtype_row_count_and_variant():
    cases = module("gpu_cases")
    found = cases.correctness_cases()
    assert {(c.n, c.dtype) for c in found} == {(n, d) for n in cases.LENGTHS for d in cases.DTYPES}
    assert {c.rows for c in found} >= set(cases.ROWS)
    assert {c.variant for c in found} == set(cases.VARIANTS)
    # Every variant in every dtype, and on long rows as on short ones.
    assert len({(c.variant, c.dtype) for c in found}) == 4 * len(cases.VARIANTS)
    assert {c.variant for c in found if c.n > 8192} == set(cases.VARIANTS)
    assert len({c.label for c in found}) == len(found)
    assert max(c.rows * c.n for c in found) <= 2**22


def test_bytes_and_buffer_sets():
    cases = module("gpu_cases")
    assert cases.count_bytes((8192, 1024), "bfloat16", "backward") == 3 * 2 * 8192 * 1024
    assert cases.count_bytes((8192, 1024), "float32", "forward") == 2 * 4 * 8192 * 1024
    # 50 MB in a cache of 50 MB: three sets, 150 MB, are three times the cache.
    assert cases.buffer_sets((8192, 1024), "bfloat16", 50_000_000) == 3
    assert cases.buffer_sets((16, 4096), "bfloat16", 50_000_000) * 3 * 2 * 16 * 4096 >= 150_000_000


def test_median_and_percentiles():
    summarize = module("gpu_gates").summarize
    assert summarize([float(k) for k in range(101)]) == (50.0, 20.0, 80.0)
    assert summarize([3.0]) == (3.0, 3.0, 3.0)


def gate(gates, word):
    (found,) = [g for g in gates if word in g.requirement]
    return found


def test_gates_tell_what_is_met_what_is_not_and_what_was_not_measured():
    gates = module("gpu_gates")
    nbytes = 3 * 2 * 8192 * 4096
    triad = 4e12
    fast, slow = (record((8192, 4096), "stablenorm", nbytes / triad / f) for f in (0.86, 0.84))
    word = "n from 1024 to 8192 at 200 MB"
    assert gate(gates.check_gates([fast], triad), word).met is True
    assert gate(gates.check_gates([slow], triad), word).met is False
    assert gate(gates.check_gates([fast, slow], triad), word).figure.startswith("0.84")
    for records, ceiling in (([], triad), ([fast], None)):
        assert gate(gates.check_gates(records, ceiling), word).verdict == "not measured"
    # 50 MB is not 200 MB, and has a gate of its own.
    small = record((8192, 1024), "stablenorm", 1e-5)
    assert gate(gates.check_gates([small], triad), word).met is None
    assert gate(gates.check_gates([small], triad), "(8192, 1024), cold").met is not None


def test_the_best_peer_counts_at_odd_n_and_each_peer_in_the_mean():
    gates = module("gpu_gates")
    odd, even = (8192, 4095), (8192, 4096)
    records = [
        record(odd, "stablenorm", 2.0),
        record(odd, "stablenorm, graph", 0.1),
        record(odd, "PyTorch", 4.0),
        record(odd, "quack", 1.9),
        record(even, "stablenorm", 1.0),
        record(even, "PyTorch", 2.0),
    ]
    found = gates.check_gates(records, None)
    assert gate(found, "backward, odd n").met is False
    assert gate(found, "backward, odd n").figure.startswith("0.95")
    assert gate(found, "backward: geometric mean of PyTorch").figure == "2.00, 2 cases"
    assert gate(found, "backward: geometric mean of quack").met is False
    assert gate(found, "forward, odd n").met is None
    assert gate(found, "forward: faster than every peer").met is None


RESULTS = {
    "probe": [
        {"label": "device", "gpu": "A GPU", "date": "2026-01-02", "versions": {"CuPy": "14"},
         "copy": 3e12, "triad": 4e12}
    ],
    "correctness": [{"label": "a", "passed": True}, {"label": "b", "passed": False}],
    "sanitizer": [{"label": "all", "skipped": "compute-sanitizer is not installed"}],
    "bench": [
        {"label": "missing", "missing": {"fla": "ModuleNotFoundError"}},
        {"label": "x", "shape": [8192, 4096], "dtype": "bfloat16", "direction": "backward",
         "times": {"stablenorm": [1e-4, 9e-5, 1.2e-4], "PyTorch": [9.99e-5, 9e-5, 1e-4]},
         "refused": {"quack": "no"}},
    ],
}  # fmt: skip


def test_the_page_shows_every_figure_and_every_loss():
    page = module("gpu_page")
    text = page.section(RESULTS)
    for part in (
        "A GPU; CuPy 14", "4000 GB/s", "2 run, 1 failed: **b**", "compute-sanitizer is not installed",
        "| profile | **has not run** |", "| (8192, 4096) | bfloat16 | 100.0 | 90.0 | 120.0 | 2013 | 0.50 |",
        "**0.999**", "**NOT MET**", "- fla: ModuleNotFoundError", "- quack, some shapes: no",
    ):  # fmt: skip
        assert part in text
    assert "**0.999**" in text


def test_with_nothing_measured_the_page_says_so():
    page = module("gpu_page")
    empty = {stage: [] for stage in page.STAGES}
    assert "Not measured on hardware yet" in page.section(empty)
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    inside = text.partition(page.BEGIN)[2].partition(page.END)[0]
    # As `make gpu`, or `--render`, wrote it: not typed.
    assert inside.strip() == page.section(module("gpu").load(module("gpu").RESULTS))


def test_only_what_is_between_the_markers_changes():
    page = module("gpu_page")
    text = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    assert page.insert(text, r"new \1") == f"before\n{page.BEGIN}\nnew \\1\n{page.END}\nafter\n"
    with pytest.raises(ValueError, match="must have one"):
        page.insert("no markers", "new")


def test_a_stage_goes_on_where_it_was_stopped(tmp_path):
    gpu, asked = module("gpu"), []

    def stage(done):
        asked.append(set(done))
        for label in "abc":
            if label not in done:
                yield {"label": label, "passed": label != "b"}

    # Out of time after the first record.
    assert gpu.work("probe", stage, tmp_path, -1.0) == (False, True)
    # Killed in the middle of a line.
    with (tmp_path / "probe.jsonl").open("a") as file:
        file.write('{"label": "b", "pas')
    assert gpu.work("probe", stage, tmp_path, 60.0) == (True, False)
    # What failed before is not forgotten.
    assert gpu.work("probe", stage, tmp_path, 60.0) == (True, False)
    assert asked == [set(), {"a"}, {"a", "b", "c"}]
    lines = (tmp_path / "probe.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == ["a", "b", "c"]


def test_what_the_profiler_said_is_added_up():
    text = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","layer_norm_backward","dram__bytes_read.sum","Mbyte","1,200.50"\n'
        '"0","layer_norm_backward","dram__bytes_write.sum","Kbyte","20"\n'
        '"1","other","dram__bytes_read.sum","byte","500"\n'
    )
    found = module("gpu_profile").read_profile(text)
    assert found == {"launches": 2, "read": 1_200_500_500.0, "written": 20_000.0}
    assert module("gpu_profile").read_profile("nothing")["launches"] == 0


def test_peers_that_are_not_installed_are_named():
    found, missing = module("gpu_peers").load_peers()
    assert set(found) | set(missing) == {"PyTorch", "torch.compile", "Liger-Kernel", "fla", "quack"}
    assert all(missing.values())
