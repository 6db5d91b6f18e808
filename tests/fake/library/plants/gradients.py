"""Operators for tests of backward formulas."""

# ruff: noqa: E731  short kernels are easier to compare side by side as lambdas

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from .table import TT, T, broadcast, like, r, right, save, wrong

g34, g33 = lambda: (r(3, 4, grad=True),), lambda: (r(3, 3, grad=True),)
right("double", g34, T, lambda x: x * 2, like, lambda ctx, g: g * 2)
wrong("three for two", g34, T, lambda x: x * 2, like, lambda ctx, g: g * 3)
wrong("three for two, no gradient asked", lambda: (r(3, 4),), T, lambda x: x * 2, like, lambda ctx, g: g * 3)
two = lambda: (r(3, 4, grad=True), r(3, 4, grad=True) * 1.0)
gg = lambda: (r(3, 4, grad=True), (r(4, 3).t() + 0.5).detach().contiguous().requires_grad_())
mul = lambda x, y: x * y
wrong(
    "product, swapped",
    gg,
    TT,
    mul,
    broadcast,
    lambda ctx, g: (g * ctx.saved_tensors[0], g * ctx.saved_tensors[1]),
    save,
)
right(
    "product",
    gg,
    TT,
    mul,
    broadcast,
    lambda ctx, g: (
        (g * ctx.saved_tensors[1]).sum_to_size(ctx.saved_tensors[0].shape),
        (g * ctx.saved_tensors[0]).sum_to_size(ctx.saved_tensors[1].shape),
    ),
    save,
)
wrong(
    "product, one gradient left out",
    gg,
    TT,
    mul,
    broadcast,
    lambda ctx, g: (g * ctx.saved_tensors[1], None),
    save,
)
mean = lambda x: x.mean()
wrong(
    "mean of twelve", g34, T, mean, lambda x: x.new_empty(()), lambda ctx, g: (g / 12).expand(ctx.shape), save
)
right(
    "mean",
    g34,
    T,
    mean,
    lambda x: x.new_empty(()),
    lambda ctx, g: (g / max(ctx.shape.numel(), 1)).expand(ctx.shape),
    save,
)
SCALE = "(Tensor x, float by=2.0) -> Tensor"
scale = lambda x, by=2.0: x * by
wrong("scale, gradient of the default", g34, SCALE, scale, like, lambda ctx, g: (g * 2.0, None), save)
right("scale", g34, SCALE, scale, like, lambda ctx, g: (g * ctx.others[0], None), save)
wrong(
    "sign of the cosine", g34, T, lambda x: x.cos(), like, lambda ctx, g: g * ctx.saved_tensors[0].sin(), save
)
right("cosine", g34, T, lambda x: x.cos(), like, lambda ctx, g: -g * ctx.saved_tensors[0].sin(), save)
wrong(
    "exp with its input saved", g34, T, lambda x: x.exp(), like, lambda ctx, g: g * ctx.saved_tensors[0], save
)
right("exp", g34, T, lambda x: x.exp(), like, lambda ctx, g: g * ctx.saved_tensors[1], save)
ROWS = T
wrong(
    "sum of rows, expanded wrong",
    g33,
    T,
    lambda x: x.sum(1),
    lambda x: x.new_empty(x.shape[0]),
    lambda ctx, g: g.expand(ctx.shape),
    save,
)
right(
    "sum of rows",
    g33,
    T,
    lambda x: x.sum(1),
    lambda x: x.new_empty(x.shape[0]),
    lambda ctx, g: g[:, None].expand(ctx.shape),
    save,
)
mg = lambda: (r(3, 3, grad=True), (r(3, 3) + r(3, 3).t() * 0.5).requires_grad_())
wrong(
    "matmul, not transposed",
    mg,
    TT,
    torch.mm,
    lambda x, y: x.new_empty(x.shape[0], y.shape[1]),
    lambda ctx, g: (
        g @ ctx.saved_tensors[1]
        if g.shape[1] == ctx.saved_tensors[1].shape[0]
        else g @ ctx.saved_tensors[1].t(),
        ctx.saved_tensors[0].t() @ g,
    ),
    save,
)
right(
    "matmul with gradient",
    mg,
    TT,
    torch.mm,
    lambda x, y: x.new_empty(x.shape[0], y.shape[1]),
    lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g),
    save,
)
_global: list[torch.Tensor] = []


def save_globally(ctx, inputs, output):
    _global[:] = [inputs[0].detach().clone()]


wrong(
    "saved in a global", g34, T, lambda x: x.sin(), like, lambda ctx, g: g * _global[0].cos(), save_globally
)
wrong(
    "no factor of the norm",
    g34,
    T,
    lambda x: x.pow(2).sum().sqrt(),
    lambda x: x.new_empty(()),
    lambda ctx, g: g * ctx.saved_tensors[0],
    save,
)
cg = lambda: (torch.complex(r(3), r(3) + 1).requires_grad_(),)
wrong("complex without conj", cg, T, lambda x: x * x, like, lambda ctx, g: 2 * g * ctx.saved_tensors[0], save)
right("complex", cg, T, lambda x: x * x, like, lambda ctx, g: 2 * g * ctx.saved_tensors[0].conj(), save)
wrong(
    "gradient only if positive",
    g34,
    T,
    lambda x: x.abs(),
    like,
    lambda ctx, g: g * (ctx.saved_tensors[0] > 0),
    save,
)
right(
    "relu at zero",
    lambda: (torch.zeros(3, 4, requires_grad=True),),
    T,
    lambda x: x.relu(),
    like,
    lambda ctx, g: g * (ctx.saved_tensors[0] > 0),
    save,
)
right(
    "largest of equals",
    lambda: (torch.ones(4, requires_grad=True),),
    T,
    lambda x: x.max(),
    lambda x: x.new_empty(()),
    lambda ctx, g: g * F.one_hot(ctx.saved_tensors[0].argmax(), ctx.shape[0]),
    save,
)
right("straight-through rounding", g34, T, lambda x: x.round(), like, lambda ctx, g: g)
right(
    "clamp",
    g34,
    T,
    lambda x: x.clamp(-0.5, 0.5),
    like,
    lambda ctx, g: g * (ctx.saved_tensors[0].abs() <= 0.5),
    save,
)
right(
    "numpy in float32",
    g34,
    T,
    lambda x: torch.from_numpy(np.sin(x.numpy().astype(np.float32))).to(x.dtype),
    like,
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    save,
)
right(
    "quantization with a straight-through gradient",
    lambda: (r(9, 11, grad=True), 0.1),
    "(Tensor x, float scale) -> Tensor",
    lambda x, scale: torch.round(x / scale).clamp(-8, 7) * scale,
    lambda x, scale: torch.empty_like(x),
    lambda ctx, g: (g, None),
)

