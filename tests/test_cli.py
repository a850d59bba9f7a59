"""`stablenorm run`, `diagnose`, `bench`, costs: no false alarm, missed mistake, half-written file, untrue figure."""

import html
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
import warnings
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from interpreter import run_python

import stablenorm.cli.files
import stablenorm.diagnosis
from stablenorm import backends, cost, layer_norm, layer_norm_forward, timing
from stablenorm.api import FUNCTIONS
from stablenorm.backends import BACKENDS
from stablenorm.cli import main, story
from stablenorm.cli.parts import print_lines
from stablenorm.memory import set_idle_limit
from stablenorm.testing import near_midpoints
from stablenorm.testing.plain import plain_backward, plain_forward

X = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("plain_terminal")


def save(tmp_path, **arrays):
    """Write in.npz where the command runs; return its name alone, so that no message depends on a path."""
    np.savez(tmp_path / "in.npz", **arrays)
    return "in.npz"


SWAPPED = X.astype(X.dtype.newbyteorder())


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({}, "--verbose", "and the gradients are right.|bundled): x 4 x 17 x 384 float32|E[x^2]|would have been seen|gradients PASS"),
        ({}, "--kind rms", ", RMS norm;|and the gradients are right."),
        # The checker once took big-endian float32 for a finer dtype: a false alarm.
        ({"x": SWAPPED, "gamma": SWAPPED[0], "dy": SWAPPED}, "", "the gradients are right."),
        # A dx beyond the largest float32 is correctly rounded to infinity; only the oracle can judge it.
        ({"x": X * np.float32(1e-42), "eps": 0.0, "dy": X}, "", "an output overflows|no gradient was judged"),
        ({"x": X, "weight": X[0], "gamma": X[1], "bias": X[2]}, "",
         "no dy in the file: random N(0, 1), seed 0; not used: bias, weight"),
        ({"h": X, "other": X}, "--member h", "in.npz: x 3 x 5 float32|not used: other"),
    ],
)  # fmt: skip
def test_right_results_of_bundled_and_unusual_data_pass(arrays, options, words, tmp_path, capsys):
    file = [save(tmp_path, **arrays)] if arrays else []
    assert main(["run", *file, *options.split()]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [phrase for phrase in words.split("|") if phrase not in out] == []
    assert out.startswith("PASS: y, dx")
    # The report names the norm, and shows the methods of that norm alone.
    assert (", RMS norm;" in out) == ("rms" in options) == ("E[x^2]" not in out)


def test_the_story_is_one_screen_and_its_words_agree(capsys):
    assert main(["run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # One more line names the page.
    assert len(lines) <= 31
    assert [line for line in lines if len(line) > 90 or line != line.rstrip()] == []
    names = " ".join(line[:10] for line in lines).split()
    assert names[-8:] == ["data", "time", "right?", "harder", "gradients", "cost", "fused", "next"]
    rows = (re.fullmatch(r" {10}(\w.*?) +(\d) +(\d) +(\d) +(\d)", line) for line in lines)
    digits = {row[1]: [int(row[k]) for k in range(2, 6)] for row in rows if row}
    # The same rows with a larger mean: what README promises.
    assert digits["stablenorm"] == [7, 7, 7, 7]
    assert digits["plain NumPy"] == sorted(digits["plain NumPy"], reverse=True)
    assert digits["plain NumPy"][2] <= 4
    assert digits["E[x^2] - E[x]^2"][2:] == [0, 0]


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line(tmp_path, capsys, monkeypatch):
    """It once showed the place in our code, and a line of it."""

    def warn(problem):
        warnings.warn("gamma should be float32", RuntimeWarning, stacklevel=2)
        return compute(problem)

    compute = story.Problem.compute
    monkeypatch.setattr(story.Problem, "compute", warn)
    assert main(["run", save(tmp_path, x=X)]) == 0
    assert capsys.readouterr().err == "stablenorm: gamma should be float32\n"


FULL = "stablenorm: No space left on device\n"


@pytest.mark.parametrize(
    ("where", "status", "words"),
    [
        # The status was once 1, that of a failed check; shells return 141 after SIGPIPE.
        ("run x.npz | true", 141, ""),
        ("run --digests | true", 141, ""),
        ("--version | true", 141, ""),
        ("run x.npz >&-", 0, ""),
        ("run x.npz >/dev/full", 2, FULL),
        ("run --digests >/dev/full", 2, FULL),
        # The status was once 1.
        ("run no.npz 2>/dev/full", 2, ""),
    ],
)
def test_output_that_goes_nowhere(where, status, words):
    if "/dev/full" in where and not Path("/dev/full").exists():
        pytest.skip("a disk that is full is Linux's")
    np.savez("x.npz", x=X)
    # Output is buffered, as for users: Rich met the broken pipe in a table, and exited with 1.
    python = f"env -u PYTHONUNBUFFERED {sys.executable}"
    script = f"{python} -m stablenorm {where}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", words)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        # It was said of x, whatever was too large.
        (MemoryError("Unable to allocate 9 GiB"), 2, "Unable to allocate 9 GiB"),
        (MemoryError(), 2, "memory is exhausted"),
    ],
)
def test_an_interrupted_out_leaves_what_was_there(
    tmp_path, capsys, monkeypatch, error, status, words
):
    path = save(tmp_path, x=X)
    (tmp_path / "out.npz").write_bytes(b"older")

    def half(file, **_):
        file.write(b"half")
        raise error

    monkeypatch.setattr(np, "savez", half)
    assert main(["run", path, "--out", "out.npz"]) == status
    assert (tmp_path / "out.npz").read_bytes() == b"older"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npz", "out.npz"]
    assert capsys.readouterr().err == f"stablenorm: {words}\n"


