"""Tensors that a model keeps from call to call: a second process compiles nothing, and whatever is put in their places is noticed."""

import copy
import itertools

import pytest
import torch

import fxpasses
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.exchanged import Exchanged, Place, numbers_of_exchanged, places_of
from fxpasses.plans.objects.watched_state import Watch
from fxpasses.plans.walks.walk import Walk
from tests import children
from tests.fxpasses.plans.programs_that_keep_tensors import CHANGES, MODELS, Given, Memory, Trainer, Tupled

PROGRAM = """
import json, sys
import torch, fxpasses
from tests.fxpasses.plans.programs_that_keep_tensors import CHANGES, MODELS, differ, run
found = {}
for name in MODELS:
    for change in CHANGES if sys.argv[2] == "later" else ("nothing",):
        torch._dynamo.reset()
        before = fxpasses.stats()
        with torch.no_grad():
            wanted, result = run(name, change, lambda model: fxpasses.compile(model, cache=sys.argv[1]))
        after = fxpasses.stats()
        found[f"{name} {change}"] = [differ(wanted, result), after.graphs - before.graphs]
print(json.dumps([found, fxpasses.stats().plans_refused]))
"""


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plans")
    return [children.told_by("-c", PROGRAM, directory, which) for which in ("first", "later")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_second_process_compiles_nothing(name, in_two_processes):
    (first, _), (second, refused) = in_two_processes
    assert first[f"{name} nothing"][0] == []
    assert second[f"{name} nothing"] == [[], 0], refused


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), [*itertools.product(MODELS, CHANGES)])
def test_what_is_put_in_its_place(name, change, in_two_processes):
    assert in_two_processes[1][0][f"{name} {change}"][0] == []


def test_a_call_looks_at_nothing_else_again(tmp_path, monkeypatch):
    model = MODELS["Recurrent"]()
    compiled, x = fxpasses.compile(model, cache=tmp_path), torch.ones(2, 4)
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
        monkeypatch.setattr(
            "fxpasses.plans.walks.walk.Walk.walk_call", lambda *args: pytest.fail("the model is walked over")
        )
        wanted = torch.tanh(model.linear(x) + model.state) * 3
        torch.testing.assert_close(compiled(x), wanted)


def test_objects_that_are_new_in_each_request(tmp_path):
    torch.manual_seed(0)
    model, x = Given(), torch.ones(2, 4)
    compiled = fxpasses.compile(model, cache=tmp_path)
    with torch.no_grad():
        for request in range(40):
            memory, wanted = Memory(), Memory()
            before = fxpasses.stats().graphs
            for _ in range(10):
                torch.testing.assert_close(compiled(x, memory), model(x, wanted))
            assert request == 0 or fxpasses.stats().graphs == before
    assert not compiled.why_no_plan


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Tupled, Trainer])
def test_states_of_several_graphs(tmp_path, monkeypatch, kind):
    for process in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = kind()
        eager = copy.deepcopy(model)
        compiled = fxpasses.compile(model if kind is Tupled else model.step, cache=tmp_path)
        called = eager if kind is Tupled else eager.step
        before = fxpasses.stats().graphs
        with torch.set_grad_enabled(kind is Trainer), monkeypatch.context() as patch:
            for step in range(8):
                if (
                    step == 5 and compiled.plan_files
                ):  # with torch 2.13 Dynamo finds nothing to compile in a call of an LSTM
                    patch.setattr(Walk, "walk_call", lambda *args: pytest.fail("a model is walked over"))
                x = torch.randn(3, 2, 4)
                torch.testing.assert_close(compiled(x), called(x))
                if kind is Tupled:
                    torch.testing.assert_close(model.state, eager.state)
                else:
                    torch.testing.assert_close(model.mean, eager.mean)
                    torch.testing.assert_close(model.model.weight, eager.model.weight)
        assert process == 0 or fxpasses.stats().graphs == before


def test_exchanged_tensors_are_told_from_others():
    weight, values = torch.ones(3), {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    tensors = [weight, values["a"], values["b"]]
    exchanged = Exchanged({1: Place(values, "a"), 2: Place(values, "b")}, tensors)
    assert exchanged.hold()
    values["a"] = torch.full((2, 3), 2.0)
    assert exchanged.hold()
    assert tensors[1] is values["a"]
    assert exchanged.storage_addresses() == [values["a"].data_ptr(), values["b"].data_ptr()]
    assert not exchanged.are_disjoint_from([weight, values["b"]])
    assert exchanged.are_disjoint_from([weight])
    both = torch.ones(2, 3)
    for other in (
        torch.ones(3, 2),
        torch.ones(2, 3).double(),
        torch.ones(3, 2).t(),
        None,
        torch.nn.Parameter(torch.ones(2, 3)),
    ):
        values["a"] = other
        assert not exchanged.hold()
    values["a"], values["b"] = both, both[0, :2]
    assert not exchanged.hold()  # which share memory
    values["a"], values["b"] = both, torch.ones(2)
    assert exchanged.hold()
    del values["b"]
    assert not exchanged.hold()


@pytest.mark.parametrize("kind", ["elsewhere, too", "with a gradient", "none", "without memory"])
def test_what_cannot_be_told_is_refused(kind):
    values = {"a": torch.ones(2), "b": torch.empty(0), "c": torch.ones(2, requires_grad=True)}
    values["c"].grad = torch.ones(2)
    key = {"without memory": "b", "with a gradient": "c"}.get(kind, "a")
    places = {} if kind == "elsewhere, too" else {0: Place(values, key)}
    tensors = [torch.ones(2)] if kind == "none" else [values[key]]
    if kind in ("none", "without memory"):  # nobody reads what is there, or it is another content later
        assert numbers_of_exchanged([(values, key)], {} if kind == "none" else places, tensors, set()) == []
        return
    with pytest.raises(NoPlan, match="changes an object"):
        numbers_of_exchanged([(values, key)], places, tensors, set())


def test_tuples_of_tensors_have_places():
    values = {"state": (torch.ones(2), torch.zeros(2)), "one": torch.ones(3), "mixed": (torch.ones(1), 2)}
    places = places_of(values, "state", values["state"])
    assert [place.now() for place in places] == list(values["state"])
    assert places_of(values, "one", [values["one"]]) == [Place(values, "one")]
    assert places_of(values, "mixed", [values["mixed"][0]]) == []
    assert places_of(values, "gone", []) == []
    values["state"] = (torch.ones(2),)
    assert [place.now() for place in places] == [None, None]
    values["state"] = [torch.ones(2), torch.zeros(2)]
    assert places[0].now() is None


def test_the_rest_of_a_dictionary_is_still_watched(checks):
    values = {"a": 1, "b": [2], "c": 3}
    watch = Watch()
    watch.dictionary(values)
    watch.release(values, "a")
    watch.release(values, "c")
    for _ in range(2):
        assert watch.holds()
        values["a"], values["c"] = object(), object()
    values["b"] = [2]
    assert not watch.holds()
    values = {"a": 1, "b": 2}
    watch = Watch()
    watch.dictionary(values)
    watch.release(values, "a")
    values["d"] = 1
    assert not watch.holds()
