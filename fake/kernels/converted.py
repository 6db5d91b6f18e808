"""Rules that convert arguments as eager does; torch's own versions refuse them unconverted."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.fake_tensor import torch_result


@rule("aten::_unsafe_masked_index", "aten::_unsafe_masked_index_put_accumulate")
def _masked_index(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Convert the mask to bool: any nonzero value is true."""
    self, mask, *others = args
    with mode:
        mask = mask.to(torch.bool)
    return torch_result(mode, func, (self, mask, *others), kwargs)


@rule("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def _embedding_bag(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Convert indices and offsets to the dtype that both promote to."""
    weight, *integers = args[:3]
    common = torch.promote_types(*(value.dtype for value in integers))
    with mode:
        integers = [value.to(common) for value in integers]
    return torch_result(mode, func, (weight, *integers, *args[3:]), kwargs)


@rule("aten::index.Tensor")
def _index(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Treat ``uint8`` indices as masks."""
    self, indices = args
    if all(index is None or index.dtype is not torch.uint8 for index in indices):
        return NotImplemented
    with mode:
        return func(
            self, [i if i is None or i.dtype is not torch.uint8 else i.to(torch.bool) for i in indices]
        )