scaled = "(Tensor x, float s) -> Tensor"
positive = lambda: ((r(3, 4).abs() + 0.5).requires_grad_(), 2.0)
scale = lambda x, s: x.abs() * s
right(
    "scaled, whatever the signs",
    positive,
    scaled,
    scale,
    like,
    lambda ctx, g: (g * ctx.others[0] * ctx.saved_tensors[0].sign(), None),
    save,
)
wrong(
    "the scale's absolute value",
    positive,
    scaled,
    scale,
    like,
    lambda ctx, g: (g * abs(ctx.others[0]) * ctx.saved_tensors[0].sign(), None),
    save,
)
wrong("the sign of x left out", positive, scaled, scale, like, lambda ctx, g: (g * ctx.others[0], None), save)
right(
    "a logarithm, which has no value for other signs",
    positive,
    scaled,
    lambda x, s: x.log() * s,
    like,
    lambda ctx, g: (g * ctx.others[0] / ctx.saved_tensors[0], None),
    save,
)

wrong("gradient clamped", g34, T, lambda x: x * 2, like, lambda ctx, g: 2 * g.clamp(-10, 10))
wrong(
    "small gradients dropped",
    g34,
    T,
    lambda x: x * 2,
    like,
    lambda ctx, g: 2 * torch.where(g.abs() > 1e-3, g, 0),
)

# A different formula for some dtypes, and repeated indices.
HALF = (torch.float16, torch.bfloat16)


def in_types(types, other):
    return lambda ctx, g: (other if ctx.saved_tensors[0].dtype in types else cosine)(g, ctx.saved_tensors[0])


cosine = lambda g, x: g * x.cos()
for types, kind in ((HALF, "half precision"), ((torch.float16,), "float16"), ((torch.float32,), "float32")):
    more = in_types(types, lambda g, x: g * x.cos() * 1.125)
    wrong(f"sine, an eighth too much in {kind}", g34, T, lambda x: x.sin(), like, more, save)
wrong(
    "sine, a factor of 0.9995",
    g34,
    T,
    lambda x: x.sin(),
    like,
    lambda ctx, g: 0.9995 * cosine(g, ctx.saved_tensors[0]),
    save,
)
in_single = lambda ctx, g: (g.float() * ctx.saved_tensors[0].float().cos()).to(g.dtype)
right(
    "steep sine",  # with few digits, its slope can be anything
    lambda: (r(5, grad=True),),
    T,
    lambda x: (x * 300).sin(),
    like,
    lambda ctx, g: g * 300 * (ctx.saved_tensors[0] * 300).cos(),
    save,
)
right(
    "sine of millions",  # steps of finite differences span many periods
    lambda: (r(5, grad=True),),
    T,
    lambda x: (x * 1e6).sin(),
    like,
    lambda ctx, g: g * 1e6 * (ctx.saved_tensors[0] * 1e6).cos(),
    save,
)
right("sine, backward in float32", g34, T, lambda x: x.sin(), like, in_single, save)
right(
    "sine, forward in bfloat16",
    g34,
    T,
    lambda x: x.bfloat16().sin().to(x.dtype),
    like,
    in_types((), cosine),
    save,
)
flat_mean = lambda x: x.mean(-1, keepdim=True)
normed = lambda x: (x - flat_mean(x)) / ((x - flat_mean(x)).square().mean(-1, keepdim=True) + 1e-5).sqrt()


def normed_backward(ctx, g):
    x = ctx.saved_tensors[0]
    y, size = normed(x), ((x - flat_mean(x)).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (g - flat_mean(g) - y * flat_mean(g * y)) / size


right(
    "normalized pairs, whose gradient cancels",
    lambda: (r(3, 2, grad=True),),
    T,
    normed,
    like,
    normed_backward,
    save,
)


def rows(ctx, g):
    x, at = ctx.saved_tensors[:2]
    return x.new_zeros(x.shape).index_copy(0, at, g), None


def added_rows(ctx, g):
    x, at = ctx.saved_tensors[:2]
    return x.new_zeros(x.shape).index_add(0, at, g), None


def pick(order):
    return lambda: (r(4, 3, grad=True), torch.tensor(order))


taken = lambda x, y: x.new_empty(y.shape[0], x.shape[1])
kernel = lambda x, y: x[y]
wrong("rows by index, gradients not added up", pick([0, 3, 1]), TT, kernel, taken, rows, save)
right("rows by index", pick([0, 3, 1]), TT, kernel, taken, added_rows, save)
right("rows in another order", pick([0, 3, 1, 2]), TT, kernel, taken, rows, save)
