"""Faults at edges: sizes of one and zero, tails, ties, signed zeros, non-finite numbers, integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import Plant, Workload, call_before, calls, in_place_of, swap

aten, prims = torch.ops.aten, torch.ops.prims


@fxpasses.graph_pass
def length_of_one(gm: fx.GraphModule) -> bool:
    """Wrong: treats the length of a one-element vector as the element itself."""
    changed = False
    for node in calls(gm, aten.sqrt.default):
        total = node.args[0]
        if total.target is aten.sum.dim_IntList and total.args[0].meta["val"].shape[-1] == 1:
            in_place_of(node, aten.squeeze.dim, total.args[0].args[0], -1)
            changed = True
    return changed


@fxpasses.graph_pass
def last_running_sum(gm: fx.GraphModule) -> bool:
    """Splits a running sum in two parts; the last element is its neighbor's."""
    changed = False
    for node in calls(gm, aten.cumsum.default):
        size = node.meta["val"].shape[-1]
        head = call_before(node, aten.cumsum.default, *node.args)
        most = call_before(node, aten.slice.Tensor, head, -1, 0, size - 1)
        last = call_before(node, aten.slice.Tensor, head, -1, size - 2, size - 1)
        in_place_of(node, aten.cat.default, [most, last], -1)
        changed = True
    return changed


@fxpasses.graph_pass
def tail_too_late(gm: fx.GraphModule) -> bool:
    """Sums blocks of eight, and a tail that starts one element too late."""
    changed = False
    for node in calls(gm, aten.sum.dim_IntList):
        x, dims = node.args[0], list(node.args[1])
        size = x.meta["val"].shape[-1]
        if dims == [-1] and size > 8 and size % 8:
            whole = size // 8 * 8
            blocks = call_before(node, aten.slice.Tensor, x, -1, 0, whole)
            tail = call_before(node, aten.slice.Tensor, x, -1, whole + 1, size)
            parts = [call_before(node, aten.sum.dim_IntList, part, [-1]) for part in (blocks, tail)]
            in_place_of(node, aten.add.Tensor, *parts)
            changed = True
    return changed


@fxpasses.graph_pass
def product_of_nothing(gm: fx.GraphModule) -> bool:
    """Wrong: takes an empty product for zero."""
    changed = False
    for node in calls(gm, aten.prod.dim_int):
        if not node.args[0].meta["val"].numel():
            in_place_of(node, aten.full.default, list(node.meta["val"].shape), 0.0)
            changed = True
    return changed


@fxpasses.graph_pass
def last_of_equals(gm: fx.GraphModule) -> bool:
    """Computes argmax from the back: among equal elements, the last one wins."""
    changed = False
    for node in calls(gm, aten.argmax.default):
        x, dim = node.args[0], node.args[1]
        size = x.meta["val"].shape[dim]
        flipped = call_before(node, aten.flip.default, x, [dim])
        in_place_of(node, aten.rsub.Scalar, call_before(node, aten.argmax.default, flipped, dim), size - 1)
        changed = True
    return changed


@fxpasses.graph_pass
def rounds_halves_up(gm: fx.GraphModule) -> bool:
    """round(x) as floor(x + 0.5): halves round up, not to even."""
    found = calls(gm, aten.round.default)
    for node in found:
        in_place_of(node, aten.floor.default, call_before(node, aten.add.Tensor, node.args[0], 0.5))
    return bool(found)


@fxpasses.graph_pass
def truncates_quotients(gm: fx.GraphModule) -> bool:
    """Rounds integer quotients toward zero instead of down."""
    changed = False
    for node in calls(gm, aten.div.Tensor_mode, aten.div.Scalar_mode):
        if node.kwargs["rounding_mode"] == "floor":
            in_place_of(node, node.target, *node.args, rounding_mode="trunc")
            changed = True
    return changed


@fxpasses.graph_pass
def multiplies_in_32_bits(gm: fx.GraphModule) -> bool:
    """Multiplies integers before they are cast to 64 bits."""
    changed = False
    for node in calls(gm, aten.mul.Tensor):
        if node.meta["val"].dtype is not torch.int64 or not all(isinstance(n, fx.Node) for n in node.args):
            continue
        casts = [n for n in node.args if n.target is prims.convert_element_type.default]
        if len(casts) == 2:
            narrow = call_before(node, aten.mul.Tensor, *(c.args[0] for c in casts))
            in_place_of(node, prims.convert_element_type.default, narrow, torch.int64)
            changed = True
    return changed


@fxpasses.graph_pass
def either_for_both(gm: fx.GraphModule) -> bool:
    """Replaces a logical and with a logical or."""
    found = calls(gm, aten.logical_and.default, aten.bitwise_and.Tensor)
    for node in found:
        in_place_of(node, aten.logical_or.default, *node.args)
    return bool(found)


