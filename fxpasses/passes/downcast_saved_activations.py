"""Save activations for the backward pass with half the bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graphs.provenance import is_backward
from fxpasses.graphs.rewriting import value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import calls_before, shape_of
from fxpasses.passes._options import require_at_least
from fxpasses.passes._saved import read_by_backward

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class DowncastSavedActivations(Pass):
    """Make the backward pass read large float32 activations rounded to bfloat16.

    The forward pass and its results are unchanged; what it saves takes half the memory. Gradients are those
    of slightly different activations: bfloat16 has the range of float32 and 8 bits of mantissa, so signs and
    zeros are kept and each activation is off by at most one part in 256.

    Before::

        y = aten.tanh(x)                                        # f32[64, 1024]
        ...
        grad_x = aten.mul(grad, aten.sub(1, aten.mul(y, y)))

    After::

        y = aten.tanh(x)
        kept = aten.view.dtype(prims.convert_element_type(y, bf16), int16)
        ...
        rounded = prims.convert_element_type(aten.view.dtype(kept, bf16), f32)
        grad_x = aten.mul(grad, aten.sub(1, aten.mul(rounded, rounded)))

    This deliberately changes gradients, so measure the model's quality with it. Small values (statistics of a
    norm) keep their precision. The bits are passed as integers because Inductor would remove two casts in a
    row.

    Attributes:
        min_elements: activations with fewer elements are left unchanged.
    """

    name: ClassVar[str] = "downcast_saved_activations"
    contract: ClassVar[Contract] = Contract("joint", numerics="none")
    min_elements: int = 16384

    def __post_init__(self) -> None:
        require_at_least(self, min_elements=0)

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for node, readers in read_by_backward(gm.graph).items():
            value, shape = value_of(node), shape_of(node)
            if shape is None or value.dtype is not torch.float32 or math.prod(shape) < self.min_elements:
                continue
            if is_backward(node) or not claim(node):
                continue  # values computed by the backward pass are computed from rounded values
            keep = calls_before(node.next, like=node)
            bits = keep(
                aten.view.dtype, keep(prims.convert_element_type.default, node, torch.bfloat16), torch.int16
            )
            take = calls_before(readers[0])
            rounded = take(
                prims.convert_element_type.default, take(aten.view.dtype, bits, torch.bfloat16), torch.float32
            )
            for reader in readers:
                reader.replace_input_with(node, rounded)
            changed = True
        return changed
