"""``torch._inductor``: its settings, and the parts of it that AOTAutograd receives."""

from __future__ import annotations

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_custom_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import OutputCode
