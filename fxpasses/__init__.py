"""Graphs, passes and compilers between eager PyTorch and Inductor.

* ``torch.compile(model, backend="fxpasses", options={...})``: the backend (see :class:`Options`)
* :func:`capture`: the forward and backward graphs of a function or module
* :class:`PassManager`, :class:`Pass`, :func:`graph_pass`: rewriting them
* :func:`stats`: what the backend did
"""

from fxpasses.capture import Captured, SavedValue, capture
from fxpasses.contract import Pass, graph_pass
from fxpasses.errors import (
    CaptureError,
    FxPassesError,
    HandoverError,
    OptionsError,
    PartitionError,
    PassError,
    StageError,
)
from fxpasses.manager import PassManager, PassRun
from fxpasses.options import Options
from fxpasses.partitioner import partition
from fxpasses.provenance import Provenance
from fxpasses.regional import CostModel, RegionReport, regions
from fxpasses.report import annotated_code
from fxpasses.rewriting import insert_call
from fxpasses.stats import Stats, reset_stats, stats

__all__ = [
    "CaptureError",
    "Captured",
    "CostModel",
    "FxPassesError",
    "HandoverError",
    "Options",
    "OptionsError",
    "PartitionError",
    "Pass",
    "PassError",
    "PassManager",
    "PassRun",
    "Provenance",
    "RegionReport",
    "SavedValue",
    "StageError",
    "Stats",
    "annotated_code",
    "capture",
    "graph_pass",
    "insert_call",
    "partition",
    "regions",
    "reset_stats",
    "stats",
]
