"""Models of ``fully_shard`` read as shards that are gathered in the graph. (Training is in ``models.py``.)"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxpasses
from fxpasses.distributed import shard
from fxpasses.errors import ShardingError


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return x


def fully_sharded(mesh, **arguments):
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **arguments)
    return fully_shard(model, mesh=mesh, **arguments)


def test_eager_and_compiled_results_are_those_of_hooks(mesh):
    model = fully_sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 4)
    model(x).sum().backward()  # its hooks have run: parameters may be gathered now
    expected = [p.grad.full_tensor() for p in model.parameters()]
    shards = list(model.parameters())
    model.zero_grad()
    assert shard(model) is model
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
    compiled = torch.compile(model, backend="fxpasses", fullgraph=True, options={"compiler": "eager"})
    for run in (model, compiled):
        run(x).sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.allclose(parameter.grad.full_tensor(), gradient, atol=1e-6)
        model.zero_grad()
    before = model(x)
    compiled(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), before)
    model.load_state_dict(fully_sharded(mesh).state_dict())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


def test_mixed_precision_policies_hold(mesh):
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append((x.dtype, self.weight.dtype, self.bias.dtype))
            return super().forward(x)

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
    )
    model = shard(fully_shard(Seen(4, 4), mesh=mesh, mp_policy=policy))
    out = model(torch.randn(2, 4))
    out.sum().backward()
    assert (seen, out.dtype, model._parameters["weight"].grad.dtype) == (
        [(torch.bfloat16,) * 3],
        torch.float64,
        torch.float32,
    )


def test_meta_models_and_tied_parameters(mesh):
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        model[1].weight = model[0].weight
    shard(fully_shard(model, mesh=mesh))
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    assert len(list(model.parameters())) == 1
    assert model(torch.tensor([1])).isfinite().all()


def test_methods_of_fsdp_that_change_no_result_do_nothing(mesh):
    model = shard(fully_sharded(mesh))
    model.set_requires_gradient_sync(False)
    model.set_modules_to_forward_prefetch([model.layers[0]])
    with pytest.raises(ShardingError, match=r"set_all_reduce_hook\(\)"):
        model.set_all_reduce_hook(print)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.layers[1].set_gradient_divide_factor(3.0), "layers.1.weight.*factor=3"),
        (lambda model: model.layers[0].set_all_reduce_hook(print), "layers.0.weight.*all_reduce_hook"),
    ],
)
def test_what_only_hooks_do_is_refused_by_name(mesh, change, text):
    model = fully_sharded(mesh)
    change(model)
    with pytest.raises(ShardingError, match=text):
        shard(model)
    assert isinstance(model.layers[2], FSDPModule)
    assert torch.isfinite(model(torch.ones(1, 4))).all()


def test_offloading_and_other_arguments_are_refused(mesh):
    with pytest.raises(ShardingError, match="CPUOffloadPolicy"):
        shard(fully_shard(nn.Linear(2, 2), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    with pytest.raises(ShardingError, match="pass the model alone"):
        shard(fully_sharded(mesh), mesh)
    with pytest.raises(ShardingError, match="pass a mesh"):
        shard(Model())


def test_uneven_shards_cost_one_pad_each():
    counted = []

    @fxpasses.graph_pass(graphs=["forward", "backward"])
    def count(gm):
        """Count the calls."""
        sends = sum("_c10d" in str(node.target) and "wait" not in str(node.target) for node in gm.graph.nodes)
        pads = sum("constant_pad" in str(node.target) for node in gm.graph.nodes)
        counted.append((sends, pads))
        return False

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=512)
    try:
        model = shard(fully_sharded(init_device_mesh("cpu", (512,))))
        options = {"compiler": "eager", "regions": "off", "passes": ["default", count]}
        torch.compile(model, backend="fxpasses", options=options)(torch.randn(2, 4)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert counted[0] == (6, 12)  # each is padded, and cut after the gather
    assert counted[1][0] == 6
    assert counted[1][1] <= 18  # some are cut again, and not kept
