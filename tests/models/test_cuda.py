"""End to end on a GPU: the same models as on the CPU, with CUDA graphs, regions, checks and captured backward passes."""

import itertools

import pytest
import torch
from torch import nn

import compiled_autograd
import fxpasses
from tests.models.support import assert_agrees
from tests.models.zoo import ZOO

pytestmark = [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    fxpasses.reset_stats()
    yield
    torch._dynamo.reset()


def compiled(**how):
    return lambda model: torch.compile(model, backend="fxpasses", **how)


def batches(name, sizes):
    return [ZOO[name].inputs(size) for size in sizes]


def agrees(name, compile, sizes=(3, 3), **how):
    assert_agrees(ZOO[name].build(), compile, batches(name, sizes), device="cuda", **how)


@pytest.mark.parametrize("name", ZOO)
def test_inductor_static(name):
    agrees(name, compiled(dynamic=False))


@pytest.mark.parametrize("name", ["gpt", "convnet", "encoder_decoder", "many_outputs", "checkpointed"])
def test_inductor_dynamic(name):
    agrees(name, compiled(dynamic=True), [3, 5, 2])


@pytest.mark.parametrize("name", ["gpt", "mixture_of_experts", "autoencoder", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(name, dtype):
    agrees(name, compiled(), [3], dtype=dtype)


@pytest.mark.parametrize("name", ZOO)
def test_stages_before_inductor(name):
    agrees(name, compiled(dynamic=True, options={"compiler": "eager"}), [3, 5, 3])


@pytest.mark.parametrize("name", ["gpt", "convnet", "relative"])
def test_values_are_checked_on_the_device(name):
    agrees(name, compiled(options={"compiler": "eager", "check": "values"}))


@pytest.mark.parametrize("options", [{}, {"regions": "always"}, {"memory_budget": 0.0}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "convnet", "encoder_decoder", "counting"])
def test_reduce_overhead(name, options):
    def marked(model):
        call = torch.compile(model, backend="fxpasses", options={"mode": "reduce-overhead", **options})

        def run(*inputs):
            torch.compiler.cudagraph_mark_step_begin()
            return call(*inputs)

        return run

    agrees(name, marked, [3, 3, 3, 3])


@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_captured_backward_passes(name):
    agrees(name, compiled(options={"compiled_autograd": True}), [3, 3])


@pytest.mark.parametrize("name", ["gpt", "convnet", "many_outputs", "checkpointed"])
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_backward_of_eager_code(name, cudagraphs):
    torch.manual_seed(0)
    model = ZOO[name].build().cuda()
    inputs = [[x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
               for x in batch] for batch in batches(name, [3, 3, 3])]  # fmt: skip

    def gradients(batch):
        model.zero_grad()
        found = model(*batch)
        outputs = [
            t
            for t in torch.utils._pytree.tree_leaves(found)
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        sum(t.sum() for t in outputs).backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    for batch in inputs:
        wanted = gradients(batch)
        with compiled_autograd.config.patch(cudagraphs=cudagraphs):
            with compiled_autograd.enable(torch.compile(backend="fxpasses", dynamic=False)):
                got = gradients(batch)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_dropout_is_drawn_once_a_call_under_cuda_graphs():
    """The offset of the random numbers moves from replay to replay, and forward and backward use the same mask."""
    model = nn.Dropout(0.5)
    call = torch.compile(model, backend="fxpasses", mode="reduce-overhead")
    masks = []
    for _ in range(5):
        x = torch.ones(4096, device="cuda", requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        y = call(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, y.detach())
        masks.append(y.detach().clone())
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(masks))


def test_scaled_training_with_autocast():
    def train(compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).cuda()
        call = compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        losses = []
        for _ in range(4):
            x = torch.randn(16, 64, device="cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                loss = call(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.testing.assert_close(train(compiled()), train(lambda m: m), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_kernels_of_the_device(dtype, causal):
    def attend(q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    inputs = [torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    wanted = torch.autograd.grad(attend(*inputs).float().square().sum(), inputs)
    call = torch.compile(attend, backend="fxpasses")
    got = torch.autograd.grad(call(*inputs).float().square().sum(), inputs)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_tensors_of_two_devices_in_one_graph():
    def f(x, table):
        rows = table.cuda(non_blocking=True)
        return (x @ rows).relu() + torch.arange(4).to(x.device)

    x, table = torch.randn(3, 5, device="cuda", requires_grad=True), torch.randn(5, 4, requires_grad=True)
    wanted = torch.autograd.grad(f(x, table).sum(), [x, table])
    got = torch.autograd.grad(torch.compile(f, backend="fxpasses")(x, table).sum(), [x, table])
    torch.testing.assert_close(got, wanted)


def test_a_second_process_has_no_plan_and_agrees(tmp_path):
    """Plans are for the CPU so far: the reason is counted, and nothing is written."""
    model = nn.Linear(4, 4).cuda()
    call = fxpasses.compile(model, cache=str(tmp_path))
    x = torch.randn(2, 4, device="cuda")
    torch.testing.assert_close(call(x), model(x))
    assert fxpasses.stats().plans_written == 0
    assert fxpasses.stats().plans_refused


def test_check_and_capture_on_the_device():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).cuda()
    x = torch.randn(3, 8, device="cuda")
    captured = fxpasses.capture(model, x)
    assert {
        t.device.type for t in (n.meta["val"] for n in captured.forward.graph.find_nodes(op="placeholder"))
    } == {"cuda"}
    fxpasses.check(model, x)


def test_tuning_measures_the_device():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    x = torch.randn(32, 64, device="cuda")
    fxpasses.tune(model, x, seconds=15)
    call = torch.compile(model, backend="fxpasses", options={"passes": "tuned"})
    torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-4)
