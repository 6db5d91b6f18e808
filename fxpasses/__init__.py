"""Graphs, passes and compilers between eager PyTorch and Inductor.

* ``torch.compile(model, backend="fxpasses", options={...})``: the backend (see :class:`Options`)
* :func:`compile`: the same backend, except that a later process reuses its results without compiling
* :func:`tune`: measure which passes and options make a model fastest
* :func:`save`, :func:`load`: write compiled results to one file, and read them back
* :func:`capture`: the forward and backward graphs of a function or module
* :class:`PassManager`, :class:`Pass`, :class:`Contract`, :func:`graph_pass`: rewrite graphs with passes
* :func:`pattern_pass`, :func:`replace_pattern`: rewrite graphs by pattern
* :func:`stats`: what the backend did
"""

from typing import TYPE_CHECKING

from fxpasses import _companions  # noqa: F401  (must run before anything imports the packages it checks)

# isort: split
from fxpasses.ranks import here  # noqa: F401  (other ranks may query this one before it compiles)

# isort: split
from fake.seam.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:  # otherwise imported on first access, so that importing this package needs no torch
    from fxpasses.checking.bisecting.bisection import bisect_script
    from fxpasses.checking.model import check
    from fxpasses.compiling.history import Compilation, Miss, compilations, explain_miss, reset_compilations
    from fxpasses.compiling.options import Options
    from fxpasses.counters import Stats, reset_stats, stats
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
        RankMismatchError,
        ReportError,
        ShadowedPackageError,
        StageError,
        StructureError,
        ValueMismatchError,
    )
    from fxpasses.graphs.provenance import Provenance
    from fxpasses.graphs.rewriting import insert_call
    from fxpasses.partitioner import partition
    from fxpasses.pass_manager.groups import Fixpoint, FixpointWarning, fixpoint
    from fxpasses.pass_manager.manager import PassManager, PassRun
    from fxpasses.pass_manager.pass_base import Check, Contract, Pass, graph_pass
    from fxpasses.pass_manager.sites import claim
    from fxpasses.passes.registry import available_passes, use_passes
    from fxpasses.patterns import Match, NoMatchWarning, PatternPass, pattern_pass, replace_pattern
    from fxpasses.pipeline.capture_graphs import Captured, SavedValue, capture
    from fxpasses.plans.compile import Compiled, compile
    from fxpasses.plans.errors import PlanFileError, PlanMismatchError
    from fxpasses.plans.portable import load, save
    from fxpasses.regional import CostModel, RegionReport, regions
    from fxpasses.reports.page import report
    from fxpasses.reports.text import annotated_code
    from fxpasses.tuning.tune import Tuned, tune

__all__ = [
    "BisectError",
    "CaptureError",
    "Captured",
    "Check",
    "Compilation",
    "Compiled",
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
    "PlanFileError",
    "PlanMismatchError",
    "Provenance",
    "RankMismatchError",
    "RegionReport",
    "ReportError",
    "SavedValue",
    "ShadowedPackageError",
    "StageError",
    "Stats",
    "StructureError",
    "Tuned",
    "ValueMismatchError",
    "annotated_code",
    "available_passes",
    "bisect_script",
    "capture",
    "check",
    "claim",
    "compilations",
    "compile",
    "explain_miss",
    "fixpoint",
    "graph_pass",
    "insert_call",
    "load",
    "partition",
    "pattern_pass",
    "regions",
    "replace_pattern",
    "report",
    "reset_compilations",
    "reset_stats",
    "save",
    "stats",
    "tune",
    "use_passes",
]

__getattr__, __dir__ = lazy_names(__name__)
