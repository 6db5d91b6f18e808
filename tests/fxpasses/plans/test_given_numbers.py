"""Numbers among the arguments: those that were others before are inputs of a plan, and a second process compiles nothing for new ones."""

import threading

import pytest
import torch

import fxpasses
from fxpasses.plans.inputs.given_numbers import (
    GivenNumbers,
    names_of_numbers,
    numbers_among,
    without_given_numbers,
)
from tests import children
from tests.fxpasses.plans.programs_with_numbers import CASES, Module, rest, start, step

PROGRAM = """
import json, sys
import torch, fxpasses
from tests.fxpasses.plans.programs_with_numbers import CASES, differ, run
found = {}
for name in CASES:
    for later in (False, True) if sys.argv[2] == "later" else (False,):
        torch._dynamo.reset()
        before = fxpasses.stats()
        differing = differ(run(name, lambda model: fxpasses.compile(model, cache=sys.argv[1]), later))
        found[f"{name} {later}"] = [differing, fxpasses.stats().graphs - before.graphs]
print(json.dumps([found, fxpasses.stats().plans_refused]))
"""
FIXED = ("inside", "rest", "defaults")
"""Numbers inside of containers, ``*args``: a plan for each; and a second function of the same kind."""


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plans")
    return [children.told_by("-c", PROGRAM, directory, which) for which in ("first", "later")]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_second_process_compiles_nothing(name, in_two_processes):
    (first, _), (second, refused) = in_two_processes
    assert first[f"{name} False"][0] == []
    assert second[f"{name} False"][0] == []
    if name not in FIXED:
        assert second[f"{name} False"][1] == 0, refused


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_other_numbers_in_a_second_process(name, in_two_processes):
    differing, graphs = in_two_processes[1][0][f"{name} True"]
    assert differing == []
    if name in ("start", "write", "returns", "breaks", "learns", "learns integers"):
        assert graphs == 0


def test_numbers_among_arguments():
    assert numbers_among((1, 2.5, True, None, "3", torch.ones(1)), {"a": 4, "b": [5]}) == {
        "0": 1,
        "1": 2.5,
        "a": 4,
    }
    assert names_of_numbers(start, ["1"]) == {"position": "1"}
    assert names_of_numbers(step, ["1", "scale"]) == {"lr": "1", "scale": "scale"}
    assert names_of_numbers(Module(), ["1", "2"]) == {"t": "1", "n": "2"}
    assert names_of_numbers(rest, ["1", "2"]) == {}
    assert names_of_numbers(len, ["0"]) == {}
    described = (("int", "3"), ("list", ("int", "4"))), (("a", ("float", "0.5")), ("b", ("bool", "True")))
    assert without_given_numbers(described) == (
        (("int",), ("list", ("int", "4"))),
        (("a", ("float",)), ("b", ("bool", "True"))),
    )


def test_numbers_of_a_call():
    given = GivenNumbers()
    given.update_from((3, 0.5, 2**70), {"a": -1})
    assert given.fit_kinds({"0": "int", "1": "float", "a": "int"})
    assert not given.fit_kinds({"0": "float"})
    assert not given.fit_kinds({"2": "int"})  # more than an input can hold
    assert not given.fit_kinds({"b": "int"})
    assert given.have_values({"0": "3", "a": "-1"})
    assert not given.have_values({"1": "0.25"})
    assert given.as_input("0") == 3
    torch.testing.assert_close(given.as_input("1"), torch.tensor(0.5, dtype=torch.float64))


def test_keywords_may_have_any_names():
    given = GivenNumbers()
    numbers = {name: i for i, name in enumerate(dir(given))}
    for _ in range(2):
        given.update_from((), numbers)
        assert given.fit_kinds(dict.fromkeys(numbers, "int"))
        assert given.have_values({name: str(i) for name, i in numbers.items()})
        assert [given.as_input(name) for name in numbers] == list(numbers.values())


def test_each_thread_has_its_own_numbers(tmp_path):
    compiled = fxpasses.compile(start, cache=tmp_path)
    x, wrong = torch.randn(4, 8), []
    for position in (1, 5, 3):
        compiled(x, position)

    def call(first):
        for position in range(first, first + 200):
            if not torch.allclose(compiled(x, position), start(x, position), atol=1e-5):
                wrong.append(position)

    threads = [threading.Thread(target=call, args=(first,)) for first in (2, 1002, 2002)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_numbers_in_a_saved_file(tmp_path):
    compiled, x = fxpasses.compile(start, cache=tmp_path), torch.randn(4, 8)
    for position in (1, 5):
        compiled(x, position)
    fxpasses.save(compiled, tmp_path / "start.fxp")
    loaded = fxpasses.load(tmp_path / "start.fxp", start, trust=True)
    before = fxpasses.stats().graphs
    for position in (1, 9, 4):
        torch.testing.assert_close(loaded(x, position), start(x, position))
    assert fxpasses.stats().graphs == before
