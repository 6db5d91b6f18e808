"""Fake kernels with wrong sizes."""

# ruff: noqa: E731  short kernels are easier to compare side by side as lambdas

from __future__ import annotations

import torch
from torch.nn import functional as F

from .table import TT, T, broadcast, like, r, right, wrong

square, pair = lambda: (r(3, 3),), lambda: (r(3, 3), r(3, 3))
transpose = lambda x: x.t().clone(memory_format=torch.contiguous_format)
wrong(
    "transpose like its input",
    square,
    T,
    transpose,
    lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
wrong("transpose empty_like", square, T, transpose, like)
right("transpose", square, T, transpose, lambda x: x.new_empty(x.shape[::-1]))
mm = lambda x, y: x.contiguous() @ y.contiguous()
wrong("matmul like the first", pair, TT, mm, lambda x, y: x.new_empty(x.shape))
wrong("matmul inner size", pair, TT, mm, lambda x, y: x.new_empty(x.shape[0], x.shape[1]))
wrong("matmul swapped", pair, TT, mm, lambda x, y: x.new_empty(y.shape[1], x.shape[0]))
right("matmul", pair, TT, mm, lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
right(
    "matmul, sizes differ",
    lambda: (r(2, 3), r(3, 4)),
    TT,
    mm,
    lambda x, y: x.new_empty(x.shape[0], y.shape[1]),
)
add = lambda x, y: x + y
wrong("no broadcasting", lambda: (r(3, 4), r(3, 4)), TT, add, like)
wrong("no broadcasting of the second", lambda: (r(3, 4), r(3, 4)), TT, add, lambda x, y: torch.empty_like(y))
wrong(
    "broadcasts the last dimension only",
    lambda: (r(3, 4), r(3, 4)),
    TT,
    lambda x, y: (x + y).contiguous(),
    lambda x, y: x.new_empty(x.shape[0], max(x.shape[1], y.shape[1])),
)
right("broadcasting", lambda: (r(3, 4), r(3, 4)), TT, add, broadcast)
right("broadcasting, shown", lambda: (r(3, 1), r(4)), TT, add, broadcast)
outer = lambda x, y: torch.outer(x, y)
wrong("outer", lambda: (r(4), r(4)), TT, outer, lambda x, y: x.new_empty(x.shape[0], x.shape[0]))
right("outer", lambda: (r(4), r(4)), TT, outer, lambda x, y: x.new_empty(x.shape[0], y.shape[0]))
pairwise = lambda x, y: torch.cdist(x, y)
wrong(
    "pairwise distances",
    lambda: (r(4, 2), r(4, 2)),
    TT,
    pairwise,
    lambda x, y: x.new_empty(y.shape[0], x.shape[0]),
)
batched = lambda x: x.transpose(1, 2).contiguous()
wrong("batched transpose", lambda: (r(2, 3, 3),), T, batched, lambda x: x.new_empty(x.shape))
SUM = "(Tensor x, int dim, bool keepdim=False) -> Tensor"
total = lambda x, dim, keepdim=False: x.sum(dim, keepdim)
wrong(
    "sum drops another dimension",
    lambda: (r(3, 3), 0),
    SUM,
    total,
    lambda x, dim, keepdim=False: total(x, 1 - dim, keepdim) if dim >= 0 else total(x, dim, keepdim),
)
wrong(
    "sum ignores keepdim",
    lambda: (r(3, 4), 0),
    SUM,
    total,
    lambda x, dim, keepdim=False: x.new_empty(total(x, dim).shape),
)
wrong(
    "sum with a negative dim",
    lambda: (r(3, 4), 1),
    SUM,
    total,
    lambda x, dim, keepdim=False: x.new_empty(
        [1 if i == dim else s for i, s in enumerate(x.shape) if keepdim or i != dim]
    ),
)
right(
    "sum",
    lambda: (r(3, 3), 0),
    SUM,
    total,
    lambda x, dim, keepdim=False: torch.empty_like(total(x, dim, keepdim)),
)
wrong(
    "constant element count", lambda: (r(3, 4),), T, lambda x: x.flatten().clone(), lambda x: x.new_empty(12)
)
LIST = "(Tensor[] xs) -> Tensor"
stack = lambda xs: torch.stack(xs)
wrong("stack of two", lambda: ([r(3), r(3)],), LIST, stack, lambda xs: xs[0].new_empty(2, *xs[0].shape))
right("stack", lambda: ([r(3), r(3)],), LIST, stack, lambda xs: xs[0].new_empty(len(xs), *xs[0].shape))
cat = lambda xs: torch.cat(xs)
wrong(
    "concatenation of equal parts",
    lambda: ([r(3, 2), r(3, 2)],),
    LIST,
    cat,
    lambda xs: xs[0].new_empty(len(xs) * xs[0].shape[0], xs[0].shape[1]),
)
right(
    "concatenation",
    lambda: ([r(3, 2), r(3, 2)],),
    LIST,
    cat,
    lambda xs: xs[0].new_empty(sum(x.shape[0] for x in xs), xs[0].shape[1]),
)
WINDOW = "(Tensor x, int k, int stride=1) -> Tensor"
windows = lambda x, k, stride=1: x.unfold(0, k, stride).sum(-1)
wrong(
    "number of windows",
    lambda: (r(7), 3, 2),
    WINDOW,
    windows,
    lambda x, k, stride=1: x.new_empty(x.shape[0] // stride if stride > 1 else x.shape[0] - k + 1),
)
wrong(
    "windows without their stride",
    lambda: (r(7), 3),
    WINDOW,
    windows,
    lambda x, k, stride=1: x.new_empty(x.shape[0] - k + 1),
)
right(
    "windows",
    lambda: (r(7), 3, 2),
    WINDOW,
    windows,
    lambda x, k, stride=1: x.new_empty((x.shape[0] - k) // stride + 1),
)
REPEAT = "(Tensor x, int n) -> Tensor"
wrong(
    "repeat ignores the number",
    lambda: (r(4), 1),
    REPEAT,
    lambda x, n: x.repeat(n),
    lambda x, n: x.new_empty(x.shape),
)
right("repeat", lambda: (r(4), 1), REPEAT, lambda x, n: x.repeat(n), lambda x, n: x.new_empty(x.shape[0] * n))
wrong(
    "squeezes size one",
    lambda: (r(3, 4),),
    T,
    lambda x: (x * 2).contiguous(),
    lambda x: x.new_empty(x.shape).squeeze(),
)
wrong(
    "keeps size one",
    lambda: (r(3, 4),),
    T,
    lambda x: x.contiguous().squeeze() * 2,
    lambda x: x.new_empty(x.shape),
)
wrong(
    "other rule for large batches",
    lambda: (r(4, 3),),
    T,
    lambda x: x.contiguous() * 2,
    lambda x: x.new_empty(x.shape) if x.shape[0] <= 32 else x.new_empty(32, x.shape[1]),
)
wrong(
    "at least one row",
    lambda: (r(4, 3),),
    T,
    lambda x: x.contiguous() * 2,
    lambda x: x.new_empty(max(x.shape[0], 1), x.shape[1]),
)
wrong(
    "largest size first",
    lambda: (r(4, 3),),
    T,
    lambda x: x.contiguous() * 2,
    lambda x: x.new_empty(sorted(x.shape, reverse=True)),
)
PAD = "(Tensor x, int[] pad) -> Tensor"
wrong(
    "pads the other dimension",
    lambda: (r(3, 3), [1, 1]),
    PAD,
    lambda x, pad: F.pad(x, pad),
    lambda x, pad: x.new_empty(x.shape[0] + sum(pad), x.shape[1]),
)
right(
    "pad",
    lambda: (r(3, 3), [1, 1]),
    PAD,
    lambda x, pad: F.pad(x, pad),
    lambda x, pad: x.new_empty(x.shape[0], x.shape[1] + sum(pad)),
)
RESHAPE = "(Tensor x, int[] sizes) -> Tensor"
wrong(
    "sizes in reverse",
    lambda: (r(4, 4), [4, 4]),
    RESHAPE,
    lambda x, sizes: x.new_zeros(sizes),
    lambda x, sizes: x.new_empty(sizes[::-1]),
)
right(
    "sizes",
    lambda: (r(4, 4), [4, 4]),
    RESHAPE,
    lambda x, sizes: x.new_zeros(sizes),
    lambda x, sizes: x.new_empty(sizes),
)
ONE_HOT = "(Tensor x, int classes) -> Tensor"
one_hot = lambda x, classes: F.one_hot(x, classes)
wrong(
    "constant number of classes",
    lambda: (torch.tensor([0, 1, 2]), 4),
    ONE_HOT,
    one_hot,
    lambda x, classes: x.new_empty(*x.shape, 4),
)
right(
    "one hot",
    lambda: (torch.tensor([0, 1, 2]), 4),
    ONE_HOT,
    one_hot,
    lambda x, classes: x.new_empty(*x.shape, classes),
)
MODE = '(Tensor x, str reduction="mean") -> Tensor'
reduce = lambda x, reduction="mean": (
    x.mean() if reduction == "mean" else x.clone() if reduction == "none" else x.sum()
)
wrong(
    "ignores the kind of reduction",
    lambda: (r(3, 4),),
    MODE,
    reduce,
    lambda x, reduction="mean": x.new_empty(()),
)
right(
    "reduction",
    lambda: (r(3, 4),),
    MODE,
    reduce,
    lambda x, reduction="mean": torch.empty_like(x) if reduction == "none" else x.new_empty(()),
)
BLOCKS = "(Tensor x, Tensor w) -> Tensor"
wrong(
    "heads from the wrong tensor",
    lambda: (r(6, 4), r(3)),
    BLOCKS,
    lambda x, w: x.reshape(w.shape[0], -1).sum(1),
    lambda x, w: x.new_empty(x.shape[0] // 2),
)
NUMBER = "(Tensor x) -> int"
wrong("constant number", lambda: (r(3, 4),), NUMBER, lambda x: x.shape[0], lambda x: 3)
right("number", lambda: (r(3, 4),), NUMBER, lambda x: x.shape[0], lambda x: x.shape[0])
CAT = "(Tensor[] xs, int dim=0) -> Tensor"
wrong(
    "concatenates along the first dimension only",
    lambda: ([r(2, 3), r(4, 3)],),
    CAT,
    lambda xs, dim=0: torch.cat(xs, dim),
    lambda xs, dim=0: xs[0].new_empty(sum(x.shape[0] for x in xs), *xs[0].shape[1:]),
)
wrong(
    "another result for nothing",
    lambda: (r(3, 2),),
    T,
    lambda x: x.sum(0) if len(x) else x.new_zeros(0),
    lambda x: x.new_empty(x.shape[1:]),
)
right(
    "attention",
    lambda: (r(2, 4, 5, 8), r(2, 4, 5, 8), r(2, 4, 5, 8)),
    "(Tensor q, Tensor k, Tensor v, bool causal=False) -> Tensor",
    lambda q, k, v, causal=False: F.scaled_dot_product_attention(q, k, v, is_causal=causal).contiguous(),
    lambda q, k, v, causal=False: q.new_empty(*q.shape[:-1], v.shape[-1]),
)
