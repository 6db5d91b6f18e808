"""Objects of data classes, lists and dictionaries among the arguments: new ones in each call take the same plan, and may be changed."""

import pytest
import torch

import fxpasses
from fxpasses.plans.inputs.arguments import argument_difference, containers_of, describe_arguments, is_record
from tests import children
from tests.fxpasses.plans.programs_with_records import CASES, Batch, Frozen, State, loss, step

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import torch, fxpasses
from tests.fxpasses.plans.programs_with_records import CASES, run
found = {}
for name in CASES:
    torch._dynamo.reset()
    before = fxpasses.stats().graphs
    calls = range(7)[:: int(sys.argv[2])]
    found[name] = [run(name, lambda f: fxpasses.compile(f, cache=sys.argv[1]), calls), fxpasses.stats().graphs - before]
print(json.dumps([found, fxpasses.stats().plans_refused]))
"""


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plans")
    return [children.told_by("-c", PROGRAM, directory, step) for step in ("1", "-1")]


@pytest.mark.parametrize("name", CASES)
def test_a_second_process_compiles_nothing(name, in_two_processes):
    (first, _), (second, refused) = in_two_processes
    assert first[name][0] == []
    assert second[name] == [[], 0], refused


def test_new_objects_in_each_call_take_one_plan(tmp_path):
    compiled = fxpasses.compile(loss, cache=tmp_path)
    before = fxpasses.stats().graphs
    for i in range(60):
        batch = Batch(torch.full((4, 8), i / 60), torch.ones(4, 8))
        torch.testing.assert_close(compiled(batch), loss(batch))
    assert fxpasses.stats().graphs - before == 1
    assert not compiled.why_no_plan


def test_an_object_that_counts_takes_one_plan(tmp_path):
    """It is the same one in each call: of what it collects nothing is read."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    compiled = fxpasses.compile(step, cache=tmp_path)
    mine, theirs = (State(linear, torch.zeros(2, 4)) for _ in range(2))
    with torch.no_grad():
        for i in range(20):
            torch.testing.assert_close(compiled(x, mine), step(x, theirs))
            mine.steps += 1
            mine.losses.append(float(i))
            if i == 3:
                before = fxpasses.stats().graphs
    assert fxpasses.stats().graphs == before
    assert not compiled.why_no_plan


def test_what_differs_is_named():
    def told(batch):
        return describe_arguments((batch,), {}, lambda tensor: None)[0]

    batch = Batch(torch.ones(2), torch.ones(2))
    assert told(batch) == told(Batch(torch.zeros(2), torch.zeros(2)))
    assert (
        argument_difference(told(batch), told(Batch(torch.ones(2), torch.ones(3))))[0]
        == "sizes of argument 0.y"
    )
    other = Batch(torch.ones(2), torch.ones(2), "l1")
    assert argument_difference(told(batch), told(other))[0] == "argument 0.kind"
    assert argument_difference(told(batch), told(Frozen(torch.ones(2))))[0] == "argument 0"


def test_containers_of_arguments():
    inner = {"a": 1}
    batch = Batch(torch.ones(2), torch.ones(2))
    given = ((batch, [1]), {"b": Frozen(inner)}, Batch(inner, None))
    assert containers_of(given) >= {id(batch), id(inner), id(given[0][1]), id(given[1]["b"])}
    assert id(given[2]) not in containers_of(given)  # it may collect something
    assert id(batch.x) not in containers_of(given)
    batch.y = batch
    assert is_record(batch)  # which holds itself
    assert not is_record((batch,))
    assert not is_record(State(None, None))
    inner["itself"] = inner
    assert containers_of(inner) == {id(inner)}
