"""``torch._functorch``: AOTAutograd's settings, and its metadata about the outputs of a graph."""

from __future__ import annotations

from torch._functorch import config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import OutputType


def preferred_device_type() -> object | None:
    """Return torch's setting that allows tensors of different devices in one operator."""
    return getattr(config, "fake_tensor_prefer_device_type", None)
