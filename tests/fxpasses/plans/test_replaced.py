"""Functions of torch that somebody replaces: a plan is left aside, in the next call and in the next process."""

import functools
import os
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpasses
from fxpasses.plans import _torch
from fxpasses.plans.compile import Compiled
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.origin import is_third_party, origin_of
from fxpasses.plans.walks.reads import walk_reads
from fxpasses.plans.walks.replaced import (
    are_functions_unchanged,
    check_methods,
    replacements_in,
    split_lazy_module_reads,
    torch_functions_in,
    watch_names,
)
from fxpasses.plans.walks.walk import Walk
from tests import children

REPLACED = {
    "by a function": lambda: lambda x, *rest: x,
    "by another of torch": lambda: F.group_norm,
    "by one that says it is the same": lambda: functools.wraps(F.layer_norm)(lambda x, *rest: x),
    "by a cache of another": lambda: functools.lru_cache(F.group_norm),
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_function_that_a_layer_calls(monkeypatch, how):
    named = torch_functions_in([nn.LayerNorm.forward.__code__])
    assert ("torch.nn.modules.normalization", "F.layer_norm", origin_of(F.layer_norm)) in named
    walk = Walk()
    watch_names(walk, named)
    assert are_functions_unchanged(named)
    assert walk.watch.holds()
    monkeypatch.setattr(F, "layer_norm", REPLACED[how]())
    assert not are_functions_unchanged(named)
    assert not walk.watch.holds()
    monkeypatch.undo()
    assert are_functions_unchanged(named)


class _Scales:
    def __init__(self, by):
        self.by = by

    def __call__(self, x, *rest):
        return x * self.by


def _defined_on_one_line(by):
    """Other values of ``by`` give other code, at the same place in the same file."""
    namespace = {}
    exec(compile(f"def scales(x, *rest): return x * {by}", "/patches.py", "exec"), namespace)
    return namespace["scales"]


@pytest.mark.parametrize(
    "make",
    [
        _defined_on_one_line,
        lambda by: lambda x, *rest: x * by,
        _Scales,
        lambda by: functools.partial(_Scales(by)),
    ],
    ids=["other code", "another closure", "another object", "another partial object"],
)
def test_what_a_replacement_does(monkeypatch, make):
    """Torch's code calls it, and it is where the last one was, in a file that has been edited since."""

    def content(by):
        monkeypatch.setattr(torch, "layer_norm", make(by))
        reads = replacements_in([F.layer_norm.__code__])
        return reads, walk_reads(Walk(), reads)

    assert replacements_in([F.layer_norm.__code__]) == []
    first = content(2)
    assert ("torch.nn.functional", "torch", "layer_norm") in first[0]
    assert content(2) == first
    assert content(3)[1] != first[1]


def test_functions_of_others():
    text = {}
    exec("def typed(x): return x", text)
    others = text["typed"], REPLACED["by one that says it is the same"](), _asked, property(_asked)
    assert all(map(is_third_party, others))
    own = (
        torch.sigmoid,
        F.layer_norm,
        F.linear,
        torch.Tensor.norm,
        *vars(torch.Tensor).values(),
        functools.wraps,
    )
    assert not any(map(is_third_party, own))


def test_modules_that_are_not_loaded_have_their_functions():
    assert are_functions_unchanged([("torch.a_module_that_is_not_there", "function", "somewhere:1 function")])


def test_functions_in_modules_that_torch_imports_later_are_told_by_their_names(monkeypatch):
    assert torch._dynamo.graph_break  # it is imported now
    own, function = (__name__, "torch", "relu"), (__name__, "torch", "_dynamo", "graph_break")
    module, torch_again = function[:3], (*function[:3], "torch", "relu")
    there, later = split_lazy_module_reads([own, module, function, torch_again])
    assert there == [own]
    assert later == [
        ("torch._dynamo", "graph_break", origin_of(torch._dynamo.graph_break)),
        ("torch._dynamo", "torch.relu", origin_of(torch.relu)),
    ]
    assert are_functions_unchanged(later)
    monkeypatch.setattr(torch._dynamo, "graph_break", lambda: None)
    assert not are_functions_unchanged(later)
    monkeypatch.setattr(torch._dynamo, "graph_break", 3)
    assert split_lazy_module_reads([function]) == ([function], [])  # what is no function has to be there


BREAKS = """
import torch

class Breaks(torch.nn.Linear):
    def forward(self, x):
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        torch._dynamo.graph_break()
        return y.relu()

if __name__ == "__main__":
    import fxpasses
    import breaks

    fxpasses.compile(breaks.Breaks(8, 8))(torch.ones(2, 8)).sum().backward()
    stats = fxpasses.stats()
    print(stats.plans_written, stats.plans_used, stats.plans_refused)
"""


@pytest.mark.slow
def test_a_graph_break_by_its_name_has_plans(tmp_path):
    """``torch._dynamo`` is there when the first process makes them, and not when the second one looks for them."""
    (tmp_path / "breaks.py").write_text(BREAKS)
    surroundings = {
        **os.environ,
        "FXPASSES_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    runs = children.run, children.run_fresh
    printed = [run("breaks.py", env=surroundings, cwd=tmp_path).stdout for run in runs]
    assert printed == ["2 0 {}\n", "0 2 {}\n"]


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_methods_of_tensors(monkeypatch, kind):
    def content():
        walk = Walk()
        walk.add("number", 1)  # which looks at the class of all tensors, too
        assert walk.watch.holds()
        return walk._lines

    before = content()

    def uses(x):
        return x.tanh()

    def uses_not(x):
        return x.cos()

    check_methods([uses.__code__, uses_not.__code__])
    monkeypatch.setattr(kind, "tanh", torch.Tensor.sigmoid, raising=False)
    assert content() != before
    walk = Walk()
    walk.add("number", 1)
    check_methods([uses.__code__])  # it is torch's own; that it is another one is part of the key
    monkeypatch.setattr(kind, "tanh", lambda x: x)
    assert not walk.watch.holds()
    check_methods([uses_not.__code__])
    with pytest.raises(NoPlan, match="tanh"):
        check_methods([uses.__code__])
    monkeypatch.setattr(kind, "__add__", lambda x, y: x, raising=False)
    with pytest.raises(NoPlan, match="__add__"):
        check_methods([uses_not.__code__])


def test_answers_about_the_hardware(monkeypatch):
    """Which are constants for Dynamo: another machine answers otherwise."""
    assert torch.cuda.is_available in _torch.HARDWARE_QUERIES
    monkeypatch.setattr(_torch, "HARDWARE_QUERIES", (_asked,))
    before = walk_reads(Walk(), [(__name__, "_asked")])
    assert walk_reads(Walk(), [(__name__, "_asked")]) == before
    _ANSWERS[0] = 2
    assert walk_reads(Walk(), [(__name__, "_asked")]) != before


_ANSWERS = [1]


def _asked():
    return _ANSWERS[0]


def _with(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value, raising=False)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    folder.chmod(0o700)
    torch._dynamo.reset()  # this runs before the fixture that does so for each test
    compiled = fxpasses.compile(nn.BatchNorm1d(4), cache=folder)
    compiled(torch.ones(3, 4)).sum().backward()
    assert compiled.plan_files, compiled.why_no_plan
    return folder


@pytest.mark.parametrize(
    "change",
    [
        _with(torch, "batch_norm", lambda x, *rest: x),  # is called by a function in the graph
        _with(F, "batch_norm", lambda x, *rest, **more: x),
        _with(torch.Tensor, "add_", torch.Tensor.sub_),
        _with(torch.Tensor, "add_", lambda x, y: x),
        None,
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_plan_of_a_layer(plan, monkeypatch, change, is_late):
    monkeypatch.setattr(Compiled, "_record", lambda self, tensors, *rest: "recorded")
    compiled = fxpasses.compile(nn.BatchNorm1d(4), cache=plan)
    if is_late:
        assert isinstance(compiled(torch.ones(3, 4)), torch.Tensor)
    if change is not None:
        change(monkeypatch)
    result = compiled(torch.ones(3, 4))
    monkeypatch.undo()
    assert isinstance(result, str) is (change is not None)


def test_what_dynamo_wraps_for_its_own_use_is_what_it_was(monkeypatch):
    """A process that takes a plan has not compiled anything, and so nothing is wrapped there."""
    cls = torch.nn.Module
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert cls.__init__.__qualname__.endswith("patched_init")
    for method in (cls.__init__, cls.__setstate__):
        assert origin_of(method).startswith("nn/modules/module.py:")
        assert not is_third_party(method)
    monkeypatch.setattr(cls, "__init__", lambda self: None)
    assert is_third_party(cls.__init__)
