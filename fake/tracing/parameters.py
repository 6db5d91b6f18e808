"""Fake tensors of parameters, buffers and other ordinary tensors of static sizes, without torch's general description.

torch describes a tensor in some fifty fields before it makes a fake one of it: views, subclasses, sparse layouts, tensors under
``vmap``. Each parameter of a model is described twice in a compilation. An ordinary tensor needs its sizes, strides and
device, and the two entries in torch's tables by which another tensor on the same storage finds it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..tensor import forget
from . import _torch as _t
from .static_sizes import all_static

__all__ = ["fake_of_ordinary"]


def fake_of_ordinary(converter: Any, mode: Any, t: torch.Tensor, env: Any, context: Any) -> Any:
    """The fake tensor that torch's converter would make of ``t``, entered in its tables; None unless ``t`` is an ordinary
    tensor: dense, a leaf, at the start of a storage that no fake tensor has, without a gradient, and of static sizes.

    Args:
        converter: torch's ``FakeTensorConverter``, which does not know ``t`` yet.
        env: the mode's shape environment, or None for static sizes.
        context: which sizes are dynamic.
    """
    tables = converter.meta_converter
    if (
        type(t) not in _CLASSES
        or _t.dispatch_keys(t).raw_repr() not in _DENSE
        or t.dim() == 0  # its value may become a symbol
        or not t.is_leaf
        or t._is_view()
        or t.storage_offset() != 0
        or t.grad is not None
        or t.grad_dtype != t.dtype
        or getattr(t, "_is_buffer", False)
        or tables.copy_data
        or not (env is None or (context is not None and all_static(context)))
        or _t.structured_log_is_on()
        or torch.is_inference_mode_enabled()
        or _t.is_under_transform()
    ):
        return None
    storage = t.untyped_storage()
    if storage.nbytes() == 0 or storage in tables.describer.lookup_storage:
        return None
    with _t.no_dispatch():
        meta = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        made = _t.TorchFakeTensor(mode, meta, t.device)
    if t.requires_grad:
        made.requires_grad = True
    if type(t) is torch.nn.Parameter:
        made._is_param = True
    tables.hit += 1
    tables.arg_cnt += 1
    tables.tensor_memo[tables.describer.get_tensor_id(t)] = made
    tables.storage_memo[tables.describer.get_storage_id(storage)] = made.untyped_storage()
    forget(made)
    return made


_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
_DENSE = frozenset(_t.dense_key_sets())
