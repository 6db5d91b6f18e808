"""Fake tensors of real ones: those of parameters and other ordinary tensors without torch's general description.

torch describes a tensor in some fifty fields before it makes a fake one of it: views, subclasses, sparse layouts, tensors under
``vmap``. Each parameter of a model is described twice in a compilation. An ordinary tensor needs its sizes, strides and
device, and the two entries in torch's tables by which another tensor on the same storage finds it.
"""

from __future__ import annotations

from typing import Any

import torch

from fake.seam.patches import LEDGER, Patch, When, always
from fake.tensors.tensor import forget
from fake.tracing import _torch as _t


def _describe_and_make(self: Any, *args: Any, callback: Any = None, **kwargs: Any) -> Any:
    """``MetaConverter.__call__``, which puts some of the tensors that it has made on another storage before it takes views of
    them: nothing may be remembered of a storage until it is done."""

    def make(make_meta: Any, device: Any) -> Any:
        made = callback(make_meta, device=device)
        if isinstance(made, _t.TorchFakeTensor):
            forget(made)
        return made

    return _original(self, *args, callback=callback and make, **kwargs)


def all_static(context: Any) -> bool:
    """Whether a context makes no symbol of any size or stride of a contiguous tensor."""
    return (
        isinstance(context, _t.StatelessSymbolicContext)
        and all(size is _t.DimDynamic.STATIC for size in context.dynamic_sizes)
        and all(stride is _t.DimDynamic.INFER_STRIDE for stride in context.dynamic_strides)
        and not any(context.constraint_sizes)
        and not any(context.constraint_strides)
        and not any(context.specialize_on or ())
    )


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
        if meta.untyped_storage().nbytes() != storage.nbytes():
            return None  # a part of it: how much of the storage there is in the end differs between releases of torch
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


_original = _t.MetaConverter.__call__
_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})
_DENSE = frozenset(_t.dense_key_sets())

PATCHES = LEDGER.add(
    Patch(
        _t.MetaConverter,
        "__call__",
        always(_describe_and_make),
        when=When.COMPILATION,
        lost="what is remembered of a storage, and is wrong once views are taken on another one",
    )
)
