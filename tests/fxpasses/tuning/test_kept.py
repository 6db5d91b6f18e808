"""What is kept of tuning on disk, and what is left aside of it."""

import json
import time

import pytest
import torch

import fxpasses
from fxpasses.errors import OptionsError
from fxpasses.tuning import search
from fxpasses.tuning.kept import ResultLocation, TuningResult, read_ledger
from fxpasses.tuning.tuned_graph import valid_choice
from fxpasses.tuning.tuning_ledger import Entry
from fxpasses.tuning.tuning_session import Session


def test_files_that_are_damaged_or_that_others_may_write_to_are_left_aside(tmp_path, caplog):
    place = ResultLocation.in_cache(str(tmp_path), "g", "f", {"torch": "1"})
    place.write(TuningResult("g", (), (Entry("g", "a", "no gain", ratio=1.0, low=0.9, high=1.1),)))
    assert place.read()[0].entries[0].measured == "1.00 [0.90, 1.10]"
    assert ResultLocation.in_cache(str(tmp_path), "other size", "f", {"torch": "1"}).read()[1] is False
    assert ResultLocation.in_cache(str(tmp_path), "g", "f", {"torch": "2"}).read() is None
    (path,) = (tmp_path / "tuned").glob("*/*.json")
    entries = [Entry("h", "b", "kept", ratio=ratio) for ratio in (0.5, 0.7, 0.8)]
    other = ResultLocation.in_cache(str(tmp_path), "h", "another family", {"torch": "1"})
    other.write(TuningResult("h", (), (*entries, Entry("h", "c", "loses", ratio=1.2)), {"torch": "1"}))
    assert place.median_ratios() == {"b": 0.7}
    assert ResultLocation.in_cache(str(tmp_path), "g", "f", {"torch": "2"}).median_ratios() == {}
    assert ResultLocation.in_cache("off", "g", "f", {}).median_ratios() == {}
    other.file.unlink()
    data = json.loads(path.read_text())
    others = [{"format": 0}, {"entries": [{"x": 1}]}, {"graph": None}, {"steps": [None]}, {"steps": 3}]
    others += [{"ratio": ["x"]}, {"ratio": [0.5]}, {"entries": [{**data["entries"][0], "ratio": "1.0"}]}]
    damaged = [json.dumps({**data, **other}) for other in others]
    for text in ("{", "[]", "[" * 100_000, *damaged):
        path.write_text(text)
        caplog.clear()
        assert place.read() is place.read() is None
        assert len(caplog.records) <= 1, "it is said once"
    path.write_text(json.dumps(data))
    assert place.read() is not None
    path.chmod(0o666)
    assert place.read() is None
    assert ResultLocation.in_cache("off", "g", "f", {}).read() is None


@pytest.mark.parametrize(
    "settings", [{"memory_budget": 9}, {"no_option": 1}, [1], {"inductor": {"no_option": 1}}, {"inductor": 5}]
)
def test_settings_that_there_are_not_are_not_used(settings, caplog):
    step = {"name": "a", "settings": settings, "digest": None, "allowed": False, "places": None}
    assert valid_choice(TuningResult("g", (step,), ()), Session(accepts_any_candidates=True)) is None
    assert "what was tuned before is not used" in caplog.text


def test_a_choice_that_fails_for_another_size_is_struck_there():
    step = {"name": "a", "settings": {"memory_budget": 0.8}, "digest": None}
    tried = (Entry("g", "a", "kept", ratio=0.8), Entry("g", "b", "loses", ratio=1.2))
    kept = TuningResult("g", (step,), tried, {"threads": "2", "goal": "time"})
    own = kept.struck_for("g", "it fails")
    assert [(e.step, e.outcome, e.verdict) for e in own.entries] == [
        ("a", "struck", "it fails"),
        ("b", "loses", ""),
    ]
    other = kept.struck_for("h", "it fails")
    assert (other.graph, other.steps, other.struck) == ("h", (), "it fails")
    assert other.entries == (Entry("h", "a", "struck", verdict="it fails", situation=kept.situation),)


@fxpasses.graph_pass(graphs=["inference"], numerics="bitwise")
def negates_twice(gm):
    "Negates what is returned, and negates it again."
    (output,) = gm.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        with gm.graph.inserting_before(output):
            there = gm.graph.call_function(torch.ops.aten.neg.default, (node,))
            output.replace_input_with(node, gm.graph.call_function(torch.ops.aten.neg.default, (there,)))
    return True


@pytest.mark.parametrize("where", ["off", "a file"])
def test_what_cannot_be_kept_is_used_all_the_same(tmp_path, monkeypatch, where):
    torch._dynamo.reset()
    monkeypatch.setattr(search, "_outcome", lambda *measured: "kept")
    monkeypatch.setattr(search, "_is_confirmed", lambda *measured: True)
    (tmp_path / "a file").write_text("")
    how = {"cache": where if where == "off" else tmp_path / where / "cache", "options": {"compiler": "eager"}}
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        tuned = fxpasses.tune(model, x, passes=[negates_twice], clock=time.process_time, show=False, **how)
        assert tuned.steps == ("negates_twice",)
        fxpasses.reset_stats()
        for given in (x, torch.randn(3, 4)):
            torch.testing.assert_close(tuned(given), model(given))
    stats = fxpasses.stats()
    assert (stats.pass_changes["negates_twice"], stats.tuned_reused, stats.tuned) == (2, 2, 0)


def test_a_ledger_that_does_not_exist_is_not_called_damaged(tmp_path):
    with pytest.raises(OptionsError, match="cannot be read: No such file"):
        read_ledger(tmp_path / "none.json")
    (tmp_path / "some.json").write_text("{}")
    with pytest.raises(OptionsError, match="is no ledger"):
        read_ledger(tmp_path / "some.json")
