"""The documentation: it builds without a warning, refers to nothing that is not there, needs no network."""

import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stablenorm
from stablenorm.cli import _parser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ_ON_THE_WEB = [*PAGES, *ROOT.glob("*.md"), ROOT / "examples" / "README.md"]

# Attributes that a browser fetches by itself, as opposed to a link that a reader may follow.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|embed|object|link(?![^>]*rel="(?:canonical|author)))"""
    r"""[^>]*?(?:src|href|data|srcset)="(?:https?:)?//[^"]*\""""
    r"""|url\(\s*["']?(?:https?:)?//|@import\s+["'](?:https?:)?//""",
    re.IGNORECASE,
)
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def anchors(path):
    """Return what a link into a page may end in, as GitHub and MyST both make it of headings."""
    text = re.sub(r"(?ms)^```.*?^```", "", path.read_text("utf-8"))
    headings = re.findall(r"^#{1,3} +(.+?) *$", text, re.MULTILINE)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in words}


def dead_links(path):
    """Return the links of a page, to other pages and files of this project, that lead nowhere."""
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


# A figure of time, memory or speed, outside code, formulas and what a script writes between markers.
FIGURE = re.compile(
    r"\b(?:\d[\d.,]*|half|third|quarter|fifth|tenth|twentieth|(?:two|three|four|five|six|ten|hundred|tens of))\s*"
    r"(?:times (?:as|the|faster|slower|longer)|%|[mu]s\b|[MG]B\b|of (?:the|its) speed)"
)
# Pages whose figures nobody measured: bytes by formulas, errors and probabilities by proof, what an
# example prints, sizes to plan with, ranges of formats, constants of a method.
FIGURES = {
    "docs/explanation": "complexity error-analysis fusing gradient-checking stability",
    "docs/how-to": "dask diagnose-your-data half-precision train",
    "src/stablenorm": "gradients timing",
}


def test_no_figure_is_written_by_hand():
    sources = [*READ_ON_THE_WEB, *(ROOT / "src" / "stablenorm").rglob("*.py")]
    found = {}
    for path in sources:
        text = path.read_text("utf-8")
        if path.suffix == ".py":
            text = "\n".join(re.findall(r'"""(.*?)"""', text, re.DOTALL))
        text = re.sub(r"(?s)<!-- (\w+):begin -->.*?<!-- \1:end -->|\$[^$]*\$", "", text)
        text = re.sub(r"(?ms)^```.*?^```", "", text)
        top = "/".join(path.relative_to(ROOT).parts[:2])
        if FIGURE.search(text) and top != "docs/evidence":
            found.setdefault(top, []).append(path.stem)
    assert {top: " ".join(sorted(names)) for top, names in found.items()} == FIGURES


@pytest.mark.parametrize("path", READ_ON_THE_WEB, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_of_a_page_is_dead(path):
    assert dead_links(path) == []


def test_the_scripts_and_tests_that_pages_name_are_there():
    text = "".join(page.read_text("utf-8") for page in READ_ON_THE_WEB)
    named = set(re.findall(r"\b((?:benchmarks|tests|examples)/\w+\.py)(?:::(\w+))?", text))
    assert sum(bool(test) for _, test in named) > 20
    there = {file: (ROOT / file).exists() and (ROOT / file).read_text("utf-8") for file, _ in named}
    missing = [each for each in sorted(named) if f"def {each[1]}" not in (there[each[0]] or "")]
    assert missing == []


def test_the_names_of_the_package_on_the_pages_exist():
    """Those in code spans; those of docstrings are links, which the build holds."""
    pages = [page for page in PAGES if page.name != "changelog.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    names = set(re.findall(r"`(stablenorm(?:\.\w+)+)`", text))
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(name)


def test_every_public_name_is_in_the_reference_once():
    """The names that its directives document."""
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
    # Every warning is an error. No proxy leads anywhere: a build that fetched something would fail.
    done = run("sphinx", "-W", "-n", "--keep-going", "-q", "-b", "html", DOCS, tmp_path)
    assert done.returncode == 0, done.stderr
    kinds = "html", "css", "svg"
    files = {
        path: path.read_text("utf-8") for each in kinds for path in tmp_path.rglob(f"*.{each}")
    }
    assert len(files) > len(PAGES)
    found = [path.name for path, text in files.items() if FETCHED.search(text)]
    assert found == []
    # The text that is shown, but for code: no formula that Markdown took for text.
    hidden = re.compile(r"<(pre|code|script|annotation)\b.*?</\1>|<[^>]*>", re.DOTALL)
    formula = re.compile(r"\\(?:operatorname|text|frac|hat|bigl)\b.{40}")
    texts = {
        path.name: hidden.sub("", text) for path, text in files.items() if path.suffix == ".html"
    }
    assert {name: match[0] for name, text in texts.items() if (match := formula.search(text))} == {}
    names = [name for action in _parser()._actions for name in action.choices or ()]
    assert "diagnose" in names
    html = files[tmp_path / "reference" / "command-line.html"]
    assert [name for name in names if f'id="stablenorm-{name}"' not in html] == []
    shutil.rmtree(tmp_path)
