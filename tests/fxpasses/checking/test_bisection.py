"""Bisection: the stage, the pass and the site that make a script fail."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
from pathlib import Path

import pytest
from rich.console import Console

from fxpasses import BisectError, bisect_script
from fxpasses.checking.bisecting import bisection as bisection
from fxpasses.checking.bisecting.failure_rate import Answer
from fxpasses.pass_manager.limits import VARIABLE, Limits
from tests.fxpasses.checking.repros import in_this_process

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.fxpasses.checking import plants

def f(x):
    return x.neg().neg() + (x + 1).neg().neg() + (x + 17).neg().neg().sin()

x = torch.linspace(0, 1, 4)
compiled = torch.compile(f, backend="fxpasses", options={{"compiler": "eager", "passes": [plants.{item}]}})
torch.testing.assert_close(compiled(x), f(x))
"""


@pytest.fixture
def script(tmp_path):
    def write(item):
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(root=str(ROOT), item=item))
        return path

    return write


class Scripted:
    """Stands for the processes: fails beyond some point, and counts."""

    def __init__(self, fails, record=None):
        self.fails, self.record, self.runs = fails, record or {"passes": ["a", "b", "c"]}, []

    def __call__(self, search, limits):
        self.runs.append(limits)
        return Answer(1, int(self.fails(limits)), self.record, "")


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    (tmp_path / "any.py").write_text("pass")

    def search(fails, record=None, output="out"):
        processes = Scripted(fails, record)
        monkeypatch.setattr(bisection._Search, "_run", lambda self, limits: processes(self, limits))
        verdict = bisect_script(tmp_path / "any.py", output=tmp_path / output)
        return verdict, processes

    return search


def passes_from(count):
    return lambda limits: limits.stage == "inductor" or (limits.stage == "passes" and limits.passes >= count)


@pytest.mark.slow
def test_a_wrong_pass_is_found_with_site_and_repro(script, tmp_path):
    verdict = bisect_script(script("wrong_at_one_site"), output=tmp_path / "out")
    assert (verdict.stage, verdict.pass_name) == ("pass", "wrong_at_one_site")
    assert "(x + 17).neg().neg()" in verdict.site
    assert verdict.position == 2
    assert "the script ends with: AssertionError" in verdict.text
    assert (tmp_path / "out" / "verdict.txt").read_text().strip() == verdict.text
    status, _, errors = in_this_process(verdict.repro)
    assert status == 1, errors


@pytest.mark.parametrize(
    ("stage", "fails"),
    [
        ("eager", lambda limits: True),
        ("capture", lambda limits: limits.stage != "eager"),
        ("partition", lambda limits: limits.stage not in ("eager", "capture")),
        ("pass", passes_from(2)),
        ("inductor", lambda limits: limits.stage == "inductor"),
        ("inductor", lambda limits: limits.stage == "inductor" and limits.lowerings != 0),
        ("", lambda limits: False),
    ],
)
def test_each_stage_can_be_guilty(scripted, stage, fails):
    verdict, _ = scripted(fails)
    assert verdict.stage == stage
    assert verdict.pass_name == ("b" if stage == "pass" else "")


def test_of_forty_sites_one_is_found_in_few_runs(scripted):
    record = {"passes": ["a", "b", "c"], "sites": [f"site {i}" for i in range(40)]}
    fails = passes_from(2)
    verdict, processes = scripted(
        lambda limits: fails(limits) and (limits.sites is None or limits.sites > 17), record
    )
    assert (verdict.site, verdict.position) == ("site 17", 17)
    assert len(processes.runs) <= 18  # four of them confirm it


def test_of_inductors_lowerings_one_is_found(scripted):
    record = {"passes": [], "lowerings": [f"op {i}" for i in range(25)]}
    verdict, _ = scripted(
        lambda limits: limits.stage == "inductor" and (limits.lowerings is None or limits.lowerings > 9),
        record,
    )
    assert (verdict.stage, verdict.site) == ("inductor", "op 9")


