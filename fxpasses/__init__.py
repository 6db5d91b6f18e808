"""Graphs, passes and compilers between eager PyTorch and Inductor.

* ``torch.compile(model, backend="fxpasses", options={...})``: the backend (see :class:`Options`)
* :func:`capture`: the forward and backward graphs of a function or module
* :class:`PassManager`, :class:`Pass`, :class:`Contract`, :func:`graph_pass`: rewriting them
* :func:`pattern_pass`, :func:`replace_pattern`: rewriting them by pattern
* :func:`stats`: what the backend did
"""

from fxpasses import _companions  # noqa: F401  (before anything that imports what it checks)
from fxpasses.checking.bisect import bisect_script
from fxpasses.checking.model import check
from fxpasses.compiling.capture import Captured, SavedValue, capture
from fxpasses.compiling.history import Compilation, Miss, compilations, explain_miss, reset_compilations
from fxpasses.compiling.options import Options
from fxpasses.errors import (
    BisectError,
    CaptureError,
    ContractError,
    FxPassesError,
    HandoverError,
    OptionsError,
    PartitionError,
    PassError,
    PatternError,
    ShadowedPackageError,
    StageError,
    StructureError,
    ValueMismatchError,
)
from fxpasses.graphs.provenance import Provenance
from fxpasses.graphs.rewriting import insert_call
from fxpasses.partitioner import partition
from fxpasses.pass_manager.contract import Check, Contract, Pass, graph_pass
from fxpasses.pass_manager.groups import Fixpoint, FixpointWarning, fixpoint
from fxpasses.pass_manager.manager import PassManager, PassRun
from fxpasses.pass_manager.sites import claim
from fxpasses.passes.registry import available_passes, use_passes
from fxpasses.patterns import Match, NoMatchWarning, PatternPass, pattern_pass, replace_pattern
from fxpasses.regional import CostModel, RegionReport, regions
from fxpasses.report import annotated_code
from fxpasses.stats import Stats, reset_stats, stats

__all__ = [
    "BisectError",
    "CaptureError",
    "Captured",
    "Check",
    "Compilation",
    "Contract",
    "ContractError",
    "CostModel",
    "Fixpoint",
    "FixpointWarning",
    "FxPassesError",
    "HandoverError",
    "Match",
    "Miss",
    "NoMatchWarning",
    "Options",
    "OptionsError",
    "PartitionError",
    "Pass",
    "PassError",
    "PassManager",
    "PassRun",
    "PatternError",
    "PatternPass",
    "Provenance",
    "RegionReport",
    "SavedValue",
    "ShadowedPackageError",
    "StageError",
    "Stats",
    "StructureError",
    "ValueMismatchError",
    "annotated_code",
    "available_passes",
    "bisect_script",
    "capture",
    "check",
    "claim",
    "compilations",
    "explain_miss",
    "fixpoint",
    "graph_pass",
    "insert_call",
    "partition",
    "pattern_pass",
    "regions",
    "replace_pattern",
    "reset_compilations",
    "reset_stats",
    "stats",
    "use_passes",
]
