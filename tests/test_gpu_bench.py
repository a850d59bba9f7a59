"""`make gpu` without a GPU: its cases, statistics, gates, page, and how it goes on after a stop."""

import functools
import importlib
import json
import sys
from pathlib import Path

import fake_cupy as fake
import ml_dtypes
import numpy as np
import pytest

from stablenorm import cuda, layer_norm_backward, layer_norm_forward
from stablenorm.cli.bench_measure import make_problem
from stablenorm.cuda import compile as _cuda_compile
from stablenorm.cuda import workspace as _cuda_workspace
from stablenorm.cuda.plan import plan_backward
from stablenorm.oracle import exact_layer_norm

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
         "ulps": {"stablenorm": 0.5004, "PyTorch": 1234.5}, "refused": {"quack": "no"}},
    ],
}  # fmt: skip


def test_the_page_shows_every_figure_and_every_loss():
    page = module("gpu_page")
    text = page.section(RESULTS)
    for part in (
        "A GPU; CuPy 14", "4000 GB/s", "2 run, 1 failed: **b**", "compute-sanitizer is not installed",
        "| profile | **has not run** |", "| (8192, 4096) | bfloat16 | 100.0 | 90.0 | 120.0 | 2013 | 0.50 |",
        "**0.999**", "**NOT MET**", "| bench | 1 run, 0 failed |", "| 1.23e+03 | 0.5 |", "- fla: ModuleNotFoundError", "- quack, some shapes: no",
    ):  # fmt: skip
        assert part in text
    assert "**0.999**" in text


def test_with_nothing_measured_the_page_says_so():
    page = module("gpu_page")
    empty = {stage: [] for stage in page.STAGES}
    assert "Not measured on hardware yet" in page.section(empty)
    text = (ROOT / "docs" / "how-to" / "gpu.md").read_text(encoding="utf-8")
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


# ---- agree, then time ----


def results(problem, direction, arithmetic=np.float32):
    """The textbook formula in another arithmetic: a peer."""
    x, gamma, beta, dy = (np.asarray(problem[k], arithmetic) for k in range(4))
    eps, n = arithmetic(1e-5), arithmetic(x.shape[1])
    d = x - x.sum(1, keepdims=True) / n
    rstd = 1 / np.sqrt((d * d).sum(1, keepdims=True) / n + eps)
    xhat, g = d * rstd, dy * gamma
    found = {"y": xhat * gamma + beta}
    if direction == "backward":
        c1, c2 = (a.sum(1, keepdims=True) / n for a in (g, g * xhat))
        found = {"dx": (g - c1 - xhat * c2) * rstd}
        found |= {"dgamma": (dy * xhat).sum(0), "dbeta": dy.sum(0)}
    return {name: array.astype(problem.x.dtype) for name, array in found.items()}


def ours(problem, direction):
    y, cache = layer_norm_forward(problem.x, problem.gamma, problem.beta, backend="numpy")
    if direction == "forward":
        return {"y": y}
    return layer_norm_backward(problem.dy, cache)._asdict()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_agrees_with_float64_is_timed_and_its_error_is_that_of_the_oracle(direction, dtype):
    agreement, problem = module("gpu_agreement"), make_problem((40, 96), dtype)
    exact = agreement.solve(problem, direction)
    mine, peer = ours(problem, direction), results(problem, direction)
    verdict = agreement.admit(exact, {"ours": lambda: mine, "peer": lambda: peer}, "ours")
    assert verdict.refused == {}
    oracle = exact_layer_norm(problem.x, problem.gamma, problem.beta, 1e-5, problem.dy)
    for name, found in (("ours", mine), ("peer", peer)):
        worst = max(errors.max() for errors in oracle.ulp_errors(**found).values())
        assert verdict.ulps[name] == pytest.approx(worst, rel=1e-4, abs=1e-4)
    # The promise is for ours alone: the same errors under our name are too many in float32.
    if dtype == "float32":
        assert agreement.admit(exact, {"ours": lambda: peer}, "ours").refused


def spoiled(found, name, change):
    return {**found, name: change(found[name])}


def one_wrong(array):
    flat = array.copy()
    flat.reshape(-1)[0] += np.abs(array).max()
    return flat


def one_nan(array):
    flat = array.copy()
    flat.reshape(-1)[-1] = np.nan
    return flat


def next_but_one(array):
    bits = array.copy()
    bits.reshape(-1).view(np.int32)[0] += 2
    return bits


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("dx", one_wrong, "does not agree with float64: dx by"),
        ("dx", one_nan, "dx by inf times"),
        ("dgamma", one_wrong, "dgamma by"),
        ("dbeta", np.zeros_like, "dbeta by"),
        ("dbeta", lambda a: a[None], r"ValueError: dbeta must have shape (64,), got (1, 64)"),
    ],
)
def test_what_does_not_agree_is_not_timed(name, change, says):
    agreement, problem = module("gpu_agreement"), make_problem((300, 64), "float32")
    exact, peer = agreement.solve(problem, "backward"), results(problem, "backward")
    found = {"wrong": lambda: spoiled(peer, name, change), "right": lambda: peer}
    verdict = agreement.admit(exact, found, "ours")
    assert list(verdict.refused) == ["wrong"]
    assert says in verdict.refused["wrong"]
    assert verdict.ulps["right"] > 0


def test_ours_may_be_off_by_one_ulp_and_not_by_two():
    agreement, problem = module("gpu_agreement"), make_problem((30, 64), "float32")
    exact, mine = agreement.solve(problem, "forward"), ours(problem, "forward")
    wrong = spoiled(mine, "y", next_but_one)
    found = {"ours": lambda: mine, "ours, graph": lambda: wrong, "peer": lambda: wrong}
    assert list(agreement.admit(exact, found, "ours").refused) == ["ours, graph"]


