"""Of the plain objects of users, plans depend on the attributes that traced code names: none of them is missed, and others change nothing."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.plans.objects.named_attributes import EVERYTHING, has_named_attributes, names_from, names_read
from fxpasses.plans.walks.walk import Walk
from tests import children
from tests.fxpasses.plans.attribute_programs import CASES, Counted, Key, Plain

PROGRAM = """
import json, sys
import torch, fxpasses
from tests.fxpasses.plans.attribute_programs import CASES, run
found = {}
for name in CASES:
    for later in (False, True) if sys.argv[2] == "later" else (False,):
        torch._dynamo.reset()
        before = fxpasses.stats()
        wanted, result = run(name, lambda f: f, later=later), run(name, lambda f: fxpasses.compile(f, cache=sys.argv[1]), later=later)
        after = fxpasses.stats()
        differ = [i for i, pair in enumerate(zip(wanted, result)) if not torch.utils._pytree.tree_all(
            lambda ok: ok, [a.dtype == b.dtype and torch.allclose(a, b) for a, b in zip(*pair, strict=True)])]
        found[f"{name} {later}"] = [differ, after.graphs - before.graphs, after.plans_used - before.plans_used]
print(json.dumps([found, fxpasses.stats().plans_refused]))
"""


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plans")
    return [children.told_by("-c", PROGRAM, directory, which) for which in ("first", "later")]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_code_reads_counts_and_nothing_else(name, in_two_processes):
    (first, _), (second, refused) = in_two_processes
    for found in (first[f"{name} False"], second[f"{name} False"], second[f"{name} True"]):
        assert found[0] == []
    if CASES[name][-1]:
        assert second[f"{name} False"][1] == 0, refused
        assert second[f"{name} False"][2] > 0


class OfTorch(torch.optim.lr_scheduler.LRScheduler):
    pass


@pytest.mark.parametrize(
    ("kind", "are_named"),
    [
        (Plain, True),
        (Counted, True),
        (Key, False),
        (nn.Linear, False),
        (OfTorch, False),
        (dict, False),
        (Path, False),
    ],
)
def test_which_objects_are_left_open(kind, are_named):
    assert has_named_attributes(kind) is are_named


def _reads(self, x):
    return getattr(self, "a") + self.b.c + getattr(self.d, "e", 0)  # noqa: B009


def _reads_any(self, x):
    return getattr(self, x)


def _reads_all(self, x):
    return vars(self)[x]


def _takes_apart(self, x):
    match self:
        case Plain(a=1):
            return x
    return self.b


def test_names():
    names = names_read([_reads.__code__], ["self.b", "self.b.c"])
    assert {"a", "b", "c", "d", "e"} <= names.named
    assert names.relied_on == {"self", "b", "c"}
    assert names.is_read("b", 1)
    assert names.is_read("a", torch.sin)
    assert not names.is_read("a", [])
    assert not names.is_read("f", torch.sin)
    assert names_from(json.loads(json.dumps(names.as_data()))) == names


@pytest.mark.parametrize("function", [_reads_any, _reads_all, _takes_apart])
def test_code_that_may_read_anything(function):
    names = names_read([function.__code__], [])
    assert names is EVERYTHING
    assert names_from(names.as_data()) == EVERYTHING


def test_a_walk_is_told_the_names_later():
    owner = Plain({"a": 1.0, "b": [], "c": 2})
    walk = Walk(leaves_open=True)
    before = walk.add("owner", owner)
    digest = walk.fork().close(names_read([], ["owner.a"]))
    owner.b.append(1)
    owner.c += 1
    again = Walk(leaves_open=True)
    assert again.add("owner", owner) == before
    assert again.fork().close(names_read([], ["owner.a"])) == digest
    assert again.fork().close(EVERYTHING) != walk.fork().close(names_read([], ["owner.a"]))
    checked = again.fork()
    checked.close(names_read([], ["owner.a"]))
    assert checked.watch.holds()
    owner.c += 1
    assert checked.watch.holds()
    owner.d = 1
    assert not checked.watch.holds()
    del owner.d
    owner.a = 2.0
    assert not checked.watch.holds()


class Trainer:
    def __init__(self, directory):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps, self.losses, self.mean = 0, [], 0.0
        self.step = fxpasses.compile(self._step, cache=directory)

    def _step(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def fit(self, steps):
        for _ in range(steps):
            loss = float(self.step(torch.ones(2, 4)))
            self.steps += 1
            self.losses.append(loss)
            self.mean = 0.9 * self.mean + 0.1 * loss


@pytest.mark.slow
def test_what_a_trainer_counts_has_nothing_compiled_again(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.fit(2)  # the second one takes the plans
    before = fxpasses.stats()
    trainer.fit(4)
    after = fxpasses.stats()
    assert after.graphs == before.graphs
    assert after.plans_written == before.plans_written
    assert after.plans_used == before.plans_used  # light calls
    assert trainer.losses == sorted(trainer.losses, reverse=True)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) * self.scale


def test_a_number_that_is_another_in_each_call(tmp_path):
    model = Scaled()
    compiled, before = fxpasses.compile(model, cache=tmp_path, fullgraph=True), fxpasses.stats()
    for i in range(24):
        model.scale = 1 / (i + 2)
        torch.testing.assert_close(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert fxpasses.stats().graphs - before.graphs <= 8  # Dynamo's limit, behind which it raises


@pytest.mark.slow
def test_numbers_among_arguments(tmp_path):
    def scaled(x, by):
        return x * by

    compiled, before = fxpasses.compile(scaled, cache=tmp_path), fxpasses.stats()
    for i in range(24):
        assert torch.equal(compiled(torch.ones(2), i / 3), torch.ones(2) * (i / 3))
    after = fxpasses.stats()
    assert after.graphs - before.graphs <= 6
    assert after.plans_written - before.plans_written <= 4


def test_a_counter_in_a_closure(tmp_path):
    count = 0

    def counted(x):
        nonlocal count
        count += 1
        return x.sin()

    compiled = fxpasses.compile(counted, cache=tmp_path)
    for i in range(4):
        assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())
        assert count == i + 1


@pytest.mark.slow
def test_a_class_on_which_dynamo_puts_an_inherited_method(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    walks = []
    for _ in range(2):
        walk = Walk()
        walk.add("kind", torch.optim.AdamW)
        walks.append(walk._digest_since(0))
        fxpasses.compile(step, cache=tmp_path)(torch.ones(1, 2))
    assert walks[0] == walks[1]
