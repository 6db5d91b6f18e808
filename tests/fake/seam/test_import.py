"""Importing the packages changes nothing in torch: neither attributes of its modules and classes nor kernels of its operators."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, json, sys, types
import torch, torch._dynamo, torch._inductor.compile_fx, torch._functorch.aot_autograd
import torch._export.non_strict_utils, torch._inductor.constant_folding
from torch._C import _dispatch_dump, _dispatch_get_all_op_names

# what keeps registrations of operators alive and the names of namespaces grow with every library of operators
GROWN = {"torch.library._keep_alive", "torch.ops._dir"}
IGNORED = {"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__annotations__", "__warningregistry__"}
kept = []  # an object that is gone would leave its id to another one

def state():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if key in IGNORED or key.startswith("_compile_counter"):
                continue
            kept.append(value)
            if f"{name}.{key}" in GROWN:
                continue
            found[f"{name}.{key}"] = size_of(value)
            if isinstance(value, types.FunctionType):
                found[f"{name}.{key}.__code__"] = id(value.__code__)
            if isinstance(value, type) and value.__module__ == name:
                for own, inner in list(vars(value).items()):
                    if own not in IGNORED and callable(inner) or isinstance(inner, (property, staticmethod, classmethod)):
                        kept.append(inner)
                        found[f"{name}.{key}.{own}"] = id(inner)
    return found

def size_of(value):
    # lists of rules (what Dynamo skips) are part of torch, too; tables of caches and of what was imported are not
    return (id(value), len(value) if type(value) is list else 0)

def kernels():
    return {name: _dispatch_dump(name) for name in _dispatch_get_all_op_names()}

before, registered = state(), kernels()
for package in sys.argv[1:]:
    importlib.import_module(package)
after, now = state(), kernels()
print(json.dumps([
    sorted(name for name in before if name in after and before[name] != after[name]),
    sorted(name for name in registered if registered[name] != now.get(name)),
]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "packages",
    [["fake", "fake.library"], ["compiled_autograd"], ["fxpasses", "fxpasses.backend", "fxpasses.testing"]],
)
def test_importing_changes_nothing_in_torch(packages):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *packages], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    attributes, kernels = json.loads(done.stdout)
    assert attributes == []
    assert kernels == []


WITH_MODES = """
import gc
import torch, fake
from fake.kernels import lazy_parameters
from fake.tensors.modules import PATCHES
from fake.seam.patches import LEDGER

patches = (*PATCHES, *lazy_parameters.PATCHES)
for _ in range(2):
    with fake.FakeTensorMode() as mode:
        assert all(map(LEDGER.is_in_force, patches))
        layer = torch.nn.LazyLinear(5).double()
        assert layer(torch.ones(2, 3, dtype=torch.float64)).shape == (2, 5)
    del mode, layer
    gc.collect()
    assert not any(map(LEDGER.is_in_force, patches))
    assert torch.nn.UninitializedParameter.__new__.__module__ == "torch.nn.parameter"
    assert torch.nn.Module._apply.__module__ == "torch.nn.modules.module"
try:
    with torch._subclasses.FakeTensorMode():
        torch.nn.LazyLinear(5)
except RuntimeError as error:
    assert "already associated" in str(error)
else:
    raise AssertionError("torch's own mode makes lazy modules now: ours need no patch for it")
"""


@pytest.mark.slow
def test_what_modes_change_goes_with_the_last_of_them():
    done = subprocess.run([sys.executable, "-c", WITH_MODES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
