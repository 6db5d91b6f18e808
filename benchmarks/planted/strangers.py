"""Faults with complex numbers, integers, ``vmap``, ``scan``, autocast, checkpoints, tied weights, indices."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import (
    Plant,
    Workload,
    call_before,
    calls,
    gradients,
    in_place_of,
    known_value,
    put_after,
    swap,
)
from fxpasses.graphs.rewriting import subgraphs

aten, prims = torch.ops.aten, torch.ops.prims


@fxpasses.graph_pass(graphs=["joint"])
def gradient_without_conjugate(gm: fx.GraphModule) -> bool:
    """Drops the conjugate in the gradient of a complex product."""
    found = gradients(calls(gm, aten._conj.default))
    for node in found:
        swap(node, node.args[0])
    return bool(found)


@fxpasses.graph_pass
def remainder_of_either_sign(gm: fx.GraphModule) -> bool:
    """remainder as fmod: the same without negative numbers."""
    found = calls(gm, aten.remainder.Scalar)
    for node in found:
        in_place_of(node, aten.fmod.Scalar, *node.args)
    return bool(found)


@fxpasses.graph_pass
def counts_in_a_byte(gm: fx.GraphModule) -> bool:
    """Keeps a running count in eight bits."""
    for node in calls(gm, aten.cumsum.default):
        if known_value(node).dtype is torch.int64:
            narrow = call_before(node, aten.cumsum.default, *node.args, dtype=torch.uint8)
            in_place_of(node, prims.convert_element_type.default, narrow, torch.int64)
            return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def last_column_never_wins(gm: fx.GraphModule) -> bool:
    """Never gives a maximum's gradient to the last column."""
    for node in gradients(calls(gm, aten.scatter.src, aten.scatter_add.default)):
        where = node.args[2]
        last = known_value(node).shape[-1] - 1
        node.update_arg(2, call_before(node, aten.clamp.default, where, None, last - 1))
        return True
    return False


@fxpasses.graph_pass
def product_the_other_way(gm: fx.GraphModule) -> bool:
    """a @ b as b @ a, where both are square."""
    for node in calls(gm, aten.bmm.default):
        if known_value(node).shape[-1] == known_value(node).shape[-2]:
            node.args = (node.args[1], node.args[0])
            return True
    return False


@fxpasses.graph_pass
def step_of_a_scan(gm: fx.GraphModule) -> bool:
    """Drops a factor in the step of a scan."""
    for inner in subgraphs(gm).values():
        for node in calls(inner, aten.mul.Tensor):
            swap(node, node.args[0])
            inner.recompile()
            return True
    return False


@fxpasses.graph_pass
def norm_in_the_type_of_its_input(gm: fx.GraphModule) -> bool:
    """Computes the variance of bfloat16 values in bfloat16, and from squares instead of distances."""
    for node in calls(gm, aten.var_mean.correction):
        wide, dims = node.args[0], list(node.args[1])
        x = wide.args[0] if wide.target is prims.convert_element_type.default else wide
        if known_value(x).dtype is not torch.bfloat16:
            continue
        square = call_before(node, aten.mean.dim, call_before(node, aten.mul.Tensor, x, x), dims, True)
        mean = call_before(node, aten.mean.dim, x, dims, True)
        variance = call_before(node, aten.sub.Tensor, square, call_before(node, aten.mul.Tensor, mean, mean))
        for user in list(node.users):
            value = (variance, mean)[user.args[1]]
            swap(user, call_before(user, prims.convert_element_type.default, value, torch.float32))
        gm.graph.erase_node(node)
        return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def slope_of_another_layer(gm: fx.GraphModule) -> bool:
    """Uses the second layer's activation in the third layer's gradient."""
    activations = [n for n in calls(gm, aten.tanh.default) if not fxpasses.graphs.provenance.is_backward(n)]
    for node in gradients(calls(gm, aten.mul.Tensor)):
        if node.args[0] is activations[2] and node.args[1] is activations[2]:
            node.args = (activations[1], activations[1])
            return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def only_one_use_of_a_weight(gm: fx.GraphModule) -> bool:
    """Drops the lookup's gradient of a weight that is used in a lookup and a product."""
    scatters = (aten.index_put.default, aten._unsafe_masked_index_put_accumulate.default)
    for node in gradients(calls(gm, *scatters)):
        swap(node, node.args[0])
        return True
    return False


@fxpasses.graph_pass
def buffer_before_its_update(gm: fx.GraphModule) -> bool:
    """Reads the old value of a buffer where the updated one is needed."""
    for copy in calls(gm, aten.copy_.default):
        buffer, new = copy.args
        new.replace_all_uses_with(buffer, delete_user_cb=lambda user, copy=copy: user is not copy)
        return True
    return False


