"""The shoot-out of `make shootout`, as far as it needs no peer."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def shootout(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("shootout")
    for name in ("shootout", "shootout_page", "shootout_peers", "shootout_tools", "machine"):
        sys.modules.pop(name, None)


def test_it_runs_without_peers_and_writes_a_table(shootout, tmp_path, monkeypatch, capsys):
    small = [s for s in shootout.SETTINGS if s.name == "(4, 8)"]
    monkeypatch.setattr(shootout, "SETTINGS", small)
    monkeypatch.setattr(shootout, "QUICK_SEEDS", 1)
    cases = shootout.make_cases()
    assert [bool(case.words) for case in cases] == [True] * 13 + [False] * 5
    # Of all these a few, for the time they take.
    few = [*cases[:3], cases[-1]]
    monkeypatch.setattr(shootout, "make_cases", lambda: few)
    # No peer that happens to be there is wanted, nor one that is not.
    monkeypatch.setattr(shootout, "load_tools", lambda: ([], {"torch": "ImportError: none"}))
    assert shootout.main(["--quick", "--out", str(tmp_path)]) == 0
    run = json.loads((tmp_path / "shootout.json").read_text())
    tools = [tool["name"] for tool in run["tools"]]
    assert len(run["cells"]) == len(tools) * 4
    assert {len(cell["verdicts"]) for cell in run["cells"]} == {1}
    page = (tmp_path / "shootout.md").read_text()
    assert "torch (ImportError: none)" in page
    # A heading, one row for each, the times: all of one width.
    table = page.partition("## (4, 8)")[2].partition("## ")[0].strip().splitlines()
    assert len(table) == 2 + 4 + 1
    assert {line.count("|") for line in table} == {len(tools) + 2}
    assert "check_gradients" in capsys.readouterr().out


def outcome(shootout, word, case):
    tools = importlib.import_module("shootout_tools")
    (tool,) = (t for t in tools.plain_tools() if t.name == word)
    (found,) = (c for c in shootout.make_cases() if c.name == case)
    return shootout.one(tool, found, shootout.SETTINGS[0], 100)["verdict"]


@pytest.mark.parametrize("word", ["Theano", "rel < 1e-4", "rel < 1e-7", "complex step"])
def test_rules_written_anew_judge_as_their_originals_do(shootout, word):
    assert outcome(shootout, word, "plain") == "accepted"
    assert outcome(shootout, word, "mean(g) missing") == "found"
    # What the original lets pass, it lets pass.
    expected = "accepted" if word in ("Theano", "rel < 1e-4") else "found"
    assert outcome(shootout, word, "rstd rounded to f32") == expected


def test_a_false_alarm_of_ours_is_an_error(shootout, tmp_path, monkeypatch, capsys):
    tools = importlib.import_module("shootout_tools")
    liar = tools.our_tools("")[1]._replace(check=lambda _: tools.said(True))
    monkeypatch.setattr(shootout, "our_tools", lambda _: [liar])
    monkeypatch.setattr(shootout, "plain_tools", list)
    monkeypatch.setattr(shootout, "load_tools", lambda: ([], {}))
    assert shootout.main(["--quick", "--out", str(tmp_path)]) == 1
    assert "FALSE ALARM" in capsys.readouterr().err
    assert "has false alarms on plain: 100% of seeds" in (tmp_path / "shootout.md").read_text()
