"""Fake kernels with wrong dtypes, strides, devices or data, and kernels that misuse memory."""

# ruff: noqa: E731  short kernels are easier to compare side by side as lambdas

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fake.library import get_ctx

from .table import TT, T, like, r, right, save, wrong

wrong(
    "always float32",
    lambda: (r(3, 4),),
    T,
    lambda x: x.contiguous() * 2,
    lambda x: torch.empty(x.shape, device=x.device),
)
wrong("sums in float", lambda: (r(3, 4),), T, lambda x: x.float().sum(), lambda x: x.new_empty(()))
right(
    "sums in float",
    lambda: (r(3, 4),),
    T,
    lambda x: x.float().sum(),
    lambda x: x.new_empty((), dtype=torch.float32),
)
wrong(
    "index dtype",
    lambda: (torch.arange(4),),
    T,
    lambda x: x.contiguous() + 1,
    lambda x: torch.empty(x.shape, dtype=torch.int64, device=x.device),
)
wrong(
    "contiguous where strides are kept",
    lambda: (r(3, 4),),
    T,
    lambda x: x * 2,
    lambda x: x.new_empty(x.shape),
)
wrong("keeps strides where contiguous", lambda: (r(3, 4),), T, lambda x: x.contiguous() * 2, like)
right("keeps strides", lambda: (r(3, 4),), T, lambda x: x * 2, like)
right("contiguous", lambda: (r(3, 4),), T, lambda x: x.contiguous() * 2, lambda x: x.new_empty(x.shape))
pool = lambda x: F.avg_pool2d(x, 2)
wrong(
    "channels last",
    lambda: (r(2, 3, 4, 4),),
    T,
    pool,
    lambda x: x.new_empty(*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2),
)
right("channels last", lambda: (r(2, 3, 4, 4),), T, pool, lambda x: torch.empty_like(pool(x)))
wrong(
    "no device",
    lambda: (r(3, 4),),
    T,
    lambda x: x.contiguous() * 2,
    lambda x: torch.empty(x.shape, dtype=x.dtype),
)
MASK = "(Tensor x, Tensor mask) -> Tensor"
select = lambda x, mask: x[mask]
wrong(
    "selection keeps the size",
    lambda: (r(4), torch.ones(4, dtype=torch.bool)),
    MASK,
    select,
    lambda x, mask: x.new_empty(x.shape),
)
right(
    "selection",
    lambda: (r(4), torch.tensor([True, False, True, True])),
    MASK,
    select,
    lambda x, mask: x.new_empty(get_ctx().new_dynamic_size()),
)
wrong(
    "at least two",
    lambda: (r(4), torch.tensor([True, False, True, True])),
    MASK,
    select,
    lambda x, mask: x.new_empty(get_ctx().new_dynamic_size(min=2)),
)
wrong(
    "at most three",
    lambda: (r(4), torch.tensor([True, False, True, True])),
    MASK,
    select,
    lambda x, mask: x.new_empty(get_ctx().new_dynamic_size(max=3)),
)
wrong(
    "unique keeps the size",
    lambda: (torch.tensor([3, 1, 2]),),
    T,
    lambda x: torch.unique(x),
    lambda x: x.new_empty(x.shape),
)
TWO = "(Tensor x) -> (Tensor, Tensor)"


def one_size(x):
    size = get_ctx().new_dynamic_size()
    return x.new_empty(size), x.new_empty(size)


