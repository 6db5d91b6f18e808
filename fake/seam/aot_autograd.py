"""``torch._functorch``: AOTAutograd's settings, and what it knows of a graph's outputs."""

from __future__ import annotations

from torch._functorch import config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import OutputType


def preferred_device_type() -> object | None:
    """torch's setting that lets tensors of several devices meet."""
    return getattr(config, "fake_tensor_prefer_device_type", None)
