import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import ChunkLogits
from fxpasses.testing import prove
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = ChunkLogits(chunks=3, min_elements=64)
X = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
WEIGHT = torch.randn(17, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
TARGETS = torch.tensor([3, 0, 16, 5, 3, 7, 7, 1, 3, 2])
DTYPES = (torch.float32, torch.bfloat16)


class Head(nn.Module):
    def __init__(self, bias=False, **how):
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(4, 17, bias=bias)
        self.how = how

    def forward(self, x, targets):
        return F.cross_entropy(self.linear(x.sin()), targets, **self.how)


def test_golden():
    assert_golden(ChunkLogits(2, 64), Head(), X.detach(), TARGETS)


@pytest.mark.parametrize(
    "model", [Head(), Head(bias=True), Head(reduction="sum"), Head(reduction="none"), Head(ignore_index=3)]
)
def test_results_and_gradients(model):
    assert_trains(PASS, model, X, TARGETS, dtypes=(torch.float64, *DTYPES))


def test_losses_of_another_kind():
    def entropy(x, w):
        scores = x @ w.t()
        return -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1)

    assert_trains(PASS, Wrapped(entropy, WEIGHT), X, dtypes=DTYPES)


def test_logits_are_not_saved():
    def saved(passes):
        found = fxpasses.capture(Head(), X, TARGETS, passes=passes, decompose=True)
        return sum(v.nbytes for v in found.saved if not v.is_input and 17 in v.shape)

    assert saved(["default"]) >= 10 * 17 * 4
    assert saved(["default", PASS, "default"]) == 0


@pytest.mark.slow
def test_through_inductor():
    torch._dynamo.reset()
    model = Head()
    wanted = torch.autograd.grad(model(X, TARGETS), [X, *model.parameters()])
    options = {"passes": ["default", PASS, "default"]}
    compiled = torch.compile(model, backend=backend, options=options, dynamic=False)
    got = torch.autograd.grad(compiled(X, TARGETS), [X, *model.parameters()])
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def logits_too(x, w, targets):
    logits = x @ w.t()
    return F.cross_entropy(logits, targets), logits


@pytest.mark.parametrize(
    "function",
    [
        logits_too,  # the whole is needed anyway
        lambda x, w, t: F.cross_entropy((x @ w.t()).softmax(0), t),  # rows depend on each other
        lambda x, w, t: F.cross_entropy((x @ w.t()).cumsum(0), t),
        lambda x, w, t: F.cross_entropy(x @ w.t() - (x @ w.t()).mean(), t),
        lambda x, w, t: F.mse_loss(x @ w.t(), x @ w.t() + 1),  # no softmax
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, X, WEIGHT, TARGETS)


def test_small_ones_are_left_alone():
    assert_left_alone(ChunkLogits(), Head(), X, TARGETS)


def test_weights_that_lie_in_memory_the_other_way_round():
    def loss(x, w, targets):
        return F.cross_entropy(F.layer_norm(x, (4,)) @ w, targets)

    fxpasses.reset_stats()
    torch._dynamo.reset()
    grads = []
    compiled = torch.compile(
        loss, backend=backend, options={"passes": ["default", PASS, "default"], "compiler": "eager"}
    )
    for step in (loss, compiled):
        x, w = X.detach().t().contiguous().t().requires_grad_(), WEIGHT.detach().t().requires_grad_()
        step(x, w, TARGETS).backward()
        grads.append((x.grad, w.grad))
    assert fxpasses.stats().pass_changes["chunk_logits"] == 1
    torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_a_graph_in_which_an_operator_has_no_rule_stays_as_it_is():
    """As it is captured, it holds aliases; as the default passes leave it, the pass is right."""
    inputs = torch.randn(4, 8).requires_grad_(), torch.randn(10, 8).requires_grad_(), torch.arange(4)
    proof = prove(
        ChunkLogits(chunks=2, min_elements=0), lambda x, w, t: F.cross_entropy(x @ w.mT, t), *inputs
    )
    assert proof.ok, proof
