"""The operator of bilinear layers, and of their gradients."""

import pytest
import torch
from torch.nn import functional

import fxpasses
from fxpasses.exact import equivalent


def made(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(len(size))).requires_grad_()


X, W, Y, B = made(3, 4), made(2, 4, 5), made(3, 5), made(2)
FORMS = {
    "an einsum": (
        lambda x, w, y, b: torch.einsum("bi,oij,bj->bo", x, w, y) + b,
        lambda x, w, y, b: torch.einsum("bi,oij,bj->bo", x, w, y) + b.flip(0),
    ),
    "a matmul and a sum": (
        lambda x, w, y, b: ((x @ w.permute(1, 0, 2).reshape(4, 10)).view(3, 2, 5) * y[:, None]).sum(-1) + b,
        lambda x, w, y, b: ((x @ w.permute(1, 2, 0).reshape(4, 10)).view(3, 2, 5) * y[:, None]).sum(-1) + b,
    ),
    "one matrix after the other": (
        lambda x, w, y, b: torch.stack([(x @ m * y).sum(-1) for m in w], -1) + b,
        lambda x, w, y, b: torch.stack([(x @ m * y).sum(-1) for m in w.flip(0)], -1) + b,
    ),
    "products of pairs": (
        lambda x, w, y, b: torch.linalg.vecdot((x[:, :, None] * y[:, None])[:, None], w, dim=-1).sum(-1) + b,
        lambda x, w, y, b: torch.linalg.vecdot((x[:, :, None] * y[:, None])[:, None], w, dim=-1).mean(-1) + b,
    ),
}


def in_order(f):
    """All inputs are taken, in their order."""
    return lambda *inputs: (*(value * 2 for value in inputs), f(*inputs))


@pytest.mark.parametrize("name", FORMS)
def test_a_bilinear_layer_is_a_sum_of_products(name):
    inputs = [X, W, Y, B]
    before, right, wrong = (
        fxpasses.capture(in_order(f), *inputs).joint
        for f in (lambda x, w, y, b: functional.bilinear(x, y, w, b), *FORMS[name])
    )
    assert any("trilinear" in str(node.target) for node in before.graph.nodes)
    last = before.graph.find_nodes(op="placeholder")[4:]
    values = [*inputs, *(torch.randn(node.meta["val"].shape) for node in last)]
    proved, refuted = equivalent(before, right, values), equivalent(before, wrong, values)
    assert proved.kind == "EQUAL", str(proved)
    assert refuted.kind == "DIFFERENT"
