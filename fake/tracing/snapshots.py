"""What ``make_fx`` notes on each node about its value, without asking the value again.

While it traces, ``make_fx`` keeps an alias of every fake tensor in ``node.meta["val"]`` and its layout in
``node.meta["tensor_meta"]``: some forty questions and a dispatch per tensor. A tensor that this package's cache made knows
its interned metadata, from which both follow.
"""

from __future__ import annotations

import weakref
from typing import Any

from fake import _torch as _t
from fake.cache.stored import mark_of
from fake.seam.patches import LEDGER, Patch, When, always
from fake.tensors.metadata import TensorMetadata
from fake.tensors.tensor import make_fake
from fake.tracing._torch import proxy_tensor

__all__ = ["PATCHES"]


def snapshot_fake(val: Any, include_real: bool = False) -> Any:
    """``proxy_tensor.snapshot_fake``: a detached alias of a fake tensor."""
    metadata = _known(val)
    if metadata is None:
        return _SNAPSHOT(val, include_real)
    mode = val.fake_mode
    with _t.disable_torch_dispatch():
        element = val._plain.as_strided(metadata.shape, metadata.stride, metadata.offset)
        return make_fake(element, metadata.device, mode, metadata, mark_of(mode), _t.TorchFakeTensor)


def extract_tensor_metadata(result: Any, include_contiguity: bool = True) -> Any:
    """``shape_prop._extract_tensor_metadata``: layout, gradient requirement and memory format, as a named tuple."""
    metadata = _known(result) if include_contiguity else None
    if metadata is None:
        return _EXTRACT(result, include_contiguity)
    layouts = _LAYOUTS.get(metadata)
    if layouts is None:
        layouts = _LAYOUTS[metadata] = {}
    requires_grad = result.requires_grad
    layout = layouts.get(requires_grad)
    if layout is None:
        layout = layouts[requires_grad] = _EXTRACT(result)
    return layout._replace(qparams={})


def _known(value: Any) -> TensorMetadata | None:
    """The plain metadata of a tensor that torch's own mode made on this package's cache."""
    kind: Any = type(value)  # an exact class, which the type checker would take for the declared one
    if kind is not _t.TorchFakeTensor:
        return None
    metadata = value._interned
    if type(metadata) is not TensorMetadata or value.constant is not None or value.real_tensor is not None:
        return None
    return metadata if value._plain is not None else None


_SNAPSHOT = proxy_tensor.snapshot_fake
_EXTRACT = proxy_tensor._extract_tensor_metadata
_LAYOUTS: weakref.WeakKeyDictionary[TensorMetadata, dict[bool, Any]] = weakref.WeakKeyDictionary()

_LOST = "time: make_fx asks each value of a graph forty questions about its layout"

PATCHES = LEDGER.add(
    Patch(proxy_tensor, "snapshot_fake", always(snapshot_fake), when=When.COMPILATION, lost=_LOST),
    Patch(
        proxy_tensor,
        "_extract_tensor_metadata",
        always(extract_tensor_metadata),
        when=When.COMPILATION,
        lost=_LOST,
    ),
)
