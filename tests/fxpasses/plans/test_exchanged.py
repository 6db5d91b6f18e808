"""Tensors that a model keeps from call to call: a second process compiles nothing, and whatever is put in their places is noticed."""

import itertools
import json

import pytest
import torch

import fxpasses
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.exchanged import Exchanged, numbers_of_exchanged
from fxpasses.plans.watched_state import Watch
from tests import children
from tests.fxpasses.plans.programs_that_keep_tensors import CHANGES, MODELS, Given, Memory

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
    return [_found(children.run("-c", PROGRAM, directory, which)) for which in ("first", "later")]


def _found(child):
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MODELS)
def test_a_second_process_compiles_nothing(name, in_two_processes):
    (first, _), (second, refused) = in_two_processes
    assert first[f"{name} nothing"][0] == []
    assert second[f"{name} nothing"] == [[], 0], refused


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
            "fxpasses.plans.walk.Walk.over", lambda *args: pytest.fail("the model is walked over")
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


def test_exchanged_tensors_are_told_from_others():
    weight, values = torch.ones(3), {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    tensors = [weight, values["a"], values["b"]]
    exchanged = Exchanged({1: (values, "a"), 2: (values, "b")}, tensors)
    assert exchanged.hold()
    values["a"] = torch.full((2, 3), 2.0)
    assert exchanged.hold()
    assert tensors[1] is values["a"]
    assert exchanged.memory() == [values["a"].data_ptr(), values["b"].data_ptr()]
    assert not exchanged.are_none_of([weight, values["b"]])
    assert exchanged.are_none_of([weight])
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


@pytest.mark.parametrize(
    "places", [{}, {0: 0}, {0: 1}], ids=["elsewhere, too", "without memory", "with gradients"]
)
def test_what_cannot_be_told_is_refused(places):
    values = {"a": torch.ones(2), "b": torch.empty(0)}
    key = "b" if places == {0: 0} else "a"
    with pytest.raises(NoPlan, match="changes an object"):
        numbers_of_exchanged(
            [(values, key)],
            dict.fromkeys(places, (values, key)),
            [values[key]],
            reads_gradients=places == {0: 1},
        )


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