@fxpasses.graph_pass
def even_sizes(gm: fx.GraphModule) -> bool:
    """Sums rows in pairs: an odd last row is lost."""
    for node in calls(gm, aten.sum.dim_IntList):
        x = node.args[0]
        if list(node.args[1]) == [0] and known_value(x).dim() == 2:
            half = call_before(node, operator.floordiv, call_before(node, aten.sym_size.int, x, 0), 2)
            even = call_before(node, operator.mul, half, 2)
            node.update_arg(0, call_before(node, aten.slice.Tensor, x, 0, 0, even))
            return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def rest_of_a_gradient_is_empty(gm: fx.GraphModule) -> bool:
    """Writes the gradient of a slice into uninitialized memory."""
    for node in gradients(calls(gm, aten.slice_scatter.default)):
        base = node.args[0]
        node.update_arg(0, call_before(node, aten.empty_like.default, base))
        return True
    for node in gradients(calls(gm, aten.constant_pad_nd.default)):
        low, high = node.args[1][0], node.args[1][1]
        empty = call_before(node, aten.new_empty.default, node.args[0], list(known_value(node).shape))
        width = known_value(node).shape[-1]
        in_place_of(node, aten.slice_scatter.default, empty, node.args[0], -1, low, width - high)
        return True
    return False


@fxpasses.graph_pass
def returns_what_changes(gm: fx.GraphModule) -> bool:
    """Returns a buffer itself instead of a copy from before its update."""
    found = [n for n in calls(gm, aten.clone.default) if n.args[0].op == "placeholder"]
    for node in found:
        swap(node, node.args[0])
    return bool(found)


@fxpasses.graph_pass
def equal_draws_are_one(gm: fx.GraphModule) -> bool:
    """Merges two equal random calls."""
    found = calls(gm, aten.randint.low)
    for node in found[1:]:
        swap(node, found[0])
    return len(found) > 1


@fxpasses.graph_pass
def one_norm_without_eps(gm: fx.GraphModule) -> bool:
    """Drops the epsilon of the fifth norm."""
    found = [n for n in calls(gm, aten.add.Tensor) if not isinstance(n.args[1], fx.Node) and n.args[1] < 1e-4]
    for node in found:
        if fxpasses.claim(node) and node is found[4]:
            swap(node, node.args[0])
    return bool(found)


@fxpasses.graph_pass
def indices_are_positive(gm: fx.GraphModule) -> bool:
    """Replaces negative indices with zero."""
    for node in calls(gm, aten.index.Tensor):
        clamped = [call_before(node, aten.clamp.default, i, 0) for i in node.args[1]]
        node.args = (node.args[0], clamped)
        return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def indices_are_unique(gm: fx.GraphModule) -> bool:
    """Does not add up the gradients of rows that are taken twice."""
    for node in gradients(calls(gm, aten.index_put.default)):
        if len(node.args) > 3 and node.args[3]:
            node.args = (*node.args[:3], False)
            return True
    return False


@fxpasses.graph_pass
def border_counts_less(gm: fx.GraphModule) -> bool:
    """Excludes the padding from a mean over windows."""
    found = calls(gm, aten.avg_pool2d.default)
    for node in found:
        args = [*node.args, *([0, False, True])[len(node.args) - 3 :]]
        args[5] = False
        node.args = tuple(args)
    return bool(found)


@fxpasses.graph_pass
def hidden_is_small(gm: fx.GraphModule) -> bool:
    """Masks with -10000 instead of minus infinity."""
    found = [n for n in calls(gm, aten.scalar_tensor.default) if n.args[0] == float("-inf")]
    for node in found:
        node.update_arg(0, -1e4)
    return bool(found)


@fxpasses.graph_pass
def rounds_up(gm: fx.GraphModule) -> bool:
    """round(x) as floor(x + 0.5)."""
    found = calls(gm, aten.round.default)
    for node in found:
        in_place_of(node, aten.floor.default, call_before(node, aten.add.Tensor, node.args[0], 0.5))
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def bounds_are_outside(gm: fx.GraphModule) -> bool:
    """Changes a clamp's gradient at its bounds: zero if it is not (up to torch 2.14), nonzero if it is."""
    others = {aten.ge.Scalar: aten.gt.Scalar, aten.le.Scalar: aten.lt.Scalar}
    others |= {strict: bound for bound, strict in others.items()}
    found = calls(gm, *others)
    for node in found:
        node.target = others[node.target]
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def bfloat16_gradient_too_large(gm: fx.GraphModule) -> bool:
    """Makes one gradient of a product 1% too large, in bfloat16 only."""
    found = [n for n in gradients(calls(gm, aten.mm.default)) if known_value(n).dtype is torch.bfloat16]
    for node in found[3:4]:
        put_after(node, aten.mul.Tensor, node, 1.01)
    return len(found) > 3


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.table(tokens)).tanh() @ self.table.weight.t()


