"""The examples, and the code blocks of the pages on checking: they run, and are true."""

import doctest
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from stablenorm.check import check_gradients
from stablenorm.cli import main

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("check_*.py"))
PAGES = ("how-to/check-your-backward", "explanation/gradient-checking")


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# And what each gets right. A mistake in what several gradients share shows in each of them.
CASES = [(name, mistake) for name in EXAMPLES for mistake in ("", *load(name).MISTAKES)]
SHARED = {"eps is missing from rrms": {"x", "gamma"}}


@pytest.mark.parametrize(("name", "mistake"), CASES)
def test_an_example_passes_and_its_planted_mistakes_are_located(name, mistake):
    example = load(name)
    backward, *wrong = example.MISTAKES[mistake] if mistake else [example.backward]
    for seed in range(1 if mistake else 3):
        args = example.make_args(np.random.default_rng(seed))
        report = check_gradients(example.forward, backward, args, names=example.NAMES, rng=seed)
        assert report.verdict == ("FAIL" if mistake else "PASS"), f"seed {seed}\n{report}"
        blamed = {result.name for result in report.arguments if result.verdict == "FAIL"}
        assert blamed == SHARED.get(mistake, {*wrong}), str(report)
        # Fine enough to see all of the mistakes: the smallest changes dx by 1e-5 of itself.
        assert mistake or all(result.resolution < 1e-8 for result in report.arguments), str(report)


def blocks(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_blocks_of_a_page_run_and_print_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"__name__": "page"}
    printed = ""
    files = set()
    for kind, text in blocks(page):
        if kind == "python" and (file := re.match(r"# (\w+\.py)\n", text)):
            Path(file[1]).write_text(text, encoding="utf-8")
            files.add(file[1])
        elif kind == "python":
            out = io.StringIO()
            with redirect_stdout(out):
                # A reader copies one block after another into a session.
                exec(compile(text, f"{page}.md", "exec"), names)  # noqa: S102
            printed = out.getvalue()
        elif kind == "text":
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(text, printed, flags), printed
        elif kind == "sh" and text.startswith("stablenorm check"):
            assert main(shlex.split(text)[1:]) == 1
            # The sentence that the page quotes.
            assert "the mean of g is missing from dx" in capsys.readouterr().out
    for file in files:
        sys.modules.pop(file.removesuffix(".py"), None)


# ---- a kernel in C ----

# Mistakes in the kernel, and the test that must fail then.
KERNEL_MISTAKES = [
    ("", "", ""),
    ("dgamma[j] += dy[j] * xhat;", "dgamma[j] += dy[j];", "test_gradients"),
    ("of_g += (double)gamma[j] * dy[j] / n;", "of_g = 0;", "test_hard_inputs"),
    ("double sum = 0", "float sum = 0", "test_hard_inputs"),
]


@pytest.mark.parametrize(("right", "wrong", "test"), KERNEL_MISTAKES)
def test_the_page_on_checking_a_kernel(right, wrong, test, tmp_path):
    """Its kernel compiles, and its tests find mistakes in it."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    texts = {language: [text for kind, text in blocks("how-to/check-a-kernel") if kind == language]
             for language in ("c", "python", "sh")}  # fmt: skip
    assert right in texts["c"][0]
    (tmp_path / "kernel.c").write_text(texts["c"][0].replace(right, wrong))
    (tmp_path / "test_kernel.py").write_text("\n\n".join(texts["python"]))
    subprocess.run(texts["sh"][0].split(), cwd=tmp_path, check=True)
    options = "-q -x -p no:cacheprovider -c /dev/null --rootdir . test_kernel.py"
    command = [sys.executable, "-m", "pytest", "-k", test, *options.split()]
    # Plugins would take half of the time.
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    failed = set(re.findall(r"^FAILED test_kernel.py::(\w+)", done.stdout, re.MULTILINE))
    assert (failed, done.returncode) == ({test} - {""}, bool(test)), done.stdout[-3000:]


def test_a_few_steps_of_train_digits_lower_the_loss():
    network = load("train_digits")
    losses, parameters = network.train(0.1, network.DEPTH, steps=60)
    # Guessing costs log(10) = 2.30, and is what the network begins at.
    assert np.mean(losses[-10:]) < 2.2 < np.mean(losses[:5])
    assert network.measure_accuracy(parameters, count=300) > 0.15
