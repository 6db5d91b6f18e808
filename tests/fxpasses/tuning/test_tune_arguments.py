"""What ``fxpasses.tune`` is given: wrong arguments, and one place for its results."""

import threading

import pytest
import torch

import fxpasses
from fxpasses import OptionsError
from fxpasses.compiling.options import Options


def with_state():
    calls = []

    @fxpasses.graph_pass(graphs=["joint"])
    def counting(gm):
        "Counts its calls."
        calls.append(gm)
        return False

    return counting


counting = with_state()
tuned_before = fxpasses.Tuned(torch.nn.ReLU(), (), 0.0, 0, False, torch.relu)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"goal": "speed"}, "'time', 'memory', 'both', got 'speed'"),
        ({"seconds": -1}, "at least 0"),
        ({"passes": ["reassociate_matmul"]}, "did you mean 'reassociate_matmuls'"),
        ({"passes": [counting]}, "holds state.*closure .*calls"),
        ({"options": {"passes": []}}, "name those to choose from"),
        ({"options": {"memory_budgt": 1}}, "did you mean"),
        ({"model": 3}, "a module or function"),
        ({"kwargs": ["scale"]}, "keyword arguments by name"),
        ({"clock": 3}, "returns seconds"),
        ({"clock": lambda: "now"}, "returns seconds"),
        ({"clock": lambda since: since}, "without arguments that returns seconds"),
        ({"kwargs": {1: torch.ones(2)}}, "keyword arguments by name"),
        ({"options": []}, "options by name"),
        ({"fresh": "yes"}, "'fresh'.*True or False"),
        ({"show": "no"}, "'show'.*True or False"),
        ({"model": torch.compile(torch.nn.ReLU())}, "compiled already"),
        ({"model": torch.compile(torch.sin)}, "compiled already"),
        ({"model": fxpasses.compile(torch.nn.ReLU())}, "compiled already"),
        ({"model": tuned_before}, "compiled already"),
        ({"allow": None}, "'allow': expected a list of passes"),
        ({"passes": "tuned"}, "'passes': expected a list of passes"),
        ({"cache": "here", "options": {"cache": "there"}}, "two places"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(OptionsError, match=message):
        fxpasses.tune(**{"model": torch.nn.ReLU(), "inputs": torch.ones(2), **arguments})


@pytest.mark.parametrize("call", [fxpasses.tune, fxpasses.check])
def test_what_cannot_be_copied_is_refused(call):
    model, options = torch.nn.Linear(2, 2), {"compiler": "eager"}
    model.lock = threading.Lock()
    with pytest.raises(OptionsError, match=r"model: Linear cannot be copied.*lock.*__deepcopy__"):
        call(model, torch.ones(2), show=False, options=options)
    inputs = (torch.ones(2), threading.Lock())
    with pytest.raises(OptionsError, match="inputs: lock cannot be copied"):
        call(lambda x, lock: x.sin(), inputs, show=False, options=options)


def test_tuned_is_one_word():
    assert Options.parse({"passes": "tuned"}).passes == Options.parse().passes
    with pytest.raises(OptionsError, match="did you mean 'tuned'"):
        Options.parse({"passes": "tune"})
    options = {"passes": "tuned", "compiled_autograd": True}
    with pytest.raises(OptionsError, match="leave one of them out"):
        torch.compile(lambda x: x + 1, backend="fxpasses", options=options)(torch.ones(2))


@pytest.mark.parametrize("as_option", [True, False])
def test_there_is_one_place_for_results(tmp_path, monkeypatch, as_option):
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path / "auto"))
    options, place = {"compiler": "eager"}, tmp_path / "here"
    how = {"options": {**options, "cache": place}} if as_option else {"options": options, "cache": place}
    fxpasses.tune(torch.nn.ReLU(), torch.ones(2), seconds=20, show=False, **how)
    assert list(place.glob("tuned/calls/*.call"))
    assert not (tmp_path / "auto" / "tuned").exists()  # the hash of our own source may be remembered there


def test_memory_is_not_measured_inside_of_the_users_profile():
    with torch.profiler.profile() as profile, pytest.raises(OptionsError, match="tune outside of it"):
        fxpasses.tune(torch.nn.ReLU(), torch.ones(2), goal="memory")
    assert profile.events() is not None
