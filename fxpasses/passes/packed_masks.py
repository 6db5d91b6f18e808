"""Masks that are saved for the backward pass take a bit an element instead of a byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.contract import Contract, Pass
from fxpasses.passes._matching import calls_before, shape_of
from fxpasses.passes._saved import read_by_backward
from fxpasses.rewriting import value_of
from fxpasses.sites import claim

__all__ = ["PackedMasks"]

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class PackedMasks(Pass):
    """Keep eight elements of a mask in a byte from the forward to the backward pass.

    Dropout and activation masks are saved as ``bool``, a byte for each element. The mask is packed where it is made and
    unpacked where a gradient is multiplied with it; the partitioner then saves the packed value, an eighth of the size.

    Before::

        keep = aten.gt(rand, 0.1)                                # bool[64, 128]
        ...
        grad_x = aten.mul(grad, keep)

    After::

        keep = aten.gt(rand, 0.1)
        bits = aten.sum(keep.view(-1, 8).to(uint8) << [0 .. 7], [1])    # uint8[1024]
        ...
        again = (bits.unsqueeze(1) >> [0 .. 7] & 1).to(bool).view(64, 128)
        grad_x = aten.mul(grad, again)

    Bitwise. It costs a little time in both passes: for models that run out of memory.

    Attributes:
        min_elements: masks of fewer elements are left as they are.
    """

    name: ClassVar[str] = "packed_masks"
    contract: ClassVar[Contract] = Contract("joint", numerics="bitwise")
    min_elements: int = 4096

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for mask, readers in read_by_backward(gm.graph).items():
            value, shape = value_of(mask), shape_of(mask)
            if shape is None or value.dtype is not torch.bool or not value.is_contiguous():
                continue
            count = math.prod(shape)
            readers = [reader for reader in readers if _dtype(reader) is not torch.bool]
            if not readers:
                continue  # another mask is made of it: that one is packed
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
    call = calls_before(mask.next, like=mask)
    rows = call(aten.view.default, mask, [-1, 8])
    weights = call(aten.bitwise_left_shift.Tensor, *_ones_and_positions(mask, mask.next))
    bits = call(aten.where.self, rows, weights, call(aten.full.default, [], 0, **_bytes(mask)))
    return call(aten.sum.dim_IntList, bits, [1], dtype=torch.uint8)


def _unpack(packed: fx.Node, reader: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    call = calls_before(reader)
    ones, positions = _ones_and_positions(packed, reader)
    shifted = call(aten.bitwise_right_shift.Tensor, call(aten.unsqueeze.default, packed, 1), positions)
    bits = call(aten.bitwise_and.Tensor, shifted, ones)
    return call(aten.view.default, call(prims.convert_element_type.default, bits, torch.bool), list(shape))


def _bytes(like: fx.Node) -> dict[str, object]:
    return {"dtype": torch.uint8, "device": value_of(like).device}


def _ones_and_positions(like: fx.Node, anchor: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The number 1, and the numbers 0 to 7, as bytes."""
    call = calls_before(anchor, like=like)
    device = value_of(like).device
    positions = call(
        prims.iota.default, 8, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
    )
    return (
        call(aten.full.default, [], 1, **_bytes(like)),
        call(prims.convert_element_type.default, positions, torch.uint8),
    )
