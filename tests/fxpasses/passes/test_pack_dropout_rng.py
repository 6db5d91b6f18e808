import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import PackDropoutRng
from tests.fxpasses.passes.support import assert_golden, assert_left_alone, captured, rewrite

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PASS = PackDropoutRng(min_elements=8)
COMPILERS = pytest.mark.parametrize("compiler", ["eager", "inductor"])


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def compiled(function, compiler="eager", passes=("default", PASS, "default"), **options):
    options = {"passes": list(passes), "compiler": compiler, **options}
    return torch.compile(function, backend=backend, options=options, dynamic=False)


def fired():
    return fxpasses.stats().pass_changes.get("pack_dropout_rng", 0)


def test_golden():
    assert_golden(PASS, lambda x: F.dropout(x, 0.1), ones(6, 8))


PROBABILITIES = (0.01, 0.1, 0.5, 0.9)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


# To Inductor a probability is a number in its code: each once is enough there.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "probability", "dtype"),
    [
        *(("eager", probability, dtype) for probability in PROBABILITIES for dtype in DTYPES),
        *(("inductor", *both) for both in zip(PROBABILITIES, DTYPES, strict=True)),
    ],
)
def test_share_and_gradient(compiler, probability, dtype):
    x = ones(101, 999, dtype=dtype)
    y = compiled(lambda x: F.dropout(x, probability), compiler)(x)
    assert fired() == 1
    kept = (y != 0).float()
    spread = math.sqrt(probability * (1 - probability) / x.numel())
    assert abs(kept.mean().item() - (1 - probability)) < 5 * spread + 2**-16
    for lane in range(4):  # each of the four numbers of a draw
        share = kept.flatten()[lane::4].mean().item()
        assert abs(share - (1 - probability)) < 10 * spread + 2**-16
    torch.testing.assert_close(y[y != 0][0].item(), 1 / (1 - probability), rtol=1e-2, atol=0)
    y.sum().backward()
    assert torch.equal(x.grad, y)  # the same mask, and the same factor


def test_numbers_of_a_draw_do_not_depend_on_each_other():
    kept = (compiled(lambda x: F.dropout(x, 0.5))(ones(1 << 18)) != 0).double().view(-1, 4)
    related = torch.corrcoef(torch.cat([kept[:-1], kept[1:]], 1).t()) - torch.eye(8)
    assert related.abs().max() < 5 / math.sqrt(len(kept))


@pytest.mark.parametrize(
    ("compare", "share"), [(torch.gt, 0.75), (torch.ge, 0.75), (torch.lt, 0.25), (torch.le, 0.25)]
)
def test_comparisons(compare, share):
    y = compiled(lambda x: x * compare(torch.rand_like(x), 0.25))(ones(1 << 16))
    assert fired() == 1
    assert abs((y != 0).float().mean().item() - share) < 0.01


def test_two_masks_of_the_same_numbers_stay_one_inside_of_the_other():
    def f(x):
        numbers = torch.rand_like(x)
        return x * (numbers > 0.2), x * (numbers > 0.6)

    more, fewer = compiled(f)(ones(4096))
    assert fired() == 1
    assert ((fewer != 0) <= (more != 0)).all()
    assert 0.35 < fewer.mean() < 0.45 < 0.75 < more.mean() < 0.85


class Layers(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Identity()) for _ in range(count)
        )

    def forward(self, x):
        return torch.stack([torch.sin(layer(x) * 1.0) for layer in self.layers])


ONCE, TWICE = ("default", PASS, "default"), (PASS, "default", PASS, "default")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "regions", "passes"),
    [
        *(("eager", regions, passes) for regions in ("off", "always") for passes in (ONCE, TWICE)),
        ("inductor", "off", TWICE),
        ("inductor", "always", ONCE),
    ],
)
def test_layers_and_steps_differ_and_seeds_repeat(compiler, regions, passes):
    f = compiled(Layers(), compiler, passes, regions=regions)
    drawn = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        x = ones(1003)
        y = f(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, ((y != 0) * 2 * math.cos(2)).sum(0))
        drawn.append(y.detach() != 0)
    assert fired()
    if regions == "always":
        assert fxpasses.stats().region_calls >= 3
    masks = [*drawn[0], *drawn[1]]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < (mask == other).float().mean() < 0.6  # independent: half agree
    assert torch.equal(drawn[0], drawn[2])


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)


