"""Nothing keeps a model that its owner has dropped: neither compiled code, which lives as long as Dynamo's, nor the globals of its module."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.plans import compile as compiling
from tests.fxpasses.plans.functions_between import Layers, WithLoss

pytestmark = pytest.mark.usefixtures("old_objects_aside", "fresh_dynamo")


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Broken(Whole):
    def forward(self, x):
        x = self.linear(x).relu()
        torch._dynamo.graph_break()
        return self.linear(x) * 2


class Raising(Whole):
    def forward(self, x):
        x = self.linear(x).relu()
        torch._dynamo.graph_break()
        raise ValueError("mine")


@pytest.mark.slow
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("kind", [Whole, Broken, Raising, WithLoss, Layers])
def test_a_model_is_freed(tmp_path, kind, backward):
    fxpasses.reset_stats()
    for _ in range(2):  # the second one may use the plan of the first
        model = kind()
        compiled = fxpasses.compile(model, cache=tmp_path)
        last = weakref.ref([*model.modules()][-1])
        for _ in range(2):
            given = [torch.randn(3, 4) for _ in range(2 if kind in (WithLoss, Layers) else 1)]
            with pytest.raises(ValueError, match="mine") if kind is Raising else contextlib.nullcontext():
                result = compiled(*given)
                if backward:
                    result.sum().backward()
                del result
        del model, compiled
        gc.collect()
        assert last() is None
    if backward and kind is not Raising:
        assert fxpasses.stats().plans_used


def test_what_a_frame_goes_on_with_is_compiled_for_the_next_model(tmp_path):
    for _ in range(2):
        model = Broken()
        compiled = fxpasses.compile(model, cache=tmp_path)
        x = torch.randn(3, 4)
        assert torch.equal(compiled(x), model(x))


def test_a_plan_is_written_after_its_owner_is_gone(tmp_path):
    fxpasses.reset_stats()
    model = Whole()
    fxpasses.compile(model, cache=tmp_path)(torch.randn(3, 4)).sum().backward()
    assert fxpasses.stats().plans_written == 1


@pytest.mark.parametrize("cache", ["plans", "off"])
def test_the_tensors_of_the_first_call_are_freed(tmp_path, cache):
    """Who compiles the backward graph, maybe much later, keeps none of them."""
    compiled = fxpasses.compile(lambda x, w: (x * w).sin(), cache=tmp_path if cache == "plans" else "off")
    x, w = torch.randn(10), torch.randn(10, requires_grad=True)
    kept = weakref.ref(x)
    compiled(x, w).sum().backward()
    del x
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("broken", [False, True])
def test_objects_that_a_function_was_given_are_freed(tmp_path, checks, broken):
    """Others take their place, maybe in the same memory, while the function lives on."""
    fxpasses.reset_stats()

    def loss_of(model, x):
        y = model(x)
        if broken:
            torch._dynamo.graph_break()
        return y.square().sum()

    compiled = fxpasses.compile(loss_of, cache=tmp_path)
    for _ in range(4):
        model = Whole()
        for _ in range(3):
            x = torch.randn(3, 4)
            loss = compiled(model, x)
            torch.testing.assert_close(loss, loss_of(model, x))
            loss.backward()
        kept = [weakref.ref(value) for value in (model, model.linear, model.linear.weight)]
        del model, loss
        gc.collect()
        assert [reference() for reference in kept] == [None] * 3
    assert fxpasses.stats().plans_used >= 4


class WithSlots:
    __slots__ = ("scale",)


class Settings:
    def __init__(self, scale):
        self.scale = scale


@pytest.mark.parametrize("kind", [WithSlots, Settings])
def test_an_object_that_changes_is_seen_whether_it_is_kept_or_not(tmp_path, checks, kind):
    compiled = fxpasses.compile(lambda settings, x: x * settings.scale, cache=tmp_path)
    x = torch.ones(3)
    settings = kind.__new__(kind)
    for scale in (2, 2, 3, 3, 2):
        settings.scale = scale
        assert compiled(settings, x).tolist() == [scale] * 3
    if kind is Settings:
        settings.__dict__ = {"scale": 5}
        assert compiled(settings, x).tolist() == [5] * 3
        settings.__class__ = type("Other", (Settings,), {"scale": property(lambda self: 7)})
        assert compiled(settings, x).tolist() == [7] * 3


def test_arguments_without_a_plan_are_not_remembered_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_MAX_KINDS", 3)
    compiled = fxpasses.compile(lambda x, n: x * n, cache=tmp_path, compiler="eager")
    for n in range(9):
        assert compiled(torch.ones(2), n).tolist() == [n, n]
    assert 0 < len(compiled._known) <= 4
