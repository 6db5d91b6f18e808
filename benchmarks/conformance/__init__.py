"""Compare a fake-tensor engine with eager, operator by operator.

``python -m benchmarks.conformance`` runs torch's own sample inputs (``op_db``, ``module_db``,
``custom_op_db``) on real and on fake tensors, and compares everything about the results except their values.
See ``docs/pages/conformance.md``.
"""

from benchmarks.conformance.command import main
from benchmarks.conformance.compare import Verdict
from benchmarks.conformance.engines import make_mode
from benchmarks.conformance.observe import Observation, TensorFacts, observe
from benchmarks.conformance.report import Tally
from benchmarks.conformance.sweep import Options, sweep

__all__ = [
    "Observation",
    "Options",
    "Tally",
    "TensorFacts",
    "Verdict",
    "main",
    "make_mode",
    "observe",
    "sweep",
]