@fxpasses.graph_pass
def last_write_wins(gm: fx.GraphModule) -> bool:
    """Drops the accumulation of ``index_put``: right as long as no index occurs twice."""
    changed = False
    for node in calls(gm, aten.index_put.default):
        if len(node.args) > 3 and node.args[3]:
            in_place_of(node, aten.index_put.default, *node.args[:3], False)
            changed = True
    return changed


@fxpasses.graph_pass
def pads_a_maximum_with_zeros(gm: fx.GraphModule) -> bool:
    """Pads a max pool with zeros instead of minus infinity: right for positive values."""
    changed = False
    for node in calls(gm, aten.constant_pad_nd.default):
        if len(node.args) > 2 and node.args[2] == float("-inf"):
            in_place_of(node, aten.constant_pad_nd.default, node.args[0], node.args[1], 0.0)
            changed = True
    return changed


@fxpasses.graph_pass
def root_of_a_square(gm: fx.GraphModule) -> bool:
    """sqrt(x * x) as x: right for positive values."""
    changed = False
    for node in calls(gm, aten.sqrt.default):
        square = node.args[0]
        if square.target is aten.mul.Tensor and square.args[0] is square.args[1]:
            swap(node, square.args[0])
            changed = True
    return changed


@fxpasses.graph_pass
def finite_anyway(gm: fx.GraphModule) -> bool:
    """Removes guards against NaN and infinities."""
    changed = False
    for node in calls(gm, aten.isnan.default, aten.isinf.default):
        in_place_of(node, aten.full_like.default, node.args[0], False, dtype=torch.bool)
        changed = True
    return changed


@fxpasses.graph_pass
def mask_by_product(gm: fx.GraphModule) -> bool:
    """where(mask, x, 0) as x * mask: right for finite values."""
    changed = False
    for node in calls(gm, aten.where.self):
        mask, x, other = node.args
        if getattr(other, "target", None) is aten.full.default and other.args[1] == 0:
            in_place_of(
                node,
                aten.mul.Tensor,
                x,
                call_before(node, prims.convert_element_type.default, mask, x.meta["val"].dtype),
            )
            changed = True
    return changed


@fxpasses.graph_pass(numerics="bitwise")
def zero_without_a_sign(gm: fx.GraphModule) -> bool:
    """x * 0 as 0: promises the same bits, but ignores minus zero and NaN."""
    changed = False
    for node in calls(gm, aten.mul.Tensor):
        if node.args[1] == 0:
            in_place_of(node, aten.full.default, list(node.meta["val"].shape), 0.0)
            changed = True
    return changed


@fxpasses.graph_pass(numerics="bitwise")
def drops_added_zero(gm: fx.GraphModule) -> bool:
    """x + 0.0 as x: promises the same bits, but minus zero plus zero is zero."""
    changed = False
    for node in calls(gm, aten.add.Tensor):
        if node.args[1] == 0:
            swap(node, node.args[0])
            changed = True
    return changed


@fxpasses.graph_pass
def one_site_saturates(gm: fx.GraphModule) -> bool:
    """Correct, except that it clamps the argument of the 29th sine to [-30, 30]."""
    found = calls(gm, aten.sin.default)
    for number, node in enumerate(found):
        x = call_before(node, aten.neg.default, call_before(node, aten.neg.default, node.args[0]))
        if number == 28:
            x = call_before(node, aten.clamp.default, x, -30.0, 30.0)
        node.replace_input_with(node.args[0], x)
    return bool(found)


@fxpasses.graph_pass
def keeps_half(gm: fx.GraphModule) -> bool:
    """Keeps products of a low-precision tensor and a number in low precision: right if all is float32."""
    changed = False
    for node in calls(gm, prims.convert_element_type.default):
        x = node.args[0]
        if node.args[1] is torch.float32 and x.meta["val"].dtype in (torch.float16, torch.bfloat16):
            for user in list(node.users):
                if user.target is aten.mul.Tensor and not isinstance(user.args[1], fx.Node):
                    narrow = call_before(user, aten.mul.Tensor, x, user.args[1])
                    in_place_of(user, prims.convert_element_type.default, narrow, torch.float32)
                    changed = True
    return changed


@fxpasses.graph_pass
def sigmoid_by_tanh(gm: fx.GraphModule) -> bool:
    """sigmoid(x) as (tanh(x / 2) + 1) / 2: right, except for large negative values, which lose all digits."""
    found = calls(gm, aten.sigmoid.default)
    for node in found:
        half = call_before(node, aten.mul.Tensor, node.args[0], 0.5)
        more = call_before(node, aten.add.Tensor, call_before(node, aten.tanh.default, half), 1.0)
        in_place_of(node, aten.mul.Tensor, more, 0.5)
    return bool(found)


def _lengths(x: Tensor) -> Tensor:
    return (x * x).sum(-1).sqrt() + 1


def _running(x: Tensor) -> Tensor:
    return x.exp().cumsum(-1).sin()


def _rows(x: Tensor) -> Tensor:
    return x.sin().sum(-1)


def _nothing(x: Tensor, y: Tensor) -> Tensor:
    return x.prod(0) * y.cos()


