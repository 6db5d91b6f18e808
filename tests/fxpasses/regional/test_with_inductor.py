"""Regions through Inductor: numbers, strides, memory, caches."""

import json

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.compiling import graph_compilers
from fxpasses.compiling.compiled_segments import cut_into_segments
from tests import children
from tests.fxpasses.regional.support import Block, Stack, check, compiled, copies, saved_bytes, step
from tests.fxpasses.regional.test_structures import ConvStage, Decoder

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.slow
def test_attention_with_symbolic_sizes():
    sizes = [(2, 5, 8), (3, 7, 8)]
    more = [[torch.randn(s)] for s in sizes[1:]]
    found = check(Decoder(3), [torch.randn(sizes[0])], more=more, dynamic=True, compiler="inductor")
    assert found[0] == 3
    assert fxpasses.stats().graphs == 1


@pytest.mark.slow
def test_convolutions_in_training_with_channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *(ConvStage() for _ in range(3))).to(
        memory_format=torch.channels_last
    )
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    assert check(model, [x], more=[[x + 1]], tolerance=1e-4, compiler="inductor")[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_forward_graph_that_inductor_gets_as_a_whole(dynamic, monkeypatch):
    """As when it falls into too many segments. Inductor likes another layout for what it returns to the backward pass than
    the one that the code behind the calls there was compiled for."""

    def only_backward(gm, direct):
        is_forward = any("region_forward" in str(n.target) for n in gm.graph.nodes)
        return None if is_forward else cut_into_segments(gm, direct)

    monkeypatch.setattr(graph_compilers, "cut_into_segments", only_backward)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2)]
    first = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Tanh())
    last = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.Sigmoid())
    inputs = [torch.randn(rows, 3, 16, 16) for rows in (2, 3 if dynamic else 2)]
    found = check(
        nn.Sequential(first, *layers, last),
        inputs[:1],
        more=[inputs[1:]],
        dynamic=dynamic,
        compiler="inductor",
        tolerance=1e-3,
    )
    assert found == [2]


@pytest.mark.slow
def test_dropout_draws_for_each_layer():
    class Drops(nn.Module):
        def forward(self, x):
            return torch.stack([torch.sin(nn.functional.dropout(x, 0.5) * 1.0) for _ in range(3)])

    x = torch.ones(1000, requires_grad=True)
    y = compiled(Drops(), compiler="inductor")(x)
    y.sum().backward()
    dropped = y == 0
    assert fxpasses.stats().region_calls == 3
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(x.grad, ((~dropped) * 2 * torch.cos(torch.tensor(2.0))).sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_saved_memory_is_that_of_the_whole_graph(compiler):
    kept = {}
    for regions in ("off", "always"):
        torch.manual_seed(0)
        model = Stack([Block(64) for _ in range(4)], 64)
        kept[regions] = saved_bytes(model, [torch.randn(32, 64)], regions, compiler=compiler)
    assert copies() == [4]
    assert 0 < kept["always"] <= 1.02 * kept["off"]


PROGRAM = """
import json, sys, torch, fxpasses
from fxpasses.backend import fxpasses as backend
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.graph import GraphLowering
from tests.fxpasses.regional.support import Block, Stack
layers, training, dynamic = map(int, sys.argv[1:])
done = {"run": 0, "build": 0}  # graphs that Inductor lowers, and what the C++ compiler makes
def count(owner, name):
    original = getattr(owner, name)
    def counted(self, *args, **kwargs):
        # The header is put through the preprocessor in each process: its hash names the compiled one.
        done[name] += not str(getattr(self, "_target_file", "")).endswith(".i")
        return original(self, *args, **kwargs)
    setattr(owner, name, counted)
count(GraphLowering, "run")
count(CppBuilder, "build")
torch.manual_seed(0)
model = Stack([Block() for _ in range(layers)])
compiled = torch.compile(model, backend=backend, options={"regions": "always"}, dynamic=bool(dynamic))
for rows in (4, 6) if dynamic else (4,):
    x = torch.randn(rows, 8)
    with torch.set_grad_enabled(bool(training)):
        y, wanted = compiled(x), model(x)
        torch.testing.assert_close(y, wanted)
        if training:
            got = torch.autograd.grad(y.sin().sum(), tuple(model.parameters()))
            torch.testing.assert_close(got, torch.autograd.grad(wanted.sin().sum(), tuple(model.parameters())))
counted = torch._dynamo.utils.counters["inductor"]
print(json.dumps([counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"], *done.values()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "dynamic"), [(False, False), (True, True)], ids=["inference, static", "training, dynamic"]
)
def test_a_second_process_and_another_model_find_the_region_compiled(
    training, dynamic, tmp_path, monkeypatch, pytestconfig
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def run(layers, run=children.run):
        done = run("-c", PROGRAM, layers, int(training), int(dynamic), cwd=pytestconfig.rootpath)
        assert done.returncode == 0, done.stderr
        hits, misses, lowerings, builds = json.loads(done.stdout)
        return hits, misses, lowerings, builds > 0

    graphs = 6 if training else 3  # the region, and the graph before and after it
    assert run(3) == (0, graphs, graphs, True)
    assert run(3, children.run_fresh) == (graphs, 0, 0, False)  # nothing is lowered
    assert run(4) == (graphs, 0, 0, False)  # nor for a deeper model: the same layer, the same graph around


def test_forward_and_backward_are_one_callable_each():
    """One generated function calls regions and segments: no frames, guards or graph breaks between layers, and
    nothing for Inductor to compile but the layer and what lies around the layers."""
    from fxpasses import _torch

    sources, functions = [], []
    inner = _torch.compile_fx_inner

    def spy(gm, inputs, **how):
        sources.append([str(n.target) for n in gm.graph.nodes if "region" in str(n.target)])
        return inner(gm, inputs, **how)

    def stitched(*given):
        functions.append(inner_stitched(*given))
        return functions[-1]

    inner_stitched = graph_compilers.stitch_segments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "compile_fx_inner", spy)
        patch.setattr(graph_compilers, "stitch_segments", stitched)
        model = Stack([Block() for _ in range(3)])
        output, _ = step(compiled(model, compiler="inductor"), model, [torch.randn(4, 8)])
    assert sources == [[]] * 6  # the region both ways, before and after the layers both ways
    assert [call.source.count("results = run_") for call in functions] == [3, 3]
    assert output.shape == (4, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_regions_in_cuda_graphs():
    model = Stack([Block() for _ in range(4)]).cuda()
    call = compiled(model, compiler="inductor", mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(4, 8, device="cuda")
        wanted = step(model, model, [x])
        torch.compiler.cudagraph_mark_step_begin()
        got = step(call, model, [x])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