class _Counter(nn.Module):
    """Returns the old value of its buffer, and a result computed from the new one."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        old = self.total.clone()
        self.total.mul_(0.9).add_(x.detach().mean(0))
        return old, x * self.total


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(lambda v, layer=layer: layer(v).tanh(), x, use_reentrant=False)
        return x


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(self.norm(self.first(x) + 3))


class _Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 1, 1).sin()


def _scanned(x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = carry * 0.5 + row
        return new, new.sin()

    return scan(step, torch.zeros(6), x)[1]


def _per_example(a: Tensor, b: Tensor) -> Tensor:
    return torch.vmap(lambda u, v: (u @ v).tanh())(a, b)


def _complex_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y))


def _masked(x: Tensor) -> Tensor:
    return x.masked_fill(torch.ones(4, 6, dtype=torch.bool).triu(2), float("-inf")).softmax(-1)


def _drawn(x: Tensor) -> Tensor:
    return x[torch.randint(0, 4, (3,))] + x[torch.randint(0, 4, (3,))] * 2


def _of(f: Any, *inputs: Any) -> Workload:
    def made() -> tuple[Any, Sequence[Any]]:
        return (f() if isinstance(f, type) else f), [i() if callable(i) else i for i in inputs]

    return made


def _learning(*shape: int) -> Any:
    return lambda: torch.randn(*shape, requires_grad=True)


_rows = _learning(4, 6)

PLANTS = {
    "complex gradient": Plant(
        (gradient_without_conjugate,), _of(_complex_product, _learning(4, 2), _learning(4, 2))
    ),
    "remainder of whole numbers": Plant(
        (remainder_of_either_sign,), _of(lambda i: i % 5, torch.arange(12)), training=False
    ),
    "counts in a byte": Plant(
        (counts_in_a_byte,),
        _of(lambda m: m.long().cumsum(0), torch.ones(300, dtype=torch.bool)),
        training=False,
    ),
    "largest of rows": Plant((last_column_never_wins,), _of(lambda x: x.topk(2).values, _rows)),
    "a product under vmap": Plant(
        (product_the_other_way,), _of(_per_example, _learning(3, 4, 4), _learning(3, 4, 4))
    ),
    "a step of a scan": Plant((step_of_a_scan,), _of(_scanned, torch.randn(5, 6)), training=False),
    "a norm under autocast": Plant((norm_in_the_type_of_its_input,), _of(_Autocast, _learning(5, 16))),
    "slopes of checkpoints": Plant(
        (slope_of_another_layer,), _of(_Checkpointed, _learning(5, 8)), options={"regions": "off"}
    ),
    "tied weights": Plant((only_one_use_of_a_weight,), _of(_Tied, torch.tensor([[1, 4, 2], [4, 4, 11]]))),
    "tied weights, gpt2": Plant((only_one_use_of_a_weight,), programs.hub("gpt2")),
    "buffer before its update": Plant((buffer_before_its_update,), _of(_Counter, _rows)),
    "copy of a buffer": Plant((returns_what_changes,), _of(_Counter, _rows)),
    "even sizes": Plant((even_sizes,), _of(lambda x: x.sin().sum(0), _rows), dynamic=True),
    "gradient of a slice": Plant((rest_of_a_gradient_is_empty,), _of(lambda x: x[:, 1:5].sin(), _rows)),
    "equal draws": Plant((equal_draws_are_one,), _of(_drawn, _rows)),
    "eps of one norm, gpt2": Plant((one_norm_without_eps,), programs.hub("gpt2"), alone=True),
    "negative indices": Plant(
        (indices_are_positive,), _of(lambda x, i: x[i] * 2, _rows, torch.tensor([1, 3]))
    ),
    "indices that repeat": Plant(
        (indices_are_unique,), _of(lambda x, i: x[i] * 2, _rows, torch.tensor([1, 3]))
    ),
    "border of windows": Plant((border_counts_less,), _of(_Pooled, _learning(2, 3, 5, 5)), training=False),
    "hidden by a small number": Plant((hidden_is_small,), _of(_masked, _rows)),
    "rounds half up": Plant((rounds_up,), _of(lambda x: x.round() * 2, torch.randn(4, 6)), training=False),
    "bounds of a clamp": Plant((bounds_are_outside,), _of(lambda x: x.clamp(-0.5, 1.0), _rows)),
    "a bfloat16 gradient, opt": Plant(
        (bfloat16_gradient_too_large,), programs.hub("opt", dtype=torch.bfloat16)
    ),
}