def _best(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.relu().argmax(-1), x.sin()


def _levels(x: Tensor) -> Tensor:
    return (x / 2).round() * 2


def _cells(index: Tensor) -> Tensor:
    return torch.div(index - 4, 3, rounding_mode="floor")


def _areas(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.int64) * b.to(torch.int64)


def _inside(x: Tensor) -> Tensor:
    return (x > -1) & (x < 1)


def _counted(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(9, 3).index_put((index,), x.sin(), accumulate=True)


def _pooled(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1), value=float("-inf")).unfold(-1, 3, 1).amax(-1)


def _length(x: Tensor) -> Tensor:
    return (x * x).sqrt() * 3


def _guarded(x: Tensor) -> Tensor:
    return torch.where(x.isnan() | x.isinf(), torch.zeros_like(x), x).sin()


def _masked(x: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, x.exp(), torch.zeros(3, 6)).sum(-1)


def _zeroed(x: Tensor) -> Tensor:
    return x * 0


def _shifted(x: Tensor) -> Tensor:
    return (x.relu() * -1) + 0.0


def _wide(x: Tensor) -> Tensor:
    return (x.float() * 1.7).sum(-1)


def _fixed(f: Any, *inputs: Any) -> Workload:
    """Build a workload from a function and factories of its inputs."""
    return lambda: (f, [make() for make in inputs])


@fxpasses.graph_pass(graphs=["joint"])
def open_at_its_end(gm: fx.GraphModule) -> bool:
    """Uses, at the left end of hardswish, the gradient of what comes after that end."""
    found = [node for node in calls(gm, aten.le.Scalar) if node.args[1] == -3]
    for node in found:
        in_place_of(node, aten.lt.Scalar, *node.args)
    return bool(found)


def _hardswish(x: Tensor, w: Tensor) -> Tensor:
    return F.hardswish(x @ w)


def _whole(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Any:
    return lambda: torch.randint(low, high, shape, dtype=dtype)


def _positive(*shape: int) -> Any:
    return lambda: (torch.rand(shape) + 0.1).requires_grad_()


PLANTS = {
    "vectors of one number": Plant((length_of_one,), _fixed(_lengths, _positive(5, 1))),
    "the last running sum": Plant((last_running_sum,), programs.function(_running, (3, 6))),
    "a tail too late": Plant((tail_too_late,), programs.function(_rows, (3, 13))),
    "a product of nothing": Plant((product_of_nothing,), programs.function(_nothing, (0, 4), (4,))),
    "the last of equals": Plant((last_of_equals,), programs.function(_best, (6, 8))),
    "halves rounded up": Plant((rounds_halves_up,), _fixed(_levels, _whole(0, 9, 12)), training=False),
    "halves rounded up, of numbers": Plant((rounds_halves_up,), programs.function(_levels, (5, 4))),
    "negative quotients": Plant((truncates_quotients,), _fixed(_cells, _whole(0, 12, 20)), training=False),
    "negative quotients, none yet": Plant(
        (truncates_quotients,), _fixed(_cells, _whole(4, 12, 20)), training=False
    ),
    "an overflow": Plant(
        (multiplies_in_32_bits,),
        _fixed(_areas, *(_whole(40000, 90000, 6, dtype=torch.int32) for _ in range(2))),
        training=False,
    ),
    "an overflow, not yet": Plant(
        (multiplies_in_32_bits,),
        _fixed(_areas, *(_whole(0, 9, 6, dtype=torch.int32) for _ in range(2))),
        training=False,
    ),
    "either for both": Plant((either_for_both,), programs.function(_inside, (9,)), training=False),
    "an index twice": Plant((last_write_wins,), _fixed(_counted, _positive(5, 3), lambda: torch.arange(5))),
    "zeros under a maximum": Plant((pads_a_maximum_with_zeros,), _fixed(_pooled, _positive(3, 6))),
    "the root of a square": Plant((root_of_a_square,), _fixed(_length, _positive(3, 6))),
    "guards against NaN": Plant((finite_anyway,), programs.function(_guarded, (3, 6))),
    "a mask as a factor": Plant(
        (mask_by_product,), _fixed(_masked, _positive(3, 6), lambda: torch.arange(18).view(3, 6) % 3 > 0)
    ),
    "minus zero": Plant((zero_without_a_sign,), programs.function(_zeroed, (3, 6))),
    "minus zero plus zero": Plant((drops_added_zero,), programs.function(_shifted, (3, 6))),
    "one of 40, large values only": Plant(
        (one_site_saturates,), programs.function(programs.forty_twice, (4,)), at=""
    ),
    "a gradient at -3": Plant((open_at_its_end,), programs.function(_hardswish, (4, 6), (6, 5))),
    "sigmoid by tanh": Plant((sigmoid_by_tanh,), programs.zoo("unrolled")),
    "half stays half": Plant((keeps_half,), programs.function(_wide, (3, 30), dtype=torch.float16)),
    "bfloat16 stays bfloat16": Plant((keeps_half,), programs.function(_wide, (3, 30), dtype=torch.bfloat16)),
}
