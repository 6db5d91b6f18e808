"""``torch._functorch``: AOTAutograd's settings, and what it knows of a graph's outputs."""

from __future__ import annotations

from torch._functorch import config
from torch._functorch._aot_autograd.schemas import OutputType