wrong(
    "one size for two", lambda: (torch.tensor([1.0, -1.0]),), TWO, lambda x: (x[x > 0], x[x <= 0]), one_size
)
right(
    "two sizes",
    lambda: (torch.tensor([1.0, -1.0]),),
    TWO,
    lambda x: (x[x > 0], x[x <= 0]),
    lambda x: (x.new_empty(get_ctx().new_dynamic_size()), x.new_empty(get_ctx().new_dynamic_size())),
)
wrong(
    "returns its input if contiguous",
    lambda: (r(4, 3).t(),),
    T,
    lambda x: x.contiguous(),
    lambda x: x.new_empty(x.shape),
)
wrong(
    "returns its input if double",
    lambda: (r(4, 3),),
    T,
    lambda x: x.double(),
    lambda x: torch.empty_like(x, dtype=torch.float64),
)
wrong("writes what is negative", lambda: (r(4).abs(),), T, lambda x: x.relu_() * 1, like)
wrong("fake returns its input", lambda: (r(4),), T, lambda x: x * 2, lambda x: x)
wrong(
    "outputs share memory",
    lambda: (r(4),),
    TWO,
    lambda x: (y := x * 2) is not None and (y, y[:2]),
    lambda x: (torch.empty_like(x), x.new_empty(2)),
)
wrong(
    "writes to a list",
    lambda: ([r(3), torch.zeros(3)],),
    "(Tensor[] xs) -> Tensor",
    lambda xs: xs[-1].mul_(2) + xs[0],
    lambda xs: torch.empty_like(xs[0]),
)
_kept: dict[Any, torch.Tensor] = {}


def cached(x):
    out = _kept.setdefault(x.shape, torch.empty(x.shape))
    return out.copy_(x * 2)


wrong("returns one buffer", lambda: (r(4),), T, cached, lambda x: torch.empty(x.shape, device=x.device))