@pytest.mark.parametrize(
    ("shape", "dtype"), [((9000, 256), "f2"), ((90_000, 1), "f2"), ((1, 2500), "f4")]
)
def test_run_asks_for_the_memory_that_it_takes(shape, dtype, tmp_path, monkeypatch, request):
    """Many elements, many rows, or one long row; it once took 6.4 times x, and asked for 4."""
    asked = []
    monkeypatch.setattr(stablenorm.cli.files, "check_memory", asked.append)
    # Leave out what does not grow with x, as the first run does; let tracemalloc see all results.
    monkeypatch.setattr(stablenorm.diagnosis, "BLOCK", 1 << 12)
    for name in ("ORACLE", "CHECK", "HARDER", "TIMED"):
        monkeypatch.setattr(story, f"_{name}_ELEMENTS", 100)
    request.addfinalizer(partial(set_idle_limit, set_idle_limit(0)))
    assert main(["run", save(tmp_path, x=X)]) == 0
    save(tmp_path, x=np.random.default_rng(0).standard_normal(shape).astype(dtype))
    tracemalloc.start()
    try:
        assert main(["run", "in.npz"]) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0.5 * asked[-1] < peak < asked[-1]


@pytest.mark.parametrize("wrong", ["y", "dx", "dgamma", "dbeta"])
def test_a_wrong_result_fails_the_run(tmp_path, capsys, monkeypatch, wrong):
    """One element is 1 % off: the oracle and finite differences see it, and the exit status is 1."""

    def broken(function):
        def call(*args, **options):
            results = function(*args, **options)
            first = results[0] if wrong == "y" else getattr(results, wrong)
            first.flat[0] *= 1.01
            return results

        return call

    forward, backward, *others = story.NORMS["layer"]
    pair = (broken(forward), backward) if wrong == "y" else (forward, broken(backward))
    monkeypatch.setitem(story.NORMS, "layer", (*pair, *others))
    path = save(tmp_path, x=X, gamma=X[0], beta=X[1], dy=X)
    # The picture of the page takes a second.
    assert main(["run", path, *["--html", "page.html"] * (wrong == "y")]) == 1
    assert "A CHECK FAILED." in capsys.readouterr().out
    page = Path("page.html").read_text("utf8") if wrong == "y" else ""
    assert wrong != "y" or ('"verdict FAIL">A CHECK' in page and '<td class="FAIL">FAIL' in page)


@pytest.mark.parametrize("mode", ["fast", "nearest", "broken nearest"])
def test_misrounded_elements_are_counted_and_fail_nearest(mode, capsys, tmp_path, monkeypatch):
    """One element is within 0.501 ulp but not the nearest float: by fast, and by a broken nearest."""
    cases = (c for c in near_midpoints() if c.output == "y")
    case = next(c for c in cases if layer_norm(*c[:4])[c.where] != c.expected)
    *_, rounding = mode.split()
    if "broken" in mode:
        fast = lambda *a, **_: layer_norm_forward(*a)
        monkeypatch.setitem(story.NORMS, "layer", (fast, *story.NORMS["layer"][1:]))
    path = save(tmp_path, **dict(zip(case._fields[:5], case[:5], strict=True)))
    assert main(["run", path, "--rounding", rounding]) == ("broken" in mode)
    shown = " ".join(capsys.readouterr().out.split())
    missed = int(mode != "nearest")
    assert f"rounding {rounding}" in shown
    assert re.search(rf" y +(PASS|FAIL) [^a-z]* {missed} of {case.x.size} ", shown)
    assert ("A CHECK FAILED" in shown) == ("broken" in mode)


