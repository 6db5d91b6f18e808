"""Hooks of the model itself run in Python around its graphs: with a plan, too, in this process and in the next one."""

import itertools

import pytest

from tests import children
from tests.fxpasses.plans.programs_with_hooks import HOOKS, MODELS

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import torch, fxpasses
from tests.fxpasses.plans.programs_with_hooks import HOOKS, MODELS, run
found = {}
for make in MODELS:
    for kind in HOOKS:
        torch._dynamo.reset()
        fxpasses.reset_stats()
        agree = run(make, kind, lambda model: fxpasses.compile(model, cache=sys.argv[1]))
        found[f"{make.__name__} {kind}"] = [agree, fxpasses.stats().graphs]
print(json.dumps(found))
"""
CASES = [f"{make.__name__} {kind}" for make, kind in itertools.product(MODELS, HOOKS)]


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plans")
    return [children.told_by("-c", PROGRAM, directory) for _ in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_eager(case, in_two_processes):
    for found in in_two_processes:
        assert found[case][0] == [True] * 6


@pytest.mark.parametrize("case", [case for case in CASES if "name" not in case and case[:2] != "In"])
def test_a_second_process_compiles_nothing(case, in_two_processes):
    assert in_two_processes[1][case][1] == 0
