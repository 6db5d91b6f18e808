"""Does a fake-tensor engine give eager's answers? A program that asks, operator by operator.

``python -m benchmarks.conformance`` runs torch's own sample inputs (``op_db``, ``module_db``, ``custom_op_db``) twice, on
real tensors and on fake ones, and compares all that can be told of a tensor without its values. See
``docs/pages/conformance.md``.
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