def pairs_only(x):
    out = torch.empty(x.shape, dtype=x.dtype)
    out[: len(x) // 2 * 2] = x[: len(x) // 2 * 2]
    return out


wrong("leaves an odd end unwritten", lambda: (r(4),), T, pairs_only, lambda x: x.new_empty(x.shape))


def raw(x):
    flat = (
        torch.as_strided(x, (x.numel(),), (1,), 0)
        if x.untyped_storage().nbytes() >= x.numel() * 4
        else x.flatten()
    )
    return flat.reshape(x.shape) * 2


wrong("reads memory in order", lambda: (r(3, 4),), T, raw, lambda x: x.new_empty(x.shape))
OUT = "(Tensor x, Tensor(a!) out) -> ()"


def twice_into(x, out):
    out.copy_(x * 2)


def clamped_into(x, out):
    out.copy_(x.clamp_(-5, 5) * 2)


right("writes to out", lambda: (r(4), torch.zeros(4)), OUT, twice_into, lambda x, out: None, mutates=("out",))
wrong(
    "clamps what it reads",
    lambda: (r(4), torch.zeros(4)),
    OUT,
    clamped_into,
    lambda x, out: None,
    mutates=("out",),
)
NORM = "(Tensor x, Tensor w, float eps=1e-6) -> Tensor"
norm = lambda x, w, eps=1e-6: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w
right("norm with a weight", lambda: (r(3, 4), r(4)), NORM, norm, like)
right(
    "linear in two dimensions",
    lambda: (r(3, 4), r(5, 4)),
    TT,
    lambda x, y: x @ y.t(),
    lambda x, y: x.new_empty(x.shape[0], y.shape[0]),
)
LINEAR = "(Tensor x, Tensor w, Tensor? b=None) -> Tensor"
linear = lambda x, w, b=None: F.linear(x, w, b)
right(
    "linear without bias",
    lambda: (r(3, 4), r(5, 4)),
    LINEAR,
    linear,
    lambda x, w, b=None: x.new_empty(*x.shape[:-1], w.shape[0]),
)
right(
    "linear with bias",
    lambda: (r(3, 4), r(5, 4), r(5)),
    LINEAR,
    linear,
    lambda x, w, b=None: x.new_empty(*x.shape[:-1], w.shape[0]),
)
EMBED = "(Tensor w, Tensor idx) -> Tensor"
right(
    "embedding",
    lambda: (r(10, 4), torch.tensor([[1, 2], [9, 0]])),
    EMBED,
    lambda w, idx: w[idx],
    lambda w, idx: w.new_empty(*idx.shape, w.shape[1]),
)
right("dropout", lambda: (r(8, 4),), T, lambda x: x * (torch.rand_like(x) > 0.5), like)
right(
    "softmax",
    lambda: (r(3, 4, grad=True),),
    T,
    lambda x: x.softmax(-1),
    lambda x: torch.empty_like(x.softmax(-1)),
    lambda ctx, g: ctx.saved_tensors[1] * (g - (g * ctx.saved_tensors[1]).sum(-1, keepdim=True)),
    save,
)
TOPK = "(Tensor x, int k) -> (Tensor, Tensor)"
right(
    "top k",
    lambda: (r(3, 8), 2),
    TOPK,
    lambda x, k: tuple(torch.topk(x, k)),
    lambda x, k: (x.new_empty(*x.shape[:-1], k), x.new_empty(*x.shape[:-1], k, dtype=torch.int64)),
)
right(
    "cumulative sum",
    lambda: (r(3, 4), 1),
    "(Tensor x, int dim) -> Tensor",
    lambda x, dim: x.cumsum(dim).contiguous(),
    lambda x, dim: x.new_empty(x.shape),
)
CONV = "(Tensor x, Tensor w) -> Tensor"
right(
    "convolution",
    lambda: (r(2, 3, 8, 8), r(4, 3, 3, 3)),
    CONV,
    lambda x, w: F.conv2d(x.contiguous(), w.contiguous()),
    lambda x, w: x.new_empty(
        x.shape[0], w.shape[0], x.shape[2] - w.shape[2] + 1, x.shape[3] - w.shape[3] + 1
    ),
)
right(
    "column-major result",
    lambda: (r(3, 4),),
    T,
    lambda x: (x * 1).t().contiguous().t(),
    lambda x: x.new_empty(x.shape[::-1]).t(),
)
right(
    "factory",
    lambda: (r(2), 3),
    "(Tensor x, int n) -> Tensor",
    lambda x, n: x.new_ones(n, n),
    lambda x, n: x.new_empty(n, n),
)
right(
    "list of outputs",
    lambda: (r(4),),
    "(Tensor x) -> Tensor[]",
    lambda x: [x * 1, x * 2],
    lambda x: [torch.empty_like(x), torch.empty_like(x)],
)
right(
    "checks its sizes",
    lambda: (r(4, 3),),
    T,
    lambda x: (_ for _ in ()).throw(ValueError("two columns")) if x.shape[1] != 3 else x.contiguous() * 1,
    lambda x: x.new_empty(x.shape),
)
right("half", lambda: (r(3, 4).half(),), T, lambda x: x.float().sin().to(x.dtype), like)
right("comparison", lambda: (r(3, 4), r(3, 4)), TT, lambda x, y: x > y, lambda x, y: torch.empty_like(x > y))
VMAP = T
right(
    "vmap",
    lambda: (r(3, 4),),
    T,
    lambda x: x.contiguous().cumsum(0),
    lambda x: x.new_empty(x.shape),
    vmap=lambda info, dims, x: (x.movedim(dims[0], 0).contiguous().cumsum(1), 0),
)
wrong(
    "vmap over the wrong dimension",
    lambda: (r(3, 4),),
    T,
    lambda x: x.contiguous().cumsum(0),
    lambda x: x.new_empty(x.shape),
    vmap=lambda info, dims, x: (x.contiguous().cumsum(1), dims[0]),
)
wrong(
    "as many as the sample's counts",
    lambda: (r(3), torch.tensor([2, 2, 2])),
    "(Tensor x, Tensor n) -> Tensor",
    lambda x, n: torch.repeat_interleave(x, n),
    lambda x, n: x.new_empty(2 * x.shape[0]),
)

TS = "(Tensor x, float s) -> Tensor"
wrong("itself times zero", lambda: (r(3, 4), 2.0), TS, lambda x, s: x * s if s else x, like)
wrong("itself times one", lambda: (r(3, 4), 2.0), TS, lambda x, s: x if s == 1 else x * s, like)
wrong(
    "itself repeated once",
    lambda: (r(3), 4),
    "(Tensor x, int n) -> Tensor",
    lambda x, n: x if n == 1 else x.repeat(n),
    lambda x, n: x.new_empty(x.shape[0] * n),
)
right("divided by a number", lambda: (r(3, 4), 2.0), TS, lambda x, s: x / s, like)
