"""Models of torch's own classes, such as ``nn.Sequential``: Dynamo traces them through another function, whose frame is part of a plan."""

import pytest

from tests import children
from tests.fxpasses.plans.programs_of_torch_modules import WRAPPED

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import torch, fxpasses
from tests.fxpasses.plans.programs_of_torch_modules import WRAPPED, run
found = {}
for name in WRAPPED:
    torch._dynamo.reset()
    before = fxpasses.stats().graphs
    differ = run(name, lambda model: fxpasses.compile(model, cache=sys.argv[1]))
    found[name] = [differ, fxpasses.stats().graphs - before]
print(json.dumps([found, fxpasses.stats().plans_refused]))
"""


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plans")
    return [children.told_by("-c", PROGRAM, directory) for _ in range(2)]


@pytest.mark.parametrize("name", WRAPPED)
def test_a_second_process_compiles_nothing(name, in_two_processes):
    (first, _), (second, refused) = in_two_processes
    assert first[name][0] == []
    assert second[name] == [[], 0], refused
