"""Programs to try a pass on, and the settings to try each in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Program:
    """A function or module with inputs.

    Attributes:
        name: a short description.
        make: makes the callable and its inputs.
        variants: the same program with other constants, each named after its change.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    variants: tuple[tuple[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]], ...] = ()


@dataclass(frozen=True)
class Setting:
    """One way to run a program.

    Attributes:
        name: the setting in words.
        dtype: the dtype of floating-point inputs and parameters; ``None`` keeps their own.
        sizes: replacements for sizes of the inputs.
        strided: whether inputs of two or more dimensions are non-contiguous.
        gradients: whether inputs require grad.
        dynamic: whether sizes are symbolic.
    """

    name: str
    dtype: torch.dtype | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    strided: bool = False
    gradients: bool = True
    dynamic: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether every program is tried in this setting."""
        return not self.sizes and not self.strided and self.dtype in (None, torch.bfloat16)


def settings(inputs: Sequence[Any], gradients: bool) -> Iterator[Setting]:
    """Yield the settings to try a program in: unchanged first, then with one thing changed at a time.

    Args:
        inputs: the inputs of the program.
        gradients: whether it is differentiated where possible.
    """
    yield Setting("as it is", gradients=gradients)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield Setting(str(dtype).removeprefix("torch."), dtype=dtype, gradients=gradients)
    yield Setting("not contiguous", strided=True, gradients=gradients)
    yield Setting("symbolic sizes", gradients=gradients, dynamic=True)
    if gradients:
        yield Setting("no gradients", gradients=False)
    found = sorted({n for v in inputs if isinstance(v, Tensor) for n in v.shape if n > 1})
    if found:
        odd = tuple((n, n + 2 if n % 2 else n + 1) for n in found)
        yield Setting("odd sizes", sizes=odd, gradients=gradients)
    for n in found:
        yield Setting(f"1 for {n}", sizes=((n, 1),), gradients=gradients)


def with_setting(
    model: Callable[..., Any], inputs: Sequence[Any], setting: Setting
) -> tuple[Callable[..., Any], list[Any]]:
    """Apply a setting to a program.

    Args:
        model: the callable. A module is converted in place to the dtype of the setting.
        inputs: its positional arguments.
        setting: what to change.
    """
    sizes = dict(setting.sizes)

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if setting.sizes:
            shape = [sizes.get(n, n) for n in value.shape]
            if list(value.shape) != shape:
                floats = value.is_floating_point()
                like = torch.randn(shape) if floats else torch.zeros(shape, dtype=value.dtype)
                value = like.to(value.dtype)
        if not value.is_floating_point():
            return value
        value = value.detach().to(setting.dtype or value.dtype)
        if setting.strided and value.dim() > 1:
            value = value.mT.contiguous().mT
        return value.requires_grad_(setting.gradients)

    if isinstance(model, nn.Module) and setting.dtype is not None:
        model = model.to(setting.dtype)
    return model, [one(value) for value in inputs]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


def _masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def _one_hot(ids: Tensor, table: Tensor) -> Tensor:
    return F.one_hot(ids, table.shape[0]).to(table.dtype) @ table


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _pointwise(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        x.sigmoid() * x + y,
        x.tanh() * y.exp(),
        F.gelu(x) / (y.square() + 1),
        torch.maximum(x, y).relu(),
        x.clamp(-1, 1) - y.abs(),
        x.where(x > y, y).sqrt(),
    )


def _sums(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return x @ a + x @ b + (x @ c).cumsum(-1) - x.amax(-1, keepdim=True) + x.var(-1, keepdim=True)


def _loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.mT, labels)


def _embedding(ids: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    return (F.embedding(ids, table) @ weight).relu().sum(1)


def _shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, 6, 8) for t in (k, v))
    return (q @ keys.mT / 4).softmax(-1) @ values


def _pairs(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    both = torch.cat([x[:, :, None].expand(-1, -1, 6, -1), y[:, None].expand(-1, 6, -1, -1)], -1)
    return both @ weight


def _edges(ids: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x[ids], x[ids.flip(0)]], -1) @ weight


def _same_weight(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh() + (y @ weight).sigmoid()


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a @ b + c @ d).tanh()


def _repeated_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, v)


def _layers(*modules: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(make() for make in modules))


def _with_inputs(function: Callable[..., Any], *shapes: tuple[int, ...], ids: int = 0) -> Callable[[], Any]:
    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(0)
        inputs: list[Any] = [torch.randn(shape, generator=generator) for shape in shapes]
        if ids:
            drawn = torch.randint(0, ids, (4, 6), generator=generator)
            inputs = [*inputs, drawn[:, 0]] if function is _loss else [drawn, *inputs]
        return function, tuple(inputs)

    return make


def _module(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Any]:
    return lambda: (make(), (torch.randn(shape, generator=torch.Generator().manual_seed(0)),))


PROGRAMS = (
    Program("pointwise", _with_inputs(_pointwise, (4, 6), (4, 6))),
    Program(
        "repeated calls", _with_inputs(lambda x: x.exp().sin() + x.exp().cos() + (x * 1 + 0) * 2, (4, 6))
    ),
    Program("sums", _with_inputs(_sums, (4, 6), (6, 8), (6, 8), (6, 8))),
    Program("norm", _with_inputs(_norm, (4, 6), (6,))),
    Program("attention", _with_inputs(_attention, (2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8))),
    Program("masked attention", _with_inputs(_masked_attention, (2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8))),
    Program("one-hot product", _with_inputs(_one_hot, (10, 8), ids=10)),
    Program("low rank", _with_inputs(lambda x, a, b: x @ (a @ b), (2, 40), (40, 3), (3, 40))),
    Program("next token", _with_inputs(lambda x, weight: (x @ weight)[:, -1:] * 2, (2, 6, 8), (8, 20))),
    Program(
        "first row", _with_inputs(lambda x, weight: (x @ weight).relu()[:, 0].sum(-1), (2, 6, 8), (8, 8))
    ),
    Program("shared keys", _with_inputs(_shared_keys, (2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))),
    Program("pairs", _with_inputs(_pairs, (2, 6, 8), (2, 6, 8), (16, 5))),
    Program("edges", _with_inputs(_edges, (4, 8), (16, 5), ids=4)),
    Program("one weight", _with_inputs(_same_weight, (3, 8), (3, 8), (8, 8))),
    Program("cross entropy", _with_inputs(_loss, (4, 8), (10, 8), ids=10)),
    Program("sum of products", _with_inputs(_sum_of_products, (20, 2), (2, 18), (20, 2), (2, 18))),
    Program("dropout", _with_inputs(lambda x, weight: F.dropout((x @ weight).relu(), 0.5), (4, 6), (6, 8))),
    Program("repeated keys", _with_inputs(_repeated_keys, (2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))),
    Program("embedding", _with_inputs(_embedding, (10, 8), (8, 3), ids=10)),
    Program(
        "linear layers",
        _module(
            lambda: _layers(
                lambda: nn.Linear(6, 8), nn.GELU, lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 3)
            ),
            4,
            6,
        ),
    ),
    Program(
        "convolutions",
        _module(
            lambda: _layers(
                functools.partial(nn.Conv2d, 3, 4, 3, padding=1),
                lambda: nn.BatchNorm2d(4),
                nn.ReLU,
                lambda: nn.MaxPool2d(2),
                functools.partial(nn.Conv2d, 4, 2, 3),
            ),
            2,
            3,
            8,
            8,
        ),
    ),
    Program(
        "encoder layer",
        _module(
            lambda: _layers(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
            2,
            5,
            8,
        ),
    ),
)
"""Small programs of the kinds that models consist of."""