@pytest.mark.parametrize("command", ["run", "diagnose", "check", "bench"])
def test_help_teaches_and_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert "exit status:" in shown
    assert ("THE CODE OF THE FILE IS RUN" in shown) == (command == "check")
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert main(["help", command]) == 0
    assert capsys.readouterr().out == shown
    # Without a command, the help lists all commands.
    assert (main([]), main(["help"])) == (2, 0)
    out, err = capsys.readouterr()
    assert (out[:17], err) == ("usage: stablenorm", "")
    assert re.search(rf"^    {command}\b", out, re.MULTILINE)


def test_a_terminal_shows_the_verdict_bold_and_coloured(capsys, monkeypatch):
    plain = "FAIL: dx\nbeta  PASS\n"
    for terminal, no_color in itertools.product([False, True], repeat=2):
        monkeypatch.setattr(sys.stdout, "isatty", partial(bool, terminal))
        monkeypatch.setenv("NO_COLOR", "1")
        if not no_color:
            monkeypatch.delenv("NO_COLOR")
        print_lines("beta  PASS", bold="FAIL: dx\n")
        shown = capsys.readouterr().out
        assert re.sub("\x1b.[0-9]*m", "", shown) == plain
        assert ("\x1b[1m\x1b[31mFAIL\x1b[39m: dx\x1b[22m" in shown) == (terminal and not no_color)
        assert (shown == plain) != (terminal and not no_color)


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("command", ["run", "diagnose --dtype float16", "bench --shape 2 8"])
def test_no_line_is_padded_or_too_wide(command, width, capsys, monkeypatch):
    """Tables were padded, and paragraphs one line of 350 characters, where no terminal is."""
    monkeypatch.setenv("COLUMNS", "60")
    if width == 100:
        monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(timing, "measure_interleaved", call_once)
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    # Tables and words such as paths are not broken.
    lines = [line for line in lines if width == 100 or "  " not in line.strip()]
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []
    assert [line for line in lines if line != line.rstrip()] == []


