"""The comparison of gradient checkers, as far as it needs no peer."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def shootout(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("shootout")
    # The tests of check_layer_norm have the offsets; here they would take two minutes.
    counts = {"float64, (4, 8)": {"0": {"PASS": 1}}}
    monkeypatch.setattr(module, "measure_offsets", lambda _: counts)
    yield module
    for name in ("shootout", "shootout_tools", "page", "peers"):
        sys.modules.pop(name, None)


def test_it_runs_without_peers(shootout, monkeypatch):
    tools = importlib.import_module("shootout_tools")
    monkeypatch.setattr(tools, "LOADERS", {"torch": lambda: 1 / 0})
    monkeypatch.setattr(shootout, "SETTINGS", shootout.SETTINGS[:1])
    cases = ["mean(g) missing", "eps omitted", "plain"]
    run = shootout.run(1, cases)
    assert run["missing"] == {"torch": "ZeroDivisionError: division by zero"}
    verdicts = {}
    for cell in run["cells"]:
        verdicts.setdefault(cell["tool"], "")
        verdicts[cell["tool"]] += cell["verdicts"]
    # What the original of a rule lets pass, the rule lets pass.
    assert verdicts == {
        "check_layer_norm": "ffa",
        "check_gradients": "ffa",
        "Theano's rule": "faa",
        "rel < 1e-7": "ffa",
        "complex step": "ffa",
    }


def test_a_false_alarm_of_ours_is_an_error(shootout, monkeypatch, capsys):
    tools = importlib.import_module("shootout_tools")
    liar = tools.Tool("check_gradients", "", "", large=False, check=lambda _: "found")
    monkeypatch.setattr(shootout, "load_tools", lambda: ([liar], {}))
    assert shootout.main(["--quick"]) == 1
    assert "FALSE ALARM" in capsys.readouterr().err


def test_the_page_is_that_of_the_results(shootout):
    page = (BENCHMARKS.parent / "docs" / "evidence" / "gradient-checkers.md").read_text("utf-8")
    assert page.startswith(shootout.page(json.loads(shootout.RESULTS.read_text("utf-8"))))
