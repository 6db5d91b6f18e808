"""Propagation over graphs of layers that repeat, or nearly do: each has its own values."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TorchFakeTensorProp
from torch.utils._pytree import tree_leaves

import fake
from fake import FakeTensorMode, FakeTensorProp
from tests.fake.support import describe

F = torch.nn.functional


def layer(x, w, scale=2.0):
    h = F.layer_norm(x, [x.shape[-1]]) @ w
    a, b = h.split(h.shape[1] // 2, 1)
    return x + torch.cat([b.relu(), a.t().t()], 1).view(-1).view(h.shape) * scale


def same(x, *weights):
    for w in weights:
        x = layer(x, w)
    return x


def one_constant_differs(x, *weights):
    for number, w in enumerate(weights):
        x = layer(x, w, 3 if number == 2 else 2.0)
    return x


def one_wiring_differs(x, *weights):
    before = x
    for number, w in enumerate(weights):
        left, right = (x, before) if number == 3 else (x, x)
        before, x = x, (left + right) * 2 @ w - left.relu() * right.sin()
    return x


def shared_weight(x, *weights):
    for number in range(5):
        x = layer(x, weights[number // 4])
    return x


def sizes_that_grow(x, *weights):
    for _ in range(4):
        x = torch.cat([x.relu() * 2, x.sin() + 1]).clone() * 3
    return x


def views_of_inputs(x, *weights):
    made = []
    for w in weights:
        made += [w.t().t()[1:], w.view(-1), (w[0] + 1).sum()]
    return made


PROGRAMS = [same, one_constant_differs, one_wiring_differs, shared_weight, sizes_that_grow, views_of_inputs]


def values(graph):
    """What each node has, storages numbered in order of appearance."""
    places, found = {}, []
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        for leaf in tree_leaves(node.meta["val"]):
            described = describe(leaf)
            if isinstance(leaf, torch.Tensor):
                described["storage"] = places.setdefault(leaf.untyped_storage()._cdata, len(places))
                described.pop("keys")
            found.append((node.name, described))
    return found


def tensors(dtypes=None):
    weights = [torch.ones(8, 8, dtype=(dtypes or {}).get(i, torch.float32)) for i in range(5)]
    return [torch.ones(6, 8), *weights]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_values_are_torchs(program):
    graph = make_fx(program)(*tensors())
    expected = copy.deepcopy(graph)
    TorchFakeTensorProp(expected, torch._subclasses.FakeTensorMode()).propagate(*tensors())
    for clear in (True, False):
        if clear:
            fake.cache_clear()
        FakeTensorProp(graph, FakeTensorMode()).propagate(*tensors())
        assert values(graph) == values(expected)


def test_an_instance_with_another_input_is_computed():
    """The third layer's weight has another dtype: the layers behind it are like it, not like the first."""
    double = dict.fromkeys(range(5), torch.float64)
    graph = make_fx(lambda x, *ws: same(x, *[w.to(torch.float32) for w in ws]))(*tensors(double))
    given = tensors({**double, 2: torch.int64, 4: torch.bfloat16})
    expected = copy.deepcopy(graph)
    TorchFakeTensorProp(expected, torch._subclasses.FakeTensorMode()).propagate(*given)
    FakeTensorProp(graph, FakeTensorMode()).propagate(*given)
    assert values(graph) == values(expected)


def test_changes_after_a_run():
    """The next run starts from the tape: a node inside a layer that changes is computed again."""
    graph = make_fx(same)(*tensors())
    mode = FakeTensorMode()
    given = [mode.from_tensor(t) for t in tensors()]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    relu = [n for n in graph.graph.nodes if n.target is torch.ops.aten.relu.default][2]
    relu.target = torch.ops.aten.sin.default
    other = [mode.from_tensor(t) for t in tensors()]
    for module_inputs in (given, other):
        expected = copy.deepcopy(graph)
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*module_inputs)
        torchs = torch._subclasses.FakeTensorMode()
        TorchFakeTensorProp(expected, torchs).propagate(*tensors())
        assert values(graph) == values(expected)
