"""FakeTensorProp: the values torch's gives, and on later runs only what changed."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TorchFakeTensorProp
from torch.utils._pytree import tree_leaves

import fake
from fake import FakeTensorMode, FakeTensorProp
from tests.fake.support import describe

aten = torch.ops.aten


def function(x, w, b):
    for _ in range(3):
        h = torch.nn.functional.layer_norm(x, [8]) @ w
        a, c = h.relu().split(4, 1)
        x = torch.cat([c, a.t().t()], 1).view(2, 5, 8).flatten(0, 1) + b
    return x, x.t(), x.sum()


@pytest.fixture
def graph():
    return make_fx(function)(torch.randn(10, 8), torch.randn(8, 8), torch.randn(8))


def inputs(mode, rows=10):
    with mode:
        return [torch.randn(rows, 8), torch.randn(8, 8), torch.randn(8)]


def values(graph):
    nodes = [n for n in graph.graph.nodes if n.op != "output"]
    places: dict[int, int] = {}
    found = []
    for node in nodes:
        for leaf in tree_leaves(node.meta["val"]):
            described = describe(leaf)
            if isinstance(leaf, torch.Tensor):
                described["storage"] = places.setdefault(leaf.untyped_storage()._cdata, len(places))
            found.append(described)
    return found


def test_same_values_and_aliases_as_torchs(graph):
    other = copy.deepcopy(graph)
    mode, torchs = FakeTensorMode(), torch._subclasses.FakeTensorMode()
    TorchFakeTensorProp(other, torchs).propagate(*[torch.randn(10, 8), torch.randn(8, 8), torch.randn(8)])
    for _ in range(3):
        result = FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs(mode))
        assert values(graph) == values(other)
        assert [tuple(r.shape) for r in result] == [(10, 8), (8, 10), ()]


def test_nothing_is_computed_twice(graph):
    mode = FakeTensorMode()
    given = inputs(mode)
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    before = [n.meta.get("val") for n in graph.graph.nodes]
    info = fake.cache_info()
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    assert fake.cache_info() == info
    assert all(a is b for a, b in zip(before, [n.meta.get("val") for n in graph.graph.nodes], strict=True))


def test_only_below_a_changed_node(graph):
    mode = FakeTensorMode()
    given = inputs(mode)
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    nodes = list(graph.graph.nodes)
    relu = [n for n in nodes if n.target is aten.relu.default][1]
    kept = {n: n.meta["val"] for n in nodes if n.op != "output"}
    relu.target = aten.sigmoid.default
    info = fake.cache_info()
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    now = fake.cache_info()
    assert (now.hits - info.hits) + (now.misses - info.misses) == 1, (
        "a value like the old one stops the change"
    )
    assert all(n.meta["val"] is v for n, v in kept.items())
    half = graph.graph.call_function(aten._to_copy.default, (relu,), {"dtype": torch.float16})
    relu.append(half)
    relu.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    split = next(iter(half.users))
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    assert [v.dtype for v in split.meta["val"]] == [torch.float16] * 2
    assert kept[nodes[0]] is nodes[0].meta["val"]


def test_inserted_and_removed_nodes(graph):
    mode = FakeTensorMode()
    given = inputs(mode)
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    last = next(n for n in reversed(graph.graph.nodes) if n.target is aten.add.Tensor)
    with graph.graph.inserting_after(last):
        new = graph.graph.call_function(aten.neg.default, (last,))
    last.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    assert describe(new.meta["val"]) == describe(last.meta["val"])
    new.replace_all_uses_with(last)
    graph.graph.erase_node(new)
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    assert last.users


def test_other_inputs(graph):
    mode = FakeTensorMode()
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs(mode))
    first = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    views = make_fx(lambda x: x.t().relu())(torch.ones(2, 3))
    with mode:
        a, b, c = torch.ones(2, 3), torch.ones(2, 3), torch.ones(4, 5)
    for given in (a, b, c, a):
        FakeTensorProp(views, mode).propagate_dont_convert_inputs(given)
        _, transposed, relu, _ = views.graph.nodes
        assert transposed.meta["val"].untyped_storage()._cdata == given.untyped_storage()._cdata
        assert relu.meta["val"].shape == given.shape[::-1]
    assert len(first) == 3


def test_a_changed_default_dtype_is_seen():
    graph = make_fx(lambda x: x + 1.5)(torch.ones(2, dtype=torch.int32))
    mode = FakeTensorMode()
    with mode:
        x = torch.ones(2, dtype=torch.int32)
    (add,) = [n for n in graph.graph.nodes if n.op == "call_function"]
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            FakeTensorProp(graph, mode).propagate_dont_convert_inputs(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert add.meta["val"].dtype == dtype


def test_graphs_that_are_run_node_by_node():
    def writes(x):
        return x.add_(1).view(-1)

    graph = make_fx(writes)(torch.ones(2, 3))
    mode = FakeTensorMode()
    for _ in range(2):
        assert FakeTensorProp(graph, mode).propagate(torch.ones(2, 3)).shape == (6,)
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()))
    with FakeTensorMode(allow_non_fake_inputs=True) as other:
        assert FakeTensorProp(module, other).propagate(torch.ones(2, 3)).shape == (2, 4)
    x = torch.ones(2, 3, requires_grad=True)
    graph = make_fx(lambda x: x * 2)(torch.ones(2, 3))
    assert FakeTensorProp(graph, mode).propagate(x).requires_grad


def test_a_subclass_keeps_its_say(graph):
    seen = []

    class Listing(FakeTensorProp):
        def run_node(self, n):
            seen.append(n.name)
            return super().run_node(n)

    mode = FakeTensorMode()
    for _ in range(2):
        Listing(graph, mode).propagate_dont_convert_inputs(*inputs(mode))
    assert len(seen) == 2 * len(graph.graph.nodes)


def test_another_mode_than_the_parameters_is_refused():
    module = torch.fx.symbolic_trace(torch.nn.Linear(3, 4))
    mode = FakeTensorMode()
    parameters = {n: mode.from_tensor(p) for n, p in module.named_parameters()}
    with torch.nn.utils.stateless._reparametrize_module(module, parameters):
        with mode:
            assert FakeTensorProp(module, mode).propagate(torch.ones(2, 3)).shape == (2, 4)
        with pytest.raises(AssertionError):
            FakeTensorProp(module).propagate(torch.ones(2, 3))