@pytest.mark.slow
@COMPILERS
def test_attention(compiler):
    q, k = torch.zeros(2, 3, 64, 8, requires_grad=True), torch.zeros(2, 3, 64, 8, requires_grad=True)
    v = torch.eye(64).expand(2, 3, 64, 64).clone().requires_grad_()
    weights = compiled(attention, compiler)(q, k, v)  # uniform weights: the output is the mask
    assert fired() == 1
    assert 0.7 < (weights != 0).float().mean() < 0.8
    seen = torch.rand_like(weights)
    weights.backward(seen)
    torch.testing.assert_close(v.grad, weights.detach().transpose(-1, -2) @ seen)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_drawn_once_and_the_mask_is_saved(budget):
    found = fxpasses.capture(
        lambda x: (F.dropout(x.sin(), 0.3).cos() @ x).tanh(),
        ones(64, 64),
        passes=["default", PASS, "default"],
        memory_budget=budget,
        decompose=True,
    )
    draws = [sum("random" in str(n.target) for n in gm.graph.nodes) for gm in (found.forward, found.backward)]
    assert draws == [1, 0]
    assert {v.dtype for v in found.saved if not v.is_input} <= {torch.float32, torch.bool}


def checkpointed(x):
    return checkpoint(lambda y: F.dropout(y.sin(), 0.5).cos(), x, use_reentrant=False)


def test_checkpointed_masks_stay():
    assert_left_alone(PASS, checkpointed, ones(6, 8))


def random_and_more(x):
    numbers = torch.rand_like(x)
    return x * (numbers > 0.5) + numbers


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 1e-4),  # 3 / 32768 is not close enough
        lambda x: F.dropout(x, 1e-9),
        lambda x: F.dropout(x, 1 - 1e-4),
        lambda x: x * (torch.rand_like(x) > 1.5),
        lambda x: x * (torch.rand_like(x) > -0.5),
        lambda x: x * (torch.rand_like(x) > 0),
        lambda x: x * (torch.rand_like(x) < 1.0),
        lambda x: x * (torch.rand_like(x) > x),
        lambda x: x * (torch.randn_like(x) > 0.5),
        lambda x: x * torch.rand_like(x),
        random_and_more,
        lambda x: F.dropout(x[:1, :7], 0.5),  # 7 elements
        lambda x: F.dropout(x[:0], 0.5),
        lambda x: F.dropout(x, 0.0) * F.dropout(x, 1.0),
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, ones(6, 8))


def test_left_alone_with_symbolic_sizes():
    gm = captured(lambda x: F.dropout(x, 0.5), ones(6, 8), dynamic=True)
    assert not rewrite(PASS, gm)


def test_left_alone_on_other_devices():
    gm = captured(lambda x: F.dropout(x, 0.5), torch.empty(6, 8, device="meta", requires_grad=True))
    assert not rewrite(PASS, gm)


def test_left_alone_where_the_numbers_of_eager_are_asked_for():
    with torch._inductor.config.patch(fallback_random=True):
        assert_left_alone(PASS, lambda x: x * (torch.rand_like(x) > 0.5), ones(6, 8))


def test_checks_of_values_raise_no_alarm():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.1))
    f = compiled(model, check="values")
    for _ in range(2):
        f(torch.randn(6, 8)).sum().backward()
    assert fired() == 1
    assert not fxpasses.stats().fallbacks


def test_empty_with_no_limit():
    assert_left_alone(PackDropoutRng(min_elements=0), lambda x: F.dropout(x[:0], 0.5), ones(6, 8))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 1), (2, 3, 5)])
def test_odd_sizes(shape):
    x = ones(*shape)
    y = compiled(lambda x: F.dropout(x, 0.5), passes=("default", PackDropoutRng(min_elements=1), "default"))(
        x
    )
    assert fired() == 1
    assert set(y.flatten().tolist()) <= {0.0, 2.0}
    assert y.shape == shape


@pytest.mark.slow
def test_together_with_packed_masks():
    from fxpasses.passes import PackSavedMasks

    x = ones(64, 64)
    f = compiled(
        lambda x: F.dropout(x.sin(), 0.5),
        "inductor",
        ("default", PASS, PackSavedMasks(min_elements=8), "default"),
    )
    y = f(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0) * 2 * math.cos(1))
    assert fired() == 1