def test_a_peer_that_cannot_is_refused_with_its_own_words():
    agreement, problem = module("gpu_agreement"), make_problem((3, 8), "float32")

    def cannot():
        msg = "n must be even\nand more"
        raise RuntimeError(msg)

    verdict = agreement.admit(agreement.solve(problem, "forward"), {"peer": cannot}, "ours")
    assert verdict == ({}, {"peer": "RuntimeError: n must be even"})


def test_the_results_in_what_candidates_return():
    named = module("gpu_agreement").named
    assert named("y", "forward") == named(("y", "mean"), "forward") == {"y": "y"}
    assert named((1, 2, 3, None), "backward") == {"dx": 1, "dgamma": 2, "dbeta": 3}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_ulp(dtype):
    kind = ml_dtypes.finfo(dtype)
    values = np.array([1.0, 1.99, 2.0, -2.0, 0.0, float(kind.smallest_normal) / 8])
    eps, least = float(kind.eps), float(kind.smallest_subnormal)
    expected = [eps, eps, 2 * eps, 2 * eps, least, least]
    assert module("gpu_agreement").ulp_of(values, np.dtype(dtype)).tolist() == expected


# ---- variants of the backward ----

needs_shim = pytest.mark.skipif(
    bool(fake.load_shim().why_not()), reason=fake.load_shim().why_not() or "-"
)


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shim"
    folder.mkdir(exist_ok=True)
    return folder


def pull(driver, given):
    x, gamma, dy = (fake.ndarray(a.copy()) for a in given)
    with module("gpu_variants").through(driver):
        _, cache = layer_norm_forward(x, gamma, gamma)
        return [a.get().tobytes() for a in layer_norm_backward(dy, cache)]


@needs_shim
@pytest.mark.parametrize("cooperative", [True, False])
def test_variants_have_the_bits_of_the_one_launch(builds, monkeypatch, cooperative):
    monkeypatch.setitem(sys.modules, "cupy", fake.make_module())
    monkeypatch.setattr(_cuda_workspace, "_kept", type(_cuda_workspace._kept)())
    variants, rng = module("gpu_variants"), np.random.default_rng(5)
    # 60 chunks of 16 rows: enough partial sums for more than one segment, and for a barrier.
    x, dy = (rng.standard_normal((960, 257)).astype(np.float32) for _ in range(2))
    gamma = rng.standard_normal(257).astype(np.float32)
    driver, launches = fake.make_driver(builds, cooperative=cooperative, multiprocessors=2)
    expected = pull(driver, (x, gamma, dy))
    assert launches[-1].together == cooperative
    before = len(launches)
    assert pull(variants.late(driver), (x, gamma, dy)) == expected
    assert len(launches) == before + 2

    @functools.cache
    def finish(plan, _):
        defines = [define.removeprefix("-D") for define in plan.defines]
        source, entry = fake.whole_source() + variants.FINISH, "layer_norm_finish"
        return entry, fake.load_shim().build(source, builds, entries=[entry], defines=defines)

    assert pull(variants.separate(driver, finish), (x, gamma, dy)) == expected
    assert [one.entry for one in launches[-2:]] == ["layer_norm_backward", "layer_norm_finish"]
    assert not any(one.together for one in launches[-2:])
    # One chunk needs nobody to add up.
    few = x[:3], gamma, dy[:3]
    expected = pull(driver, few)
    assert pull(variants.separate(driver, finish), few) == expected
    assert launches[-1].entry == "layer_norm_backward"


def test_variants_are_what_nvrtc_compiles():
    pytest.importorskip("cuda.bindings.nvrtc")
    variants = module("gpu_variants")
    kind = np.dtype(np.float32)
    plan = plan_backward(4096, 1024, kind, kind, 0)
    try:
        plain = _cuda_compile.cubin(plan.defines, (9, 0))
    except ImportError as error:
        pytest.skip(str(error))
    assert b"layer_norm_finish" in variants.finish_cubin(plan, (9, 0))
    late = _cuda_compile.cubin((*plan.defines, variants.LATE), (9, 0))
    assert late != plain


def test_through_puts_the_driver_back_after_an_error():
    before = cuda._driver

    def fail():
        with module("gpu_variants").through("another"):
            assert cuda._driver() == "another"
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()
    assert cuda._driver is before


def test_occupancy_says_how_many_blocks_fit_and_how_they_meet(tmp_path):
    stages = module("gpu_occupancy")
    driver, _ = fake.make_driver(tmp_path, each=2, multiprocessors=132, run=False)
    records = list(stages.occupancy(driver, 0))
    # What is done is not compiled again.
    assert list(stages.occupancy(driver, 0, {r["label"] for r in records[1:]})) == records[:1]
    assert len({r["label"] for r in records}) == len(records) == 2 * 2 * len(stages.BENCH_SHAPES)
    (found,) = [r for r in records if r["label"] == "occupancy backward 8192x4096 float32"]
    assert (found["resident"], found["grid"], found["chunks"]) == (2, 256, 256)
    assert found["final"] == "barrier"
    (one,) = [r for r in records if r["label"] == "occupancy backward 1x65536 float32"]
    assert (one["grid"], one["final"]) == (1, "one chunk")
    text = module("gpu_page").occupancy_table(records)
    assert text.count("\n") == 1 + len(records)
    assert "| backward 8192x4096 float32 |" in text
    # More blocks than fit never wait for one another.
    alone, _ = fake.make_driver(tmp_path, each=2, multiprocessors=132, cooperative=False, run=False)
    assert "barrier" not in {r["final"] for r in stages.occupancy(alone, 0)}
