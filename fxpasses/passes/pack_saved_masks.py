"""Save masks for the backward pass as one bit per element instead of one byte."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graphs.rewriting import value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import calls_before, shape_of
from fxpasses.passes._options import require_at_least
from fxpasses.passes._saved import read_by_backward

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class PackSavedMasks(Pass):
    """Pack eight elements of a mask into a byte between the forward and the backward pass.

    Dropout and activation masks are saved as ``bool``, one byte per element. The mask is packed where it is
    computed and unpacked where a gradient is multiplied with it. The partitioner then saves the packed value,
    an eighth of the size.

    Before::

        keep = aten.gt(rand, 0.1)                                # bool[64, 128]
        ...
        grad_x = aten.mul(grad, keep)

    After::

        keep = aten.gt(rand, 0.1)
        rows = aten.view(keep, [8, -1])
        bits = rows[0] | rows[1] << 1 | ... | rows[7] << 7       # uint8[1024]
        ...
        again = aten.view(bits.unsqueeze(0) & [[1], [2], ..., [128]] != 0, [64, 128])
        grad_x = aten.mul(grad, again)

    Bitwise equal. It costs some time in both passes, for models that run out of memory.

    Attributes:
        min_elements: masks with fewer elements are left unchanged.
    """

    name: ClassVar[str] = "pack_saved_masks"
    contract: ClassVar[Contract] = Contract("joint", numerics="bitwise")
    min_elements: int = 4096

    def __post_init__(self) -> None:
        require_at_least(self, min_elements=0)

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for mask, readers in read_by_backward(gm.graph).items():
            value, shape = value_of(mask), shape_of(mask)
            if shape is None or value.dtype is not torch.bool or not value.is_contiguous():
                continue
            count = math.prod(shape)
            readers = [reader for reader in readers if _dtype(reader) is not torch.bool]
            if not readers:
                continue  # another mask is computed from it, and that one is packed
            if count < self.min_elements or count % 8 or not claim(mask):
                continue
            unpacked = _unpack(_pack(mask), readers[0], shape)
            for reader in readers:
                reader.replace_input_with(mask, unpacked)
            changed = True
        return changed


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(value_of(node), "dtype", None)


def _pack(mask: fx.Node) -> fx.Node:
    """Pack one eighth of the mask into each bit. Long rows keep the kernels of both passes vectorized."""
    call = calls_before(mask.next, like=mask)
    rows = call(aten.view.default, mask, [8, -1])
    zero = _byte(call, mask, 0)
    bits = [
        call(aten.where.self, call(aten.select.int, rows, 0, bit), _byte(call, mask, 1 << bit), zero)
        for bit in range(8)
    ]
    return functools.reduce(lambda a, b: call(aten.bitwise_or.Tensor, a, b), bits)


def _unpack(packed: fx.Node, reader: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    call = calls_before(reader)
    device = value_of(packed).device
    powers = call(
        prims.iota.default, 8, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
    )
    powers = call(aten.bitwise_left_shift.Tensor, _byte(call, packed, 1), _as_bytes(call, powers))
    bits = call(
        aten.bitwise_and.Tensor,
        call(aten.unsqueeze.default, packed, 0),
        call(aten.unsqueeze.default, powers, 1),
    )
    return call(aten.view.default, call(aten.ne.Scalar, bits, 0), list(shape))


def _byte(call: Callable[..., fx.Node], like: fx.Node, number: int) -> fx.Node:
    return call(aten.full.default, [], number, dtype=torch.uint8, device=value_of(like).device)


def _as_bytes(call: Callable[..., fx.Node], node: fx.Node) -> fx.Node:
    return call(prims.convert_element_type.default, node, torch.uint8)
