"""Sharded parameters outside of training: state, initialization, mistakes. (Training is in ``models.py``.)"""

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.compiling.history import describe_compilation
from fxpasses.compiling.options import Options
from fxpasses.distributed import shard
from fxpasses.errors import ShardingError


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_state_and_optimizers_see_shards(mesh):
    plain, model = (nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)) for _ in range(2))
    shard(model, mesh, {"*.bias": None, "1.weight": 1})
    assert [p.placements for p in model.parameters()] == [
        (Shard(0),),
        (Replicate(),),
        (Shard(1),),
        (Replicate(),),
    ]
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(shard(plain, mesh).state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 3)
    before = model(x)
    assert torch.equal(before, plain(x))
    assert not isinstance(model[0].weight, DTensor)
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), before)


def test_a_model_on_meta_is_initialized_as_shards(mesh):
    with torch.device("meta"):
        model = shard(nn.Linear(3, 5), mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model._parameters["weight"].fill_(7)
    torch.manual_seed(0)
    model.reset_parameters()
    torch.manual_seed(0)
    expected = nn.Linear(3, 5)
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)


def test_tied_parameters_stay_tied(mesh):
    model = nn.ModuleList([nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)])
    model[1].weight = model[0].weight
    shard(model, mesh)
    assert len(list(model.parameters())) == 1
    assert model[0]._parameters["weight"] is model[1]._parameters["weight"]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"weigth": 0}, "no parameter matches 'weigth'"),
        ({"weight": 2}, "parameter 'weight'"),
        ({"bias": True}, "True"),
    ],
)
def test_mistakes_are_named_before_anything_changes(mesh, plan, text):
    model = nn.Linear(3, 5)
    with pytest.raises(ShardingError, match=text):
        shard(model, mesh, plan)
    assert type(model) is nn.Linear
    assert not isinstance(model.weight, DTensor)


def test_what_is_sharded_already_and_recurrent_layers_are_refused(mesh):
    model = shard(nn.Linear(3, 5), mesh)
    with pytest.raises(ShardingError, match="parameter 'weight'"):
        shard(model, mesh)
    with pytest.raises(ShardingError, match="LSTM"):
        shard(nn.LSTM(3, 5), mesh)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": 3}, "expected a module, got 3"),
        ({"mesh": "cpu"}, "init_device_mesh.*got 'cpu'"),
        ({"plan": "*.bias"}, "patterns of parameter names"),
        ({"plan": {3: 0}}, "patterns of parameter names"),
        ({"param_dtype": "bf16"}, "as param_dtype, got 'bf16'"),
        ({"reduce_dtype": torch.int32}, "as reduce_dtype, got torch.int32"),
        ({"model": nn.LazyLinear(2)}, "'weight': it has no size before the model is called"),
    ],
)
def test_wrong_arguments(mesh, arguments, text):
    model = nn.Linear(3, 5)
    with pytest.raises(ShardingError, match=text):
        shard(**{"model": model, "mesh": mesh, **arguments})
    assert type(model.weight) is nn.Parameter


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.layer(x).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_random_operators_of_sharded_models_are_recomputed():
    # torch's own partitioners put the states of the RNG behind the mesh, which AOTAutograd then takes for a tensor
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = shard(Attention(), init_device_mesh("cpu", (2,)))

        @torch.compile(backend="fxpasses", options={"compiler": "eager"})
        def loss(x):
            return checkpoint(model, x, use_reentrant=False).sin().sum()

        loss(torch.randn(2, 1, 3, 4)).backward()
    finally:
        dist.destroy_process_group()
    assert model.layer._parameters["weight"].grad.to_local().shape == (6, 4)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def test_copied_layers_guard_their_own_shards(mesh):
    model = shard(nn.Sequential(*(Layer() for _ in range(6))), mesh)
    x = torch.randn(2, 4)
    compiled = torch.compile(model, backend="fxpasses", options={"compiler": "eager", "regions": "always"})
    fxpasses.reset_stats()
    torch.testing.assert_close(compiled(x), model(x))
    assert fxpasses.stats().copied_calls >= 3
    graphs = fxpasses.stats().graphs
    compiled(x).sum().backward()
    expected = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close([p.grad.to_local() for p in model.parameters()], expected)
    assert fxpasses.stats().graphs == graphs
    layer = model[5].up
    layer._parameters["weight"] = nn.Parameter(
        layer._parameters["weight"].redistribute(placements=[Replicate()])
    )
    torch.testing.assert_close(compiled(x), model(x))
    assert fxpasses.stats().graphs > graphs


def test_a_mesh_is_no_factor_by_the_name_of_who_holds_it(mesh):
    graph = fx.Graph()
    held = graph.placeholder("L_self_modules_up_hooks_0_closure_0_")
    held.meta["example_value"] = mesh
    graph.output(graph.placeholder("x"))
    made = describe_compilation(fx.GraphModule({}, graph), [mesh, torch.ones(2)], Options.parse({}))
    assert not [name for name in made.factors if "closure_0" in name]
    assert "shape of input x" in made.factors
    assert "closure_0" not in made.graph
