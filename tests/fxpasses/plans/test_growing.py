"""Caches that grow in each call: a second process compiles nothing, and whatever is put in their places is noticed."""

import itertools
import json

import pytest
import torch

from fxpasses.plans.inputs.exchanged import Exchanged, Place
from fxpasses.plans.objects.watched_state import Watch
from tests import children
from tests.fxpasses.plans.programs_that_grow import CACHES, CHANGES

HOW = dict(zip(CACHES, itertools.cycle(["given", "own"])))
CHANGED = ["InAttributes", "InList"]
PROGRAM = """
import json, sys
import torch, fxpasses
from tests.fxpasses.plans.programs_that_grow import CHANGES, differ, run
found = {}
for name, how in json.loads(sys.argv[2]).items():
    for change in CHANGES if name in json.loads(sys.argv[3]) else ("nothing",):
        torch._dynamo.reset()
        before = fxpasses.stats()
        with torch.no_grad():
            wanted, result = run(name, how, change, lambda model: fxpasses.compile(model, cache=sys.argv[1]))
        after = fxpasses.stats()
        found[f"{name} {change}"] = [differ(wanted, result), after.graphs - before.graphs]
print(json.dumps([found, fxpasses.stats().plans_refused]))
"""


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plans")
    how = json.dumps(HOW)
    return [children.told_by("-c", PROGRAM, directory, how, json.dumps(changed)) for changed in ([], CHANGED)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_a_second_process_compiles_nothing(name, in_two_processes):
    (first, _), (second, refused) = in_two_processes
    assert first[f"{name} nothing"][0] == []
    assert second[f"{name} nothing"] == [[], 0], refused


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), [*itertools.product(CHANGED, CHANGES)])
def test_what_is_put_in_its_place(name, change, in_two_processes):
    assert in_two_processes[1][0][f"{name} {change}"][0] == []


def test_tensors_that_grow_are_told_from_others():
    values = [torch.zeros(2, 3), "between", torch.zeros(2, 3)]
    tensors = [values[0], values[2]]
    exchanged = Exchanged({0: Place(values, 0), 1: Place(values, 2)}, tensors, grow=[0])
    values[0] = torch.ones(2, 70)
    assert exchanged.hold()
    assert tensors[0] is values[0]
    for other in (torch.ones(2), torch.ones(2, 3).double(), torch.nn.Parameter(torch.ones(2, 3)), None):
        values[0] = other
        assert not exchanged.hold()
    values[0] = torch.ones(2, 3)
    assert exchanged.hold()
    values[2] = torch.ones(2, 4)
    assert not exchanged.hold()
    del values[1:]
    assert not exchanged.hold()


def test_the_rest_of_a_list_is_still_watched(checks):
    values = [1, [2], 3]
    watch = Watch()
    watch.sequence(values)
    watch.release(values, 0)
    watch.release(values, 2)
    for _ in range(2):
        assert watch.holds()
        values[0], values[2] = object(), object()
    values[1] = [2]
    assert not watch.holds()
    values = [1, 2]
    watch = Watch()
    watch.sequence(values)
    watch.release(values, 0)
    values.append(3)
    assert not watch.holds()