def test_a_killed_search_goes_on_where_it_was(scripted, tmp_path):
    verdict, first = scripted(passes_from(3))
    state = tmp_path / "out" / "state.json"
    known = json.loads(state.read_text())
    forgotten = list(known["answers"])[-2:]
    for key in forgotten:
        del known["answers"][key]
    state.write_text(json.dumps(known))
    again, second = scripted(passes_from(3))
    assert again.text == verdict.text
    asked = {limits.to_json() for limits in second.runs}
    assert asked <= set(forgotten)
    assert 0 < len(second.runs) < len(first.runs)


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"script": 1}', "answers"])
def test_a_state_file_of_another_form_is_refused(tmp_path, state):
    script, file = tmp_path / "any.py", tmp_path / "state.json"
    script.write_text("pass")
    if state == "answers":  # of this script, and damaged
        key = hashlib.sha256(script.read_bytes() + b"[]").hexdigest()
        state = json.dumps({"script": key, "format": bisection._FORMAT, "answers": {"{}": {"ran": 1}}})
    file.write_text(state)
    with pytest.raises(BisectError, match=r"state\.json' is no state of a search"):
        bisect_script(script, state=file, output=tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why_not"),
    [
        ("print('it is wrong: 1 became 2'); raise SystemExit(1)", ""),
        ("print('it is right')", "it is right"),
        ("raise AttributeError('no operator')", "AttributeError: no operator"),
    ],
)
def test_a_repro_file_is_offered_if_it_shows_the_fault_by_itself(scripted, tmp_path, code, why_not):
    repro = tmp_path / "repro.py"
    repro.write_text(code)
    record = {"passes": [], "repro": str(repro)}
    verdict, _ = scripted(lambda limits: limits.stage != "eager", record)
    assert verdict.repro == ("" if why_not else str(repro))
    assert (f"`python {repro}` shows it" in verdict.text) == (not why_not)
    assert f"registers with torch is there (else: {why_not})" in verdict.text or not why_not


def test_another_script_does_not_get_the_answers(scripted, tmp_path):
    scripted(passes_from(3))
    (tmp_path / "any.py").write_text("pass  # changed")
    verdict, processes = scripted(passes_from(1))
    assert verdict.pass_name == "a"
    assert len(processes.runs) > 2


@pytest.mark.slow
def test_a_script_that_is_missing_or_never_compiles(tmp_path):
    with pytest.raises(BisectError, match="no script"):
        bisect_script(tmp_path / "nowhere.py")
    (tmp_path / "other.py").write_text("raise SystemExit('my own fault')")
    with pytest.raises(BisectError, match="my own fault"):
        bisect_script(tmp_path / "other.py", output=tmp_path / "out")


def now_and_then(guilty, chances, seed):
    """Fails with the first probability where the fault is in the compilation, else with the second."""
    draws = random.Random(seed)
    return lambda limits: draws.random() < chances[0 if guilty(limits) else 1]


@pytest.mark.parametrize("chances", [(0.9, 0.0), (0.5, 0.0), (0.3, 0.0), (1.0, 0.1), (0.8, 0.1)])
def test_each_search_of_a_flaky_script_says_the_same(scripted, chances):
    found = [
        scripted(now_and_then(passes_from(2), chances, seed), output=f"out{seed}")[0] for seed in range(8)
    ]
    answered = [verdict for verdict in found if verdict.pass_name or not verdict.flaky]
    assert {verdict.pass_name for verdict in answered} == {"b"}
    assert len(answered) >= 6  # others say that nothing is certain
    assert any(verdict.flaky and "The script is flaky" in verdict.text for verdict in found)
    assert all("Just before, it fails in" in verdict.text for verdict in answered)


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_no_stage_is_blamed_for_a_script_that_fails_now_and_then_by_itself(scripted, chance):
    for seed in range(8):
        verdict, _ = scripted(now_and_then(lambda limits: True, (chance, 0), seed), output=f"out{seed}")
        assert verdict.stage in ("", "eager")
        assert not verdict.repro


def test_a_verdict_is_refuted_by_more_runs(scripted):
    first = iter([True, False])  # as it is, it fails; in eager not; and then never again
    verdict, processes = scripted(lambda limits: next(first, False))
    assert verdict.flaky
    assert verdict.stage in ("", "eager")
    assert "1 of" in verdict.text
    assert len(processes.runs) > 20


def test_the_bar_does_not_end_beyond_its_end(monkeypatch, tmp_path):
    (tmp_path / "any.py").write_text("pass")
    said = io.StringIO()
    record = {"passes": ["a", "b", "c"], "sites": [f"site {i}" for i in range(40)]}
    processes = Scripted(passes_from(2), record)
    monkeypatch.setattr(bisection._Search, "_run", lambda self, limits: processes(self, limits))
    console = Console(file=said, force_terminal=True, width=120)
    bisect_script(tmp_path / "any.py", output=tmp_path / "bar", console=console)
    shown = re.findall(r"(\d+)/(\d+)", said.getvalue())
    assert shown
    assert all(int(done) <= int(total) for done, total in shown)
    assert len(processes.runs) > 8  # more than the bar starts with


def test_limits_survive_the_environment(monkeypatch):
    limits = Limits(stage="passes", passes=2, sites=7)
    assert Limits.from_json(limits.to_json()) == limits
    assert VARIABLE == "FXPASSES_LIMITS"
    with pytest.raises(ValueError, match="unknown stage"):
        Limits.from_json('{"stage": "everything"}')
