"""Pages build, their links and names exist, they fetch nothing; examples and code blocks do what they say."""

import doctest
import importlib.util
import io
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

import stablenorm
from stablenorm import check_gradients
from stablenorm.cli import _parser, main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ_ON_THE_WEB = [*PAGES, *ROOT.glob("*.md"), ROOT / "examples" / "README.md"]

# Attributes that a browser fetches by itself, unlike a link that a reader may follow.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|embed|object|link(?![^>]*rel="(?:canonical|author)))"""
    r"""[^>]*?(?:src|href|data|srcset)="(?:https?:)?//[^"]*\""""
    r"""|url\(\s*["']?(?:https?:)?//|@import\s+["'](?:https?:)?//""",
    re.IGNORECASE,
)
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def anchors(path):
    """Return the anchors of a page, as GitHub and MyST both make them from headings."""
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text("utf-8"))
    headings = re.findall(r"^#{1,3} +(.+?) *$", text, re.MULTILINE)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in words}


def dead_links(path):
    """Return the links of a page to missing pages, anchors and files of this project."""
    text = CODE.sub("", path.read_text("utf-8"))
    links = re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text)
    dead = []
    for target in links + re.findall(r'(?:src|srcset|href)="([^"]+)"', text):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        is_held = there.suffix != ".md" or not anchor or anchor in anchors(there)
        if not re.match("[a-z]+:", target) and not (there.exists() and is_held):
            dead.append(target)
    return dead


@pytest.mark.parametrize("path", READ_ON_THE_WEB, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_of_a_page_is_dead(path):
    assert dead_links(path) == []


def test_the_scripts_and_tests_that_pages_name_are_there():
    text = "".join(page.read_text("utf-8") for page in READ_ON_THE_WEB)
    named = set(re.findall(r"\b((?:benchmarks|tests|examples)/\w+\.py)(?:::(\w+))?", text))
    assert sum(bool(test) for _, test in named) > 20
    sources = {file: (ROOT / file).read_text("utf-8") for file, _ in named}
    missing = [(file, test) for file, test in sorted(named) if f"def {test}" not in sources[file]]
    assert missing == []


def test_the_names_of_the_package_on_the_pages_exist():
    """Names in code spans are checked here; names in docstrings are links, which the build checks."""
    pages = [page for page in PAGES if page.name != "changelog.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    names = set(re.findall(r"`(stablenorm(?:\.\w+)+)`", text))
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(name)


def test_every_public_name_is_in_the_reference_once():
    """A name counts if a directive documents it."""
    directive = r"^\.\. (currentmodule|autofunction|autoclass|py:data):: ([\w.]+)$"
    names = []
    for page in (DOCS / "reference").glob("*.md"):
        for kind, name in re.findall(directive, page.read_text("utf-8"), re.MULTILINE):
            if kind == "currentmodule":
                module = name
            else:
                names.append(f"{module}.{name}")
    assert sorted(names) == sorted(set(names))
    top = {name for name in names if name.count(".") == 1}
    assert top == {f"stablenorm.{name}" for name in stablenorm.__all__}


def run(*module):
    command = [sys.executable, "-m", *module]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_word_is_spelled_as_codespell_knows_it():
    pytest.importorskip("codespell_lib")
    command = ["codespell_lib", "--ignore-words", DOCS / "words.txt"]
    done = run(*command, *READ_ON_THE_WEB, ROOT / "src", ROOT / "examples")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_pages_build_hold_every_command_and_fetch_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("sphinx")
    # -W makes every warning an error.
    done = run("sphinx", "-W", "-n", "--keep-going", "-q", "-b", "html", DOCS, tmp_path)
    assert done.returncode == 0, done.stderr
    kinds = "html", "css", "svg"
    files = {p: p.read_text("utf-8") for kind in kinds for p in tmp_path.rglob(f"*.{kind}")}
    assert len(files) > len(PAGES)
    fetching = [path.name for path, text in files.items() if FETCHED.search(text)]
    assert fetching == []
    # No text outside code may show a formula: Markdown would have taken it for text.
    hidden = re.compile(r"<(pre|code|script|annotation)\b.*?</\1>|<[^>]*>", re.DOTALL)
    formula = re.compile(r"\\(?:operatorname|text|frac|hat|bigl)\b.{40}")
    texts = {p.name: hidden.sub("", text) for p, text in files.items() if p.suffix == ".html"}
    assert {name: match[0] for name, text in texts.items() if (match := formula.search(text))} == {}
    names = [name for action in _parser()._actions for name in action.choices or ()]
    assert "diagnose" in names
    html = files[tmp_path / "reference" / "command-line.html"]
    assert [name for name in names if f'id="stablenorm-{name}"' not in html] == []
    shutil.rmtree(tmp_path)


# ---- the examples, and the code blocks of the pages on checking ----

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("check_*.py"))
CHECKING = ("how-to/check-your-backward", "explanation/gradient-checking", "how-to/train")


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# "" is the right backward. A mistake in a term that several gradients share shows in all of them.
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
        # The resolution must show all mistakes: the smallest changes dx by 1e-5 of itself.
        assert mistake or all(result.resolution < 1e-8 for result in report.arguments), str(report)


def blocks(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", CHECKING)
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
            if "print(" in text:
                printed = subprocess.run(
                    [sys.executable, file[1]], capture_output=True, text=True, check=True
                ).stdout
        elif kind == "python":
            out = io.StringIO()
            with redirect_stdout(out):
                # One session for all blocks, as a reader would copy them.
                exec(compile(text, f"{page}.md", "exec"), names)  # noqa: S102
            printed = out.getvalue()
        elif kind == "text":
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(text, printed, flags), printed
        elif kind == "sh" and text.startswith("stablenorm check"):
            assert main(shlex.split(text)[1:]) == 1
            printed = capsys.readouterr().out
    for file in files:
        sys.modules.pop(file.removesuffix(".py"), None)


def test_the_example_that_run_names_has_the_mistake_that_it_says(capsys):
    assert main(["check", str(ROOT / "examples" / "my_norm.py")]) == 1
    assert "the mean of g is missing from dx" in capsys.readouterr().out


# A mistake in the kernel, as text to replace and its replacement, and the test that must fail.
KERNEL_MISTAKES = [
    ("", "", ""),
    ("dgamma[j] += dy[j] * xhat;", "dgamma[j] += dy[j];", "test_gradients"),
    ("of_g += (double)gamma[j] * dy[j] / n;", "of_g = 0;", "test_digits"),
    ("double sum = 0", "float sum = 0", "test_digits"),
]


@pytest.mark.parametrize(("right", "wrong", "test"), KERNEL_MISTAKES)
def test_the_page_on_checking_a_kernel(right, wrong, test, tmp_path):
    """The kernel of the page compiles, and its tests find mistakes in it."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    texts = {language: [text for kind, text in blocks("how-to/test-a-kernel") if kind == language]
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
    # The network begins with guesses, which cost log(10) = 2.30.
    assert np.mean(losses[-10:]) < 2.2 < np.mean(losses[:5])
    assert network.measure_accuracy(parameters, count=300) > 0.15
