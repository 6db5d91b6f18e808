"""Does a fake-tensor engine give eager's answers? A program that asks, operator by operator.

``python -m fake.conformance`` runs torch's own sample inputs (``op_db``, ``module_db``, ``custom_op_db``) twice, on
real tensors and on fake ones, and compares all that can be told of a tensor without its values. See
``docs/conformance.md``.
"""

from fake.conformance.compare import Verdict
from fake.conformance.engines import make_mode
from fake.conformance.observe import Observation, TensorFacts, observe
from fake.conformance.report import Tally
from fake.conformance.sweep import Options, sweep

__all__ = ["Observation", "Options", "Tally", "TensorFacts", "Verdict", "make_mode", "observe", "sweep"]
