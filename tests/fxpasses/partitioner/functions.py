"""Small functions, one for each property of a joint graph that a partitioner can get wrong."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Case = tuple[Callable[..., Any], list[Any]]


def _leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.square = x * x
        return ctx.square * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3 * ctx.square + 0 * ctx.saved_tensors[0]


def _block(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.relu(x @ w) @ w)


def _random_block(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.sin(x @ w), 0.5)


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    y = checkpoint(_block, x, w, use_reentrant=False)
    return checkpoint(_block, y, w, use_reentrant=False)


def checkpointed_random(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(_random_block, x, w, use_reentrant=False) @ w


def checkpointed_with_policy(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(
        _block,
        x,
        w,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, _save_products),
    )


def custom_function(x: Tensor) -> Tensor:
    return _Cube.apply(x.sin()).cos()


def complex_numbers(x: Tensor, w: Tensor) -> Tensor:
    z = torch.complex(x, w)
    return torch.fft.fft(z * z.conj().sin()).abs()


def several_outputs(x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    y = x.exp()
    return y, y.sum(), {"x": x, "product": x * y}


def input_returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, (x * y).tanh()


def without_gradient(x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    return (x.sigmoid() * mask).pow(2) * count


def no_grad_inside(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ w).abs().amax(-1, keepdim=True)
    return (x / (1 + scale)).exp() @ w


def input_changed_in_place(x: Tensor, state: Tensor) -> Tensor:
    y = x * state.clone() * state.sin()
    state.mul_(0.5).add_(y.detach().mean(0))
    return y.tanh()


def view_of_changed_input(x: Tensor, state: Tensor) -> Tensor:
    y = x * state[0].exp()
    state.add_(1)
    return y.sin() * state.sum()


def views_and_slices(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return (q.transpose(0, 1) @ k).softmax(-1) @ v.flip(0)[: q.shape[1]].contiguous().view(q.shape[1], -1)


def sorted_and_indexed(x: Tensor, index: Tensor) -> Tensor:
    values, order = x.sort(-1)
    picked = values.gather(-1, index) + x[:, order[0, :1]].exp()
    return picked.cumsum(-1) * values.topk(2).values.sum()


def lists_and_none(x: Tensor, _unused: Tensor, y: Tensor | None = None) -> list[Tensor | None]:
    parts = torch.split(x.sin(), [1, 2, x.shape[0] - 3])
    return [parts[0].exp(), None, parts[2] * (1 if y is None else y)]


def pooled(x: Tensor) -> Tensor:
    y = F.max_pool2d(F.relu(x), 2)
    return F.interpolate(y, scale_factor=2, mode="bilinear").sigmoid() * F.avg_pool2d(x, 3, 1, 1)


def recurrent(x: Tensor, w: Tensor) -> Tensor:
    state = torch.zeros_like(x[0])
    for step in x.unbind(0):
        state = torch.tanh(step @ w + state * 0.5)
    return state


def gradient_of_constant(x: Tensor) -> Tensor:
    return x.sum() + torch.ones(3, dtype=x.dtype).sin().sum()


def twice_the_same(x: Tensor) -> Tensor:
    return torch.exp(x) * torch.exp(x) + torch.exp(x).sin()


def random_noise(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    return (x * noise).sin() * torch.randn_like(x).exp()


def view_of_a_constant(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * 1j, n=x.shape[-1])


FUNCTIONS: dict[str, Callable[[], Case]] = {
    "view of a constant": lambda: (view_of_a_constant, [_leaf(4, 6)]),
    "checkpointed": lambda: (checkpointed, [_leaf(4, 4), _leaf(4, 4)]),
    "checkpointed random": lambda: (checkpointed_random, [_leaf(4, 4), _leaf(4, 4)]),
    "checkpointed with a policy": lambda: (checkpointed_with_policy, [_leaf(4, 4), _leaf(4, 4)]),
    "custom function": lambda: (custom_function, [_leaf(5)]),
    "complex": lambda: (complex_numbers, [_leaf(4, 6), _leaf(4, 6)]),
    "several outputs": lambda: (several_outputs, [_leaf(5)]),
    "input returned": lambda: (input_returned, [_leaf(5), _leaf(5)]),
    "inputs without gradient": lambda: (
        without_gradient,
        [_leaf(3, 4), torch.rand(3, 4) > 0.5, torch.tensor([3])],
    ),
    "no_grad inside": lambda: (no_grad_inside, [_leaf(3, 3), _leaf(3, 3)]),
    "input changed in place": lambda: (
        input_changed_in_place,
        [_leaf(3, 4), torch.rand(4, dtype=torch.float64)],
    ),
    "view of a changed input": lambda: (
        view_of_changed_input,
        [_leaf(4), torch.rand(2, 4, dtype=torch.float64)],
    ),
    "views and slices": lambda: (views_and_slices, [_leaf(4, 5), _leaf(5, 12)]),
    "sorted and indexed": lambda: (sorted_and_indexed, [_leaf(3, 5), torch.randint(0, 5, (3, 1))]),
    "lists and None": lambda: (lists_and_none, [_leaf(6, 2), torch.rand(2)]),
    "pooled": lambda: (pooled, [_leaf(1, 2, 8, 8)]),
    "recurrent": lambda: (recurrent, [_leaf(5, 3, 4), _leaf(4, 4)]),
    "gradient of a constant": lambda: (gradient_of_constant, [_leaf(4)]),
    "the same three times": lambda: (twice_the_same, [_leaf(4)]),
    "random": lambda: (random_noise, [_leaf(6)]),
    "batch norm": lambda: (nn.BatchNorm1d(4).double().train(), [_leaf(5, 4)]),
    "group norm": lambda: (nn.GroupNorm(2, 4).double(), [_leaf(3, 4, 5)]),
    "embedding bag": lambda: (nn.EmbeddingBag(9, 4).double(), [torch.randint(0, 9, (3, 4))]),
    "bilinear": lambda: (nn.Bilinear(3, 4, 2).double(), [_leaf(5, 3), _leaf(5, 4)]),
}
