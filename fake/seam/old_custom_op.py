"""``torch._custom_op``: the custom-op API of torch 2.0 to 2.3, as torch still has it. Imported only on
demand, because it imports torchgen."""

from __future__ import annotations

from torch._custom_op.impl import (
    SUPPORTED_DEVICE_TYPE_TO_KEY as DEVICE_KEYS,
    CustomOp,
    custom_op as object_custom_op,
    get_op,
    global_registry,
)
from torch._custom_ops import _destroy as destroy, custom_op, impl, impl_backward, impl_save_for_backward
