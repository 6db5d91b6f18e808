"""What models hold behind weak references, caches and containers: it is part of a plan, and kept alive by none."""

import collections
import functools
import threading
import weakref

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.references import can_be_weak
from fxpasses.plans.walks.walk import Walk


class _Grown(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.of_bias, self.named = weakref.ref(self.bias), weakref.WeakValueDictionary(bias=self.bias)
        self.table, self.lock = collections.defaultdict(float, a=1.0), threading.RLock()
        self.cached = functools.lru_cache(lambda x: x + 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "of_bias", weakref.ref(model.weight)),
        lambda model: setattr(model, "of_bias", weakref.ref(nn.Linear(1, 1))),  # which is gone at once
        lambda model: model.named.update(bias=model.weight),
        lambda model: model.table.update(a=2.0),
        lambda model: setattr(model.table, "default_factory", int),
        lambda model: setattr(model.cached, "__wrapped__", lambda x: x + 2),
        lambda model: setattr(model, "cached", functools.lru_cache(lambda x: x + 2)),
        lambda model: setattr(model, "lock", threading.Lock()),
    ],
)
def test_changes_behind_references_and_caches_are_seen(change):
    model = _Grown()
    walk = Walk()
    before = walk.add("model", model)
    assert walk.watch.holds()
    assert Walk().add("model", model) == before
    change(model)
    assert not walk.watch.holds()
    assert Walk().add("model", model) != before


def test_a_weak_reference_keeps_nothing():
    held, model = nn.Linear(1, 1), nn.Linear(2, 2)
    model.reference = weakref.ref(held)
    with pytest.raises(NoPlan, match="nothing of the model holds"):
        Walk().add("model", model)
    model.register_module("held", held)  # after the reference, which is met first
    assert Walk().add("model", model)


class _Remembers(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.before = nn.Identity()
        self.reference = weakref.ref(self.before)

    def forward(self, x):
        return super().forward(x) + (1 if self.reference() is None else 2)


@pytest.mark.slow
def test_what_a_weak_reference_refers_to_goes(tmp_path):
    tmp_path.chmod(0o700)
    model, x = _Remembers(), torch.ones(1, 2)
    compiled = fxpasses.compile(model, cache=tmp_path)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(compiled(x), model(x))
    assert compiled.plan_files, compiled.why_no_plan
    del model.before
    with torch.no_grad():
        assert torch.allclose(compiled(x), nn.Linear.forward(model, x) + 1)
    assert model.reference() is None


def test_a_weak_reference_of_another_class_is_refused():
    model = nn.Linear(2, 2)
    model.reference = type("Reference", (weakref.ref,), {})(model.weight)
    with pytest.raises(NoPlan, match="Reference"):
        Walk().add("model", model)


def test_a_layer_that_goes_over_its_modules_has_a_plan(tmp_path):
    """``TransformerEncoderLayer`` asks all its modules for hooks: they are collected in a set, of which nobody asks for the order."""
    tmp_path.chmod(0o700)
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval()
    compiled = fxpasses.compile(layer, cache=tmp_path)
    x = torch.randn(1, 3, 4)
    with torch.no_grad():
        assert torch.allclose(compiled(x), layer(x), atol=1e-5)
    assert compiled.plan_files, compiled.why_no_plan


class _Counts(collections.defaultdict):
    pass


class _WithSlots:
    __slots__ = ("__weakref__", "a")


@pytest.mark.parametrize(
    ("value", "can"),
    [
        (nn.Linear(1, 1), True),
        (torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0), True),
        (_Counts(int), False),  # holds items, too
        (_WithSlots(), False),
        (functools.partial(print), False),
        (nn.Parameter(torch.ones(1)), False),
        (nn.Linear, False),
        (print, False),
        (test_changes_behind_references_and_caches_are_seen, False),
        (3, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_plan_does_not_keep(value, can):
    assert can_be_weak(value) == can