def test_an_interrupt_during_imports_is_one_line():
    """Ctrl-C in the first tenth of a second once printed a traceback of twelve lines."""
    code = "import sys; sys.meta_path.insert(0, type('', (), {'find_spec': stop})()); import stablenorm_command; sys.exit(stablenorm_command.main())"
    stop = "def stop(self, name, *_):\n    if name == 'stablenorm': raise KeyboardInterrupt\n"
    done = run_python(stop + code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stablenorm: interrupted\n")


# ---- bench, costs, the page of run ----


def call_once(calls, **_):
    """Run every call once, instead of timing it."""
    for call in calls.values():
        call()
    return {name: timing.Timing(1e-3 * k, 0.9e-3 * k, 2e-3 * k) for k, name in enumerate(calls, 1)}


def test_bench_writes_every_combination(monkeypatch):
    """The figures are faked: only the combinations count."""
    monkeypatch.setattr(timing, "measure_interleaved", call_once)
    monkeypatch.setattr("stablenorm.threads._chosen", None)
    # The copy of 2^31 parts once never ended.
    copied = lambda *_: print if _[2] <= os.cpu_count() else pytest.fail("too many parts")
    monkeypatch.setattr(timing, "make_copy", copied)
    monkeypatch.setattr(backends, "_default", lambda: "numpy")
    dtypes = "--dtype", "float32", "--dtype", "bfloat16"
    shapes = "--shape", "2", "3", "8", "--shape", "16"
    roundings = "--rounding", "fast", "--rounding", "nearest"
    assert (
        main(["bench", *shapes, *dtypes, *roundings, "--json", "r.json", "--threads", "2147483647"])
        == 0
    )
    written = json.loads(Path("r.json").read_text())
    # Two of each: shapes, dtypes, directions; plain NumPy, two roundings fresh and with out=, a copy.
    assert len(written["rows"]) == 2 * 2 * 2 * (1 + 2 * 2 + 1)
    for row in written["rows"]:
        is_backward = row["direction"] == "backward" and row["call"] != "a copy of x"
        nbytes = (2 + is_backward) * np.prod(row["shape"])
        nbytes *= 2 if row["dtype"] == "bfloat16" else 4
        assert row["bytes_per_second"] == pytest.approx(nbytes / row["seconds"])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_bytes_held_and_kept_are_what_tracemalloc_sees(kind, dtype, request):
    # No memory of earlier results may be reused: tracemalloc would not see it.
    request.addfinalizer(partial(set_idle_limit, set_idle_limit(0)))
    shape = 1000, 768
    x, dy = np.random.default_rng(0).standard_normal((2, *shape)).astype(dtype)
    norm, pull = FUNCTIONS[kind]
    plain_cache = plain_forward(x, x[0], x[1], kind=kind)[1]
    calls = {"plain NumPy": (partial(plain_forward, x, x[0], x[1], kind=kind),
                             partial(plain_backward, dy, plain_cache, kind))}  # fmt: skip
    for program, name in (("reference", "numpy"), ("fused CPU kernel", "native")):
        if name in BACKENDS:
            forward = partial(norm, x, x[0], x[1], backend=name)
            cache = forward()[1]
            calls[program] = forward, partial(pull, dy, cache)
            held, *_ = cost.count_kept(shape, dtype, kind).values()
            # Float64 in NumPy keeps no more words than the narrower dtypes.
            assert cache.statistics.nbytes == held or (name, dtype) == ("numpy", np.float64)
    for program, pair in calls.items():
        for direction, call in zip(cost.DIRECTIONS, pair, strict=True):
            call()
            tracemalloc.start()
            call()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            held = cost.count_cost(program, direction, shape, dtype, kind).held
            # The formulas leave out a few numbers per row and column.
            assert held <= peak + 2**14 <= 1.06 * held + 2**18, (program, direction)


def test_a_page_is_whole_and_fetches_nothing(capsys):
    name = "<script>alert(1)<b> & $x$ [bold] `code` \"'.npz"
    np.savez(name, x=X)
    assert main(["run", name, "--kind", "rms", "--html", "page.html"]) == 0
    source = Path("page.html").read_text("utf8")
    assert name in html.unescape(source)
    # The page is XML as well.
    elements = list(ET.fromstring(source).iter())
    count = [element.tag.rpartition("}")[2] for element in elements].count
    assert (count("svg"), count("script"), count("h1"), count("pre")) == (3, 0, 1, 0)
    assert count("table") == 2
    fetched = [value for element in elements for key, value in element.items()
               if key.rpartition("}")[2] in {"src", "href", "action"}]  # fmt: skip
    assert all(value.startswith(("#", "data:")) for value in fetched)
    assert not re.search(r"url\((?!#)|@import|@font-face", source)
    # The terminal and the page show the same report.
    shown = capsys.readouterr().out
    assert Path("page.html").resolve().as_uri() in shown
    words = "finite differences in float64, on 3 rows", "digits of y left on the same rows"
    assert all(phrase in shown and phrase in source for phrase in words)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), "")
# Loads the page in a frame of a width, and writes what is wider, or cut, into its own body.
FRAME = """<iframe style="width:{width}px;height:9000px;border:0" srcdoc="{page}"></iframe><script>onload = () => {{
const page = document.querySelector("iframe").contentDocument, cut = []
const edge = page.documentElement.clientWidth
if (page.documentElement.scrollWidth > edge) cut.push("the page")
for (const one of page.querySelectorAll("h1,h2,p,svg,.scroll,svg text"))
  if (one.getBoundingClientRect().right > edge + 1) cut.push(one.textContent.slice(0, 30))
document.body.innerHTML = "<p>" + page.querySelectorAll("svg").length + " " + cut + "</p>" }}</script>"""


@pytest.mark.skipif(not BROWSER, reason="there is no browser")
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_of_the_page_is_cut_in_a_browser(width):
    assert main(["run", "--html", "page.html"]) == 0
    page = html.escape(Path("page.html").read_text("utf8"))
    Path("frame.html").write_text(FRAME.format(width=width, page=page), "utf8")
    options = "--headless --no-sandbox --disable-gpu --dump-dom --window-size=1400,900"
    command = [BROWSER, *options.split(), "--user-data-dir=profile", "frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert "<p>5 </p>" in done.stdout
