"""Our classes where torch's stand: its own tests do that, and so may users."""

import gc
import sys

import pytest
import torch
import torch._functorch.config as functorch_config
from torch._subclasses import fake_tensor as torch_fake

import fake
from fake.cache.subgraphs import CacheView, NamedKey

aten = torch.ops.aten
invoke_subgraph = torch._higher_order_ops.invoke_subgraph


@pytest.fixture
def replaced(monkeypatch):
    """torch's module names our classes; modes of torch that exist already stay what they are."""
    theirs = torch_fake.FakeTensorMode()
    for name in ("FakeTensor", "FakeTensorMode", "FakeTensorConverter"):
        monkeypatch.setattr(torch_fake, name, getattr(fake, name))
    return theirs


def test_modes_of_torch_go_on(replaced):
    with replaced:
        for _ in range(2):
            x = torch.ones(2, 3) + torch.zeros(3)
    assert type(x).__module__ == "torch._subclasses.fake_tensor"
    assert isinstance(x, fake.FakeTensor)
    assert isinstance(replaced, fake.FakeTensorMode)
    assert not isinstance(torch.ones(2), fake.FakeTensor)


def test_ours_work_there(replaced):
    with torch_fake.FakeTensorMode() as mode:
        x = torch.randn(2, 3, device="cuda").sum(1)
    assert type(x) is fake.FakeTensor
    assert x.fake_mode is mode
    assert (x.shape, x.device.type) == ((2,), "cuda")


def test_tensors_of_both_are_not_mixed():
    with torch_fake.FakeTensorMode():
        theirs = torch.ones(3)
    with fake.FakeTensorMode() as mode, pytest.raises(AssertionError, match="Mixing fake modes"):
        mode.from_tensor(torch.ones(3)) + theirs


class TestGraphsAsArguments:
    """``invoke_subgraph``: cached by the identity of the graph."""

    def graph(self):
        return torch.fx.symbolic_trace(lambda x, y: (aten.mm.default(x, y),))

    def test_a_graph_is_run_once(self):
        graph = self.graph()
        with fake.FakeTensorMode():
            x, y = torch.ones(6, 4), torch.ones(4, 6)
            fake.cache_clear()
            first = invoke_subgraph(graph, "graph", x, y)
            assert (fake.cache_info().hits, fake.cache_info().misses) == (0, 2)
            second = invoke_subgraph(graph, "graph", x, y)
            assert (fake.cache_info().hits, fake.cache_info().misses) == (1, 2)
        assert first[0].shape == second[0].shape == (6, 6)
        assert first[0] is not second[0]

    def test_a_disk_cache_beside_entries_of_graphs_serves_the_others(self, tmp_path):
        graph = self.graph()
        with fake.FakeTensorMode():
            x, y = torch.ones(6, 4), torch.ones(4, 6)
            fake.cache_clear()
            invoke_subgraph(graph, "graph", x, y)
            fake.enable_disk_cache(tmp_path)
            try:
                assert fake.save_disk_cache() is not None
                fake.cache_clear()
                fake.enable_disk_cache(tmp_path)
                invoke_subgraph(graph, "graph", x, y)
                assert (fake.cache_info().hits, fake.cache_info().misses) == (1, 1)  # mm, and the graph
            finally:
                fake.disable_disk_cache()

    def test_another_graph_has_its_own_entry(self):
        graphs = self.graph(), torch.fx.symbolic_trace(lambda x, y: (aten.mm.default(y, x),))
        with fake.FakeTensorMode():
            x, y = torch.ones(6, 4), torch.ones(4, 6)
            shapes = [invoke_subgraph(g, "graph", x, y)[0].shape for g in (*graphs, *graphs)]
        assert shapes == [(6, 6), (4, 4)] * 2

    def test_functions_are_not_cached(self):
        with fake.FakeTensorMode():
            x = torch.ones(2, 2)
            fake.cache_clear()
            for _ in range(2):
                invoke_subgraph(lambda x: (aten.sin.default(x),), "function", x)
            assert fake.cache_info().bypasses == {"function argument": 2}

    def test_an_entry_goes_with_its_graph(self):
        def entries():
            return sum(isinstance(named.key[0], torch._ops.HigherOrderOperator) for named in CACHE)

        CACHE = fake.FakeTensorMode.cache
        graph = self.graph()
        with fake.FakeTensorMode():
            fake.cache_clear()
            invoke_subgraph(graph, "graph", torch.ones(6, 4), torch.ones(4, 6))
            assert entries() == 1
            size = fake.cache_info().size
            del graph
            gc.collect()
            assert entries() == 0
            assert fake.cache_info().size == size - 1


def test_the_cache_can_be_looked_at():
    with fake.FakeTensorMode() as mode:
        x = torch.ones(2)
        fake.cache_clear()
        x.sin()
        view = mode.cache
        (named,) = [key for key in view if key.key[0] is aten.sin.default]
        assert callable(view[named])
        with pytest.raises(TypeError, match="made by dispatch"):
            view[named] = None
        del view[named]
        assert named not in view
    other = CacheView(fake.mode.ENGINE.store)
    other["of torch"] = 1
    assert "of torch" in list(other)
    assert NamedKey((aten.sin.default,)) not in other


def test_split_is_one_miss():
    with fake.FakeTensorMode():
        x = torch.ones(6, 4)
        fake.cache_clear()
        parts = torch.split(x, 2)
        assert fake.cache_info().misses == 1
        again = torch.split(x, 4)
    assert [(p.shape, p.storage_offset()) for p in parts] == [((2, 4), 0), ((2, 4), 8), ((2, 4), 16)]
    assert [p.shape for p in again] == [(4, 4), (2, 4)]
    assert all(p.untyped_storage()._cdata == x.untyped_storage()._cdata for p in (*parts, *again))


def test_the_parts_of_a_composite_operator_are_counted_not_itself():
    with fake.FakeTensorMode():
        x, index = torch.ones(4, 4, 4), torch.tensor([0, 2, 3])
        fake.cache_clear()
        for hits in range(2):
            aten.index(x, [None, index, index])
            info = fake.cache_info()
            assert (info.hits, info.misses) == (hits, 3)  # index, new_empty, as_strided: what `to` gives is x
        assert info.bypasses == {"CompositeImplicitAutograd": 1}


@pytest.mark.skipif(
    not hasattr(functorch_config, "fake_tensor_prefer_device_type"), reason="a setting of later releases"
)
def test_a_preferred_device_is_not_remembered():
    with fake.FakeTensorMode():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        with functorch_config.patch(fake_tensor_prefer_device_type="cuda"):
            assert (x + y).device.type == "cuda"
        with pytest.raises(RuntimeError):
            x + y


@pytest.mark.parametrize("error", [AssertionError, KeyError])
def test_checks_of_python_kernels_raise_as_in_eager(error):
    from fake.dispatch.refusals import eager_errors

    with pytest.raises(RuntimeError, match=r"aten\.sin"), eager_errors(aten.sin.default):
        raise error("wrong")
    with pytest.raises(error), eager_errors(sys):
        raise error("wrong")


def test_tensors_of_torchs_modes_go_through_torchs_views(replaced):
    """torch's own tensors ask each other whether their classes derive from the one that stands in the module."""
    with replaced:
        x = torch.ones(2, 3, 4)
    assert x.view(2, 12).shape == (2, 12)
    assert issubclass(type(x), torch_fake.FakeTensor)
    assert not issubclass(torch.Tensor, torch_fake.FakeTensor)
